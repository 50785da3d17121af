"""The progress of long work: the work reports its steps, and whoever wants to see them watches.

Nothing is shown here. The command line draws a bar (`cli.progress`), and the logger "onnx_fuse" has
a line, of level INFO, for the beginning of each work.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeAlias

Watch: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, the steps done and their number, which is 0 where nobody knows.
What is being done is "" where there is nothing to show."""

_log = logging.getLogger("onnx_fuse")
_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


def report(what: str, done: int = 0, total: int = 0) -> None:
    """Say what is being done now, and that `done` of `total` steps of it are over."""
    watch = _watch.get()
    if what and not done:
        _log.info("%s", what)
    if watch is not None:
        watch(what, done, total)


def quiet() -> None:
    """Say that nothing is done at the moment, or that something is about to be printed."""
    report("")


@contextlib.contextmanager
def watched(watch: Watch | None) -> Iterator[None]:
    """Send the reports of the block to `watch`; None drops them."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def watcher() -> Watch | None:
    """The watcher of this thread, or None without one."""
    return _watch.get()
