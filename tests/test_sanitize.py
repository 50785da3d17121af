"""tools/sanitize.py without a GPU: what it would run, and what it makes of logs and launches."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from math_cases import cases, only

from onnx_fuse.cuda.source import source_text, without_bounds
from onnx_fuse.program.problem import CHIPS, Launch, Ptr, TensorMap

TOOL = Path(__file__).parents[1] / "tools" / "sanitize.py"


def test_every_kernel_is_launched_by_a_gpu_test() -> None:
    run = subprocess.run([sys.executable, TOOL, "--list"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "test_math_kernels.py" in run.stdout


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", TOOL)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_part_keeps_its_tests_and_their_variants(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test whose case is no row of the kernels' table has no variants."""
    monkeypatch.setattr(tool.Case, "variants", lambda case, hw: [case.name + "0", case.name + "1"])
    row = next(iter(cases()))
    items = [
        SimpleNamespace(nodeid=name, callspec=SimpleNamespace(params={"case": case}))
        for name, case in (("a", row), ("b", object()), ("c", row))
    ]
    part = tool.Part({"a": [1], "b": []}, 0, tmp_path / "report")
    part.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["a", "b"]
    assert row.variants(CHIPS["H200"]) == [row.name + "1"]


LOG = """========= COMPUTE-SANITIZER

>>> tests/gpu/test_gemm.py::test_a[m=5 n=8]
========= Invalid __global__ read of size 16 bytes
=========     at grad_products+0x980
=========     by thread (1,0,0) in block (20,0,0)
=========     Access to 0x7f7c58b0be10 is out of bounds
=========
========= Invalid __global__ read of size 16 bytes
=========     at grad_products+0x980
=========     by thread (9,0,0) in block (20,0,0)
F
>>> tests/gpu/test_gemm.py::test_b
.========= Error: Race reported between Write access at gemm_cluster+0x11f0
=========     and Read access at gemm_cluster+0x2740 [24 hazards]

FAILED tests/gpu/test_gemm.py::test_a[m=5 n=8] - AssertionError
========= ERROR SUMMARY: 3 errors
========= COMPUTE-SANITIZER

>>> tests/gpu/test_gemm.py::test_c
Timeout (0:01:00)!
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""


def test_what_a_log_reports(tool: ModuleType) -> None:
    where = "tests/gpu/test_gemm.py::test_"
    assert tool.findings(LOG) == Counter({
        f"{where}a[m=5 n=8]: Invalid __global__ read of size 16 bytes at grad_products+0x980": 2,
        f"{where}b: Error: Race reported between Write access at gemm_cluster+0x11f0": 1,
        f"{where}a[m=5 n=8] - AssertionError": 1,
        f"{where}c: Timeout (0:01:00)!": 1,
    })  # fmt: skip


def attention() -> Launch:
    """[2, 4, 9, 16] of float16, stored by TMA."""
    name = "Attention-float16-2x4x9x8_2x2x13x8_2x2x13x16-{}"
    case = next(c for c in cases() if c.name == name)
    hw = CHIPS["H200"]
    choice = next(v for v in case.variants(hw) if v.kernel.name == "wgmma")
    with only(choice):
        return next(x for call in case.program(hw).calls for x in call.launches)


def test_what_a_kernel_stores_by_tma(tool: ModuleType) -> None:
    launch = attention()
    assert tool.stored(launch, {"q": 4096, "k": 8192, "y": 1 << 20}) == [(1 << 20, 2304)]
    assert tool.stored(launch, {"q": 4096, "k": 8192}) == []
    assert tool.stored(launch, {"q": 1 << 20, "y": 1 << 20}) == []  # read, too
    y = next(x for x in launch.args if isinstance(x, TensorMap) and x.ptr.name == "y")
    assert y.shape[0] == 16
    apart = replace(y, ptr=Ptr("y", 64), shape=(16, 9, 1, 2), strides=(32, 288, 4096))
    launch = replace(launch, args=tuple(apart if x is y else x for x in launch.args))
    assert tool.stored(launch, {"y": 1 << 20}) == [((1 << 20) + at, 288) for at in (64, 4160)]


def test_a_function_that_stores_by_tma_counts_by_its_name(tool: ModuleType) -> None:
    source, entry = "sdpa/wgmma_grad_sm90.cu", "sdpa_gradients"
    head = re.search(rf"{entry}\(([^)]*)\)", without_bounds(source_text(source)))
    assert head
    names = [argument.split()[-1] for argument in head[1].split(",")]
    assert {names[i] for i in tool.stored_maps(source, entry)} == {"map_out1", "map_out2"}


def test_parts_of_about_the_same_time_hold_every_test(tool: ModuleType) -> None:
    selection = tool.Selection(CHIPS["H200"])
    seconds = {f"t{i}": float(i % 7 + 1) for i in range(40)}
    selection.chosen = {test: ([len(test)], time) for test, time in seconds.items()}
    parts = selection.parts(6)
    assert {k: v for part in parts for k, v in part.items()} == {t: [len(t)] for t in seconds}
    loads = [sum(seconds[test] for test in part) for part in parts]
    assert sum(map(len, parts)) == 40
    assert max(loads) - min(loads) <= 7
