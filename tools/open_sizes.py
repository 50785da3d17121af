"""Every dynamic dimension at 0, 1, 2, 3, 7, 64 and 129: open programs, closed ones, onnxruntime.

    python tools/open_sizes.py [--only NAME] [--shapes 60] [--seed 0] [--problems]
        [--shard K/N] [FOLDER]

The models are the stored exports and decoders, those of models/, the graphs of fusions and contrib
operators in tests/ with their gradients, and training steps. With FOLDER, they are the .onnx files
there; more exports are read from the folder that ONNX_FUSE_CASES names. `--shard 0/2` and
`--shard 1/2` are half of the models each; with `--shapes 33` both are 20,000 shapes. For each shape
that onnxruntime takes, what a GPU would run is compared as tests/every_size.py says: the calls of a
program that holds for all sizes with those of programs lowered for this shape, and the results, by
NumPy, with onnxruntime's. `--problems` interprets only where calls differ. A shape at which
onnxruntime ends the process counts as refused. Prints a line a model and the totals; exits with 1
where something differs.
"""

import argparse
import itertools
import multiprocessing
import time
from collections import Counter
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state
from every_size import Report, Subject, prove
from every_size_models import Make, exports, subjects

import onnx_fuse
from onnx_fuse.lower.table import lowerings

CONTEXT = multiprocessing.get_context("fork")


def examine(
    name: str, make: Make, given: argparse.Namespace, queue: Any, at: Any, refused: set[int]
) -> None:
    """Put the report on one model into the queue, in a process of its own.

    `at` holds the number of the sample that onnxruntime has, -1 where it has none.
    """

    def asks(number: int) -> None:
        at.value = number

    try:
        subject = Subject(name, *make())
    except onnx_fuse.OnnxFuseError as error:
        queue.put(Report(Counter({f"left out, {error}": 1})))
        return
    try:
        how = {"results": not given.problems, "refused": refused, "asks": asks}
        queue.put(prove(subject, given.shapes, given.seed, **how))
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:  # a type, on the CPU
        queue.put(Report(Counter({"not onnxruntime's": 1})))


def examined(name: str, make: Make, given: argparse.Namespace) -> Report:
    """The report on one model. A shape at which onnxruntime ends the process counts as refused."""
    refused: set[int] = set()
    while True:
        queue, at = CONTEXT.SimpleQueue(), CONTEXT.Value("q", -1)
        work = CONTEXT.Process(target=examine, args=(name, make, given, queue, at, refused))
        work.start()
        while work.is_alive() and queue.empty():
            work.join(0.05)
        if not queue.empty():
            report = queue.get()
            work.join()
            return report
        if at.value < 0:
            fault = f"{name}: the process ended with {work.exitcode}"
            return Report(Counter({"different": 1}), [fault])
        refused.add(at.value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--shapes", type=int, default=60, help="shapes of each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", action="store_true", help="compare no results")
    parser.add_argument("--shard", default="0/1", help="K/N: each N-th model, from the K-th on")
    parser.add_argument("folder", nargs="?", type=Path, help="models to read instead")
    given = parser.parse_args()
    models = subjects() if given.folder is None else exports(given.folder)
    first, count = map(int, given.shard.split("/"))
    models = itertools.islice(models, first, None, count)
    total, faults, began = Counter[str](), 0, time.perf_counter()
    lowerings()  # what every process would import
    for name, make in models:
        if given.only not in name:
            continue
        report = examined(name, make, given)
        print(f"{name}: {report}", flush=True)
        for fault in report.faults[:3]:
            print(f"    {fault}", flush=True)
        total += report.counts
        faults += bool(report.faults)
    seconds = time.perf_counter() - began
    counts = " ".join(f"{key} {number}" for key, number in sorted(total.items()))
    print(f"all: {counts}; {faults} models with differences, {seconds:.0f} s")
    return int(total["different"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
