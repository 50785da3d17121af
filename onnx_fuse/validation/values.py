"""Any values of a graph, computed by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir
from onnx_ir import Value

from onnx_fuse.runtime import ort
from onnx_fuse.session import InferenceSession
from onnx_fuse.validation.inputs import Feeds


def values_of(
    model: onnx_ir.Model,
    feeds: Feeds,
    names: Sequence[str],
    *,
    as_written: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """The values called `names` when the model runs on `feeds`."""
    model = model.clone()
    model.graph.outputs[:] = list(by_name(model, names).values())
    if device != "cpu":
        got = InferenceSession(model, device=device, optimize=False).run(names, feeds)
        return dict(zip(names, got, strict=True))
    with ort.faults("blame"):
        session = ort.session(model, as_written=as_written)
        return dict(zip(names, ort.run(session, feeds, names), strict=True))


def by_name(model: onnx_ir.Model, names: Sequence[str]) -> dict[str, Value]:
    known = {v.name: v for node in model.graph for v in node.outputs}
    known |= {v.name: v for v in (*model.graph.inputs, *model.graph.initializers.values())}
    return {name: known[name] for name in names}
