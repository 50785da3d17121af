"""compute-sanitizer over GPU tests that launch every kernel: one line a tool.

    python tools/sanitize.py [--tool memcheck ...] [--shards 4] [--logs FOLDER]
    python tools/sanitize.py --list     # the tests chosen, and the kernels without one; no GPU

The tests are chosen: each kernel of cuda_src/ with each value that a case gives one of its macros,
and each kind of generated kernel, is launched by the smallest case that does it; every tensor in an
allocation of its own (ONNX_FUSE_ARENA=0). A kernel that no chosen test launched is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from onnx_fuse.kernels import jit
from onnx_fuse.problem import CHIPS, Hardware, Launch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
GENERATED = "generated"
Feature = tuple[str, ...]
Run = tuple[subprocess.Popen[bytes], Path, Path]  # its log, its report


def entries() -> set[Feature]:
    """(source, entry) of every kernel under cuda_src/, and of those that are generated."""
    root, found = jit.source_root(), set[Feature]()
    for path in root.rglob("*.cu"):
        text = jit.without_bounds(path.read_text())
        name = path.relative_to(root).as_posix()
        found |= {(name, entry) for entry in re.findall(r"__global__\s+void\s+(\w+)\(", text)}
    return found | {(GENERATED, entry) for entry in ("pointwise", "pointwise_many", "twins")}


def launches_of(callspec: Any, hw: Hardware) -> list[Launch]:
    """What a test launches, by its parameters: a case of math_cases, or a registry problem."""
    parameters = callspec.params if callspec else {}
    if "case" in parameters:
        return list(parameters["case"].launches(hw))
    if "problem" in parameters:
        from test_gemm import each

        problem = parameters["problem"]
        return [x for kernel, how in each(problem, hw) for x in kernel.launch(problem, how, hw)]
    return []


def features(launches: Iterable[Launch]) -> set[Feature]:
    """Kernels, and their macros' values; of a generated one its access widths, tails and rank."""
    found: set[Feature] = set()
    for x in launches:
        if "\n" in x.source:
            widths = sorted(set(re.findall(r"Vec<\w+, \d+>", x.source)))
            found |= {(GENERATED, x.entry, width) for width in widths}
            found |= {
                (GENERATED, x.entry, part) for part in ("load_part", "c1") if part in x.source
            }
        else:
            found |= {(x.source, x.entry, *pair) for pair in x.defines}
        found.add((x.source if "\n" not in x.source else GENERATED, x.entry))
    return found


class Selection:
    """A pytest plugin that keeps the tests of one shard; they report what they launched."""

    def __init__(self, hw: Hardware, shard: int = 0, shards: int = 1) -> None:
        self.hw, self.shard, self.shards = hw, shard, shards
        self.launches: list[Launch] = []
        self.features: set[Feature] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """By new features for the threads they cost, until every feature is there."""
        calls, has, threads = {}, {}, {}
        for item in items:
            calls[item] = launches_of(getattr(item, "callspec", None), self.hw)
            has[item] = features(calls[item]) | {m.args for m in item.iter_markers("launches")}
            sizes = [x.grid[0] * x.grid[1] * x.grid[2] * x.block[0] for x in calls[item]]
            threads[item] = 50_000 + sum(sizes)
            self.features |= has[item]
        todo, chosen = set(self.features), []
        while todo:
            best = max(has, key=lambda item: len(has[item] & todo) / threads[item])
            todo -= has[best]
            chosen.append(best)
        self.launches = [x for item in chosen for x in calls[item]]
        items[:] = chosen[self.shard :: self.shards]

    def collect(self, *options: str) -> int:
        """Run pytest over tests/gpu (or only collect)."""
        where = [str(ROOT / "tests" / "gpu"), "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
        return int(pytest.main([*where, *options], plugins=[self]))

    @property
    def missing(self) -> list[Feature]:
        """Kernels that no test launches."""
        return sorted(entries() - {feature[:2] for feature in self.features})


def watched(shard: int, shards: int, report: Path) -> int:
    """One shard, in a process that a tool watches; `report` gets what it launched."""
    code = Selection(Hardware.detect(), shard, shards).collect("-x")
    names = {(GENERATED if "\n" in text else text, entry) for text, entry in jit.bound()}
    report.write_text(json.dumps(sorted(names)))
    return code


def start(tool: str, shard: int, shards: int, folder: Path) -> Run:
    """One shard under a tool."""
    log, report = folder / f"{tool}.{shard}.log", folder / f"{tool}.{shard}.json"
    report.unlink(missing_ok=True)
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "20", sys.executable]
    command += [__file__, "--shards", str(shards), "--watched", str(shard), str(report)]
    with log.open("w") as out:
        environment = {**os.environ, "ONNX_FUSE_ARENA": "0"}
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment), log, report


def outcome(tool: str, runs: Sequence[Run]) -> tuple[str, list[str]]:
    """The tool's line, and what is wrong."""
    wrong, tests, touched = [], 0, set[Feature]()
    for process, log, report in runs:
        code, text = process.wait(), log.read_text(errors="replace")
        summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
        passed = re.search(r"(\d+) passed", text)
        tests += int(passed[1]) if passed else 0
        if code or not summaries or not all(line.startswith("0 ") for line in summaries):
            wrong.append(f"{log}: exit {code}, {summaries or 'no summary'}")
        if report.exists():
            touched |= {tuple(pair) for pair in json.loads(report.read_text())}
    missing = sorted(entries() - touched)
    wrong += [f"not launched: {source} {entry}" for source, entry in missing]
    kernels = f"{len(entries()) - len(missing)} of {len(entries())} kernels"
    return f"{tool:10} {'FAILED' if wrong else 'clean'}: {tests} tests, {kernels}", wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--shards", type=int, default=4, help="processes a tool")
    parser.add_argument("--logs", type=Path, help="folder that keeps the tools' output")
    parser.add_argument("--list", action="store_true", help="the tests chosen; needs no GPU")
    parser.add_argument("--watched", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watched:
        return watched(int(options.watched[0]), options.shards, Path(options.watched[1]))
    selection = Selection(CHIPS["H200"] if options.list else Hardware.detect())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = selection.collect("--collect-only")
    if options.list or code:
        print(printed.getvalue())
    for source, entry in selection.missing:
        print(f"no test launches {source}: {entry}")
    if options.list or code or selection.missing:
        return code or 3 * bool(selection.missing)
    started = time.monotonic()
    workers = os.cpu_count() or 8
    jit.compile_all(selection.launches, selection.hw.arch, workers, progress=False)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    folder = options.logs or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    tools, shards = options.tool or TOOLS, range(options.shards)
    runs = {tool: [start(tool, k, options.shards, folder) for k in shards] for tool in tools}
    failed = False
    for tool, processes in runs.items():
        line, wrong = outcome(tool, processes)
        print(f"{line}, {time.monotonic() - started:.0f} s", *wrong, sep="\n    ", flush=True)
        failed |= bool(wrong)
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
