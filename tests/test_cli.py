"""The onnx-fuse command: what it writes, prints and returns."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime as ort
import pytest
from cuda.bindings import driver
from cuda.bindings import nvrtc as bindings_nvrtc
from support import ENCODER, Cli, assert_same

from onnx_fuse import bench, config, rewrite, session
from onnx_fuse.cuda import nvrtc
from onnx_fuse.errors import DeviceError, ModelError
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime import device
from onnx_fuse.runtime import ort as portable

IDS = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
FEEDS = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "token_type_ids": 0 * IDS}
Save = Callable[..., Path]
OK = driver.CUresult.CUDA_SUCCESS
RELU = "g (float[N, 4] x) => (float[N, 4] y) { y = Relu (x) }"


def outputs(path: Path) -> list[np.ndarray]:
    return ort.InferenceSession(path).run(None, FEEDS)


def encoder(folder: Path) -> Path:
    path = folder / "encoder.onnx"
    path.write_bytes(ENCODER.read_bytes())
    return path


def break_optimize(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the optimizer produce a wrong graph."""
    right = rewrite.optimize

    def wrong(model: Any, **options: Any) -> Any:
        report = right(model, **options)
        node = next(n for n in model.graph if n.op_type.startswith("LayerNormGemm"))
        node.attributes["epsilon"] = onnx_ir.AttrFloat32("epsilon", 3.0)
        return report

    monkeypatch.setattr(rewrite, "optimize", wrong)


# ---- optimize --------------------------------------------------------------------------------


def test_optimize_writes_a_checked_file_and_a_table(cli: Cli, tmp_path: Path) -> None:
    path = encoder(tmp_path)
    result = cli("optimize", path, "--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    assert (result.code, result.err) == (0, "")
    fused = tmp_path / "encoder.fused.onnx"
    assert_same(outputs(fused), outputs(path), atol=2e-5)
    for text in ("int64 [batch, sequence]", "output pooler_output", "LayerNormGemm", "check ok"):
        assert text in result.out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["output"] == str(fused)
    assert report["nodes"]["before"] > report["nodes"]["after"]
    assert report["check"]["ok"] is True
    assert report["check"]["max_abs"] < 2e-5
    merged = report["fusions"].pop("MergedGemm")  # products that a LayerNormGemm became
    assert merged
    assert f"{sum(report['fusions'].values())} fused operators" in (tmp_path / "r.html").read_text()
    assert report["check"]["where"].startswith(("last_hidden_state[", "pooler_output["))
    assert any(name.startswith("LayerNormGemm") for name in report["fusions"])
    assert all(set(r) == {"nodes", "reason", "code"} for r in report["not_fused"])
    assert "LayerNormGemm" in (tmp_path / "r.html").read_text()


def test_inline_writes_plain_onnx(cli: Cli, tmp_path: Path) -> None:
    path, plain = encoder(tmp_path), tmp_path / "plain.onnx"
    assert cli("optimize", path, "--inline", "-o", plain).code == 0
    model = onnx.load(plain)
    assert not model.functions
    assert {o.domain for o in model.opset_import} <= {"", "ai.onnx"}
    assert_same(outputs(plain), outputs(path), atol=2e-5)


@pytest.mark.parametrize("level", range(4))
def test_levels(cli: Cli, tmp_path: Path, level: int) -> None:
    path = encoder(tmp_path)
    assert cli("optimize", path, "--level", level).code == 0
    found = {n.op_type for n in onnx.load(tmp_path / "encoder.fused.onnx").graph.node}
    assert any(op.startswith("LayerNormGemm") for op in found) == (level > 0)


def test_list_names_every_fusion_and_the_names_work(cli: Cli, tmp_path: Path) -> None:
    names = cli.report("optimize", "--list")["fusions"]
    assert all(name in cli.last.out for name in names)
    options = [o for name in names for o in ("--skip", name)]
    assert cli("optimize", encoder(tmp_path), *options).code == 0
    ops = {n.domain for n in onnx.load(tmp_path / "encoder.fused.onnx").graph.node}
    assert ops == {""}
    assert cli("optimize", encoder(tmp_path), "--level", 0, "--fuse", ",".join(names)).code == 0
    ops = {n.domain for n in onnx.load(tmp_path / "encoder.fused.onnx").graph.node}
    assert FUSE in ops


def test_explain_prints_each_refusal(cli: Cli, tmp_path: Path, saved: Save) -> None:
    model = text_model(
        '<ir_version: 10, opset_import: ["" : 23]> g (float[B, 2, S, 4] q, float[B, 2, S, 4] k) '
        "=> (float[B, 2, S, 4] y) { y = Attention <softmax_precision = 11> (q, k, k) }"
    )
    refusals = cli.report("optimize", saved(model), "--explain", "--no-check")["not_fused"]
    assert refusals
    assert all(r["reason"] in cli.last.out for r in refusals)


def test_explain_for_a_gpu_that_is_not_here(cli: Cli, tmp_path: Path) -> None:
    shapes = ["input_ids:8,128", "attention_mask:8,128", "token_type_ids:8,128"]
    path, options = encoder(tmp_path), ["--target", "h200", "--no-check"]
    sites = cli.report("optimize", path, *options, "--input-shapes", *shapes)["kernels"]
    told = cli.last.out
    assert {"Gemm", "LayerNormGemm", "Sdpa"} <= {s["op"] for s in sites}
    for site in sites:
        assert site["nodes"]
        assert site["why"]
        assert site["seconds"] > 0
        assert site["floor"] > 0
        if site["op"] == "Gemm":
            assert site["kernel"] in ("fma", "simt")  # the two with fp32 products
            assert "tile=" in site["config"]
            assert ["mma", "matrix multiplications asked for are ieee"] in site["refused"]
    sites = cli.report("optimize", path, *options, "--precision", "bf16x3")["kernels"]
    assert {"mma", "wgmma_split"}.isdisjoint(
        name for s in sites if s["op"] == "Gemm" for name, _ in s["refused"]
    )
    assert "a file can be in fp32" in cli.fails(2, "optimize", path, "--precision", "bf16x3")
    half = cli.report("optimize", path, "--precision", "fp16", "-o", path.with_name("half.onnx"))
    assert half["check"]["tolerance"]["reason"].startswith("float16")
    assert half["bytes"]["after"] < 0.6 * half["bytes"]["before"]
    err = cli.fails(3, "validate", path.with_name("half.onnx"), "--against", path)
    assert "--rtol 0.02 allows for its coarser types" in err
    for text in ("the 10 slowest of 19 calls on NVIDIA H200", "floor", "19 calls, predicted"):
        assert text in told
    explained = cli("optimize", path, *options, "--explain").out
    for text in ("calls on NVIDIA H200", "why", "for 16-bit operands, not float32"):
        assert text in explained


class Played:
    """An Executable whose GPU is an H200 on paper and onnxruntime underneath."""

    def __init__(self, model: Any, precision: str, gpu: int) -> None:
        self.hw, self.model, self.precision = CHIPS["H200"], model, precision

    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return portable.run(portable.session(self.model), feeds, names)

    def instance(self, feeds: dict[str, np.ndarray]) -> Any:
        program = bench.program(self.model, self.hw, feeds, self.precision)
        return SimpleNamespace(program=program)


def test_run_explains_the_kernels_of_its_feeds(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "begin", lambda gpu: None)
    monkeypatch.setattr(session, "_executable", Played)
    np.savez(tmp_path / "x.npz", **FEEDS)
    options = ["--device", "cuda", "--explain", "--precision", "tf32"]
    sites = cli.report("run", ENCODER, *options, "--inputs", tmp_path / "x.npz")["kernels"]
    assert cli.last.err == ""
    assert {"Gemm", "LayerNormGemm", "Sdpa"} <= {s["op"] for s in sites}
    # also of the parts that a fused operator is made of: its name, none of lowering's own
    assert not [s for s in sites if any(name.startswith("value_") for name in s["nodes"])]
    assert ["wgmma_split", "for fp32 operands and bf16x3 or bf16x6, not float32 tf32"] in [
        r for s in sites for r in s["refused"]
    ]
    assert "inputs: input_ids [2, 4]" in cli.last.out


def test_a_check_shows_its_first_inputs_and_counts_the_others(
    cli: Cli, tmp_path: Path, saved: Save
) -> None:
    model = text_model(
        "g (float[N] a, float[N] b, float[N] c, float[N] d, float[N] e) => (float[N] y)"
        " { y = Sum (a, b, c, d, e) }"
    )
    sets = cli.report("optimize", saved(model))["check"]["feeds"]
    (line,) = (line for line in cli.last.out.splitlines() if line.startswith("  inputs: "))
    shown = ", ".join(f"{name} {sets[0][name]}" for name in "abcd")
    others = f"{len(sets) - 1} other sets (--json has all)"
    assert line == f"  inputs: {shown}, and 1 more; and {others}"


def test_input_shapes_are_split_from_the_right(cli: Cli, tmp_path: Path, saved: Save) -> None:
    model = text_model(
        "g (float[N, L] a, float[N, M] b) => (float[N, K] y) { y = Concat <axis = 1> (a, b) }"
    )
    model.graph.inputs[0].name = "a:0"
    path = saved(model)
    cli.done("optimize", path, "--input-shapes", "a:0:3,5", "b:-1,7")
    shapes = [
        [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in onnx.load(tmp_path / "model.fused.onnx").graph.input
    ]
    assert shapes == [[3, 5], [3, 7]]
    for wrong in ("a:0", "a:0:x", "q:1,2", "a:0:1,2,3"):
        assert cli("optimize", path, "--input-shapes", wrong).code == 2


def test_external_data(cli: Cli, tmp_path: Path) -> None:
    path, out = encoder(tmp_path), tmp_path / "out" / "big.onnx"
    out.parent.mkdir()
    assert cli("optimize", path, "-o", out, "--save-as-external-data").code == 0
    assert sorted(p.name for p in out.parent.iterdir()) == ["big.onnx", "big.onnx.data"]
    assert_same(outputs(out), outputs(path), atol=2e-5)
    assert cli("validate", out, "--against", path).code == 0


def test_a_model_over_the_protobuf_limit_gets_a_data_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnx_fuse.importer.save.MAX_PROTOBUF", (64 << 20) + 1000)
    path = encoder(tmp_path)
    assert cli("optimize", path).code == 0
    assert (tmp_path / "encoder.fused.onnx.data").stat().st_size > 100_000
    assert cli("run", tmp_path / "encoder.fused.onnx").code == 0


def test_a_data_file_of_another_model_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    path, other = encoder(tmp_path), tmp_path / "out.onnx.data"
    other.write_bytes(b"weights of another model")
    assert "the file exists already" in cli.fails(
        1, "optimize", path, "-o", tmp_path / "out.onnx", "--save-as-external-data"
    )
    assert other.read_bytes() == b"weights of another model"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["encoder.onnx", "out.onnx.data"]


def test_a_failed_check_writes_nothing_unless_told_to(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_optimize(monkeypatch)
    path = encoder(tmp_path)
    report = cli.report("optimize", path, code=3)
    assert cli.last.err.count("\n") == 1
    assert "nothing was written" in cli.last.err
    assert (report["output"], report["check"]["ok"]) == (None, False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["encoder.onnx", "r.json"]
    assert cli("optimize", path, "--keep").code == 3
    assert (tmp_path / "encoder.fused.onnx").exists()
    (tmp_path / "encoder.fused.onnx").unlink()
    assert cli("optimize", path, "--no-check").code == 0
    assert (tmp_path / "encoder.fused.onnx").exists()


def test_an_old_output_survives_a_failed_check(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = encoder(tmp_path), tmp_path / "out.onnx"
    out.write_bytes(b"what was there")
    break_optimize(monkeypatch)
    assert cli("optimize", path, "-o", out).code == 3
    assert out.read_bytes() == b"what was there"


# ---- validate --------------------------------------------------------------------------------


def test_validate_blames_the_wrong_node(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("validate", ENCODER).code == 0
    break_optimize(monkeypatch)
    [culprit] = cli.report("validate", ENCODER, "--blame", code=3)["check"]["blame"]
    assert "LayerNormGemm" in cli.last.err
    assert culprit["confirmed"]
    assert culprit["ops"][0].startswith("LayerNormGemm")


def test_validate_takes_inputs_and_tolerances(cli: Cli, tmp_path: Path, saved: Save) -> None:
    a, b = saved(RELU, "a.onnx"), saved(RELU.replace("Relu", "Selu"), "b.onnx")
    positive, mixed = tmp_path / "p.npz", tmp_path / "m.npz"
    np.savez(positive, x=np.zeros((2, 4), np.float32))
    np.savez(mixed, x=np.array([[-1, 1, -1, 1]], np.float32))
    assert cli("validate", a, "--against", b, "--inputs", positive).code == 0
    assert cli("validate", a, "--against", b, "--inputs", mixed).code == 3
    assert cli("validate", a, "--against", b, "--inputs", mixed, "--atol", 10).code == 0
    assert cli("validate", a, "--against", b, "--inputs", mixed, "--rtol", -1).code == 2
    assert "outputs differ" in cli.fails(
        1, "validate", a, "--against", saved(RELU.replace("y", "z"), "c.onnx")
    )


# ---- run, bench, inspect, doctor -------------------------------------------------------------


def test_run_saves_outputs(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", **FEEDS, unused=np.ones(1))
    cli.done("run", ENCODER, "--inputs", tmp_path / "in.npz", "-o", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as stored:
        for name, b in zip(("last_hidden_state", "pooler_output"), outputs(ENCODER), strict=True):
            np.testing.assert_allclose(stored[name], b, atol=2e-5)
    report = cli.report("run", ENCODER, "--profile")
    assert report["operators"]["MatMul"]["runs"] > 0
    assert report["outputs"]["pooler_output"]["dtype"] == "float32"


@pytest.mark.filterwarnings("ignore:OpenVINOExecutionProvider is not used")
@pytest.mark.parametrize("before", [(), ("OpenVINOExecutionProvider",)])
def test_run_on_the_first_provider_there_is(cli: Cli, before: tuple[str, ...]) -> None:
    report = cli.report("run", ENCODER, "--providers", *before, "CPUExecutionProvider")
    assert report["providers"] == ["CPUExecutionProvider"]
    assert [*report["outputs"]] == ["last_hidden_state", "pooler_output"]
    assert cli.report("validate", ENCODER, "--providers", *before, "CPUExecutionProvider")
    timed = cli.report(
        "bench", ENCODER, "--repeat", 5, "--providers", *before, "CPUExecutionProvider"
    )
    assert timed["original"]["median"] > 0


def test_bench_against_a_provider_of_onnxruntime(cli: Cli) -> None:
    assert "onnxruntime, CPUExecutionProvider" in cli.done(
        "bench", ENCODER, "--repeat", 5, "--against", "ort:cpu"
    )


def test_arrays_bound_in_the_memory_of_a_device_give_the_same_outputs() -> None:
    session = portable.session(ENCODER)
    binding = bench._bound(session, FEEDS, "cpu")
    session.run_with_iobinding(binding)
    for a, b in zip(binding.copy_outputs_to_cpu(), outputs(ENCODER), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_run_refuses_wrong_inputs(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    for arrays, code, text in (
        ({"input_ids": IDS}, 1, "no array for input 'attention_mask'"),
        (FEEDS | {"input_ids": IDS.astype(np.float32)}, 1, "takes int64, the array is float32"),
        (FEEDS | {"input_ids": IDS + 10**6}, 1, "onnxruntime"),
    ):
        np.savez(path, **arrays)
        assert text in cli.line(code, "run", ENCODER, "--inputs", path)
    path.write_bytes(b"not a zip")
    assert cli("run", ENCODER, "--inputs", path).code == 1


def test_bench_prints_a_ratio(cli: Cli, tmp_path: Path) -> None:
    report = cli.report("bench", ENCODER, "--repeat", 3)
    assert "fused / original:" in cli.last.out
    low, high = report["noise"]
    assert 0 < low <= report["ratio"] <= high
    quotient = report["fused"]["median"] / report["original"]["median"]
    assert report["ratio"] == pytest.approx(quotient)
    assert report["original"]["low"] <= report["original"]["median"] <= report["original"]["high"]


def test_bench_times_a_training_step(cli: Cli, tmp_path: Path) -> None:
    model = tmp_path / "linear.onnx"
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 17]>
        agraph (float[B,4] x) => (float[B,3] y) { y = Gemm (x, w) }""")
    array = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    onnx.save(proto, model)
    data = cli.report("bench", model, "--train", "--repeat", 2, "--threads", 1)
    assert data["clock"] == "CPU time of one thread"
    assert data["feeds"]["labels"] == data["feeds"]["x"][:1]
    assert data["memory"] == [None, None]


def test_bench_times_the_backward_too(cli: Cli, tmp_path: Path) -> None:
    report = cli.report("bench", ENCODER, "--grad", "--repeat", 2)
    assert "pooler_output.grad" in report["feeds"]
    assert cli("bench", ENCODER, "--grad", "--html", tmp_path / "r.html").code == 2


def test_inspect_shows_models_side_by_side(cli: Cli, tmp_path: Path, saved: Save) -> None:
    models = cli.report("inspect", ENCODER, saved(RELU, "relu.onnx"))["models"]
    assert all(text in cli.last.out for text in ("encoder.onnx", "relu.onnx", "float [N, 4]"))
    assert [m["nodes"] for m in models] == [76, 1]
    assert models[1]["ops"] == {"Relu": 1}


def test_several_files_are_fused_into_a_folder(cli: Cli, tmp_path: Path, saved: Save) -> None:
    models, folder = [saved(RELU, "a.onnx"), saved(RELU, "b.onnx")], tmp_path / "fused"
    assert cli("optimize", *models, "-o", folder).code == 0
    assert sorted(p.name for p in folder.iterdir()) == ["a.fused.onnx", "b.fused.onnx"]
    assert cli("optimize", *models, "--no-check").code == 0
    assert (tmp_path / "b.fused.onnx").is_file()
    assert "one MODEL" in cli.fails(2, "optimize", *models, "--json", tmp_path / "r.json")
    assert "a.fused.onnx" in cli.fails(2, "optimize", models[0], models[0], "-o", folder)
    for file in (models[0], tmp_path / "new.onnx"):
        assert "written into a folder" in cli.fails(2, "optimize", *models, "-o", file)
    assert not (tmp_path / "new.onnx").exists()


BRANCHED = """g (float[N,4] x, bool c, float[N,4] u) => (float[N,4] y, float[N,4] z)
    <float[4,4] w = {1,2,3,4, 5,6,7,8, 1,0,1,0, 0,1,0,1}>
    { a = MatMul (x, w)
      b = Relu (a)
      d = If (c) <then_branch = t () => (float[N,4] e) { e = Add (b, a) },
                  else_branch = f () => (float[N,4] e) { e = Neg (b) }>
      y = Mul (d, b)  z = Exp (u) }"""


def test_two_parts_make_the_whole(cli: Cli, tmp_path: Path, saved: Save) -> None:
    """A branch reads the first part's values, and what nobody reads any more is no input."""
    model, first, second = saved(BRANCHED), tmp_path / "1.onnx", tmp_path / "2.onnx"
    parts = cli.report("extract", model, "--to", "a,b", "-o", first)["models"]
    assert list(parts[1]["ops"]) == ["MatMul", "Relu"]
    cli.report("extract", model, "--from", "a", "--from", "b", "--to", "y", "-o", second)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    whole, one, two = (ort.InferenceSession(str(p)) for p in (model, first, second))
    assert [v.name for v in two.get_inputs()] == ["a", "b", "c"]
    for c in (True, False):
        (y, _) = whole.run(None, {"x": x, "c": np.array(c), "u": x})
        inner = dict(zip("ab", one.run(None, {"x": x}), strict=True))
        assert_same(two.run(None, {**inner, "c": np.array(c)}), [y])
    assert "did you mean 'y'" in cli.fails(2, "extract", model, "--to", "Y")
    assert not cli("extract", model, "--html", tmp_path / "part.html").code


def test_doctor(cli: Cli, tmp_path: Path) -> None:
    report = cli.report("doctor")
    assert report["cpu"] == "ok"
    assert report["versions"]["onnxruntime"] == ort.__version__
    assert "ONNX_FUSE_CACHE_DIR" in report["settings"]
    assert all(line.startswith(("ok: ", "not usable: ")) for line in report["cuda"])
    for missing in report["missing"]:
        assert missing["without"]
        assert missing["install"].startswith('pip install ".[')


def gone(*_: object) -> Any:
    raise RuntimeError("the library\nwas not found")


# what is wrong -> (what to replace by what, what doctor and a session say about it)
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no packages": (
        {"modules": ("cuda.bindings", "cuda.bindings.driver", "cuda.core")},
        r'pip install "\.\[cuda13\]"',
    ),
    "no driver": (
        {"cuInit": gone},
        r"no NVIDIA driver .*\(the library was not found\).*--gpus all",
    ),
    "a driver that fails": (
        {
            "cuInit": lambda flags: (driver.CUresult.CUDA_ERROR_SYSTEM_NOT_READY,),
            "cuGetErrorName": lambda result: (OK, result.name.encode()),
            "cuGetErrorString": lambda result: (OK, b"system not yet initialized"),
        },
        "the NVIDIA driver does not start.*SYSTEM_NOT_READY",
    ),
    "no GPU": (
        {"cuInit": lambda flags: (OK,), "cuDeviceGetCount": lambda: (OK, 0)},
        "GPU 0 does not exist: this machine has 0",
    ),
}
COMPILER_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no cuda-core": ({"modules": ("cuda.core",)}, r'cuda-core.*pip install "\.\[cuda13\]"'),
    "no NVRTC": ({"nvrtcVersion": gone}, "NVRTC.*not found.*: pip install nvidia-cuda-nvrtc"),
    "an old driver": (
        {"cuDriverGetVersion": lambda: (OK, 12080)},
        "runs CUDA 12 at most.*update the driver to one for CUDA 13",
    ),
    "an old NVRTC": (
        {"nvrtcVersion": lambda: (OK, 12, 9)},
        r"NVRTC 12.9 is not supported.*pip install 'nvidia-cuda-nvrtc>=13,<14'",
    ),
}


def break_cuda(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.setattr(device, "_thread", threading.local())
    nvrtc.nvrtc_version.cache_clear()
    for name, value in changes.items():
        if name == "modules":
            for module in value:
                monkeypatch.setitem(sys.modules, module, None)
        else:
            monkeypatch.setattr(bindings_nvrtc if name.startswith("nvrtc") else driver, name, value)


@pytest.mark.parametrize("name", [*FAULTS, *COMPILER_FAULTS])
def test_doctor_names_what_is_missing_and_what_mends_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    changes, text = (FAULTS | COMPILER_FAULTS)[name]
    break_cuda(monkeypatch, changes)
    lines = cli.report("doctor")["cuda"]
    nvrtc.nvrtc_version.cache_clear()
    assert any(re.search(f"^not usable: .*{text}", line) for line in lines), lines
    assert all("\n" not in line and len(line) < 400 for line in lines)


@pytest.mark.parametrize("name", FAULTS)
def test_a_session_without_a_gpu_is_one_line_and_exit_1(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    break_cuda(monkeypatch, FAULTS[name][0])
    err = cli.fails(1, "run", ENCODER, "--device", "cuda")
    assert re.search(f"^onnx-fuse: .*{FAULTS[name][1]}[^\n]*\n$", err), err


def test_compiling_without_the_bindings_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvrtc.nvrtc_version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r'CUDA bindings.*pip install "\.\[cuda13\]"'):
        nvrtc.nvrtc_version()


@pytest.mark.parametrize("name", COMPILER_FAULTS)
def test_compiling_without_a_compiler_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))
    break_cuda(monkeypatch, COMPILER_FAULTS[name][0])
    with pytest.raises(DeviceError, match=COMPILER_FAULTS[name][1]):
        nvrtc.compile('extern "C" __global__ void f() {}\n')
    nvrtc.nvrtc_version.cache_clear()


# ---- the process -----------------------------------------------------------------------------

USAGE = [
    ("optimize", "--bogus"),
    ("nothing",),
    ("optimize",),
    ("optimize", ENCODER, "--level", "9"),
    ("optimize", ENCODER, "--skip", "NoSuchFusion", "--no-check"),
    ("run", ENCODER, "--device", "tpu"),
    ("run", ENCODER, "--explain"),
    ("run", ENCODER, "--providers", "OpenVINOExecutionProvider"),
    ("run", ENCODER, "--providers", "CpuExecutionProvider"),
    ("run", ENCODER, "--providers", "CPUExecutionProvider", "--profile"),
    ("train", ENCODER, "--data", "x.npz", "--loss", "mse", "--explain"),
    ("optimize", ENCODER, "--target", "abacus"),
    ("inspect",),
    ("bench", ENCODER, "--train", "--grad"),
    ("bench", ENCODER, "--mode", "end2end"),
    ("bench", ENCODER, "--mode", "other"),
    ("bench", ENCODER, "--against", "ort:cuda"),
    ("bench", ENCODER, "--against", "gpu"),
    ("bench", ENCODER, "--against", "ort:cpu", "--grad"),
    ("bench", ENCODER, "--providers", "CPUExecutionProvider", "--device", "cuda"),
    ("validate", ENCODER, "--providers", "CpuExecutionProvider"),
    ("bench", ENCODER, "--precision", "fp16"),
    ("bench", ENCODER, "--device", "cuda", "--threads", 1),
    ("bench", ENCODER, "--device", "tpu"),
    ("validate", ENCODER, "--op"),
    ("validate", ENCODER, "--precision", "fp16"),
    ("validate", ENCODER, "--precision", "fp16", "--grad"),
    ("validate", ENCODER, "--precision", "fp16", "--device", "cuda", "--blame"),
]


@pytest.mark.parametrize("arguments", USAGE, ids=lambda a: " ".join(map(str, a)))
def test_usage_errors_are_exit_2(cli: Cli, arguments: tuple[object, ...]) -> None:
    err = cli.fails(2, *arguments)
    assert "Traceback" not in err
    assert err


def test_what_breaks_the_graph_is_named(cli: Cli, tmp_path: Path) -> None:
    text = "agraph (float[B, S] x, float[B, T] m) => (float[B, S] y) { y = Add(x, m) }"
    save(text_model(text), tmp_path / "m.onnx")
    err = cli.fails(1, "validate", tmp_path / "m.onnx", "--dim", "S=3", "T=5")
    assert "with x [2, 3], m [2, 5]" in err
    err = cli.fails(2, "validate", "--op", "LayerNormGem")
    assert "no operator 'LayerNormGem' with a body (did you mean 'LayerNormGemm'?)" in err


def test_version(cli: Cli) -> None:
    import onnx_fuse

    for option in ("-v", "--version"):
        assert cli(option).out == f"onnx-fuse {onnx_fuse.__version__}\n"


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onnx_fuse", "optimize", str(tmp_path / "none.onnx")]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    debug = subprocess.run([*command, "--debug"], capture_output=True, text=True, check=False)
    assert plain.returncode == debug.returncode == 1
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onnx_fuse", "optimize", str(encoder(tmp_path))]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""
    assert (tmp_path / "encoder.fused.onnx").exists()


@pytest.mark.usefixtures("signals_end")
def test_ctrl_c_ends_quietly(tmp_path: Path) -> None:
    fifo = tmp_path / "slow.onnx"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "onnx_fuse", "optimize", str(fifo)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    writer = os.open(fifo, os.O_WRONLY)  # opens once the command reads
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    os.close(writer)
    assert process.returncode == 130
    assert err == "onnx-fuse: interrupted\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["slow.onnx"]


def test_a_program_for_a_target_takes_sizes_that_the_graph_runs_with() -> None:
    """Where N % 4 + `more` is neither 1 nor 4 the sum has no shape; nothing else says so."""
    text = """agraph (float[N] x) => (float[M] y)
      <int64[1] four = {{4}}, int64[1] more = {{{more}}}, float[4] c = {{1, 2, 3, 4}}> {{
        n = Shape (x) r = Mod (n, four) s = Add (r, more) z = ConstantOfShape (s) w = Add (z, c)
        a = ReduceSum (x) y = Add (w, a) }}"""
    assert bench.program(text_model(text.format(more=1)), CHIPS["H200"]).calls
    with pytest.raises(ModelError, match="do not broadcast"):
        bench.program(text_model(text.format(more=9)), CHIPS["H200"])
