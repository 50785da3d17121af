"""README's snippets run as they stand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support import Cli

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [
    command
    for kind, text in BLOCKS
    if kind == "console"
    for line in re.findall(r"^\$ (.*?)(?:\s+#.*)?$", text, re.MULTILINE)
    for command in line.split(" && ")
    if not command.startswith(("pip ", "pytest"))
]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the checkout, where snippets may write."""
    shutil.copytree(
        ROOT / "models", tmp_path / "models", ignore=shutil.ignore_patterns("*.fused.*")
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_console_snippets(command: str, cli: Cli, checkout: Path) -> None:
    program, *arguments = command.split()
    assert program == "onnx-fuse"
    result = cli(*arguments)
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize("code", [text for kind, text in BLOCKS if kind == "python"])
def test_python_snippets(code: str, checkout: Path) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_the_readme_has_both_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "pip install . && onnx-fuse optimize models/encoder.onnx" in text
    assert 'pip install ".[test]" && pytest' in text
