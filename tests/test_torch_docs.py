"""The snippets of docs/torch.md run as they stand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support import python

pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "torch.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_snippets(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "models", tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], "torch.md", "exec"), {})


def test_the_package_imports_torch_only_when_asked() -> None:
    code = "import sys, onnx_fuse; onnx_fuse.optimize; print('torch' in sys.modules)"
    assert python(code).split() == ["False"]
