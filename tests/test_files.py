"""What commands write: never over what they read, whole or not at all, and nothing left behind."""

import contextlib
import errno
import inspect
import os
import signal
import subprocess
import sys
import time
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import Cli, in_threads

from onnx_fuse import files
from onnx_fuse.autodiff.load import load
from onnx_fuse.cli import app, process
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import text_model

MODEL = """net (float[4, 2, 3] x) => (float[4, 4] y)
    <float[6, 4] w = {WEIGHTS}, int64[2] s = {4, 6}>
    { r = Reshape (x, s)
    y = MatMul (r, w) }""".replace("WEIGHTS", ", ".join(f"0.{i + 10}" for i in range(24)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: m.onnx and its data d.npz; big.onnx has its weights in big.onnx.data."""
    rng = np.random.default_rng(0)
    save(text_model(MODEL), tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    for tensor in proto.graph.initializer:  # only raw data goes into another file
        array = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    apart = {"save_as_external_data": True, "location": "big.onnx.data", "size_threshold": 0}
    onnx.save(proto, tmp_path / "big.onnx", **apart)
    x = rng.normal(size=(20, 2, 3)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, labels=rng.integers(0, 4, 20))
    np.savez(tmp_path / "x.npz", x=x[:4])
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "x.npy", x)
    np.save(tmp_path / "arrays" / "labels.npy", rng.integers(0, 4, 20))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---- inputs and outputs ----------------------------------------------------------------------

TRAIN = "train m.onnx --data d.npz --loss cross_entropy --batch-size 4"
CLASHES = [
    "optimize m.onnx --json m.onnx",
    "optimize m.onnx --html {link}",
    "optimize m.onnx --json {hard}",
    "optimize m.onnx -o q.onnx --json q.onnx",
    "optimize m.onnx --json m.fused.onnx",
    "optimize m.onnx -o q.onnx --html none/../q.onnx",
    "optimize m.onnx -o q.onnx --json q.onnx.data",
    "optimize big.onnx -o big.onnx.data",
    "optimize big.onnx --json big.onnx.data",
    "gradient m.onnx --html m.onnx",
    "gradient m.onnx --json m.grad.onnx",
    "inspect m.onnx --html m.onnx",
    "inspect m.onnx big.onnx --json big.onnx",
    "inspect m.onnx --html r --json r",
    "inspect big.onnx --html big.onnx.data",
    "run m.onnx --inputs x.npz -o x.npz",
    "run m.onnx -o m.onnx",
    "run m.onnx --inputs x.npz --json x.npz",
    "validate m.onnx --against big.onnx --json big.onnx",
    "validate m.onnx --inputs x.npz --html x.npz",
    "bench m.onnx --json m.onnx",
    "generate m.onnx --ids 1 --json m.onnx",
    "doctor --json r --html r",
    TRAIN + " --curve m.onnx",
    TRAIN + " -o d.npz",
    TRAIN + " --val x.npz --json x.npz",
    TRAIN + " --curve m.tuned.onnx",
    TRAIN + " --checkpoint run --html run",
    "train m.onnx --data arrays --loss cross_entropy -o arrays/x.npy",
]


@pytest.mark.parametrize("line", CLASHES)
def test_what_is_read_or_written_already_is_not_written(line: str, folder: Path, cli: Cli) -> None:
    (folder / "link").symlink_to("m.onnx")
    os.link("m.onnx", "hard")
    before = contents(folder)
    result = cli(*line.format(link="link", hard="hard").split())
    assert (result.code, result.err.count("\n"), result.out) == (2, 1, "")
    assert contents(folder) == before
    assert {"arrays", *(p.split("/")[0] for p in before)} == {p.name for p in folder.iterdir()}


def test_every_path_of_every_command_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new option that names a file cannot be forgotten: `check_paths` sees each of them."""
    from onnx_fuse.cli import files as declared

    class Seen(Exception):
        pass

    def check_paths(reads: Any, writes: Any) -> None:
        raise Seen({str(p) for _, p in [*declared._flat(reads), *declared._flat(writes)]})

    monkeypatch.setattr(declared, "check_paths", check_paths)
    for command in app.app.registered_commands:
        function: Any = command.callback
        hints = typing.get_type_hints(function)
        paths = {k for k, hint in hints.items() if "Path" in str(hint)}
        lists = {k for k in paths if "list" in str(hints[k])}
        given = {
            k: Path(f"file-{k}") if k in paths else p.default
            for k, p in inspect.signature(function).parameters.items()
        }
        given |= {k: [given[k]] for k in lists}
        with pytest.raises(Seen) as seen:
            function(**given)
        missing = {f"file-{k}" for k in paths} - seen.value.args[0]
        assert not missing, f"{function.__name__} does not declare {missing}"


def test_devices_are_written_to(folder: Path, cli: Cli) -> None:
    options = ("--no-check", "-o", "/dev/null", "--json", "/dev/null")
    assert cli("optimize", "m.onnx", *options).code == 0
    assert Path("/dev/null").is_char_device()
    assert not list(Path("/dev").glob(".null*"))
    err = cli.fails(1, "inspect", "m.onnx", "--json", "/dev/full")
    assert err == "onnx-fuse: /dev/full: cannot be written: No space left on device\n"


def test_a_pipe_is_written_to_where_somebody_reads(folder: Path, cli: Cli) -> None:
    os.mkfifo("pipe")
    assert "cannot be written" in cli("inspect", "m.onnx", "--json", "pipe").err
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert cli("inspect", "m.onnx", "--json", "pipe").code == 0
    assert b'"models"' in os.read(reader, 1 << 16)
    os.close(reader)
    assert Path("pipe").is_fifo()
    big = cli("optimize", "m.onnx", "--no-check", "--save-as-external-data", "-o", "pipe")
    assert (big.code, "weights can only be stored beside a file" in big.err) == (1, True)


def test_a_link_is_followed(folder: Path, cli: Cli) -> None:
    (folder / "far").mkdir()
    (folder / "far" / "real.json").write_text("old")
    (folder / "r.json").symlink_to("far/real.json")
    assert cli("inspect", "m.onnx", "--json", "r.json").code == 0
    assert (folder / "r.json").is_symlink()
    assert (folder / "far" / "real.json").read_text().startswith("{")


@pytest.mark.parametrize("output", ["none/r.json", "m.onnx/r.json", "arrays"])
def test_a_place_that_cannot_be_written_is_known_before_the_work(
    output: str, folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnx_fuse.training.trainer.Trainer.step", None)  # would be called
    assert f"{output}: cannot be written" in cli.line(1, *TRAIN.split(), "--curve", output)


@pytest.mark.parametrize("command", ["optimize", "run", "gradient", f"{TRAIN}"])
@pytest.mark.parametrize("output", [".", "arrays", "none/dir/o.onnx", ""])
def test_an_output_that_is_no_file_is_refused(
    command: str, output: str, folder: Path, cli: Cli
) -> None:
    line = command.split() if " " in command else [command, "m.onnx"]
    err = cli.line(1, *line, "-o", output)
    assert "cannot be written" in err
    assert ("make its folder first" if "/" in output else "give the path of a file") in err


def test_a_folder_that_may_only_be_read(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)  # also of root
    for line in ("inspect m.onnx --json r.json", f"{TRAIN} -o arrays/o.onnx --checkpoint run"):
        assert "cannot be written: Permission denied" in cli.line(1, *line.split())


# ---- whole or not at all ---------------------------------------------------------------------


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FULL = {
    "optimize m.onnx --no-check": (os, "replace"),
    "optimize m.onnx --no-check --save-as-external-data": (onnx.ModelProto, None),
    "inspect m.onnx --json r": (Path, "write_text"),
    "run m.onnx -o r.npz": (np, "savez"),
    f"{TRAIN} --checkpoint run": (os, "fsync"),
}


@pytest.mark.parametrize("line", FULL)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    line: str, folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, name = FULL[line]
    if name is None:
        import onnx_ir

        holder, name = onnx_ir, "save"
    before = contents(folder)
    monkeypatch.setattr(holder, name, full)
    assert "cannot be written: No space left on device" in cli.line(1, *line.split())
    assert contents(folder) == before
    assert not list(folder.glob(".*"))
    assert not (folder / "run").exists()


CHILD = """
import os, sys, time
from pathlib import Path
from onnx_fuse.files import written
with written(sys.argv[1]) as draft:
    draft.write_text("half")
    print(draft.parent, flush=True)
    if sys.argv[2] == "fork" and os.fork() == 0:
        print("forked", flush=True)
        time.sleep(60)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_what_a_killed_run_left_is_removed_by_the_next(how: str, tmp_path: Path) -> None:
    """Not while it runs; nor what only looks alike. A forked helper may outlive it."""
    out = tmp_path / "out.onnx"
    command = [sys.executable, "-c", CHILD, str(out), how]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    left = Path(child.stdout.readline().strip())
    if how == "fork":
        assert child.stdout.readline() == "forked\n"
    others = [".out.onnx.original", ".out.onnx.abcdefgh.copy", ".other.onnx.abcdefgh.draft"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.onnx.abcdefgi.draft").symlink_to(tmp_path / others[0])
    try:
        with files.written(out) as draft:
            draft.write_text("new")
            assert left.exists()
        assert left.exists(), "its writer lives"
        child.kill()
        child.wait()
        with files.written(out) as draft:
            draft.write_text("new")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    assert not left.exists()
    assert {p.name for p in tmp_path.iterdir()} == {"out.onnx", *others, ".out.onnx.abcdefgi.draft"}
    assert out.read_text() == "new"


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def work(text: str) -> None:
        for _ in range(50):
            with files.written(out) as draft:
                draft.write_text(text)

    in_threads(work, "ab")
    assert out.read_text() in "ab"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written all the same, and what stands there is not taken for stale."""
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "")))
    other = tmp_path / ".out.abcdefgh.draft"
    other.mkdir()
    with files.written(tmp_path / "out") as draft:
        draft.write_text("x")
    with files.locked(tmp_path) as mine:
        assert mine
    assert {p.name for p in tmp_path.iterdir()} == {"out", other.name}


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    found: list[bool] = []

    def ask(_: int = 0) -> None:
        with files.locked(tmp_path) as mine:
            found.append(mine)

    with files.locked(tmp_path) as mine:
        assert mine
        ask()
        in_threads(ask, [0])
    ask()
    assert found == [True, False, True]


def test_a_failure_within_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("old")

    def stopped() -> None:
        with files.written(out) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("out", "old")]
    with pytest.raises(ModelError, match="Is a directory"), files.written(tmp_path):
        pass


# ---- the process -----------------------------------------------------------------------------

STREAMS = [
    (">&-", 1, "onnx-fuse: standard output: Bad file descriptor\n"),
    (">&- 2>&- <&-", 1, ""),
    ("> /dev/full", 1, "onnx-fuse: standard output: No space left on device\n"),
    ("--html h.html | true; exit ${PIPESTATUS[0]}", 0, ""),
    ("--json /dev/stdout > r; tail -n +1 r | grep -c opset > n; test $(cat n) = 2", 0, ""),
]


@pytest.mark.parametrize(("streams", "code", "err"), STREAMS)
def test_streams(streams: str, code: int, err: str, folder: Path) -> None:
    """Closed, full, without a reader; and a file that is an output beside what is printed."""
    line = f"'{sys.executable}' -m onnx_fuse inspect m.onnx {streams}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, err)


def test_a_model_on_standard_output_is_alone_there(folder: Path) -> None:
    line = [sys.executable, "-m", "onnx_fuse", "optimize", "m.onnx", "--no-check", "-o", "-"]
    done = subprocess.run(line, capture_output=True, check=True)
    assert onnx.load_from_string(done.stdout).graph.node
    assert b"wrote /dev/stdout" in done.stderr
    done = subprocess.run([*line, "--quiet"], capture_output=True, check=True)
    assert onnx.load_from_string(done.stdout).graph.node
    assert not done.stderr


BUSY = """
import os, signal, sys
from onnx_fuse import files
from onnx_fuse.cli import app, process
print("ready", flush=True)

def run_command(arguments, interrupted):
    with files.written("out") as draft:
        draft.write_text("half")
        {strike}
        print("not reached")

app.run_command = run_command
process.main([])
"""
HIT = "os.kill(os.getpid(), signal.{name})"
STRIKES = {
    "Ctrl-C": (HIT.format(name="SIGINT"), 130, "interrupted"),
    "SIGTERM": (HIT.format(name="SIGTERM"), 143, "terminated"),
    "SIGHUP": (HIT.format(name="SIGHUP"), 129, "terminated: hung up"),
    "in an exec": (f"exec('{HIT.format(name='SIGINT')}')", 130, "interrupted"),
    "in an import that raises another error": (
        f"""
        try:
            {HIT.format(name="SIGINT")}
        except KeyboardInterrupt:
            raise ImportError('half')""",
        130,
        "interrupted",
    ),
    "in a destructor": (
        f"""
        class Last:
            def __del__(self):
                {HIT.format(name="SIGINT")}
        Last()
        signal.pause()""",
        130,
        "interrupted",
    ),
}


@pytest.mark.usefixtures("signals_end")
@pytest.mark.parametrize("strike", STRIKES)
def test_signals_end_in_one_line_and_leave_nothing(strike: str, tmp_path: Path) -> None:
    text, code, word = STRIKES[strike]
    command = [sys.executable, "-c", BUSY.format(strike=text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (code, f"onnx-fuse: {word}\n")
    assert done.stdout == "ready\n"
    assert not list(tmp_path.iterdir())


def test_nothing_is_imported_before_signals_are_seen_to() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from onnx_fuse.cli import main\n"
        "print(sorted({'typing', 'typer', 'rich', 'numpy', 'onnx'} & set(sys.modules) - before))\n"
    )
    command = [sys.executable, "-S", "-c", code]
    env = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "[]\n"


def test_a_warning_is_one_line_without_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = process._warn
        warnings.warn("two\nlines", stacklevel=1)
    assert capsys.readouterr().err == "onnx-fuse: warning: two lines\n"


# ---- training --------------------------------------------------------------------------------


def test_free_batch_saves_what_it_trained(folder: Path, cli: Cli) -> None:
    """The file keeps the batch it was exported with; its weights are the trained ones."""
    line = "train m.onnx --data d.npz --loss cross_entropy --free-batch --batch-size 8"
    result = cli(*line.split())
    assert (result.code, result.err) == (0, "")
    before, after = (load(folder / name) for name in ("m.onnx", "m.tuned.onnx"))
    assert after.graph.inputs[0].shape == before.graph.inputs[0].shape
    weights = [m.graph.initializers["w"].const_value.numpy() for m in (before, after)]
    assert not np.array_equal(*weights)


@pytest.fixture
def training(folder: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start a training that writes checkpoints into run/ until it is ended."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        line = f"{TRAIN} --epochs 100000 --checkpoint run --checkpoint-every 1"
        command = [sys.executable, "-m", "onnx_fuse", *line.split()]
        child = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        started.append(child)
        while child.poll() is None and not list(folder.glob("run/step-*")):
            time.sleep(0.02)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.mark.usefixtures("signals_end")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_training_a_folder_and_its_end(
    number: signal.Signals, training: Callable[[], subprocess.Popen[str]], folder: Path, cli: Cli
) -> None:
    first = training()
    second = cli(*TRAIN.split(), "--checkpoint", "run", "--resume")
    told = "another training writes its checkpoints there: wait for it, or give another folder"
    assert (second.code, second.out, second.err) == (2, "", f"onnx-fuse: run: {told}\n")
    first.send_signal(number)
    _, err = first.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert (first.returncode, err) == (143, "onnx-fuse: terminated\n")
        assert all(p.name.startswith("step-") for p in (folder / "run").iterdir())
    steps = sorted(p.name for p in folder.glob("run/step-*"))
    assert steps
    done = int(steps[-1].removeprefix("step-"))
    third = cli(*TRAIN.split(), "--epochs", done // 5 + 1, "--checkpoint", "run", "--resume")
    assert (third.code, third.err) == (0, "")
    assert all(p.name.startswith("step-") for p in (folder / "run").iterdir())
