"""LayerNormGemmGrad's candidates on a GPU: each legal one against NumPy in float64."""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import on_device
import pytest
from curves import gelu
from on_device import TOLERANCE, TYPES, Way, error, poison, random, results, wide

from onnx_fuse.kernels.layernorm_gemm_grad import PortableTwoGemms
from onnx_fuse.program.problem import GemmProblem, Hardware, KernelConfig

GRADIENTS = [
    GemmProblem.of("LayerNormGemmGrad", m=m, k=264, n=520, dtype=dtype, act=act)
    for m, dtype, act in (
        (384, "bfloat16", ""), (384, "bfloat16", "gelu"), (200, "float16", ""),
        (33, "bfloat16", "gelu"), (32, "float16", ""), (16, "bfloat16", ""),
        (5, "float16", "gelu"), (1, "bfloat16", ""),
    )
] + [
    GemmProblem.of("LayerNormGemmGrad", m=m, k=k, n=n, dtype="bfloat16", folded=True)
    for m, k, n in ((260, 4104, 136), (40, 520, 136), (2056, 1160, 1800))  # dw's steps are shared
] + [
    GemmProblem.of("LayerNormGemmGrad", m=m, k=k, n=136, dtype=dtype, add=add)
    for m, k in ((384, 264), (260, 4104), (12, 520))
    for dtype, add in (("bfloat16", "here"), ("float16", "apart"))
] + [
    GemmProblem.of("LayerNormGemmGrad", m=m, k=k, n=136, dtype="bfloat16", rms=True, **attrs)
    for m, k, attrs in (
        (384, 264, {"act": "gelu"}), (260, 4104, {"folded": True, "add": "here"}), (260, 520, {}),
        (40, 520, {"folded": True}), (12, 264, {"act": "gelu", "add": "apart"}),
    )
] + [
    GemmProblem.of("LayerNormGemmGrad", m=m, k=k, n=136, math=math, **attrs)
    for m, k, attrs in (
        (384, 264, {}), (200, 1032, {"act": "gelu"}), (33, 264, {"add": "here"}),
        (16, 520, {"act": "gelu", "rms": True}), (4200, 72, {}),
    )
    for math in ("bf16x3", "bf16x6")
] + [  # w and dw as [n, k]
    GemmProblem.of("LayerNormGemmGrad", m=m, k=k, n=n, dtype=dtype, trans_b=True, **attrs)
    for m, k, n, dtype, attrs in (
        (384, 264, 520, "bfloat16", {}), (200, 264, 136, "float16", {"act": "gelu"}),
        (260, 4104, 136, "bfloat16", {"add": "here"}), (1030, 520, 264, "bfloat16", {"rms": True}),
        (17, 72, 1032, "float16", {}),
    )
] + [  # dx alone
    GemmProblem.of("LayerNormGemmGrad", m=m, k=k, n=136, dtype=dtype, frozen=True, **attrs)
    for m, k, dtype, attrs in (
        (384, 264, "bfloat16", {"act": "gelu"}), (384, 264, "float32", {"math": "bf16x3"}),
        (260, 4104, "bfloat16", {"folded": True, "add": "here"}),
        (200, 264, "float16", {"trans_b": True}), (12, 520, "bfloat16", {}),
    )
] + [  # float32 as it is; sizes that are no multiples of anything
    GemmProblem.of("LayerNormGemmGrad", m=m, k=k, n=n, math=math, **attrs)
    for m, k, n, attrs in (
        (384, 264, 520, {"act": "gelu"}), (1, 264, 136, {}), (33, 61, 77, {"add": "here"}),
        (200, 1032, 136, {"rms": True}), (16, 520, 131, {"act": "gelu"}), (4200, 72, 136, {}),
        (100, 36, 68, {"frozen": True}),
    )
    for math in ("ieee", "tf32", "bf16x3")
] + [
    GemmProblem.of("LayerNormGemmGrad", m=m, k=k, n=n, dtype=dtype, **attrs)
    for m, k, n, attrs in (
        (1, 61, 77, {"act": "gelu"}), (33, 100, 130, {"add": "here"}), (5000, 36, 68, {}),
        (16, 520, 131, {"rms": True}), (200, 61, 136, {"folded": True}),
    )
    for dtype in ("bfloat16", "float16")
]  # fmt: skip
RATIOS = {200: 1000, 33: 10, 16: 100}  # |mean| / std of the rows


@pytest.mark.parametrize("problem", GRADIENTS, ids=str)
def test_layernorm_gemm_grad(problem: GemmProblem, hw: Hardware) -> None:
    ways = on_device.each(problem, hw)
    assert ways or problem.trans_b or problem.add == "apart"
    check(problem, ways, hw)


PRODUCTS = [
    GemmProblem.of("LayerNormGemmGrad", m=200, k=264, n=136, act="gelu", dtype="bfloat16"),
    GemmProblem.of("LayerNormGemmGrad", m=131, k=77, n=145, dtype="float16"),
    GemmProblem.of("LayerNormGemmGrad", m=200, k=264, n=136, act="gelu"),
    GemmProblem.of("LayerNormGemmGrad", m=131, k=77, n=145, rms=True),
    GemmProblem.of("LayerNormGemmGrad", m=200, k=264, n=136, math="tf32"),
    GemmProblem.of("LayerNormGemmGrad", m=523, k=520, n=264, math="tf32", act="gelu", add="here"),
    GemmProblem.of("LayerNormGemmGrad", m=131, k=77, n=145, math="bf16x3", add="here"),
]


@pytest.mark.parametrize("problem", PRODUCTS, ids=str)
def test_portable_gradients_by_every_configuration_of_their_products(
    problem: GemmProblem, hw: Hardware
) -> None:
    kernel = PortableTwoGemms()
    dx, dw = (
        [
            {f"{prefix}_{key}": value for key, value in how.replace(kernel=name).attrs}
            for name, product in products.items()
            for gemm in [kernel._dx(problem, name) if prefix == "dx" else kernel._dw(problem)]
            if product.supports(gemm, hw) is None
            for how in product.configs(gemm, hw)
            if product.fits(gemm, how)
        ]
        for prefix, products in (("dx", kernel.for_dx), ("dw", kernel.for_dw))
    )
    pairs = zip_longest(dx, dw)
    ways = [(kernel, KernelConfig.of(**(one or dx[0]), **(two or dw[0]))) for one, two in pairs]
    check(problem, ways, hw)


def check(problem: GemmProblem, ways: Sequence[Way], hw: Hardware) -> None:
    """Each way's gradients, twice: beside float64's, and the same bits both times."""
    m, k, n, dtype, act = problem.m, problem.k, problem.n, problem.dtype, problem.epilogue.act
    ratio = RATIOS.get(m, 0)
    rng = np.random.default_rng(3)
    x = (random(rng, "float32", m, k) + ratio).astype(TYPES[dtype])
    x[m // 2 : m // 2 + m // 8] = 3.0  # constant rows
    dy = random(rng, dtype, m, n)
    gamma, beta, c = random(rng, dtype, k), random(rng, dtype, k), random(rng, dtype, n)
    gamma[::5] = 0
    w = (random(rng, "float64", k, n) * k**-0.5).astype(TYPES[dtype])
    mean, rstd = on_device.statistics(x, problem.rms)
    beta = beta * (not problem.rms)
    xh = (wide(x) - mean) * rstd
    z = (xh * wide(gamma) + wide(beta)) @ wide(w) + wide(c)
    dz = wide(dy)
    if act:
        dz = dz * gelu(z)[1]
    g = dz @ (wide(gamma)[:, None] * wide(w)).T
    full, dc = xh.T @ dz, dz.sum(0)
    want = {
        "dx": rstd * (g - (not problem.rms) * g.mean(-1, keepdims=True)
                      - xh * (g * xh).mean(-1, keepdims=True)),
        "dgamma": (wide(w) * full).sum(1), "dbeta": wide(w) @ dc,
        "dw": wide(gamma)[:, None] * full + wide(beta)[:, None] * dc, "dc": dc,
    }  # fmt: skip
    given = {"x": x, "dy": dy, "z": z.astype(TYPES[dtype]),
             "mean": mean[:, 0].astype(np.float32), "rstd": rstd[:, 0].astype(np.float32),
             **on_device.norm_operands(gamma, beta, w, c, problem.trans_b)}  # fmt: skip
    # a float32 mean is off by 2^-24 of itself, which is ratio standard deviations
    bound = TOLERANCE[dtype] if dtype != "float32" else TOLERANCE[problem.math] + 6e-8 * ratio
    if problem.rms:
        del given["beta"], given["mean"], want["dbeta"]
    if problem.trans_b:
        want["dw"] = want["dw"].T
    blank = {name: poison(dtype, *v.shape) for name, v in want.items()}
    want = {"dx": want["dx"]} if problem.frozen else want
    if add := problem.add:
        given["add"] = random(rng, dtype, m, k)
        want["dx"] = want["dx"] + wide(given["add"])
        blank |= {"dx": given.pop("add")} if add == "here" else {}
    for how, found in results(problem, hw, given, blank, ways):
        for name, value in want.items():
            assert error(found[name], value) <= bound, f"{how}: {name}"
