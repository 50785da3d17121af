"""Structural mutants of the test graphs: what `optimize` writes must equal what was read.

    python tools/fuzz.py [--count 20000] [--seed 0] [--workers 2] [--keep DIR]

A mutant is one of the graphs in tests/fusion_cases.py, or a stored export, with one to three
changes: a node bypassed, its operands exchanged or rewired, its operator or an attribute replaced,
a constant changed or raised in rank, a value made an output, a pair of Casts or a neutral operator
put between two nodes, a node moved into a branch, an initializer made an overridable input, another
opset.

Where onnxruntime runs the mutant, it is optimized at levels 0 to 3 and inlined, and each result
must give onnxruntime's outputs (both at onnxruntime's own lowest optimization level), on a random
feed and on one with -0, 0, infinities, NaN and large numbers. Where onnxruntime refuses the mutant,
`optimize` may do what it likes but raise an error of another kind than its own.

What a difference is measured against: the same mutant under all of onnxruntime's optimizations, and
on inputs moved by one unit in the last place. An ill-conditioned mutant differs from itself by as
much as from its fusion; such outputs are compared no more closely than that.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from cases import NEWEST_OPSET, real_cases
from fusion_cases import FUSION_CASES

Feeds = dict[str, np.ndarray]
Phase = Any
"""A shared number: 0 while onnxruntime runs the mutant itself, 1 after."""
QUIET = ("equal", "invalid", "refused")
LEVELS = (0, 1, 2, 3)
SECONDS = 60
"""What one mutant may take before it counts as hanging."""
RTOL = {"float16": 2e-2, "float32": 2e-4, "float64": 1e-8}
"""Of an output's largest finite magnitude: sums in another order, fewer roundings to float16."""
SENSITIVITY = 16
"""How much more than the mutant's own difference from itself its fusion may differ."""

# Operators that may stand for each other: same number of inputs, similar types.
SIBLINGS = (
    ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "PRelu"),
    (
        *("Relu", "Sigmoid", "Tanh", "Erf", "Neg", "Abs", "Exp", "Sqrt", "Softplus", "Identity"),
        *(
            "Sign",
            "Floor",
            "Reciprocal",
            "LeakyRelu",
            "Elu",
            "Softsign",
            "Gelu",
            "HardSwish",
            "Log",
        ),
    ),
    ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL2"),
    ("Softmax", "LogSoftmax", "Hardmax"),
    ("MatMul", "Mul", "Add"),
    ("And", "Or", "Xor"),
    ("Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal"),
    ("LayerNormalization", "RMSNormalization"),
    ("Squeeze", "Unsqueeze"),
)


# ---- mutations: each changes `graph` in place and answers whether it could ----------------------


def _choice(rng: np.random.Generator, items: Any) -> Any:
    items = list(items)
    return items[int(rng.integers(len(items)))] if items else None


def bypass(graph: GraphProto, rng: np.random.Generator) -> bool:
    node = _choice(rng, [n for n in graph.node if n.input and n.input[0] and n.output])
    if node is None:
        return False
    _rename_uses(graph, node.output[0], node.input[0])
    return True


def swap_operands(graph: GraphProto, rng: np.random.Generator) -> bool:
    node = _choice(rng, [n for n in graph.node if len(n.input) > 1])
    if node is None:
        return False
    i, j = rng.choice(len(node.input), 2, replace=False)
    node.input[i], node.input[j] = node.input[j], node.input[i]
    return True


def sibling(graph: GraphProto, rng: np.random.Generator) -> bool:
    found = [(n, group) for n in graph.node for group in SIBLINGS if n.op_type in group]
    if not found:
        return False
    node, group = _choice(rng, found)
    node.op_type = _choice(rng, group)
    return True


def attribute(graph: GraphProto, rng: np.random.Generator) -> bool:
    found = [(n, a) for n in graph.node for a in n.attribute if not a.HasField("g")]
    if not found:
        return False
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
    return True


def constant(graph: GraphProto, rng: np.random.Generator) -> bool:
    held = _choice(rng, graph.initializer)
    if held is None:
        return attribute(graph, rng)
    name = held.name
    held.CopyFrom(_changed(held, rng))
    held.name = name
    return True


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


def expose(graph: GraphProto, rng: np.random.Generator) -> bool:
    known = {v.name for v in graph.output}
    name = _choice(rng, [o for n in graph.node for o in n.output if o and o not in known])
    if name is None:
        return False
    graph.output.add().name = name
    return True


def another_reader(graph: GraphProto, rng: np.random.Generator) -> bool:
    name = _choice(rng, [o for n in graph.node for o in n.output if o])
    if name is None:
        return False
    made = f"reader_{len(graph.node)}"
    op = _choice(rng, ["Neg", "Shape", "Identity", "Abs"])
    graph.node.add().CopyFrom(onnx.helper.make_node(op, [name], [made]))
    graph.output.add().name = made
    return True


def between(graph: GraphProto, rng: np.random.Generator) -> bool:
    """An operator, or a pair of them, between a value and one of its readers."""
    readers = [(i, k) for i, n in enumerate(graph.node) for k, v in enumerate(n.input) if v]
    if not readers:
        return False
    at, k = _choice(rng, readers)
    value, stem = graph.node[at].input[k], f"between_{len(graph.node)}"
    casts = [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.FLOAT]
    way = int(rng.integers(8))
    nodes: list[NodeProto] = []
    make = onnx.helper.make_node
    if way == 0:
        first, second = int(rng.integers(4)), int(rng.integers(2))
        nodes = [
            make("Cast", [value], [f"{stem}_a"], to=casts[first]),
            make("Cast", [f"{stem}_a"], [stem], to=casts[second]),
        ]
    elif way == 1:
        nodes = [make("Neg", [value], [f"{stem}_a"]), make("Neg", [f"{stem}_a"], [stem])]
    elif way == 2:
        op, number = _choice(rng, [("Add", 0.0), ("Sub", 0.0), ("Mul", 1.0), ("Add", -0.0)])
        shape = _choice(rng, [(), (1,), (1, 1), (1, 1, 1, 1)])
        tensor = numpy_helper.from_array(np.full(shape, number, np.float32))
        nodes = [
            make("Constant", [], [f"{stem}_c"], value=tensor),
            make(op, [value, f"{stem}_c"], [stem]),
        ]
    elif way == 3:
        nodes = [
            make("Shape", [value], [f"{stem}_s"]),
            make("Reshape", [value, f"{stem}_s"], [stem]),
        ]
    elif way == 4:
        nodes = [
            make("Transpose", [value], [f"{stem}_t"]),
            make("Transpose", [f"{stem}_t"], [stem]),
        ]
    elif way == 5:
        nodes = [make(_choice(rng, ["Identity", "Dropout", "Relu", "Tanh"]), [value], [stem])]
    elif way == 6:
        nodes = [
            make("IsNaN", [value], [f"{stem}_n"]),
            make("Constant", [], [f"{stem}_z"], value_float=0.0),
            make("Where", [f"{stem}_n", f"{stem}_z", value], [stem]),
        ]
    else:
        axes = numpy_helper.from_array(np.array([0], np.int64))
        nodes = [
            make("Constant", [], [f"{stem}_x"], value=axes),
            make("Unsqueeze", [value, f"{stem}_x"], [f"{stem}_u"]),
            make("Squeeze", [f"{stem}_u", f"{stem}_x"], [stem]),
        ]
    graph.node[at].input[k] = stem
    _insert(graph, at, nodes)
    return True


def rewire(graph: GraphProto, rng: np.random.Generator) -> bool:
    readers = [(i, k) for i, n in enumerate(graph.node) for k, v in enumerate(n.input) if v]
    if not readers:
        return False
    at, k = _choice(rng, readers)
    before = [v.name for v in graph.input] + [v.name for v in graph.initializer]
    before += [o for n in list(graph.node)[:at] for o in n.output if o]
    graph.node[at].input[k] = _choice(rng, before)
    return True


def drop_operand(graph: GraphProto, rng: np.random.Generator) -> bool:
    node = _choice(rng, [n for n in graph.node if len(n.input) > 1])
    if node is None:
        return False
    if rng.random() < 0.5:
        node.input.pop()
    else:
        node.input[-1] = ""
    return True


def into_branch(graph: GraphProto, rng: np.random.Generator) -> bool:
    """A node into both branches of an If on a constant, or on whether an input is empty."""
    at = _choice(rng, [i for i, n in enumerate(graph.node) if len(n.output) == 1 and n.input])
    if at is None:
        return False
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
    return True


def overridable(graph: GraphProto, rng: np.random.Generator) -> bool:
    """An initializer becomes an input with a default."""
    inputs = {v.name for v in graph.input}
    held = _choice(rng, [t for t in graph.initializer if t.name not in inputs])
    if held is None:
        return False
    value = onnx.helper.make_tensor_value_info(held.name, held.data_type, list(held.dims))
    graph.input.add().CopyFrom(value)
    return True


def duplicate(graph: GraphProto, rng: np.random.Generator) -> bool:
    """One reader of a node gets a copy of it."""
    at = _choice(rng, [i for i, n in enumerate(graph.node) if n.output and n.output[0]])
    if at is None:
        return False
    copy = NodeProto()
    copy.CopyFrom(graph.node[at])
    old = list(copy.output)
    copy.output[:] = [f"{o}_copy" if o else "" for o in old]
    later = list(graph.node)[at + 1 :]
    reader = _choice(rng, [n for n in later if old[0] in n.input])
    if reader is None:
        return False
    reader.input[list(reader.input).index(old[0])] = copy.output[0]
    _insert(graph, at + 1, [copy])
    return True


def forget_shapes(graph: GraphProto, rng: np.random.Generator) -> bool:
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
    return True


MUTATIONS = (
    *(bypass, swap_operands, sibling, sibling, attribute, attribute, constant, constant, constant),
    *(expose, another_reader, between, between, between, rewire, rewire, drop_operand),
    *(into_branch, overridable, duplicate, forget_shapes),
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
        if change(model.graph, rng):
            done.append(change.__name__)
    if rng.random() < 0.1:
        opset = next(o for o in model.opset_import if o.domain in ("", "ai.onnx"))
        opset.version = int(rng.integers(11, NEWEST_OPSET + 1))
        done.append(f"opset{opset.version}")
    # The text of outputs names their types; a mutant's outputs have whatever type they have.
    for value in model.graph.output:
        value.ClearField("type")
    return model, done


# ---- what a mutant is held against ---------------------------------------------------------------


def sources() -> Iterator[tuple[str, ModelProto, Feeds]]:
    """Small graphs of the fusion table, and the stored exports, with a feed each."""
    from onnx_fuse.onnx.save import to_proto

    sizes = {"B": 2, "H": 2, "G": 2, "S": 5, "T": 6}
    for case in FUSION_CASES:
        if case.opset <= NEWEST_OPSET:
            yield case.name, to_proto(case.model()), case.feeds(**sizes)
    for real in real_cases():
        yield real.name, onnx.load(real.path), real.feeds[0][0]


def hostile(feeds: Feeds, rng: np.random.Generator) -> Feeds:
    """The same feeds with -0, 0, infinities, NaN and large numbers in a few places."""
    values = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 3e4, -3e4, 1e-6])
    result = {}
    for name, array in feeds.items():
        if array.dtype.kind == "f" and array.size:
            chosen = rng.random(array.shape) < 0.06
            array = np.where(chosen, rng.choice(values, array.shape), array).astype(array.dtype)
        result[name] = array
    return result


def moved(feeds: Feeds) -> Feeds:
    """Each float by one unit in the last place."""
    return {
        name: np.nextafter(a, np.array(np.inf, a.dtype)) if a.dtype.kind == "f" else a
        for name, a in feeds.items()
    }


def session(model: bytes, optimized: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options)


def outputs(runner: onnxruntime.InferenceSession, feeds: Feeds) -> list[Any]:
    wanted = {v.name for v in runner.get_inputs()}
    found: list[Any] = runner.run(None, {k: v for k, v in feeds.items() if k in wanted})
    return found


ELEMENTS = {
    "float": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "double": TensorProto.DOUBLE,
    "bool": TensorProto.BOOL,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}


def typed(
    model: ModelProto, runner: onnxruntime.InferenceSession, got: list[Any], shapes: bool
) -> bytes:
    """The mutant with the element types, and the ranks, that onnxruntime found for its outputs."""
    found = {v.name: v.type for v in runner.get_outputs()}
    for value, array in zip(model.graph.output, got, strict=True):
        kind = found[value.name].removeprefix("tensor(").removesuffix(")")
        if kind in ELEMENTS:
            tensor = value.type.tensor_type
            tensor.elem_type = ELEMENTS[kind]
            if shapes:
                tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in array.shape)
    return model.SerializeToString()


def differs(want: Any, got: Any, own: list[Any]) -> str:
    """Why `got` is not `want`, whose other computations are `own`; empty where it is."""
    want, got = np.asarray(want), np.asarray(got)
    if want.dtype != got.dtype or want.shape != got.shape:
        return f"{got.dtype}{list(got.shape)} for {want.dtype}{list(want.shape)}"
    if want.dtype.kind not in "fc" or not want.size:
        stable = all(np.array_equal(want, np.asarray(o)) for o in own)
        return "" if not stable or np.array_equal(want, got) else "other values"
    kinds = [np.isnan(want), np.isposinf(want), np.isneginf(want)]
    for o in own:  # places where the mutant does not agree with itself say nothing
        o = np.asarray(o)
        if o.shape != want.shape:
            return ""
        if any(
            (k != f(o)).any()
            for k, f in zip(kinds, (np.isnan, np.isposinf, np.isneginf), strict=True)
        ):
            return ""
    for kind, test in zip(kinds, (np.isnan, np.isposinf, np.isneginf), strict=True):
        if (kind != test(got)).any():
            return f"{test.__name__} in other places"
    finite = np.isfinite(want)
    a, b = want[finite].astype(np.float64), got[finite].astype(np.float64)
    if not a.size:
        return ""
    error = np.abs(a - b).max()
    noise = max(
        (np.abs(a - np.asarray(o)[finite].astype(np.float64)).max() for o in own), default=0
    )
    limit = RTOL.get(want.dtype.name, 2e-2) * max(np.abs(a).max(), 1e-5) + SENSITIVITY * noise
    return "" if error <= limit else f"off by {error:.3g} (limit {limit:.3g})"


class TooLong(Exception):
    """One mutant took more than SECONDS."""


def _alarm(*_: object) -> None:
    raise TooLong


def outcome(
    model: ModelProto, feeds: Feeds, rng: np.random.Generator, phase: Phase
) -> tuple[str, str]:
    """(equal, refused, invalid or a fault; what exactly)."""
    from onnx_fuse import passes
    from onnx_fuse.errors import ModelError
    from onnx_fuse.onnx.load import load
    from onnx_fuse.onnx.save import inline, to_proto

    data = model.SerializeToString()
    runs: list[tuple[Feeds, list[Any], list[list[Any]]]] = []
    refused = ""
    phase.value = 0
    try:
        plain, full = session(data, False), session(data, True)
        for feed in (feeds, hostile(feeds, rng)):
            want = outputs(plain, feed)
            if not runs:
                data = typed(model, plain, want, shapes=rng.random() < 0.95)
            runs.append((feed, want, [outputs(full, feed), outputs(plain, moved(feed))]))
    except Exception as error:  # noqa: BLE001 - onnxruntime's faults share no base
        refused = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    phase.value = 1
    for level in LEVELS:
        try:
            graph = load(data)
            passes.optimize(graph, level=level)
            results = [("", to_proto(graph, shapes=False))]
            if level == LEVELS[-2]:
                results.append((" inlined", to_proto(inline(graph), shapes=False)))
        except ModelError as error:
            if refused:
                return "invalid", refused
            return "refused", str(error)
        except TooLong:
            raise
        except Exception:  # noqa: BLE001 - the fault that is looked for
            return "crash", f"level {level}: {traceback.format_exc(limit=-3)}"
        if refused:
            continue
        for how, proto in results:
            try:
                made = session(proto.SerializeToString(), False)
            except Exception as error:  # noqa: BLE001
                return "unloadable", f"level {level}{how}: {str(error)[:300]}"
            for which, (feed, want, own) in enumerate(runs):
                try:
                    got = outputs(made, feed)
                except Exception as error:  # noqa: BLE001
                    return "unrunnable", f"level {level}{how}: {str(error)[:300]}"
                for i, (a, b) in enumerate(zip(want, got, strict=True)):
                    if why := differs(a, b, [o[i] for o in own]):
                        name = ("random", "hostile")[which]
                        return "wrong", f"level {level}{how}, {name} feed, output {i}: {why}"
    return ("invalid", refused) if refused else ("equal", "")


def work(numbers: range, keep: str | None, seed: int, progress: Connection, phase: Phase) -> None:
    """Try these mutants, each drawn from a seed of its own, and tell the parent of each."""
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _alarm)
    bases = list(sources())
    for number in numbers:
        rng = np.random.default_rng([seed, number])
        name, source, feeds = bases[int(rng.integers(len(bases)))]
        model, done = mutant(source, rng)
        signal.alarm(SECONDS)
        try:
            kind, why = outcome(model, feeds, rng, phase)
        except TooLong:
            kind, why = "hang", f"over {SECONDS} s"
        finally:
            signal.alarm(0)
        text = f"{kind} {number} {name} {'+'.join(done)}: {why}"
        if keep is not None and kind not in QUIET:
            stem = Path(keep) / f"{number}_{name}"
            stem.with_suffix(".onnx").write_bytes(model.SerializeToString())
            np.savez(stem.with_suffix(".npz"), **feeds)
        progress.send((number, kind, text))


def share(k: int, n: int, count: int, keep: str | None, seed: int, counts: Counter[str]) -> None:
    """Mutants k, k + n, ... in processes of their own: onnxruntime dies of some."""
    context = multiprocessing.get_context("spawn")
    todo = range(k, count, n)
    while todo:
        ours, theirs = context.Pipe(duplex=False)
        phase = context.Value("b", 0)
        process = context.Process(target=work, args=(todo, keep, seed, theirs, phase))
        process.start()
        theirs.close()
        try:
            while True:
                number, kind, text = ours.recv()
                todo = range(number + n, count, n)
                counts[kind] += 1
                if kind not in ("equal", "invalid"):
                    print(text, flush=True)
        except EOFError:
            process.join()
        if todo and process.exitcode:
            kind = "died" if phase.value else "invalid"
            counts[kind] += 1
            print(f"{kind} {todo[0]}: exit code {process.exitcode}", flush=True)
            todo = todo[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", metavar="DIR", help="write mutants that are at fault there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.keep:
        Path(options.keep).mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    totals = [Counter[str]() for _ in range(options.workers)]
    threads = [
        threading.Thread(
            target=share,
            args=(k, options.workers, options.count, options.keep, options.seed, counts),
        )
        for k, counts in enumerate(totals)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(totals, Counter())
    print(f"{options.count} mutants in {time.perf_counter() - started:.0f} s: {dict(total)}")
    if options.json:
        options.json.write_text(json.dumps(dict(total)))


if __name__ == "__main__":
    main()
