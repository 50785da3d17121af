"""What the package makes of every model, stored, so that a refactoring can be held against it.

    python tools/replay.py record FOLDER [--only TEXT] [--workers N] [--thorough] [--cubins]
    python tools/replay.py compare A B [--allow FILE]

`record` stores for each model of tests/every_size_models.py (exports, also those in the folder that
ONNX_FUSE_CASES names, decoders, models/, rows of fusions and contrib operators): the optimized
graph at levels 0 to 3, the gradient, the training step, the reasons for refusals, and for an H200
the program at small sizes, its launches and its results by NumPy. It also stores the interface: the
help of the commands, the shape of their --json, the names and signatures of the modules. A file of
compressed JSON is written for each; no GPU is needed. `--thorough` lowers every level, at more
sizes; `--cubins` compiles every kernel and stores digests of the code.

`compare` prints how many records of each kind differ, then the differences, equal ones once, and
exits with 1 where there are any. Lines of the file that `--allow` names are expected differences:
a pattern for KIND/MODEL/RECORD (as in a shell), and the reason behind a "#".
"""

import argparse
import difflib
import fnmatch
import gzip
import hashlib
import json
import multiprocessing
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import _paths  # noqa: F401
import numpy as np
import onnx_ir as ir
import replay_interface
from every_size import H200, LARGE, Feeds, Subject, sample
from every_size_models import fused_gradient, sources, step
from lowering import answered, with_values
from replay_text import array_text, graph_text, launch_lines, model_names, program_text

import onnx_fuse
from onnx_fuse import rewrite
from onnx_fuse.lower.table import lowerings
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.interpret.run import initializers
from onnx_fuse.runtime.specialize import Specializer

Records = dict[str, dict[str, str]]
"""Texts by kind and name of the record."""
INTERFACE = "interface"
SMALL = 7
"""The largest size of a dynamic dimension."""
TRIES = 12
"""Samples of sizes that are tried until onnxruntime runs the model of a gradient at one."""
LEVEL = 2


class Recorder:
    """The records of one model."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.records: Records = defaultdict(dict)

    def record(self, make: Callable[[], ir.Model], training: str) -> Records:
        original = make()
        names = model_names(original)
        for level in rewrite.LEVELS:
            model = make()
            report = rewrite.optimize(model, level=level)
            self.records["graph"][f"level {level}"] = graph_text(model, names)
            reasons = [f"{n} {name}" for name, n in sorted(report.fusions.items())] + report.notes
            for left in report.not_fused:
                nodes = " ".join(node if node in names else "_" for node in left.nodes)
                reasons.append(f"{left.reason} ({nodes})")
            self.records["reasons"][f"level {level}"] = "\n".join(reasons)
            if level == LEVEL or self.options.thorough:
                self.lowered(f"level {level}", Subject(self.name, original, model), names)
        self.trained("gradient", lambda: fused_gradient(make), names, original)
        if training not in ("", "gradient"):
            self.trained("step", lambda: step(make, training), names)
        return dict(self.records)

    def trained(
        self, what: str, make: Callable[[], ir.Model], names: set[str], *forward: ir.Model
    ) -> None:
        """The records of a gradient or a training step, or why there is none."""
        try:
            model = make()
        except onnx_fuse.OnnxFuseError as error:
            self.records["graph"][what] = f"refused: {error}"
            return
        self.records["graph"][what] = graph_text(model, names)
        self.lowered(what, Subject(self.name, model, model, *forward), names)

    def lowered(self, what: str, subject: Subject, names: set[str]) -> None:
        """The records of the programs at small sizes, or why there is none."""
        wanted = 4 if self.options.thorough else 1
        try:
            feeds = feeds_of(subject)
            for number, feed in zip(range(wanted), feeds, strict=False):
                self.program(f"{what}, feed {number}", subject, feed, names)
        except Exception as error:  # noqa: BLE001 - what is not lowered is a record, too
            text = re.sub(r"0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}")
            self.records["program"][what] = text

    def program(self, key: str, subject: Subject, feed: Feeds, names: set[str]) -> None:
        specializer = Specializer(subject.graph, H200)
        shapes = {name: (array.shape, array.dtype.name) for name, array in feed.items()}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            program = answered(partial(specializer.of, shapes), feed, {}).program
        lines = [f"warning: {warning.message}" for warning in told]
        self.records["program"][key] = "\n".join([*lines, program_text(program, names)])
        calls = (*program.setup, *program.calls)
        cubins = H200.arch if self.options.cubins else ""
        lines = [line for call in calls for line in launch_lines(call, cubins)]
        self.records["launches"][key] = "\n".join(lines)
        if sum(array.size for array in feed.values()) <= LARGE:
            results = interpret(program, feed, initializers(subject.graph), with_values)
            lines = [f"{name} {array_text(np.asarray(y))}" for name, y in results.items()]
            self.records["results"][key] = "\n".join(lines)


def feeds_of(subject: Subject) -> Iterator[Feeds]:
    """Small inputs; for a gradient, of sizes at which onnxruntime runs the model."""
    for number, sizes in zip(range(TRIES), sample(subject.symbols, 0), strict=False):
        small = {symbol: min(size, SMALL) for symbol, size in sizes.items()}
        feed = subject.feed(subject.fitted(small), np.random.default_rng(number))
        if feed is not None:
            yield feed


def path_of(folder: Path, name: str) -> Path:
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return folder / f"{re.sub('[^A-Za-z0-9_]+', '-', name)[:60]}-{digest}.json.gz"


def write(folder: Path, name: str, records: Records) -> None:
    data = json.dumps({"name": name, "records": records}, indent=0, sort_keys=True)
    path_of(folder, name).write_bytes(gzip.compress(data.encode(), mtime=0))


def record_one(name: str, options: argparse.Namespace) -> tuple[str, float]:
    """Write the file of one model; gives the seconds that it took."""
    began = time.process_time()
    if name == INTERFACE:
        records = replay_interface.record()
    else:
        _, make, training = next(row for row in sources() if row[0] == name)
        records = Recorder(name, options).record(make, training)
    write(options.folder, name, records)
    return name, time.process_time() - began


def record(options: argparse.Namespace) -> int:
    options.folder.mkdir(parents=True, exist_ok=True)
    for path in options.folder.glob("*.json.gz"):
        path.unlink()
    lowerings()  # what every process would import
    names = [INTERFACE, *(name for name, *_ in sources())]
    names = [name for name in names if options.only in name]
    began = time.perf_counter()
    context = multiprocessing.get_context("fork")
    if options.workers == 1:
        slow = [record_one(name, options) for name in names]
    else:
        with ProcessPoolExecutor(options.workers, context) as pool:
            works = [pool.submit(record_one, name, options) for name in names]
            slow = [work.result() for work in works]
    for name, seconds in sorted(slow, key=lambda row: -row[1])[: options.slowest]:
        print(f"{seconds:6.2f} s  {name}")
    print(f"{len(names)} files, {sum(s for _, s in slow):.0f} s of processors, ", end="")
    print(f"{time.perf_counter() - began:.0f} s")
    return 0


def read(folder: Path) -> dict[tuple[str, str, str], str]:
    """The stored texts by kind, model and record."""
    texts = {}
    for path in sorted(folder.glob("*.json.gz")):
        case = json.loads(gzip.decompress(path.read_bytes()))
        for kind, records in case["records"].items():
            texts |= {(kind, case["name"], key): text for key, text in records.items()}
    return texts


def differences(
    old: Mapping[tuple[str, str, str], str], new: Mapping[tuple[str, str, str], str]
) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Each record that differs, with its unified diff."""
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key):
            continue
        if key not in old or key not in new:
            yield key, "only in " + ("the second" if key in new else "the first") + " recording"
            continue
        lines = difflib.unified_diff(old[key].splitlines(), new[key].splitlines(), lineterm="", n=1)
        yield key, "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def expected(path: Path | None) -> list[str]:
    """The patterns of a file of expected differences."""
    if path is None:
        return []
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def compare(options: argparse.Namespace) -> int:
    old, new, patterns = read(options.a), read(options.b), expected(options.allow)
    by_kind: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    allowed = 0
    for (kind, model, key), text in differences(old, new):
        if any(fnmatch.fnmatchcase(f"{kind}/{model}/{key}", pattern) for pattern in patterns):
            allowed += 1
        else:
            by_kind[kind][text].append(f"{model}, {key}")
    totals = defaultdict(int)
    for kind, *_ in old.keys() | new.keys():
        totals[kind] += 1
    for kind, total in sorted(totals.items()):
        print(f"{kind}: {sum(map(len, by_kind[kind].values()))} of {total} differ")
    if allowed:
        print(f"{allowed} expected differences")
    for kind, texts in sorted(by_kind.items()):
        for text, places in sorted(texts.items(), key=lambda row: -len(row[1])):
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            print(f"\n==== {kind}: {'; '.join(places[:3])}{more}")
            lines = text.splitlines()
            print("\n".join(lines[: options.lines]))
            if len(lines) > options.lines:
                print(f"... {len(lines) - options.lines} more lines")
    return int(any(by_kind.values()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("record", help="store what the package makes of every model")
    command.set_defaults(run=record)
    command.add_argument("folder", type=Path)
    command.add_argument("--only", default="", help="part of a model's name, or 'interface'")
    command.add_argument("--workers", type=int, default=1, help="processes that work at once")
    command.add_argument("--thorough", action="store_true", help="lower every level, at more sizes")
    command.add_argument("--cubins", action="store_true", help="compile the kernels")
    command.add_argument("--slowest", type=int, default=0, help="print so many models by time")
    command = commands.add_parser("compare", help="print the differences of two recordings")
    command.set_defaults(run=compare)
    command.add_argument("a", type=Path)
    command.add_argument("b", type=Path)
    command.add_argument("--allow", type=Path, help="a file of expected differences")
    command.add_argument("--lines", type=int, default=60, help="lines shown of each difference")
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    raise SystemExit(main())
