"""The nodes of a fused model that make it differ from the original."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir
from onnx_ir import DataType, Value

from onnx_fuse.arrays import Array
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import functions_attached, fused_function
from onnx_fuse.ir.constants import Model
from onnx_fuse.ops.bodies import carries_body
from onnx_fuse.validation import values
from onnx_fuse.validation.compare import Difference, Tolerance, alike, difference, severity
from onnx_fuse.validation.inputs import Feeds
from onnx_fuse.validation.request import Request
from onnx_fuse.validation.values import by_name


@dataclass(frozen=True)
class Culprit:
    """A node of the fused model that turns right inputs into wrong outputs."""

    nodes: list[str]
    """Names of the nodes; several where the fault cannot be attributed to one of them."""
    ops: list[str]
    """Operators of `nodes`, in the same order."""
    output: str
    """The value that is wrong though the values it is computed from are right."""
    max_abs: float
    """The largest absolute difference in `output`."""
    limit: float
    """The absolute difference that is allowed there."""
    where: str
    """The place of the largest difference, as `name[index]`."""
    confirmed: bool
    """Whether the model is right once `output` is replaced by the original's value."""

    def __str__(self) -> str:
        nodes = ", ".join(f"{op} '{name}'" for op, name in zip(self.ops, self.nodes, strict=True))
        return f"{nodes}: {self.where} is off by {self.max_abs:.3g} (limit {self.limit:.3g})"


ORACLE = "/oracle"  # suffix of the inputs that carry the original's values


def find_culprits(
    original: Model,
    fused: Model,
    feeds: Feeds,
    tolerance: Tolerance,
    request: Request | None = None,
    *,
    as_written: bool = True,
) -> list[Culprit]:
    """The nodes of `fused` that are wrong on their own, the worst first.

    Fusions keep the names of the values they leave, so the fused graph can be cut at every value
    that the original has too: each piece then gets the original's values and must give the
    original's. All pieces run in one session, whatever the number of nodes. A culprit is confirmed
    by running the fused model with the original's value in place of the culprit's output. Where
    every piece is right and the whole is wrong, the fused nodes are turned back into their bodies
    by bisection. Both run `as_written`, or with onnxruntime's own optimizations.
    """
    values_of = partial(values.values_of, as_written=as_written)
    reference, suspect = read(original), read(fused)
    expected = values_of(reference, feeds, _computed_names(reference))
    common = [name for name in _computed_names(suspect) if name in expected]
    seen = values_of(suspect, feeds, common)
    # A value that kept its name but changed its layout cannot be compared with the original's.
    common = [n for n in common if alike(expected[n], seen[n])]
    cut = _cut(suspect, {name: expected[name] for name in common})
    oracle_feeds = feeds | {name + ORACLE: expected[name] for name in common}
    got = values_of(cut, oracle_feeds, common, request)
    wrong = {
        name: d
        for name in common
        if not (d := difference(name, expected[name], got[name], tolerance)).ok
    }
    outputs = [v.name or "" for v in suspect.graph.outputs]
    if wrong:
        repaired = _cut(suspect, {name: expected[name] for name in wrong})
        patched = feeds | {name + ORACLE: expected[name] for name in wrong}
        after = values_of(repaired, patched, outputs, request)
        confirmed = all(
            name in wrong or difference(name, expected[name], after[name], tolerance).ok
            for name in outputs
        )
        # A node with several outputs, or one that a Split follows, makes several wrong values.
        culprits: dict[tuple[str, ...], Culprit] = {}
        for d in sorted(wrong.values(), key=severity, reverse=True):
            culprit = _culprit(cut, d, confirmed)
            culprits.setdefault(tuple(culprit.nodes), culprit)
        return list(culprits.values())
    return _bisect(
        suspect, feeds, [(n, expected[n]) for n in outputs], tolerance, values_of, request
    )


def _computed_names(model: ir.Model) -> list[str]:
    return [
        v.name
        for node in model.graph
        for v in node.outputs
        if v.name and (v.uses() or v.is_graph_output())
    ]


def _cut(model: ir.Model, arrays: Mapping[str, Array]) -> ir.Model:
    """A copy in which every reader of a named value reads the new input `name/oracle` instead."""
    model = model.clone()
    for name, value in by_name(model, list(arrays)).items():
        kind = DataType.from_numpy(arrays[name].dtype)
        source = Value(name=name + ORACLE, type=ir.TensorType(kind))
        for use in tuple(value.uses()):
            use.node.replace_input_with(use.idx, source)
        model.graph.inputs.append(source)
    return model


def _culprit(cut: ir.Model, d: Difference, confirmed: bool) -> Culprit:
    """The piece of the cut model that ends in the wrong value: its fused nodes, or all of it."""
    piece: list[ir.Node] = []
    todo = [by_name(cut, [d.output])[d.output].producer()]
    while todo:
        node = todo.pop()
        if node is not None and node not in piece:
            piece.append(node)
            todo.extend(v.producer() for v in node.inputs if v is not None)
    piece.reverse()
    fused = [node for node in piece if carries_body(node)]
    nodes = fused or piece
    return Culprit(
        [n.name or (n.outputs[0].name or "") for n in nodes],
        [n.op_type for n in nodes],
        d.output,
        d.max_abs,
        d.limit,
        d.where,
        confirmed,
    )


def _bisect(
    model: ir.Model,
    feeds: Feeds,
    expected: Sequence[tuple[str, Any]],
    tolerance: Tolerance,
    values_of: Callable[..., dict[str, Any]],
    request: Request | None,
) -> list[Culprit]:
    """The fused node whose return to its body, with all before it, makes the outputs right."""
    fused = [node.outputs[0].name or "" for node in model.graph if carries_body(node)]
    names = [name for name, _ in expected]

    def worst(count: int) -> Difference | None:
        """The largest failing difference when the first `count` fused nodes run as their bodies."""
        got = values_of(_with_bodies(model, set(fused[:count])), feeds, names, request)
        parts = [difference(name, a, got[name], tolerance) for name, a in expected]
        return max((d for d in parts if not d.ok), key=severity, default=None)

    failing = worst(0)
    if failing is None or worst(len(fused)) is not None:
        return []
    low, high = 0, len(fused)  # `low` nodes as bodies fail, `high` pass
    while high - low > 1:
        middle = (low + high) // 2
        failure = worst(middle)
        low, high, failing = (middle, high, failure) if failure else (low, middle, failing)
    node = next(n for n in model.graph if n.outputs and n.outputs[0].name == fused[low])
    return [
        Culprit(
            [node.name or fused[low]],
            [node.op_type],
            fused[low],
            failing.max_abs,
            failing.limit,
            failing.where,
            True,
        )
    ]


def _with_bodies(model: ir.Model, outputs: set[str]) -> ir.Model:
    """A copy in which the fused nodes with these first outputs are replaced by their bodies."""
    from onnx_ir.passes.common import InlinePass

    model = model.clone()
    for node in model.graph:
        if carries_body(node) and node.outputs[0].name in outputs:
            key = (node.domain, node.op_type, "body")
            if key not in model.functions:
                opset = model.graph.opset_imports[""]
                body = model.functions.get(node.op_identifier()) or fused_function(
                    node.op_type, opset, node.overload, node.domain
                )
                body = body.clone()
                body.overload = "body"
                model.functions[key] = body
            node.overload = "body"
    with functions_attached(model):
        InlinePass(criteria=lambda f: f.overload == "body")(model)
    return model
