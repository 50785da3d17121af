"""float8 on a GPU: rounding with its transpose and history, and products of float8 operands."""

import ml_dtypes
import numpy as np
import pytest
from curves import gelu
from float8_net import net
from on_device import TYPES, Memory, error, results, wide

from onnx_fuse.kernels.float8 import Rounding
from onnx_fuse.kernels.gemm_fp8 import E4M3, E5M2, EightBits
from onnx_fuse.program.problem import GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.problems import Float8
from onnx_fuse.training import optim
from onnx_fuse.training.trainer import Trainer

F8 = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
STEPS = 4


@pytest.fixture(scope="module")
def hw() -> Hardware:
    found = Hardware.detect(0)
    if found.arch != "sm_90a":
        pytest.skip("products of float8 are Hopper's")
    return found


def rounded(x: np.ndarray, history: np.ndarray, kind: str) -> tuple[np.ndarray, np.float32]:
    """x / scale, saturated and rounded, and the scale."""
    most = float(ml_dtypes.finfo(F8[kind]).max)
    top = float(history.max())
    powers = 2.0 ** np.arange(-60, 61)
    start = 1.0 if kind == E4M3 else 2.0**-16
    scale = start if top == 0 else next((s for s in powers if s * most >= top), powers[-1])
    y = np.clip(x.astype(np.float64) / scale, -most, most)
    return y.astype(np.float32).astype(F8[kind]), np.float32(scale)


ROUNDINGS = [
    Float8(m, k, dtype, kind, STEPS)
    for m, k in ((16, 16), (144, 272), (512, 128), (1008, 400))
    for dtype in ("float32", "bfloat16", "float16")
    for kind in (E4M3, E5M2)
]


@pytest.mark.parametrize("problem", ROUNDINGS, ids=str)
@pytest.mark.parametrize("top", [0.0, 3.0, 448.0, 449.0, 2.0**-100])
def test_rounding(problem: Float8, top: float, hw: Hardware) -> None:
    m, k, dtype, kind = problem.m, problem.k, problem.dtype, problem.kind
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((m, k)) * 40).astype(TYPES[dtype])
    x.flat[:4] = np.nan, np.inf, -np.inf, -0.0
    history = np.array([0, top, top / 2, 0], np.float32)
    q, scale = rounded(x, history, kind)
    empty = np.full((m, k), 0x55, np.uint8)
    given = {"x": x, "history": history, "q": empty, "qt": empty.T.copy(),
             "scale": np.float32([0]), "next": np.full(STEPS, np.nan, np.float32)}  # fmt: skip
    given["part"] = np.full((-(-m // 128), k), np.nan, np.float32)
    memory = Memory(given)
    (call,) = memory.bind(Rounding(), problem, KernelConfig(), hw)
    for _ in range(2):  # what it counts by is zero again
        call.enqueue(memory.stream.handle)
    memory.stream.wait("rounding")
    assert memory.read("scale")[0] == scale
    got = memory.read("q")
    same = (got == q.view(np.uint8)) | np.isnan(wide(q))
    assert same.all()
    assert np.isnan(wide(got.view(F8[kind]))).sum() == 1
    np.testing.assert_array_equal(memory.read("qt"), got.T)
    with np.errstate(invalid="ignore"):  # of both infinities
        sums = np.add.reduceat(wide(x), np.arange(0, m, 128), axis=0)
    np.testing.assert_allclose(memory.read("part"), sums, rtol=1e-5, atol=1e-2)
    largest = np.abs(wide(x)[np.isfinite(wide(x))]).max()
    np.testing.assert_array_equal(memory.read("next"), [largest, *history[:-1]])


def product(m: int, n: int, k: int, a: str, b: str, **attrs: object) -> GemmProblem:
    return GemmProblem.of("Gemm", m=m, n=n, k=k, dtype=a, b_dtype=b, trans_b=True, **attrs)


BF16 = {"out_dtype": "bfloat16"}
PRODUCTS = [
    *(product(*size, E4M3, E4M3, **BF16) for size in ((272, 400, 272), (16, 16, 16))),
    *(product(128, 256, 1040, a, b, **BF16) for a, b in ((E5M2, E4M3), (E4M3, E5M2))),
    product(64, 192, 2064, E4M3, E5M2, out_dtype="float32"),
    product(144, 208, 272, E4M3, E4M3, bias=True, act="gelu", save_z=True, **BF16),
    product(144, 208, 272, E5M2, E4M3, residual=True, **BF16),
    product(144, 208, 272, E5M2, E4M3, dact=True, act="gelu", **BF16),
]


@pytest.mark.parametrize("problem", PRODUCTS, ids=str)
def test_products(problem: GemmProblem, hw: Hardware) -> None:
    m, n, k, out = problem.m, problem.n, problem.k, TYPES[problem.out]
    rng, kernel = np.random.default_rng(7), EightBits()
    a = rng.standard_normal((m, k)).astype(np.float32).astype(F8[problem.dtype])
    b = rng.standard_normal((n, k)).astype(np.float32).astype(F8[problem.b_dtype])
    bias, c = rng.standard_normal(n).astype(out), rng.standard_normal((m, n)).astype(out)
    z = want = wide(a) @ wide(b).T * 0.5 + wide(bias) * problem.epilogue.bias
    if problem.epilogue.dact:
        want = z * gelu(wide(c))[1]
    elif problem.epilogue.act:
        want = gelu(z)[0]
    want = want + wide(c) * bool(problem.epilogue.residual)
    given = {"a": a.view(np.uint8), "b": b.view(np.uint8), "col1": bias, "c": c,
             "scale_a": np.float32([4]), "scale_b": np.float32([0.125])}  # fmt: skip
    assert kernel.supports(problem, hw) is None
    hows = sorted(kernel.configs(problem, hw), key=lambda how: kernel.cost(problem, how, hw))
    if problem is not PRODUCTS[0]:
        hows = list(dict.fromkeys([*hows[:2], hows[-1]]))
    # the tensor core's sums of 128 have 14 bits, and y is rounded
    bound = 4e-3 if problem.out == "bfloat16" else 2e-4
    blank = dict.fromkeys("yz", np.full((m, n), np.nan).astype(out))
    for how, found in results(problem, hw, given, blank, [(kernel, how) for how in hows]):
        assert error(found["y"], want) <= bound, how
        if problem.epilogue.save_z:
            assert error(found["z"], z) <= bound, how


def test_training_follows_bfloat16(hw: Hardware) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((20, 64, 32)).astype(np.float32)
    labels = np.tanh(x @ rng.standard_normal((32, 16)).astype(np.float32) * 0.2)

    def losses(precision: str) -> list[float]:
        optimizer = optim.AdamW(lr=0.01)
        trainer = Trainer(
            net(), loss="mse", precision=precision, optimizer=optimizer, device="cuda"
        )
        feeds = [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)] * 5
        return [float(loss) for loss in [trainer.step(each) for each in feeds]]

    full, eight = losses("bf16"), losses("fp8")
    assert eight == losses("fp8")
    # on a CPU, rounded likewise by PyTorch, float8 ends 0.001 of the first losses apart
    assert np.mean(eight[-20:]) < 0.5 * np.mean(eight[:5])
    assert abs(np.mean(eight[-20:]) - np.mean(full[-20:])) < 0.02 * np.mean(full[:5])
