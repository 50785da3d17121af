"""Nodes that no exporter writes: attributes, ranks, sizes and operands that are out of range.

ONNX's inference and onnxruntime are C++, which trusts some of these and ends the process. A node is
drawn from its operator's schema, of every version, so that a new operator needs nothing here.
"""

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper
from onnx.defs import OpSchema
from support import stock

from onnx_fuse.guard import Crash, in_child

NUMBERS = (0, 1, 2, 3, -1, -2, 5, 7, -5, 100, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
USUAL = 6
"""How many of the numbers, and of the sizes, come first since valid nodes have them."""
SIZES = (0, 1, 2, 3, 4, "N", 8, "M", None, 2**31, 2**40, 2**62)
TYPES = ("float", "int64", "int32", "bool", "float16", "uint8", "int8", "string", "double")
FLOATS = (0.0, 1.0, -1.0, float("nan"), float("inf"), 1e30, -0.5)
TEXTS = ("", "x", "linear", "cubic", "SAME_UPPER", "VALID", "ij,jk->ik", "...i->", "i->ii", "mean")
DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview.training")
BATCH = 50
ASKED = 8
MEMORY, SECONDS = 4 << 30, 20
"""What a child may take; it dies of more."""
OPTION = OpSchema.FormalParameterOption


def schemas() -> list[OpSchema]:
    """Each version of each operator."""
    every = [s for s in onnx.defs.get_all_schemas_with_history() if s.domain in DOMAINS]
    return sorted(every, key=lambda s: (s.domain, s.name, s.since_version))


class Drawing:
    """A model of one node of a schema, and at times of another that reads its result."""

    def __init__(self, schema: OpSchema, rng: np.random.Generator) -> None:
        self.rng, self.rank = rng, int(rng.choice((0, 1, 2, 3, 4, 4, 5)))
        self.inputs: list[onnx.ValueInfoProto] = []
        self.constants: list[TensorProto] = []
        self.nodes: list[onnx.NodeProto] = []
        version = schema.since_version if not schema.domain else 21
        result = self.node(schema, "")
        if not schema.domain and self.chance(0.4):
            names = sorted({s.name for s in onnx.defs.get_all_schemas() if not s.domain})
            reader = "Slice" if self.chance(0.3) else str(rng.choice(names))
            if onnx.defs.has(reader, max_inclusive_version=version):
                self.node(onnx.defs.get_schema(reader, version, ""), result)
        outputs = [onnx.ValueInfoProto(name=y) for node in self.nodes for y in node.output]
        graph = helper.make_graph(self.nodes, "hostile", self.inputs, outputs, self.constants)
        imports = {"": version, schema.domain: schema.since_version}
        opsets = [helper.make_opsetid(*pair) for pair in imports.items()]
        self.model = helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def number(self) -> int:
        return int(self.one(NUMBERS[:USUAL] if self.chance(0.6) else NUMBERS))

    def numbers(self) -> list[int]:
        spatial = max(self.rank - 2, 0)
        length = self.one((self.rank, spatial, 2 * spatial, 0, 1, 2, 5))
        return (
            [self.number()] * length if self.chance(0.3) else [self.number() for _ in range(length)]
        )

    def node(self, schema: OpSchema, read: str) -> str:
        """Add a node whose first operand is `read` and return the name of its first result."""
        types = {}
        for constraint in schema.type_constraints:
            allowed = [t for t in TYPES if f"tensor({t})" in constraint.allowed_type_strs]
            types[constraint.type_param_str] = self.one(
                (allowed[:2] if self.chance(0.8) else allowed) or ("float",)
            )
        names: list[str] = []
        for formal in schema.inputs:
            for _ in range(self.one(range(4)) if formal.option == OPTION.Variadic else 1):
                kind = types.get(formal.type_str, formal.type_str[7:-1])
                missing = self.chance(0.4 if formal.option == OPTION.Optional else 0.03)
                made = read if read and not names else self.operand(kind)
                names.append("" if missing else made)
        while names and not names[-1]:
            names.pop()
        stem = f"y{len(self.nodes)}"
        count = len(schema.outputs) if self.chance(0.5) else schema.min_output
        if schema.outputs and schema.outputs[-1].option == OPTION.Variadic:
            count = self.one((1, 2, 3))
        node = helper.make_node(
            schema.name, names, [f"{stem}.{i}" for i in range(max(count, 1))], stem,
            domain=schema.domain,
        )  # fmt: skip
        for attribute in schema.attributes.values():
            if self.chance(0.95 if attribute.required else 0.45):
                node.attribute.extend(self.attribute(attribute))
        self.nodes.append(node)
        return node.output[0]

    def operand(self, kind: str) -> str:
        """A new input or a constant, whose numbers are hostile."""
        name = f"x{len(self.inputs) + len(self.constants)}"
        element = getattr(TensorProto, kind.upper() if kind in TYPES else "FLOAT")
        if kind.startswith("int") and self.chance(0.7):
            array = np.array(self.numbers() if self.chance(0.8) else self.number())
            array = array.astype(helper.tensor_dtype_to_np_dtype(element))
            self.constants.append(numpy_helper.from_array(array, name))
        elif kind == "float" and self.chance(0.2):
            array = self.rng.choice(FLOATS, self.rank).astype(np.float32)
            self.constants.append(numpy_helper.from_array(array, name))
        else:
            rank = self.rank if self.chance(0.7) else self.one((0, 1, 2, 3, 5))
            # inference lists the entries of a long vector, which takes all memory
            usual = self.chance(0.5 if rank != 1 else 0.97)
            dims = [self.one(SIZES[:USUAL] if usual else SIZES) for _ in range(rank)]
            shape = None if self.chance(0.07) else dims
            self.inputs.append(helper.make_tensor_value_info(name, element, shape))
        return name

    def attribute(self, attribute: Any) -> list[AttributeProto]:
        """A value for an attribute of a schema; none of a kind that is not drawn."""
        if attribute.default_value.name and self.chance(0.2):
            return [AttributeProto.FromString(attribute.default_value.SerializeToString())]
        some = range(self.one((0, 1, 2, self.rank)))
        kind = int(attribute.type.value)
        ways: dict[int, Callable[[], Any]] = {
            AttributeProto.INT: self.number,
            AttributeProto.INTS: self.numbers,
            AttributeProto.FLOAT: lambda: self.one(FLOATS),
            AttributeProto.FLOATS: lambda: [self.one(FLOATS) for _ in some],
            AttributeProto.STRING: lambda: self.one(TEXTS),
            AttributeProto.STRINGS: lambda: [self.one(TEXTS) for _ in some],
            AttributeProto.TENSOR: lambda: numpy_helper.from_array(
                np.full([self.one((0, 1, 2)) for _ in some], self.number())
            ),
            AttributeProto.GRAPH: self.body,
        }
        if kind not in ways:
            return []
        return [helper.make_attribute(attribute.name, ways[kind](), attr_type=kind)]

    def body(self) -> onnx.GraphProto:
        stem = f"b{len(self.nodes)}{self.number()}"
        info = [helper.make_tensor_value_info(f"{stem}.{i}", 1, None) for i in range(4)]
        inputs = info[: self.one((0, 1, 3))]
        nodes = [helper.make_node("Identity", [i.name for i in inputs[:1]], [info[3].name])]
        return helper.make_graph(nodes, "body", inputs, info[3:] * self.one((0, 1, 1, 2)))


# ---- what is asked of a model ----


def infer(model: ModelProto) -> str:
    """Run ONNX's inference in all its ways; only the end of the process counts."""
    for data_prop in (False, True):
        for strict in (False, True):
            with contextlib.suppress(Exception):
                onnx.shape_inference.infer_shapes(model, data_prop=data_prop, strict_mode=strict)
    return "quiet"


def start(model: ModelProto) -> str:
    """Make a session of onnxruntime, with its optimizations, of what the checker accepts."""
    checked = ModelProto.FromString(model.SerializeToString())
    for value in checked.graph.output:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
        value.type.tensor_type.shape.SetInParent()
    with contextlib.suppress(Exception):
        onnx.checker.check_model(checked)
        stock(model, optimized=True)
    return "quiet"


def ask(model: ModelProto) -> str:
    """Ask this package, which may raise only its own errors, and a session onnxruntime's."""
    import onnx_fuse
    from onnx_fuse.runtime import ort

    answers = []
    for entry in ("optimize", "gradient", "validate", "InferenceSession"):
        answer = "answered"
        try:
            getattr(onnx_fuse, entry)(model.SerializeToString())
        except onnx_fuse.OnnxFuseError:
            answer = "refused"
        except Exception as error:  # noqa: BLE001 - the fault that is looked for
            if entry != "InferenceSession" or not ort.is_fault(error):
                return f"crash: {entry}: {type(error).__name__}: {error}"
        answers.append(f"{entry} {answer}")
    return ", ".join(answers)


def each(work: Callable[[ModelProto], str], models: Sequence[ModelProto]) -> list[str]:
    """What the work says of each model, in a child; `died` of one that ends it."""

    def limited() -> list[str]:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        return [work(model) for model in models]

    try:
        return in_child(limited, silent=True)
    except Crash as error:
        if len(models) == 1:
            return [f"died: {error}"]
    half = len(models) // 2
    return each(work, models[:half]) + each(work, models[half:])


def crashes(number: int, rng: np.random.Generator) -> Iterator[tuple[str, str, ModelProto]]:
    """How each of `BATCH` models of one schema ends, and why.

    The package is asked for those that end the process of ONNX's inference or of onnxruntime, and
    for one in `ASKED` of the others.
    """
    every = schemas()
    schema = every[number % len(every)]
    models = [Drawing(schema, rng).model for _ in range(BATCH)]
    ends = list(zip(each(infer, models), each(start, models), strict=True))
    asked = [i for i, raw in enumerate(ends) if i % ASKED == 0 or raw != ("quiet", "quiet")]
    answers = dict(zip(asked, each(ask, [models[i] for i in asked]), strict=True))
    for i, (model, (inference, session)) in enumerate(zip(models, ends, strict=True)):
        answer = answers.get(i, "not asked")
        kind = "quiet" if inference == session == "quiet" else "guarded"
        kind = answer.partition(":")[0] if answer.startswith(("died", "crash")) else kind
        operators = " ".join(f"{n.op_type}" for n in model.graph.node)
        text = f"{schema.name} {schema.since_version} ({operators}): inference {inference}"
        yield kind, f"{text}, onnxruntime {session}; {answer}", model
