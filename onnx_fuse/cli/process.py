"""The process of the command: signals, streams and exit.

Nothing heavy is imported before the handlers are in place that make Ctrl-C one line and no
traceback.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings

from onnx_fuse.cli.stderr import print_error

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import TextIO

_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "terminated: hung up"}


class Interrupts:
    """Signal handlers that raise KeyboardInterrupt, and see to it that it is not lost.

    Half-written files are then cleaned up on the way out. An import that is interrupted may turn
    KeyboardInterrupt into another exception, so `came` keeps the signal; a destructor would drop
    it, so it is raised once more.
    """

    def __init__(self) -> None:
        self.came: signal.Signals | None = None

    def install(self) -> None:
        """Install the handlers for all signals that are not ignored."""
        for name in _WORDS:
            number = getattr(signal, name, None)  # not every system has each
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._raise)
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._raise_again)
            sys.unraisablehook = self._on_unraisable

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.came = self.came or signal.Signals(number)
        raise KeyboardInterrupt

    def _raise_again(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def _on_unraisable(self, fault: sys.UnraisableHookArgs) -> None:
        if issubclass(fault.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        elif self.came is None:
            sys.__unraisablehook__(fault)

    def ignore(self) -> None:
        """Ignore signals from now on, since nothing is left that one could interrupt."""
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Python remembers that Ctrl-C ended an exec(), of which imports have many, and would exit
        # as if the signal had killed it; the next exec() makes it forget.
        exec("")


def _open_streams() -> None:
    """Open something in place of standard streams that the caller has closed (`>&-`).

    Otherwise a file that is opened later would take the number of one, and receive the output.
    Printing to a stream that is open for reading alone fails at once.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Takes the lowest number that is free: this one.
            os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            stream = os.fdopen(number, "w" if number else "r", closefd=False)
            setattr(sys, name, stream)


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print_error(f"warning: {message}")


_YOUNG = 200_000
"""Objects after which the collector looks for garbage: what is imported and read is none, and to
walk it every 700 objects takes a quarter of a command's time."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: run the command, and make every error one line on stderr and an exit code."""
    gc.set_threshold(_YOUNG, 20)
    interrupts = Interrupts()
    code = 1
    try:
        interrupts.install()
        _open_streams()
        warnings.showwarning = _warn
        from onnx_fuse.cli.app import expand, run_command

        code = run_command(
            expand(sys.argv[1:] if arguments is None else arguments),
            interrupted=lambda: interrupts.came is not None,
        )
    except BaseException:
        if interrupts.came is None:
            raise
    interrupts.ignore()
    if interrupts.came is not None:
        print_error(_WORDS[interrupts.came.name])
        code = 128 + interrupts.came
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # it was reported before, and the exit would flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)
