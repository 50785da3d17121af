"""What a terminal shows: text and tables that fit its width, and bars for work that takes long."""

import io
import os
import re
import sys
import time
from pathlib import Path

import pytest
from support import ENCODER, Cli
from test_help import COMMANDS

from onnx_fuse import progress, report, textwrap
from onnx_fuse.cli import progress as bars
from onnx_fuse.runtime import ort
from onnx_fuse.validation.compare import Difference

NAMES = "model.encoder.layers.0.attention.self.query.MatMul_quant and onnx_fuse.LayerNormGemmGelu_n"
SENTENCE = "computing it again would read its input once more, and the norm is an output instead"


@pytest.mark.parametrize("width", [20, 46, 80, 120])
@pytest.mark.parametrize(
    "text",
    [NAMES, SENTENCE, "  note: " + SENTENCE, "", "x" * 200, "数" * 70],
    ids=["names", "sentence", "indented", "empty", "long", "wide"],
)
def test_wrapped_lines_fit_and_lose_nothing(text: str, width: int) -> None:
    lines = textwrap.wrap(text, width, 4)
    assert all(textwrap.cell_len(line) <= width for line in lines)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)
    words = {word for line in lines for word in line.split()}
    assert {w for w in text.split() if textwrap.cell_len(w) <= width - 4} <= words


TABLE = [
    ["nodes", "kernel", "why"],
    [NAMES, "LayerNormGemm apply_fma", SENTENCE],
    [],
    ["a", "", "1"],
]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 300])
def test_a_table_fits_and_breaks_no_word(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    printer = report.Printer()
    printer.table("title", TABLE[0], TABLE[1:], left=3)
    lines = printer.console.export_text().splitlines()
    assert (
        all(len(line.rstrip()) <= width for line in lines) or textwrap.widths(TABLE, width) is None
    )
    shown = {word for line in lines for word in re.split(r"[\s│]+", line)}
    assert set(SENTENCE.split()) <= shown
    if width >= 80:
        assert textwrap.widths(TABLE, width) is not None
        assert any(name in shown for name in NAMES.split())


def test_a_table_that_cannot_fit_is_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    printer = report.Printer()
    printer.table("title", TABLE[0], TABLE[1:])
    text = printer.console.export_text()
    assert "│" not in text
    assert "  kernel: LayerNormGemm apply_fma" in text


def on_terminal(columns: int, *arguments: object, code: int = 0) -> str:
    """What a command that ends with `code` prints on a terminal of so many columns, without its
    colours.
    """
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    child, terminal = pty.fork()
    if child == 0:
        environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
        command = [sys.executable, "-m", "onnx_fuse", *map(str, arguments)]
        os.execve(sys.executable, command, environment | {"TERM": "xterm"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    data = b""
    try:
        while part := os.read(terminal, 65536):
            data += part
    except OSError:  # Linux says so where the other end is closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", data.decode()).replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, 120])
def test_a_command_on_a_terminal(columns: int, tmp_path: Path) -> None:
    options = ["-o", tmp_path / "x.onnx", "--explain", "--no-check", "--target", "h200"]
    text = on_terminal(columns, "optimize", ENCODER, *options)
    assert all(len(line.rstrip()) <= columns for line in text.splitlines())
    for whole in ("onnx_fuse.LayerNormGemmGelu_n", "computing it again", "LayerNormalization"):
        assert whole in text


def test_an_error_is_folded_between_words() -> None:
    words = ["of", "a", "file", "that", "is", "not"] * 5
    lines = on_terminal(40, "inspect", " ".join(words), code=1).splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 40 for line in lines)
    assert set(" ".join(lines).split()) >= set(words)


def test_without_a_terminal_there_are_no_colours_and_lines_stay_whole(
    cli: Cli, tmp_path: Path
) -> None:
    result = cli("optimize", ENCODER, "-o", tmp_path / "x.onnx", "--explain")
    assert "\x1b" not in result.out + result.err
    assert re.search(r"^note: .{100,}$", result.out, re.MULTILINE)


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_help_is_whole_at_80_columns(command: str, cli: Cli) -> None:
    result = cli(*command.split(), "--help")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    assert not re.search(r"…|\S\.\.\.$", result.out.partition("\n")[2], re.MULTILINE)


# largest difference, the output's largest value -> what is said of it
SHARES = [
    (0.0, 3.0, ""),
    (1e-9, 3.0, "less than one millionth of the output's largest value"),
    (3e-5, 3.0, "10 millionths of the output's largest value"),
    (0.3, 3.0, "10.00% of the output's largest value"),
    (float("inf"), 3.0, ""),
    (0.3, 0.0, ""),
]


@pytest.mark.parametrize(("error", "scale", "text"), SHARES)
def test_a_relative_error_is_said_in_words(error: float, scale: float, text: str) -> None:
    found = Difference("y", error, 0.0, 1.0, "y[0]", True, scale=scale)
    assert report.relative_size(found).removeprefix("; ") == text


# ---- progress --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace standard error by one that says it is a terminal; bars then come at once."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(bars, "_PATIENCE", 0.0)
    monkeypatch.setattr(bars, "_REFRESH", 0.01)
    return stream


def shown_soon(terminal: Terminal, text: str) -> bool:
    """Whether a text is shown before long; the bar is drawn by another thread."""
    for _ in range(500):
        if text in terminal.getvalue():
            return True
        time.sleep(0.01)
    return False


def test_a_bar_shows_what_is_done_and_goes_away_for_output(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    with bars.shown():
        progress.report("comparing")
        assert shown_soon(terminal, "comparing")
        progress.quiet()
        before = terminal.getvalue()
        time.sleep(0.05)
        assert terminal.getvalue() == before


def test_minutes_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    monkeypatch.setattr(bars, "_LONG", 0.0)
    with bars.shown():
        progress.report("comparing", 0, 1000)
        time.sleep(0.02)
        progress.report("comparing", 100, 1000)
        assert shown_soon(terminal, "comparing: about")
        assert shown_soon(terminal, "left")


def test_work_in_a_child_is_watched_and_its_answer_comes_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = as_terminal(monkeypatch)

    def work() -> str:
        progress.report("in the child", 3, 4)
        time.sleep(0.1)
        return "answer"

    with bars.shown():
        progress.report("before the child")
        assert shown_soon(terminal, "before the child")
        assert ort.guarded(work, "model.onnx") == "answer"
        assert shown_soon(terminal, "in the child")


def test_nothing_is_shown_where_standard_error_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with bars.shown():
        progress.report("comparing")
        assert progress.watcher() is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (59, "59 s"), (90, "2 minutes"), (7300, "2 h 2 min")]
)
def test_a_duration_is_said_in_words(seconds: float, text: str) -> None:
    assert bars.duration(seconds) == text
