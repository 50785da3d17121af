"""The command line itself: its commands in their order, and a fault as an exit code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from onnx_fuse import __version__
from onnx_fuse.cli import bench, doctor, gradient, inspect, optimize, run, train, validate
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
app.command()(validate.validate)
app.command()(run.run)
app.command()(gradient.gradient)
app.command()(train.train)
app.command()(bench.bench)
app.command()(inspect.inspect)
app.command()(doctor.doctor)


_SHAPE = re.compile(r".+:-?\d+(,-?\d+)*")


def expand(arguments: Sequence[str]) -> list[str]:
    """`--input-shapes a:1,2 b:3` to one option a value, which is all the parser knows."""
    result: list[str] = []
    inside = False
    for argument in arguments:
        if inside and _SHAPE.fullmatch(argument) and result[-1] != "--input-shapes":
            result.append("--input-shapes")
        elif argument.startswith("-") or not _SHAPE.fullmatch(argument):
            inside = False
        inside = inside or argument == "--input-shapes"
        result.append(argument)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: every fault becomes an exit code and one line on stderr."""
    arguments = expand(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run_command(arguments))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    debug = "--debug" in arguments
    try:
        code = app(arguments, prog_name="onnx-fuse", standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPTED:  # typer's own answer to Ctrl-C
            return _fail("interrupted", code)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output left; nobody is there to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OnnxFuseError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except (MemoryError, OSError) as error:
        if debug:
            raise
        if isinstance(error, MemoryError):
            return _fail("out of memory", 1)
        return _fail(f"{error.filename or 'standard output'}: {error.strerror or error}", 1)
    except Exception as error:
        if isinstance(error, _USAGE):
            error.show()
            return 2
        if debug:
            raise
        return _fail(f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1)


_INTERRUPTED = 130
# The parser's own errors; their base class has no public name in typer.
_USAGE: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _fail(text: str, code: int) -> int:
    line = printable(" ".join(text.split()))
    with contextlib.suppress(OSError):
        print(f"onnx-fuse: {line}", file=sys.stderr)
    return code
