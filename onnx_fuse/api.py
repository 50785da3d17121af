"""Functions from a model to a model: each answers in the kind that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from onnx_fuse import session
from onnx_fuse.onnx.common import Model
from onnx_fuse.onnx.save import attach_functions, to_proto

if TYPE_CHECKING:
    import onnx
    import onnx_ir

Result: TypeAlias = "onnx.ModelProto | bytes | onnx_ir.Model"


def load(model: Model) -> Result:
    """The model checked and as the passes read it, in the kind it came in.

    Its opset is brought up, its local functions are inlined; fused ops stay, and carry their
    bodies. A path gives a ModelProto, and so does a ModelProto; bytes give bytes, an ir.Model an
    ir.Model. The argument stays as it was. Raises ModelError.
    """
    return _in_kind(model, session.load(model))


def optimize(
    model: Model,
    *,
    level: int = 2,
    fuse: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> Result:
    """The fused model, in the kind it came in (see `load`).

    The result runs on stock onnxruntime: every fused op carries its body as an ONNX function. Inner
    values have no shapes, but in an ir.Model (see `onnx.save.save`). Raises ModelError, UsageError.
    """
    from onnx_fuse import passes

    graph = session.load(model)
    passes.optimize(graph, level=level, fuse=fuse, skip=skip)
    return _in_kind(model, graph)


def gradient(
    model: Model, wrt: Sequence[str] | None = None, loss: str | None = None, **options: Any
) -> Result:
    """The model with its backward, in the kind it came in (see `load`).

    Arguments, inputs, outputs and errors are those of `autodiff.gradient`.
    """
    from onnx_fuse import autodiff

    return _in_kind(model, autodiff.gradient(model, wrt, loss, **options))


def _in_kind(source: Model, result: onnx_ir.Model) -> Result:
    import onnx_ir

    if isinstance(source, onnx_ir.Model):
        attach_functions(result)
        return result
    proto = to_proto(result, shapes=False)
    return proto.SerializeToString() if isinstance(source, bytes) else proto
