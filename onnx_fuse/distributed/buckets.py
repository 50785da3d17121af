"""Which tensors the ranks reduce together: few enough calls, and early enough ones."""

from __future__ import annotations

from collections.abc import Sequence

BUCKET = 25 << 20
"""Bytes from which a bucket is full: a reduction of less does not reach the rate of the links."""
FIRST = 1 << 20
"""Bytes of the bucket that is ready first, so that the links are busy early."""


def plan(sizes: Sequence[int], most: int = BUCKET, first: int = FIRST) -> list[int]:
    """The bucket of each tensor, from 0.

    Args:
        sizes: The bytes of the tensors, in the order in which they are ready.
        most: Bytes from which a bucket is full; a larger tensor has a bucket of its own.
        first: The same of the first bucket.

    The order of the tensors is kept, so that it is that of all ranks.
    """
    buckets: list[int] = []
    bucket = held = 0
    for size in sizes:
        limit = min(first, most) if bucket == 0 else most
        if held and held + size > limit:
            bucket, held = bucket + 1, 0
        buckets.append(bucket)
        held += size
    return buckets
