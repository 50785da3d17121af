"""Graphs made at random: whatever this package makes of one must equal what onnxruntime makes.

    python tools/fuzz.py [--count 20000] [--seed 0] [--mode MODE ...] [--operator NAME ...]
        [--workers 2] [--keep DIR]

The modes take turns:

- `mutants`: a graph of tests/fusion_cases.py, or a stored export, with one to three changes: a node
  bypassed, its operands exchanged or rewired, its operator or an attribute replaced, a constant
  changed or raised in rank, a value made an output, and others (tools/mutations.py).
- `graphs`: nodes drawn over the operator set, with attributes, types, dynamic dimensions, and sizes
  of 0 and 1 (tools/fuzz_operators.py).
- `equivalents`: a graph of either kind under changes that keep its meaning (tools/equivalents.py).
  Its answer is that of the graph before.
- `gradients`: the gradients of a graph that was drawn, of it as it is and optimized, are equal.

Where onnxruntime runs the graph, it is optimized at levels 0 to 3 and inlined, and each result
must give onnxruntime's outputs (both at onnxruntime's own lowest optimization level), on a random
feed and on one with -0, 0, infinities, NaN and large numbers. Graphs of the last three modes are
also lowered for an H200, over open sizes and at each shape by itself, and the programs are
interpreted (tests/every_size.py); `--device cuda` runs them on a GPU instead. Where onnxruntime
refuses the graph, `optimize` may do what it likes but raise an error of another kind than its own.

What a difference is measured against: the same graph under all of onnxruntime's optimizations, by
onnx.reference, on inputs and constants moved by one unit in the last place, and with every float16
result rounded, which onnxruntime skips between operators that it computes in float32. An
ill-conditioned graph differs from itself by as much as from its fusion; such outputs are compared
no more closely than that.
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
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, TensorProto

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import every_size
import fuzz_operators
from cases import NEWEST_OPSET, real_cases
from equivalents import equivalent
from fusion_cases import FUSION_CASES
from fuzz_graphs import Case
from mutations import mutant

Feeds = dict[str, np.ndarray]
Phase = Any
"""A shared number: 0 while onnxruntime runs the graph itself, 1 after."""
QUIET = ("equal", "invalid", "empty", "refused")
LEVELS = (0, 1, 2, 3)
SECONDS = 60
"""What one mutant may take before it counts as hanging."""
SIZES = ((2, 2, 2, 5, 6), (1, 1, 1, 1, 1), (3, 1, 2, 1, 4))
RTOL = {"float16": 2e-2, "float32": 2e-4, "float64": 1e-8}
"""Of an output's largest finite magnitude: sums in another order, fewer roundings to float16."""
SENSITIVITY = 16
"""How much more than the mutant's own difference from itself its fusion may differ."""

# ---- what a mutant is held against ---------------------------------------------------------------


def sources() -> Iterator[tuple[str, ModelProto, Feeds]]:
    """Small graphs of the fusion table, and the stored exports, with a feed each."""
    from onnx_fuse.importer.save import to_proto

    for case in FUSION_CASES:
        if case.opset <= NEWEST_OPSET:
            for sizes in SIZES:
                feeds = case.feeds(**dict(zip("BHGST", sizes, strict=True)))
                yield case.name, to_proto(case.model()), feeds
    for real in real_cases():
        yield real.name, onnx.load(real.path), real.feeds[0][0]


def hostile(feeds: Feeds, rng: np.random.Generator) -> Feeds:
    """The same feeds with -0, 0, infinities, NaN and large numbers in a few places."""
    values = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 3e4, -3e4, 1e-6])
    result = {}
    for name, array in feeds.items():
        if array.dtype.kind == "f" and array.size:
            chosen = rng.random(array.shape) < 0.06
            drawn = rng.choice(values, array.shape)
            if array.dtype == np.float16:  # onnxruntime keeps some values in float32, beyond it
                drawn = np.clip(drawn, -100, 100) + np.where(np.isinf(drawn), drawn, 0)
            array = np.where(chosen, drawn, array).astype(array.dtype)
        result[name] = array
    return result


def fed(model: ModelProto, feeds: Feeds) -> Feeds:
    """The feeds in the types that the mutant has."""
    kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
    return {
        k: a.astype(onnx.helper.tensor_dtype_to_np_dtype(kinds[k]))
        if k in kinds and a.dtype.kind == "f"
        else a
        for k, a in feeds.items()
    }


def moved(feeds: Feeds, toward: float, coarse: str = "") -> Feeds:
    """Each float by one unit in the last place; of float64, in that of what it is computed in."""

    def step(a: np.ndarray) -> np.ndarray:
        narrow = a.astype(np.float32) if a.dtype == np.float64 and coarse == "float32" else a
        return np.asarray(np.nextafter(narrow, np.array(toward, narrow.dtype))).astype(a.dtype)

    with np.errstate(over="ignore"):
        return {name: step(a) if a.dtype.kind == "f" else a for name, a in feeds.items()}


def nudged(model: ModelProto, toward: float) -> bytes:
    """The model with each float among its constants moved so, except those that give sizes."""
    result = ModelProto()
    result.CopyFrom(model)
    coarse = coarsest(model)
    sizes = {name for n in model.graph.node if n.op_type in SIZED for name in n.input}
    for tensor in result.graph.initializer:
        if tensor.name not in sizes and tensor.data_type in ELEMENTS.values():
            array = onnx.numpy_helper.to_array(tensor)
            shifted = moved({tensor.name: array}, toward, coarse)[tensor.name]
            tensor.CopyFrom(onnx.numpy_helper.from_array(shifted, tensor.name))
    return result.SerializeToString()


SIZED = ("Resize", "Upsample", "Range")


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
                del tensor.shape.dim[:]
                tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in array.shape)
    return model.SerializeToString()


IN_FLOAT32 = {"Shrink", "GroupNormalization", "Gelu"}
"""What onnxruntime (1.22 to 1.31) computes in float32 of float64: all of it, what stash_type says,
and the constants of Gelu with tanh."""


def coarsest(model: ModelProto) -> str:
    """The type of the fewest digits in which something is computed; "" for float64 alone."""
    graph = model.graph
    kinds = {v.type.tensor_type.elem_type for v in graph.input}
    kinds |= {t.data_type for t in graph.initializer}
    kinds |= {a.i for n in graph.node if n.op_type == "Cast" for a in n.attribute}
    kinds |= {TensorProto.FLOAT for n in graph.node if n.op_type in IN_FLOAT32}
    named = ((TensorProto.FLOAT16, "float16"), (TensorProto.FLOAT, "float32"))
    return next((name for kind, name in named if kind in kinds), "")


def differs(want: Any, got: Any, own: list[Any], coarse: str = "") -> str:
    """Why `got` is not `want`, whose other computations are `own`; empty where it is.

    The type of `coarse` was used on the way, or else that of the output alone.
    """
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
    limit = (
        RTOL.get(coarse or want.dtype.name, 2e-2) * max(np.abs(a).max(), 1e-5) + SENSITIVITY * noise
    )
    return "" if error <= limit else f"off by {error:.3g} (limit {limit:.3g})"


class TooLong(Exception):
    """One mutant took more than SECONDS."""


def _alarm(*_: object) -> None:
    raise TooLong


def reference(model: ModelProto, feeds: Feeds, output: int, want: Any, got: Any) -> str:
    """With whom onnx's reference implementation agrees, in brackets; "" where it has no answer."""
    from onnx.reference import ReferenceEvaluator

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            its = ReferenceEvaluator(model).run(None, feeds)[output]
    except Exception:  # noqa: BLE001 - it lacks operators, and fails in many ways
        return ""
    sides = {"onnxruntime": not differs(want, its, []), "this package": not differs(got, its, [])}
    agrees = [name for name, same in sides.items() if same]
    return f" (onnx.reference agrees with {' and '.join(agrees) or 'neither'})"


@dataclass
class Run:
    """A feed, onnxruntime's outputs for it, and by other ways, from which they may differ."""

    label: str
    feed: Feeds
    want: list[Any]
    own: list[list[Any]]

    def fault(self, model: ModelProto, got: Sequence[Any], coarse: str) -> str:
        """Why these are not the outputs; empty where they are."""
        for i, (a, b) in enumerate(zip(self.want, got, strict=True)):
            if why := differs(a, b, [o[i] for o in self.own], coarse):
                return f"{self.label}, output {i}: {why}{reference(model, self.feed, i, a, b)}"
        return ""


def rounded(model: ModelProto) -> bytes:
    """The model with two Identities behind each node: onnxruntime rounds to float16 there.

    What it has no float16 kernel for it computes in float32, unrounded up to the next float16
    kernel. A float16 kernel that stands alone between such nodes is run in float32 as well.
    """
    apart = ModelProto()
    apart.CopyFrom(model)
    for i, node in reversed([*enumerate(apart.graph.node)]):
        names = [name for name in node.output if name]
        node.output[:] = [name and f"{name}.unrounded" for name in node.output]
        for name in names:
            copies = (f"{name}.rounded", name), (f"{name}.unrounded", f"{name}.rounded")
            for read, written in copies:
                apart.graph.node.insert(i + 1, onnx.helper.make_node("Identity", [read], [written]))
    return apart.SerializeToString()


def references(
    original: ModelProto, feeds: Sequence[Feeds], rng: np.random.Generator, harsh: bool
) -> list[Run]:
    """onnxruntime's outputs for the feeds that it takes. Raises what it raises for the first."""
    runs: list[Run] = []
    data = original.SerializeToString()
    plain, others = session(data, False), [session(data, True)]
    beside = {end: session(nudged(original, end), False) for end in (np.inf, -np.inf)}
    coarse = coarsest(original)
    if coarse == "float16":
        others.append(session(rounded(original), False))
    labelled = [(f"feed {i}", feed) for i, feed in enumerate(feeds)]
    if harsh:
        labelled.insert(1, ("hostile feed", hostile(feeds[0], rng)))
    for label, feed in labelled:
        try:
            want = outputs(plain, feed)
            near = [outputs(each, moved(feed, end, coarse)) for end, each in beside.items()]
            runs.append(Run(label, feed, want, [*(outputs(o, feed) for o in others), *near]))
        except Exception:  # noqa: PERF203 - each feed may be refused
            if not runs:
                raise
    return runs


@dataclass
class Subject:
    """A model to try, the one whose answer counts, and feeds; the first feed must run."""

    model: ModelProto
    original: ModelProto
    feeds: list[Feeds]
    harsh: bool = False
    """Whether infinities, NaN and the like are fed, too."""
    device: str = ""
    """Where its programs run: "interpreted", "cuda", or "" for nowhere."""


def outcome(subject: Subject, rng: np.random.Generator, phase: Phase) -> tuple[str, str]:
    """(equal, refused, invalid or a fault; what exactly)."""
    from onnx_fuse import rewrite
    from onnx_fuse.autodiff.load import load
    from onnx_fuse.errors import ModelError
    from onnx_fuse.importer.save import inline, to_proto

    model, original = subject.model, subject.original
    data = model.SerializeToString()
    coarse = coarsest(original)
    runs: list[Run] = []
    refused = ""
    phase.value = 0
    try:
        runs = references(original, subject.feeds, rng, subject.harsh)
        data = typed(model, session(data, False), runs[0].want, shapes=rng.random() < 0.95)
        if model is not original:  # a change that onnxruntime itself does not see as one
            changed = session(data, False)
            why = (run.fault(original, outputs(changed, run.feed), coarse) for run in runs)
            refused = next(filter(None, why), "")
    except Exception as error:  # noqa: BLE001 - onnxruntime's faults share no base
        refused = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    phase.value = 1
    for level in LEVELS:
        try:
            graph = load(data)
            rewrite.optimize(graph, level=level)
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
            for run in runs:
                try:
                    got = outputs(made, run.feed)
                except Exception as error:  # noqa: BLE001
                    return "unrunnable", f"level {level}{how}, {run.label}: {str(error)[:300]}"
                if why := run.fault(original, got, coarse):
                    return "wrong", f"level {level}{how}, {why}"
    if refused:
        return "invalid", refused
    return programs(subject, data, runs, coarse) if subject.device else ("equal", "")


def programs(subject: Subject, data: bytes, runs: list[Run], coarse: str) -> tuple[str, str]:
    """The same of the programs for a GPU, at each size that onnxruntime takes."""
    from onnx_fuse import InferenceSession, rewrite
    from onnx_fuse.autodiff.load import load
    from onnx_fuse.errors import OnnxFuseError
    from onnx_fuse.program.interpret.run import initializers
    from onnx_fuse.runtime.specialize import Specializer

    names = [v.name for v in subject.model.graph.output]
    try:
        if subject.device == "cuda":
            on_gpu = InferenceSession(data, device="cuda")
        else:
            graph = load(data)
            rewrite.optimize(graph, level=2)
            specializer, weights = Specializer(graph, every_size.H200), initializers(graph)
        for run in runs:
            if run.label.startswith("hostile"):
                continue  # NumPy's functions are not the kernels' there

            def unlike(got: Mapping[str, Any], want: Mapping[str, Any], run: Run = run) -> str:
                return run.fault(subject.original, [got[name] for name in names], coarse)

            if subject.device == "cuda":
                wanted = {v.name for v in on_gpu.get_inputs()}
                feed = {k: v for k, v in run.feed.items() if k in wanted}
                why = unlike(dict(zip(names, on_gpu.run(names, feed), strict=True)), {})
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    want = dict(zip(names, run.want, strict=True))
                    given = {v.name: run.feed[v.name] for v in graph.graph.inputs}
                    why = every_size.compared(
                        specializer, given, want, weights, Counter(), True, unlike
                    )
            if why:
                return "wrong", f"{run.label} {shapes_text(run.feed)}: {why}"
    except TooLong:
        raise
    except OnnxFuseError as error:
        return "refused", f"lowered: {error}"
    except Exception:  # noqa: BLE001 - the fault that is looked for
        return "crash", f"lowered: {traceback.format_exc(limit=-4)}"
    return "equal", ""


def shapes_text(feed: Feeds) -> str:
    return str({name: list(array.shape) for name, array in feed.items()})


WINDOWS = {"Conv", "ConvTranspose", "AveragePool", "LpPool", "MaxPool"}
STEPS = {"LSTM", "GRU", "RNN"}


def spanned(model: ModelProto) -> Callable[[Feeds], bool]:
    """Whether no convolution or pool has an empty image, and no recurrent node an empty sequence.

    onnxruntime runs these forward. Of the nodes of their gradients it refuses a ConvTranspose and a
    Scan of nothing, and dies of a Conv of nothing.
    """
    axes: dict[str, slice] = {}
    for node in model.graph.node:
        if node.op_type in WINDOWS:
            axes |= dict.fromkeys((node.input[0], node.output[0]), slice(2, None))
        elif node.op_type in STEPS:
            axes[node.input[0]] = slice(1)
    held = {t.name: tuple(t.dims) for t in model.graph.initializer}
    probe = ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    computed = [n for n in axes if n not in held and n not in {v.name for v in model.graph.input}]
    probe.graph.output.extend(onnx.ValueInfoProto(name=n) for n in computed)
    runner = session(probe.SerializeToString(), False) if computed else None

    def ask(feed: Feeds) -> bool:
        shapes = {**held, **{name: array.shape for name, array in feed.items()}}
        if runner is not None:
            shapes |= {n: a.shape for n, a in zip(computed, outputs(runner, feed), strict=True)}
        return all(0 not in shapes[name][part] for name, part in axes.items())

    return ask


def gradients(subject: Subject, rng: np.random.Generator, phase: Phase) -> tuple[str, str]:
    """Whether the optimized graph has the gradients of the graph as it is, on onnxruntime."""
    import onnx_fuse
    from onnx_fuse.errors import OnnxFuseError

    phase.value = 0
    model = subject.original
    coarse = coarsest(model)
    floats = [
        v.name
        for v in model.graph.input
        if v.type.tensor_type.elem_type in (TensorProto.FLOAT, TensorProto.DOUBLE)
    ]
    try:
        runs = references(model, subject.feeds, rng, False)
        typed(model, session(model.SerializeToString(), False), runs[0].want, shapes=False)
        whole = spanned(model)
        runs = [run for run in runs if whole(run.feed)]
    except Exception as error:  # noqa: BLE001
        return "invalid", str(error)[:200]
    if not runs:
        return "empty", "no feed without an empty image or sequence"
    if not floats:
        return "invalid", "no input of floats"
    phase.value = 1
    results: list[tuple[str, ModelProto]] = []
    try:
        for level in (0, 2):
            graph = onnx_fuse.optimize(model, level=level)
            results.append((f"level {level}", onnx_fuse.gradient(graph, wrt=floats)))
    except TooLong:
        raise
    except OnnxFuseError as error:
        return "refused", f"gradient: {error}"
    except Exception:  # noqa: BLE001
        return "crash", f"gradient: {traceback.format_exc(limit=-4)}"
    try:
        sessions = [session(proto.SerializeToString(), False) for _, proto in results]
    except Exception as error:  # noqa: BLE001
        return "unloadable", f"gradient: {str(error)[:300]}"
    for run in runs:
        feed = dict(run.feed)
        by_name = dict(zip((v.name for v in model.graph.output), run.want, strict=True))
        for value in sessions[0].get_inputs():
            if value.name.endswith(".grad"):
                y = by_name[value.name.removesuffix(".grad")]
                feed[value.name] = rng.standard_normal(y.shape).astype(y.dtype)
        answers: list[dict[str, Any]] = []
        for one in sessions:
            try:
                values = [v.name for v in one.get_outputs()]
                answers.append(dict(zip(values, outputs(one, feed), strict=True)))
            except Exception as error:  # noqa: BLE001, PERF203
                return (
                    "unrunnable",
                    f"gradient, {run.label} {shapes_text(feed)}: {str(error)[:300]}",
                )
        near = outputs(sessions[0], moved(feed, np.inf, coarse))
        for i, (name, want) in enumerate(answers[0].items()):
            if name.endswith(".grad") and want.shape != feed[name.removesuffix(".grad")].shape:
                return "wrong", f"{name} has shape {want.shape}, {run.label} {shapes_text(feed)}"
            if why := differs(want, answers[1][name], [near[i]], coarse):
                return "wrong", f"gradient {name}, {run.label} {shapes_text(feed)}: {why}"
    return "equal", ""


MODES = ("mutants", "graphs", "equivalents", "gradients")


def drawn(mode: str, bases: Sequence[tuple[str, ModelProto, Feeds]], options: argparse.Namespace,
          rng: np.random.Generator) -> tuple[str, Subject]:  # fmt: skip
    """What one number of a mode tries, and what it is called."""
    if mode == "mutants" or (mode == "equivalents" and rng.random() < 0.5):
        name, source, feeds = bases[int(rng.integers(len(bases)))]
        if mode == "mutants":
            model, done = mutant(source, rng)
            return f"{name} {'+'.join(done)}", Subject(model, model, [fed(model, feeds)], True)
        case = Case(source, [feeds], [])
    else:
        case, name = fuzz_operators.graph(rng, options.operator), "drawn"
    device = options.device
    if mode == "equivalents":
        model, done = equivalent(case.model, rng)
        return f"{name} {'+'.join(done)}", Subject(
            model, case.model, case.feeds, device=options.device
        )
    harsh = bool(rng.random() < 0.3)
    return name, Subject(case.model, case.model, case.feeds, harsh, device)


def work(numbers: range, options: argparse.Namespace, progress: Connection, phase: Phase) -> None:
    """Try these numbers, each drawn from a seed of its own, and tell the parent of each."""
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _alarm)
    bases = list(sources()) if {"mutants", "equivalents"} & {*options.mode} else []
    for number in numbers:
        rng = np.random.default_rng([options.seed, number])
        mode = options.mode[number % len(options.mode)]
        phase.value = 0  # ONNX's converter of opsets dies of some mutants, onnxruntime of others
        name, subject = drawn(mode, bases, options, rng)
        operators = [node.op_type for node in subject.model.graph.node]
        signal.alarm(SECONDS)
        try:
            attempt = gradients if mode == "gradients" else outcome
            kind, why = attempt(subject, rng, phase)
        except TooLong:
            kind, why = "hang", f"over {SECONDS} s"
        finally:
            signal.alarm(0)
        text = f"{kind} {number} {mode} {name}: {why}"
        if options.keep is not None and kind not in QUIET:
            stem = Path(options.keep) / f"{number}_{mode}"
            stem.with_suffix(".onnx").write_bytes(subject.model.SerializeToString())
            np.savez(stem.with_suffix(".npz"), **subject.feeds[0])
        progress.send((number, mode, kind, text, operators if kind == "equal" else []))


@dataclass
class Tally:
    """How the numbers of one worker ended, by mode, and how often each operator came out equal."""

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)


def share(k: int, options: argparse.Namespace, tally: Tally) -> None:
    """Numbers k, k + workers, ... in processes of their own: onnxruntime dies of some."""
    context = multiprocessing.get_context("spawn")
    n = options.workers
    end = options.first + options.count
    todo = range(options.first + k, end, n)
    while todo:
        ours, theirs = context.Pipe(duplex=False)
        phase = context.Value("b", 0)
        process = context.Process(target=work, args=(todo, options, theirs, phase))
        process.start()
        theirs.close()
        try:
            while True:
                number, mode, kind, text, operators = ours.recv()
                todo = range(number + n, end, n)
                tally.kinds[mode, kind] += 1
                tally.operators.update(set(operators))
                if kind not in ("equal", "invalid", "empty"):
                    print(text, flush=True)
        except EOFError:
            process.join()
        if todo and process.exitcode:
            kind = "died" if phase.value else "invalid"
            mode = options.mode[todo[0] % len(options.mode)]
            tally.kinds[mode, kind] += 1
            print(f"{kind} {todo[0]} {mode}: exit code {process.exitcode}", flush=True)
            todo = todo[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--operator", nargs="+", default=(), help="draw nodes of these alone")
    parser.add_argument("--device", choices=("interpreted", "cuda"), default="interpreted")
    parser.add_argument("--keep", metavar="DIR", help="write graphs that are at fault there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.keep:
        Path(options.keep).mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    tallies = [Tally() for _ in range(options.workers)]
    threads = [
        threading.Thread(target=share, args=(k, options, tally)) for k, tally in enumerate(tallies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = sum((t.kinds for t in tallies), Counter())
    operators = sum((t.operators for t in tallies), Counter())
    by_mode = {m: {k: n for (of, k), n in sorted(kinds.items()) if of == m} for m in options.mode}
    print("operators in equal cases:", " ".join(f"{k} {n}" for k, n in operators.most_common()))
    for mode, counts in by_mode.items():
        print(f"{mode}: {counts}")
    totals: Counter[str] = Counter()
    for (_, kind), count in kinds.items():
        totals[kind] += count
    print(f"{options.count} cases in {time.perf_counter() - started:.0f} s: {dict(totals)}")
    if options.json:
        options.json.write_text(json.dumps({"modes": by_mode, "operators": dict(operators)}))


if __name__ == "__main__":
    main()
