"""The code of docs/nn.md and docs/plugins.md runs, from the top of the page to its end."""

import re
from pathlib import Path
from typing import Any

import pytest

from onnx_fuse import plugins

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["nn.md", "plugins.md"])
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    try:
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    finally:
        for name in ("my.ops::TanhScale", "my.ops::TanhGate"):
            plugins.unregister(name)
