"""Functions that take a model and return a model of the same kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from onnx_fuse import session
from onnx_fuse.errors import UsageError, unknown
from onnx_fuse.importer import training_info
from onnx_fuse.importer.exported import exported
from onnx_fuse.importer.save import attach_functions, loadable, to_proto
from onnx_fuse.ir.constants import Model

if TYPE_CHECKING:
    import os

    import onnx
    import onnx_ir

    from onnx_fuse.rewrite import Report

__all__ = ["gradient", "hvp", "load", "optimize"]
__dir__ = __all__.copy

Result: TypeAlias = "onnx.ModelProto | bytes | onnx_ir.Model"
Kind = TypeVar("Kind", "onnx.ModelProto", bytes, "onnx_ir.Model")


@overload
def load(model: Kind) -> Kind: ...


@overload
def load(model: str | os.PathLike[str]) -> onnx.ModelProto: ...


def load(model: Model) -> Result:
    """Check a model and bring it to the form that the passes read.

    The model's opset is raised to the one that this package works in, and its local functions are
    inlined. Fused operators stay nodes, and the result carries their bodies.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model. It is not changed.

    Returns:
        The model in the kind that was given; a path gives a ModelProto.

    Raises:
        ModelError: The file is malformed, or uses what is not supported.
    """
    return in_kind(model, session.load(model))


@overload
def optimize(
    model: Kind, args: None = None, *, level: int = 2, fuse: Sequence[str] = (),
    skip: Sequence[str] = (), precision: str = "fp32", report: Literal[False] = False,
) -> Kind: ...  # fmt: skip


@overload
def optimize(
    model: Any, args: object = None, *, level: int = 2, fuse: Sequence[str] = (),
    skip: Sequence[str] = (), precision: str = "fp32", report: Literal[False] = False,
) -> onnx.ModelProto: ...  # fmt: skip


@overload
def optimize(
    model: Any, args: object = None, *, level: int = 2, fuse: Sequence[str] = (),
    skip: Sequence[str] = (), precision: str = "fp32", report: Literal[True],
) -> tuple[Result, Report]: ...  # fmt: skip


def optimize(
    model: object,
    args: object = None,
    *,
    level: int = 2,
    fuse: Sequence[str] = (),
    skip: Sequence[str] = (),
    precision: str = "fp32",
    report: bool = False,
) -> Result | tuple[Result, Report]:
    """Fuse a model.

    The result runs on stock onnxruntime, since it carries the body of every fused operator as an
    ONNX function. A ModelProto has no shapes of inner values, because onnxruntime's CPU runs slower
    with them; `onnx.shape_inference` adds them.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model, or a torch.onnx.ONNXProgram or
            torch.nn.Module. It is not changed.
        args: The arguments of a module's forward, which it is exported with in inference mode.
        level: 0 brings the graph to one form, 1 adds exact fusions, 2 merges MatMuls and tidies
            layouts too, 3 adds rewrites that round differently (`rewrite.LEVELS`).
        fuse: Names of fusions to turn on whatever the level (`rewrite.FUSIONS`).
        skip: Names of fusions to turn off.
        precision: "fp16" or "bf16" for a model in 16 bits, whose inputs and outputs keep their
            types. What is beyond float16's range, and attention whose mask has such numbers, stays
            float32.
        report: True also returns a Report: the number of fused operators by name (`fusions`), the
            nodes that were not fused, each with `reason` and `code` (`not_fused`), `notes`, and the
            numbers of nodes by operator, `before` and `after`.

    Returns:
        The model in the kind that was given; a path gives a ModelProto. With `report` a tuple of
        the model and the Report.

    Raises:
        ModelError: The file is malformed, or uses what is not supported.
        UsageError: There is no such level, fusion or precision, or a module comes without `args`.
    """
    from onnx_fuse import rewrite
    from onnx_fuse.rewrite.precision import in_precision

    if precision not in FILE_PRECISIONS:
        raise UsageError(unknown("precision of a file", precision, FILE_PRECISIONS))
    model = exported(model, args)
    graph = session.load(model)
    done = rewrite.optimize(graph, level=level, fuse=fuse, skip=skip)
    graph, _ = in_precision(graph, precision, stored=True)
    result = in_kind(model, loadable(graph))
    return (result, done) if report else result


FILE_PRECISIONS = ("fp32", "fp16", "bf16")


@overload
def gradient(
    model: Kind,
    wrt: Sequence[str] | None = None,
    loss: str | None = None,
    order: int = 1,
    **options: object,
) -> Kind: ...


@overload
def gradient(
    model: str | os.PathLike[str],
    wrt: Sequence[str] | None = None,
    loss: str | None = None,
    order: int = 1,
    **options: object,
) -> onnx.ModelProto: ...


def gradient(
    model: Model,
    wrt: Sequence[str] | None = None,
    loss: str | None = None,
    order: int = 1,
    **options: object,
) -> Result:
    """Append the backward of a model to it: a graph that computes gradients on any runtime.

    Without `loss` the result computes a vector-Jacobian product: each float output `y` gets an
    input `y.grad` of its shape, and each name `w` of `wrt` gets an output `w.grad` of w's shape
    and dtype. With `loss` it has an input `labels` and a scalar output `loss` instead of the
    `y.grad`. Characters of names that a shell would need quoted become "_" in the new names.
    Sizes of inputs that have one name in the file must be equal: a node refuses others.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model. It is not changed.
        wrt: Initializers, outputs of Constant nodes or graph inputs to differentiate by. The
            default is every weight that has a gradient: float initializers, and Constant nodes
            that stand where weights do, except scalars.
        loss: A loss by name, such as cross_entropy or mse (`docs/training.md` has all of them), or
            the name of a scalar output.
        order: 2 adds Hessian-vector products: an input `w.vector` for each `w.grad`, and the output
            `w.hvp`, the gradient by w of the sum of all `w.grad` times their `w.vector`.
        **options: Options of the loss, such as ignore_index or label_smoothing
            (docs/training.md).

    Returns:
        The model in the kind that was given; a path gives a ModelProto.

    Raises:
        ModelError: The file is malformed, a node on the way has no gradient, or onnxruntime does
            not load the result.
        UsageError: There is no such loss, option or tensor.
    """
    from onnx_fuse import autodiff
    from onnx_fuse.runtime import ort

    result = autodiff.gradient(model, wrt, loss, order, **options)
    ort.guarded(lambda: bool(ort.session(result)), "the gradient graph")
    return in_kind(model, result, shapes=True)  # by which its own gradient can be taken


def hvp(
    model: Model,
    feeds: Mapping[str, Any],
    vectors: Mapping[str, Any],
    *,
    loss: str,
    device: str = "cpu",
    **options: object,
) -> dict[str, Any]:
    """The product of a loss's Hessian with vectors, by the names of weights or inputs.

    For many products, take `gradient(..., order=2)` once and run it in a session.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model.
        feeds: The model's inputs and the labels.
        vectors: What the Hessian multiplies: arrays by the names of the weights and inputs that it
            is taken by, of their shapes. Others count as constants.
        loss: As of `gradient`, and so are `options`.
        device: "cpu", "cuda" or "cuda:1".
        **options: Options of the loss.

    Returns:
        An array for each of `vectors`.

    Raises the errors of `gradient`, and of a session that runs its result.
    """
    from onnx_fuse import autodiff

    graph = autodiff.gradient(model, list(vectors), loss, 2, **options)
    results = autodiff.gradient_names(graph.graph.outputs)
    seeds = dict(zip(results, autodiff.gradient_names(graph.graph.inputs).values(), strict=True))
    given = {seeds[name]: vector for name, vector in vectors.items()}
    run = session.InferenceSession(graph, device=device)
    return dict(zip(results, run.run([*results.values()], {**feeds, **given}), strict=True))


def in_kind(source: Model, result: onnx_ir.Model, *, shapes: bool = False) -> Result:
    """A resulting model in the kind of the given one; a path gives a ModelProto."""
    import onnx_ir

    if isinstance(source, onnx_ir.Model):
        attach_functions(result)
        return result
    proto = to_proto(result, shapes=shapes)
    proto.MergeFrom(training_info.kept(result))
    return proto.SerializeToString() if isinstance(source, bytes) else proto
