"""Rows of operators for the tests of gradients: norms, resizing, attention, losses."""

import numpy as np
from gradient_rows import F32, apart, rng, row, rows, within

NORM = [
    *rows("""
LayerNormalization axis=$axis: x=(2, 3, 4), s=$s, b=$s; axis, s in -1 (4,) | 1 (3, 4) |
0 (2, 3, 4) | -2 (4,)
  y = LayerNormalization <axis = $axis> (x, s, b)
LayerNormalization axis=-1 no bias: x=(2, 3, 4), s=(4,)
  y = LayerNormalization <axis = -1> (x, s)
"""),
    row("RMSNormalization", "y = RMSNormalization (x, s)", x=(2, 3, 4), s=(4,)),
    *rows("""
LayerNormalization 3 outputs: x=(3, 2, 4), s=(2, 4), b=(2, 4), outputs=("y", "m", "r"), dtype=F32
  y, m, r = LayerNormalization <axis = 1> (x, s, b)
LayerNormalization mean alone: x=(3, 4), s=(4,), b=(4,), outputs=("m",), dtype=F32
  y, m = LayerNormalization (x, s, b)
RMSNormalization axis 1: x=(2, 3, 4), s=(3, 4)
  y = RMSNormalization <axis = 1, epsilon = 0.01> (x, s)
InstanceNormalization: x=(2, 3, 4, 5), s=(3,), b=(3,), dtype=F32
  y = InstanceNormalization (x, s, b)
GroupNormalization: x=(2, 4, 3, 5), s=(4,), b=(4,), dtype=F32
  y = GroupNormalization <num_groups = 2> (x, s, b)
# inference tells nothing of what follows: not even that Equal's answer is bool
GroupNormalization, then the largest: x=(2, 4, 3, 5), s=(4,), b=(4,), dtype=F32
  n = GroupNormalization <num_groups = 2> (x, s, b)  m = ReduceMax <keepdims = 0> (n)
  y = LeakyRelu <alpha = 1.5> (m)
BatchNormalization: x=(2, 3, 4), s=(3,), b=(3,), m=(3,), v=within(0.5, 2, 3)
  y = BatchNormalization (x, s, b, m, v)
BatchNormalization 2-D: x=(5, 3), s=(3,), b=(3,), m=(3,), v=within(0.5, 2, 3)
  y = BatchNormalization (x, s, b, m, v)
BatchNormalization training: x=(3, 2, 4, 2), s=(2,), b=(2,), m=(2,), v=within(0.5, 2, 2),
outputs=("y", "rm", "rv")
  y, rm, rv = BatchNormalization <training_mode = 1, momentum = 0.7> (x, s, b, m, v)
MeanVarianceNormalization: x=(2, 3, 4, 2), dtype=F32
  y = MeanVarianceNormalization (x)
MeanVarianceNormalization axes: x=(2, 5), dtype=F32
  y = MeanVarianceNormalization <axes = [1]> (x)
MeanVarianceNormalization of fewer axes: x=(2, 3, 4), dtype=F32
  y = MeanVarianceNormalization (x)
LRN: x=(2, 5, 3, 2), dtype=F32
  y = LRN <size = 3, alpha = 0.5, beta = 0.6, bias = 1.2> (x)
"""),
]


def resize(name, how, **inputs):
    """Of scales `s` or sizes `z`."""
    given = {"x": (1, 2, 4, 5), "dtype": F32, "fixed": ("s",)} | inputs
    for key, kind in (("s", np.float32), ("z", np.int64)):
        given |= {key: np.array(given[key], kind)} if key in given else {}
    call = "x, , s" if "s" in given else "x, , , z"
    return row(f"Resize {name}", f"y = Resize <{how}> ({call})", **given)


NEAREST, LINEAR, CUBIC = (f'mode = "{mode}"' for mode in ("nearest", "linear", "cubic"))
BY = "coordinate_transformation_mode"
RESIZE = [
    resize("nearest x2", NEAREST, s=[1, 1, 2, 2]),
    resize("nearest asymmetric floor", f'{BY} = "asymmetric", nearest_mode = "floor"',
           s=[1, 1, 2, 3]),
    resize("nearest fractional", NEAREST, s=[1, 1, 1.5, 0.6]),
    resize("nearest sizes", NEAREST, z=[1, 2, 8, 7]),
    resize("nearest ceil", f'nearest_mode = "ceil", {BY} = "asymmetric"', s=[1, 1, 2, 2]),
    resize("linear", LINEAR, s=[1, 1, 2, 1.5]),
    resize("linear sizes", f'{LINEAR}, {BY} = "pytorch_half_pixel"', z=[1, 2, 7, 3]),
    resize("linear corners", f'{LINEAR}, {BY} = "align_corners"', z=[1, 2, 7, 9]),
    resize("linear axes", f"{LINEAR}, axes = [2, 3]", s=[2, 2]),
    resize("linear 3-D", LINEAR, s=[1, 1, 2, 1.5, 2], x=(1, 2, 2, 4, 3)),
    resize("linear 1-D", LINEAR, s=[1, 1, 2.5], x=(2, 3, 4)),
    resize("linear antialias", f"{LINEAR}, antialias = 1", s=[1, 1, 0.5, 0.6], x=(1, 2, 6, 7)),
    resize("linear, an axis that stays", LINEAR, s=[1, 1, 1.3, 0.6], x=(1, 2, 2, 7)),
    resize("linear, axes that stay", LINEAR, s=[1, 1, 1.3, 1.2], x=(1, 2, 2, 3)),
    resize("cubic, an axis that stays", CUBIC, s=[1, 1, 1.4, 1.3], x=(1, 2, 7, 2)),
    resize("cubic", CUBIC, s=[1, 1, 2, 1.5]),
    resize("cubic sizes", f"{CUBIC}, cubic_coeff_a = -0.5, exclude_outside = 1", z=[1, 2, 9, 3]),
]  # fmt: skip


def points(low, high, *shape):
    """Grid points 0.15 to 0.35 of a pixel (of 6 by 8) away from the kinks of the sampling."""
    size = np.array([8, 6])
    whole = np.floor(rng(5).uniform(low, high, (*shape, 2)) * size)
    return (2 * (whole + rng(6).uniform(0.15, 0.35, whole.shape)) + 1) / size - 1


# one box reaches beyond the image, one is smaller than a pixel
BOXES = np.array([[0.63, 0.92, 5.31, 4.17], [-1.37, 2.11, 9.53, 7.59], [3.21, 1.34, 3.68, 1.77]])
INNER = {"0": points(-0.3, 1.2, 2, 3, 4)}
INNER["1"] = INNER["0"] * np.array([8 / 7, 6 / 5])
GRID = list(
    rows(
        """
GridSample $mode $edge $corners: x=(2, 3, 6, 8), g=INNER["$corners"], dtype=F32;
mode in linear nearest; edge in zeros border; corners in 0 1
  y = GridSample <mode = "$mode", padding_mode = "$edge", align_corners = $corners> (x, g)
RoiAlign $mode $samples: x=(2, 3, 6, 8), boxes=BOXES, opset=21;
mode in half_pixel output_half_pixel; samples in 0 2
  b = Constant <value = int64[3] {1, 0, 1}> ()
  y = RoiAlign <coordinate_transformation_mode = "$mode", output_height = 2, output_width = 3,
  sampling_ratio = $samples, spatial_scale = 0.9> (x, boxes, b)
""",
        globals(),
    )
)


ATTENTION = [
    *rows("""
Attention, one batch of k: q=(2, 2, 3, 4), k=(1, 2, 5, 4), v=(2, 2, 5, 4), dynamic=(0, 2)
  y = Attention <is_causal = 1> (q, k, v)
Attention, one batch of v: q=(2, 2, 3, 4), k=(2, 2, 5, 4), v=(1, 2, 5, 4), dynamic=(0, 2)
  y = Attention <is_causal = 1> (q, k, v)
Attention, few columns in its mask: q=(2, 4, 3, 4), k=(2, 2, 5, 4), v=(2, 2, 5, 4),
m=mask(1, 1, 3, 4), dynamic=(0, 2), static=("m",), runtime=("m",)
  y = Attention (q, k, v, m)
Attention, few columns in an added mask: q=(2, 4, 3, 4), k=(2, 2, 5, 4), v=(2, 2, 5, 4), m=(3, 4),
dynamic=(0, 2), static=("m",)
  y = Attention <softcap = 2.0> (q, k, v, m)
Attention, one query and rows of a mask: q=(1, 4, 1, 4), k=(1, 2, 5, 4), v=(1, 2, 5, 4),
m=mask(1, 1, 3, 5), dynamic=(0, 2), opset=26
  y = Attention (q, k, v, m)
Attention, one query and rows of an added mask: q=(2, 2, 1, 4), k=(2, 1, 5, 4), v=(2, 1, 5, 4),
m=(3, 6), dynamic=(0, 2), static=("m",), opset=26
  y = Attention <is_causal = 1> (q, k, v, m)
Attention, one value: q=(2, 4, 3, 4), k=(2, 2, 5, 4), v=(2, 2, 1, 4), dynamic=(0, 2), opset=26
  y = Attention (q, k, v)
Attention window: q=(2, 4, 5, 4), k=(2, 2, 5, 4), v=(2, 2, 5, 4), dynamic=(0, 2), opset=26
  y = Attention <left_window_size = 2, right_window_size = 1> (q, k, v)
"""),
    *rows("""
Attention lengths: q=(2, 4, 3, 4), k=(2, 2, 5, 4), v=(2, 2, 5, 4), n=i64(3, 5), dtype=F32,
dynamic=(0, 2), runtime=("n",)
  y = Attention <is_causal = 1> (q, k, v, , , , n)
Attention: q=(2, 2, 3, 4), k=(2, 2, 5, 4), v=(2, 2, 5, 6), dtype=F32, dynamic=(0, 2)
  y = Attention (q, k, v)
Attention $name: q=(2, 4, 3, 6), k=(2, 2, 5, 6), v=(2, 2, 5, 4), dtype=F32, dynamic=(0, 2);
name, how in GQA scale = 0.3 | softcap softcap = 2.0
  y = Attention <$how> (q, k, v)
Attention $kind mask: q=(2, 4, 3, 6), k=(2, 2, 5, 6), v=(2, 2, 5, 4), m=$m, dtype=F32,
dynamic=(0, 2); kind, m in bool mask(2, 1, 3, 5) | 2-D mask(3, 5) | float (1, 4, 3, 5)
  y = Attention (q, k, v, m)
Attention causal: q=(2, 4, 5, 6), k=(2, 2, 5, 6), v=(2, 2, 5, 4), dtype=F32, dynamic=(0, 2)
  y = Attention <is_causal = 1> (q, k, v)
Attention causal, float mask: q=(2, 4, 5, 6), k=(2, 2, 5, 6), v=(2, 2, 5, 4), m=(5, 5), dtype=F32,
dynamic=(0, 2)
  y = Attention <is_causal = 1> (q, k, v, m)
Attention 3-D: q=(2, 3, 24), k=(2, 5, 12), v=(2, 5, 8), dtype=F32, dynamic=(0, 1)
  y = Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, v)
Attention 3-D causal, mask: q=(2, 5, 24), k=(2, 5, 12), v=(2, 5, 8), m=mask(2, 1, 5, 5), dtype=F32,
dynamic=(0, 1)
  y = Attention <q_num_heads = 4, kv_num_heads = 2, is_causal = 1> (q, k, v, m)
Attention past: q=(2, 4, 3, 6), k=(2, 2, 5, 6), v=(2, 2, 5, 4), a=(2, 2, 3, 6), b=(2, 2, 3, 4),
outputs=("y", "pk", "pv"), dtype=F32,
dynamic=(0, 2)
  y, pk, pv = Attention (q, k, v, , a, b)
RotaryEmbedding 4-D: x=(2, 3, 4, 6), c=(7, 3), s=(7, 3), p=rng().integers(0, 7, (2, 4)), dtype=F32
  y = RotaryEmbedding (x, c, s, p)
RotaryEmbedding 3-D: x=(2, 4, 18), c=(2, 4, 3), s=(2, 4, 3), dtype=F32
  y = RotaryEmbedding <num_heads = 3> (x, c, s)
RotaryEmbedding part, interleaved: x=(2, 3, 4, 6), c=(2, 4, 2), s=(2, 4, 2), dtype=F32
  y = RotaryEmbedding <interleaved = 1, rotary_embedding_dim = 4> (x, c, s)
"""),
]

QUANTIZED = (
    [
        row(
            f"DequantizeLinear {name}",
            f"y = DequantizeLinear <axis = 1> (x, s{zero})",
            x=rng().integers(-9, 9, (2, 3, 4)).astype(np.int8),
            s=scale,
            dtype=F32,
            **({"z": np.full(scale, 2, np.int8)} if zero else {}),
        )
        for name, scale, zero in (("tensor", (), ""), ("axis", (3,), ", z"))
    ]
    + [
        row(
            "DequantizeLinear vector",
            "y = DequantizeLinear <axis = 0> (x, s, z)",
            x=rng().integers(-9, 9, 4).astype(np.int32),
            s=(4,),
            z=np.zeros(4, np.int32),
            dtype=F32,
        )
    ]
    + [
        row(
            f"DequantizeLinear {name}",
            f"y = DequantizeLinear <axis = {axis}, block_size = 4> (x, s{', z' if zero else ''})",
            x=rng().integers(-9, 9, (2, 8 - short, 3)).astype(np.int8),
            s=(2, 2, 3),
            dtype=F32,
            dynamic=False,
            **({"z": rng().integers(-9, 9, (2, 2, 3)).astype(np.int8)} if zero else {}),
        )
        for name, axis, zero, short in (
            ("blocks", 1, False, 0),
            ("blocks from zero points", -2, True, 0),
            ("blocks, the last one short", 1, True, 3),
        )
    ]
    + [
        row(
            f"DynamicQuantizeLinear {name}",
            "q, s, z = DynamicQuantizeLinear (x)\n a = Mul (s, x)\n y = Sin (a)",
            x=x,
            dtype=F32,
        )
        for name, x in (
            ("both signs", apart(4, 5)),
            ("positive", apart(4, 5) + 3),
            ("negative", apart(4, 5) - 3),
        )
    ]
)

LABELS = np.array([[0, 3, 1], [2, -100, 3]])
LOSS = [
    row(
        f"{op} {name}",
        f"y = {op} <{attributes}> (x, t{', w' if weighted else ''})",
        x=(2, 4, 3),
        t=labels,
        fixed=("w",),
        **({"w": within(0.5, 2, 4)} if weighted else {}),
    )
    for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
    for name, attributes, labels, weighted in (
        ("mean", 'reduction = "mean"', abs(LABELS) % 4, False),
        ("sum", 'reduction = "sum"', abs(LABELS) % 4, False),
        ("none", 'reduction = "none"', abs(LABELS) % 4, False),
        ("ignore", "ignore_index = -100", LABELS, False),
        ("weights", 'reduction = "mean"', abs(LABELS) % 4, True),
        ("ignore, weights, sum", 'ignore_index = -100, reduction = "sum"', LABELS, True),
        ("ignore, weights, none", 'ignore_index = -100, reduction = "none"', LABELS, True),
    )
] + [
    row("Dropout inference", "y, m = Dropout (x)", x=(3, 4)),
    *rows("""
SoftmaxCrossEntropyLoss 2-D: x=(3, 5), t=i64(0, 4, 2)
  y = SoftmaxCrossEntropyLoss (x, t)
SoftmaxCrossEntropyLoss log_prob: x=(3, 5), t=i64(0, 4, 2), outputs=("y", "l")
  y, l = SoftmaxCrossEntropyLoss (x, t)
SoftmaxCrossEntropyLoss int32: x=(3, 5), t=np.array([0, 1, 2], np.int32)
  y = SoftmaxCrossEntropyLoss <ignore_index = 1> (x, t)
Dropout off: x=(3, 4), r=np.array(0.4), t=np.array(False), fixed=("r",)
  y = Dropout (x, r, t)
Dropout nothing dropped: x=(3, 4), r=np.array(0.0), t=np.array(True), fixed=("r",)
  y = Dropout (x, r, t)
"""),
]
