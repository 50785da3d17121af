"""Changes to a graph, drawn at random: the mutants that tools/fuzz.py tries.

Each mutation changes `graph` in place, or raises Unfit where there is nothing for it to change.
"""

import contextlib
from collections.abc import Callable, Iterable
from string import Template
from typing import Any

import numpy as np
import onnx
from cases import NEWEST_OPSET
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

# Operators that may stand for each other: same number of inputs, similar types.
SIBLINGS = [
    group.split()
    for group in (
        "Add Sub Mul Div Max Min Pow PRelu",
        "Relu Sigmoid Tanh Erf Neg Abs Exp Sqrt Softplus Identity Sign Floor Reciprocal LeakyRelu "
        "Elu Softsign Gelu HardSwish Log",
        "ReduceMean ReduceSum ReduceMax ReduceMin ReduceSumSquare ReduceL2",
        "Softmax LogSoftmax Hardmax",
        "MatMul Mul Add",
        "And Or Xor",
        "Less Greater LessOrEqual GreaterOrEqual Equal",
        "LayerNormalization RMSNormalization",
        "Squeeze Unsqueeze",
    )
]


class Unfit(Exception):
    """A graph that has nothing for a mutation to change."""


def _choice(rng: np.random.Generator, items: Iterable[Any]) -> Any:
    items = list(items)
    if not items:
        raise Unfit
    return items[int(rng.integers(len(items)))]


def _single(graph: GraphProto, rng: np.random.Generator) -> int:
    """The place of a node with inputs and one output."""
    return int(
        _choice(rng, [i for i, n in enumerate(graph.node) if len(n.output) == 1 and n.input])
    )


def _reader(graph: GraphProto, rng: np.random.Generator) -> tuple[int, int]:
    """The place of a node, and that of one of its inputs."""
    readers = [(i, k) for i, n in enumerate(graph.node) for k, v in enumerate(n.input) if v]
    place: tuple[int, int] = _choice(rng, readers)
    return place


def nodes_of(text: str, stem: str, **names: str) -> list[NodeProto]:
    """Nodes from ONNX text; what `names` does not name is named after the stem."""
    nodes = list(onnx.parser.parse_graph(f"g () => () {{ {text} }}").node)
    for node in nodes:
        node.input[:] = [names.get(n, f"{stem}_{n}") if n else "" for n in node.input]
        node.output[:] = [names.get(n, f"{stem}_{n}") for n in node.output]
    return nodes


def bypass(graph: GraphProto, rng: np.random.Generator) -> None:
    node = _choice(rng, [n for n in graph.node if n.input and n.input[0] and n.output])
    _rename_uses(graph, node.output[0], node.input[0])


def swap_operands(graph: GraphProto, rng: np.random.Generator) -> None:
    node = _choice(rng, [n for n in graph.node if len(n.input) > 1])
    i, j = rng.choice(len(node.input), 2, replace=False)
    node.input[i], node.input[j] = node.input[j], node.input[i]


def sibling(graph: GraphProto, rng: np.random.Generator) -> None:
    found = [(n, group) for n in graph.node for group in SIBLINGS if n.op_type in group]
    node, group = _choice(rng, found)
    node.op_type = _choice(rng, group)


def attribute(graph: GraphProto, rng: np.random.Generator) -> None:
    found = [(n, a) for n in graph.node for a in n.attribute if not a.HasField("g")]
    node, held = _choice(rng, found)
    if rng.random() < 0.2:
        node.attribute.remove(held)
    elif held.type == AttributeProto.INT:
        held.i = int(_choice(rng, [0, 1, -1, 2, held.i + 1, held.i - 1, 1 - held.i]))
    elif held.type == AttributeProto.FLOAT:
        held.f = float(_choice(rng, [0.0, 1.0, -1.0, held.f * 1.0005, held.f * 2, -held.f, 1e-30]))
    elif held.type == AttributeProto.INTS and held.ints:
        values = list(held.ints)
        way = rng.integers(3)
        if way == 0:
            rng.shuffle(values)
        elif way == 1:
            values[int(rng.integers(len(values)))] += int(rng.integers(-1, 2))
        else:
            values.pop()
        held.ints[:] = values
    elif held.type == AttributeProto.TENSOR:
        held.t.CopyFrom(_changed(held.t, rng))
    elif held.type == AttributeProto.STRING:
        held.s = _choice(rng, [b"", b"tanh", b"none", b"linear", b"nearest", held.s[:-1]])


def constant(graph: GraphProto, rng: np.random.Generator) -> None:
    if not graph.initializer:
        return attribute(graph, rng)
    held = _choice(rng, graph.initializer)
    name = held.name
    held.CopyFrom(_changed(held, rng))
    held.name = name


def _changed(tensor: TensorProto, rng: np.random.Generator) -> TensorProto:
    array = numpy_helper.to_array(tensor)
    if array.dtype.kind not in "iufb":
        return tensor
    one = array.dtype.type(1)
    ways: list[Callable[[], np.ndarray]] = [
        lambda: array[None],
        lambda: array[None, None],
        lambda: np.zeros_like(array),
        lambda: np.ones_like(array),
        lambda: np.full_like(array, array.flat[0] if array.size else 0),
    ]
    if array.dtype.kind in "iu":
        ways += [lambda: array + one, lambda: array - one, lambda: array.astype(np.int32)]
    if array.dtype.kind == "f":
        ways += [
            lambda: (array * 1.0005).astype(array.dtype),
            lambda: (array * 2).astype(array.dtype),
            lambda: -array,
            lambda: np.nextafter(array, np.inf).astype(array.dtype),
            lambda: array.astype(np.float64),
            lambda: np.where(rng.random(array.shape) < 0.3, -np.inf, array).astype(array.dtype),
            lambda: np.full_like(array, np.nan),
            lambda: np.full_like(array, 3e4),
        ]
    if array.ndim:
        ways += [lambda: array[:1], lambda: array[..., :1], lambda: array.squeeze()]
    made = np.ascontiguousarray(_choice(rng, ways)())
    changed: TensorProto = numpy_helper.from_array(made.reshape(made.shape), tensor.name)
    return changed


def expose(graph: GraphProto, rng: np.random.Generator) -> None:
    known = {v.name for v in graph.output}
    name = _choice(rng, [o for n in graph.node for o in n.output if o and o not in known])
    graph.output.add().name = name


def another_reader(graph: GraphProto, rng: np.random.Generator) -> None:
    name = _choice(rng, [o for n in graph.node for o in n.output if o])
    made = f"reader_{len(graph.node)}"
    op = _choice(rng, ["Neg", "Shape", "Identity", "Abs"])
    graph.node.add().CopyFrom(onnx.helper.make_node(op, [name], [made]))
    graph.output.add().name = made


BETWEEN = (
    "a = Cast <to = $cast> (x)  y = Cast <to = $back> (a)",
    "a = Neg (x)  y = Neg (a)",
    "c = Constant <value = $number> ()  y = $op (x, c)",
    "s = Shape (x)  y = Reshape (x, s)",
    "t = Transpose (x)  y = Transpose (t)",
    "y = $unary (x)",
    "n = IsNaN (x)  z = Constant <value_float = 0.0> ()  y = Where (n, z, x)",
    "o = Constant <value = int64[1] {0}> ()  u = Unsqueeze (x, o)  y = Squeeze (u, o)",
)


def between(graph: GraphProto, rng: np.random.Generator) -> None:
    """An operator, or a pair of them, between a value and one of its readers."""
    at, k = _reader(graph, rng)
    value, stem = graph.node[at].input[k], f"between_{len(graph.node)}"
    op, number = _choice(rng, [("Add", 0.0), ("Sub", 0.0), ("Mul", 1.0), ("Add", -0.0)])
    words = {
        "cast": _choice(rng, [1, 11, 10, 1]),
        "back": _choice(rng, [1, 11]),
        "op": op,
        "number": f"float{_choice(rng, ['', '[1]', '[1,1]', '[1,1,1,1]'])} {{{number}}}",
        "unary": _choice(rng, ["Identity", "Dropout", "Relu", "Tanh"]),
    }
    text = Template(_choice(rng, BETWEEN)).substitute(words)
    graph.node[at].input[k] = stem
    _insert(graph, at, nodes_of(text, stem, x=value, y=stem))


def rewire(graph: GraphProto, rng: np.random.Generator) -> None:
    at, k = _reader(graph, rng)
    before = [v.name for v in graph.input] + [v.name for v in graph.initializer]
    before += [o for n in list(graph.node)[:at] for o in n.output if o]
    graph.node[at].input[k] = _choice(rng, before)


def drop_operand(graph: GraphProto, rng: np.random.Generator) -> None:
    node = _choice(rng, [n for n in graph.node if len(n.input) > 1])
    if rng.random() < 0.5:
        node.input.pop()
    else:
        node.input[-1] = ""


def into_branch(graph: GraphProto, rng: np.random.Generator) -> None:
    """A node into both branches of an If on a constant, or on whether an input is empty."""
    at = _single(graph, rng)
    node = graph.node[at]
    name, stem = node.output[0], f"if_{len(graph.node)}"
    branches = []
    for side in ("then", "else"):
        inner = NodeProto()
        inner.CopyFrom(node)
        inner.output[0] = f"{stem}_{side}"
        ends = [onnx.ValueInfoProto(name=f"{stem}_{side}")]
        branches.append(onnx.helper.make_graph([inner], side, [], ends))
    flag = onnx.helper.make_node(
        "Constant", [], [f"{stem}_c"], value=numpy_helper.from_array(np.array(rng.random() < 0.5))
    )
    made = onnx.helper.make_node(
        "If", [f"{stem}_c"], [name], then_branch=branches[0], else_branch=branches[1]
    )
    del graph.node[at]
    _insert(graph, at, [flag, made])


def overridable(graph: GraphProto, rng: np.random.Generator) -> None:
    """An initializer becomes an input with a default."""
    inputs = {v.name for v in graph.input}
    held = _choice(rng, [t for t in graph.initializer if t.name not in inputs])
    value = onnx.helper.make_tensor_value_info(held.name, held.data_type, list(held.dims))
    graph.input.add().CopyFrom(value)


def duplicate(graph: GraphProto, rng: np.random.Generator) -> None:
    """One reader of a node gets a copy of it."""
    at = _choice(rng, [i for i, n in enumerate(graph.node) if n.output and n.output[0]])
    copy = NodeProto()
    copy.CopyFrom(graph.node[at])
    old = list(copy.output)
    copy.output[:] = [f"{o}_copy" if o else "" for o in old]
    later = list(graph.node)[at + 1 :]
    reader = _choice(rng, [n for n in later if old[0] in n.input])
    reader.input[list(reader.input).index(old[0])] = copy.output[0]
    _insert(graph, at + 1, [copy])


def forget_shapes(graph: GraphProto, rng: np.random.Generator) -> None:
    """Inputs lose their sizes, or their ranks."""
    for value in graph.input:
        tensor = value.type.tensor_type
        if not tensor.HasField("shape"):
            continue
        for d in tensor.shape.dim:
            if rng.random() < 0.7:
                d.Clear()
    for value in graph.output:
        if rng.random() < 0.5:
            value.ClearField("type")


def other_type(graph: GraphProto, rng: np.random.Generator) -> None:
    """The whole graph computes in another float type."""
    kind = int(_choice(rng, [TensorProto.FLOAT16, TensorProto.DOUBLE]))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
    for value in graph.input:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = kind
    held = list(graph.initializer)
    for node in graph.node:
        for a in node.attribute:
            if a.name in ("to", "dtype") and a.i == TensorProto.FLOAT:
                a.i = kind
            elif a.name in ("value_float", "value_floats"):
                array = np.array(a.f if a.HasField("f") else list(a.floats), dtype)
                a.CopyFrom(onnx.helper.make_attribute("value", numpy_helper.from_array(array)))
            elif a.type == AttributeProto.TENSOR:
                held.append(a.t)
    for tensor in held:
        if tensor.data_type == TensorProto.FLOAT:
            with np.errstate(over="ignore"):
                array = numpy_helper.to_array(tensor).astype(dtype)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def in_type(graph: GraphProto, rng: np.random.Generator) -> None:
    """One node computes in another float type between Casts."""
    at = _single(graph, rng)
    node, stem = graph.node[at], f"cast_{len(graph.node)}"
    kind = int(_choice(rng, [TensorProto.FLOAT16, TensorProto.DOUBLE]))
    before = [k for k, name in enumerate(node.input) if name]
    make, name = onnx.helper.make_node, node.output[0]
    nodes = [make("Cast", [node.input[k]], [f"{stem}_{k}"], to=kind) for k in before]
    for k in before:
        node.input[k] = f"{stem}_{k}"
    node.output[0] = stem
    _insert(graph, at + 1, [make("Cast", [stem], [name], to=TensorProto.FLOAT)])
    _insert(graph, at, nodes)


def symbols(graph: GraphProto, rng: np.random.Generator) -> None:
    """Fixed sizes of the inputs get names, one for each size or one for each axis."""
    shared = rng.random() < 0.5
    for value in graph.input:
        for i, d in enumerate(value.type.tensor_type.shape.dim):
            if d.HasField("dim_value"):
                d.dim_param = f"s{d.dim_value}" if shared else f"{value.name}_{i}"


def into_loop(graph: GraphProto, rng: np.random.Generator) -> None:
    """A node into the body of a Loop, as its state or as what it stacks."""
    at = _single(graph, rng)
    first, inner, make = NodeProto(), NodeProto(), onnx.helper.make_node
    first.CopyFrom(graph.node[at])
    inner.CopyFrom(graph.node[at])
    name, stem = first.output[0], f"loop_{len(graph.node)}"
    state, trips = rng.random() < 0.5, int(rng.integers(1, 3))
    first.output[0], inner.output[0] = f"{stem}_first", f"{stem}_y"
    keep = make("Identity", [f"{stem}_c"], [f"{stem}_d"])
    flag = onnx.helper.make_tensor_value_info(f"{stem}_c", TensorProto.BOOL, [])
    step = onnx.helper.make_tensor_value_info(f"{stem}_i", TensorProto.INT64, [])
    ends = [onnx.ValueInfoProto(name=f"{stem}_d"), onnx.ValueInfoProto(name=f"{stem}_y")]
    states = [onnx.ValueInfoProto(name=f"{stem}_s")] if state else []
    body = onnx.helper.make_graph([keep, inner], "body", [step, flag, *states], ends)
    numbers = {"n": np.array(trips if state else 1), "z": np.array([0])}
    nodes = [
        make("Constant", [], [f"{stem}_{k}"], value=numpy_helper.from_array(a.astype(np.int64)))
        for k, a in numbers.items()
    ]
    if state:
        nodes += [first, make("Loop", [f"{stem}_n", "", first.output[0]], [name], body=body)]
    else:
        nodes += [
            make("Loop", [f"{stem}_n", ""], [f"{stem}_all"], body=body),
            make("Squeeze", [f"{stem}_all", f"{stem}_z"], [name]),
        ]
    del graph.node[at]
    _insert(graph, at, nodes)


def axis_sign(graph: GraphProto, rng: np.random.Generator) -> None:
    """An axis is counted from the other end."""
    opsets = [onnx.helper.make_opsetid("", NEWEST_OPSET)]
    model = onnx.helper.make_model(graph, opset_imports=opsets)
    try:
        known = onnx.shape_inference.infer_shapes(model).graph
    except (onnx.shape_inference.InferenceError, ValueError) as error:
        raise Unfit from error  # a Loop without all its inputs
    values = (*known.input, *known.value_info)
    ranks = {
        v.name: len(v.type.tensor_type.shape.dim)
        for v in values
        if v.type.tensor_type.HasField("shape")
    }
    ranks |= {t.name: len(t.dims) for t in graph.initializer}
    found = [
        (a, ranks[n.input[0]])
        for n in graph.node
        for a in n.attribute
        if a.name in ("axis", "axes") and n.input and n.input[0] in ranks
    ]
    held, rank = _choice(rng, found)
    if held.name == "axis":
        held.i += rank if held.i < 0 else -rank
    else:
        held.ints[:] = [a + rank if a < 0 else a - rank for a in held.ints]


def defaults(graph: GraphProto, rng: np.random.Generator) -> None:
    """Attributes that say their default go, or those that a node lacks are said."""
    found = [n for n in graph.node if not n.domain and onnx.defs.has(n.op_type)]
    node = _choice(rng, found)
    known = onnx.defs.get_schema(node.op_type, NEWEST_OPSET, "").attributes
    given = {a.name: a for a in node.attribute}
    for name, a in known.items():
        if a.default_value.name and name not in given:
            node.attribute.add().CopyFrom(a.default_value)
        elif name in given and given[name] == a.default_value:
            node.attribute.remove(given[name])


def weight_elsewhere(graph: GraphProto, rng: np.random.Generator) -> None:
    """A weight is stored transposed, behind an Identity, in a Constant node, or fed."""
    inputs = {v.name for v in graph.input}
    held = _choice(rng, [t for t in graph.initializer if t.dims and t.name not in inputs])
    name, stem, array = held.name, f"{held.name}_stored", numpy_helper.to_array(held)
    way = int(rng.integers(4))
    if way == 0:
        perm = [int(p) for p in rng.permutation(array.ndim)]
        moved = np.ascontiguousarray(array.transpose(np.argsort(perm)))
        held.CopyFrom(numpy_helper.from_array(moved, stem))
        nodes = nodes_of(f"y = Transpose <perm = {perm}> (x)", stem, x=stem, y=name)
    elif way == 1:
        held.name = stem
        nodes = nodes_of("y = Identity (x)", stem, x=stem, y=name)
    elif way == 2:
        nodes = [onnx.helper.make_node("Constant", [], [name], value=held)]
        graph.initializer.remove(held)
    else:
        held.CopyFrom(numpy_helper.from_array(array.reshape(-1), stem))
        text = f"s = Constant <value_ints = {list(array.shape)}> ()  y = Reshape (x, s)"
        nodes = nodes_of(text, stem, x=stem, y=name)
    _insert(graph, 0, nodes)


def drop_middle(graph: GraphProto, rng: np.random.Generator) -> None:
    """An operand between others is absent."""
    node = _choice(rng, [n for n in graph.node if len(n.input) > 2])
    node.input[int(rng.integers(1, len(node.input) - 1))] = ""


def unsorted(graph: GraphProto, rng: np.random.Generator) -> None:
    """Nodes in any order, which the standard forbids and onnxruntime reads."""
    nodes = [NodeProto.FromString(n.SerializeToString()) for n in graph.node]
    rng.shuffle(nodes)  # type: ignore[arg-type]
    del graph.node[:]
    graph.node.extend(nodes)


MUTATIONS = (
    *(bypass, swap_operands, sibling, sibling, attribute, attribute, constant, constant, constant),
    *(expose, another_reader, between, between, between, rewire, rewire, drop_operand),
    *(into_branch, overridable, duplicate, forget_shapes, other_type, other_type, in_type, in_type),
    *(symbols, into_loop, into_loop, axis_sign, axis_sign, defaults, defaults, weight_elsewhere),
    *(weight_elsewhere, drop_middle, unsorted),
)


def _insert(graph: GraphProto, at: int, nodes: list[NodeProto]) -> None:
    kept = [NodeProto.FromString(n.SerializeToString()) for n in graph.node]
    kept[at:at] = nodes
    del graph.node[:]
    graph.node.extend(kept)


def _rename_uses(graph: GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for k, name in enumerate(node.input):
            if name == old:
                node.input[k] = new
    for value in graph.output:
        if value.name == old:
            value.name = new


def mutant(source: ModelProto, rng: np.random.Generator) -> tuple[ModelProto, list[str]]:
    """A changed copy of `source`, and the names of what was done to it."""
    model = ModelProto()
    model.CopyFrom(source)
    del model.graph.value_info[:]
    done = []
    for _ in range(int(rng.integers(1, 4))):
        change = _choice(rng, MUTATIONS)
        with contextlib.suppress(Unfit):
            change(model.graph, rng)
            done.append(change.__name__)
    if rng.random() < 0.1:
        try:
            model = onnx.version_converter.convert_version(model, int(rng.integers(9, 26)))
            done.append(f"converted{model.opset_import[0].version}")
        except Exception:  # noqa: BLE001 - the converter lacks operators, and raises anything
            return mutant(source, rng)
    elif rng.random() < 0.1:
        opset = next(o for o in model.opset_import if o.domain in ("", "ai.onnx"))
        opset.version = int(rng.integers(11, NEWEST_OPSET + 1))
        done.append(f"opset{opset.version}")
    # The text of outputs names their types; a mutant's outputs have whatever type they have.
    for value in model.graph.output:
        value.ClearField("type")
    return model, done
