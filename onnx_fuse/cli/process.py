"""The process of the command: its signals, its streams, its exit.

Nothing heavy is imported before Ctrl-C is one line and not a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any, TextIO

_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "terminated: hung up"}


class Interrupts:
    """Ctrl-C and requests to end as a KeyboardInterrupt, which is not lost wherever it strikes.

    So whatever stands half-written is cleaned up on the way out. An import that it strikes may turn
    it into another exception: `came` tells. A destructor would drop it: it is raised once more.
    """

    def __init__(self) -> None:
        self.came: signal.Signals | None = None

    def install(self) -> None:
        for name in _WORDS:
            number = getattr(signal, name, None)  # not every system has each
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._come)
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._again)
            sys.unraisablehook = self._dropped

    def _come(self, number: int, frame: FrameType | None) -> None:
        self.came = self.came or signal.Signals(number)
        raise KeyboardInterrupt

    def _again(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def _dropped(self, fault: Any) -> None:
        if issubclass(fault.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        elif self.came is None:
            sys.__unraisablehook__(fault)

    def ignore(self) -> None:
        """The command is over: there is nothing left that a signal could interrupt."""
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Python notes an exec() that Ctrl-C ended, of which imports have many, and would leave as
        # if the signal had killed it; the note goes with the next exec().
        exec("")


def _open_streams() -> None:
    """Put something in place of streams that the caller has closed (`>&-`).

    A file opened later would take the number of one, and receive what is printed. Output that
    nobody can read fails where it is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Takes the lowest number that is free: this one.
            os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            stream = os.fdopen(number, "w" if number else "r", closefd=False)
            setattr(sys, name, stream)


def _say(text: str) -> None:
    try:
        print(f"onnx-fuse: {' '.join(text.split())}", file=sys.stderr)
    except OSError:
        return  # nobody can be told


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning in one line, without the place in the source that gave it."""
    _say(f"warning: {message}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: every fault becomes an exit code and one line on stderr."""
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
        _say(_WORDS[interrupts.came.name])
        code = 128 + interrupts.came
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # it was said already, and the exit would flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)
