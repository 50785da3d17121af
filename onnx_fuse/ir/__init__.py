"""ONNX files and graphs: reading, checking, building, evaluating and writing them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_TABLE = frozenset(("Max", "Min", "Mod", "floor", "sqrt"))
"""Functions that onnx_ir puts into a table when it is imported."""


class _Sympy(ModuleType):
    """A stand-in for sympy in onnx_ir, which imports the real one when something of it is used.

    onnx_ir asks for it for arithmetic on symbolic sizes, which few models need: 0.2 s of a cold
    start. importlib's LazyLoader does not serve: a second import statement ends its laziness.
    """

    def __getattr__(self, name: str) -> Any:
        code = sys._getframe(1).f_code
        if code.co_name == "<module>" and name in _TABLE:  # they need sympy when called
            return lambda *args: getattr(self, name)(*args)
        return getattr(importlib.import_module("sympy"), name)


def _import_onnx_ir() -> None:
    """Import onnx_ir without sympy. It gets a stand-in, which no other module sees."""
    if {"sympy", "onnx_ir"} & set(sys.modules):
        return
    sys.modules["sympy"] = _Sympy("sympy")
    try:
        importlib.import_module("onnx_ir")
    finally:
        del sys.modules["sympy"]


_import_onnx_ir()
