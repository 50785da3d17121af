"""Find the first NaN or infinity in a failed step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import feeds_of
from onnx_fuse.ops.rules import is_float
from onnx_fuse.runtime import ort
from onnx_fuse.training.spec import Spec


def fault_of(
    spec: Spec,
    feeds: Iterable[str],
    arrays: Mapping[str, Array],
    outputs: Mapping[str, Array],
    build: Callable[[], tuple[ir.Model, Spec]],
) -> str:
    """A sentence about a step whose loss or gradient norm is not finite.

    `feeds` names those of the `arrays` that the caller fed, the others are states; `outputs` holds
    the loss and the norm, and `build` makes the graph of the step.
    """
    head = f"the loss is {float(outputs[spec.loss])}"
    if np.isfinite(outputs[spec.loss]):
        head = f"the norm of the gradients is {float(outputs[spec.norm])}"
    bad = {k for k, a in arrays.items() if a.dtype.kind == "f" and not np.isfinite(a).all()}
    for name in (*feeds, *arrays):
        if name in bad:
            return f"{head}; '{name}' holds a value that is not finite"
    try:
        with ort.faults("looking for the first value that is not finite"):
            return f"{head}; {_first_not_finite(build()[0], arrays)}"
    except ModelError as error:  # it lacks many operators in 16 bits; the step's fault counts
        return f"{head}; {error}"


def _first_not_finite(model: ir.Model, feeds: Mapping[str, Array]) -> str:
    """Names the node that first makes a value that is not finite out of finite ones.

    Nodes that make NaN or +inf come before those that make -inf, which masks do on purpose.
    """
    graph = model.graph
    makers = {v.name: n for n in graph for v in n.outputs if v.name and n.op_type != "Constant"}
    graph.outputs.clear()
    # of floats alone: Python gets no tensor of 4 bits from onnxruntime
    results = (v for n in makers.values() for v in n.outputs if v.name in makers)
    graph.outputs.extend(v for v in results if v.dtype is None or is_float(v))
    names = [str(v.name) for v in graph.outputs]
    run = ort.session(model, as_written=True)
    arrays = ort.run(run, feeds_of(model, feeds), names)
    values = dict(feeds) | dict(zip(names, arrays, strict=True))
    suspects: list[tuple[bool, bool, int, str]] = []
    for name in names:
        value, node = values[name], makers[name]
        if value.dtype.kind != "f" or np.isfinite(value).all():
            continue
        sources = [values.get(str(v.name)) for v in node.inputs if v is not None]
        clean_in = all(a is None or a.dtype.kind != "f" or np.isfinite(a).all() for a in sources)
        masks = not (np.isnan(value) | np.isposinf(value)).any()
        kind = "nan" if np.isnan(value).any() else "-inf" if masks else "inf"
        label = f"'{name}', the result of the {node.op_type} node '{node.name}', is the first to be"
        suspects.append((not clean_in, masks, len(suspects), f"{label} {kind}"))
    return min(suspects)[-1] if suspects else "all values of the graph are finite"
