"""Moments of the columns of what a product or a convolution stores, and a norm made by them."""

from dataclasses import replace

import numpy as np
import on_device
import pytest
from on_device import TOLERANCE, TYPES, Way, error, poison, random, results, wide

from onnx_fuse.ir.build import text_model
from onnx_fuse.program.interpret.images import column_moments, convolution
from onnx_fuse.program.problem import CHIPS, GemmProblem, Hardware
from onnx_fuse.program.problems import Conv, MergedMoments, Window
from onnx_fuse.runtime.executable import Executable

H200 = CHIPS["H200"]


def check(part: np.ndarray, y: np.ndarray, how: str) -> None:
    """Moments are those of y as it is stored, to a few roundings of float32 whatever the mean."""
    want = column_moments(y)
    some = np.isfinite(want).all(-1)
    assert not np.isfinite(part[~some]).all(-1).any(), how
    (mean, square), (mean64, square64) = wide(part[some]).T, want[some].T
    largest = np.abs(np.nan_to_num(wide(y), posinf=0, neginf=0)).max(0)
    largest = largest * np.ones_like(want[..., 0])
    assert np.all(np.abs(mean - mean64) <= 3e-7 * largest[some]), how
    # sums of 64 differences from one of the numbers: 6e-8 each at worst, and of the mean as much
    assert np.all(np.abs(square - square64) <= 8e-6 * square64), how


def hostile(mean: float, columns: int, dtype: str) -> np.ndarray:
    """A bias: columns about a mean, one that is infinite, and one that is NaN."""
    bias = np.full(columns, mean, TYPES[dtype])
    bias[1:3] = np.inf, np.nan
    return bias


PRODUCTS = [
    GemmProblem.of(
        "Gemm", m=m, n=n, k=264, dtype=dtype, trans_b=trans_b, bias=True, column_moments=True
    )
    for m, n in ((300, 384), (513, 72), (2200, 136), (64, 64), (17, 256), (1, 8), (40000, 328))
    for dtype, trans_b in (("float16", False), ("bfloat16", True))
]  # fmt: skip


@pytest.mark.parametrize("mean", [0, 100])
@pytest.mark.parametrize("problem", PRODUCTS, ids=str)
def test_a_product_leaves_the_moments_of_its_columns(
    problem: GemmProblem, mean: float, hw: Hardware
) -> None:
    """With a mean of 100 the deviation is 0.01 before y is rounded."""
    ways = on_device.each(problem, hw)
    assert ways or hw.arch != "sm_90a"
    assert len(_moments(problem, mean, ways, hw)) <= 1


@pytest.mark.parametrize("trans_b", [False, True])
def test_every_tile_leaves_the_same_moments(trans_b: bool, hw: Hardware) -> None:
    """Sums of 64 rows are in an order of their own, whatever the tile and the cluster."""
    product = GemmProblem.of("Gemm", m=2200, n=136, k=264, dtype="float16", bias=True)
    product = product.replace(column_moments=True, trans_b=trans_b)
    ways = [(k, how) for k, _ in on_device.each(product, hw)[:1] for how in k.configs(product, hw)]
    assert len(_moments(product, 3, ways, hw)) <= 1


def _moments(problem: GemmProblem, mean: float, ways: list[Way], hw: Hardware) -> set[bytes]:
    """The bits that each kernel leaves, after a look at their values."""
    m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
    rng = np.random.default_rng(3)
    b = random(rng, "float32", *((n, k) if problem.trans_b else (k, n)))
    b = (b * (0.01 if mean == 100 else 1) / np.sqrt(k)).astype(TYPES[dtype])
    given = {"a": random(rng, dtype, m, k), "b": b, "col1": hostile(mean, n, dtype)}
    want = wide(given["a"]) @ (wide(b).T if problem.trans_b else wide(b)) + wide(given["col1"])
    blank = {"y": poison(dtype, m, n), "part": poison("float32", -(-m // 64), n, 2)}
    sound, bits = np.isfinite(wide(given["col1"])), set()
    for how, found in results(problem, hw, given, blank, ways):
        y, part = found["y"], found["part"]
        assert error(y[:, sound], want[:, sound]) <= TOLERANCE[dtype], how
        check(part, y, how)
        bits.add(part[:, sound].tobytes())
    return bits


def _conv(channels: int, filters: int, size: int, kernel: int, stride: int, dtype: str) -> Conv:
    pad, outer = kernel // 2, -(-size // stride)
    window = Window(
        (1, kernel, kernel), (1, stride, stride), (1, 1, 1), (0, pad, pad), (0, pad, pad)
    )
    return Conv(
        3, 1, channels, filters, (1, size, size), (1, outer, outer), window, dtype,
        channels_last=True, column_moments=True,
    )  # fmt: skip


CONVS = [
    _conv(72, 40, 15, 3, 1, "float16"), _conv(64, 264, 15, 3, 2, "bfloat16"),
    _conv(8, 64, 30, 1, 2, "float16"), _conv(128, 128, 9, 3, 1, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("problem", CONVS, ids=str)
def test_a_convolution_leaves_the_moments_of_its_channels(problem: Conv, hw: Hardware) -> None:
    rng, taps = np.random.default_rng(4), int(np.prod(problem.window.kernel))
    weight = random(rng, "float32", problem.filters, taps, problem.channels)
    weight /= np.sqrt(taps * problem.channels)
    images = random(rng, problem.dtype, 3, *problem.inner, problem.channels)
    bias = hostile(7, problem.filters, problem.dtype)
    given = {"x": images, "weight": weight.astype(TYPES[problem.dtype]), "bias": bias}
    want = convolution(problem, {k: wide(v) for k, v in given.items()}, wide(images))
    want = want.reshape(-1, problem.filters)
    parts = -(-want.shape[0] // 64)
    blank = {"y": poison(problem.dtype, *want.shape),
             "part": poison("float32", parts, problem.filters, 2)}  # fmt: skip
    sound = np.isfinite(wide(bias))
    for how, found in results(problem, hw, given, blank):
        assert error(found["y"][:, sound], want[:, sound]) <= TOLERANCE[problem.dtype], how
        check(found["part"], found["y"], how)


FIRST = [
    Conv(
        3, 1, 3, filters, (1, 64, size), (1, 32, size // 2),
        Window((1, 7, 7), (1, 2, 2), (1, 1, 1), (0, 3, 3), (0, 3, 3)), dtype, act=act,
        channels_last=True, planar=True, column_moments=True,
    )
    for filters, size, dtype, act in (
        (64, 96, "float16", ""), (40, 64, "bfloat16", "relu"), (136, 32, "bfloat16", ""),
    )
]  # fmt: skip


@pytest.mark.parametrize("problem", FIRST, ids=str)
def test_a_first_layer_leaves_the_moments_of_its_channels(problem: Conv, hw: Hardware) -> None:
    """Of four rows of 16 pixels each, in the order of the blocks of 16 x 16."""
    rng, (_, oh, ow) = np.random.default_rng(6), problem.outer
    images = random(rng, problem.dtype, 3, 3, *problem.inner[1:])
    weight = np.zeros((problem.filters, 7, 8, 4))  # a row is 7 pixels of 3 channels, then zeros
    weight[:, :, :7, :3] = rng.standard_normal((problem.filters, 7, 7, 3)) / 147**0.5
    bias = hostile(7, problem.filters, problem.dtype)
    blank = {"y": poison(problem.dtype, 3 * oh * ow, problem.filters),
             "part": poison("float32", 3 * oh * ow // 64, problem.filters, 2)}  # fmt: skip
    given = {"x": images, "weight": weight.astype(TYPES[problem.dtype]), "bias": bias}
    ways = on_device.each(problem, hw)
    assert [kernel.name for kernel, _ in ways] == ["few_channels"]
    ((how, found),) = results(problem, hw, given, blank, ways)
    plain = replace(problem, column_moments=False)
    ((_, alone),) = results(plain, hw, given, {"y": blank["y"]}, ways)
    assert alone["y"].tobytes() == found["y"].tobytes()
    blocks = found["y"].reshape(3, oh // 16, 4, 4, ow // 16, 16, -1)
    blocks = blocks.transpose(0, 1, 4, 2, 3, 5, 6).reshape(-1, problem.filters)
    check(found["part"], blocks, how)


MERGED = [MergedMoments(m, n) for m, n in ((1, 3), (64, 72), (200, 5), (20000, 40), (70001, 66))]


@pytest.mark.parametrize("problem", MERGED, ids=str)
def test_parts_become_the_moments_of_whole_columns(problem: MergedMoments, hw: Hardware) -> None:
    """About a mean of 100, a deviation of 0.01; one column has an infinity and one a NaN."""
    rng = np.random.default_rng(5)
    x = 100 + 0.01 * rng.standard_normal((problem.m, problem.n)).astype(np.float32)
    x[0, 0], x[-1, 1] = np.inf, np.nan
    part = column_moments(x).astype(np.float32)
    count = np.minimum(problem.m - 64 * np.arange(problem.parts), 64.0)[:, None]
    mean = (wide(part[..., 0]) * count).sum(0) / problem.m
    square = wide(part[..., 1]) + count * (wide(part[..., 0]) - mean) ** 2
    want = square.sum(0)[2:] / problem.m
    blank = dict.fromkeys(("mean", "variance"), poison("float32", problem.n))
    for how, found in results(problem, hw, {"part": part}, blank):
        assert not np.isfinite([array[:2] for array in found.values()]).any(), how
        assert np.all(np.abs(found["mean"][2:] - mean[2:]) <= 2e-5), how  # an ulp of 100 is 8e-6
        assert np.all(np.abs(found["variance"][2:] - want) <= 1e-5 * want + 1e-9), how


NORM = """agraph (float16[16,32,40,39] x, float16[64,32,3,3] u, float16[64] c, float[64] s,
float[64] b, float[64] m, float[64] v)
=> (float16[16,64,40,39] y, float[64] rm, float[64] rv, float16[16,64,40,39] z)
{ z = Conv<pads=[1,1,1,1]>(x, u, c)
  y, rm, rv = BatchNormalization<training_mode=1,momentum=0.75>(z, s, b, m, v) }"""


@pytest.mark.parametrize("mean", [0, 100])
def test_a_norm_by_the_moments_of_a_convolution(mean: float, hw: Hardware) -> None:
    """Running statistics and y against float64 of what the convolution stored; twice the same."""
    rng = np.random.default_rng(6)
    feeds = {"x": random(rng, "float16", 16, 32, 40, 39), "c": hostile(mean, 64, "float16"),
             "u": (random(rng, "float32", 64, 32, 3, 3) / (17 if mean == 0 else 200)).astype("f2"),
             **{name: random(rng, "float32", 64) for name in "sbm"}}  # fmt: skip
    feeds["u"][3] = 0  # a channel of equal values
    feeds["v"] = np.abs(random(rng, "float32", 64)) + 1
    run = Executable(text_model(NORM))
    y, rm, rv, z = run.run(None, feeds)
    for first, second in zip((y, rm, rv, z), run.run(None, feeds), strict=True):
        assert first.tobytes() == second.tobytes()
    (instance,) = run.instances()
    kept = [c.problem for c in instance.program.calls]
    if hw.arch == "sm_90a":
        assert any(isinstance(p, MergedMoments) for p in kept)
    sound = np.arange(64) > 2
    sound[0] = True
    z64 = wide(z)[:, sound]
    average, variance = z64.mean((0, 2, 3)), z64.var((0, 2, 3))
    new = 0.75 * wide(feeds["m"])[sound] + 0.25 * average
    assert np.all(np.abs(rm[sound] - new) <= 1e-6 * (1 + np.abs(new)))
    new = 0.75 * wide(feeds["v"])[sound] + 0.25 * variance
    assert np.all(np.abs(rv[sound] - new) <= 1e-6 * new)
    assert variance[1] == 0
    shape = (1, -1, 1, 1)
    scale = (wide(feeds["s"])[sound] / np.sqrt(variance + 1e-5)).reshape(shape)
    want = (z64 - average.reshape(shape)) * scale + wide(feeds["b"])[sound].reshape(shape)
    assert error(y[:, sound], want) <= 2e-3  # float16, and statistics in float32
    assert np.isnan(wide(y)[:, 1:3]).all()
