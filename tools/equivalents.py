"""Changes to a graph that keep what it computes, up to rounding: its answer needs no oracle.

Each change takes a model in place and answers whether it could. `equivalent` makes one to three of
them: what is fused is written out, transposes and reshapes are pushed through, sums re-associated,
values renamed, nodes put in another order, batches taken apart and joined.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
from mutations import nodes_of
from onnx import AttributeProto, ModelProto, NodeProto, helper

UNARY = {
    *("Abs", "Neg", "Relu", "Sigmoid", "Tanh", "Exp", "Erf", "Sqrt", "Softplus", "Softsign"),
    *("Gelu", "LeakyRelu", "Elu", "HardSwish", "Mish", "Cast", "Floor", "Ceil", "Round", "Sign"),
    *("Sin", "Cos", "Identity", "Not"),
}
"""Operators whose entries depend on one entry of one input each."""
SUMS = {"Add", "Mul"}
Change = Callable[[ModelProto, np.random.Generator], bool]


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


AROUND = {
    # y = f(x) becomes Reshape(f(Reshape(x, [-1])), Shape(x))
    "reshape_through": "sizes = Shape (x)  flat = Constant <value_ints = [-1]> ()"
    "  a = Reshape (x, flat)  b = F (a)  y = Reshape <allowzero = 1> (b, sizes)",
    # Transpose(f(Transpose(x))); without perm all axes are reversed
    "transpose_through": "a = Transpose (x)  b = F (a)  y = Transpose (b)",
    # f of the first row and f of the others, joined; x has an axis
    "parts": "zero = Constant <value_ints = [0]> ()  one = Constant <value_ints = [1]> ()"
    "  end = Constant <value_ints = [9223372036854775807]> ()"
    "  a = Slice (x, zero, one, zero)  b = F (a)  c = Slice (x, one, end, zero)  d = F (c)"
    "  y = Concat <axis = 0> (b, d)",
}
"""What some y = f(x) is replaced by."""


def around(model: ModelProto, rng: np.random.Generator, text: str) -> bool:
    index = _drawn(model, rng, UNARY)
    if index is None:
        return False
    node = model.graph.node[index]
    nodes = nodes_of(text, f"{node.output[0]}_part", x=node.input[0], y=node.output[0])
    for i, inner in enumerate(nodes):
        if inner.op_type == "F":
            nodes[i] = NodeProto.FromString(node.SerializeToString())
            nodes[i].input[0], nodes[i].output[0] = inner.input[0], inner.output[0]
    _replace(model, index, nodes)
    return True


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


CHANGES: dict[str, Change] = {
    **{change.__name__: change for change in (rename, permute, reassociate, written_out)},
    **{name: partial(around, text=text) for name, text in AROUND.items()},
}


def equivalent(source: ModelProto, rng: np.random.Generator) -> tuple[ModelProto, list[str]]:
    """A copy with one to three changes, and their names."""
    model = ModelProto()
    model.CopyFrom(source)
    chosen = rng.permutation(list(CHANGES))[: int(rng.integers(1, 4))]
    return model, [name for name in chosen if CHANGES[name](model, rng)]
