"""Gated products: one call where an epilogue makes the gate, else their parts."""

import numpy as np
import onnx_ir
import pytest
from lowering import lowered, program_of, weights_of
from support import with_weights

from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import cublaslt
from onnx_fuse.lower import folds
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS, GemmProblem
from onnx_fuse.rewrite import optimize
from onnx_fuse.runtime import graphs

GATED = """<ir_version: 10, opset_import: ["": 21, "onnx_fuse": 1]>
agraph ({kind}[B,64] x) => ({kind}[B,N] y) {{ y = onnx_fuse.{op} (x, {norm}w, c) }}"""
KINDS = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}


def gated_model(op, dtype="float32", columns=48, rows=32):
    """A gated product of constant weights, and x and what it should give."""
    rng = np.random.default_rng(4)
    norm = {"L": "g, b, ", "R": "g, "}.get(op[0], "")
    model = text_model(GATED.format(kind=KINDS[dtype], op=op, norm=norm))
    kind = onnx_ir.DataType[dtype.upper() if dtype != "float32" else "FLOAT"].numpy()
    arrays = {
        "w": rng.standard_normal((64, 2 * columns)) / 8,
        "c": rng.standard_normal(2 * columns),
    }
    arrays |= {"g": rng.standard_normal(64), "b": rng.standard_normal(64)}
    arrays = {name: array.astype(kind) for name, array in arrays.items()}
    with_weights(model, arrays)
    x = rng.standard_normal((rows, 64)).astype(kind)
    wide = {name: array.astype(np.float64) for name, array in (*arrays.items(), ("x", x))}
    h = wide["x"]
    if norm:
        h = h - h.mean(-1, keepdims=True) * (op[0] == "L")
        h = h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-5) * wide["g"] + wide["b"] * (
            op[0] == "L"
        )
    first, last = np.split(h @ wide["w"] + wide["c"], 2, -1)
    gate, other = (first, last) if "First" in op else (last, first)
    return model, {"x": x}, gate / (1 + np.exp(-gate)) * other


@pytest.mark.parametrize("chip", ["H200", "A100", "B200"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("place", ["GateFirst", "GateLast"])
@pytest.mark.parametrize("norm", ["", "LayerNorm", "RMSNorm"])
def test_a_gated_product_of_constant_weights_is_one_call(norm, place, dtype, chip):
    model, feeds, want = gated_model(f"{norm}{place}GemmSilu", dtype)
    program = program_of(model, feeds, hw=CHIPS[chip])
    (call,) = program.calls
    assert call.problem.epilogue.gate
    assert dict(call.writes)["y"].shape == (32, 48)
    if norm and dtype == "float32":
        return  # the norm is in the launches
    bound = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]  # roundings of w and y
    got = interpret(program, feeds, {})["y"].astype(np.float64)
    assert np.abs(got - want).max() <= bound * np.abs(want).max()


@pytest.mark.parametrize(
    ("columns", "rows", "calls"),
    [(48, 32, 1), (44, 32, 2), (48, 0, 0)],  # no whole blocks of 8 gates; no element
)
@pytest.mark.parametrize("op", ["GateFirstGemmSilu", "RMSNormGateLastGemmSilu"])
def test_a_gated_product_that_no_epilogue_makes_is_its_parts(op, columns, rows, calls):
    model, feeds, want = gated_model(op, "float16", columns, rows)
    program = program_of(model, feeds)
    assert not program.fallbacks
    assert len(program.calls) == calls
    got = interpret(program, feeds, weights_of(model))["y"].astype(np.float64)
    assert got.shape == (rows, columns)
    assert not rows or np.abs(got - want).max() <= 4e-3 * np.abs(want).max()


def test_a_gated_product_of_computed_weights_is_its_parts():
    text = """agraph (float16[B,64] x, float16[64,96] w, float16[96] c) => (float16[B,48] y)
    { y = onnx_fuse.GateFirstGemmGelu (x, w, c) }"""
    program = lowered(text, size=4)
    assert [isinstance(call.problem, GemmProblem) for call in program.calls] == [True, False]


def test_a_kernel_without_that_epilogue_may_be_asked_for(monkeypatch):
    model, feeds, _ = gated_model("GateFirstGemmSilu", "float16")
    (call,) = program_of(model, feeds, prefs={"Gemm": "mma"}).calls
    assert call.problem.epilogue.gate
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    product, over = program_of(model, feeds, prefs={"Gemm": "cublaslt"}).calls
    assert "cublaslt" in product.why
    assert not product.problem.epilogue.gate
    assert over.kernel == "Silu+Mul"


@pytest.mark.parametrize("changed", ["w", "g"])
def test_weights_that_are_given_anew_are_packed_anew(changed):
    """A program of other shapes takes what was packed before, unless the weights are others."""
    model, feeds, _ = gated_model("RMSNormGateFirstGemmSilu", "float16")
    first = interpret(program_of(model, feeds), feeds, {})["y"]
    value = model.graph.initializers[changed]
    other = value.const_value.numpy() * np.float16(2)
    value.const_value = onnx_ir.tensor(other, name=changed)
    second = interpret(program_of(model, feeds), feeds, {})["y"]
    assert np.abs(second.astype(np.float32) - first).max() > 0.1


def test_a_stored_graph_has_the_weights_that_lowering_made_where_there_is_room():
    model, feeds, _ = gated_model("RMSNormGateFirstGemmSilu", "float16")
    program_of(model, feeds)
    assert not model.graph.meta.get(
        "packed"
    )  # no copy in the order of the kernel but the folded one
    shapes = [(64, 96), (64, 96), (96,), (96,)]  # w; wq, cs, cv
    for room, stored in ((26_000, shapes), (25_000, shapes[:1]), (12_000, None)):
        kept = graphs.parts(model, beside=False, limit=room)
        assert (kept and [array.shape for array in kept.tensors.values()]) == stored
        assert kept is None or bool(kept.manifest["folded"]) == (len(kept.tensors) > 1)


def test_a_gated_fold_beyond_float16_leaves_the_norm_beside_the_product():
    model, feeds, _ = gated_model("RMSNormGateFirstGemmSilu", "float16")
    feeds["x"][:, 0] = 0  # the row of weights that the scale makes infinite
    g, w = (weights_of(model)[name].copy() for name in "gw")
    w[0] = 2
    with_weights(model, {"w": w})
    answers = []
    for first in (65504, 1):
        g[0] = first
        with_weights(model, {"g": g.copy()})
        (call,) = program_of(model, feeds).calls
        assert call.problem.folded == (first == 1)
        answers.append(interpret(program_of(model, feeds), feeds, weights_of(model))["y"])
    np.testing.assert_allclose(*answers, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("rows", [1, 5])  # a token's weights stand as [n, k]
def test_products_that_are_merged_stay_apart_until_they_are_folded(rows):
    text = """<ir_version: 10, opset_import: ["": 23]> agraph (float16[B,64] x) =>
    (float16[B,64] a, float16[B,32] b, float16[B,16] c) { n = RMSNormalization (x, g)
    a = MatMul (n, u) b = MatMul (n, v) c = MatMul (n, w) }"""
    rng, model = np.random.default_rng(5), text_model(text)
    shapes = {"g": (64,), "u": (64, 64), "v": (64, 32), "w": (64, 16)}
    arrays = {name: rng.standard_normal(s).astype(np.float16) / 8 for name, s in shapes.items()}
    with_weights(model, arrays)
    optimize(model, own_kernels=True)
    merged = next(v.const_value for v in model.graph.initializers.values() if len(v.shape) == 2)
    feeds = {"x": rng.standard_normal((rows, 64)).astype(np.float16)}
    programs = [program_of(model, feeds)]
    assert len(merged.apart) == 3
    assert merged.nbytes == merged.numpy().nbytes
    np.testing.assert_array_equal(merged.numpy(), np.hstack([arrays[name] for name in "uvw"]))
    assert not merged.apart
    del model.graph.meta["folded"]
    programs.append(program_of(model, feeds))
    (first, second) = (interpret(program, feeds, {}) for program in programs)
    n = feeds["x"].astype(np.float64)
    n = n / np.sqrt((n**2).mean(-1, keepdims=True) + 1e-5) * arrays["g"]
    for name, weight in zip("abc", "uvw", strict=True):
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], n @ arrays[weight], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_fold_knows_which_numbers_are_infinite(name):
    dtype = onnx_ir.DataType[name.upper()].numpy()
    limit = np.float32(folds.least_infinite(dtype))
    with np.errstate(over="ignore"):
        below, there = np.array([np.nextafter(limit, np.float32(0)), limit]).astype(dtype)
    assert np.isfinite(below)
    assert not np.isfinite(there)


def test_a_program_is_known_before_its_weights_are_made(monkeypatch):
    """So that its kernels are compiled meanwhile; one of no use is followed by another."""
    model, feeds, _ = gated_model("RMSNormGateFirstGemmSilu", "float16")
    events, keep = [], folds.Folds.keep
    monkeypatch.setattr(folds.Folds, "keep", lambda made: events.append("kept") or keep(made))
    program = program_of(model, feeds, chosen=lambda program, made: events.append(program))
    assert events == [program, "kept"]
    with_weights(model, {"w": np.full((64, 96), 65504, np.float16)})
    made = []
    program_of(model, feeds, chosen=lambda program, is_made: made.append(
        [is_made(array) for array in program.constants.values()]
    ))  # fmt: skip
    first, second = made
    assert not all(first)
    assert all(second)


def test_each_pass_of_a_loop_has_its_own_shapes():
    text = """agraph (float[A] x) => (float[B] y)
    { n = Constant <value = int64 {3}> () c = Constant <value = bool {1}> ()
      y = Loop (n, c, x) <body = inner (int64 i, bool ci, float[P] v) => (bool co, float[Q] w)
      { co = Identity (ci) u = Concat <axis = 0> (v, v) w = Softmax <axis = 0> (u) }> }"""
    program = lowered(text, size=2)
    assert [c.writes[0][1].shape for c in program.calls if c.kernel == "Softmax"] == [
        (4,), (8,), (16,)
    ]  # fmt: skip


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_a_fused_product_of_no_rows_is_no_call(norm):
    text = f"""agraph (float16[B,8] x, float16[8] g, float16[8,4] w, float16[4] c)
    => (float16[B,4] y) {{ y = onnx_fuse.{norm}Gemm (x, g, {"g, " * (norm[0] == "L")}w, c) }}"""
    program = lowered(text, size=0)
    assert not program.fallbacks
    assert dict(program.outputs)["y"].shape == (0, 4)
