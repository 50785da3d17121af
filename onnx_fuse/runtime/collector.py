"""Python's garbage collector beside objects that stay: programs of shapes, and their launches.

A collection walks what is young, and now and then everything in the process, whoever made it. That
takes tenths of a second where a model of many shapes is loaded, and is not to fall into a run. The
collector's own settings stay as the user has them.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Kept(threading.local):
    """What this thread's block has made so far: objects that stay, and garbage beside them."""

    stays = False
    garbage = False


_KEPT = _Kept()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within the block nothing is collected. Blocks may stand inside each other.

    What a block allocates and frees again does not count for the collector, which would otherwise
    take it for objects that stay, and walk everything because there are so many. A collector that
    the user has turned off stays off.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if _KEPT.stays:
                _settle()
            gc.enable()


def keep(*, garbage: bool = False) -> None:
    """Say within a block that it has made objects that stay, and perhaps garbage beside them."""
    _KEPT.stays = True
    _KEPT.garbage |= garbage


def _settle() -> None:
    """Count what there is, but for new garbage, among the old objects of the collector.

    It would come to count the parts of a new program as old by itself, and walk everything in the
    process because there are so many more.
    """
    if _KEPT.garbage:
        gc.collect(0)
    _KEPT.stays = _KEPT.garbage = False
    if not gc.get_freeze_count():  # what another froze stays so
        gc.freeze()
        gc.unfreeze()
