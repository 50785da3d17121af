"""What `--help` says: full sentences, and examples that the parser accepts."""

import os
import shlex
import subprocess
import sys

import pytest
import typer

from onnx_fuse.cli.app import app, expand

ROOT = typer.main.get_command(app)
COMMANDS = sorted(ROOT.commands)  # type: ignore[attr-defined]


def examples(name: str) -> list[str]:
    """The examples at the end of a command's help."""
    head, *found = (ROOT.commands[name].epilog or "").split("\n\n")  # type: ignore[attr-defined]
    assert head == "Examples:"
    return [example.removeprefix("\b\n").replace("\\\n", " ") for example in found]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_command_has_a_sentence(name: str) -> None:
    command = ROOT.commands[name]  # type: ignore[attr-defined]
    texts = {p.name: p.help or "" for p in command.params}
    texts["the command"] = command.help
    bad = {
        option: text
        for option, text in texts.items()
        if len(text.split()) < 4 or not text[0].isupper() or not text.rstrip().endswith((".", "]"))
    }
    assert not bad


def test_a_range_without_its_end_is_shown() -> None:
    texts = {p.name: p.help for p in ROOT.commands["generate"].params}  # type: ignore[attr-defined]
    assert texts["top_p"].endswith("together.  [0<x<=1]")
    assert texts["repetition_penalty"].endswith("factor.  [x>0]")


def test_a_shell_completes_commands_and_options() -> None:
    found = []
    for line in ("onnx-fuse opt", "onnx-fuse optimize --prec"):
        words = {"_ONNX_FUSE_COMPLETE": "complete_bash", "COMP_WORDS": line}
        words |= {"COMP_CWORD": str(line.count(" "))}
        command = [sys.executable, "-m", "onnx_fuse"]
        found.append(
            subprocess.run(
                command, env=os.environ | words, capture_output=True, text=True, check=False
            ).stdout.strip()
        )
    assert found == ["optimize", "--precision"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_command_are_ones_that_it_takes(name: str) -> None:
    found = examples(name)
    assert len(found) >= 2
    for example in found:
        program, command, *arguments = shlex.split(example)
        assert (program, command) == ("onnx-fuse", name)
        # Parses all options and arguments, or raises a usage error; runs nothing.
        ROOT.commands[name].make_context(name, expand(arguments))  # type: ignore[attr-defined]
