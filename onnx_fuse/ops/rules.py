"""Rewrite rules, and the helpers that they match graphs with.

A rule is anchored at one kind of node and walks from there. What is a formula of its inputs is
text (`ops.patterns`). Where views lie between, or weights are packed, it is a function, which knows
the reason when it stops: `Rewriter.refuse` is what `--explain` prints.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import (
    Builder,
    Concatenated,
    add_initializer,
    all_nodes,
    const_array,
    dim,
    given,
    rank,
    required,
    subgraphs,
)
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import Names
from onnx_fuse.ir.traits import REARRANGES
from onnx_fuse.reasons import Reason

PACKED = "onnx_fuse.packed"
"""metadata key of an initializer that a pass made of the model's own ones; see `rewrite.params`."""
CONSTANT = "onnx_fuse.constant"
"""metadata key of an initializer that is no parameter of the model: a pass made it, or it was the
value of a Constant node, or a fold took it as constant at some of its readers."""
TRAINS = "onnx_fuse.trains"
"""meta key, while a model is prepared for training, of what trains: no rule takes its number."""
REST = ".rest"
"""What follows the name of a part of a packed parameter whose other readers took it as constant."""
REGION = "onnx_fuse.contrib"
"""metadata key, within `rewrite.optimize`, of the nodes of a contrib operator's body."""


@dataclass(frozen=True)
class Refusal:
    """A place of the graph that nearly matched a fusion."""

    fusion: str
    """The name of the fusion."""
    nodes: tuple[str, ...]
    """The labels of the nodes."""
    reason: Reason
    """Why they stay."""
    ops: tuple[str, ...] = ()
    """The operators of the nodes, by which they are found again in the result."""


CONDITIONS = {
    "readers": "nothing else reads the values within, and none of them is an output of the graph",
    "constants": "the constants have the values of the formula",
    "weights": "weights and constants are no inputs of the graph",
    "types": "no value within is cast to another type and back",
    "ranks": "the ranks of the inputs are known",
    "sizes": "the sizes of the inputs are known where the formula needs them",
    "body": "no node lies in the body of an If, Loop or Scan without the others",
}
"""What a rule may ask of a graph beside the operators of its pattern."""


@dataclass(frozen=True)
class Rule:
    """A rewrite around one kind of node."""

    name: str
    """The name of the fusion, which --fuse and --skip take."""
    level: int
    """The lowest optimization level that runs the rule."""
    anchors: tuple[str, ...]
    """The op_types of the nodes that the rule starts at."""
    apply: Callable[[Rewriter, ir.Node], bool]
    """`apply(rw, node)` rewrites the graph around `node` and returns True, or returns False."""
    training: bool = True
    """Whether the rule also runs on graphs that train."""
    conditions: str = ""
    """Names of CONDITIONS: where a single one does not hold, some graph is left as it was."""


ADDED: list[Rule] = []
"""The rules of operators that a user has registered (`plugins`), which run after all others."""


@dataclass
class Rewriter:
    """A model that rules rewrite, and the report about it."""

    model: ir.Model
    training: bool = False
    """Whether the model trains, so that every parameter must stay recoverable."""
    for_kernels: Container[str] = ()
    """The names of rewrites that pay: some cost time on onnxruntime's CPU, and pay on a GPU."""
    fusions: Counter[str] = field(default_factory=Counter)
    """How often each rewrite was applied."""
    refusals: list[Refusal] = field(default_factory=list)
    """The places that nearly matched a fusion."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the report."""

    @property
    def graph(self) -> ir.Graph:
        """The main graph of the model."""
        return self.model.graph

    def refuse(self, fusion: str, nodes: Sequence[ir.Node], reason: Reason | str) -> Literal[False]:
        """Record why nodes that nearly match stay as they are; return False for the rule.

        The reason of a plug-in's rule is a sentence.
        """
        names, ops = tuple(label(n) for n in nodes), tuple(n.op_type for n in nodes)
        why = Reason("plugin", text=reason) if isinstance(reason, str) else reason
        refusal = Refusal(fusion, names, why, ops)
        if refusal not in self.refusals:
            self.refusals.append(refusal)
        return False

    def replace(
        self, at: ir.Node, op: Builder, old: Sequence[ir.Value], new: Sequence[ir.Value]
    ) -> bool:
        """Insert the builder's nodes before `at` and let `new` take over all uses of `old`.

        The last new node inherits the name, doc string and metadata of the node that it replaces.
        Nodes that nobody reads any more go with the next dead-code pass. Returns True, for a rule
        to return.
        """
        required(at.graph).insert_before(at, op.nodes)
        for domain in dict.fromkeys(node.domain for node in op.nodes if node.domain):
            self.graph.opset_imports.setdefault(domain, 1)
        for old_value, new_value in zip(old, new, strict=True):
            new_value.type = old_value.type or new_value.type
            new_value.shape = old_value.shape or new_value.shape
            name = old_value.name
            old_value.name = f"{name}.replaced"
            new_value.name = name
            old_value.replace_all_uses_with(new_value, replace_graph_outputs=True)
        if not self.training:
            freeze_shared(old, op.nodes)
        source, target = old[-1].producer(), new[-1].producer()
        if source is not None and REGION in source.metadata_props:
            for node in op.nodes:
                node.metadata_props[REGION] = source.metadata_props[REGION]
        if source is not None and target is not None and target in op.nodes:
            target.name, target.doc_string = source.name, source.doc_string
            target.metadata_props.update(source.metadata_props)
        return True

    def initializer(self, stem: str, array: np.ndarray) -> ir.Value:
        """A new constant of the main graph; equal small constants are made once."""
        key = f"const.{stem}"
        existing = self.graph.initializers.get(key)
        if existing is not None:
            held = const_array(existing)  # by its bytes: -0.0 equals 0.0, but is another constant
            same = held is not None and (held.dtype, held.shape) == (array.dtype, array.shape)
            if same and held is not None and held.tobytes() == array.tobytes():
                return existing
        name = Names.of(self.graph).fresh(key)
        value = add_initializer(self.graph, name, array)
        value.metadata_props[CONSTANT] = "1"
        return value

    def zeros(self, like: ir.Value, *shape: int) -> ir.Value:
        """An initializer of zeros to add, in the dtype of `like`; a scalar without `shape`.

        They are -0.0, which leaves every number as it is: -0.0 + 0.0 is 0.0.
        """
        dtype = (like.dtype or ir.DataType.FLOAT).numpy()
        stem = "x".join(["zero", np.dtype(dtype).name, *map(str, shape)])
        return self.initializer(stem, np.full(shape, -0.0, dtype))

    def pack(
        self,
        op: Builder,
        parts: Sequence[ir.Value],
        perm: Sequence[int] | None,
        axis: int | None,
        stem: str,
    ) -> ir.Value:
        """Make concat(axis, [transpose(part, perm)]) an initializer that remembers its parts.

        In training, a part with other readers stays where it is and is packed by nodes, because two
        copies of a tied parameter would differ after the first update.
        """
        if self.training and any(len(p.uses()) > 1 or p.is_graph_output() for p in parts):
            moved = [part if perm is None else op.Transpose(part, perm=perm) for part in parts]
            return typed(moved[0] if axis is None else op.Concat(*moved, axis=axis), parts[0])
        entries: list[dict[str, object]] = []
        arrays = []
        for part in parts:
            array = required(const_array(part))
            made_of = json.loads(part.metadata_props.get(PACKED, "null"))
            if made_of is None:
                # the readers that are left of a frozen parameter do not answer by its name
                rest = not self.training and CONSTANT in part.metadata_props
                name = f"{part.name}{REST if rest else ''}"
                made_of = {"parts": [{"name": name, "shape": list(array.shape), "perm": None}]}
            assert len(made_of["parts"]) == 1, "a packed initializer is not packed twice"
            entry = dict(made_of["parts"][0])
            if perm is not None:
                inner = entry["perm"] or list(range(array.ndim))
                entry["perm"] = [inner[p] for p in perm]
            entries.append(entry)
            arrays.append(array if perm is None else array.transpose(perm))
        record = json.dumps({"axis": axis, "parts": entries}, sort_keys=True)
        for value in self.graph.initializers.values():
            if value.metadata_props.get(PACKED) == record:
                return value
        packed: np.ndarray | Concatenated = (
            np.asarray(arrays[0], order="C") if axis is None else Concatenated(arrays, axis)
        )
        # Always a new one: sharing equal bytes of another origin would tie them in training.
        value = add_initializer(self.graph, Names.of(self.graph).fresh(f"const.{stem}"), packed)
        value.metadata_props[PACKED] = record
        return value


def _part_names(value: ir.Value) -> Collection[str]:
    record = value.metadata_props.get(PACKED)
    return _recorded_names(record) if record else (value.name or "",)


@lru_cache(1024)  # each node that goes asks this of every initializer
def _recorded_names(record: str) -> frozenset[str]:
    return frozenset(part["name"] for part in json.loads(record)["parts"])


def _has_readers(value: ir.Value, gone: Collection[ir.Node]) -> bool:
    """Whether the graph returns a value, or a node that is not gone reads more than its shape."""
    readers = (use.node for use in value.uses())
    return value.is_graph_output() or any(
        node not in gone and node.op_type not in ("Shape", "Size") for node in readers
    )


def freeze_shared(old: Sequence[ir.Value], new: Sequence[ir.Node] = ()) -> None:
    """Make constants of parameters that lose some of their readers: gradients would be partial.

    `old` are values that nobody reads any more. Parameters that nodes behind them read, and none
    of the `new` nodes, are frozen where others still read them.
    """
    gone: set[ir.Node] = set()
    todo = [value.producer() for value in old]
    while todo:
        node = todo.pop()
        if node is None or node in gone or any(_has_readers(v, gone) for v in node.outputs):
            continue
        gone.add(node)
        todo += [value.producer() for value in node.inputs if value is not None]
    still = {name for node in new for v in node.inputs if v is not None for name in _part_names(v)}
    freeze((v for node in gone for v in node.inputs), gone, still)


def freeze(
    lost: Iterable[ir.Value | None], gone: Collection[ir.Node] = (), still: Collection[str] = ()
) -> None:
    """Make constants of the parameters among `lost` that nodes other than `gone` read.

    Those named in `still` stay. A part of a packed parameter is renamed instead: the other parts
    have all of their readers.
    """
    for value in set(lost):
        if value is None or value.graph is None or not is_initializer(value) or not is_float(value):
            continue
        names = {*_part_names(value)}.difference(still)
        for other in value.graph.initializers.values() if names else ():
            if names.isdisjoint(_part_names(other)) or not _has_readers(other, gone):
                continue
            if PACKED not in other.metadata_props:
                other.metadata_props[CONSTANT] = "1"
                continue
            record = json.loads(other.metadata_props[PACKED])
            for part in record["parts"]:
                part["name"] += REST if part["name"] in names else ""
            other.metadata_props[PACKED] = json.dumps(record, sort_keys=True)


# ---- vocabulary of matching ------------------------------------------------------------------


def label(node: ir.Node) -> str:
    """The name by which a user knows a node: its own, or that of its first output."""
    return node.name or (node.outputs[0].name if node.outputs else None) or node.op_type


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that computes `value`, when it is one of ONNX's `op_types`."""
    node = value.producer() if value is not None else None
    return node if node and not node.domain and node.op_type in op_types else None


def consumers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read `value`, each once, in the order they were added."""
    return list(dict.fromkeys(node for node, _ in value.uses()))


def sole_consumer(value: ir.Value) -> ir.Node | None:
    """The single node that reads `value`, if there is one and the graph does not return it."""
    nodes = consumers(value)
    return nodes[0] if len(nodes) == 1 and not value.is_graph_output() else None


def readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read the numbers of `value`: Shape nodes will do with any value like it."""
    return [node for node in consumers(value) if node.op_type != "Shape"]


def sole_reader(value: ir.Value) -> ir.Node | None:
    """The single node that reads the numbers of `value`, if the graph does not return it."""
    nodes = readers(value)
    return nodes[0] if len(nodes) == 1 and not value.is_graph_output() else None


def combined_with(value: ir.Value, op_type: str) -> tuple[ir.Node, ir.Value] | None:
    """The Add or Mul that alone reads `value`, and its other operand."""
    node = sole_consumer(value)
    if node is None or node.domain or node.op_type != op_type:
        return None
    operand = other_operand(node, value)
    return None if operand is None or operand is value else (node, operand)


def scalar(value: ir.Value | None) -> float | None:
    """The number a value holds, when it is a constant with one element and does not train."""
    if value is None or (value.const_value is None and producer(value, "Constant") is None):
        return None
    if TRAINS in value.meta:
        return None
    if value.shape is not None and any(d != 1 for d in value.shape):
        return None
    array = const_array(value)
    if array is None or array.size != 1 or array.dtype.kind in "USOb":
        return None
    return float(array.reshape(()).astype(np.float64))


def nan_guard(value: ir.Value) -> ir.Node | None:
    """The Where that takes `value` but 0 for NaN, as exporters guard attention; in any branch."""
    for node, place in value.uses():
        test = producer(node.inputs[0], "IsNaN") if node.op_type == "Where" and place == 2 else None
        same = test is not None and test.inputs[0] is value
        if same and scalar(node.inputs[1]) == 0 and rank(node.outputs[0]) == rank(value):
            return node
    return None


def number(node: ir.Node, index: int) -> float | None:
    """The number that operand `index` of an elementwise node of two inputs holds.

    None too where it could raise the rank of the result: [1, 1] against a vector.
    """
    if len(node.inputs) != 2:
        return None
    held, size = scalar(node.inputs[index]), rank(node.inputs[1 - index])
    array = const_array(node.inputs[index]) if held is not None else None
    fits = array is not None and (array.ndim == 0 or (size is not None and array.ndim <= size))
    return held if fits else None


def is_additive_identity(value: ir.Value | None) -> bool:
    """Whether `value` is the one number that an addition of floats never shows: -0.0."""
    held = scalar(value)
    return held == 0 and bool(np.signbit(held))


def is_constant(value: ir.Value | None) -> bool:
    """Whether the content of a value is fixed: an initializer, or a Constant node."""
    return value is not None and ir.convenience.get_const_tensor(value) is not None


def is_initializer(value: ir.Value | None) -> bool:
    """Whether a value is an initializer that is no input of the graph."""
    return value is not None and value.is_initializer() and not value.is_graph_input()


def constant_ints(value: ir.Value | None) -> list[int] | None:
    """A constant integer tensor as a flat list."""
    array = const_array(value)
    return None if array is None or array.dtype.kind not in "iu" else [int(i) for i in array.flat]


def attribute(node: ir.Node, name: str, default: object = None) -> Any:
    """The value of an attribute, or the default where it is absent or a reference."""
    declared = node.attributes.get(name)
    return default if declared is None or declared.is_ref() else declared.value


@dataclass(frozen=True)
class Cut:
    """What a Split, or a Slice of step 1, takes of a tensor along one axis."""

    source: ir.Value
    axis: int | None
    """Counted from the front; None where the rank is unknown or it is not one axis."""
    start: int | None
    end: int | None
    """Where it begins and ends, counted from the front; None where that is unknown."""
    node: ir.Node


def cut_of(value: ir.Value | None) -> Cut | None:
    """How a Split or a Slice takes a value from a tensor."""
    node = value.producer() if value is not None else None
    source = node.inputs[0] if node is not None and node.inputs else None
    if node is None or source is None or node.domain:
        return None
    size = rank(source)
    if node.op_type == "Split":
        axis = attribute(node, "axis", 0) % size if size else None
        sizes = [dim(v, axis or 0) for v in node.outputs[: node.outputs.index(value) + 1]]
        start = None if None in sizes[:-1] else sum(n or 0 for n in sizes[:-1])
        end = None if start is None or sizes[-1] is None else start + sizes[-1]
        return Cut(source, axis, start, end, node)
    starts, ends, axes, steps = (constant_ints(given(node, i)) for i in range(1, 5))
    unstepped = steps == [1] or given(node, 4) is None
    if node.op_type != "Slice" or starts is None or len(starts) != 1 or not unstepped:
        return None
    axes = [0] if given(node, 3) is None else axes
    axis = axes[0] % size if size and axes is not None and len(axes) == 1 else None
    length = dim(source, axis) if axis is not None else None
    if length is not None and ends:
        return Cut(source, axis, *slice(starts[0], ends[0]).indices(length)[:2], node)
    return Cut(source, axis, starts[0], None, node) if starts[0] >= 0 else None


def other_operand(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The other operand of a two-input node."""
    a, b = node.inputs[0], node.inputs[1]
    return b if a is value else a if b is value else None


def is_float(value: ir.Value | None) -> bool:
    """Whether a value is known to have a floating-point dtype."""
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def typed(
    value: ir.Value,
    like: ir.Value | None,
    shape: ir.Shape | Sequence[int | str | ir.SymbolicDim | None] | None = None,
) -> ir.Value:
    """`value` with the dtype of `like` and, where known, a shape: the next rule looks at both."""
    if like is not None and like.dtype is not None:
        value.dtype = like.dtype
    if shape is not None:
        value.shape = shape if isinstance(shape, ir.Shape) else ir.Shape(shape)
    return value


def cast_to(op: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    """`value` in the dtype of `like`, where that is known."""
    if like.dtype is None or value.dtype == like.dtype:
        return value
    return typed(op.Cast(value, to=like.dtype.value), like, value.shape)


# A view moves whole rows where the elements of a row stay one axis, in their order: it commutes
# with whatever works along that axis, which may lie elsewhere for a while (NCHW and back).

_VIEWS = 64
"""Views that are climbed over at most."""


def row_axis(node: ir.Node, axis: int) -> int | None:
    """The axis of the first input (Concat: of all) that lies along `axis` of the first output.

    None where the view mixes or changes that axis, or is no view.
    """
    x, y = node.inputs[0] if node.inputs else None, node.outputs[0]
    size = rank(x)
    if x is None or not size or node.domain or not 0 <= axis < (rank(y) or 0):
        return None
    match node.op_type:
        case "Identity":
            return axis
        case "Transpose":
            perm = attribute(node, "perm", list(range(size))[::-1])
            return int(perm[axis])
        case "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze":
            return _same_axis(x, y, axis)
        case "Concat" | "Split":
            return axis if attribute(node, "axis", 0) % size != axis else None
        case "Gather":
            along, picked = attribute(node, "axis", 0) % size, rank(node.inputs[1])
            if picked is None:
                return None
            return axis if axis < along else axis - picked + 1 if axis >= along + picked else None
        case "Slice":
            axes = constant_ints(node.inputs[3]) if len(node.inputs) > 3 else list(range(size))
            return axis if axes is not None and all(a % size != axis for a in axes) else None
    return None


def _same_axis(x: ir.Value, y: ir.Value, axis: int) -> int | None:
    """The axis of `x` that a reshape to `y` leaves whole as `axis`."""
    assert x.shape is not None
    assert y.shape is not None
    for i in range(len(x.shape)):
        if dim(x, i) is None or dim(x, i) != dim(y, axis):
            continue
        for ours, theirs in (
            (x.shape[:i], y.shape[:axis]),
            (x.shape[i + 1 :], y.shape[axis + 1 :]),
        ):
            count = _count(ours)
            if count is not None and count == _count(theirs):
                return i
    return None


def _count(dims: Sequence[int | ir.SymbolicDim]) -> tuple[int, tuple[str, ...]] | None:
    """The product of sizes, as a number and symbols; None where one is not known."""
    number, symbols = 1, []
    for size in dims:
        if isinstance(size, int):
            number *= size
        elif size.value is None:
            return None
        else:
            symbols.append(str(size.value))
    return number, tuple(sorted(symbols))


def through_row_views(
    value: ir.Value | None, pad: bool = False
) -> tuple[ir.Value | None, list[ir.Node]]:
    """Climb over views that move whole rows: the value below them all, and the views upward.

    Slices joined again by a Concat (a roll) count, when all of them are of one value; with `pad` a
    Pad that adds rows of zeros does. The rows lie along the last axis at both ends.
    """
    size = rank(value)
    climb = _climb(value, size - 1, pad, {}, _VIEWS) if value is not None and size else None
    return (value, []) if climb is None else climb


_Climb = tuple[ir.Value, list[ir.Node]]


def _climb(
    value: ir.Value,
    axis: int,
    pad: bool,
    seen: dict[tuple[ir.Value, int], _Climb | None],
    left: int,
) -> _Climb | None:
    """`through_row_views` for rows along `axis`; None where that never becomes the last axis."""
    if (value, axis) in seen:
        return seen[value, axis]
    node = value.producer()
    below = row_axis(node, axis) if node is not None and left else None
    if node is not None and left and pad and _pads_rows(node, axis):
        below = axis
    result = None
    if node is not None and below is not None:
        sources = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        climbs = [_climb(v, below, pad, seen, left - 1) for v in sources if v is not None]
        complete = [climb for climb in climbs if climb is not None]
        if len(complete) == len(sources) and all(base is complete[0][0] for base, _ in complete):
            views = dict.fromkeys(view for _, views in complete for view in views)
            result = complete[0][0], [*views, node]
    if result is None and axis == (rank(value) or 0) - 1:
        result = value, []
    seen[value, axis] = result
    return result


def _pads_rows(node: ir.Node, axis: int) -> bool:
    """Whether a Pad adds zeros, and along other axes than `axis` alone."""
    if node.op_type != "Pad" or node.domain or attribute(node, "mode", "constant") != "constant":
        return False
    if given(node, 2) is not None and scalar(node.inputs[2]) != 0:
        return False
    size, pads = rank(node.inputs[0]), constant_ints(node.inputs[1])
    if size is None or given(node, 3) is not None:
        return False
    return pads is not None and pads[axis] == pads[axis + size] == 0


def consumer_views(value: ir.Value) -> list[ir.Node]:
    """The chain of views after `value`, each the only reader of the one before.

    Views only move elements, so elementwise operators may run before them.
    """
    views: list[ir.Node] = []
    while (node := sole_reader(value)) is not None:
        if node.domain or node.op_type not in REARRANGES or node.inputs[0] is not value:
            break
        views.append(node)
        value = node.outputs[0]
    return views


def replay_views(
    op: Builder, views: Sequence[ir.Node], old: ir.Value | None, new: ir.Value
) -> ir.Value:
    """The same views as over `old`, over `new`, a value of its shape."""
    moved = {old: new}
    for view in views:
        copied = op.node(
            view.op_type,
            [moved.get(v, v) for v in view.inputs],
            outputs=len(view.outputs),
            attributes=view.attributes,
        )
        outputs = copied if isinstance(copied, tuple) else (copied,)
        for before, after in zip(view.outputs, outputs, strict=True):
            moved[before] = new = typed(after, new, before.shape)
            move_shape_readers(before, new)
    return moved[views[-1].outputs[0]] if views else new


def move_shape_readers(old: ir.Value | None, new: ir.Value) -> None:
    """Shape nodes that read `old` read `new`, of the same shape, so that `old` may die."""
    for reader in consumers(old) if old is not None else ():
        if reader.op_type == "Shape":
            reader.replace_input_with(0, new)


def nodes_in_order(graph: ir.Graph, anchors: Sequence[str]) -> Iterator[ir.Node]:
    """The anchor nodes of a graph and its subgraphs, skipping those rewritten away meanwhile."""
    for node in list(all_nodes(graph)):
        if node.op_type in anchors and node.domain in _READ and node.graph is not None:
            yield node


_READ = ("", FUSE, "com.microsoft")
"""Domains whose operators are known here; an operator of any other domain is left unchanged."""


# ---- bodies of If, Loop and Scan -------------------------------------------------------------


@contextlib.contextmanager
def isolated_subgraphs(graph: ir.Graph) -> Iterator[None]:
    """While it lasts no rule can see across the edge of a body.

    A value that a body takes from outside has no producer in there and no reader of the outside,
    and outside the node that holds the body reads it. So nothing is moved into a body, which may
    run often or never, or out of it. Constants are the same everywhere and stay as they are.
    """
    taken: list[tuple[ir.Node, int, list[tuple[int, ir.Value]]]] = []
    _detach_bodies(graph, taken)
    try:
        yield
    finally:
        # The outer edges first: what stands in for an outer value may itself be taken further in.
        for node, count, stand_ins in taken:
            for index, stand_in in stand_ins:
                stand_in.replace_all_uses_with(required(node.inputs[index]))
            node.resize_inputs(count)


def _detach_bodies(
    graph: ir.Graph, taken: list[tuple[ir.Node, int, list[tuple[int, ir.Value]]]]
) -> None:
    for node in graph:
        bodies = [body for held in node.attributes.values() for body in subgraphs(held)]
        if not bodies:
            continue
        count, stand_ins = len(node.inputs), []
        for body in bodies:
            for value, readers in _captured(body).items():
                stand_in = ir.Value(name=value.name, type=value.type, shape=value.shape)
                for reader, index in readers:
                    reader.replace_input_with(index, stand_in)
                node.resize_inputs(len(node.inputs) + 1)
                node.replace_input_with(len(node.inputs) - 1, value)
                stand_ins.append((len(node.inputs) - 1, stand_in))
        taken.append((node, count, stand_ins))
        for body in bodies:
            _detach_bodies(body, taken)


def _captured(body: ir.Graph) -> dict[ir.Value, list[tuple[ir.Node, int]]]:
    """The values that a body and bodies in it read from outside, and where, without constants."""
    inner = [body, *body.subgraphs()]
    local: set[ir.Value] = set()
    for each in inner:
        local.update(each.inputs, each.initializers.values(), *(node.outputs for node in each))
    readers: dict[ir.Value, list[tuple[ir.Node, int]]] = {}
    for each in inner:
        for node in each:
            for index, value in enumerate(node.inputs):
                if value is not None and value not in local and not is_constant(value):
                    readers.setdefault(value, []).append((node, index))
    return readers
