"""compute-sanitizer over GPU tests that launch every kernel: one line a tool, then what it found.

    python tools/sanitize.py [--tool memcheck ...] [--match TEXT] [--shards 8] [--logs FOLDER]
    python tools/sanitize.py --list     # the tests chosen, and the kernels without one; no GPU

The tests are chosen: each kernel of cuda_src/ with each value that a case gives one of its macros,
and each kind of generated kernel, is launched by the smallest case that does it, in those of its
variants that bring such a value; every tensor in an allocation of its own (ONNX_FUSE_ARENA=0) and
every launch by itself (ONNX_FUSE_GRAPH=0). A kernel that no chosen test launched is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onnx_fuse.cuda import launch as launching
from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.launch import Bound
from onnx_fuse.cuda.source import source_root, source_text, without_bounds
from onnx_fuse.program.problem import CHIPS, ITEMSIZE, Hardware, Launch, Ptr, TensorMap

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
from math_cases import Case, only

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("racecheck", "initcheck", "memcheck", "synccheck")  # the slowest first
GENERATED = "generated"
MARK, LIMIT = ">>> ", 180  # before a test's name in a log; seconds a test may take
Feature = tuple[str, ...]


def entries() -> set[Feature]:
    """(source, entry) of every kernel under cuda_src/, and of those that are generated."""
    root, found = source_root(), set[Feature]()
    for path in root.rglob("*.cu"):
        text = without_bounds(path.read_text())
        name = path.relative_to(root).as_posix()
        found |= {(name, entry) for entry in re.findall(r"__global__\s+void\s+(\w+)\(", text)}
    return found | {(GENERATED, entry) for entry in ("pointwise", "pointwise_many", "batched")}


def launches_of(callspec: Any, hw: Hardware) -> list[list[Launch]]:
    """What a test launches, by its parameters: in any case, then for each variant of a case."""
    parameters = callspec.params if callspec else {}
    if hasattr(parameters.get("case"), "program"):
        case = parameters["case"]
        programs = [case.program(hw)]
        for choice in case.variants(hw):
            with only(choice):
                programs.append(case.program(hw))
        return [
            [x for call in (*program.setup, *program.calls) for x in call.launches]
            for program in programs
        ]
    if "problem" in parameters:
        from test_gemm import each

        problem = parameters["problem"]
        return [[x for kernel, how in each(problem, hw) for x in kernel.launch(problem, how, hw)]]
    return [[]]


def features(launches: Iterable[Launch]) -> set[Feature]:
    """Kernels, and their macros' values; of a generated one its widths, tails, rank and indices."""
    found: set[Feature] = set()
    for x in launches:
        if "\n" in x.source:
            widths = sorted(set(re.findall(r"Vec<\w+, \d+>", x.source)))
            found |= {(GENERATED, x.entry, width) for width in widths}
            found |= {
                (GENERATED, x.entry, part)
                for part in ("load_part", "c1", "row_at")
                if part in x.source
            }
        else:
            found |= {(x.source, x.entry, *pair) for pair in x.defines}
        found.add((x.source if "\n" not in x.source else GENERATED, x.entry))
    return found


def threads(launches: Iterable[Launch]) -> int:
    return sum(x.grid[0] * x.grid[1] * x.grid[2] * x.block[0] for x in launches)


def collect(plugin: object, *options: str) -> int:
    """Run pytest over tests/gpu (or only collect)."""
    where = [str(ROOT / "tests" / "gpu"), "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    return int(pytest.main([*where, *options], plugins=[plugin]))


class Selection:
    """A pytest plugin that chooses tests; `chosen`: by id, its variants and about its seconds."""

    def __init__(self, hw: Hardware, match: str = "") -> None:
        self.hw, self.match = hw, match
        self.launches: list[Launch] = []
        self.features: set[Feature] = set()
        self.chosen: dict[str, tuple[list[int], float]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """By new features for the threads they cost, until every feature is there."""
        calls, has, cost = {}, {}, {}
        for item in items:
            calls[item] = launches_of(getattr(item, "callspec", None), self.hw)
            has[item] = {m.args for m in item.iter_markers("launches")}.union(
                *map(features, calls[item])
            )
            cost[item] = 50_000 + sum(map(threads, calls[item]))
            self.features |= has[item]
        todo, kept = set(self.features), []
        while todo:
            best = max(has, key=lambda item: len(has[item] & todo) / cost[item])
            new, variants = (has[best] & todo) - features(calls[best][0]), []
            todo -= has[best]
            for i, launches in enumerate(calls[best][1:]):
                if features(launches) & new:
                    new -= features(launches)
                    variants.append(i)
            if self.match in best.nodeid:
                kept.append(best)
                runs = calls[best][0] + [x for i in variants for x in calls[best][i + 1]]
                self.launches += runs
                # a tool patches each module, and racecheck looks at what each thread accesses
                modules = len({(x.source, x.defines) for x in runs})
                self.chosen[best.nodeid] = (variants, 0.3 + 0.15 * modules + 2e-5 * threads(runs))
        items[:] = kept

    def parts(self, count: int) -> list[dict[str, list[int]]]:
        """The chosen tests and variants in parts of about the same time."""
        parts: list[dict[str, list[int]]] = [{} for _ in range(count)]
        loads = [0.0] * count
        for test, (variants, seconds) in sorted(self.chosen.items(), key=lambda x: -x[1][1]):
            least = loads.index(min(loads))
            parts[least][test] = variants
            loads[least] += seconds
        return [part for part in parts if part]

    @property
    def missing(self) -> list[Feature]:
        """Kernels that no test launches."""
        return sorted(entries() - {feature[:2] for feature in self.features})


class Part:
    """A pytest plugin that keeps the tests and variants named, but for the first `skip`.

    It says which test begins, ends the process where one takes too long, and writes to `report`
    which kernels were launched.
    """

    def __init__(self, tests: Mapping[str, list[int]], skip: int, report: Path) -> None:
        self.tests, self.skip, self.report = tests, skip, report
        self.stderr = os.dup(2)  # pytest captures what is written there

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.tests][self.skip :]
        cases = [(item, getattr(item, "callspec", None)) for item in items]
        kept = {
            spec.params["case"].name: self.tests[item.nodeid]
            for item, spec in cases
            if spec and isinstance(spec.params.get("case"), Case)  # others have no variants to keep
        }
        every = Case.variants
        Case.variants = lambda case, hw: [every(case, hw)[i] for i in kept.get(case.name, ())]

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        item.config.get_terminal_writer().line(f"\n{MARK}{item.nodeid}")
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=self.stderr)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        names = {(GENERATED if "\n" in text else text, entry) for text, entry in launching.bound()}
        self.report.write_text(json.dumps(sorted(names)))


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
    loaded = {
        x.ptr for i, x in enumerate(launch.args) if isinstance(x, TensorMap) and i not in maps
    }
    names = {x.name for x in launch.args if isinstance(x, Ptr)} | {ptr.name for ptr in loaded}
    for arg in (launch.args[i] for i in sorted(maps)):
        assert isinstance(arg, TensorMap)
        start = pointers.get(arg.ptr.name, 0)
        shared = any(pointers.get(name) == start for name in names - {arg.ptr.name})
        if not start or shared or arg.ptr in loaded:
            continue
        length, outer = arg.shape[0] * ITEMSIZE[arg.dtype], []
        for stride, size in sorted(zip(arg.strides, arg.shape[1:], strict=True)):
            if stride == length:
                length *= size
            elif size > 1:
                outer.append([stride * i for i in range(size)])
        places = (start + arg.ptr.offset + sum(offsets) for offsets in itertools.product(*outer))
        pieces += [(place, length) for place in places]
    return pieces


class Poisoned(Bound):
    """initcheck sees no TMA store: what one is to fill is NaN before; a test sees what stays so."""

    def _pointers(self, pointers: Mapping[str, int]) -> Mapping[str, int]:
        self._stored = stored(self.launch, pointers)
        return super()._pointers(pointers)

    def enqueue(self, stream: int) -> None:
        from cuda.bindings import driver

        for address, length in self._stored:
            (code,) = driver.cuMemsetD8Async(address, 0xFF, length, stream)
            assert not int(code), code
        super().enqueue(stream)


class Arriving(Bound):
    """racecheck counts an mbarrier's arrival for one lane alone: all arrive, see sm90.cuh."""

    def __init__(self, launch: Launch, pointers: Mapping[str, int], hw: Hardware) -> None:
        if "arrives(lane)" in source_text(launch.source):
            launch = replace(launch, defines=(*launch.defines, ("RACECHECK", "1")))
        super().__init__(launch, pointers, hw)


SEEN: Mapping[str, type[Bound]] = {"initcheck": Poisoned, "racecheck": Arriving}
"""How launches are bound for the tools that do not see all of what a kernel does."""


def watched(tool: str, part: int, skip: int, folder: Path) -> int:
    """One part of the tests, up to the first that fails, in a process that a tool watches."""
    launching.Bound = SEEN.get(tool, Bound)  # type: ignore[misc]
    tests = json.loads((folder / "parts.json").read_text())[part]
    return collect(Part(tests, skip, folder / f"{tool}.{part}.{skip}.json"), "-x", "--tb=short")


def run(tool: str, part: int, tests: int, folder: Path) -> tuple[int, Path]:
    """One part of the tests under a tool: its exit code and its log.

    A test that fails or hangs may have lost the context: those after it have another process.
    """
    log, worst, begun = folder / f"{tool}.{part}.log", 0, 0
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "100"]
    command += ["--show-backtrace", "no", "--destroy-on-device-error", "kernel"]
    if tool == "memcheck":  # the bindings ask for functions that an older driver lacks
        command += ["--report-api-errors", "no"]
    command += [sys.executable, __file__, "--watched", tool, str(part)]
    environment = {**os.environ, "ONNX_FUSE_ARENA": "0", "ONNX_FUSE_GRAPH": "0"}
    environment["ONNX_FUSE_AHEAD"] = "0"
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process a core
    log.write_text("")
    while begun < tests:
        with log.open("a") as out:
            arguments = [*command, str(begun), str(folder)]
            done = subprocess.run(arguments, stdout=out, stderr=out, env=environment, check=False)
        worst, before = worst or done.returncode, begun
        begun = len(re.findall(f"^{MARK}", log.read_text(errors="replace"), re.MULTILINE))
        if begun == before:  # not even one began
            break
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
    tool: str, runs: Sequence[Future[tuple[int, Path]]], wanted: set[Feature]
) -> tuple[str, list[str]]:
    """The tool's line, and what is wrong."""
    wrong, tests, touched, found = [], 0, set[Feature](), Counter[str]()
    for part in runs:
        code, log = part.result()
        text = log.read_text(errors="replace")
        summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
        tests += sum(map(int, re.findall(r"(\d+) passed", text)))
        if code or not summaries or not all(line.startswith("0 ") for line in summaries):
            wrong.append(f"{log}: exit {code}, {summaries or 'no summary'}")
            found += findings(text)
        for report in log.parent.glob(f"{log.stem}.*.json"):
            touched |= {tuple(pair) for pair in json.loads(report.read_text())}
    wrong += [f"{count} x {what}" for what, count in found.most_common(30)]
    missing = sorted(wanted - touched)
    wrong += [f"not launched: {source} {entry}" for source, entry in missing]
    kernels = f"{len(wanted) - len(missing)} of {len(wanted)} kernels"
    return f"{tool:10} {'FAILED' if wrong else 'clean'}: {tests} tests, {kernels}", wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--match", default="", help="only chosen tests with this in their name")
    parser.add_argument("--shards", type=int, default=8, help="processes a tool")
    parser.add_argument("--logs", type=Path, help="folder that keeps the tools' output")
    parser.add_argument("--list", action="store_true", help="the tests chosen; needs no GPU")
    parser.add_argument("--watched", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watched:
        tool, part, skip, folder = options.watched
        return watched(tool, int(part), int(skip), Path(folder))
    selection = Selection(CHIPS["H200"] if options.list else Hardware.detect(), options.match)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = collect(selection, "--collect-only")
    if options.list or code:
        print(printed.getvalue())
    for source, entry in selection.missing:
        print(f"no test launches {source}: {entry}")
    if options.list or code or selection.missing:
        return code or 3 * bool(selection.missing)
    started = time.monotonic()
    workers = os.cpu_count() or 8
    nvrtc.compile_all(selection.launches, selection.hw.arch, workers)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    folder = options.logs or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    parts = selection.parts(options.shards)
    for old in folder.glob("*check.*.json"):
        old.unlink()
    (folder / "parts.json").write_text(json.dumps(parts))
    wanted = (
        {feature[:2] for feature in features(selection.launches)} if options.match else entries()
    )
    failed = False
    with ThreadPoolExecutor(max_workers=workers) as pool:
        runs = {
            tool: [pool.submit(run, tool, i, len(part), folder) for i, part in enumerate(parts)]
            for tool in options.tool or TOOLS
        }
        for tool, results in runs.items():
            line, wrong = outcome(tool, results, wanted)
            print(f"{line}, {time.monotonic() - started:.0f} s", *wrong, sep="\n    ", flush=True)
            failed |= bool(wrong)
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
