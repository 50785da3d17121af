"""A bar on standard error while a command works, where that is a terminal.

The bar appears after two seconds. It shows what is being done, and the remaining time where the
number of steps is known; what takes more than a minute is announced in a line that stays.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from onnx_fuse import progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_PATIENCE = 2.0  # seconds without a bar
_REFRESH = 0.2
_LONG = 60.0  # seconds from which on work is announced
_SETTLED = 0.02  # the part of the work after which its speed tells how long the rest takes


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show the progress of the block, where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    bar = _Bar()
    _bars.append(bar)
    try:
        with progress.watched(bar.update):
            yield
    finally:
        _bars.remove(bar)
        bar.pause()


_bars: list[_Bar] = []


class _Bar:
    """One bar, drawn by a thread of its own while there is work.

    The thread rests during a fork, so that the child inherits no lock that it holds.
    """

    def __init__(self) -> None:
        self._what, self._done, self._total = "", 0, 0
        self._began = self._step_began = time.monotonic()
        self._announced = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def update(self, work: str, done: int, total: int) -> None:
        """Take a report of the work; the bar goes away where there is none."""
        if work != self._what:
            self._step_began = time.monotonic()
        self._what, self._done, self._total = work, done, total
        if not work:
            self.pause()
        elif self._thread is None:
            self._began = time.monotonic()
            self.resume()

    def resume(self) -> None:
        """Draw, if there is work."""
        if not self._what:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._draw, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Take the bar away, and wait until nothing draws any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _draw(self) -> None:
        if self._stop.wait(max(self._began + _PATIENCE - time.monotonic(), 0.0)):
            return
        from rich import progress as rich
        from rich.console import Console

        columns = (
            rich.TextColumn("{task.description}"),
            rich.BarColumn(bar_width=20),
            rich.TextColumn("{task.fields[time]}"),
        )
        console = Console(stderr=True)
        with rich.Progress(
            *columns,
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as bars:
            task = bars.add_task("", total=None, time="")
            while True:
                self._show(bars, task, console)
                if self._stop.wait(_REFRESH):
                    return

    def _show(self, bars: Progress, task: TaskID, console: Console) -> None:
        label, done, total = self._what, self._done, self._total
        spent = time.monotonic() - self._step_began
        text = f"{time.monotonic() - self._began:.0f} s"
        if total and done >= max(_SETTLED * total, 1):
            left = spent / done * (total - done)
            text += f", about {duration(left)} left"
            if left > _LONG and self._announced != label:
                self._announced = label
                console.print(f"{label}: about {duration(left)}", soft_wrap=True)
        bars.update(task, description=label, completed=done, total=total or None)
        bars.update(task, time=text, refresh=True)


def duration(seconds: float) -> str:
    """A duration in words, such as "40 s" or "3 minutes"."""
    if seconds < _LONG:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return "1 minute" if minutes == 1 else f"{minutes} minutes"
    return f"{minutes // 60} h {minutes % 60} min"


def _before_fork() -> None:
    for bar in _bars:
        bar.pause()


def _after_fork() -> None:
    for bar in _bars:
        bar.resume()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)
