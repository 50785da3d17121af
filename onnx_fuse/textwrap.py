"""How text and tables fit a terminal: no word is broken but after a separator within it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, chop_cells

_PARTS = re.compile(r"[^./_,:+=\-]*[./_,:+=\-]+|[^./_,:+=\-]+")
_CAPITALS = re.compile(r"[A-Z]+[^A-Z]*|[^A-Z]+")
_LONG = 16
"""A longer word may be broken after a separator, in a table that does not fit otherwise."""
_BORDERS = 3
"""The characters that a column takes beside its text."""


def wrap(text: str, width: int, indent: int = 0) -> list[str]:
    """Break a text into lines of at most `width` characters, between words.

    A word that does not fit a line is broken after one of `. / _ , : + = -` or before a capital
    letter, and else where the line ends. Lines after the first begin with `indent` spaces.
    """
    lines: list[str] = []
    for paragraph in text.split("\n"):
        lead = paragraph[: len(paragraph) - len(paragraph.lstrip())]
        line, empty = lead, True
        for word in paragraph.split():
            joined = f"{line}{word}" if empty else f"{line} {word}"
            if cell_len(joined) <= width:
                line, empty = joined, False
                continue
            margin = " " * indent if lines or not empty else line
            if not empty:
                lines.append(line)
            pieces = _broken(word, max(width - len(margin), 1))
            lines += [f"{margin}{piece}" for piece in pieces[:-1]]
            line, empty = f"{margin}{pieces[-1]}", False
        lines.append(line)
    return lines


def _broken(word: str, width: int) -> list[str]:
    """The word in lines of at most `width` characters."""
    if cell_len(word) <= width:
        return [word]
    lines = [""]
    for piece in _pieces(word):
        while cell_len(piece) > width:
            *full_lines, piece = chop_cells(piece, width)
            lines += full_lines
        if cell_len(lines[-1]) + cell_len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return [line for line in lines if line] or [word]


def _pieces(word: str) -> list[str]:
    """The parts of a word between which it may be broken."""
    return [p for part in _PARTS.findall(word) for p in _CAPITALS.findall(part)]


def _narrowest(cells: Sequence[str], longest: int) -> int:
    """The width that a column needs at least if words beyond `longest` characters may be broken."""
    width = 1
    for word in (word for cell in cells for word in cell.split()):
        fits = cell_len(word) <= longest
        width = max(width, *(cell_len(part) for part in ([word] if fits else _pieces(word))))
    return width


def widths(table: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """The widths of a table's columns so that it fits `width`, or None where it cannot.

    `table` is rows of cells, the header first. Columns have the width of their text where there is
    room, and else share what their longest words leave.
    """
    columns = [[row[i] for row in table if row] for i in range(len(table[0]))]
    room = width - _BORDERS * len(columns) - 1
    wanted = [max(cell_len(line) for c in cells for line in c.split("\n")) for cells in columns]
    if sum(wanted) <= room:
        return wanted
    for longest in (width, _LONG):
        narrowest = [_narrowest(cells, longest) for cells in columns]
        if sum(narrowest) <= room:
            return _filled(narrowest, wanted, room)
    return None


def _filled(columns: list[int], wanted: Sequence[int], room: int) -> list[int]:
    """Give what is left of `room` to the columns whose text is folded the most."""
    for _ in range(room - sum(columns)):
        i = max(range(len(columns)), key=lambda i: wanted[i] / columns[i])
        columns[i] += 1
    return columns


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as notebooks show it."""

    def line(tag: str, cells: Sequence[object]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(str(c))}</{tag}>' for c in cells)}</tr>"

    lines = "".join(line("td", row) for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption>{line('th', head)}{lines}</table>"
