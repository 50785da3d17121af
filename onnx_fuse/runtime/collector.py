"""Python's garbage collector beside objects that stay: programs of shapes, and their launches.

A collection walks what is young, and now and then everything in the process, whoever made it. That
takes tenths of a second where a model of many shapes is loaded, and is not to fall into a run. The
collector's own settings stay as the user has them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


class _Blocks:
    """The blocks of all threads, since the collector is the process's."""

    lock = threading.RLock()  # a finalizer may begin a block anywhere
    blocks = 0
    was = False  # whether the collector was on before the first of them
    stays = False
    """Whether one of them made objects that stay."""
    generation = -1
    """The oldest objects among which there may be garbage; none of -1."""
    frozen = False  # by somebody else: it stays so, and to count it anew would walk all of it


def _forget() -> None:
    """A forked child has none of its parent's other threads, which may have been in blocks."""
    if _Blocks.blocks and _Blocks.was:
        gc.enable()
    _Blocks.lock, _Blocks.blocks = threading.RLock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within the block nothing is collected. Blocks may stand inside and beside each other.

    What a block allocates and frees again does not count for the collector, which would otherwise
    take it for objects that stay, and walk everything because there are so many. A collector that
    the user has turned off stays off.
    """
    with _Blocks.lock:
        if not _Blocks.blocks:
            _Blocks.was = gc.isenabled()
            gc.disable()
        _Blocks.blocks += 1
    try:
        yield
    finally:
        with _Blocks.lock:
            generation = -1
            if _Blocks.blocks == 1:
                generation, _Blocks.generation = _Blocks.generation, -1
        if generation >= 0 and _Blocks.was:
            gc.collect(generation)  # what that frees may wait for locks of other blocks
        with _Blocks.lock:
            _Blocks.blocks = max(0, _Blocks.blocks - 1)  # a fork within the block has forgotten it
            if not _Blocks.blocks:
                if _Blocks.was:
                    _settle()
                    gc.enable()
                _Blocks.stays = False


def keep(*, garbage: bool = False, everything: bool = False) -> None:
    """Say within a block that it has made objects that stay, and perhaps garbage beside them.

    With `everything` the collector walks all there is once, at the end of the block: a run that has
    taken seconds takes a tenth more, so that a later one of milliseconds does not.
    """
    _Blocks.stays = True
    _Blocks.generation = max(_Blocks.generation, 2 if everything else 0 if garbage else -1)


def _settle() -> None:
    """Count what has been made among the old objects of the collector.

    It would come to count the parts of a new program as old by itself, and walk everything in the
    process because there are so many more.
    """
    _Blocks.frozen = _Blocks.frozen or (_Blocks.stays and gc.get_freeze_count() > 0)
    if _Blocks.stays and not _Blocks.frozen:
        gc.freeze()
        gc.unfreeze()
