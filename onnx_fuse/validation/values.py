"""Values inside of a graph, computed by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnx_fuse.program.call import Program, Tensor
from onnx_fuse.runtime import ort
from onnx_fuse.validation.inputs import Feeds
from onnx_fuse.validation.request import Request


def values_of(
    model: ir.Model,
    feeds: Feeds,
    names: Sequence[str],
    request: Request | None = None,
    *,
    as_written: bool = False,
    kernels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The values called `names` when the model runs on `feeds`, where the request says.

    On "cuda" `kernels` takes the name of the kernel that writes each of them.
    """
    request = request or Request()
    model = model.clone()
    model.graph.outputs[:] = list(by_name(model, names).values())
    with ort.faults("the values inside the graph"):
        session = request.session(model, as_written=as_written)
        results = dict(zip(names, ort.run(session, feeds, names), strict=True))
    if kernels is not None and request.device != "cpu":
        kernels.update(writers(session.program(feeds)[0]))
    return results


def writers(program: Program) -> dict[str, str]:
    """What writes each output of a program: the operator's kernels, and which candidate of them."""
    last = {t.buffer: call for call in program.calls for _, t in call.writes}
    kernels = {}
    for name, value in program.outputs:
        call = last.get(value.buffer) if isinstance(value, Tensor) else None
        if call is not None:
            kernels[name] = f"{call.kernel} ({call.choice.how})" if call.choice else call.kernel
    return kernels


def by_name(model: ir.Model, names: Sequence[str]) -> dict[str, Value]:
    values = {v.name: v for node in model.graph for v in node.outputs}
    values |= {v.name: v for v in (*model.graph.inputs, *model.graph.initializers.values())}
    return {name: values[name] for name in names}
