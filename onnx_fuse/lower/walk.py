"""HLIR -> Program: every node to calls. The contract is in `program.call`.

A node is evaluated at lowering where all it reads is known; else its family's lowering serves it;
else its body is lowered instead; else onnxruntime runs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import Code, call_of, dtype_name
from onnx_fuse.importer import contrib
from onnx_fuse.importer.save import inline, to_proto
from onnx_fuse.ir.build import Builder, captured, required, subgraphs
from onnx_fuse.ir.constants import DEFAULT, base_name, one_line
from onnx_fuse.kernels import same_choices
from onnx_fuse.lower import elementwise, views
from onnx_fuse.lower.cached_attention import checked_rooms
from onnx_fuse.lower.context import (
    WEIGHT_LIMIT,
    Lowering,
    Mistyped,
    Slot,
    Unserved,
    data_type,
    type_proto,
)
from onnx_fuse.lower.control import Control
from onnx_fuse.lower.decompose import DECOMPOSED, is_flat_grid
from onnx_fuse.lower.derived_weights import DerivedWeights
from onnx_fuse.lower.folds import Folds
from onnx_fuse.lower.sequences import followed, leave, sequence, sequences
from onnx_fuse.lower.stages import beyond_tensors, by_passes, stages, use_oldest_opset
from onnx_fuse.lower.table import lowerings
from onnx_fuse.lower.updates import Updates, is_update
from onnx_fuse.ops.bodies import carries_body
from onnx_fuse.program import host
from onnx_fuse.program import passes as program_passes
from onnx_fuse.program import size as sizes
from onnx_fuse.program.call import LENGTHS, Call, NeedsValues, Program, Shapes, Tensor
from onnx_fuse.program.passes.callgraph import writers_of
from onnx_fuse.program.passes.select import call_early
from onnx_fuse.program.problem import ITEMSIZE, Hardware, Prefs
from onnx_fuse.reasons import Reason

FITTED = {"Attention", "BatchNormalization", "Concat", "Conv", "ConvTranspose", "GatherElements",
          "GatherND", "Gemm", "GroupNormalization", "InstanceNormalization", "LayerNormalization",
          "MatMul", "NegativeLogLikelihoodLoss", "RMSNormalization", "RotaryEmbedding",
          "ScatterElements", "ScatterND", "SoftmaxCrossEntropyLoss"}  # fmt: skip
"""Operators whose kernels believe that the operands fit together: inference is asked before."""
CONTROL = ("If", "Loop", "Scan")
DIRECT = views.LOWERINGS.keys() | elementwise.LOWERINGS.keys()
"""Lowered as ever where a tensor has no elements: ONNX infers other shapes for PRelu and Squeeze,
and refuses the -1 of a Reshape."""
PREVIEW = "ai.onnx.preview"
"""Domain of the standard's operators that are on trial; they have bodies, and no kernels."""
SETUP_LIMIT = 1 << 20
"""Bytes that a call may write at most to run once, before the first run, and not in each."""


def lower(
    model: ir.Model,
    shapes: Shapes,
    hw: Hardware,
    *,
    math: str = "ieee",
    prefs: Prefs = None,
    state: Mapping[str, str] | None = None,
    values: Mapping[str, np.ndarray] | None = None,
    chosen: Callable[[Program, Callable[[np.ndarray], bool]], None] | None = None,
) -> Program:
    """The Program of `model` for inputs of these (shape, dtype), by name.

    `values` are inputs known at lowering. Raises NeedsValues where a shape depends on small integer
    inputs that are not among them.

    `chosen` is told of the program while threads still make its weights, and what waits for one of
    its arrays. Where that says False, numbers are beyond their type, and another program follows.

    `state` maps outputs to the inputs (or initializers) whose next value they are: those are
    written in place. The initializers among them are never taken for constants.
    """
    with same_choices():
        while True:
            lowerer = Lowerer(model, shapes, hw, math=math, prefs=prefs, state=state, values=values)
            program = lowerer.run()
            if chosen is not None:
                chosen(program, lowerer.weight_folds.is_made)
            if lowerer.weight_folds.keep():
                return program


class Lowerer(Control, DerivedWeights):
    """The walk: each node to its kernels, its body, or onnxruntime."""

    def __init__(
        self,
        model: ir.Model,
        shapes: Shapes,
        hw: Hardware,
        *,
        math: str = "ieee",
        prefs: Prefs = None,
        state: Mapping[str, str] | None = None,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        super().__init__(model.graph.opset_imports, hw, math, prefs)
        self.model, self.shapes, self.state = model, shapes, dict(state or {})
        self.packings: dict[str, Tensor] = {}
        self.weight_folds = Folds(model.graph.meta.setdefault("folded", {}))  # and the next shapes'
        self.values = dict(values or {})
        # inputs of a body -> what it was called on; results of a node -> those of its body
        self.origin: dict[ir.Value, ir.Value] = {}
        self.fallbacks: dict[str, str] = {}
        self.in_parts: dict[str, str] = {}
        self._bodies: dict[tuple[Any, ...] | None, ir.Graph] = {}
        self._updates = Updates()
        self.later: list[ir.Node] = []
        self.stuck: set[ir.Node] = set()
        self.of_sequences = followed(model.graph)
        self.undecided: set[ir.Node] = set()  # whose decomposition wants a value to be known

    # ---- the walk ----

    def run(self) -> Program:
        graph = self.model.graph
        # an earlier stage gave its names to what this one reads
        while any((v.name or "").startswith(f"{self._prefix}_") for v in graph.inputs):
            self._prefix += "_"
        mutable = self.mutable = set(self.state.values())
        self.in_rooms = LENGTHS in self.shapes
        inputs = []
        for value in graph.inputs:
            if value.name in self.values:
                held = self.values[value.name]
                self.slots[value] = Slot(
                    host=held.astype(object) if held.dtype.kind == "U" else held
                )
                continue
            default = value.meta.get(DEFAULT)
            if value.name not in self.shapes and default is not None:
                shape, kind = tuple(default.numpy().shape), dtype_name(default.dtype)
            else:
                shape, kind = self.shapes[value.name or ""]
            if data_type(kind) == ir.DataType.STRING:  # for which a device has no place
                raise NeedsValues([value.name or ""])
            tensor = self._buffer("input", shape, kind, value.name or "")
            self.slots[value] = Slot(tensor=tensor)
            inputs.append((value.name or "", tensor))
        for value in graph.initializers.values():
            assert value.const_value is not None
            small = value.const_value.size <= WEIGHT_LIMIT and value.name not in mutable
            dtype = value.const_value.dtype
            number = value.const_value.size == 1 or not dtype.is_floating_point()
            if (small and number) or dtype == ir.DataType.STRING:
                self.slots[value] = Slot(host=value.const_value.numpy())
            else:
                shape, name = tuple(value.const_value.shape.numpy()), dtype_name(dtype)
                tensor = self._buffer("weight", shape, name, value.name or "")
                values = None if value.name in mutable or not small else value.const_value.numpy()
                self.slots[value] = Slot(host=values, tensor=tensor)
        for node in graph:
            self._node(node)
        if self.in_rooms:
            inputs.append((LENGTHS, checked_rooms(self, graph)))
        outputs, writes = self._outputs()
        names = [v.name or "" for v in graph.outputs if self.slots[v].later]
        rest = stages(self, names)
        keep = {t.buffer for _, t in outputs if isinstance(t, Tensor)}
        keep |= {t.buffer for _, t in writes}
        keep |= {t.buffer for stage in rest for _, t in stage.inputs if t is not None}
        if self._random is not None:  # the next run draws other numbers
            self._count(self._random.slice([1], [1], [1]), "random", keep)
        if self.lengths is not None:  # and has these tokens before it
            self._count(self.lengths, LENGTHS, keep)
        calls = program_passes.run(self.calls, keep, self)
        used = keep | {t.buffer for c in calls for _, t in (*c.reads, *c.writes)}
        setup, calls = self._once_only(calls, keep)
        return Program(
            call_early(calls, self.hw),
            tuple(b for b in self.buffers if b.id in used or b.kind == "input"),
            tuple(inputs),
            tuple(outputs),
            {k: v for k, v in self.constants.items() if k in used},
            tuple(f"{op}: {why}" for op, why in self.fallbacks.items()),
            rest,
            setup,
            in_parts=tuple(f"{op}: {why}" for op, why in self.in_parts.items()),
        )

    def _count(self, x: Tensor, name: str, keep: set[int]) -> None:
        """Add one to a number in place, for the next run."""
        code = Code()
        more = code.step("Add", x.dtype, code.load(x), code.scalar(1, x.dtype))
        self.calls.append(call_of(code.expression(more), code.reads, [x], [name]))
        keep.add(x.buffer)

    def _once_only(
        self, calls: Sequence[Call], keep: Collection[int]
    ) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        """The calls to run once, which read constants alone and write little; and the others."""
        writers = writers_of(calls)
        setup, others = [], []
        for call in calls:
            out = [self.buffers[t.buffer] for _, t in call.writes]
            if (
                all(self.buffers[t.buffer].kind == "constant" for _, t in call.reads)
                and all(
                    b.kind == "temp" and b.id not in keep and len(writers[b.id]) == 1 for b in out
                )
                and sum(sizes.upper_bound(b.nbytes, sizes.wide_size_class) for b in out)
                <= SETUP_LIMIT
                and not (call.host or call.workspace)
                and not any(launch.sync for launch in call.launches)
            ):
                for b in out:
                    self.buffers[b.id] = replace(b, kind="constant")
                setup.append(call)
            else:
                others.append(call)
        return tuple(setup), tuple(others)

    def _node(self, node: ir.Node) -> None:
        if contrib.lookup(node) is not None:
            for i, value in enumerate(node.outputs):
                if not contrib.wants(node, i):
                    value.name = ""  # a body need not make it
        slots = [self.slots[v] for v in node.inputs if v is not None]
        if any(slot.later for slot in slots) or any(
            self.slots[v].later for v in captured(node) if v in self.slots
        ):
            self._defer(node)
            return
        if node.op_type in CONTROL and node.domain == "" and self._control(node):
            return
        if self._evaluate(node) or (self.of_sequences and sequence(self, node)):
            return
        if (node.domain, node.op_type) in DIRECT or not self._empty(node):
            self._lower(node)

    def _empty(self, node: ir.Node) -> bool:
        """Give a node that reads a tensor without elements its results, where these have none.

        Bodies, ONNX's own among them, are written for elements: their Reshape takes 0 for a size to
        keep.
        """
        if node.op_type == "Squeeze":  # onnx's inference squeezes nothing by an empty list of axes
            return False
        read = [self.slots[v].tensor for v in node.inputs if v is not None]
        if not any(t is not None and not t.size for t in read) or captured(node):
            return False
        types = self.infer(node)
        results = [(i, types and types[i]) for i, v in enumerate(node.outputs) if v.name]
        typed = [(i, *type_) for i, type_ in results if type_ is not None]
        if len(typed) < len(results) or any(d not in ITEMSIZE or prod(s) for _, d, s in typed):
            return False
        for i, dtype, shape in typed:
            self.output(node, i, shape, dtype)
        return True

    def _lower(self, node: ir.Node) -> None:
        lowering = lowerings().get((node.domain, base_name(node)))
        mark = self._mark()
        outermost = not self._owner
        self._owner = self.label(node)
        try:
            reason = self._attempt(lowering, node)
            if not reason:
                return
            self._rewind(mark)
            if reason.name == "unknown" and (names := self._deciding(node)):
                raise NeedsValues(names)
            if self._learns(node, reason):
                self._defer(node)
            elif not (self._empty(node) or self._expand(node)):
                self._fallback(node, reason)
            elif lowering is not None:
                self.in_parts.setdefault(node.op_type, str(reason))
        finally:
            if outermost:
                self._owner = ""

    def _attempt(self, lowering: Lowering | None, node: ir.Node) -> Reason | None:
        """Why the lowering does not serve the node; None where it has."""
        given = (v for v in node.inputs if v is not None)
        if (unsupported := next((v for v in given if not self._numeric(v)), None)) is not None:
            return Reason("no-kernel", what=f"{unsupported.dtype} tensors")
        if lowering is None:
            return Reason("unserved")
        if node.domain == "" and node.op_type in FITTED:
            # kernels take types that an opset's operator does not have
            with contextlib.suppress(Mistyped):
                self._inferred(node)
        try:
            with self._misfits(node):
                lowering(self, node)
        except Unserved as error:
            return error.reason
        return None

    @contextlib.contextmanager
    def _misfits(self, node: ir.Node) -> Iterator[None]:
        """What ranks, axes and sizes raise that no valid node has becomes an error that says so."""
        try:
            yield
        except (IndexError, ArithmeticError) as error:
            raise self.fault(node, "its inputs and attributes contradict each other") from error
        except ValueError as error:
            raise self.fault(node, one_line(error)) from error

    def _deciding(self, node: ir.Node, operand: int | None = None) -> list[str]:
        """Small inputs of the model that unknown operands of a node (all but the first, or one) are
        computed from.
        """
        deciding: dict[str, None] = {}
        operands = node.inputs[1:] or node.inputs if operand is None else [node.inputs[operand]]
        todo = [v for v in operands if v is not None]
        seen: set[ir.Value] = set()
        direct = set(todo)
        while todo:
            value = todo.pop()
            while value in self.origin:
                value = self.origin[value]
            slot = self.slots.get(value)
            if value in seen or slot is None or slot.host is not None:
                continue
            seen.add(value)
            if value.is_graph_input() and value in self.model.graph.inputs:
                tensor = slot.tensor
                # what sizes are computed from is integers: no program for each vector of floats
                counts = value in direct or (
                    tensor is not None and (tensor.size == 1 or "int" in tensor.dtype)
                )
                if tensor is not None and counts and len(tensor.shape) <= 1 and tensor.size <= 64:
                    deciding[value.name or ""] = None
                elif value not in direct or tensor is None or tensor.size <= 64:
                    return []  # a larger operand is data beside what decides
            producer = value.producer()
            todo += [v for v in (producer.inputs if producer is not None else ()) if v is not None]
        return list(deciding)

    def _numeric(self, value: ir.Value) -> bool:
        slot = self.slots[value]
        if slot.tensor is not None:
            return slot.tensor.dtype in ITEMSIZE
        values = slot.host
        return values is None or values.dtype.name in ITEMSIZE or host.is_open(values)

    def _outputs(self) -> tuple[list[tuple[str, Any]], list[tuple[str, Tensor]]]:
        """Give each output a buffer of its own, and write states over what they replace."""
        outputs: list[tuple[str, Any]] = []
        writes: list[tuple[str, Tensor]] = []
        used: set[int] = set()
        named = {v.name: self.slots[v] for v in (*self.model.graph.inputs,
                 *self.model.graph.initializers.values())}  # fmt: skip
        # what state is replaced by must be read before it is overwritten: copies come last
        late: list[tuple[str, Tensor, Tensor]] = []
        for value in self.model.graph.outputs:
            slot, name = self.slots[value], value.name or ""
            if slot.later:
                outputs.append((name, None))
                continue
            if name in self.state:
                target = required(named[self.state[name]].tensor)
                late.append((name, self._tensor(slot), target))
                outputs.append((name, target))
                writes.append((name, target))
                continue
            if slot.tensor is None:
                outputs.append((name, required(slot.host)))
                continue
            tensor = slot.tensor
            buffer = self.buffers[tensor.buffer]
            fresh = buffer.kind == "temp" and tensor.dense and tensor.offset == 0
            whole = tensor.nbytes == buffer.nbytes
            if not (fresh and whole) or tensor.buffer in used:
                copied = self._buffer("output", tensor.shape, tensor.dtype, name)
                self._copy(name, tensor, copied)
                tensor = copied
            else:
                self.buffers[tensor.buffer] = replace(buffer, kind="output", name=name)
            used.add(tensor.buffer)
            outputs.append((name, tensor))
        replaced = {target.buffer for _, _, target in late}
        moved = [(name, source, target) for name, source, target in late if source != target]
        for i, (name, source, target) in enumerate(moved):
            if source.buffer in replaced:  # a view of a state: of its value before
                copied = self.scratch(source.dtype, source.shape)
                self._copy(name, source, copied)
                moved[i] = name, copied, target
        for name, source, target in moved:
            self._copy(name, source, target)
        return outputs, writes

    # ---- bodies, branches, onnxruntime ----

    def _inner(self, graph: ir.Graph, outputs: Sequence[ir.Value]) -> None:
        self._once(graph)
        for value, result in zip(outputs, graph.outputs, strict=True):
            self._result(value, result)

    def _result(self, value: ir.Value, result: ir.Value) -> None:
        """Let `value` be the `result` of a body, a branch or a decomposition."""
        self.slots[value], self.origin[value] = self.slots[result], result
        if self.slots[result].later and value.name:  # a stage knows values by name
            link = ir.Node("", "Identity", [result], num_outputs=1)
            link.outputs[0].name = value.name
            self.later.append(link)

    def _expand(self, node: ir.Node) -> bool:
        """Lower the node's body in its stead: ours, or the function of its ONNX schema."""
        if self._decompose(node):
            return True
        key = self._call_key(node)
        if key is not None and is_update(node) and self._updated(node, key):
            return True
        # out of the table meanwhile: an inner node may be of the same key
        stored_body, mark, later = self._bodies.pop(key, None), self._mark(), len(self.later)
        body = self._body(node) if stored_body is None else stored_body
        if body is None:
            return False
        self._lower_in_place(node, body)
        if stored_body is not None and len(self.later) > later:
            self._rewind(mark)  # a later stage would have one body's nodes and names twice
            del self.later[later:]
            return self._expand(node)
        if key is not None and len(self.later) == later:
            self._bodies[key] = body
            for value in node.outputs:  # whose origins the next call that has the body changes
                self.origin.pop(value, None)
        return True

    def _updated(self, node: ir.Node, key: tuple[Any, ...]) -> bool:
        """Lower an optimizer's update; one like an earlier update takes over its fused calls.

        Returns False where the operands or the body are not known.
        """
        tensors = [self.slots[v].tensor for v in dict.fromkeys(node.inputs) if v is not None]
        operands = [t for t in tensors if t is not None]
        if len(operands) < len(tensors):
            return False
        wanted = [v for v in node.outputs if v.name]
        results = self._updates.again(self, key, operands, self.label(node))
        if results is not None:
            self.slots |= {v: Slot(tensor=t) for v, t in zip(wanted, results, strict=True)}
            return True
        body, start = self._body(node), len(self.calls)
        if body is None:
            return False
        self._lower_in_place(node, body)
        updated = [t for v in wanted if (t := self.slots[v].tensor) is not None]
        if len(updated) == len(wanted):
            calls = self.calls[start:]
            self.calls[start:] = self._updates.keep(key, calls, operands, updated)
        return True

    def _lower_in_place(self, node: ir.Node, body: ir.Graph) -> None:
        """Lower `body`, made for this node or for an earlier one of equal key, as the node."""
        inputs = list(dict.fromkeys(v for v in node.inputs if v is not None))
        for value, outer in zip(body.inputs, inputs, strict=True):
            self.slots[value], self.origin[value] = self.slots[outer], outer
        self._inner(body, [v for v in node.outputs if v.name])

    def _call_key(self, node: ir.Node) -> tuple[Any, ...] | None:
        """A key that is equal for nodes that may share one body; None for a node that may not."""
        return self._node_key(node) if carries_body(node) else None

    def walk(self, nodes: Sequence[ir.Node], results: Sequence[ir.Value]) -> None:
        self._results.update(results)
        for node in nodes:
            self._name([v for v in node.inputs if v is not None])
            self._name(node.outputs)
            self._node(node)

    def _decompose(self, node: ir.Node) -> bool:
        rule = DECOMPOSED.get((node.domain, base_name(node)))
        if rule is None:
            return False
        op = Builder()
        for value in node.inputs:
            if value is not None and value.dtype is None:
                value.dtype = self._type(value)[0]
        shapes = [() if v is None else self._type(v)[1] for v in node.inputs]

        unknown: list[int] = []

        def known(i: int) -> np.ndarray | None:
            if not self.has(node, i):
                return None
            value = self.host(node, i)
            if value is None:
                unknown.append(i)
                raise Unserved("unknown", what=f"input {i}")
            return value

        try:
            with self._misfits(node):
                results = rule(op, node, shapes, known)
        except Unserved:
            if unknown and (names := self._deciding(node, unknown[0])):
                raise NeedsValues(names) from None
            self.undecided.add(node)
            return False
        if results is None:
            return False
        self.walk(op.nodes, [v for v in results if v is not None])
        for value, result in zip(node.outputs, results, strict=False):
            if result is not None:
                self._result(value, result)
        return True

    def _body(self, node: ir.Node) -> ir.Graph | None:
        if sequences(self, node.inputs):  # they have no type of a tensor
            return None
        single = self._single(node)
        if carries_body(node):
            return inline(single).graph
        if contrib.lookup(node) is not None:
            if contrib.expand(single):
                return None
            for inner in single.graph:  # a later stage knows values by name
                for value in inner.outputs:
                    value.name = ""
                self._name(inner.outputs)
            return single.graph
        version = self.opsets.get(node.domain, 1)
        standard = node.domain in ("", PREVIEW) and not is_flat_grid(self, node)
        if not standard or not onnx.defs.has(node.op_type, version, node.domain):
            return None
        schema: Any = onnx.defs.get_schema(node.op_type, version, node.domain)
        call = next(iter(single.graph))
        for i, value in enumerate(call.outputs):  # a body makes all of them, wanted or not
            value.name = value.name or f"{node.op_type} {i}"
        proto = ir.serde.serialize_node(call)
        if schema.has_function:
            function = schema.function_body
        elif schema.has_context_dependent_function:
            types = [
                self._typed(v).SerializeToString() if v is not None else b"" for v in node.inputs
            ]
            versions = [
                v for v in schema.context_dependent_function_opset_versions if v <= self.opset
            ]
            data = schema.get_context_dependent_function_with_opset_version(
                max(versions), proto.SerializeToString(), types
            )
            if not data:
                return None
            function = onnx.FunctionProto.FromString(data)
        else:
            return None
        opset = max(
            (o.version for o in function.opset_import if o.domain in ("", "ai.onnx")),
            default=self.opset,
        )
        if opset > self.opset:
            return None
        del function.output[len(node.outputs) :]
        for name, attribute in schema.attributes.items():
            if name not in call.attributes and attribute.default_value.type:
                default = ir.serde.deserialize_attribute(attribute.default_value)
                call.attributes[name] = ir.Attr(name, default.type, default.value)
        for name in [k for k, a in call.attributes.items() if subgraphs(a)]:
            del call.attributes[name]  # the function was made with them inside it
        deserialized = ir.serde.deserialize_function(function)
        # the body is written for an opset at or below the model's, and means the same in it
        deserialized.domain, deserialized.name = node.domain, node.op_type
        deserialized.opset_imports[""] = self.opset
        single.functions[deserialized.identifier()] = deserialized
        ir.passes.common.InlinePass()(single)
        return single.graph

    def _fallback(self, node: ir.Node, reason: Reason) -> None:
        """Fall back to onnxruntime, or defer to a later stage if shapes depend on data."""
        if self._learns(node, reason):  # a decomposition asked for a value
            self._defer(node)
            return
        if by_passes(node) and not beyond_tensors(node, self.slots):
            self.stuck.add(node)
            self._defer(node)
            return
        name = node.op_type if not node.domain else f"{node.domain}.{node.op_type}"
        self.fallbacks.setdefault(name, str(reason))
        types = None if captured(node) or sequences(self, node.inputs) else self.infer(node)
        outputs = [(i, v) for i, v in enumerate(node.outputs) if v.name]
        found_types = [None if types is None else types[i] for i, _ in outputs]
        typed = all(t is not None and t[0] in ITEMSIZE for t in found_types)  # no strings
        if not typed or any(not self._numeric(v) for v in node.inputs if v is not None):
            self.stuck.add(node)
            self._defer(node)
            return
        model = to_proto(self._single(node))
        use_oldest_opset(self, model, [node])
        reads = {
            v.name: self.contiguous(self._tensor(self.slots[v]))
            for v in node.inputs
            if v is not None
        }
        writes: dict[str, Tensor] = {}
        for i, value in outputs:
            inferred = required(required(types)[i])
            writes[value.name or ""] = self.output(node, i, inferred[1], inferred[0])
        for info, (name, tensor) in zip(model.graph.output, writes.items(), strict=True):
            kind = type_proto(data_type(tensor.dtype), tensor.shape)
            info.CopyFrom(onnx.ValueInfoProto(name=name, type=kind))
        self.calls.append(
            Call(
                f"onnxruntime:{node.op_type}",
                (self.label(node),),
                (),
                tuple(reads.items()),  # type: ignore[arg-type]
                tuple(writes.items()),
                note=str(reason),
                host=model.SerializeToString(),
            )
        )

    def _defer(self, node: ir.Node) -> None:
        leave(self, node)
        for value in node.outputs:
            self.slots[value] = Slot(later=True)

    def _learns(self, node: ir.Node, reason: Reason) -> bool:
        """Whether a later stage can lower the node, once a small deciding operand is computed."""
        if reason.name != "unknown" and node.op_type not in CONTROL and node not in self.undecided:
            return False
        tensors = (self.slots[v].tensor for v in node.inputs if v is not None)
        return any(
            t is not None
            and len(t.shape) <= 1
            and t.size <= 64
            and not (self.buffers[t.buffer].kind == "input" or self.lasting(t))
            for t in tensors
        )
