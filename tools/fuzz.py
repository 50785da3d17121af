"""Structural mutants of the test graphs: what `optimize` writes must equal what was read.

    python tools/fuzz.py [--count 20000] [--seed 0] [--workers 2] [--keep DIR]

A mutant is one of the graphs in tests/fusion_cases.py, or a stored export, with one to three
changes: a node bypassed, its operands exchanged or rewired, its operator or an attribute replaced,
a constant changed or raised in rank, a value made an output, a pair of Casts or a neutral operator
put between two nodes, a node moved into a branch or a Loop, an initializer made an overridable
input or stored elsewhere, another type, opset, order or sign of an axis (tools/mutations.py).

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
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, TensorProto

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from cases import NEWEST_OPSET, real_cases
from fusion_cases import FUSION_CASES
from mutations import mutant

Feeds = dict[str, np.ndarray]
Phase = Any
"""A shared number: 0 while onnxruntime runs the mutant itself, 1 after."""
QUIET = ("equal", "invalid", "refused")
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
    from onnx_fuse.onnx.save import to_proto

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


def narrow(model: ModelProto) -> bool:
    """Whether something is computed in float16."""
    values = [v.type.tensor_type.elem_type for v in model.graph.input]
    casts = [a.i for n in model.graph.node if n.op_type == "Cast" for a in n.attribute]
    return TensorProto.FLOAT16 in (*values, *casts)


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
    feeds, coarse = fed(model, feeds), "float16" if narrow(model) else ""
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
                    if why := differs(a, b, [o[i] for o in own], coarse):
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
        phase.value = 0  # ONNX's converter of opsets dies of some mutants
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
