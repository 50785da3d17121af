"""Times of work on a GPU, by events of PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch


def microseconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Microseconds of one call of `work`, of so many in the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / repeats
