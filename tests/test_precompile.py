"""Open programs in the cache, and the process that makes those for shapes that have not come."""

import gc
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import real_cases
from fake_gpu import FakeGpu

import onnx_fuse
from onnx_fuse import InferenceSession, container, files, session
from onnx_fuse.cuda import nvrtc
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.rewrite.precision import in_precision
from onnx_fuse.runtime import collector, plan, precompile, precompile_worker, program_cache
from onnx_fuse.runtime.instance import Instance
from onnx_fuse.runtime.launches import Launches
from onnx_fuse.runtime.plan import PlannedOpenProgram as Plan
from onnx_fuse.runtime.plan import PlannedProgram
from onnx_fuse.runtime.precompile import Precompiler
from onnx_fuse.runtime.program_cache import ProgramCache
from onnx_fuse.runtime.specialize import Specializer

H200 = CHIPS["H200"]
CHAIN = "agraph (float[N,T] x) => (float[N,T] y) { a = Exp(x) b = Neg(a) y = Tanh(b) }"
IMAGE = "agraph (float[3,H,W] x) => (float[3,H,W] y) { y = Exp(x) }"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, in which every program is kept, however fast it was lowered."""
    monkeypatch.setenv("ONNX_FUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ProgramCache, "seconds", 0.0)
    return tmp_path / "cache"


def half(name: str) -> Specializer:
    """Of an optimized export in float16."""
    path = next(c.path for c in real_cases() if c.name == name)
    graph, precision = in_precision(onnx_fuse.optimize(onnx_fuse.session.load(str(path))), "fp16")
    return Specializer(graph, H200, math=precision)


def chain() -> Specializer:
    return Specializer(text_model(CHAIN), H200)


def of_chain(length: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"x": ((3, length), "float32")}


def encoder() -> Specializer:
    return half("encoder_layer_prenorm__dynamo")


def cached(specializer: Specializer) -> Specializer:
    """With the programs of "a graph" in the cache."""
    specializer.cache_under("a graph")
    return specializer


def stored(cache: Path) -> tuple[PlannedProgram, Path]:
    """BERT at a length of 40, and its program in the cache."""
    first = cached(half("bert__ts13"))
    made = first.of(with_length(first, 40))
    first.written()
    (program,) = cache.rglob("*.program")
    return made, program


def with_length(specializer: Specializer, length: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Two sequences of this length."""
    found = {}
    for v in specializer.model.graph.inputs:
        rest = [int(d) for d in v.shape[2:]]  # type: ignore[arg-type]
        found[v.name or ""] = ((2, length, *rest), v.dtype.numpy().name)
    return found


def described(made: PlannedProgram) -> tuple[object, ...]:
    """All of a program and its layout, the bytes of made weights and constants included."""
    constants = {k: (v.dtype.name, v.shape, v.tobytes()) for k, v in made.program.constants.items()}
    return repr(made.program), made.plan, made.room, constants


# ---- the cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert__ts13", "encoder_layer_prenorm__dynamo"])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_later_process_lowers_nothing(name: str, fresh: bool, cache: Path) -> None:
    """The same programs, whether or not it has made the weights that they read."""
    first, second = cached(half(name)), half(name)
    made = [first.of(with_length(first, n)) for n in (20, 30, 21)]
    first.written()
    if not fresh:
        second.of(with_length(second, 33))
    lowered = second.traced
    second.cache_under("a graph")
    for n, found in zip((20, 30, 21), made, strict=True):
        again = second.of(with_length(second, n))
        assert described(again) == described(found)
    assert second.traced == lowered
    second.written()
    assert not list(cache.rglob("*.draft"))
    other = half(name)
    other.cache_under("another graph")
    other.of(with_length(other, 40))
    assert other.traced == 1
    other.written()  # its thread would be beside the next test


def test_a_program_is_kept_with_the_layout_of_a_small_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where that of the largest batch of the class would waste memory."""
    monkeypatch.setattr(plan, "LARGE", 0)
    specializer = cached(encoder())
    shapes = with_length(specializer, 40)
    made = specializer.of(shapes)
    specializer.written()
    numbers = specializer.numbers(shapes)
    found = specializer.programs.find(specializer.key(shapes, {}), numbers)
    assert len(found._layouts) == 2
    assert found.at(numbers).plan == made.plan
    assert len(found._layouts) == 2


@pytest.mark.parametrize("kept", ["lowered", "read", "read, collector off", "read, frozen"])
def test_a_new_program_is_old_to_the_garbage_collector(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays is not walked as what is young; what a program froze or turned off stays so."""
    specializers = cached(chain()), cached(chain())
    one = specializers[kept != "lowered"]
    if kept != "lowered":
        specializers[0].of(of_chain(8))
        specializers[0].written()
    before = gc.get_freeze_count()  # tests/gpu/conftest.py freezes what is there at the start
    gc.unfreeze()
    monkeypatch.setattr(collector._Blocks, "frozen", False)
    try:
        if kept.endswith("frozen"):
            gc.freeze()
        if kept.endswith("off"):
            gc.disable()
        frozen = gc.get_freeze_count()
        one.of(of_chain(8))
        old = {id(each) for each in gc.get_objects(generation=2)}
        (made,) = next(iter(one._kept.values()))
        assert (id(made) in old) == (kept in ("lowered", "read"))
        assert gc.get_freeze_count() == frozen
        assert collector._Blocks.frozen == kept.endswith("frozen")  # and is not counted again
        assert gc.isenabled() != kept.endswith("off")
    finally:
        gc.enable()
        gc.unfreeze()
        if before:
            gc.collect()
            gc.freeze()


@pytest.mark.parametrize(
    "step", [(Instance, "__init__"), (Instance, "update"), (Launches, "rewrite"), (Plan, "at")]
)
def test_nothing_is_collected_while_a_shape_is_set_up(
    step: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new class of lengths and a new length of it, but for what runs."""
    FakeGpu().use(monkeypatch)
    on: list[bool] = []
    work = getattr(*step)

    def watched(*given: object, **named: object) -> object:
        on.append(gc.isenabled())
        return work(*given, **named)

    monkeypatch.setattr(*step, watched)
    opened = InferenceSession(text_model(CHAIN), device="cuda")
    for length in (70, 80, 90):
        opened.run(None, {"x": np.ones((3, length), np.float32)})
    assert on
    assert not any(on)
    assert gc.isenabled()


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_before_once_all_blocks_have_ended(on: bool) -> None:
    """Of two threads whose blocks overlap, the one that began first ends first."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector.paused():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    try:
        if not on:
            gc.disable()
        with collector.paused(), collector.paused():
            thread.start()
            inside.wait()
        assert not gc.isenabled()
        leave.set()
        thread.join()
        assert gc.isenabled() == on
    finally:
        leave.set()
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that forks")
def test_the_collector_of_a_forked_child_is_on() -> None:
    """Also where the parent had paused it, and where the child leaves the parent's block."""
    with collector.paused():
        child = os.fork()
        on = gc.isenabled()
    if not child:
        os._exit(0 if on and gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not on
    assert gc.isenabled()


@pytest.mark.parametrize(
    "damage",
    ["guards", "program", "length", "empty", "cut", "weights", "no weights", "other weights"],
)
def test_what_is_damaged_counts_as_absent(damage: str, cache: Path) -> None:
    made, program = stored(cache)
    (weights,) = cache.rglob("*.made")
    data = bytearray(program.read_bytes())
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "other weights":  # a whole file, of another kind
        container.write(weights, {"arrays": 3}, {}, {})
    else:
        at = {"guards": 80, "program": -9, "length": 71, "empty": 0, "cut": 0}[damage]
        data[at] ^= 0xFF
        program.write_bytes({"empty": data[:0], "cut": data[: len(data) // 2]}.get(damage, data))
    second = cached(half("bert__ts13"))
    assert described(second.of(with_length(second, 40))) == described(made)
    assert second.traced == 1


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a class of Python's": lambda d: d["program"]["groups"][0].__setitem__(0, "os.system"),
    "a value of another type": lambda d: d["program"]["plain"].append({}),
    "no recipes": lambda d: d["program"].update(recipes={}),
    "another source": lambda d: d["program"].update(
        plain=["../" + x if str(x).endswith(".cu") else x for x in d["program"]["plain"]]
    ),
    "no layouts": lambda d: d.pop("layouts"),
    "layouts of text": lambda d: d.update(layouts="1"),
    "an arena too small": lambda d: d["layouts"]["of"][0].__setitem__(5, 0),
    "a temporary without a place": lambda d: d["layouts"]["of"][0][3].clear(),
    "a list": lambda d: None,
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_program_that_somebody_else_wrote_counts_as_absent(fault: str, cache: Path) -> None:
    """Its digests are right; one warning says that it is not used."""
    made, program = stored(cache)
    data = program.read_bytes()
    start = program_cache._HEAD + program_cache._LENGTH.unpack_from(data, 64)[0]
    length, words = program_cache._LENGTHS.unpack_from(data, start)
    end = start + program_cache._LENGTHS.size + length
    text = json.loads(data[start + program_cache._LENGTHS.size : end])
    HOSTILE[fault](text)
    written = json.dumps([text] if fault == "a list" else text).encode()
    body = program_cache._LENGTHS.pack(len(written), words) + written + data[end:]
    program.write_bytes(data[:32] + hashlib.sha256(body).digest() + data[64:start] + body)
    second = cached(half("bert__ts13"))
    with pytest.warns(UserWarning, match="is not used and is written anew") as warned:
        assert described(second.of(with_length(second, 40))) == described(made)
    assert len(warned) == 1
    assert second.traced == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
@pytest.mark.parametrize("folder", ["", "programs", "cubin", "a file"])
def test_a_cache_that_others_may_write_to_is_not_read(
    folder: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither programs nor cubins of it; files and folders that are made are the user's alone."""
    monkeypatch.setattr(files, "_REFUSED", set())
    monkeypatch.setattr(nvrtc, "_compiler", lambda: "13.0")
    first = cached(chain())
    first.of(of_chain(40))
    first.written()
    cubin = nvrtc.cache_path("gemm/simt.cu", (), "sm_90a")
    nvrtc.store_cubin(cubin, b"code")
    assert nvrtc.stored_cubin(cubin) == b"code"
    for path in (cache, *cache.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    if folder == "a file":
        for path in (cubin, *cache.rglob("*.program")):
            path.chmod(0o666)
    else:
        (cache / folder).chmod(0o777)
    second = cached(chain())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        second.of(of_chain(40))
        second.written()
        found = nvrtc.stored_cubin(cubin)
    assert second.traced == (folder != "cubin")
    assert found == (b"code" if folder == "programs" else None)
    said = [str(w.message) for w in warned if "cache folder" in str(w.message)]
    assert len(said) == (folder != "a file")
    assert all("chmod go-w" in text for text in said)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such users")
def test_a_cache_of_another_user_is_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_REFUSED", set())
    monkeypatch.setattr(nvrtc, "_compiler", lambda: "13.0")
    cubin = nvrtc.cache_path("gemm/simt.cu", (), "sm_90a")
    nvrtc.store_cubin(cubin, b"code")
    monkeypatch.setattr(os, "geteuid", lambda: cubin.stat().st_uid + 1)
    with pytest.warns(UserWarning, match="belongs to user"):
        assert nvrtc.stored_cubin(cubin) is None


def test_programs_depend_on_all_that_lowering_depends_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = encoder()
    folder = one.cache_under("a graph")
    assert one.cache_under("a graph") == folder
    others = [
        Specializer(one.model, CHIPS["A100"]),
        Specializer(one.model, H200, math="tf32"),
        Specializer(one.model, H200, prefs={"Gemm": "simt"}),
        Specializer(one.model, H200, state={"y": "x"}),
    ]
    folders = [folder, *(other.cache_under("a graph") for other in others)]
    monkeypatch.setenv("ONNX_FUSE_KERNEL", "Gemm=simt")
    folders.append(one.cache_under("a graph"))
    monkeypatch.delenv("ONNX_FUSE_KERNEL")
    (cache / "tuning").mkdir(parents=True)
    (cache / "tuning" / "NVIDIA_H200.json").write_text("{}")
    folders.append(one.cache_under("a graph"))
    assert len(set(folders)) == len(folders)


def test_the_longest_unused_programs_go(cache: Path) -> None:
    for i in range(4):
        folder = cache / "programs" / str(i) / "key"
        folder.mkdir(parents=True)
        (folder / "x.program").write_bytes(bytes(400_000))
        os.utime(folder.parent, (i, i))
    program_cache.prune(1 << 20)
    assert sorted(p.name for p in (cache / "programs").iterdir()) == ["2", "3"]


def test_a_session_takes_programs_from_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the second process on, once the first has named the graph."""
    FakeGpu().use(monkeypatch)
    monkeypatch.setattr(session, "_KEPT", 0)
    path = tmp_path / "m.onnx"
    save(text_model(CHAIN), path)
    x = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)
    results = []
    for lowered in (1, 0):
        opened = InferenceSession(path, device="cuda")
        results += [opened.run(None, {"x": x}), opened.run(None, {"x": x[:2]})]
        executable = opened._executable
        assert executable.specializer.traced == lowered
        assert executable.specializer.origin.result() is not None
        executable.specializer.written()
    np.testing.assert_allclose(results[0][0], np.tanh(-np.exp(x)), rtol=1e-6)
    assert all(np.array_equal(a, b) for a, b in zip(results[:2], results[2:], strict=True))


# ---- the process --------------------------------------------------------------------------------


def test_a_process_makes_the_other_sizes(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After one length, all others cost no lowering, and their kernels are compiled.

    The process runs this package, not one that happens to be in the current folder.
    """
    if sys.version_info >= (3, 11):  # before that Python looks into the current folder first
        (tmp_path / "onnx_fuse").mkdir()
        (tmp_path / "onnx_fuse" / "__init__.py").write_text("raise SystemExit(7)")
        monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(precompile, "FAR", 16)
    monkeypatch.setattr(precompile, "CORES", 1)
    specializer = chain()
    beside = Precompiler(specializer)
    own = [specializer.of(of_chain(8)).source]
    beside.expect(of_chain(8), 1.0)
    beside.wait()
    assert beside.children
    assert {c._process.returncode for c in beside.children} == {0}
    lowered, others = specializer.traced, 0
    for length in range(1, 17):
        made = specializer.of(of_chain(length))
        for call in made.program.calls if made.source not in own else ():
            for x in call.launches:
                assert nvrtc.cache_path(x.source, x.defines, "sm_90a").is_file()
        others += made.source not in own
    assert specializer.traced == lowered
    assert others


@pytest.mark.parametrize("why", ["fast", "one size of several dimensions", "few cores"])
def test_no_process_where_it_would_not_pay(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(precompile, "_Child", lambda *given: started.append(given))
    monkeypatch.setattr(precompile, "CORES", 1000 if why == "few cores" else 1)
    several = why.startswith("one size")
    specializer = Specializer(text_model(IMAGE), H200) if several else encoder()
    beside = Precompiler(specializer)
    for length in (40, 40) if several else (40, 48):
        shapes = {"x": ((3, length, 9), "float32")} if several else with_length(specializer, length)
        specializer.of(shapes)
        specializer.seconds = 0.01 if why == "fast" else 1.0
        beside.expect(shapes, 0.01)
    beside.wait()
    assert not started
    # what is not prepared is kept at least
    assert (specializer.programs is None) == (why == "fast")


def test_what_took_long_in_an_earlier_process_is_prepared_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first run whose program is in the cache says what others would take."""
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(precompile, "processes", lambda _: 1)
    monkeypatch.setattr(precompile, "missing", lambda _, shapes, wanted: asked.append(wanted))
    first, second = cached(chain()), chain()
    first.of(of_chain(8))
    (kept,) = next(iter(first._kept.values()))
    assert 0 < kept.seconds == first.seconds
    first.written()
    second.cache_under("a graph")
    second.of(of_chain(8))
    assert second.traced == 0
    assert second.seconds == first.seconds
    monkeypatch.setattr(precompile, "WORTH", second.seconds / 2)
    beside = Precompiler(second)
    beside.expect(of_chain(8), 0.0)
    beside.wait()
    assert asked == [{"s1": precompile.FAR}]


@pytest.mark.parametrize(
    ("dimensions", "wanted"),
    [
        ({"ids": ("N", "T"), "mask": ("N", "T")}, {"T"}),
        ({"ids": ("T", "N")}, {"N"}),  # whichever is behind the first axis
        ({"image": ("N", "", "H", "W")}, set()),
        ({"ids": ("N", "T"), "past": ("N", "", "P")}, set()),
        ({"rows": ("N", "")}, set()),
        ({"ids": ("N", "T"), "mask": ("T", "T")}, set()),
    ],
)
def test_which_dimension_is_likely_to_vary(
    dimensions: dict[str, tuple[str, ...]], wanted: set[str]
) -> None:
    """The only one behind the first axis; "" is a dimension that is not free."""
    symbols = [
        (name, axis, symbol)
        for name, shape in dimensions.items()
        for axis, symbol in enumerate(shape)
        if symbol
    ]
    assert precompile.likely_to_vary(tuple(symbols)) == wanted


def in_python(code: str, *, check: bool) -> subprocess.CompletedProcess[str]:
    """Run the code, about a Specializer `s`, in a process that finds the modules of this one."""
    head = (
        "import atexit, gc, os, signal, threading, time\n"
        "from onnx_fuse.ir.build import text_model\n"
        "from onnx_fuse.program.problem import CHIPS\n"
        "from onnx_fuse.runtime import precompile\n"
        "from onnx_fuse.runtime.specialize import Specializer\n"
        f"s = Specializer(text_model({CHAIN!r}), CHIPS['H200'])\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + code],
        capture_output=True,
        text=True,
        check=check,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@pytest.mark.parametrize("end", ["dropped", "parent ends", "parent is killed"])
def test_the_process_ends(end: str, cache: Path, tmp_path: Path) -> None:
    """With the session, and with its parent, however that ends."""
    code = (
        f"precompile.CORES, end = 1, {end!r}\n"
        "a = precompile.Precompiler(s)\n"
        "for n in (40, 48): a.expect({'x': ((3, n), 'float32')}, 1.0)\n"
        "while a._busy: time.sleep(0.01)\n"
        "child = a.children[0]; print(child._process.pid, flush=True)\n"
        "if end == 'parent is killed': os.kill(os.getpid(), signal.SIGKILL)\n"
        "if end == 'dropped': del a; gc.collect(); print(child.ended.wait(20))\n"
    )
    done = in_python(code, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    pid, *more = done.stdout.split()
    assert more == (["True"] if end == "dropped" else [])
    deadline = time.monotonic() + 20
    while running(int(pid)):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)


@pytest.mark.parametrize("ending", [True, False])
def test_a_process_that_ends_at_once_is_silent(ending: bool) -> None:
    """A command whose only run is its last act: what cannot be started then is no error."""
    code = (
        "def child(*given):\n"
        f"    while threading.main_thread().is_alive() and {ending}: time.sleep(0.01)\n"
        "    raise RuntimeError('no thread can be started')\n"
        "precompile.CORES, precompile._Child = 1, child\n"
        "atexit.register(time.sleep, 1.0)\n"
        "a = precompile.Precompiler(s)\n"
        "a.expect({'x': ((3, 40), 'float32')}, 1.0)\n"
        f"while a._busy and not {ending}: time.sleep(0.01)\n"
    )
    done = in_python(code, check=True)
    assert ("no thread can be started" in done.stderr) != ending


def test_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    specializer = encoder()
    weights = specializer.model.graph.initializers.values()
    nbytes = sum(v.const_value.nbytes for v in weights if v.const_value is not None)
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(precompile, "QUOTA", quota)
    none = "max 100000\n"
    rows = [  # cores, a container's limit, models whose weights have room, processes, how many more
        (1, none, 9, 0, 0), (4, none, 9, 0, 1), (16, none, 9, 0, 4), (99, none, 9, 0, 4),
        (16, none, 2, 0, 2), (16, none, 0, 0, 0), (16, none, 9, 3, 1), (16, none, 9, 9, 1),
        (16, "450000 100000\n", 9, 0, 1), (16, "350000 100000\n", 9, 0, 0), (16, "", 9, 0, 4),
        (4, "1600000 100000\n", 9, 0, 1),
    ]  # fmt: skip
    for cores, limit, room, living, wanted in rows:
        quota.write_text(limit)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        monkeypatch.setattr(precompile, "LARGEST", room * nbytes)
        monkeypatch.setattr(precompile, "_LIVING", set(range(living)))
        assert precompile.processes(specializer) == wanted, (cores, room, living)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert precompile.processes(specializer) == 0


def test_it_ends_when_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile_worker, "IDLE", 0.01)

    def lines() -> Iterator[bytes]:
        threading.Event().wait()  # at the end of its lines the process ends
        yield b""

    assert precompile_worker.Requests(lines()).next() is None


def test_the_sizes_nearest_to_what_came_are_made_first() -> None:
    found = precompile.nearest_first(100, 300)
    assert found[:64] == list(range(128, 64, -1))
    assert sorted(found) == list(range(1, 321))


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
