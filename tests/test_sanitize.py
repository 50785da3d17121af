"""Every kernel has a GPU test: what tools/sanitize.py would run, found without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_every_kernel_is_launched_by_a_gpu_test() -> None:
    tool = Path(__file__).parents[1] / "tools" / "sanitize.py"
    run = subprocess.run([sys.executable, tool, "--list"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "test_math_kernels.py" in run.stdout
