"""Changes to a graph that keep what it computes, up to rounding: its answer needs no oracle.

Each change takes a model in place and answers whether it could. `equivalent` makes one to three of
them: what is fused is written out, transposes and reshapes are pushed through, sums re-associated,
values renamed, nodes put in another order, batches taken apart and joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, helper, numpy_helper

UNARY = {
    *("Abs", "Neg", "Relu", "Sigmoid", "Tanh", "Exp", "Erf", "Sqrt", "Softplus", "Softsign"),
    *("Gelu", "LeakyRelu", "Elu", "HardSwish", "Mish", "Cast", "Floor", "Ceil", "Round", "Sign"),
    *("Sin", "Cos", "Identity", "Not"),
}
"""Operators whose entries depend on one entry of one input each."""
SUMS = {"Add", "Mul"}
Change = Callable[[ModelProto, np.random.Generator], bool]
Around = Callable[[ModelProto, NodeProto], list[NodeProto]]


def _inner(model: ModelProto) -> set[str]:
    """Names that bodies of If, Loop and Scan use: they stay as they are."""
    names: set[str] = set()
    graphs = [a.g for n in model.graph.node for a in n.attribute if a.type == AttributeProto.GRAPH]
    while graphs:
        graph = graphs.pop()
        for node in graph.node:
            names |= {*node.input, *node.output}
            graphs += [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
        names |= {v.name for v in (*graph.input, *graph.output, *graph.initializer)}
    return names


def _replace(model: ModelProto, index: int, nodes: list[NodeProto]) -> None:
    """The node at an index by others."""
    rest = list(model.graph.node)
    rest[index : index + 1] = nodes
    del model.graph.node[:]
    model.graph.node.extend(rest)


def _drawn(model: ModelProto, rng: np.random.Generator, among: set[str]) -> int | None:
    fits = [i for i, n in enumerate(model.graph.node) if n.op_type in among and not n.domain]
    return int(rng.choice(fits)) if fits else None


def _constant(model: ModelProto, array: np.ndarray, stem: str) -> str:
    taken = {t.name for t in model.graph.initializer}
    name = next(f"{stem}{i}" for i in range(len(taken) + 1) if f"{stem}{i}" not in taken)
    model.graph.initializer.append(numpy_helper.from_array(array, name))
    return name


def rename(model: ModelProto, rng: np.random.Generator) -> bool:
    """Every value between inputs and outputs gets another name."""
    kept = _inner(model) | {v.name for v in (*model.graph.input, *model.graph.output)} | {""}
    kept |= {t.name for t in (*model.graph.initializer,)}
    names = [n for node in model.graph.node for n in node.output if n not in kept]
    order = rng.permutation(len(names))
    new = {name: f"val_{i}" for name, i in zip(names, order, strict=True)}
    if kept & set(new.values()):
        return False
    for node in model.graph.node:
        node.input[:] = [new.get(n, n) for n in node.input]
        node.output[:] = [new.get(n, n) for n in node.output]
        node.name = ""
    del model.graph.value_info[:]
    return bool(names)


def permute(model: ModelProto, rng: np.random.Generator) -> bool:
    """The nodes in another topological order."""
    waiting, made = list(model.graph.node), set[str]()
    produced = {n for node in waiting for n in node.output}

    def needs(node: NodeProto) -> set[str]:
        names = {*node.input}
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                names |= {n for inner in attribute.g.node for n in inner.input}
        return names & produced

    ordered: list[NodeProto] = []
    while waiting:
        ready = [i for i, node in enumerate(waiting) if needs(node) <= made]
        node = waiting.pop(ready[int(rng.integers(len(ready)))])
        made |= {*node.output}
        ordered.append(node)
    del model.graph.node[:]
    model.graph.node.extend(ordered)
    return len(ordered) > 1


def _between(node: NodeProto, x: str, y: str) -> NodeProto:
    """The same operator from x to y."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[0], copy.output[0] = x, y
    return copy


def _around(model: ModelProto, rng: np.random.Generator, nodes: Around) -> bool:
    """Replace some y = f(x) by the nodes that are made of it."""
    index = _drawn(model, rng, UNARY)
    if index is None:
        return False
    _replace(model, index, nodes(model, model.graph.node[index]))
    return True


def _reshaped(model: ModelProto, node: NodeProto) -> list[NodeProto]:
    x, y = node.input[0], node.output[0]
    flat = _constant(model, np.array([-1], np.int64), "flat")
    return [
        helper.make_node("Shape", [x], [f"{y}_shape"]),
        helper.make_node("Reshape", [x, flat], [f"{y}_flat"]),
        _between(node, f"{y}_flat", f"{y}_flat_out"),
        helper.make_node("Reshape", [f"{y}_flat_out", f"{y}_shape"], [y], allowzero=1),
    ]


def _transposed(model: ModelProto, node: NodeProto) -> list[NodeProto]:
    x, y = node.input[0], node.output[0]
    return [
        helper.make_node("Transpose", [x], [f"{y}_turned"]),
        _between(node, f"{y}_turned", f"{y}_turned_out"),
        helper.make_node("Transpose", [f"{y}_turned_out"], [y]),
    ]


def _in_parts(model: ModelProto, node: NodeProto) -> list[NodeProto]:
    x, y = node.input[0], node.output[0]
    zero, one, end = (
        _constant(model, np.array([n], np.int64), "row") for n in (0, 1, np.iinfo(np.int64).max)
    )
    nodes = []
    for part, start, stop in ((f"{y}_part0", zero, one), (f"{y}_part1", one, end)):
        nodes.append(helper.make_node("Slice", [x, start, stop, zero], [part]))
        nodes.append(_between(node, part, f"{part}_out"))
    nodes.append(helper.make_node("Concat", [f"{y}_part0_out", f"{y}_part1_out"], [y], axis=0))
    return nodes


def reshape_through(model: ModelProto, rng: np.random.Generator) -> bool:
    """y = f(x) becomes Reshape(f(Reshape(x, [-1])), Shape(x))."""
    return _around(model, rng, _reshaped)


def transpose_through(model: ModelProto, rng: np.random.Generator) -> bool:
    """y = f(x) becomes Transpose(f(Transpose(x))); without perm all axes are reversed."""
    return _around(model, rng, _transposed)


def parts(model: ModelProto, rng: np.random.Generator) -> bool:
    """y = f(x) becomes f of the first row and f of the others, joined; x has an axis."""
    return _around(model, rng, _in_parts)


def reassociate(model: ModelProto, rng: np.random.Generator) -> bool:
    """(a + b) + c becomes a + (b + c)."""
    uses = Counter(n for node in model.graph.node for n in node.input)
    producer = {n: i for i, node in enumerate(model.graph.node) for n in node.output}
    held = _inner(model) | {v.name for v in model.graph.output}
    fits = []
    for i, node in enumerate(model.graph.node):
        first = producer.get(node.input[0]) if node.op_type in SUMS else None
        if first is None or model.graph.node[first].op_type != node.op_type:
            continue
        if uses[node.input[0]] == 1 and node.input[0] not in held:
            fits.append((i, first))
    if not fits:
        return False
    i, first = fits[int(rng.integers(len(fits)))]
    node, below = model.graph.node[i], model.graph.node[first]
    (a, b), c = below.input, node.input[1]
    inner = f"{node.output[0]}_sum"
    _replace(model, i, [
        helper.make_node(node.op_type, [b, c], [inner]),
        helper.make_node(node.op_type, [a, inner], [node.output[0]]),
    ])  # fmt: skip
    del model.graph.node[first]
    return True


def written_out(model: ModelProto, rng: np.random.Generator) -> bool:
    """The graph is fused, and each fused operator is replaced by its body."""
    from onnx_fuse import rewrite
    from onnx_fuse.autodiff.load import load
    from onnx_fuse.importer.save import inline, to_proto

    graph = load(model.SerializeToString())
    rewrite.optimize(graph, level=int(rng.integers(1, 4)))
    model.CopyFrom(to_proto(inline(graph), shapes=False))
    return True


CHANGES: tuple[Change, ...] = (
    rename,
    permute,
    reshape_through,
    transpose_through,
    parts,
    reassociate,
    written_out,
)


def equivalent(source: ModelProto, rng: np.random.Generator) -> tuple[ModelProto, list[str]]:
    """A copy with one to three changes, and their names."""
    model = ModelProto()
    model.CopyFrom(source)
    chosen = [CHANGES[i] for i in rng.permutation(len(CHANGES))[: int(rng.integers(1, 4))]]
    return model, [change.__name__ for change in chosen if change(model, rng)]
