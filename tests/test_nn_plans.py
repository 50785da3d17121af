"""Plans of one fused operator: results, saved values and gradients against NumPy."""

from typing import Any

import numpy as np
import pytest
from curves import CURVES

import onnx_fuse as of
from onnx_fuse import UsageError, nn
from onnx_fuse.ops.activations import ACTIVATIONS

RNG = np.random.default_rng(0)
SHAPES = {"x": (4, 8), "scale": (8,), "bias": (8,), "w": (8, 6), "c": (6,)}


def arrays() -> dict[str, Any]:
    return {k: RNG.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}


def test_a_plan_runs_again_and_again_and_gives_what_it_saves() -> None:
    plan = of.plan("LayerNormGemmRelu", SHAPES, save=("mean", "rstd", "z"))
    assert plan.operands == ["x", "scale", "bias", "w", "c"]
    for _ in range(2):
        a = arrays()
        y = plan.forward(*a.values())
        mean = a["x"].mean(1, keepdims=True)
        rstd = 1 / np.sqrt(a["x"].var(1, keepdims=True) + 1e-5)
        z = ((a["x"] - mean) * rstd * a["scale"] + a["bias"]) @ a["w"] + a["c"]
        np.testing.assert_allclose(plan.saved["mean"].numpy(), mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(plan.saved["rstd"].numpy(), rstd, rtol=1e-4)
        np.testing.assert_allclose(plan.saved["z"].numpy(), z, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(y.numpy(), np.maximum(z, 0), rtol=1e-4, atol=1e-5)
        dy = RNG.standard_normal(y.shape).astype(np.float32)
        found = plan.backward(dy)
        tensors = {k: nn.tensor(v, requires_grad=True) for k, v in a.items()}
        n = nn.functional.layer_norm(tensors["x"], 8, tensors["scale"], tensors["bias"])
        (n @ tensors["w"] + tensors["c"]).relu().backward(nn.tensor(dy))
        assert set(found) == set(SHAPES)
        for name, tensor in tensors.items():
            np.testing.assert_allclose(
                found[name].numpy(), tensor.grad.numpy(), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"op": "LayerNormGem"}, r"no fused operator 'LayerNormGem' \(did you mean 'LayerNormGemm"),
        ({"op": "LayerNormGemm_mean"}, "no fused operator"),
        ({"shapes": {"x": (4, 8)}}, "operands x, scale, bias, w, c"),
        ({"save": ("middle",)}, "no inner value 'middle'"),
        ({"attributes": {"alpha": 0.5}}, "LayerNormGemm has no attribute 'alpha'"),
        ({"alpha": 0.5}, "only Gemm takes alpha and beta, not LayerNormGemm"),
    ],
)
def test_what_is_no_plan_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        of.plan(**{"op": "LayerNormGemm", "shapes": SHAPES, **given})


def test_operands_are_those_that_were_planned() -> None:
    plan, a = of.plan("LayerNormGemm", SHAPES), arrays()
    a["c"] = a["c"].astype(np.float64)
    with pytest.raises(UsageError, match=r"the plan's c is float32\[6\], not float64\[6\]"):
        plan.forward(*a.values())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(6,), (1,), (), (4, 1), (4, 6)], ids=str)
@pytest.mark.parametrize("act", ["", "Relu", "LeakyRelu", "Gelu", "Silu", "Tanh"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, -2.0)])
def test_gradients_for_a_bias_of_any_shape(
    alpha: float, beta: float, act: str, shape: tuple[int, ...], dtype: str
) -> None:
    """Bias one a column, one for all, one a row, and one an element; y is act(z)."""
    shapes = {"x": (4, 8), "w": (8, 6), "c": shape}
    given = {k: RNG.standard_normal(s).astype(dtype) for k, s in shapes.items()}
    dy = RNG.standard_normal((4, 6)).astype(dtype)
    save = ("z",) if act else ()
    plan = of.plan(f"Gemm{act}", shapes, dtype, save=save, alpha=alpha, beta=beta)
    y = plan.forward(*given.values()).numpy()
    x, w, c = (v.astype(np.float64) for v in given.values())
    z = alpha * x @ w + beta * c
    value, slope = CURVES[ACTIVATIONS[act].key](z) if act else (z, np.float64(1))
    dz = dy.astype(np.float64) * slope
    axes = tuple(i for i in range(2) if (1, 1, *shape)[-2:][i] == 1)
    dc = beta * (dz.sum(axes).reshape(shape) if axes else dz)
    want = {"x": alpha * dz @ w.T, "w": alpha * x.T @ dz, "c": dc}
    bound = {"float32": 1e-5, "float16": 2e-2}[dtype]  # float16 rounds z and each step of act'
    np.testing.assert_allclose(y, value, rtol=bound, atol=bound)
    if act:
        np.testing.assert_allclose(plan.saved["z"].numpy(), z, rtol=bound, atol=bound)
    found = plan.backward(dy)
    assert set(found) == set(want)
    for name, value in want.items():
        array = found[name].numpy()
        assert (array.shape, array.dtype) == (shapes[name], np.dtype(dtype))
        np.testing.assert_allclose(array, value, rtol=bound, atol=bound)
