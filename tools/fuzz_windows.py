"""How nodes over windows, regions and images are drawn for tools/fuzz.py."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from fuzz_graphs import SMALL_INTEGERS, Draw, Graph, Refused, table


def window(g: Graph, spatial: int) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if g.chance(0.5):
        given["strides"] = [g.number(1, 3) for _ in range(spatial)]
    if g.chance(0.3):
        given["dilations"] = [g.number(1, 2) for _ in range(spatial)]
    if g.chance(0.5):
        given["pads"] = [g.number(0, 1) for _ in range(2 * spatial)]
    elif g.chance(0.3):
        given["auto_pad"] = g.one_of(("SAME_UPPER", "SAME_LOWER", "VALID"))
    return given


def image(g: Graph, dtypes: Sequence[str] = ("float32", "float16")) -> str:
    return g.value(dtypes, (3, 4), lambda a: a.size > 0 and min(a.shape[2:]) > 1)


def conv(g: Graph, operator: str) -> None:
    x = image(g)
    c, spatial = g.of(x).shape[1], g.of(x).ndim - 2
    group = g.one_of([n for n in (1, 1, c) if not c % n])
    m = group * g.number(1, 3)
    kernel = [g.number(1, 3) for _ in range(spatial)]
    if operator == "Conv":
        w = g.fresh(g.dtype(x), (m, c // group, *kernel))
    else:
        w = g.fresh(g.dtype(x), (c, m // group, *kernel))
    bias = [g.fresh(g.dtype(x), (m,))] if g.chance(0.6) else []
    g.node(operator, [x, w, *bias], group=group, **window(g, spatial))


def pool(g: Graph, operator: str) -> None:
    x = image(g)
    spatial = g.of(x).ndim - 2
    given = window(g, spatial) | {"kernel_shape": [g.number(1, 3) for _ in range(spatial)]}
    if g.chance(0.3):
        given["ceil_mode"] = 1
    if operator == "AveragePool" and g.chance(0.4):
        given["count_include_pad"] = 1
    if operator == "LpPool" and g.chance(0.5):
        given["p"] = g.number(1, 3)
    g.node(operator, [x], 1 + (operator == "MaxPool" and g.chance(0.2)), **given)


def global_pool(g: Graph, operator: str) -> None:
    g.node(operator, [image(g)])


def resize(g: Graph, operator: str) -> None:
    x = g.value(("float32",), (3, 4), lambda a: a.size > 0)
    rank = g.of(x).ndim
    modes = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    given: dict[str, Any] = {
        "mode": g.one_of(("nearest", "linear", "cubic") if rank == 4 else ("nearest", "linear")),
        "coordinate_transformation_mode": g.one_of((*modes, "half_pixel_symmetric")),
    }
    if given["mode"] == "nearest":
        ways = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
        given["nearest_mode"] = g.one_of(ways)
    factors = [1.0, 1.0, *(g.one_of((0.5, 0.7, 1.0, 1.3, 2.0, 2.5)) for _ in range(rank - 2))]
    if g.chance(0.6):
        return g.node(operator, [x, "", g.constant(factors, "float32")], **given)
    sizes = [max(1, int(s * f)) for s, f in zip(g.of(x).shape, factors, strict=True)]
    g.node(operator, [x, "", "", g.constant(sizes, "int64")], **given)


def blocks(g: Graph, operator: str) -> None:
    n, h, w = g.one_of((1, 2)), g.number(1, 2), g.number(1, 3)
    if operator == "DepthToSpace":
        x = g.fresh("float32", (n, 8, h, w))
        return g.node(operator, [x], blocksize=2, mode=g.one_of(("DCR", "CRD")))
    g.node(operator, [g.fresh("float32", (n, 2, 2 * h, 2 * w))], blocksize=2)


def grid_sample(g: Graph, operator: str) -> None:
    x = g.value(("float32",), (4, 4), lambda a: a.size > 0)
    grid = g.constant(g.rng.uniform(-1.2, 1.2, (g.of(x).shape[0], 2, 3, 2)), "float32")
    g.node(
        operator,
        [x, grid],
        mode=g.one_of(("linear", "nearest", "cubic")),
        padding_mode=g.one_of(("zeros", "border", "reflection")),
        align_corners=g.number(0, 1),
    )


def local_norm(g: Graph, operator: str) -> None:
    given = {"alpha": g.one_of((1e-4, 0.5)), "beta": g.one_of((0.75, 0.5)), "bias": 1.0}
    given = {name: value for name, value in given.items() if g.chance(0.7)}
    x = g.value(("float32",), (4, 4), lambda a: a.size > 0)
    g.node(operator, [x], size=g.one_of((1, 3, 5)), **given)


def places(size: Sequence[int], kernel: Sequence[int], given: dict[str, Any]) -> list[int]:
    """How many places along each axis a window has."""
    n = len(size)
    steps, gaps = (given.get(name, [1] * n) for name in ("strides", "dilations"))
    pads = given.get("pads", [0] * 2 * n)
    counts = [
        (size[i] + pads[i] + pads[i + n] - gaps[i] * (kernel[i] - 1) - 1) // steps[i] + 1
        for i in range(n)
    ]
    if min(counts) < 1:
        raise Refused
    return counts


def columns(g: Graph, operator: str) -> None:
    spatial = g.number(1, 3)
    block = [g.number(1, 3) for _ in range(spatial)]
    size = [g.number(3, 6) for _ in range(spatial)]
    given = window(g, spatial)
    given.pop("auto_pad", None)
    if spatial != 2:  # onnxruntime (1.32) misplaces dilated blocks of other ranks
        given.pop("dilations", None)
    count = int(np.prod(places(size, block, given)))
    channels = g.number(1, 3) * int(np.prod(block))
    x = g.fresh("float32", (g.shape(1)[0], channels, count))
    g.node(operator, [x, g.constant(size, "int64"), g.constant(block, "int64")], **given)


def deformed(g: Graph, operator: str) -> None:
    dtype, batch = g.one_of(("float32", "float64")), g.shape(1)[0]
    group, offset_group = g.number(1, 2), g.number(1, 2)
    channels, kernel = 2 * g.number(1, 2), [g.number(1, 3), g.number(1, 3)]
    image_size = [g.number(3, 5), g.number(3, 5)]
    x = g.fresh(dtype, (batch, channels, *image_size))
    given = window(g, 2)
    given.pop("auto_pad", None)
    filters = group * g.number(1, 2)
    w = g.fresh(dtype, (filters, channels // group, *kernel))
    sizes = places(image_size, kernel, given)
    taps = offset_group * kernel[0] * kernel[1]
    inputs = [x, w, g.fresh(dtype, (batch, 2 * taps, *sizes))]
    if g.chance(0.6):
        inputs += [g.fresh(dtype, (filters,)) if g.chance(0.6) else ""]
        inputs += [g.fresh(dtype, (batch, taps, *sizes))] if g.chance(0.5) else []
    g.node(operator, inputs, group=group, offset_group=offset_group, **given)


def regions(g: Graph, operator: str) -> None:
    x = g.value(("float32", "float64"), (4, 4), lambda a: a.size > 0)
    count = g.one_of((0, 1, 3))
    corners = np.sort(g.rng.uniform(-1, 6, (count, 2, 2)), 1).reshape(count, 4)
    batches = g.rng.integers(0, g.of(x).shape[0], count)
    given = {"output_height": g.number(1, 3), "output_width": g.number(1, 3)}
    given["sampling_ratio"] = g.number(0, 2)
    inputs = [x, g.constant(corners, g.dtype(x)), g.constant(batches, "int64")]
    half = g.one_of(("half_pixel", "output_half_pixel"))
    g.node(
        operator,
        inputs,
        mode=g.one_of(("avg", "max")),
        spatial_scale=g.one_of((1.0, 0.5)),
        coordinate_transformation_mode=half,
        **given,
    )


def per_channel(g: Graph, size: int, kind: str) -> tuple[str, str]:
    """A scale and a zero point, of all together or of each channel by itself."""
    shape = (size,) if g.chance(0.4) else ()
    scale = g.constant(np.exp2(g.rng.integers(-6, -3, shape)), "float32")
    return scale, g.constant(g.rng.integers(0, 9, shape), kind)


def integer_conv(g: Graph, operator: str) -> None:
    kind, w_kind = g.one_of(SMALL_INTEGERS), g.one_of(SMALL_INTEGERS)
    x = image(g, (kind,))
    channels, spatial = g.of(x).shape[1], g.of(x).ndim - 2
    group = g.one_of([n for n in (1, 1, channels) if not channels % n])
    filters = group * g.number(1, 3)
    shape = (filters, channels // group, *(g.number(1, 3) for _ in range(spatial)))
    w = g.constant(g.array(w_kind, shape))
    scale, zero = g.constant(0.0625, "float32"), g.constant(g.number(0, 9), kind)
    w_scale, w_zero = per_channel(g, filters, w_kind)
    if operator == "ConvInteger":
        zeros = g.one_of(((), (zero,), (zero, w_zero)))
        return g.node(operator, [x, w, *zeros], group=group, **window(g, spatial))
    out = [g.constant(0.125, "float32"), g.constant(g.number(0, 9), kind)]
    bias = [g.constant(g.rng.integers(-50, 50, filters), "int32")] if g.chance(0.5) else []
    inputs = [x, scale, zero, w, w_scale, w_zero, *out, *bias]
    g.node(operator, inputs, group=group, **window(g, spatial))


def overlapping(g: Graph, operator: str) -> None:
    """NonMaxSuppression: boxes whose scores differ, since the order of equal ones is open."""
    batch, boxes, classes = g.number(1, 2), g.number(1, 6), g.number(1, 2)
    corners = np.sort(g.rng.uniform(0, 4, (batch, boxes, 2, 2)), 2).reshape(batch, boxes, 4)
    scores = g.rng.permuted(np.linspace(0.1, 0.9, boxes), axis=0)
    scores = np.stack([g.rng.permutation(scores) for _ in range(batch * classes)])
    limits = [g.constant(g.number(0, 4), "int64"), g.constant(g.one_of((0.1, 0.5)), "float32")]
    limits += [g.constant(g.one_of((0.0, 0.3)), "float32")] if g.chance(0.5) else []
    inputs = [g.constant(corners, "float32")]
    inputs += [g.constant(scores.reshape(batch, classes, boxes), "float32")]
    g.node(operator, [*inputs, *limits], center_point_box=g.number(0, 1))


WINDOWS: dict[str, Draw] = {
    **table(conv, "Conv ConvTranspose"),
    **table(pool, "MaxPool AveragePool LpPool"),
    **table(global_pool, "GlobalAveragePool GlobalMaxPool GlobalLpPool"),
    "Resize": resize,
    **table(blocks, "DepthToSpace SpaceToDepth"),
    "GridSample": grid_sample,
    **table(integer_conv, "ConvInteger QLinearConv"),
    "Col2Im": columns,
    "DeformConv": deformed,
    "RoiAlign": regions,
    "NonMaxSuppression": overlapping,
    "LRN": local_norm,
}
"""How nodes of operators over windows, regions and images are drawn."""
