"""Shapes of convolutions that the math kernels are tried with."""

from typing import Any

Shape = tuple[int, ...]
AROUND = {"pads": [1, 1, 1, 1]}
WITHIN = {"pads": [1] * 6}

# note, attributes, the shapes of the inputs; float32
CHANNELS_FIRST: tuple[tuple[str, dict[str, Any], tuple[Shape, ...]], ...] = (
    ("1-D", {"strides": [2]}, ((2, 8, 10), (6, 8, 3))),
    ("3-D", {"dilations": [1, 2, 2]}, ((1, 2, 5, 6, 7), (8, 2, 2, 3, 2))),
    ("depthwise", {"group": 8}, ((2, 8, 9, 9), (8, 1, 3, 3), (8,))),
    ("", {"group": 2, "pads": [1, 0, 2, 1]}, ((2, 32, 9, 9), (64, 16, 3, 3))),
    ("", {"strides": [2, 2]}, ((4, 70, 33, 34), (130, 70, 3, 3), (130,))),
    ("128 tiles", {}, ((8, 64, 64, 64), (200, 64, 1, 1))),
    ("split", AROUND, ((1, 512, 7, 7), (65, 512, 3, 3))),
    ("weight gradient", AROUND, ((6, 4, 20, 20), (9, 4, 18, 18))),
)

# attributes, the shapes of x and of the filters, and the type; each has a bias
CHANNELS_LAST: tuple[tuple[dict[str, Any], Shape, Shape, str], ...] = (
    (AROUND, (2, 72, 11, 12), (40, 72, 3, 3), "float16"),
    (AROUND, (2, 72, 11, 12), (40, 72, 3, 3), "bfloat16"),
    ({"group": 96}, (3, 96, 9, 10), (96, 1, 3, 3), "float16"),
    ({"group": 96}, (3, 96, 9, 10), (96, 1, 3, 3), "bfloat16"),
    ({"strides": [2, 2], "pads": [3, 3, 3, 3]}, (2, 3, 29, 31), (64, 3, 7, 7), "float16"),
    ({"strides": [4, 4]}, (2, 3, 16, 20), (24, 3, 4, 4), "float16"),
    ({**AROUND, "strides": [2, 1], "dilations": [1, 2]}, (2, 8, 14, 9), (130, 8, 3, 3), "float16"),
    ({"strides": [2, 2]}, (2, 64, 14, 15), (128, 64, 1, 1), "float16"),
    ({"group": 4, **AROUND}, (2, 64, 9, 9), (84, 16, 3, 3), "float16"),
    ({"group": 12, **AROUND}, (2, 48, 11, 13), (48, 4, 3, 3), "float16"),
    ({"group": 6, **AROUND}, (2, 48, 11, 13), (48, 8, 3, 3), "bfloat16"),
    ({"group": 4, "strides": [2, 2], **AROUND}, (2, 64, 9, 12), (64, 16, 3, 3), "float16"),
    ({"group": 2, "dilations": [1, 2]}, (2, 48, 7, 7), (48, 24, 1, 2), "float16"),
    ({"group": 2, **AROUND}, (2, 128, 5, 6), (128, 64, 3, 3), "float16"),
    ({"group": 32, "pads": [3, 3, 3, 3]}, (2, 32, 15, 17), (32, 1, 7, 7), "float16"),
    ({"group": 40, "strides": [2, 2], "pads": [2] * 4}, (2, 40, 15, 17), (40, 1, 5, 5), "float16"),
    ({"pads": [1, 2]}, (3, 20, 33), (21, 20, 4), "float16"),
    (AROUND, (1, 512, 7, 7), (64, 512, 3, 3), "float16"),
    # volumes, by tensor maps of five axes
    (WITHIN, (2, 72, 5, 6, 7), (40, 72, 3, 3, 3), "float16"),
    (WITHIN, (2, 72, 5, 6, 7), (40, 72, 3, 3, 3), "bfloat16"),
    ({"pads": [1, 0, 2, 0, 1, 2], "strides": [2, 1, 3], "dilations": [1, 2, 1]},
     (2, 16, 9, 8, 11), (136, 16, 2, 3, 4), "float16"),
    ({"strides": [2, 2, 2]}, (3, 64, 4, 6, 5), (24, 64, 1, 1, 1), "bfloat16"),
    (WITHIN, (3, 16, 1, 9, 8), (72, 16, 3, 3, 3), "float16"),  # planes beyond the only one
)  # fmt: skip
