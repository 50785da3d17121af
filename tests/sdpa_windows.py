"""Attention through windows: rows of operands whose mask kernels need not read, or read besides."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx

from onnx_fuse.ops.fused.sdpa.mask_analysis import CAUSAL, WINDOW
from onnx_fuse.program.call import dtype_of

NODES: tuple[dict[str, Any], ...] = (
    (
        {"left_window_size": 3},
        {"left_window_size": 2, "is_causal": 1},
        {"left_window_size": 1, "right_window_size": 4},
    )
    if onnx.defs.onnx_opset_version() >= 25
    else ()
)
"""Attributes of the Attention node, where the installed onnx knows windows."""
# (B, H, Hkv), (S, T), (D, Dv), (left, right), whether the mask also hides every fifth key
ROWS = (
    ((1, 2, 2), (264, 264), (64, 64), (3, 0), False),
    ((2, 4, 2), (200, 200), (64, 64), (64, 64), False),
    ((1, 2, 2), (456, 456), (64, 64), (127, 0), True),
    ((1, 2, 1), (136, 136), (64, 64), (-1, 5), False),
    ((1, 2, 2), (330, 330), (64, 48), (100, -1), False),
    ((1, 2, 2), (100, 100), (40, 40), (1, 0), False),
    ((1, 2, 2), (264, 264), (128, 128), (33, 65), True),
    ((1, 2, 1), (392, 392), (128, 128), (150, 0), False),
    ((1, 2, 2), (150, 264), (64, 64), (20, 9), False),
    ((1, 2, 2), (200, 200), (80, 72), (17, 0), False),
    ((1, 2, 2), (200, 200), (160, 160), (70, 0), True),
    ((1, 1, 1), (300, 300), (256, 256), (90, 30), False),
)


def rows() -> Iterator[tuple[Any, Any, Any, str, list[np.ndarray], dict[str, Any]]]:
    """Heads, sizes, widths, type, masks of -inf, attributes."""
    for dtype in ("float16", "bfloat16"):
        for heads, (s, t), widths, (left, right), more in ROWS:
            ahead = np.arange(t) - np.arange(s)[:, None]
            seen = np.ones_like(ahead, bool) if left < 0 else ahead >= -left
            seen &= (ahead <= right) | (right < 0)
            if more:
                seen &= (np.arange(t) % 5 != 3) | (ahead == 0)
            mask = np.where(seen, 0.0, -np.inf).astype(dtype_of(dtype))[None, None]
            attributes = {CAUSAL: -1 if more else 1, WINDOW: [left, right]}
            yield heads, (s, t), widths, dtype, [mask], attributes
