"""The documentation runs as it stands: every command and every snippet of README and of docs/.

A page is one session in a folder with the checkout's models and examples: its blocks run in their
order, and share files and Python's names. Of a block of the kind `console`, lines that begin with
`$ ` are commands, and the others are parts of their output, in which `...` stands for anything. A
block that cannot run here follows a remark `<!-- not run: REASON -->`; the site leaves that out.
"""

import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support import Cli

from onnx_fuse import kernels, plugins

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^( *)(<!-- not run: (.+?) -->\n *)?```(\w*)[^\n]*\n(.*?)^ *```$", re.M | re.S)
SHOWN = {"text", "json", "toml", "yaml"}
"""Kinds of blocks that show something and hold no command."""
INSTALLS = ("pip", "pytest")
"""Commands that a test does not repeat within itself; CI runs them."""
SLOW: dict[str, str] = {}
"""Pages that take over ten seconds, with the reason."""
OTHERS = {"docs/torch.md", "docs/nn.md", "docs/plugins.md"}
"""Pages whose snippets the tests of their subjects run."""
Shell = Callable[[str], tuple[int, str]]
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
)


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """(kind, text, reason why it does not run) of each block of a page."""
    for match in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        indent, _, reason, kind, text = match.groups()
        yield kind, re.sub(f"^{indent}", "", text, flags=re.MULTILINE), reason or ""


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(command, lines of its output that are shown) of a block of the kind `console`."""
    command, shown = "", list[str]()
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        elif line.strip():
            shown.append(line.strip())
    if command:
        yield command, shown


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the checkout, where snippets may write."""
    for folder in ("models", "examples"):
        ignored = shutil.ignore_patterns("*.fused.*", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


@pytest.fixture
def shell(cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """`shell(command)` runs `onnx-fuse ...` or `python FILE ...`: (exit code, what it printed)."""

    def run(command: str) -> tuple[int, str]:
        program, *arguments = shlex.split(command, comments=True)
        if program == "onnx-fuse":
            result = cli(*arguments)
            return result.code, result.out + result.err
        assert program == "python", f"a command that the test does not know: {command}"
        capsys.readouterr()
        folder = str(Path(arguments[0]).parent.resolve())
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.syspath_prepend(folder)
        runpy.run_path(arguments[0], run_name="__main__")
        for name, module in list(sys.modules.items()):  # other tests import them from elsewhere
            if (getattr(module, "__file__", None) or "").startswith(folder):
                del sys.modules[name]
        return 0, capsys.readouterr().out

    return run


def run_page(page: str, shell: Shell) -> None:
    """Run all blocks of a page."""
    names: dict[str, object] = {"__name__": "__main__"}
    for kind, text, reason in blocks(page):
        if reason or kind in SHOWN:
            continue
        if kind == "python":
            exec(compile(text, page, "exec"), names)
            continue
        assert kind == "console", f"{page}: a block of the kind '{kind}' neither runs nor says why"
        for line, shown in commands(text):
            for command in line.split(" && "):
                if command.split()[0] in INSTALLS:
                    continue
                code, printed = shell(command)
                expected = re.search(r"# .*exit code (\d)", command)
                assert code == (int(expected[1]) if expected else 0), f"{command}\n{printed}"
                for part in shown:
                    pattern = re.escape(part).replace(r"\.\.\.", ".*").replace(r"\ ", r"\s+")
                    assert re.search(pattern, printed), f"{command}\ndid not print: {part}"


def run_marks(page: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if page in SLOW else []


RUN = [p for p in PAGES if p not in OTHERS]


@pytest.mark.parametrize("page", [pytest.param(p, marks=run_marks(p)) for p in RUN])
def test_a_page_runs(page: str, shell: Shell, checkout: Path) -> None:
    try:
        run_page(page, shell)
    finally:
        for name in [*kernels.ADDED]:
            plugins.unregister(name)


def test_the_readme_has_both_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install . && onnx-fuse optimize models/encoder.onnx" in text
    assert 'pip install ".[test]" && pytest' in text


# ---- pages made from the code ----------------------------------------------------------------


def docs_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "tools" / "docs_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_names_every_command_option_and_public_name() -> None:
    from test_public_api import PUBLIC, named

    pages = docs_pages()
    assert set(PUBLIC) <= set(pages.public_modules())
    cli, api = pages.cli_page(), pages.api_page()
    for command in ("optimize", "compile", "validate", "run", "gradient", "train", "bench"):
        assert f"## onnx-fuse {command}" in cli
    for option in ("--input-shapes", "--save-as-external-data", "--resume", "--all"):
        assert f"`{option}" in cli or f", {option}" in cli
    for name in named():
        module, _, own = name.rpartition(".")
        if module in PUBLIC:
            assert f"::: {name}" in api, f"{own} of {module} has no place in the reference"


def test_the_reference_begins_with_what_people_call() -> None:
    pages = docs_pages()
    rows = [line for line in pages.api_page().splitlines() if line.startswith("| `of.")]
    assert rows[0].startswith("| `of.optimize` | ")
    assert rows[0].split("|")[2].strip() == "Fuse a model."
    commands = [line for line in pages.cli_page().splitlines() if line.startswith("| [`onnx-fuse")]
    assert commands[0].startswith("| [`onnx-fuse optimize`](#onnx-fuse-optimize) | Fuse ")


def test_the_button_of_a_console_copies_commands_only() -> None:
    page = docs_pages().on_page_content
    console = (
        '<pre><code><span class="gp">$ </span>run a &lt; b \\\n  c\nresult\n</code></pre></div>'
    )
    assert 'data-copy="run a &lt; b \\\n  c">' in page(f'<div class="highlight">{console}')
    python = '<div class="highlight"><pre><code>x = 1\n</code></pre></div>'
    assert page(python) == python


def test_every_page_is_in_the_menu_once() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        name = page.removeprefix("docs/")
        assert page == "README.md" or menu.count(f": {name}\n") == 1, page


def test_table_of_gradients_is_current() -> None:
    tool = ROOT / "tools" / "gradient_table.py"
    assert subprocess.run([sys.executable, tool, "--check"], check=False).returncode == 0
