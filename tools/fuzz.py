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
- `crash`, asked for by name: 50 nodes of one version of one operator, with attributes and sizes out
  of range (tools/fuzz_crashes.py). Where ONNX's inference or onnxruntime ends the process, and for
  some others, every entry point answers; 658 numbers take every operator once.

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

import argparse
import faulthandler
import json
import multiprocessing
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
import every_size
import fuzz_crashes
import fuzz_operators
import numpy as np
import onnx
import onnxruntime
from cases import NEWEST_OPSET, real_cases
from equivalents import equivalent
from fusion_cases import FUSION_CASES
from fuzz_answers import (
    ELEMENTS,
    Feeds,
    Run,
    coarsest,
    differs,
    moved,
    outputs,
    references,
)
from fuzz_graphs import Case
from mutations import mutant
from onnx import ModelProto, TensorProto
from support import stock

Phase = Any
"""A shared number: 0 while onnxruntime runs the graph itself, 1 after."""
QUIET = ("equal", "invalid", "empty", "refused", "quiet")
LEVELS = (0, 1, 2, 3)
SECONDS = 60
"""What one mutant may take before it counts as hanging."""
SIZES = ((2, 2, 2, 5, 6), (1, 1, 1, 1, 1), (3, 1, 2, 1, 4))

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


def fed(model: ModelProto, feeds: Feeds) -> Feeds:
    """The feeds in the types that the mutant has."""
    kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
    return {
        k: a.astype(onnx.helper.tensor_dtype_to_np_dtype(kinds[k]))
        if k in kinds and a.dtype.kind == "f"
        else a
        for k, a in feeds.items()
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


class TooLong(Exception):
    """One mutant took more than SECONDS."""


def _alarm(*_: object) -> None:
    raise TooLong


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
        data = typed(model, stock(data), runs[0].want, shapes=rng.random() < 0.95)
        if model is not original:  # a change that onnxruntime itself does not see as one
            changed = stock(data)
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
                made = stock(proto)
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
    Scan of nothing, and dies of a Conv of nothing. An Attention without a result it answers before
    it looks whether keys and values fit.
    """
    axes: dict[str, slice] = {}
    for node in model.graph.node:
        if node.op_type in WINDOWS:
            axes |= dict.fromkeys((node.input[0], node.output[0]), slice(2, None))
        elif node.op_type in STEPS:
            axes[node.input[0]] = slice(1)
        elif node.op_type == "Attention":
            axes[node.output[0]] = slice(None)
    held = {t.name: tuple(t.dims) for t in model.graph.initializer}
    probe = ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    computed = [n for n in axes if n not in held and n not in {v.name for v in model.graph.input}]
    probe.graph.output.extend(onnx.ValueInfoProto(name=n) for n in computed)
    runner = stock(probe) if computed else None

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
        typed(model, stock(model), runs[0].want, shapes=False)
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
        sessions = [stock(proto) for _, proto in results]
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
        least = max(1e-5, every_size.SMALL * every_size.largest_gradient(answers[0]))
        for i, (name, want) in enumerate(answers[0].items()):
            if name.endswith(".grad") and want.shape != feed[name.removesuffix(".grad")].shape:
                return "wrong", f"{name} has shape {want.shape}, {run.label} {shapes_text(feed)}"
            if why := differs(want, answers[1][name], [near[i]], coarse, least=least):
                return "wrong", f"gradient {name}, {run.label} {shapes_text(feed)}: {why}"
    return "equal", ""


MODES = ("mutants", "graphs", "equivalents", "gradients", "crash")


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
        if mode == "crash":
            of = number // len(options.mode)
            for i, (kind, text, model) in enumerate(fuzz_crashes.crashes(of, rng)):
                if options.keep is not None and kind not in QUIET:
                    path = Path(options.keep) / f"{number}_{i}_{kind}.onnx"
                    path.write_bytes(model.SerializeToString())
                progress.send((number, mode, kind, f"{kind} {number} {mode} {text}", []))
            continue
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
                if kind not in ("equal", "invalid", "empty", "quiet"):
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
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES[:-1])
    parser.add_argument("--operator", nargs="+", default=(), help="draw nodes of these alone")
    parser.add_argument("--device", choices=("interpreted", "cuda"), default="interpreted")
    parser.add_argument("--keep", metavar="DIR", help="write graphs that are at fault there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.keep:
        Path(options.keep).mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    tallies = [Tally() for _ in range(options.workers)]
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(share, range(options.workers), repeat(options), tallies))
    kinds = sum((t.kinds for t in tallies), Counter())
    operators = sum((t.operators for t in tallies), Counter())
    by_mode = {m: {k: n for (of, k), n in sorted(kinds.items()) if of == m} for m in options.mode}
    print("operators in equal cases:", " ".join(f"{k} {n}" for k, n in operators.most_common()))
    for mode, counts in by_mode.items():
        print(f"{mode}: {counts}")
    totals = sum(map(Counter, by_mode.values()), Counter[str]())
    print(f"{options.count} cases in {time.perf_counter() - started:.0f} s: {dict(totals)}")
    if options.json:
        options.json.write_text(json.dumps({"modes": by_mode, "operators": dict(operators)}))


if __name__ == "__main__":
    main()
