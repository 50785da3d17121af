"""Attention over sequences one behind the other: kinds, sizes and operands of cases."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from onnx_fuse.program.call import dtype_of

# kind, (H, Hkv), (D, Dv), lengths, the most that one may have, rows behind, or a mask's (B, H) and
# them
ROWS = (
    ("PackedGuard", (2, 2), (64, 64), (70, 0, 1, 33), 72, 5),
    ("PackedGuard", (4, 2), (64, 64), (130, 7, 200), 200, 70),
    ("PackedGuard", (1, 1), (40, 24), (1, 2, 1), 2, 0),
    ("CausalPackedGuard", (2, 2), (64, 64), (300, 0, 70), 310, 64),
    ("CausalPackedGuard", (2, 2), (48, 40), (65, 128, 1), 128, 40),
    ("CausalPackedGuard", (2, 1), (128, 72), (65, 1, 64), 65, 1),
    ("SoftcapPackedGuard", (2, 2), (32, 32), (20, 40), 40, 3),
    ("PackedNanGuard", (2, 2), (64, 64), (70, 100), 100, 9),
    ("PackedMask", (2, 2), (64, 64), (70, 0, 1, 33), 72, (4, 2)),
    ("PackedMask", (4, 2), (64, 64), (130, 7, 200), 200, (1, 4)),
    ("PackedMask", (2, 2), (128, 128), (40, 130), 136, (1, 1)),
    ("PackedMask", (2, 1), (40, 24), (3, 9, 1), 13, (3, 1)),
    ("SoftcapPackedMask", (2, 2), (32, 32), (20, 40), 40, (2, 1)),
    ("PackedMaskGuard", (4, 2), (64, 64), (130, 7, 200), 200, (1, 4, 70)),
    ("PackedMaskGuard", (2, 2), (40, 24), (3, 9, 2), 13, (3, 1, 5)),
)


def rows() -> Iterator[tuple[str, Any, Any, Any, str, list[np.ndarray]]]:
    """Kind, heads, sizes, widths, type, and the offsets and what is as long as the longest."""
    for kind, heads, widths, lengths, longest, behind in ROWS:
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        mask_sizes, last = (
            (behind[:2], sum(behind[2:])) if isinstance(behind, tuple) else ((), behind)
        )
        tokens = int(offsets[-1]) + last
        more = [offsets, np.zeros((len(lengths), longest), np.int64)]
        for dtype in ("float32", "float16", "bfloat16"):
            added = []
            if mask_sizes:  # what no two tokens of a sequence meet at is NaN
                rng = np.random.default_rng(longest)
                mask = rng.standard_normal((*mask_sizes, longest, longest))
                for i, length in enumerate(lengths if len(mask) > 1 else [max(lengths)]):
                    mask[i, :, length:] = mask[i, ..., length:] = np.nan
                mask[..., 1] = -np.inf
                added = [mask.astype(dtype_of(dtype))]
            yield kind, (1, *heads), (tokens, tokens), widths, dtype, more + added
