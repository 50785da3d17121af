"""What goes to standard error; imports as little as `cli.process` does."""

from __future__ import annotations

import sys


def print_error(text: str) -> None:
    """Print a text as one line on stderr, on a terminal folded between words."""
    line = f"onnx-fuse: {' '.join(text.split())}"
    try:
        if sys.stderr.isatty():
            import shutil
            import textwrap

            width = shutil.get_terminal_size().columns
            line = textwrap.fill(
                line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
        print(line, file=sys.stderr)
    except OSError:
        return  # nobody can be told
