"""Training in float8: the operators' arithmetic, the rewrite, its states and its refusals."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from float8_net import net
from lowering import H200, program_of
from support import answers, stock, with_weights

from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import inline, to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.ops.fused.float8 import HISTORY
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS, GemmProblem
from onnx_fuse.program.problems import Float8, PartSums, SlopeProduct
from onnx_fuse.training import optim
from onnx_fuse.training.adapters import Lora
from onnx_fuse.training.step import training_model
from onnx_fuse.training.trainer import Trainer

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
M, K, N = 32, 16, 48
SAVED = "y, xn, wn, z, xt, wq, xs, ws"
NAME = "onnx_fuse.Float8LinearSilu_z_xt_wq_xscale_wscale(x, w, c, hx, hw, hz)"
INPUTS = (
    f"float[{M},{K}] x, float[{K},{N}] w, float[{N}] c, float[16] hx, float[16] hw, float[16] hz"
)
LINEAR = (
    f"agraph ({INPUTS}) => (float[{M},{N}] y, float[16] xn, float[{K},{M}] xf, float xs)"
    f" {{ {SAVED} = {NAME} xf = Cast <to = 1> (xt) }}"
)
BOTH = (
    f"agraph ({INPUTS}, float[{M},{N}] dy) => (float[{M},{N}] y, float[{M},{N}] z, float[16] xn,"
    f" float[16] wn, float[{M},{K}] dx, float[{K},{N}] dw, float[{N}] dc, float[16] zn)"
    f" {{ {SAVED} = {NAME}"
    " dx, dw, dc, zn = onnx_fuse.Float8LinearSiluGrad(dy, xt, wq, xs, ws, hz, z) }"
)


def float8(x: np.ndarray, history: np.ndarray, kind: type) -> tuple[np.ndarray, float]:
    """x / s in float8, and s, as the text of `ops.fused.float8` has them."""
    most, top = float(ml_dtypes.finfo(kind).max), float(history.max())
    s = 1.0 if kind is E4M3 else 2.0**-16
    if top:
        s = 2.0**-60
        while s * most < top and s < 2.0**60:
            s *= 2
    return np.clip(x / s, -most, most).astype(np.float32).astype(kind), s


def next_history(x: np.ndarray, history: np.ndarray) -> np.ndarray:
    return np.append(np.abs(x[np.isfinite(x)]).max(), history[:-1]).astype(np.float32)


def histories(*tops: float) -> list[np.ndarray]:
    """A history each, whose largest number is somewhere."""
    found = [np.linspace(0, top, HISTORY, dtype=np.float32) for top in tops]
    return [np.roll(h, 3 * i) for i, h in enumerate(found)]


def operands(x_top: float, w_top: float, z_top: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    feeds = {
        "x": rng.standard_normal((M, K)),
        "w": rng.standard_normal((K, N)) * 0.1,
        "c": rng.standard_normal(N),
        "dy": rng.standard_normal((M, N)) * 1e-4,
    }
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    return feeds | dict(zip(("hx", "hw", "hz"), histories(x_top, w_top, z_top), strict=True))


def on_onnxruntime(text: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of the bodies."""
    return answers(stock(inline(text_model(text)), optimized=True), feeds)


# largest magnitudes before: none, those of the operands, a power of two's edges, far too small ones
TOPS = [(0, 0, 0), (3.5, 0.4, 4e-4), (448, 7, 57344), (448.1, 7.01, 57345), (1e-30, 0.1, 1e-6)]


@pytest.mark.parametrize("tops", TOPS)
@pytest.mark.parametrize("by", ["body", "kernels"])
def test_products_are_of_rounded_operands(tops: tuple[float, ...], by: str) -> None:
    feeds = operands(*tops)
    if by == "body":
        got = on_onnxruntime(BOTH, feeds)
    else:
        program = program_of(text_model(BOTH), feeds)
        assert not program.fallbacks
        assert [type(call.problem) for call in program.calls] == [
            Float8, Float8, GemmProblem, SlopeProduct, Float8, PartSums, GemmProblem, GemmProblem,
        ]  # fmt: skip
        got = interpret(program, feeds, {})
    (x, sx), (w, sw) = float8(feeds["x"], feeds["hx"], E4M3), float8(feeds["w"], feeds["hw"], E4M3)
    x8, w8 = x.astype(np.float64) * sx, w.astype(np.float64) * sw
    z = x8 @ w8 + feeds["c"]
    gate = 1 / (1 + np.exp(-z))
    dz = (feeds["dy"] * gate * (1 + z * (1 - gate))).astype(np.float32)
    # one rounding's difference in z may be one in float8
    g, sg = float8(dz, feeds["hz"], E5M2)
    g8 = g.astype(np.float64) * sg
    wanted = {"z": z, "y": z * gate, "dx": g8 @ w8.T, "dw": x8.T @ g8, "dc": dz.sum(0)}
    for name, want in wanted.items():
        assert np.linalg.norm(got[name] - want) <= 1e-4 * np.linalg.norm(want), name
    for name, v, h in (("xn", feeds["x"], "hx"), ("wn", feeds["w"], "hw"), ("zn", dz, "hz")):
        np.testing.assert_allclose(got[name], next_history(v, feeds[h]), rtol=1e-5)
    if tops == TOPS[1]:  # scaled to the range, the rounding alone is left
        want = feeds["x"].astype(np.float64) @ feeds["w"] + feeds["c"]
        assert np.linalg.norm(got["z"] - want) < 0.05 * np.linalg.norm(want)


def test_what_is_no_number_stays_and_what_is_infinite_saturates() -> None:
    feeds = operands(448, 7, 1)
    del feeds["dy"]
    feeds["x"][:4, 0] = np.nan, np.inf, -np.inf, -0.0
    got = on_onnxruntime(LINEAR, feeds)
    assert np.isnan(got["xf"][0, 0])
    np.testing.assert_array_equal(got["xf"][0, 1:4] * got["xs"], [448, -448, 0])
    assert np.signbit(got["xf"][0, 3])
    assert np.isnan(got["y"][0]).all()
    assert np.isfinite(got["y"][1:]).all()
    assert got["xn"][0] == np.abs(feeds["x"][np.isfinite(feeds["x"])]).max()


def step(model: ir.Model, **options: object) -> tuple[ir.Model, object]:
    settings = {"loss": "mse", "optimizer": optim.SGD(), "precision": "fp8", "level": 2}
    return training_model(model, fused=True, **settings, **options)


@pytest.mark.parametrize("mode", ["update", "accumulate"])
def test_a_step_has_its_products_in_float8(mode: str) -> None:
    graph, spec = step(net(), mode=mode, accumulate=2 if mode == "accumulate" else 1)
    found = [n.op_type.partition("_")[0] for n in graph.graph]
    assert found.count("Float8Linear") == found.count("Float8LinearGrad") == 1
    assert found.count("Float8LinearRelu") == found.count("Float8LinearReluGrad") == 1
    assert not {"MatMul", "Gemm", "LayerNormGemmRelu"} & set(found)
    states = [s for s in spec.states if s.kind == "history"]
    assert len(states) == 6
    assert all(s.next and not s.initial.any() for s in states)
    onnx.shape_inference.infer_shapes(to_proto(graph), check_type=True, strict_mode=True)


def test_an_evaluation_is_in_bfloat16() -> None:
    graph, spec = step(net(), mode="evaluate")
    assert not [n for n in graph.graph if "Float8" in n.op_type]
    assert all(s.kind != "history" for s in spec.states)


def test_products_of_other_sizes_stay_in_bfloat16() -> None:
    graph, _ = step(net(hidden=48 + 16))
    assert sum("Float8Linear" in n.op_type and "_" in n.op_type for n in graph.graph) == 2
    with pytest.raises(UsageError, match="multiples of 16: use precision 'bf16'"):
        step(net(hidden=40))


def test_frozen_layers_below_are_not_rounded_for_a_gradient() -> None:
    graph, spec = step(net(), trainable=["v"])  # which asks for all gradients that it names
    assert sum("Float8Linear" in n.op_type and "_" in n.op_type for n in graph.graph) == 1
    assert sum(s.kind == "history" for s in spec.states) == 3


def rows(count: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros((count, 32), np.float32), "labels": np.zeros((count, 16), np.float32)}


def test_rows_are_multiples_of_16() -> None:
    graph, spec = step(net())
    states = {s.name: s.initial for s in spec.states} | {spec.lr: np.float32(0.1)}
    program = program_of(graph, rows(32) | states)
    kinds = [p.b_dtype for c in program.calls if isinstance(p := c.problem, GemmProblem)]
    # the first layer's dx is read by its norm's gradient
    assert sorted(kinds) == ["float8_e4m3fn"] * 4 + ["float8_e5m2"] * 2
    assert not program.fallbacks
    with pytest.raises(UsageError, match=r"24 x 32.*multiples of 16: choose another batch"):
        program_of(graph, rows(24) | states)


@pytest.mark.parametrize("chip", ["A100", "L4", "B200"])
def test_other_chips_are_refused(chip: str) -> None:
    with pytest.raises(UsageError, match="needs a Hopper GPU"):
        Trainer(net(), loss="mse", precision="fp8", device="cuda", hardware=CHIPS[chip])


def test_the_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a GPU"):
        Trainer(net(), loss="mse", precision="fp8")


def test_the_histories_are_states_of_a_run() -> None:
    trainer = Trainer(net(), loss="mse", precision="fp8", device="cuda", hardware=H200)
    graph, successors = trainer.graphs()["update"]
    kept = [s for s in trainer.spec("update").states if s.kind == "history"]
    assert {s.name for s in kept} <= set(successors.values())
    assert {s.name for s in kept} <= {v.name for v in graph.graph.inputs}


def test_adapters_train_beside_frozen_weights() -> None:
    settings = {"loss": "mse", "precision": "fp8", "device": "cuda", "hardware": H200}
    trainer = Trainer(net(), lora=Lora(rank=8), **settings)  # products of 8 columns stay
    graph, _ = trainer.graphs()["update"]
    found = [n for n in graph.graph if n.op_type.startswith("Float8Linear")]
    assert [n.op_type.endswith("Grad") for n in found] == [False, True]  # the second layer's


@pytest.mark.parametrize(
    ("how", "weight", "fits"),
    [
        ("", "32,16", True),
        ("<transB = 1>", "16,32", True),
        ("<alpha = 2.0>", "32,16", False),
        ("<transB = 1>", "20,32", False),
    ],
)
def test_a_gemm_of_the_file_is_in_float8(how: str, weight: str, fits: bool) -> None:
    sizes = [int(size) for size in weight.split(",")]
    n = sizes["transB" not in how]
    model = text_model(
        f"agraph (float[B,32] x) => (float[B,{n}] y) <float[{weight}] w = {{"
        f"{', '.join(['0.1'] * (sizes[0] * sizes[1]))}}}, float[{n}] c = {{"
        f"{', '.join(['0'] * n)}}}> {{ y = Gemm {how} (x, w, c) }}"
    )
    if not fits:
        with pytest.raises(UsageError, match="multiples of 16"):
            step(model)
        return
    graph, spec = step(model)
    states = {s.name: s.initial for s in spec.states} | {spec.lr: np.float32(0.1)}
    labels = np.zeros((32, n), np.float32)
    program = program_of(graph, rows(32) | {"labels": labels} | states)
    kinds = [type(c.problem) for c in program.calls]
    assert not program.fallbacks
    assert (kinds.count(Float8), kinds.count(GemmProblem)) == (3, 2)  # x needs no gradient


def test_an_activation_keeps_its_number() -> None:
    model = net()
    relu = next(n for n in model.graph if n.op_type == "Relu")
    relu.op_type = "LeakyRelu"
    relu.attributes["alpha"] = ir.AttrFloat32("alpha", 0.25)
    graph, _ = step(model)
    both = [n for n in graph.graph if n.op_type.startswith("Float8LinearLeakyRelu")]
    assert [n.attributes.get_float("alpha", 0.0) for n in both] == [0.25, 0.25]


def test_a_product_of_two_results_stays_in_bfloat16() -> None:
    model = text_model(
        "agraph (float[32,32] x, float[32,32] w) => (float[32,32] y)"
        " { h = MatMul(x, w) t = Transpose <perm = [1, 0]> (h) y = MatMul(h, t) }"
    )
    graph, _ = step(with_weights(model, {"w": np.eye(32, dtype=np.float32)}))
    assert sum(n.op_type.startswith("Float8Linear_") for n in graph.graph) == 1
    assert sum(n.op_type == "MatMul" for n in graph.graph) >= 1
