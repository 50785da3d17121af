"""A Program run by NumPy: each call as its problem defines it, host calls by onnxruntime.

Lowering, views, passes and memory plans are so checked against onnxruntime without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import getmembers, isfunction
from types import ModuleType
from typing import Any, get_type_hints

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.guard import in_child
from onnx_fuse.program.call import Call, Program, Tensor, run_loop
from onnx_fuse.program.data_movement import BatchedCalls
from onnx_fuse.program.interpret import (
    attention,
    contractions,
    data_movement,
    images,
    losses,
    norms,
    recurrences,
    regions,
    sums,
)
from onnx_fuse.program.interpret.memory import CallOperands, HostMemory
from onnx_fuse.program.interpret.steps import evaluate
from onnx_fuse.program.problem import AnyProblem, Collective

Answer = Callable[[Any, CallOperands], data_movement.Results]
Exchange = Callable[[Collective, list[np.ndarray]], list[np.ndarray]]
Lowered = Callable[[ir.Model, Mapping[str, np.ndarray]], Program]


def _by_problem(*modules: ModuleType) -> dict[type[AnyProblem], Answer]:
    """The public functions of (p, of), by the kind of problem that annotates their `p`."""
    functions = [f for m in modules for name, f in getmembers(m, isfunction) if name[0] != "_"]
    answers = [f for f in functions if list(f.__annotations__)[:2] == ["p", "of"]]
    return {get_type_hints(answer)["p"]: answer for answer in answers}


def _batched(p: BatchedCalls, of: CallOperands) -> data_movement.Results:
    """The answers of calls that share a launch."""
    answer, results = ANSWERS[type(p.problem)], data_movement.Results()
    for i in range(p.count):
        part = answer(p.problem, of.of(i))
        results |= {f"{name}.{i}": value for name, value in part.items()}
    return results


ANSWERS = _by_problem(
    *(attention, contractions, data_movement, images, losses, norms, recurrences, regions, sums)
)
ANSWERS[BatchedCalls] = _batched
"""The answer to each kind of problem: its results by the names under which a call writes them.

Three kinds are answered elsewhere: a Pointwise alone by its call's expression, a Collective by what
the ranks exchange, and what a user has registered by onnxruntime, from its body.
"""


def interpret(
    program: Program,
    feeds: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
    lowered: Lowered | None = None,
    exchange: Exchange | None = None,
    offsets: Mapping[int, int] | None = None,
    seed: tuple[int, int] = (0, 0),
) -> dict[str, np.ndarray]:
    """The program's outputs, by their names, of arrays `feeds` and `weights` by theirs.

    Buffers stand at `offsets` (id to bytes) of one arena, each that has none by itself. The later
    stages are lowered by `lowered`, and interpreted in their turn, or run by onnxruntime.
    Collectives are what `exchange` makes of this rank's tensors. `seed` is the seed of random
    numbers and how often they were drawn. Raises LookupError for a problem that has no answer.
    """
    memory = HostMemory(program, offsets or {})
    _fill(memory, program, feeds, weights, seed)
    for call in (*program.setup, *program.calls):
        results = _answer(call, memory, exchange)
        for name, tensor in call.writes:
            memory.store(tensor, results[name])
    outputs: dict[str, np.ndarray] = {}
    for name, value in program.outputs:
        if value is not None:
            outputs[name] = memory.view(value).copy() if isinstance(value, Tensor) else value
    later = _later(program, memory, lowered)
    return outputs | {name: later[name] for name, value in program.outputs if value is None}


def _fill(
    memory: HostMemory,
    program: Program,
    feeds: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
    seed: tuple[int, int],
) -> None:
    for name, tensor in program.inputs:
        memory.view(tensor)[...] = feeds[name]
    for b in program.buffers:
        if b.kind == "weight" and b.id not in program.constants:
            array = np.ascontiguousarray(weights[b.name])
            memory.parts[b.id][...] = array.reshape(-1).view(np.uint8)
        elif b.kind == "random":
            memory.parts[b.id].view(np.uint64)[:2] = seed
    for buffer, array in program.constants.items():
        memory.parts[buffer][...] = array.reshape(-1).view(np.uint8)


def _answer(call: Call, memory: HostMemory, exchange: Exchange | None) -> Mapping[str, np.ndarray]:
    of, problem = CallOperands(memory, call.reads, call.writes), call.problem
    names = [name for name, _ in call.writes]
    if call.expression is not None:
        reads = [of.memory.view(t).copy() for _, t in call.reads]
        for row in call.expression.rows:
            reads[row.load] = memory.rows(call.reads[row.load][1], row, reads[row.index])
        results = evaluate(call.expression, reads, [t for _, t in call.writes])
        return dict(zip(names, results, strict=True))
    if call.host:
        arrays = by_onnxruntime(call.host, names, {name: of.raw(name) for name in of.reads})
        return dict(zip(names, arrays, strict=True))
    if isinstance(problem, Collective):
        if exchange is None:
            raise LookupError("a program of one rank of several needs what the ranks exchange")
        sent = [of.raw(name) for name in of.reads]
        return dict(zip(names, exchange(problem, sent), strict=True))
    answer = ANSWERS.get(type(problem)) if problem is not None else None
    if answer is None:
        raise LookupError(f"no interpretation of {call.kernel}: {problem}")
    return answer(problem, of)


def _later(program: Program, memory: HostMemory, lowered: Lowered | None) -> dict[str, np.ndarray]:
    computed: dict[str, np.ndarray] = {}
    for stage in program.stages:
        inputs = {n: computed[n] if t is None else memory.view(t).copy() for n, t in stage.inputs}
        if stage.host or lowered is None:
            results = by_onnxruntime(stage.model, stage.outputs, inputs)
            computed.update(zip(stage.outputs, results, strict=True))
            continue
        model = ir.serde.deserialize_model(onnx.ModelProto.FromString(stage.model))
        constants = initializers(model)
        if stage.loop is None:
            computed |= interpret(lowered(model, inputs), inputs, constants, lowered)
            continue
        names, outputs = [v.name or "" for v in model.graph.inputs], stage.loop.outputs

        def once(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            feeds = {name: values[name] for name in names}  # noqa: B023 - called before the next stage
            arrays = interpret(lowered(model, feeds), feeds, constants, lowered)  # noqa: B023
            return [arrays[name] for name in outputs]  # noqa: B023

        computed |= zip(stage.outputs, run_loop(stage.loop, inputs, once, np.stack), strict=True)
    return computed


def initializers(model: ir.Model) -> dict[str, np.ndarray]:
    """The arrays of a graph's initializers."""
    values = {name: v.const_value for name, v in model.graph.initializers.items()}
    return {name: value.numpy() for name, value in values.items() if value is not None}


def by_onnxruntime(
    model: bytes, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """The outputs of a serialized model, run on the CPU. Raises Crash where that ends a process."""
    import onnxruntime

    arrays: list[np.ndarray] = in_child(
        lambda: onnxruntime.InferenceSession(model).run(list(outputs), dict(feeds)), silent=True
    )
    return arrays
