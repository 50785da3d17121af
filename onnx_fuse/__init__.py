"""Fuse, run, differentiate and train ONNX models; LayerNormalization goes into the Gemm."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType

TYPE_CHECKING = False  # typing's own would take a third of this import
if TYPE_CHECKING:
    from typing import Any

    from onnx_fuse.api import gradient as gradient
    from onnx_fuse.api import load as load
    from onnx_fuse.api import optimize as optimize
    from onnx_fuse.errors import CheckFailed as CheckFailed
    from onnx_fuse.errors import DataError as DataError
    from onnx_fuse.errors import DeviceError as DeviceError
    from onnx_fuse.errors import ModelError as ModelError
    from onnx_fuse.errors import OnnxFuseError as OnnxFuseError
    from onnx_fuse.errors import UsageError as UsageError
    from onnx_fuse.session import InferenceSession as InferenceSession
    from onnx_fuse.training import optim as optim

__version__ = "0.1.0"

# Public name -> module; a name is imported when first used, so that `import onnx_fuse` is instant.
_NAMES = {
    "CheckFailed": "errors",
    "DataError": "errors",
    "DeviceError": "errors",
    "InferenceSession": "session",
    "ModelError": "errors",
    "OnnxFuseError": "errors",
    "Trainer": "training.trainer",
    "UsageError": "errors",
    "gradient": "api",
    "load": "api",
    "optimize": "api",
}
_MODULES = {"backend": "backend", "optim": "training.optim", "validate": "validate"}

__all__ = [*_NAMES, *_MODULES, "__version__"]


_TABLE = frozenset(("Max", "Min", "Mod", "floor", "sqrt"))
"""Functions that onnx_ir puts into a table when it is imported."""


class _Sympy(ModuleType):
    """sympy until something of it is used: then the real one takes its place.

    onnx_ir imports it for arithmetic on symbolic sizes, which no pass here does: 0.3 s of a cold
    start. importlib's LazyLoader does not serve: a second import statement ends its laziness.
    """

    def __getattr__(self, name: str) -> Any:
        caller = sys._getframe(1)
        module = str(caller.f_globals.get("__name__"))
        at_import = caller.f_code.co_name == "<module>" and module.startswith("onnx_ir.")
        if at_import and name in _TABLE:  # they need sympy when called
            return lambda *args: getattr(self, name)(*args)
        if sys.modules.get("sympy") is self:
            del sys.modules["sympy"]
        return getattr(importlib.import_module("sympy"), name)


def _defer_sympy() -> None:
    spec = importlib.machinery.PathFinder.find_spec("sympy")
    if spec is not None and not {"sympy", "onnx_ir"} & set(sys.modules):
        module = sys.modules["sympy"] = _Sympy("sympy")
        module.__spec__, module.__file__ = spec, spec.origin


_defer_sympy()


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f"onnx_fuse.{_NAMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"onnx_fuse.{_MODULES[name]}")
    raise AttributeError(f"module 'onnx_fuse' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
