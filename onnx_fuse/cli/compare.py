"""`onnx-fuse compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import with_options

EXAMPLES = (
    "onnx-fuse compare monday.json today.json",
    "onnx-fuse compare adamw.json lion.json --html compared.html",
)
OPTIONS = """
    a (A.json): A report that --json wrote.
    b (B.json): Another one, of the same command.
    """


@with_options(OPTIONS)
def compare(*, a: Path, b: Path, reports: show.Reports) -> None:
    """Show two reports of one command side by side: times, sizes, errors, or training curves."""
    from onnx_fuse.report import compare as comparison

    files.check_paths({"A": a, "B": b}, reports.paths)
    printer = show.printer()
    left, right = comparison.read(a), comparison.read(b)
    names = (a.name, b.name) if a.name != b.name else (str(a), str(b))
    comparison.check_alike(names, left, right)
    printer.text(*comparison.settings(names, left, right))
    rows = comparison.rows(left, right)
    printer.table("", ["", *names, "change"], rows)
    if not rows:
        printer.text("these reports have no numbers in common")
    data = {"a": str(a), "b": str(b), "rows": rows}
    reports.write(
        printer,
        {"model": " and ".join(names)} | data,
        overview=comparison.overview(names, left, right),
        sections=lambda: comparison.sections(names, left, right),
    )
