"""Gradients of convolutions and pools: operators of their own, phases of a stride, memory order."""

from itertools import product

import numpy as np
import pytest
from lowering import lowered
from math_cases import Case
from support import drawn
from test_gradients import plain_and_fused
from window_gradients import network

from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.kernels import candidates
from onnx_fuse.lower.conv_transpose import phases
from onnx_fuse.program.call import Program
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.launch import Num
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.program.problems import (
    ChannelGrad,
    ChannelNorm,
    Conv,
    ConvWeightGrad,
    MaxPoolGrad,
    Window,
)
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model

# the type, the sizes of x and of w (() for a pool), the node
GRAPHS = {
    "pool": ("float", (2, 3, 8, 9), (), "MaxPool <kernel_shape=[3,2], strides=[2,1]> (x)"),
    "padded pool": (
        "float", (2, 3, 8, 9), (), "MaxPool <kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]> (x)"
    ),
    "pool by columns": (
        "float", (2, 3, 8, 9), (),
        "MaxPool <kernel_shape=[2,2], strides=[2,2], storage_order=1, ceil_mode=1> (x)",
    ),
    "same": ("float", (2, 3, 9), (), 'MaxPool <kernel_shape=[3], auto_pad="SAME_LOWER"> (x)'),
    "conv": ("float16", (2, 8, 7, 6), (16, 8, 3, 3), "Conv <pads=[1,1,1,1]> (x, w)"),
    "stride": (
        "float16", (2, 8, 8, 6), (16, 8, 3, 3), "Conv <pads=[1,0,1,1], strides=[2,2]> (x, w)"
    ),
    "groups": ("float16", (2, 8, 7, 6), (16, 4, 3, 2), "Conv <group=2, dilations=[2,1]> (x, w)"),
    "line": ("float16", (2, 8, 9), (16, 8, 3), "Conv <strides=[2]> (x, w)"),
    "volume": (
        "float16", (2, 8, 4, 7, 6), (16, 8, 3, 3, 2),
        "Conv <pads=[1,1,1,1,1,0], strides=[1,2,1]> (x, w)",
    ),
    "transposed": (
        "float16", (2, 16, 5, 4), (16, 8, 3, 3),
        "ConvTranspose <pads=[1,1,1,1], strides=[2,2]> (x, w)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_an_operator_of_its_own_has_the_same_gradient(name: str) -> None:
    kind, x, w, node = GRAPHS[name]
    weight = f", {kind}{list(w)} w" if w else ""
    text = f"""agraph ({kind}{list(x)} x{weight}) => ({kind} loss)
        {{ y = {node} z = Sin(y) loss = ReduceSum <keepdims = 0> (z) }}"""
    made = plain_and_fused(text, drawn(text_model(text), seed=3))
    own = [{n.op_type for n in m.graph} & {"ConvWeightGrad", "MaxPoolGrad"} for m, _ in made]
    assert [bool(ops) for ops in own] == [False, True]
    for plain, ours in zip(*(gradients.values() for _, gradients in made), strict=True):
        # sums of float16 in another order
        atol = 0 if plain.dtype == np.float32 else 2e-3 * np.abs(plain).max()
        np.testing.assert_allclose(ours, plain, rtol=0, atol=atol)


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize(("taps", "before"), [(1, 0), (2, 1), (3, 1), (5, 0)])
def test_the_phases_of_a_stride_add_up(stride: int, dilation: int, taps: int, before: int) -> None:
    """y[o] = Σ x[i] w[tap] over o = i stride - before + tap dilation, worked out both ways."""
    rng = np.random.default_rng(0)
    x, w, size = rng.standard_normal(6), rng.standard_normal(taps), 17
    truth = np.zeros(size)
    for i, tap in product(range(6), range(taps)):
        o = i * stride - before + tap * dilation
        if 0 <= o < size:
            truth[o] += x[i] * w[tap]
    one = (1, 1, 1)
    window = Window((1, 1, taps), (1, 1, stride), (1, 1, dilation), (0, 0, before), (0, 0, 0))
    shape = Conv(1, 1, 8, 8, (1, 1, 6), (1, 1, size), window, "float16", True)
    y = np.full(size, np.nan)
    for phase in phases(shape):
        axis = phase.axes[2]
        at = range(axis.first, size, stride)
        assert len(at) == axis.outputs
        y[list(at)] = 0
        if phase.shape is None:
            continue
        made = phase.shape.window
        assert (made.strides, phase.shape.outer) == (one, (1, 1, axis.outputs))
        assert min(made.dilations) > 0  # kernels divide by it
        # the last input that a filter reaches is that of the padding behind
        assert axis.outputs - 1 + (axis.taps - 1) * axis.dilation == 5 + axis.before + axis.after
        filters = [w[axis.last - j * axis.step] for j in range(axis.taps)]
        for q, (j, weight) in product(range(axis.outputs), enumerate(filters)):
            i = q - axis.before + j * axis.dilation
            y[axis.first + q * stride] += weight * x[i] if 0 <= i < 6 else 0.0
    np.testing.assert_allclose(y, truth, atol=1e-12)


def test_a_step_of_a_residual_network_keeps_its_images_channels_last() -> None:
    """No image is copied but the one that comes in, no window is as large as an image."""
    graph, _ = training_model(
        network(), loss="mse", optimizer=optim.SGD(lr=0.1), precision="bf16", fused=True
    )
    calls = lowered(graph, size=4).calls
    problems = [call.problem for call in calls]
    assert sum(p.op == "ConvWeightGrad" for p in problems if p) == 4
    assert [p.channels for p in problems if isinstance(p, MaxPoolGrad)] == [16]
    convolutions = [p for p in problems if isinstance(p, Conv)]
    assert convolutions
    assert all(p.channels_last for p in convolutions)
    norms = [p for p in problems if isinstance(p, ChannelNorm | ChannelGrad)]
    assert norms
    assert all(p.inner == 1 for p in norms)
    # whose mask its gradient works out again, where nothing else needs the masked gradient
    assert sum(p.relu for p in norms if isinstance(p, ChannelGrad) and p.stage == "dx") == 2
    # a Relu is in the epilogue of the norm before it
    assert sum(call.kernel.endswith("+Relu") for call in calls) == 3
    assert not any(call.host for call in calls)


@pytest.mark.parametrize(("math", "sums"), [("tf32", 3), ("ieee", 0)])
@pytest.mark.parametrize("chip", ["H200", "A100"])
def test_a_step_of_tf32_sums_over_the_pixels_too(chip: str, math: str, sums: int) -> None:
    """Of IEEE products the gradient is a convolution of x with dy; that of one tap is a product."""
    graph, _ = training_model(
        network(), loss="mse", optimizer=optim.SGD(lr=0.1), precision="fp32", fused=True
    )
    calls = lowered(graph, CHIPS[chip], size=4, math=math).calls
    found = [c.problem for c in calls if isinstance(c.problem, ConvWeightGrad)]
    assert [p.math for p in found] == [math] * sums


WEIGHTS = {
    "dense": ((2, 16, 9, 8), (2, 24, 9, 8), {}),
    "groups": ((3, 32, 9, 8), (3, 48, 9, 8), {"group": 2}),
    "a filter a channel": ((3, 6, 9, 8), (3, 6, 9, 8), {"group": 6}),
    "three channels, a stride": (
        (2, 16, 9, 8), (2, 3, 18, 16), {"strides": [2, 2], "kernel_shape": [7, 7], "pads": [3] * 4},
    ),
    "one channel, patches": (
        (2, 8, 3, 4), (2, 1, 12, 16), {"strides": [4, 4], "kernel_shape": [4, 4], "pads": [0] * 4},
    ),
    "five channels, dilated": ((2, 16, 7, 6), (2, 5, 9, 8), {"dilations": [2, 2]}),
    "three channels, uneven": (
        (2, 8, 9, 7), (2, 3, 9, 11), {"kernel_shape": [2, 5], "pads": [1, 0, 0, 0]},
    ),
    "a row": (
        (6, 64, 17), (6, 3, 19), {"kernel_shape": [3], "pads": [0, 0], "strides": [1],
                                  "dilations": [1], "swap": [1, 0, 2]},
    ),
    "a volume": (
        (2, 16, 3, 4, 5), (2, 40, 5, 4, 9), {
            "kernel_shape": [3, 3, 2], "pads": [1, 1, 0, 1, 1, 1], "strides": [2, 1, 2],
            "dilations": [1] * 3, "swap": [1, 0, 2, 3, 4],
        },
    ),
}  # fmt: skip


def interpreted_case(case: Case) -> Program:
    """Its program, which by NumPy gives the oracle's result."""
    program = case.program()
    assert not program.fallbacks
    found = interpret(program, {f"x{i}": a for i, a in enumerate(case.arrays())}, {})["y0"]
    (truth,) = case.oracle()
    np.testing.assert_allclose(found.astype(np.float64), truth, atol=2e-3 * np.abs(truth).max())
    return program


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_problem_of_a_weight_gradient_is_the_gradient(name: str) -> None:
    """Also where the images are copied with gaps: pixels of few channels, rows of a filter."""
    dy, x, how = WEIGHTS[name]
    attrs = {"kernel_shape": [3, 3], "strides": [1, 1], "dilations": [1, 1], "pads": [1] * 4}
    attrs |= {"group": 1, "swap": [1, 0, 2, 3]}
    interpreted_case(Case("ConvWeightGrad", (dy, x), attrs | how, 1, "float16", FUSE))


TRANSPOSED = {
    "three taps": ((2, 64, 5, 4), (64, 32, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "one tap": ((2, 64, 5, 4), (64, 32, 1, 1), {"strides": [2, 2], "output_padding": [1, 1]}),
    "five of stride three": ((2, 16, 5, 4), (16, 40, 5, 5), {"strides": [3, 3]}),
    "a row": ((2, 64, 9), (64, 32, 4), {"strides": [2], "pads": [1, 1]}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSPOSED)
def test_a_phase_is_stored_where_its_pixels_are(name: str) -> None:
    """All phases write into one image."""
    x, w, how = TRANSPOSED[name]
    program = interpreted_case(Case("ConvTranspose", (x, w), how, 1, "float16"))
    calls = [call for call in program.calls if call.kernel == "ConvTranspose"]
    assert calls
    assert all(isinstance(call.problem, Conv) and call.problem.y_strides for call in calls)
    assert len({y.buffer for call in calls for _, y in call.writes}) == 1


CHUNK_AT = {"wgmma": -1, "mma": -4}  # where a kernel's numbers say how many pixels a block has


@pytest.mark.parametrize("taps", [(1, 1), (3, 3), (7, 7), (20, 17)])
@pytest.mark.parametrize(("filters", "channels"), [(64, 64), (8, 40), (512, 2048), (256, 96)])
def test_parts_of_a_weight_gradient_are_all_summed(
    filters: int, channels: int, taps: tuple[int, int]
) -> None:
    """Blocks have every pixel and every element, and room for their sums, whatever the tile."""
    outer, hw = (1, 13, 9), CHIPS["H200"]
    window = Window((1, *taps), (1, 1, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0))
    inner = (1, 13 + taps[0] - 1, 9 + taps[1] - 1)
    problem = ConvWeightGrad(5, 1, channels, filters, inner, outer, window, "float16", "float16")
    for kernel in candidates("ConvWeightGrad"):
        if kernel.supports(problem, hw) is not None or kernel.name == "product":
            continue
        for config in kernel.configs(problem, hw):
            made, *total = kernel.launch(problem, config, hw)
            numbers = [arg.value for arg in made.args if isinstance(arg, Num)]
            splits, chunk = made.grid[1] * made.cluster, numbers[CHUNK_AT[kernel.name]]
            assert (splits - made.cluster) * chunk < 5 * 13 * 9 <= splits * chunk
            if not total:
                assert (taps, made.grid[1]) == ((1, 1), 1)
                continue
            (last,) = total
            macros = {name: int(value) for name, value in last.defines if value.isdigit()}
            rows, across, deep, parts = (arg.value for arg in last.args if isinstance(arg, Num))
            assert rows * across * deep == filters * channels * taps[0] * taps[1]
            assert parts == made.grid[1]
            assert last.grid[0] == rows * -(-across // macros["CB"])
            assert last.grid[1] * macros["TB"] >= deep
            assert macros["CB"] % macros["VEC"] == 0
            assert 4 * macros["LANES"] * macros["CB"] * macros["TB"] <= 48 << 10
            assert kernel.workspace(problem, config, hw) == 4 * parts * rows * across * deep
