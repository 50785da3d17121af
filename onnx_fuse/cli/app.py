"""The command line: its commands in their order, and the exit code of each error."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

from onnx_fuse import __version__
from onnx_fuse.cli import (
    bench,
    compare,
    compile,
    doctor,
    extract,
    generate,
    gradient,
    inspect,
    lab,
    optimize,
    progress,
    quantize,
    run,
    show,
    train,
    validate,
)
from onnx_fuse.cli.stderr import print_error
from onnx_fuse.errors import OnnxFuseError, printable
from onnx_fuse.textwrap import wrap

app = typer.Typer(
    name="onnx-fuse",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: no name of an option is cut off in a narrow terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[
        bool, typer.Option("-v", "--version", help="Print the version and exit.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print nothing but warnings and errors.")
    ] = False,
) -> None:
    """Make ONNX models faster, check them, run them, differentiate them and train them.

    Exit codes: 0 done, 1 bad or unsupported input, 2 wrong usage, 3 a check failed.
    """
    if version:
        print(f"onnx-fuse {__version__}")
        raise typer.Exit
    show.quiet.set(quiet)


def _add_command(command: Callable[..., None], examples: Sequence[str]) -> None:
    @wraps(command)
    def run(**options: object) -> None:
        if entry_points(group="onnx_fuse.plugins"):
            from onnx_fuse import plugins

            plugins.load()
        command(**options)

    lines = (f"\b\n{_folded(example)}" for example in examples)
    about = (command.__doc__ or "").partition("\n\n")[0]  # as it is: a help is cut off otherwise
    app.command(short_help=about, epilog="\n\n".join(("Examples:", *lines)))(run)


def _folded(example: str) -> str:
    """The example in lines that fit a terminal, as the shell takes them."""
    return " \\\n    ".join(wrap(example, 74))


# In the order of --help.
for _module in (
    *(optimize, compile, validate, run, generate, gradient, train, quantize, bench, lab, compare),
    *(inspect, extract, doctor),
):
    _add_command(getattr(_module, _module.__name__.rpartition(".")[2]), _module.EXAMPLES)


# Options that take several values, and the form of a value.
_SEVERAL = {
    "--input-shapes": re.compile(r".+:-?\d+(,-?\d+)*"),
    "--dim": re.compile(r".+=\d+([.,:\d]*\d)?"),
    "--providers": re.compile(r"\w+ExecutionProvider"),
}


def expand(arguments: Sequence[str]) -> list[str]:
    """Repeat an option for each of its values, since the parser knows one value for each.

    `--input-shapes a:1,2 b:3` becomes `--input-shapes a:1,2 --input-shapes b:3`. --quiet comes
    first, wherever it stands, and `-o -` is the standard output.
    """
    if "--quiet" in arguments:
        arguments = ["--quiet", *(a for a in arguments if a != "--quiet")]
    result: list[str] = []
    option: str | None = None
    for argument in arguments:
        fits = option is not None and _SEVERAL[option].fullmatch(argument)
        if option is not None and fits and result[-1] != option:
            result.append(option)
        elif argument.startswith("-") or not fits:
            option = None
        option = argument if argument in _SEVERAL else option
        stream = argument == "-" and result and result[-1] in ("-o", "--output")
        result.append("/dev/stdout" if stream else argument)
    return result


def run_command(arguments: Sequence[str], interrupted: Callable[[], bool] = lambda: False) -> int:
    """Run one command line and return its exit code; an error is one line on stderr.

    `interrupted` tells whether a signal came; the caller then reports it.
    """
    show.command_line.set(shlex.join(("onnx-fuse", *arguments)))
    try:
        with progress.shown() if "--quiet" not in arguments else contextlib.nullcontext():
            code = app(arguments, prog_name="onnx-fuse", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0  # typer's own answer to Ctrl-C is 130
    except (KeyboardInterrupt, typer.Abort) as error:
        _end_other_ranks(error)
        return _INTERRUPTED
    except Exception as error:
        if interrupted():
            return _INTERRUPTED
        if "--debug" in arguments and not isinstance(error, (BrokenPipeError, _USAGE)):
            raise
        return _report_error(error)


def _end_other_ranks(error: BaseException) -> None:
    if world := sys.modules.get("onnx_fuse.distributed.world"):
        world.fail(error)


def _report_error(error: Exception) -> int:
    _end_other_ranks(error)
    if isinstance(error, BrokenPipeError):
        # The program that read our output has ended, so nobody would read a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    if isinstance(error, OnnxFuseError):
        return _fail(str(error), error.exit_code)
    if isinstance(error, MemoryError):
        return _fail("this machine has too little memory for the command", 1)
    if isinstance(error, OSError):
        return _fail(f"{error.filename or 'standard output'}: {error.strerror or error}", 1)
    if isinstance(error, _USAGE):
        error.show()
        return 2
    return _fail(f"internal error: {type(error).__name__}: {error}; --debug shows where", 1)


_INTERRUPTED = 130
# The parser's own errors; their base class has no public name in typer.
_USAGE: type[Any] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _fail(text: str, code: int) -> int:
    print_error(printable(text))
    return code
