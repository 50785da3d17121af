"""The command line itself: its commands in their order, and a fault as an exit code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from onnx_fuse import __version__
from onnx_fuse.cli import (
    bench,
    compile,
    doctor,
    gradient,
    inspect,
    optimize,
    run,
    train,
    validate,
)
from onnx_fuse.errors import OnnxFuseError, printable

app = typer.Typer(
    name="onnx-fuse",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("-v", "--version", help="Print the version.")] = False,
) -> None:
    """Fuse, run, check, differentiate and train ONNX models."""
    if version:
        print(f"onnx-fuse {__version__}")
        raise typer.Exit


# In the order of --help.
app.command()(optimize.optimize)
app.command()(compile.compile)
app.command()(validate.validate)
app.command()(run.run)
app.command()(gradient.gradient)
app.command()(train.train)
app.command()(bench.bench)
app.command()(inspect.inspect)
app.command()(doctor.doctor)


# Options that take several values, and what each looks like.
_SEVERAL = {
    "--input-shapes": re.compile(r".+:-?\d+(,-?\d+)*"),
    "--dim": re.compile(r".+=\d+([.,:\d]*\d)?"),
}


def expand(arguments: Sequence[str]) -> list[str]:
    """`--input-shapes a:1,2 b:3` to one option a value, which is all the parser knows."""
    result: list[str] = []
    option: str | None = None
    for argument in arguments:
        fits = option is not None and _SEVERAL[option].fullmatch(argument)
        if option is not None and fits and result[-1] != option:
            result.append(option)
        elif argument.startswith("-") or not fits:
            option = None
        option = argument if argument in _SEVERAL else option
        result.append(argument)
    return result


def run_command(arguments: Sequence[str], interrupted: Callable[[], bool] = lambda: False) -> int:
    """Run one command line and return its exit code; a fault is one line on stderr.

    `interrupted` tells whether a signal came: it is then the caller's to say so.
    """
    try:
        code = app(arguments, prog_name="onnx-fuse", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0  # typer's own answer to Ctrl-C is 130
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except Exception as error:
        if interrupted():
            return _INTERRUPTED
        if "--debug" in arguments and not isinstance(error, (BrokenPipeError, _USAGE)):
            raise
        return _report(error)


def _report(error: Exception) -> int:
    """Say what went wrong, and with which exit code that ends."""
    if isinstance(error, BrokenPipeError):
        # The reader of our output left; nobody is there to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    if isinstance(error, OnnxFuseError):
        return _fail(str(error), error.exit_code)
    if isinstance(error, MemoryError):
        return _fail("out of memory", 1)
    if isinstance(error, OSError):
        return _fail(f"{error.filename or 'standard output'}: {error.strerror or error}", 1)
    if isinstance(error, _USAGE):
        error.show()
        return 2
    return _fail(f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1)


_INTERRUPTED = 130
# The parser's own errors; their base class has no public name in typer.
_USAGE: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _fail(text: str, code: int) -> int:
    line = printable(" ".join(text.split()))
    with contextlib.suppress(OSError):
        print(f"onnx-fuse: {line}", file=sys.stderr)
    return code
