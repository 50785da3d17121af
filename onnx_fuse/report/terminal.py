"""Summaries of models and tables of results, in the terminal."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_fuse import textwrap
from onnx_fuse.errors import printable
from onnx_fuse.progress import quiet
from onnx_fuse.report.page import Lines, Part, Table

if TYPE_CHECKING:
    import onnx_ir as ir
    from rich.console import Console

    from onnx_fuse.validation.check import Check
    from onnx_fuse.validation.compare import Difference
    from onnx_fuse.validation.gradients import GradientCheck


@dataclass
class Summary:
    """The inputs, outputs, operators and sizes of a model."""

    name: str
    opset: str
    ir_version: int
    producer: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    ops: dict[str, int]
    parameters: int
    bytes: int

    @property
    def nodes(self) -> int:
        """The number of nodes, without Constant nodes."""
        return sum(self.ops.values())


def summary(model: ir.Model, name: str, path: str | os.PathLike[str] | None = None) -> Summary:
    """The Summary of a model; its bytes are those of its files where it has a `path`."""
    import onnx_ir as ir

    from onnx_fuse.importer.save import weight_bytes

    graph = model.graph
    ops: Counter[str] = Counter()
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if node.op_type != "Constant":  # data, not an operation
            ops[f"{node.domain}.{node.op_type}" if node.domain else node.op_type] += 1
    tensors = [v.const_value for v in graph.initializers.values() if v.const_value is not None]
    return Summary(
        name=name,
        opset=", ".join(f"{d or 'ai.onnx'} {v}" for d, v in graph.opset_imports.items()),
        ir_version=model.ir_version,
        producer=f"{model.producer_name or ''} {model.producer_version or ''}".strip(),
        inputs={v.name or "": _type(v) for v in graph.inputs if v.name not in graph.initializers},
        outputs={v.name or "": _type(v) for v in graph.outputs},
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        parameters=sum(t.size for t in tensors if t.dtype.is_floating_point()),
        bytes=file_bytes(path) if path else weight_bytes(model),
    )


def file_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of a model file and of the data file that `onnx.save.save` puts beside it."""
    files = (Path(path), Path(f"{os.fspath(path)}.data"))
    return sum(f.stat().st_size for f in files if f.is_file())


def _type(value: ir.Value) -> str:
    kind = value.dtype.name.lower() if value.dtype is not None else str(value.type)
    if value.shape is None:
        return kind
    dims = (d if isinstance(d, int) else (d.value or "?") for d in value.shape)
    return f"{kind} [{', '.join(str(d) for d in dims)}]"


# ---- tables ----------------------------------------------------------------------------------


class Printer:
    """The console of one command: it prints, and remembers, so that `--html` can write it too."""

    def __init__(self, *, quiet: bool = False, errors: bool = False) -> None:
        """A console that is `quiet` prints nothing; `errors` is one on standard error."""
        self.blocks: list[Part] = []
        """All that was printed, in order."""
        from rich.console import Console

        class Unread(Console):
            def on_broken_pipe(self) -> None:
                """Ignore that the reader of the output has gone: the command still writes its
                files.
                """
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                self.begin_capture()
                self.end_capture()  # drops what could not be written

        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
        self.console: Console = Unread(
            record=True, width=width, highlight=False, soft_wrap=False, quiet=quiet, stderr=errors
        )

    def text(self, *lines: str) -> None:
        """Print lines of text; in a terminal, lines that are too long break between words."""
        last = self.blocks[-1] if self.blocks else None
        if isinstance(last, Lines):
            last.lines += lines
        else:
            self.blocks.append(Lines(list(lines)))
        self._lines(lines)

    def _lines(self, lines: Iterable[str]) -> None:
        quiet()
        for line in lines:
            line = printable(line)
            if self.console.is_terminal:
                indent = len(line) - len(line.lstrip()) + 2
                line = "\n".join(textwrap.wrap(line, self.console.width, indent))
            self.console.print(line, markup=False, soft_wrap=True)

    def table(
        self, title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1
    ) -> None:
        """A table whose first `left` columns are left-aligned; an empty row draws a line.

        Where the columns do not fit the terminal, each row is a paragraph with a line a column.
        """
        from rich import table as tables
        from rich.text import Text

        body = [list(row) for row in rows]
        self.blocks.append(Table(title, list(header), body, left))
        quiet()
        cells = [[printable(cell) for cell in row] for row in (header, *body)]
        widths = textwrap.widths(cells, self.console.width)
        if title:
            self.console.print(Text(title, style="bold"))
        if widths is None:
            self._paragraphs(cells[0], cells[1:])
            return
        table = tables.Table()
        for i, (name, width) in enumerate(zip(cells[0], widths, strict=True)):
            head = "\n".join(textwrap.wrap(name, width))
            table.add_column(
                Text(head), justify="left" if i < left else "right", width=width, no_wrap=True
            )
        for row in cells[1:]:
            if not row:
                table.add_section()
                continue
            folded = ("\n".join(textwrap.wrap(c, w)) for c, w in zip(row, widths, strict=True))
            table.add_row(*(Text(cell) for cell in folded))
        self.console.print(table)

    def _paragraphs(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        for row in rows:
            for i, (name, cell) in enumerate(zip(header, row, strict=False)):
                self._lines([cell] if i == 0 else [f"  {name}: {cell}"] if cell else [])


def models_rows(models: Sequence[Summary]) -> list[list[str]]:
    """The rows of a table with one column a model: ends, operators, sizes."""
    rows = [
        ["opset", *(m.opset for m in models)],
        ["ir version", *(str(m.ir_version) for m in models)],
    ]
    for kind in ("inputs", "outputs"):
        ends: list[Mapping[str, str]] = [getattr(m, kind) for m in models]
        names = dict.fromkeys(n for end in ends for n in end)
        rows += [[f"{kind[:-1]} {name}", *(end.get(name, "") for end in ends)] for name in names]
    rows.append([])
    ops = dict.fromkeys(op for m in models for op in m.ops)
    rows += [[op, *(str(m.ops.get(op, "")) for m in models)] for op in ops]
    rows.append([])
    rows.append(["nodes, without Constant", *(str(m.nodes) for m in models)])
    rows.append(["parameters", *(f"{m.parameters:,}" for m in models)])
    rows.append(["bytes", *(f"{m.bytes:,}" for m in models)])
    return rows


def relative_size(difference: Difference) -> str:
    """How large a difference is beside the output's largest value, as a phrase; "" for none."""
    if not difference.max_abs or not difference.scale or difference.max_abs == float("inf"):
        return ""
    ratio = difference.max_abs / difference.scale
    if ratio < 1e-6:
        return "; less than one millionth of the output's largest value"
    if ratio < 1e-3:
        return f"; {ratio * 1e6:.0f} millionths of the output's largest value"
    return f"; {ratio:.2%} of the output's largest value"


_NAMED = 4  # inputs of a check


def check_lines(check: Check, *, inputs: bool = True) -> list[str]:
    """A Check in a few lines: the verdict, the worst output, `inputs`, the notes, the blame."""
    worst = check.worst
    lines = []
    if worst is None:
        lines.append("check: there was nothing to compare")
    else:
        verdict = "ok" if check.ok else "FAILED"
        lines.append(
            f"check {verdict}: largest difference {worst.max_abs:.3g} (limit {worst.limit:.3g}) at "
            f"{worst.where}{relative_size(worst)}"
            + ("" if worst.ok else f"; both run {worst.level}")
        )
    if inputs:
        first = [f"{name} {shape}" for name, shape in (*check.feeds, {})[0].items()]
        more = f", and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
        sets = f"; and {len(check.feeds) - 1} other sets (--json has all)"
        sets = sets if check.feeds[1:] else ""
        lines.append(f"  inputs: {', '.join(first[:_NAMED])}{more}{sets}")
    lines.append(f"  tolerance: {check.tolerance.reason}")
    lines.extend(f"  wrong size: {sentence}" for sentence in check.sizes)
    lines.extend(f"  note: {note}" for note in check.notes)
    for culprit in check.culprits:
        certainty = "confirmed" if culprit.confirmed else "not the only cause"
        lines.append(f"  culprit: {culprit} ({certainty})")
    return lines


def gradient_lines(check: GradientCheck) -> list[str]:
    """A GradientCheck in a few lines: the verdict, the worst tensor, each failing one."""
    verdict = "ok" if check.ok else "FAILED"
    lines = [
        f"gradients {verdict}: {len(check.errors)} tensors, against central differences in float64"
    ]
    lines.extend(
        f"  {e.tensor} ({e.op}): slope {e.slope:.6g}, expected {e.expected:.6g}; its own type off "
        f"by {e.max_abs:.3g} (limit {e.limit:.3g}) at {e.where}"
        f"{f', written by {e.kernel}' if e.kernel else ''}"
        for e in check.failed
    )
    lines.extend(f"  wrong size: {sentence}" for sentence in check.sizes)
    lines.extend(f"  note: {note}" for note in check.notes)
    return lines


def as_dict(model: Summary) -> dict[str, Any]:
    """A summary as JSON values."""
    return asdict(model) | {"nodes": model.nodes}
