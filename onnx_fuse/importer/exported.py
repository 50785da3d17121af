"""Models of PyTorch where a path goes: an ONNXProgram, or an nn.Module with its arguments.

torch is not imported here for a model that is none of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import onnx

from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.ir.constants import Model, one_line


def exported(model: Any, args: object = None, dynamic_shapes: object = None) -> Model:
    """The model that was given, or the ONNX model of what PyTorch calls one.

    Args:
        model: Anything; a torch.onnx.ONNXProgram and a torch.nn.Module are converted. A module is
            exported in inference mode; its own mode stays.
        args: Arguments of a module's forward: a tensor, a tuple, or a dict by name.
        dynamic_shapes: As torch.onnx.export has it. The default leaves the first axis of every
            tensor open, where the module allows that.

    Raises:
        UsageError: A module comes without `args`, or another model with them.
        ModelError: torch cannot export the module.
    """
    if hasattr(model, "model_proto"):
        model = model.model_proto
    elif _is_module(model):
        if args is None:
            raise UsageError("an nn.Module needs `args`, the arguments that its forward is run on")
        return _export(model, args, dynamic_shapes)
    if args is not None:
        raise UsageError("`args` are the arguments of an nn.Module, and the model is none")
    return model


def _is_module(model: object) -> bool:
    return any(f"{c.__module__}.{c.__name__}" == "torch.nn.modules.module.Module"
               for c in type(model).__mro__)  # fmt: skip


def _export(module: Any, args: object, dynamic_shapes: object) -> onnx.ModelProto:
    import torch

    named: dict[str, Any] = dict(args) if isinstance(args, Mapping) else {}
    positional = () if named else args if isinstance(args, tuple) else (args,)
    if dynamic_shapes is None:
        dynamic_shapes = (
            {name: _first_axis(value) for name, value in named.items()}
            if named
            else tuple(_first_axis(value) for value in positional)
        )
    modes = {each: each.training for each in module.modules()}
    if any(type(m).__name__.startswith("Dropout") and m.p > 0 and m.training for m in modes):
        warnings.warn(
            "the module is exported in inference mode: its Dropout is not in the graph",
            stacklevel=4,
        )
    try:
        module.eval()
        program = torch.onnx.export(
            module, positional, kwargs=named or None, dynamic_shapes=dynamic_shapes, dynamo=True,
            verbose=False,
        )  # fmt: skip
    except Exception as error:
        if not type(error).__module__.startswith("torch"):
            raise
        raise ModelError(f"torch cannot export the module: {one_line(error)}") from error
    finally:
        for each, mode in modes.items():
            each.training = mode
    return program.model_proto


def _first_axis(value: object) -> Any:
    """Its first axis is open; of one row the exporter would make a size that stays one."""
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    return {0: torch.export.Dim.AUTO} if value.dim() and len(value) > 1 else {}
