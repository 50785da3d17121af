"""tools/sanitize.py without a GPU: what it would run, and what it makes of logs and launches."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import on_device
import pytest
import sanitize
from fake_gpu import FakeGpu
from math_cases import Case, cases, launched

from onnx_fuse.cuda import launch as launching
from onnx_fuse.cuda.source import source_text
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.launch import Launch, Ptr, TensorMap
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime.executable import Executable

HW = CHIPS["H200"]
NODES = ("other", "case", "left out", "own")


def test_every_kernel_is_launched_by_a_gpu_test() -> None:
    run = subprocess.run(
        [sys.executable, sanitize.__file__, "--list"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "test_math_kernels.py" in run.stdout


def test_processes_take_each_test_once_with_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run 0 is what a test does in any case; another problem than the test's has all choices."""
    monkeypatch.setattr(Case, "variants", lambda case, program, hw: ["v1", "v2"])
    monkeypatch.setattr(on_device, "each", lambda problem, hw: ["c1", "c2", "c3"])
    found: list[tuple[str, object]] = []

    def protocol(item: SimpleNamespace, nextitem: None) -> None:
        turns.runs, turns.problem = turns.tests[item.nodeid], "own"
        own = item.nodeid == "case"
        choices = row.variants(None, HW) if own else on_device.each(item.nodeid, HW)
        found.append((item.nodeid, choices))

    hook = SimpleNamespace(pytest_runtest_protocol=protocol)
    config = SimpleNamespace(hook=hook)
    items = [SimpleNamespace(nodeid=x, config=config) for x in NODES]
    row = next(iter(cases()))
    turns = sanitize.Turns(
        {"case": [0, 2], "own": [0, 1, 3], "other": [0]}, tmp_path / "next", tmp_path
    )
    turns.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["case", "own", "other"]
    assert sanitize.turn(tmp_path / "next") == 0  # another process takes the first
    turns.pytest_runtestloop(SimpleNamespace(items=items, shouldfail=False))
    assert found == [("own", ["c1", "c3"]), ("other", ["c1", "c2", "c3"])]
    turns.runs = [0, 2]
    assert row.variants(None, HW) == ["v2"]


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


def test_what_a_log_reports() -> None:
    where = "tests/gpu/test_gemm.py::test_"
    assert sanitize.findings(LOG) == Counter({
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
    program = case.program(hw)
    choice = next(v for v in case.variants(program, hw) if v.kernel.name == "wgmma")
    return launched(program, [choice], hw)[0][0]


def test_what_a_kernel_stores_by_tma() -> None:
    launch = attention()
    assert sanitize.stored(launch, {"q": 4096, "k": 8192, "y": 1 << 20}) == [(1 << 20, 2304)]
    assert sanitize.stored(launch, {"q": 4096, "k": 8192}) == []
    assert sanitize.stored(launch, {"q": 1 << 20, "y": 1 << 20}) == []  # read, too
    y = next(x for x in launch.args if isinstance(x, TensorMap) and x.ptr.name == "y")
    assert y.shape[0] == 16
    apart = replace(y, ptr=Ptr("y", 64), shape=(16, 9, 1, 2), strides=(32, 288, 4096))
    launch = replace(launch, args=tuple(apart if x is y else x for x in launch.args))
    assert sanitize.stored(launch, {"y": 1 << 20}) == [((1 << 20) + at, 288) for at in (64, 4160)]


def test_initcheck_fills_what_a_run_stores_by_tma(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_run", lambda *_: None)  # it knows no maps
    monkeypatch.setattr(launching, "BoundLaunch", sanitize.SEEN["initcheck"])
    text = "agraph (float16[2048,512] x, float16[512,2048] w) => (float16[2048,2048] y)"
    executable = Executable(text_model(f"{text} {{ y = MatMul (x, w) }}"))
    feeds = {
        name: np.ones(shape, np.float16) for name, shape in (("x", (2048, 512)), ("w", (512, 2048)))
    }
    executable.run(None, feeds)
    (instance,) = executable.instances()
    ((_, y),) = instance.program.outputs
    (step,) = instance.launcher.parts[0]._steps
    assert step._stored == [(instance.launcher.find(y), y.nbytes)]
    (call,) = instance.program.calls
    by_name = {name: instance.launcher.find(t) for name, t in (*call.reads, *call.writes)}
    alone = launching.bind(step.launch, by_name, CHIPS["H200"])  # as tests of kernels bind theirs
    assert alone._stored == step._stored


def test_bounds_are_taken_off_whatever_they_hold() -> None:
    text = "a __launch_bounds__(256) f(); __launch_bounds__(T, x ? (g(8) == 8 ? 2 : 3) : 1) h(int)"
    assert sanitize.without_bounds(text) == "a  f();  h(int)"


def test_a_function_that_stores_by_tma_counts_by_its_name() -> None:
    source, entry = "sdpa/wgmma_grad_sm90.cu", "sdpa_gradients"
    head = re.search(rf"{entry}\(([^)]*)\)", sanitize.without_bounds(source_text(source)))
    assert head
    names = [argument.split()[-1] for argument in head[1].split(",")]
    assert {names[i] for i in sanitize.stored_maps(source, entry)} == {"map_out1", "map_out2"}


def test_the_cheapest_runs_that_have_every_feature_are_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = {name: Launch(name, name, (1, 1, 1), (32, 1, 1), ()) for name in "abc"}
    runs = {
        "dear": [sanitize.Run((launches["a"],), 1e12), sanitize.Run((launches["b"],))],
        "cheap": [sanitize.Run(), sanitize.Run((launches["b"],)), sanitize.Run((launches["a"],))],
        "idle": [sanitize.Run()],
        "only": [sanitize.Run((launches["c"],), 1e9)],
    }
    monkeypatch.setattr(sanitize, "runs_of", lambda callspec, hw: runs[callspec])
    items = [
        SimpleNamespace(nodeid=name, callspec=name, iter_markers=lambda _: ()) for name in runs
    ]
    selection = sanitize.Selection(HW)
    selection.pytest_collection_modifyitems(items)
    assert selection.chosen == {"only": [0], "cheap": [0, 1, 2]}
    assert [item.nodeid for item in items] == ["only", "cheap"]
    assert {x.source for x in selection.launches} == set("abc")
