"""compute-sanitizer over GPU tests that launch every kernel: one line a tool, then what it found.

    python tools/sanitize.py [--tool memcheck ...] [--match TEXT] [--shards 8] [--logs FOLDER]
    python tools/sanitize.py --list     # the tests chosen, and the kernels without one; no GPU

The tests are chosen: each kernel of cuda_src/ with each value that a test gives one of its macros,
and each kind of generated kernel, is launched by the cheapest test that does it, with those of its
kernels and configurations alone that bring such a value; every tensor in an allocation of its own
(ONNX_FUSE_ARENA=0) and every launch by itself (ONNX_FUSE_GRAPH=0). The processes of a tool take the
tests in turn, the longest first, on all GPUs. The last lines are the kernels, each with the tools
under which it was launched; one that no test launched is a fault.
"""

import argparse
import contextlib
import faulthandler
import fcntl
import heapq
import io
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import _paths
import on_device
import pytest
from math_cases import Case, launched

from onnx_fuse.cuda import launch as launching
from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.arguments import MAP_BYTES, Operands
from onnx_fuse.cuda.launch import BoundLaunch
from onnx_fuse.cuda.source import source_root, source_text
from onnx_fuse.kernels import cublaslt
from onnx_fuse.program import passes
from onnx_fuse.program.launch import Launch, Ptr, TensorMap
from onnx_fuse.program.problem import CHIPS, Hardware

TOOLS = ("racecheck", "initcheck", "memcheck", "synccheck")  # the slowest first
GENERATED = "generated"
MARK, TOOK = ">>> ", "<<< "  # before a test's name in a log, and before the seconds it took
LIMIT = 180  # seconds a test may take
Feature = tuple[str, ...]


def entries() -> set[Feature]:
    """(source, entry) of every kernel under cuda_src/, and of those that are generated."""
    root, found = source_root(), set[Feature]()
    for path in root.rglob("*.cu"):
        text = without_bounds(path.read_text())
        name = path.relative_to(root).as_posix()
        found |= {(name, entry) for entry in re.findall(r"__global__\s+void\s+(\w+)\(", text)}
    return found | {(GENERATED, entry) for entry in ("pointwise", "pointwise_many", "batched")}


@dataclass(frozen=True)
class Run:
    """What a test launches with one choice of kernels, and the arithmetic that this does."""

    launches: tuple[Launch, ...] = ()
    flops: float = 0.0

    @property
    def cost(self) -> float:
        """About the work of a tool, which looks at each access of each thread."""
        each = (x.grid[0] * x.grid[1] * x.grid[2] * x.block[0] for x in self.launches)
        return 1000 + sum(each) + self.flops / 256


def runs_of(callspec: Any, hw: Hardware) -> list[Run]:
    """What a test runs, by its parameters: a case as it comes and each variant, or what is chosen.

    The first is what a test runs in any case.
    """
    parameters = callspec.params if callspec else {}
    if hasattr(parameters.get("case"), "program"):
        case = parameters["case"]
        program = case.program(hw)
        calls = (*program.setup, *program.calls)
        always = tuple(x for call in calls for x in call.launches)
        flops = sum(call.problem.flops for call in calls if call.problem)
        variants = launched(program, case.variants(program, hw), hw)
        return [Run((*always, *more), flops) for more in ((), *variants)]
    if "problem" in parameters:
        problem = parameters["problem"]
        pairs = on_device.each(problem, hw)
        return [Run(), *(Run(k.launch(problem, how, hw), problem.flops) for k, how in pairs)]
    return [Run()]


def features(launches: Iterable[Launch]) -> set[Feature]:
    """Kernels, and their macros' values; of a generated one its widths, tails, rank and indices."""
    found: set[Feature] = set()
    for x in launches:
        if "\n" in x.source:
            parts = [part for part in ("load_part", "c1", "row_at") if part in x.source]
            parts += re.findall(r"Vec<\w+, \d+>", x.source)
            found |= {(GENERATED, x.entry, part) for part in parts}
        else:
            found |= {(x.source, x.entry, *pair) for pair in x.defines}
        found.add((x.source if "\n" not in x.source else GENERATED, x.entry))
    return found


def machine() -> tuple[Hardware, list[str]]:
    """The GPU, and the names of all; for a process of its own: one with CUDA cannot be forked."""
    from cuda.bindings import driver

    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    hw, count = Hardware.detect(), int(driver.cuDeviceGetCount()[1])
    return hw, given.split(",") if given else [str(i) for i in range(count)]


def collect(plugin: object, *options: str) -> int:
    """Run pytest over tests/gpu (or only collect)."""
    root = _paths.ROOT
    where = [str(root / "tests" / "gpu"), "-q", "-p", "no:cacheprovider", f"--rootdir={root}"]
    return int(pytest.main([*where, *options], plugins=[plugin]))


_ITEMS: list[Any] = []  # what processes that are forked now look at


def _seen(i: int) -> list[tuple[set[Feature], float]]:
    """The features and the cost of each run of a test."""
    callspec, hw = _ITEMS[i]
    return [(features(run.launches), run.cost) for run in runs_of(callspec, hw)]


class Selection:
    """A pytest plugin that chooses tests; `chosen`: the runs of each, the longest test first."""

    START = 50_000
    """The cost of a test that runs nothing."""

    def __init__(self, hw: Hardware, match: str = "") -> None:
        self.hw, self.match = hw, match
        self.features: set[Feature] = set()
        self.chosen: dict[str, list[int]] = {}
        self._callspecs: dict[str, Any] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """By new features for what they cost, until every feature is there."""
        callspecs = [getattr(item, "callspec", None) for item in items]
        _ITEMS[:] = [(callspec, self.hw) for callspec in callspecs]
        unchecked = patch.object(passes, "CHECKED", False)  # tests hold the same programs to it
        with unchecked, multiprocessing.get_context("fork").Pool() as pool:
            runs = pool.map(_seen, range(len(items)), chunksize=8)
        for item, found in zip(items, runs, strict=True):
            found[0][0].update(m.args for m in item.iter_markers("launches"))
        kept: dict[int, set[int]] = {}
        todo = {feature for found in runs for run, _ in found for feature in run}
        self.features = set(todo)

        def worth(i: int, k: int) -> float:
            """Minus the new features of a run for its cost; that of what else comes with it."""
            (first, always), (new, cost) = runs[i][0], runs[i][k]
            if i not in kept:
                new, cost = first | new, cost + self.START + always * (k > 0)
            return -len(new & todo) / cost

        # The worth of a run falls as others are taken, so that the best of before is looked at
        # again; it rises with the first run of its test.
        heap = [(worth(i, k), i, k) for i, found in enumerate(runs) for k in range(len(found))]
        heapq.heapify(heap)
        while todo:
            _, i, k = heapq.heappop(heap)
            if heap and (now := worth(i, k)) > heap[0][0]:
                heapq.heappush(heap, (now, i, k))
                continue
            if i not in kept:
                kept[i] = {0}
                for other in range(len(runs[i])):
                    heapq.heappush(heap, (worth(i, other), i, other))
            kept[i].add(k)
            todo -= runs[i][0][0] | runs[i][k][0]
        kept = {i: taken for i, taken in kept.items() if self.match in items[i].nodeid}
        order = sorted(kept, key=lambda i: -sum(runs[i][k][1] for k in kept[i]))
        for i in order:
            self.chosen[items[i].nodeid] = sorted(kept[i])
            self._callspecs[items[i].nodeid] = callspecs[i]
        items[:] = [items[i] for i in order]

    @cached_property
    def launches(self) -> list[Launch]:
        """Of all chosen runs."""
        every = {test: runs_of(self._callspecs[test], self.hw) for test in self.chosen}
        return [
            x for test, kept in self.chosen.items() for k in kept for x in every[test][k].launches
        ]

    @property
    def missing(self) -> list[Feature]:
        """Kernels that no test launches."""
        return sorted(entries() - {feature[:2] for feature in self.features})


def turn(counter: Path) -> int:
    """The next number of a file that several processes count in."""
    with counter.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = file.seek(0, os.SEEK_END)
        file.write(b".")
    return number


class Turns:
    """A pytest plugin that runs those of the tests, each with its runs, that `counter` gives it.

    It says which test begins and how long it took, ends the process where one takes too long, and
    writes to `report` which kernels were launched.
    """

    def __init__(self, tests: Mapping[str, list[int]], counter: Path, report: Path) -> None:
        self.tests, self.counter, self.report = tests, counter, report
        self.stderr = os.dup(2)  # pytest captures what is written there
        self.begun = 0.0
        self.runs: list[int] = []
        """Those of the test that runs; 0 is what it runs in any case."""
        self.problem: Any = None
        self.variants, self.ways = Case.variants, on_device.each
        Case.variants = lambda *case: self.taken(self.variants(*case))
        on_device.each = self.each

    def taken(self, choices: list[Any]) -> list[Any]:
        """Those of a test's choices that it is to run with."""
        return [choices[i - 1] for i in self.runs if i]

    def each(self, problem: Any, hw: Hardware) -> list[Any]:
        """The ways to a problem's answer; for the test's own, those that it is to run with."""
        ways = self.ways(problem, hw)
        return self.taken(ways) if problem == self.problem else ways

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items if item.nodeid in self.tests}
        items[:] = [found[test] for test in self.tests]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        while (i := turn(self.counter)) < len(session.items):
            item = session.items[i]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
        return True

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.writer = item.config.get_terminal_writer()
        self.writer.line(f"\n{MARK}{item.nodeid}")
        self.begun, self.runs = time.monotonic(), self.tests[item.nodeid]
        self.problem = item.callspec.params.get("problem") if hasattr(item, "callspec") else None
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=self.stderr)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.writer.line(f"\n{TOOK}{time.monotonic() - self.begun:.1f}")
        names = {(GENERATED if "\n" in text else text, entry) for text, entry in launching.bound()}
        self.report.write_text(json.dumps(sorted(names)))


_BOUNDS = re.compile(r"__launch_bounds__\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")


def without_bounds(text: str) -> str:
    """The text without its __launch_bounds__(...), so that a name follows its type."""
    return _BOUNDS.sub("", text)


@cache
def stored_maps(source: str, entry: str, how: str = "tma_store") -> frozenset[int]:
    """Which of a kernel's arguments are the tensor maps it stores through."""
    text = without_bounds(source_text(source))
    calls = re.findall(rf"\b{how}\w*(?:<\w+>)?\(([^;]*);", text)
    names = {name for call in calls for name in re.findall(r"\bmap_\w+", call)}
    head = re.search(rf"__global__\s+void\s+{entry}\(([^)]*)\)", text)
    assert head, f"{source}: no kernel {entry}"
    return frozenset(
        i for i, argument in enumerate(head[1].split(",")) if argument.split()[-1] in names
    )


def stored(launch: Launch, pointers: Mapping[str, int]) -> list[tuple[int, int]]:
    """(address, bytes) of what a launch stores by TMA, in pieces; not what it may read as well."""
    maps, pieces = stored_maps(launch.source, launch.entry), []
    if dict(launch.defines).get("ACCUMULATE") == "1":
        maps -= stored_maps(launch.source, launch.entry, "tma_add")
    read = {x.ptr for i, x in enumerate(launch.args) if isinstance(x, TensorMap) and i not in maps}
    names = {x.name for x in launch.args if isinstance(x, Ptr)} | {ptr.name for ptr in read}
    for arg in (launch.args[i] for i in sorted(maps)):
        assert isinstance(arg, TensorMap)
        start = pointers.get(arg.ptr.name, 0)
        shared = any(pointers.get(name) == start for name in names - {arg.ptr.name})
        if not start or shared or arg.ptr in read:
            continue
        length, outer = arg.shape[0] * MAP_BYTES[arg.dtype], []
        for stride, size in sorted(zip(arg.strides, arg.shape[1:], strict=True)):
            if stride == length:
                length *= size
            elif size > 1:
                outer.append([stride * i for i in range(size)])
        places = (start + arg.ptr.offset + sum(offsets) for offsets in itertools.product(*outer))
        pieces += [(place, length) for place in places]
    return pieces


class Poisoned(BoundLaunch):
    """initcheck sees no TMA store: what one is to fill is NaN before; a test sees what stays so."""

    def __init__(
        self, launch: Launch, address: Any, hw: Hardware, operands: Operands | None = None
    ) -> None:
        self._operands = operands or {}
        super().__init__(launch, address, hw, operands)

    def place(self, address: Mapping[Any, int]) -> None:
        super().place(address)
        known = {n: address[k] + at for n, (k, at) in self._operands.items() if address.get(k)}
        self._stored = stored(self.launch, {**address, **known})

    def rewrite(self, *change: Any) -> None:
        super().rewrite(*change)
        self._stored = []  # the launch has the maps of another shape

    def enqueue(self, stream: int) -> None:
        for address, length in self._stored:
            (code,) = launching._driver().cuMemsetD8Async(address, 0xFF, length, stream)
            assert not int(code), code
        super().enqueue(stream)


class Arriving(BoundLaunch):
    """racecheck counts an mbarrier's arrival for one lane alone: all arrive, see sm90.cuh."""

    def __init__(self, launch: Launch, *rest: Any) -> None:
        if "arrives(lane)" in source_text(launch.source):
            launch = replace(launch, defines=(*launch.defines, ("RACECHECK", "1")))
        super().__init__(launch, *rest)


SEEN: Mapping[str, type[BoundLaunch]] = {"initcheck": Poisoned, "racecheck": Arriving}
"""How launches are bound for the tools that do not see all of what a kernel does."""


def watched(tool: str, shard: int, folder: Path) -> int:
    """The tests that are this process's in turn, up to the first that fails, watched by a tool."""
    launching.BoundLaunch = SEEN.get(tool, BoundLaunch)  # type: ignore[misc]
    tests = json.loads((folder / "tests.json").read_text())
    turns = Turns(tests, folder / f"{tool}.next", folder / f"{tool}.{shard}.{os.getpid()}.json")
    return collect(turns, "-x", "--tb=short")


def run(tool: str, shard: int, device: str, folder: Path) -> tuple[int, Path]:
    """A process after the other that takes tests under a tool: the worst exit code, and the log.

    A test that fails or hangs may have lost the context: those after it have another process.
    """
    log, worst = folder / f"{tool}.{shard}.log", 0
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "100"]
    command += ["--show-backtrace", "no", "--destroy-on-device-error", "kernel"]
    if tool == "memcheck":  # the bindings ask for functions that an older driver lacks
        command += ["--report-api-errors", "no"]
    command += [sys.executable, __file__, "--watched", tool, str(shard), str(folder)]
    environment = {**os.environ, "ONNX_FUSE_ARENA": "0", "ONNX_FUSE_GRAPH": "0"}
    environment |= {"ONNX_FUSE_AHEAD": "0", "CUDA_VISIBLE_DEVICES": device}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process a core
    before, begun = -1, 0
    with log.open("w") as out:
        while before < begun:
            done = subprocess.run(command, stdout=out, stderr=out, env=environment, check=False)
            worst = worst or done.returncode
            if not done.returncode:
                break
            before, begun = begun, log.read_text(errors="replace").count(f"\n{MARK}")
    return worst, log


def findings(text: str) -> Counter[str]:
    """What a log reports, without the addresses, each with its test."""
    found, test, head = Counter[str](), "", ""
    for line in text.splitlines():
        line, _, report = line.partition("=========")
        if line.startswith(MARK):
            test = line.removeprefix(MARK)
        report = re.sub(r"0x[0-9a-f]{6,}", "...", report)
        if re.match(r" (?!COMPUTE-SANITIZER|\w+ SUMMARY)\S", report):
            head = report.strip()
            found[f"{test}: {head}"] += 1
        elif head and re.match(r" +at ", report):
            found[f"{test}: {head}"] -= 1
            found[f"{test}: {head} {report.strip()}"] += 1
            head = ""
        if line.startswith("Timeout ("):
            found[f"{test}: {line}"] += 1
        failed = re.match(r"(?:FAILED|ERROR) (\S+::.*)", line)
        if failed:
            found[failed[1]] += 1
    return +found


def outcome(
    tool: str, runs: Sequence[Future[tuple[int, Path]]], wanted: set[Feature], count: int
) -> tuple[str, list[str], set[Feature]]:
    """The tool's line, times and what is wrong of `count` tests, and the kernels launched."""
    wrong, tests, touched, found = [], 0, set[Feature](), Counter[str]()
    times: list[tuple[float, str]] = []
    for part in runs:
        code, log = part.result()
        text = log.read_text(errors="replace")
        summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
        tests += sum(map(int, re.findall(r"(\d+) (?:passed|skipped|failed)", text)))
        pairs = re.findall(rf"^{MARK}(.*)(?:\n(?!{MARK}).*)*?\n{TOOK}(.*)", text, re.MULTILINE)
        times += ((float(seconds), test) for test, seconds in pairs)
        if code or not summaries or not all(line.startswith("0 ") for line in summaries):
            wrong.append(f"{log}: exit {code}, {summaries or 'no summary'}")
            found += findings(text)
        for report in log.parent.glob(f"{log.stem}.*.json"):
            touched |= {tuple(pair) for pair in json.loads(report.read_text())}
    wrong += [f"{count} x {what}" for what, count in found.most_common(30)]
    missing = sorted(wanted - touched)
    wrong += [f"not launched: {source} {entry}" for source, entry in missing]
    if tests < count:
        wrong.append(f"{count - tests} tests did not end")
    kernels = f"{len(wanted) - len(missing)} of {len(wanted)} kernels"
    line = f"{tool:10} {'FAILED' if wrong else 'clean'}: {tests} tests, {kernels}"
    took = f"{sum(seconds for seconds, _ in times):.0f} s in tests, the longest "
    took += ", ".join(f"{test} {seconds:.0f} s" for seconds, test in sorted(times)[:-4:-1])
    return line, [took, *wrong], touched


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--match", default="", help="only chosen tests with this in their name")
    parser.add_argument("--shards", type=int, default=8, help="processes a tool")
    parser.add_argument("--logs", type=Path, help="folder that keeps the tools' output")
    parser.add_argument("--list", action="store_true", help="the tests chosen; needs no GPU")
    parser.add_argument("--watched", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watched:
        tool, shard, folder = options.watched
        return watched(tool, int(shard), Path(folder))
    started = time.monotonic()
    hw, devices = CHIPS["H200"], [""]
    if not options.list:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            hw, devices = process.submit(machine).result()
    selection, printed = Selection(hw, options.match), io.StringIO()
    hidden = patch.dict(os.environ, CUDA_VISIBLE_DEVICES="")  # until processes were forked
    with contextlib.redirect_stdout(printed), hidden:
        code = collect(selection, "--collect-only")
    if options.list or code:
        print(printed.getvalue())
    for source, entry in selection.missing:
        print(f"no test launches {source}: {entry}")
    if options.list or code or selection.missing:
        return code or 3 * bool(selection.missing)
    print(f"chose {len(selection.chosen)} tests in {time.monotonic() - started:.0f} s", flush=True)
    nvrtc.compile_all(selection.launches, selection.hw.arch, os.cpu_count() or 8)
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    folder = options.logs or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*check.*.json"), *folder.glob("*check.next")):
        old.unlink()
    (folder / "tests.json").write_text(json.dumps(selection.chosen))
    wanted = (
        {feature[:2] for feature in features(selection.launches)} if options.match else entries()
    )
    failed, tools = False, options.tool or TOOLS
    launched: dict[Feature, list[str]] = {kernel: [] for kernel in sorted(wanted)}
    with ThreadPoolExecutor(max_workers=len(tools) * options.shards) as pool:
        runs = {
            tool: [
                pool.submit(run, tool, i, devices[i % len(devices)], folder)
                for i in range(options.shards)
            ]
            for tool in tools
        }
        for tool in reversed(tools):  # the fastest first
            line, notes, touched = outcome(tool, runs[tool], wanted, len(selection.chosen))
            print(f"{line}, {time.monotonic() - started:.0f} s", *notes, sep="\n    ", flush=True)
            failed |= "FAILED" in line
            for kernel in wanted & touched:
                launched[kernel].append(tool)
    for (source, entry), names in launched.items():
        print(f"{source} {entry}: {' '.join(names)}")
    return 3 if failed else 0


if __name__ == "__main__":
    with cublaslt.left_out():  # its kernels are not ours, and store by TMA
        sys.exit(main())
