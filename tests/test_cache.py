"""Optimized graphs that a later session takes from the cache: the same programs, or none."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lowering
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support import ENCODER, assert_same

from onnx_fuse import InferenceSession, cache, container, plugins, rewrite, session
from onnx_fuse.container import stamp
from onnx_fuse.cuda import nvrtc
from onnx_fuse.errors import ModelError
from onnx_fuse.importer import weights
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.call import Program
from onnx_fuse.program.problem import CHIPS, Hardware
from onnx_fuse.rewrite.precision import in_precision
from onnx_fuse.runtime import device, graphs, program_cache
from onnx_fuse.runtime.executable import Executable

H200 = CHIPS["H200"]
IDS = ("input_ids", "attention_mask", "token_type_ids")
SHAPES = dict.fromkeys(IDS, ((2, 16), "int64"))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sessions as on an H200, up to the first launch, and a cache of their own."""
    monkeypatch.setattr(device, "begin", lambda device_id=0: None)
    monkeypatch.setattr(device, "probe", lambda device_id=0: None)
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls, device_id=0: H200))
    monkeypatch.setenv("ONNX_FUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(Executable, "weights", SimpleNamespace(resident={}), raising=False)
    monkeypatch.setattr(session, "_KEPT", 0)
    monkeypatch.setattr(weights, "_SMALL_FILE", 0)  # weights stay in the model's file
    monkeypatch.setattr(weights, "LARGE", 1 << 11)
    return tmp_path


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often a graph was optimized."""
    count = [0]
    whole = rewrite.optimize

    def counted(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        return whole(*arguments, **options)

    monkeypatch.setattr(rewrite, "optimize", counted)
    return count


def program(path: Path, shapes: Any = SHAPES, **options: Any) -> Program:
    """What a new session runs; what it keeps is there when this returns."""
    opened = InferenceSession(path, device="cuda", **options)
    made: Program = opened._executable.program(shapes)
    wait_for_writers()
    return made


def wait_for_writers() -> None:
    for thread in threading.enumerate():
        if thread.name == "onnx_fuse cache":
            thread.join()


def described(p: Program, path: Path, **options: Any) -> tuple[Any, ...]:
    """All of a program, the bytes of its weights and constants included."""
    shared = InferenceSession(path, device="cuda", **options)._executable.shared
    weights = {
        b.name: p.constants[b.id] if b.id in p.constants else shared.weight(b.name)
        for b in p.buffers
        if b.kind == "weight"
    }
    constants = {k: (v.dtype, v.shape, v.tobytes()) for k, v in p.constants.items()}
    made = repr((p.setup, p.calls))  # of the cache they are without their problems
    return made, p.buffers, p.inputs, constants, {k: v.tobytes() for k, v in weights.items()}


def stored(folder: Path, text: str = "", external: bool = False) -> Path:
    """The file of a model: the encoder, unless a text is given."""
    save(text_model(text) if text else session.load(ENCODER), folder / "m.onnx", external=external)
    return folder / "m.onnx"


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "graphs").glob("*.graph"))


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_second_session_runs_the_same_program(
    precision: str, external: bool, gpu: Path, optimized: list[int]
) -> None:
    path = stored(gpu, external=external)
    options = {"precision": precision}
    first = program(path, **options)
    assert (len(entries(gpu)), optimized) == (1, [1])
    second = program(path, **options)
    assert optimized == [1]
    assert described(first, path, **options) == described(second, path, **options)
    assert program(path, **options, level=1).calls != first.calls
    assert (len(entries(gpu)), optimized) == (2, [2])
    model = InferenceSession(path, device="cuda", **options).model  # in float32, as optimized
    assert model.graph.outputs[0].dtype == ir.DataType.FLOAT
    assert optimized == [2 if precision == "fp32" else 3]


@pytest.mark.parametrize("name", [n for n in lowering.GRAPHS if "depends on data" not in n])
def test_every_small_graph_lowers_the_same(name: str, gpu: Path, optimized: list[int]) -> None:
    text, feeds = lowering.GRAPHS[name]
    path = stored(gpu, text)
    shapes = {key: (np.shape(a), np.asarray(a).dtype.name) for key, a in feeds.items()}
    first = described(program(path, shapes), path)
    assert described(program(path, shapes), path) == first
    assert optimized == [1]


def apply(change: str, path: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change what the cached `entry` of the encoder in `path` was made of, or the entry itself."""
    data, kept = path.with_name("m.onnx.data"), entry.read_bytes()
    if change == "file":
        model = session.load(ENCODER)
        model.graph.name = "another"
        save(model, path, external=True)
    elif change == "weights":
        data.write_bytes((-np.frombuffer(data.read_bytes(), np.float32)).tobytes())
    elif change == "damage":
        middle = len(kept) // 2
        entry.write_bytes(kept[:middle] + bytes([kept[middle] ^ 1]) + kept[middle + 1 :])
    elif change == "truncation":
        entry.write_bytes(kept[:1000])
    elif change == "foreign":
        entry.chmod(0o666)
    elif change == "version":
        monkeypatch.setattr(onnxruntime, "__version__", "1.0.0")
    elif change == "plugin":
        plugins.register_op(plugins.OpDef("Twice", "my.ops", body=TWICE), fuse=True)
    else:
        monkeypatch.setenv("ONNX_FUSE_CACHE_MB", "0")


@pytest.mark.parametrize("change", ["file", "weights", "damage", "truncation", "off"])
def test_what_has_changed_is_optimized_anew(
    change: str, gpu: Path, optimized: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(gpu, external=True)
    before = described(program(path), path)
    apply(change, path, entries(gpu)[0], monkeypatch)
    again = program(path)
    assert optimized == [2]
    assert (described(again, path) == before) == (change != "weights")
    if change != "off":
        program(path)
        assert optimized[0] <= 3  # `described` opened one more after an entry was written


def test_a_file_that_changes_meanwhile_is_not_kept(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, optimized: list[int]
) -> None:
    path = stored(gpu)
    opened = InferenceSession(path, device="cuda")
    os.utime(path)  # written to, between the digest and the first program
    opened._executable.program(SHAPES)
    program(path)
    assert (len(entries(gpu)), optimized) == (1, [2])
    whole = graphs.reread

    def slow(*arguments: Any) -> Any:
        os.utime(path)
        return whole(*arguments)

    monkeypatch.setattr(graphs, "reread", slow)
    program(path)
    assert optimized == [3]


def test_weights_that_change_meanwhile_are_not_kept(gpu: Path, optimized: list[int]) -> None:
    path = stored(gpu, external=True)
    opened = InferenceSession(path, device="cuda")
    os.utime(path.with_name("m.onnx.data"))  # written to, after they were mapped
    opened._executable.program(SHAPES)
    program(path)
    assert (len(entries(gpu)), optimized) == (1, [2])
    program(path)
    assert optimized == [2]


def test_what_is_no_file_is_said_in_one_line(gpu: Path) -> None:
    for path in (gpu, gpu / "none.onnx"):
        with pytest.raises(ModelError, match=str(path)):
            InferenceSession(path, device="cuda")


def test_a_default_of_an_input_stays_a_default(gpu: Path, optimized: list[int]) -> None:
    path = stored(
        gpu, "agraph (float[4] x, float[4] b = {1, 2, 3, 4}) => (float[4] y) { y = Add(x, b) }"
    )
    shapes = {"x": ((4,), "float32"), "b": ((4,), "float32")}
    assert program(path, shapes).calls == program(path, shapes).calls
    opened = InferenceSession(path, device="cuda")
    assert [v.name for v in opened.get_inputs()] == ["x"]
    assert [v.name for v in opened.get_overridable_initializers()] == ["b"]
    assert opened._interface.defaults["b"].tolist() == [1, 2, 3, 4]
    assert optimized == [1]


def test_the_longest_unused_entries_go(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNX_FUSE_CACHE_MB", "1")
    folder = gpu / "cache" / "graphs"
    folder.mkdir(parents=True)
    for i in range(4):
        (folder / f"{i}.graph").write_bytes(bytes(400_000))
        os.utime(folder / f"{i}.graph", (i, i))
    program_cache.prune(1 << 20)
    assert [p.name for p in entries(gpu)] == ["2.graph", "3.graph"]


def test_nothing_large_is_kept_beyond_the_bound(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = session.load(ENCODER)
    rewrite.optimize(graph, own_kernels=True)
    graph, _ = in_precision(graph, "bf16")  # new weights, all of them
    monkeypatch.setattr(nvrtc, "compile", lambda *_: b"")
    entry = cache.Entry(ENCODER, "digest", stamp(ENCODER), {})
    monkeypatch.setenv("ONNX_FUSE_CACHE_MB", "1")
    big = graph.graph.initializers["embeddings.word.weight"]
    big.const_value = ir.tensor(np.ones((1 << 20, 1), np.float32), name=big.name)
    assert entry.store(graph).result() is None
    assert not entries(gpu)


def on_cpu(path: Path, feeds: Any, **options: Any) -> tuple[list[Any], InferenceSession]:
    """What a new session on the CPU answers; what it keeps is there when this returns."""
    opened = InferenceSession(path, **options)
    wait_for_writers()
    return opened.run(None, feeds), opened


FEEDS: dict[str, Any] = {name: np.ones((2, 16), np.int64) for name in IDS}


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("with_options", [False, True])
def test_a_second_session_on_the_cpu_answers_the_same(
    with_options: bool, external: bool, gpu: Path, optimized: list[int]
) -> None:
    path = stored(gpu, external=external)
    options = {"sess_options": onnxruntime.SessionOptions()} if with_options else {}
    expected, first = on_cpu(path, FEEDS, **options)
    actual, second = on_cpu(path, FEEDS, **options)
    assert (len(entries(gpu)), optimized) == (1, [1])
    assert_same(actual, expected)
    assert rewrite.op_counts(second.model) == rewrite.op_counts(first.model)
    assert [*map(str, second.get_inputs())] == [*map(str, first.get_inputs())]
    size = sum(p.stat().st_size for p in entries(gpu))
    assert size < 0.7 * ENCODER.stat().st_size  # only merged weights are copied
    on_cpu(path, FEEDS, level=1)
    program(path)
    assert (len(entries(gpu)), optimized) == (3, [3])
    inner = InferenceSession(path, **options)._session._inner  # which keeps its weights alive
    gc.collect()
    np.testing.assert_array_equal(inner.run(None, FEEDS)[0], expected[0])


@pytest.mark.parametrize("name", lowering.GRAPHS)
def test_every_small_graph_answers_the_same(name: str, gpu: Path, optimized: list[int]) -> None:
    text, feeds = lowering.GRAPHS[name]
    path = stored(gpu, text)
    expected, _ = on_cpu(path, feeds)
    actual, _ = on_cpu(path, feeds)
    assert_same(actual, expected)
    assert optimized == [1]


@pytest.mark.parametrize("dtype", ["DOUBLE", "FLOAT16", "BFLOAT16", "INT8", "BOOL"])
def test_weights_of_every_width_are_handed_over(
    dtype: str, gpu: Path, optimized: list[int]
) -> None:
    path = gpu / "m.onnx"
    model = text_model(
        "g (int64[n] i) => (float[n, 32] y) <float[1] w = {1}>"
        "{ r = Gather (w, i) y = Cast <to = 1> (r) }"
    )
    held = np.arange(64 * 32).reshape(64, 32) % 5 - (dtype[0] == "D") / 3
    kind = ir.DataType[dtype]
    w = model.graph.initializers["w"]
    w.const_value = ir.tensor(held.astype(kind.numpy()), kind, name="w")
    w.shape, w.dtype = ir.Shape(held.shape), kind
    save(model, path)
    feeds = {"i": np.array([63, 0, 7])}
    expected, _ = on_cpu(path, feeds)
    actual, second = on_cpu(path, feeds)
    np.testing.assert_array_equal(actual[0], expected[0])
    assert second._cached is not None
    assert list(second._cached.weights) == ["w"]
    assert optimized == [1]


@pytest.mark.parametrize(
    "change", ["file", "weights", "damage", "truncation", "foreign", "off", "version", "plugin"]
)
def test_what_has_changed_is_optimized_anew_for_the_cpu(
    change: str, gpu: Path, optimized: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(gpu, external=True)
    before, _ = on_cpu(path, FEEDS)
    apply(change, path, entries(gpu)[0], monkeypatch)
    try:
        again, _ = on_cpu(path, FEEDS)
        assert optimized == [2]
        assert np.array_equal(again[0], before[0]) == (change != "weights")
        on_cpu(path, FEEDS)
        assert optimized == [3 if change == "off" else 2]
    finally:
        plugins.unregister("my.ops::Twice")


TWICE = "Twice (x) => (y) { y = Add (x, x) }"


def test_a_rule_of_ones_own_is_in_no_key(gpu: Path, optimized: list[int]) -> None:
    """What it does may change from run to run, and nothing says so."""
    path = stored(gpu)
    rule = plugins.Rule("Mine", 1, ("Add",), lambda rw, node: False)
    plugins.register_op(
        plugins.OpDef("Mine", "my.ops", body=TWICE.replace("Twice", "Mine")), fuse=rule
    )
    try:
        for _ in range(2):
            on_cpu(path, FEEDS)
            program(path)
    finally:
        plugins.unregister("my.ops::Mine")
    assert (len(entries(gpu)), optimized) == (0, [4])


def test_options_of_a_session_serve_another_one(gpu: Path) -> None:
    """Names of weights that were handed over would be missing in the next model."""
    path, other = stored(gpu), gpu / "other.onnx"
    save(text_model("g (float[2] x) => (float[2] y) { y = Relu (x) }"), other)
    options = onnxruntime.SessionOptions()
    for _ in range(2):
        on_cpu(path, FEEDS, sess_options=options)
    answer = onnxruntime.InferenceSession(str(other), options).run(None, {"x": np.float32([-1, 1])})
    assert answer[0].tolist() == [0, 1]


def test_a_warning_of_the_first_session_comes_again(gpu: Path, optimized: list[int]) -> None:
    path = stored(gpu, "g (bfloat16[2] x) => (bfloat16[2] y) { y = Relu (x) }")
    x = np.array([-1, 1], ir.DataType.BFLOAT16.numpy())
    for _ in range(2):
        with pytest.warns(UserWarning, match="bfloat16"):
            answer, _ = on_cpu(path, {"x": x})
        assert answer[0].tolist() == [0, 1]
    assert optimized == [1]


def test_sessions_that_open_at_once_answer_the_same(gpu: Path) -> None:
    path = stored(gpu)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: InferenceSession(path).run(None, FEEDS)[0], range(3)))
    wait_for_writers()
    for answer in (*answers, on_cpu(path, FEEDS)[0][0]):
        np.testing.assert_array_equal(answer, answers[0])
    assert len(entries(gpu)) == 1


ENDING = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from onnx_fuse import InferenceSession, cache
from onnx_fuse.importer import weights

def late(path):
    while True:  # until the main thread has ended
        try:
            ThreadPoolExecutor(1).submit(int).result()
        except RuntimeError:
            return digest(path)
        time.sleep(0.01)

digest, cache.digest_of_file = cache.digest_of_file, late
weights._SMALL_FILE, weights.LARGE = 0, 1 << 11
InferenceSession(sys.argv[1])
"""


def test_a_graph_is_kept_after_the_end_of_a_script(gpu: Path, optimized: list[int]) -> None:
    code = [sys.executable, "-c", ENDING, str(ENCODER.resolve())]
    # not where a checkout stands: the installed package is another one to the cache
    done = subprocess.run(code, capture_output=True, text=True, check=True, cwd=gpu)
    assert done.stderr == ""
    InferenceSession(ENCODER)
    assert optimized == [0]


def test_a_digest_is_noted_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change in place counts though it keeps the size and sets the time of change back."""
    path, read = tmp_path / "model.onnx", []
    path.write_bytes(b"old")
    pieces = container._pieces
    monkeypatch.setattr(container, "_pieces", lambda *place: read.append(place) or pieces(*place))
    old = container.digest_of_file(path)
    assert container.digest_of_file(path) == old
    assert len(read) == 2  # it might be written to still
    now = container.time.time_ns
    monkeypatch.setattr(container.time, "time_ns", lambda: now() + 10**12)
    assert [container.digest_of_file(path) for _ in range(3)] == [old] * 3
    assert len(read) == 3
    times = path.stat()
    time.sleep(0.02)  # a tick of the clock by which files are dated
    path.write_bytes(b"new")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert container.digest_of_file(path) != old
    assert len(read) == 4
