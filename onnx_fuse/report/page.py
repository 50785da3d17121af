"""One HTML page that holds all of itself: text and tables as HTML, drawings as data and a script.

The page loads nothing: style, script and data stand in it, and its content security policy forbids
any request. Tables and text need no script. Each drawing is a `View`, whose data is a block of JSON
that the script of its kind (report/assets) draws.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from importlib import metadata, resources
from pathlib import Path
from typing import Any, TypeAlias

from onnx_fuse import __version__
from onnx_fuse.errors import printable
from onnx_fuse.report.files import strict, write_whole

_SCRIPTS = ("page.js", "charts.js", "plane.js", "graph.js", "start.js")


@dataclass
class Lines:
    """Lines of text."""

    lines: list[str]


@dataclass
class Table:
    """A table; an empty row draws a line."""

    title: str
    header: list[str]
    rows: list[list[str]]
    left: int = 1
    """The number of columns that are left-aligned."""


@dataclass
class View:
    """A drawing: `kind` is that of a function in the scripts, `data` what that function draws."""

    kind: str
    label: str
    """The text alternative of the drawing, for a reader who cannot see it."""
    data: Mapping[str, Any]


Part: TypeAlias = "Lines | Table | View"
Axis: TypeAlias = Mapping[str, Any]
"""An axis of a chart: its `label` and `unit`, and whether it is `log` or readers `choose`."""


def bars(title: str, rows: Sequence[Sequence[Any]], *, share: bool = False) -> View:
    """A bar of seconds for each row (name, seconds, ...); `share` says its part of the whole."""
    return View("bars", title, {"title": title, "unit": "s", "share": share, "rows": rows})


def chart(
    label: str, title: str, x: Axis, y: Axis, *series: Mapping[str, Any], **more: object
) -> View:
    """Lines, points or columns over two axes; `more` is what else the script draws."""
    return View("chart", label, {"title": title, "x": x, "y": y, "series": series, **more})


@dataclass
class Section:
    """A part of the page with a title of its own."""

    title: str
    parts: Sequence[Part]
    note: str = ""
    """A sentence below the title."""
    folded: bool = True
    """Whether the section, unless it is the only one, is closed until the reader opens it."""


@dataclass
class Overview:
    """What a reader should see first, in one screen."""

    verdict: str = ""
    """The result in a few words."""
    ok: bool | None = None
    """Whether the verdict is good; None where it is neither good nor bad."""
    figures: Mapping[str, str] = field(default_factory=dict)
    """The most important numbers by their names; three fit the width of a phone."""
    commands: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """What to do next: a sentence, and the words of its command."""


@dataclass
class Page:
    """A report of one command."""

    title: str
    """The model's name, or what else the report is about."""
    command: str
    """The command line."""
    sections: list[Section]
    overview: Overview = field(default_factory=Overview)
    """The summary at the top."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Further facts for the heading, such as the device."""
    refresh: float = 0.0
    """Seconds after which the page loads itself again, as the command still runs; 0 for never."""


def write(path: Path, page: Page) -> None:
    """Write the page whole or not at all. Raises ModelError if the file cannot be written."""
    write_whole(path, render(page))


def render(page: Page) -> str:
    """The page as HTML."""
    names = [_anchor(s.title) for s in page.sections]
    views: list[str] = []
    body = "\n".join(
        _section(section, name, views, folded=section.folded and len(names) > 1)
        for section, name in zip(page.sections, names, strict=True)
    )
    links = "".join(
        f'<a href="#{name}">{_text(section.title)}</a>'
        for section, name in zip(page.sections, names, strict=True)
    )
    return _PAGE.format(
        title=_text(" · ".join((page.title, " ".join(page.command.split()[:2])))),
        heading=_text(page.title),
        style=_asset("page.css"),
        command=f"<code>{_text(page.command)}</code>" if page.command else "",
        overview=_overview(page.overview),
        facts="".join(
            f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in _facts(page).items()
        ),
        links=f"<div>{links}</div>" if len(names) > 1 else "",
        body=body,
        data="\n".join(views),
        refresh=f"{page.refresh:g}",
        script="\n".join(_asset(name) for name in _SCRIPTS),
    )


def _overview(overview: Overview) -> str:
    parts = []
    if overview.verdict:
        kind = {True: "good", False: "bad", None: "plain"}[overview.ok]
        mark = {True: "✓ ", False: "✗ ", None: ""}[overview.ok]
        parts.append(f'<p class="verdict {kind}">{mark}{_text(overview.verdict)}</p>')
    figures = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"
        for name, value in overview.figures.items()
    )
    if figures:
        parts.append(f'<dl class="figures">{figures}</dl>')
    steps = "".join(
        f"<li>{_text(sentence)}: <code>{_text(shlex.join(map(str, words)))}</code></li>"
        for sentence, words in overview.commands.items()
    )
    if steps:
        parts.append(f'<h2>What to do next</h2><ul class="next">{steps}</ul>')
    return "\n".join(parts)


def _facts(page: Page) -> dict[str, str]:
    installed = {d.name: d.version for d in metadata.distributions(name="onnxruntime")}
    versions = {"onnx-fuse": __version__, **installed}
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    now = datetime.now().astimezone()
    return {**page.facts, **versions, "system": system, "date": now.strftime("%Y-%m-%d %H:%M %Z")}


def _section(section: Section, name: str, views: list[str], *, folded: bool) -> str:
    parts = "\n".join(_part(part, views) for part in section.parts)
    note = f'<p class="note">{_text(section.note)}</p>' if section.note else ""
    return (
        f'<section id="{name}"><details{"" if folded else " open"}>'
        f"<summary><h2>{_text(section.title)}</h2></summary>{note}{parts}</details></section>"
    )


def _part(part: Part, views: list[str]) -> str:
    if isinstance(part, Lines):
        return f"<pre>{_text(chr(10).join(part.lines))}</pre>"
    if isinstance(part, Table):
        return _table(part)
    number = len(views)
    data = json.dumps(strict(part.data), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    data = data.replace("<", "\\u003c")
    if not data.isprintable():  # as in the text of the page
        data = "".join(c if c.isprintable() else f"\\{printable(c)}" for c in data)
    views.append(f'<script type="application/json" id="data-{number}">{data}</script>')
    return (
        f'<figure class="view {part.kind}" data-kind="{part.kind}" data-source="data-{number}" '
        f'aria-label="{_text(part.label)}"><noscript>This drawing needs JavaScript.</noscript>'
        "</figure>"
    )


def _table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{"" if i < table.left else _NUMBER}>{_text(name)}</th>'
        for i, name in enumerate(table.header)
    )
    groups, rows = [], list[str]()
    for row in table.rows:
        if not row:
            groups.append(rows)
            rows = []
            continue
        cells = [
            f"<td{'' if i < table.left else _NUMBER}>{_text(c)}</td>" for i, c in enumerate(row)
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    groups.append(rows)
    body = "".join(f"<tbody>{''.join(rows)}</tbody>" for rows in groups if rows)
    caption = f"<caption>{_text(table.title)}</caption>" if table.title else ""
    label = _text(table.title or "table")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table>{caption}'
        f"<thead><tr>{head}</tr></thead>{body}</table></div>"
    )


_NUMBER = ' class="number"'


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _text(text: str) -> str:
    return escape(printable(text))


def _asset(name: str) -> str:
    return (resources.files("onnx_fuse.report") / "assets" / name).read_text(encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body data-refresh="{refresh}">
<header>
<h1>{heading}</h1>
{overview}
<details class="about"><summary>About this run</summary>
{command}
<dl class="facts">{facts}</dl>
</details>
</header>
<nav aria-label="Sections">{links}</nav>
<main>
{body}
</main>
{data}
<script>
(() => {{
"use strict";
{script}
}})();
</script>
</body>
</html>
"""
