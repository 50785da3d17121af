"""Compiled files on the GPU: the same bits as the ordinary session, with nothing of ONNX loaded."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import test_deploy
from support import ENCODER, Cli

from onnx_fuse import InferenceSession, deploy
from onnx_fuse.errors import DeviceError, UsageError
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.problem import CHIPS, Hardware
from onnx_fuse.runtime.program_cache import ProgramCache

SIZES = [(1, 5), (2, 16)]


def feeds(batch: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    return {
        "input_ids": rng.integers(0, 256, (batch, length)),
        "attention_mask": np.ones((batch, length), np.int64),
        "token_type_ids": np.zeros((batch, length), np.int64),
    }


def compiled(path: Path, precision: str = "fp32") -> Path:
    """The encoder for this GPU."""
    shapes = [{name: a.shape for name, a in feeds(*size).items()} for size in SIZES]
    targets = {"here": Hardware.detect()}
    deploy.compile(ENCODER, path, targets=targets, shapes=shapes, precision=precision)
    return path


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_file_gives_the_bits_of_the_session(tmp_path: Path, precision: str) -> None:
    path = compiled(tmp_path / "m.fused", precision)
    ordinary = InferenceSession(ENCODER, device="cuda", precision=precision)
    loaded = InferenceSession(path, device="cuda")
    again = InferenceSession(path, device="cuda", recompile=True)
    for size in SIZES:
        want = ordinary.run(None, feeds(*size))
        for session in (loaded, again):
            for got, array in zip(session.run(None, feeds(*size)), want, strict=True):
                assert got.dtype == array.dtype
                assert got.tobytes() == array.tobytes()
    assert [i.name for i in loaded.get_inputs()] == list(feeds(1, 1))
    with pytest.raises(UsageError, match=r"no program for input_ids \[1, 7\].*input_ids \[1, 5\]"):
        loaded.run(None, feeds(1, 7))
    assert again.run(None, feeds(1, 7))[0].shape == (1, 7, 32)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_packed_batch_of_a_file_has_the_bits_of_the_session(
    tmp_path: Path, precision: str
) -> None:
    path, here = tmp_path / "m.fused", {"here": Hardware.detect()}
    shapes = [dict.fromkeys(feeds(1, 1), (4, -1))]
    given = {"ranges": {"sequence": (1, 24)}, "precision": precision, "pack": "zero"}
    deploy.compile(ENCODER, path, targets=here, shapes=shapes, **given)
    ordinary = InferenceSession(ENCODER, device="cuda", precision=precision, pack="zero")
    loaded = InferenceSession(path, device="cuda", pack="zero")
    for lengths in ([24, 1, 7, 16], [1, 1, 1, 1], [24] * 4, [2, 3, 1, 1], [9, 24, 24, 2]):
        batch = feeds(4, max(lengths))
        batch["attention_mask"][:] = np.arange(max(lengths)) < np.array(lengths)[:, None]
        found, want = (each.run(None, batch) for each in (loaded, ordinary))
        assert [a.tobytes() for a in found] == [a.tobytes() for a in want], lengths
    text = f"padding is packed: 60 rows for 4 x {max(lengths)}"
    assert text in loaded.explain(batch)


def test_a_run_imports_nothing_of_onnx_and_no_compiler(tmp_path: Path) -> None:
    path = compiled(tmp_path / "m.fused")
    np.savez(tmp_path / "feeds.npz", **feeds(*SIZES[0]))
    code = (
        "import sys, numpy as np\n"
        "from onnx_fuse import InferenceSession\n"
        f"session = InferenceSession({str(path)!r}, device='cuda')\n"
        f"y = session.run(None, dict(np.load({str(tmp_path / 'feeds.npz')!r})))[0]\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'onnx', 'onnx_ir', 'onnxruntime',"
        "'onnxscript', 'google', 'sympy', 'ml_dtypes', 'nvmath', 'safetensors', 'typer'}))\n"
        "no = 'cuda.bindings.nvrtc', 'cuda.core'\n"
        "print([m for m in sys.modules if m.startswith(no)])\n"
        "print('nvrtc' in open('/proc/self/maps').read(), np.isfinite(y).all())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]", "False True"]


def test_the_runtime_distribution_alone_runs_it(tmp_path: Path) -> None:
    path = compiled(tmp_path / "m.fused")
    site = test_deploy.runtime_site(tmp_path / "site")
    np.savez(tmp_path / "feeds.npz", **feeds(*SIZES[1]))
    code = test_deploy.ABSENT + (
        "import numpy as np\n"
        "from onnx_fuse import InferenceSession\n"
        "session = InferenceSession('m.fused', device='cuda')\n"
        "np.save('y.npy', session.run(None, dict(np.load('feeds.npz')))[0])\n"
        "print(sys.modules['onnx_fuse'].__file__)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    want = InferenceSession(path, device="cuda").run(None, feeds(*SIZES[1]))[0]
    assert np.load(tmp_path / "y.npy").tobytes() == want.tobytes()


def test_the_command_runs_the_first_program(tmp_path: Path, cli: Cli) -> None:
    path = compiled(tmp_path / "m.fused")
    done = cli("run", path, "--device", "cuda", "-o", tmp_path / "y.npz")
    assert done.code == 0, done.err
    assert np.load(tmp_path / "y.npz")["last_hidden_state"].shape == (*SIZES[0], 32)
    done = cli("run", path, "--device", "cuda", "--dim", "batch=3", "sequence=4")
    assert done.code != 0
    assert "there is no program for" in done.err
    done = cli("run", path, "--device", "cuda", "--dim", "batch=3", "sequence=4", "--recompile")
    assert done.code == 0, done.err


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_graph_from_the_cache_gives_the_same_bits(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNX_FUSE_CACHE_DIR", str(tmp_path / "cache"))
    found = []
    for _ in range(2):
        session = InferenceSession(ENCODER, device="cuda", precision=precision)
        found.append(b"".join(y.tobytes() for y in session.run(None, feeds(*SIZES[1]))))
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    assert len(list((tmp_path / "cache" / "graphs").glob("*.graph"))) == 1
    assert found[0] == found[1]


def test_programs_from_the_cache_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNX_FUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ProgramCache, "seconds", 0.0)
    found = []
    for again in (False, True):
        session = InferenceSession(ENCODER, device="cuda", precision="fp16")
        sizes = [(2, n) for n in (40, 7, 8, 33, 7, 2, 40, 7)]
        found.append([y.tobytes() for s in sizes for y in session.run(None, feeds(*s))])
        specializer = session._executable.specializer
        assert specializer.origin.result() is not None
        specializer.written()
        assert (specializer.traced == 0) == again
    assert found[0] == found[1]


def test_every_size_of_a_range_gives_the_bits_of_a_session(tmp_path: Path) -> None:
    path = tmp_path / "m.fused"
    deploy.compile(
        ENCODER,
        path,
        targets={"here": Hardware.detect()},
        shapes=[dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (2, -1))],
        ranges={"sequence": (2, 40)},
        precision="fp16",
    )
    compiled = InferenceSession(path, device="cuda")
    ordinary = InferenceSession(ENCODER, device="cuda", precision="fp16")
    for length in (40, 7, 8, 33, 7, 2, 40, 16, 7, 7):
        given = feeds(2, length)
        pairs = zip(compiled.run(None, given), ordinary.run(None, given), strict=True)
        assert all(got.tobytes() == want.tobytes() for got, want in pairs), length


def test_a_file_for_another_chip_is_refused_in_one_line(tmp_path: Path) -> None:
    model = text_model("agraph (float[4] x) => (float[4] y) { y = Tanh(x) }")
    other = next(n for n, hw in CHIPS.items() if hw.arch != Hardware.detect().arch)
    path = tmp_path / "m.fused"
    deploy.compile(model, path, targets={other: CHIPS[other]})
    with pytest.raises(DeviceError, match=rf"compiled for {other} .*this GPU is .*recompile=True"):
        InferenceSession(path, device="cuda")
    again = InferenceSession(path, device="cuda", recompile=True)
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_allclose(again.run(None, {"x": x})[0], np.tanh(x), rtol=1e-6)


def test_binding_and_defaults_of_a_compiled_file(tmp_path: Path) -> None:
    model = text_model(
        "agraph (float[4] x, float[4] b = {1, 2, 3, 4}) => (float[4] y, float[2] k)"
        " <float[2] c = {5, 6}> { y = Add(x, b) k = Identity(c) }"
    )
    path = tmp_path / "m.fused"
    deploy.compile(model, path, targets={"here": Hardware.detect()})
    session = InferenceSession(path, device="cuda")
    x = np.ones(4, np.float32)
    y, k = session.run(None, {"x": x})
    assert y.tolist() == [2, 3, 4, 5]
    assert k.tolist() == [5, 6]
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_cpu_input("b", 2 * x)
    binding.bind_output("y", "cuda")
    session.run_with_iobinding(binding)
    assert np.asarray(binding.get_outputs()[0]).tolist() == [3, 3, 3, 3]
