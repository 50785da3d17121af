"""What a lowering sees of a graph, and the contract that it keeps.

Each value is known on the host (shape arithmetic, constants), or is a Tensor, or is of a later
stage, whose shapes depend on data.

A family of operators is a module of onnx_fuse/lower, named in `table.FAMILIES`, that holds a table

    LOWERINGS: dict[tuple[str, str], Lowering] = {("", "Softmax"): softmax, (FUSE, "Sdpa"): sdpa}

`Lowering` is `fn(ctx, node)`: it says what is to be computed with `ctx.select`, a problem and its
operands, or it raises `Unserved` with the reason why it cannot serve the node. Then its calls are
forgotten and the node's body is lowered instead (ours, or the function the ONNX schema has); where
there is none the node runs on onnxruntime, with copies. A key's name is without exposed values:
LayerNormGemm also gets LayerNormGemm_mean_rstd nodes.

    def softmax(ctx: Context, node: ir.Node) -> None:
        x = floats(ctx.dense(node, 0))              # contiguous; ctx.view(node, 0): any strides
        axis = ctx.attr(node, "axis", -1) % len(x.shape)
        y = ctx.output(node, 0)                     # a new buffer; shape and dtype are inferred
        problem = Softmax(*around(x.shape, axis), x.dtype)
        ctx.select(node, problem, {"x": x}, {"y": y}, inplace=[("y", "x")])

Shapes are ints, or open sizes that behave as ints (docs/shapes.md): what a lowering decides on one
is a guard of the program. An operand that shape arithmetic or a constant determines is read with
`ctx.host(node, i)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import FLOATS, Code, Ref, call_of, dtype_name
from onnx_fuse.errors import ModelError
from onnx_fuse.importer import contrib
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.actual_sizes import correct_types
from onnx_fuse.ir.build import extents, required
from onnx_fuse.ir.constants import FUSE, one_line
from onnx_fuse.kernels import refusals, serves
from onnx_fuse.ops.bodies import carries_body
from onnx_fuse.program import host
from onnx_fuse.program import size as sizes
from onnx_fuse.program.call import LENGTHS, Buffer, Call, PassContext, Tensor, dense_strides
from onnx_fuse.program.problem import ITEMSIZE, AnyProblem, Contraction, GemmProblem, Hardware
from onnx_fuse.reasons import Reason

WEIGHT_LIMIT = 1 << 12
"""Elements up to which an initializer counts as known rather than as a weight."""


@dataclass
class Slot:
    """What lowering knows of one value.

    `host` is its array where it is known on the host, `tensor` its place on the device. `later`
    says that a later stage makes it. `items` are the elements of a sequence.
    """

    host: np.ndarray | None = None
    tensor: Tensor | None = None
    later: bool = False
    items: tuple[Slot, ...] | None = None


@dataclass(frozen=True)
class Codes:
    """What was dequantized to `floats` = (q - zero) scale; both one number, or one along `axis`."""

    q: Tensor
    floats: Tensor
    scale: np.ndarray
    zero: np.ndarray
    axis: int | None


@dataclass(frozen=True)
class Rounded:
    """The codes q that x became: saturate(round(x / scale) + zero)."""

    q: Tensor
    x: Tensor
    scale: np.float32
    zero: int


class Mistyped(ModelError):
    """An operand is of a type that the operator of this opset does not have."""


class Unserved(Exception):
    """Raised for a node that a lowering cannot serve, with a code of `reasons` and its values."""

    def __init__(self, code: str, **values: object) -> None:
        self.reason = Reason(code, **values)
        super().__init__(str(self.reason))


class Context(PassContext, ABC):
    """The values, buffers and calls of one walk over a graph, which `walk.Lowerer` makes."""

    def __init__(
        self, opsets: Mapping[str, int], hw: Hardware, math: str, prefs: Mapping[str, str] | None
    ) -> None:
        self.hw, self.prefs = hw, prefs
        self.math = math
        """Which fp32 products are allowed: "ieee", "tf32", "bf16x3", "bf16x6"."""
        self.opset, self.opsets = opsets.get("", 1), {**opsets, FUSE: 1}
        self.slots: dict[ir.Value, Slot] = {}
        self.buffers: list[Buffer] = []
        self.calls: list[Call] = []
        self.constants: dict[int, np.ndarray] = {}
        self._copies: dict[Tensor, Tensor] = {}
        self._known_constants: dict[Any, Tensor] = {}
        self.folds: dict[tuple[tuple[int, int], ...], dict[str, Tensor]] = {}
        """wq, cs, cv that the program computes in each run, by the places of gamma, beta, w, c."""
        self.fold_pays: dict[tuple[GemmProblem, bool], bool] = {}
        self.channels_last: set[int] = set()
        """Buffers of images whose channels are the last axis in memory (`channels_last`)."""
        self.codes: dict[int, Codes] = {}
        self.rounded: dict[int, Rounded] = {}
        """What was dequantized from 8 bits, by the buffer of the floats."""
        self.in_rooms = False  # whether caches that grow have room behind (`call.LENGTHS`)
        self.lengths: Tensor | None = None
        """The tokens before the new ones, once a cache in a room was lowered."""
        self.rooms: set[int] = set()
        """Buffers of past and present in rooms."""
        self.mutable: set[str] = set()  # inputs and initializers that the program replaces
        self._names, self._prefix = 0, "value"
        self._random: Tensor | None = None
        self._streams = 0
        self._results: set[ir.Value] = set()  # outputs of decompositions, which later calls read
        self._owner = ""
        self._plain = False  # whether ONNX is told the numbers of open sizes
        self._open_sizes: dict[str, Any] = {}  # by the name that stands for one in ONNX
        self._inferences: dict[Any, list[tuple[str, tuple[int, ...]] | None] | None] = {}

    def _name(self, values: Sequence[ir.Value]) -> None:
        for value in values:
            if not value.name:
                self._names += 1
                value.name = f"{self._prefix}_{self._names}"

    def _single(self, node: ir.Node) -> ir.Model:
        """A model of this node alone, its inputs typed by what is known of them."""
        operands = [v for v in node.inputs if v is not None]
        self._name([*operands, *(v for v in node.outputs if v.name != "")])
        fresh = {v: ir.Value(name=v.name, shape=ir.Shape(self._written(self._type(v)[1])),
                             type=ir.TensorType(self._type(v)[0])) for v in operands}  # fmt: skip
        clone = ir.Node(
            node.domain,
            node.op_type,
            [None if v is None else fresh[v] for v in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
        )
        for new, old in zip(clone.outputs, node.outputs, strict=True):
            new.name = old.name
        inputs = list(dict.fromkeys(fresh[v] for v in operands))
        outputs = [v for v in clone.outputs if v.name]
        graph = ir.Graph(inputs, outputs, nodes=[clone], name="node", opset_imports=self.opsets)
        return ir.Model(graph, ir_version=10)

    def _type(self, value: ir.Value) -> tuple[ir.DataType, tuple[int, ...]]:
        slot = self.slots[value]
        if slot.tensor is not None:
            return data_type(slot.tensor.dtype), slot.tensor.shape
        assert slot.host is not None
        if host.is_open(slot.host):
            return ir.DataType.INT64, slot.host.shape
        return data_type(slot.host.dtype.name), slot.host.shape

    def _written(self, shape: Sequence[int]) -> list[int | str]:
        """The shape for ONNX's inference, in which equal open sizes have the same symbolic name."""
        names: list[int | str] = []
        for size in shape:
            if isinstance(size, sizes.OpenSize) and not self._plain:
                name = f"size_{sizes.expression(size)}"
                self._open_sizes[name] = size
                names.append(name)
            else:
                names.append(sizes.plain(size))
        return names

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The value's element type; None for an absent value and for a later stage's."""
        slot = None if value is None else self.slots.get(value)
        if value is None or slot is None or slot.later or slot.items is not None:
            return None
        return self._type(value)[0]

    def _typed(self, value: ir.Value) -> onnx.TypeProto:
        """The value's type as ONNX has it, with names for open sizes."""
        dtype, shape = self._type(value)
        return type_proto(dtype, self._written(shape))

    def infer(self, node: ir.Node) -> list[tuple[str, tuple[int, ...]] | None] | None:
        """(dtype, shape) of each output, None where it is not static.

        Raises ModelError where the inputs do not fit together.
        """
        types = self._inferred(node)
        names = [value.name for value in node.outputs]
        if types is None or all(t or not name for t, name in zip(types, names, strict=True)):
            return types
        operands = [self.slots[v] for v in node.inputs if v is not None]
        shapes = [slot.tensor.shape for slot in operands if slot.tensor is not None]
        is_open = any(isinstance(size, sizes.OpenSize) for shape in shapes for size in shape)
        if not is_open and not any(host.is_open(slot.host) for slot in operands):
            return types
        self._plain = True  # inference does not follow the sizes: this node's are fixed
        try:
            return self._inferred(node)
        finally:
            self._plain = False

    def _inferred(self, node: ir.Node) -> list[tuple[str, tuple[int, ...]] | None] | None:
        """(dtype, shape) of each output, None where inference does not know."""
        key, constants = self._node_key(node), self._small_values(node)
        if key is None or constants is None:
            return self._infer_node(node)
        both = key, constants, self._plain
        if both not in self._inferences:
            self._inferences[both] = self._infer_node(node)
        return self._inferences[both]

    def _node_key(self, node: ir.Node) -> tuple[Any, ...] | None:
        """A key that is equal for nodes of one operator, with equal attributes and types of inputs.

        None for a node with a tensor or a graph among its attributes.
        """
        kinds = {attribute.type for attribute in node.attributes.values()}
        if kinds & {ir.AttributeType.GRAPH, ir.AttributeType.TENSOR}:
            return None
        places = {v: i for i, v in enumerate(dict.fromkeys(node.inputs)) if v is not None}
        types = tuple(
            (dtype, tuple(map(sizes.expression, shape))) for dtype, shape in map(self._type, places)
        )
        return (
            node.op_identifier(),
            tuple(sorted((name, repr(a.value)) for name, a in node.attributes.items())),
            tuple(None if v is None else places[v] for v in node.inputs),
            types,
            tuple(bool(v.name) for v in node.outputs),
        )

    def _small_values(self, node: ir.Node) -> tuple[bytes | None, ...] | None:
        """The inputs' values that inference may look at; None where one holds open sizes."""
        arrays = [None if v is None else self.slots[v].host for v in node.inputs]
        if any(array is not None and host.is_open(array) for array in arrays):
            return None
        return tuple(
            None if array is None or array.size > WEIGHT_LIMIT else array.tobytes()
            for array in arrays
        )

    def _infer_node(self, node: ir.Node) -> list[tuple[str, tuple[int, ...]] | None] | None:
        """What `_inferred` gives, by ONNX's inference."""
        single = self._single(node)
        if carries_body(node) or contrib.lookup(node) is not None:
            infer_shapes(single)
            return [
                None if d is None or s is None else self._static(d, extents(s))
                for d, s in ((v.dtype, v.shape) for v in next(iter(single.graph)).outputs)
            ]
        if not onnx.defs.has(node.op_type, self.opset, node.domain):
            return None
        schema = onnx.defs.get_schema(node.op_type, self.opsets.get(node.domain, 1), node.domain)
        proto = ir.serde.serialize_node(next(iter(single.graph)))
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, onnx.TensorProto] = {}
        for value in node.inputs:
            if value is None:
                continue
            name = value.name or ""
            types[name] = self._typed(value)
            array = self.slots[value].host
            if array is not None and host.is_open(array) and self._plain:
                array = host.closed(array).astype(self._type(value)[0].numpy())
            if array is not None and array.size <= WEIGHT_LIMIT and array.dtype.name in ITEMSIZE:
                data[name] = ir.serde.serialize_tensor(ir.tensor(np.asarray(array, order="C")))
        opsets = [onnx.helper.make_opsetid(d, v) for d, v in self.opsets.items()]
        dtypes = {dtype_name(self._type(v)[0]) for v in node.inputs if v is not None}
        infer = partial(
            onnx.shape_inference.infer_node_outputs, schema, proto, opset_imports=opsets,
            ir_version=10,
        )  # fmt: skip
        halved = False
        try:
            try:
                result = infer(types, data)
            except onnx.checker.ValidationError:
                if "bfloat16" not in dtypes:
                    raise
                # an older opset's operator knows no bfloat16: its shapes are those of float16
                halved = "float16" not in dtypes
                types = {n: _as_float16(t) for n, t in types.items()}
                data = {n: t for n, t in data.items() if t.data_type != onnx.TensorProto.BFLOAT16}
                result = infer(types, data)
        except onnx.checker.ValidationError as error:
            raise Mistyped(str(self.fault(node, one_line(error)))) from error
        except onnx.shape_inference.InferenceError as error:
            raise self.fault(node, one_line(error)) from error
        correct_types(proto, types, data, result)
        types_of = [self._static_proto(result.get(v.name or "")) for v in node.outputs]
        if halved:
            types_of = [k and ("bfloat16" if k[0] == "float16" else k[0], k[1]) for k in types_of]
        return types_of

    def _static_proto(self, proto: onnx.TypeProto | None) -> tuple[str, tuple[int, ...]] | None:
        if proto is None or not proto.HasField("tensor_type"):
            return None
        tensor = proto.tensor_type
        if not tensor.HasField("shape"):
            return None
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim]
        return self._static(ir.DataType(tensor.elem_type), dims)

    def _static(
        self, dtype: ir.DataType, dims: Sequence[int | str | None]
    ) -> tuple[str, tuple[int, ...]] | None:
        """The type and shape, or None where a dimension is not known."""
        sizes = (d if isinstance(d, int) else self._open_sizes.get(d or "") for d in dims)
        shape = tuple(d for d in sizes if d is not None)
        return (dtype_name(dtype), shape) if len(shape) == len(dims) else None

    def fault(self, node: ir.Node, reason: str) -> ModelError:
        """The error to raise for a node: its name, its operands' shapes and the reason."""
        shapes = ", ".join(str(list(self._type(v)[1])) for v in node.inputs if v is not None)
        return ModelError(f"node '{self.label(node)}' ({node.op_type}) of {shapes}: {reason}")

    def label(self, node: ir.Node) -> str:
        """The node's name, or its first output's; inside a body, the whole node's."""
        if self._owner:
            return self._owner
        return node.name or (node.outputs[0].name if node.outputs else "") or node.op_type

    def _tensor(self, slot: Slot) -> Tensor:
        """The slot's tensor; a value known on the host becomes a constant in device memory."""
        if slot.tensor is None:
            slot.tensor = self.constant(required(slot.host))
        return slot.tensor

    def view(self, node: ir.Node, i: int) -> Tensor:
        """Input `i` with whatever strides it has (0 on broadcast axes); it must be present."""
        return self._tensor(self.slots[required(node.inputs[i])])

    def dense(self, node: ir.Node, i: int) -> Tensor:
        """Input `i`, contiguous and 16-byte aligned (copied if need be); it must be present."""
        return self.contiguous(self.view(node, i))

    def contiguous(self, tensor: Tensor) -> Tensor:
        """`tensor`, or a contiguous, 16-byte aligned copy of it."""
        if tensor.dense and tensor.offset * ITEMSIZE[tensor.dtype] % 16 == 0:
            if tensor.strides == dense_strides(tensor.shape):
                return tensor
            return replace(tensor, strides=dense_strides(tensor.shape))
        if tensor not in self._copies:
            y = self.scratch(tensor.dtype, tensor.shape)
            self._copy(self._owner, tensor, y)
            self._copies[tensor] = y
        return self._copies[tensor]

    def _mark(self) -> tuple[int, int]:
        return len(self.calls), len(self._copies)

    def _rewind(self, mark: tuple[int, int]) -> None:
        """Forget the calls since `mark`, and the copies that they would have made."""
        del self.calls[mark[0] :]
        for tensor in list(self._copies)[mark[1] :]:
            del self._copies[tensor]

    def has(self, node: ir.Node, i: int) -> bool:
        """Whether input `i` is given."""
        return i < len(node.inputs) and node.inputs[i] is not None

    def host(self, node: ir.Node, i: int) -> np.ndarray | None:
        """The value of input `i` where it is known at lowering, else None."""
        value = node.inputs[i] if i < len(node.inputs) else None
        return None if value is None else self.slots[value].host

    def given(self, node: ir.Node, i: int, what: str = "its shape") -> np.ndarray:
        """The value of input `i`; raises Unserved, which names `what`, where it is not known."""
        value = self.host(node, i)
        if value is None:
            raise Unserved("unknown", what=what)
        return value

    def attr(self, node: ir.Node, name: str, default: object = None) -> Any:
        """An attribute's Python value (int, float, str, list, ndarray)."""
        attribute = node.attributes.get(name)
        if attribute is None:
            return default
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            return value.numpy()
        return list(value) if isinstance(value, list | tuple) else value

    def wants(self, node: ir.Node, i: int) -> bool:
        """Whether output `i` is named and used."""
        if i >= len(node.outputs):
            return False
        value = node.outputs[i]
        if value in self._results:
            return True
        return bool(value.name) and (bool(value.uses()) or value.is_graph_output())

    def output(
        self, node: ir.Node, i: int, shape: Sequence[int] | None = None, dtype: str | None = None
    ) -> Tensor:
        """A new contiguous buffer for output `i`; shape and dtype are inferred if not given."""
        if shape is None or dtype is None:
            types = self.infer(node)
            inferred = types[i] if types is not None else None
            if inferred is None:
                raise Unserved("unknown", what=f"the shape of output {i}")
            dtype = dtype or inferred[0]
            shape = shape if shape is not None else inferred[1]
        self._hold_sizes(node, i, shape)
        tensor = self.scratch(dtype, shape)
        self.slots[node.outputs[i]] = Slot(tensor=tensor)
        return tensor

    def alias(self, node: ir.Node, i: int, tensor: Tensor) -> None:
        """Let output `i` be `tensor`, a view that costs nothing."""
        self._hold_sizes(node, i, tensor.shape)
        if i < len(node.outputs):
            self.slots[node.outputs[i]] = Slot(tensor=tensor)

    def _hold_sizes(self, node: ir.Node, i: int, shape: Sequence[int]) -> None:
        if any(map(sizes.negative, shape)):
            raise self.fault(node, f"output {i} would have the negative size {_listed(shape)}")

    def scratch(self, dtype: str, shape: Sequence[int]) -> Tensor:
        """A new temporary between the calls of one lowering."""
        return self._buffer("temp", shape, dtype)

    def tokens_before(self, batch: int) -> Tensor:
        """The input LENGTHS."""
        self.lengths = self.lengths or self._buffer("input", (batch,), "int32", LENGTHS)
        return self.lengths

    def constant(self, array: np.ndarray) -> Tensor:
        """An array known at lowering, in device memory."""
        array = np.array(array, order="C")
        is_open = array.dtype == object
        small = array.size <= 1 << 16 and not is_open
        key = (array.dtype.name, array.shape, array.tobytes()) if small else None
        if key in self._known_constants:
            return self._known_constants[key]
        tensor = self._buffer("constant", array.shape, "int64" if is_open else array.dtype.name)
        self.constants[tensor.buffer] = array
        if key is not None:
            self._known_constants[key] = tensor
        return tensor

    def _buffer(self, kind: str, shape: Sequence[int], dtype: str, name: str = "") -> Tensor:
        shape = tuple(map(sizes.number, shape))
        if any(map(sizes.negative, shape)):
            raise ModelError(f"{name or 'a tensor'} would have the negative size {_listed(shape)}")
        count = prod(shape)
        if count * ITEMSIZE.get(dtype, 1) >= 2**46:
            raise ModelError(f"{name or 'a tensor'} of shape {list(shape)} is too large")
        tensor = Tensor(len(self.buffers), dtype, shape, dense_strides(shape))
        self.buffers.append(Buffer(tensor.buffer, kind, tensor.size * ITEMSIZE.get(dtype, 1), name))
        return tensor

    @abstractmethod
    def require_operand(self, node: ir.Node, i: int) -> None:
        """Raise NeedsValues where inputs of the model decide about operand `i`."""

    @abstractmethod
    def packed(
        self, tensor: Tensor, how: str, make: Callable[[np.ndarray], np.ndarray]
    ) -> Tensor | None:
        """Apply `make` to the value of a constant tensor, once for the whole program.

        `how` names what `make` does. Returns None for a tensor that the program writes to, or whose
        value is not known.
        """

    def arranged(self, view: Tensor, how: str) -> Tensor:
        """A dense copy of the view, made once where nothing in the program writes to it."""
        packed = self.packed(view, how, np.ascontiguousarray)
        return self.contiguous(view) if packed is None else packed

    def random(self) -> tuple[Tensor, int]:
        """The random generator's state, uint64 [seed, draw], and a stream number of one's own."""
        if self._random is None:
            self._random = self._buffer("random", (2,), "uint64", "random")
        self._streams += 1
        return self._random, self._streams

    def append(self, call: Call) -> None:
        """Append a call made elsewhere (pointwise expressions)."""
        self.calls.append(call)

    def select(
        self,
        node: ir.Node,
        problem: AnyProblem,
        reads: Mapping[str, Tensor],
        writes: Mapping[str, Tensor],
        *,
        inplace: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Append a call of `problem`; raises Unserved where no candidate kernel serves it.

        Nothing is appended where there is no element to write. The launches are made last, by the
        pass `select_kernels`.
        """
        if not any(t.size for t in writes.values()):
            return
        weights = reads.get("b", reads.get("wq"))
        if isinstance(problem, GemmProblem) and weights is not None and self.lasting(weights):
            problem = problem.replace(static_b=True)
        if isinstance(problem, Contraction):
            right = next((reads[name] for name in ("b", "wq", "w") if name in reads), None)
            if right is not None and prod(right.shape[-2:]) != problem.k * problem.n:
                raise self.fault(node, f"the matrix multiplication is over {problem.k}")
        if not self.serves(problem):
            reasons = refusals(problem.op, problem, self.hw)
            listing = "; ".join(f"{name}: {why}" for name, why in reasons.items())
            raise Unserved("kernels", reasons=listing or f"{problem.op} has no kernel")
        nodes = (self.label(node),)
        self.calls.append(
            Call.of(node.op_type, nodes, problem, reads, writes, inplace=tuple(inplace))
        )

    def serves(self, problem: AnyProblem) -> bool:
        """Whether a kernel serves the problem, and the one that the user asks for, if any, does."""
        return serves(problem.op, problem, self.hw, self.prefs)

    def lasting(self, tensor: Tensor) -> bool:
        """Whether nothing in the program writes to the tensor."""
        buffer = self.buffers[tensor.buffer]
        return buffer.kind in ("weight", "constant") and buffer.name not in self.mutable

    def _copy(self, label: str, x: Tensor, y: Tensor) -> None:
        code = Code()
        self.calls.append(call_of(code.expression(code.load(x)), code.reads, [y], [label]))


Lowering: TypeAlias = Callable[[Context, ir.Node], None]


def floats(x: Tensor, *others: Tensor) -> Tensor:
    """`x`; raises Unserved unless its type is one of FLOATS, and that of the others."""
    if x.dtype not in FLOATS or any(t.dtype != x.dtype for t in others):
        raise Unserved("no-kernel", what=x.dtype)
    return x


def around(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """The elements before an axis, along it, and behind it."""
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])


# ---- calls that work element by element ----------------------------------------------------------


def operand(ctx: Context, code: Code, node: ir.Node, i: int, shape: Sequence[int]) -> Any:
    """Input `i` broadcast to `shape`, and its dtype; a known single number becomes a scalar."""
    array = ctx.host(node, i)
    if array is not None and array.size == 1:
        kind = required(ctx.dtype(node.inputs[i]))
        dtype = dtype_name(kind) if array.dtype == object else array.dtype.name
        return code.scalar(array.reshape(-1)[0], dtype), dtype
    tensor = ctx.view(node, i)
    return code.load(tensor.expand(shape)), tensor.dtype


def broadcast(ctx: Context, node: ir.Node) -> tuple[int, ...]:
    """The shape that all given inputs broadcast to."""
    shapes = []
    for i in range(len(node.inputs)):
        if ctx.has(node, i):
            array = ctx.host(node, i)
            shapes.append(array.shape if array is not None else ctx.view(node, i).shape)
    return sizes.broadcast(*shapes)


def emit(ctx: Context, code: Code, node: ir.Node, value: Ref, y: Tensor) -> None:
    """Append the call that stores `value` to `y`."""
    call = call_of(code.expression(value), code.reads, [y], [ctx.label(node)])
    ctx.append(call)


def apply(ctx: Context, node: ir.Node, y: Tensor, step: str, *operands: Tensor | float) -> None:
    """y = step(operands), tensors that broadcast to y's shape and numbers; "": the operand itself.

    A number is of the type of the last tensor, or of y's.
    """
    tensors, code = [t for t in operands if isinstance(t, Tensor)], Code()
    kind = (tensors or [y])[-1].dtype
    values = [code.load(v.expand(y.shape)) if isinstance(v, Tensor) else code.scalar(v, kind)
              for v in operands]  # fmt: skip
    emit(ctx, code, node, code.step(step, y.dtype, *values) if step else values[0], y)


def copy(ctx: Context, node: ir.Node, x: Tensor, y: Tensor) -> None:
    """y[...] = x[...] for views of one shape."""
    apply(ctx, node, y, "", x)


# ---- helpers ------------------------------------------------------------------------------------

_BY_NAME: dict[str, ir.DataType] = {}


def data_type(name: str) -> ir.DataType:
    """The ONNX element type of a NumPy dtype's name."""
    if not _BY_NAME:
        for dtype in ir.DataType:
            if dtype != ir.DataType.UNDEFINED:
                _BY_NAME.setdefault(dtype_name(dtype), dtype)
        _BY_NAME["object"] = ir.DataType.STRING
    if name in _BY_NAME:
        return _BY_NAME[name]
    return ir.DataType.STRING


def type_proto(dtype: ir.DataType, shape: Sequence[int | str]) -> onnx.TypeProto:
    """The type as ONNX has it, of the integers that open sizes are here."""
    dims = [size if isinstance(size, str) else sizes.plain(size) for size in shape]
    return onnx.helper.make_tensor_type_proto(dtype.value, dims)


def _listed(shape: Sequence[int]) -> list[int]:
    return [sizes.hint(n) for n in shape]


def _as_float16(proto: onnx.TypeProto) -> onnx.TypeProto:
    changed = onnx.TypeProto()
    changed.CopyFrom(proto)
    if changed.tensor_type.elem_type == onnx.TensorProto.BFLOAT16:
        changed.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return changed
