"""Show results in the terminal, as JSON and as HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from onnx_fuse import report
    from onnx_fuse.program.call import Program
    from onnx_fuse.program.hardware import Hardware
    from onnx_fuse.report.page import Overview, Page, Section


def printer() -> report.Printer:
    """A printer to the terminal that also collects the text for --html."""
    from onnx_fuse.report import Printer

    on_stdout = re.search(r" (-o|--output) /dev/stdout\b", command_line.get())
    return Printer(quiet=quiet.get(), errors=on_stdout is not None)


quiet: ContextVar[bool] = ContextVar("quiet", default=False)
"""Whether only warnings and errors are printed."""
command_line: ContextVar[str] = ContextVar("command_line", default="")
"""The command as it was called, which a page of --html names."""


@dataclass(frozen=True, kw_only=True)
class Reports:
    """Where a command writes its results, beside the terminal."""

    TEXTS: ClassVar = """
        json (--json FILE): Write the results to this file as JSON.
        html (--html FILE): Write a report to this file as one HTML page.
        debug (--debug): Show the traceback of an error.
        """
    json: Path | None = None
    html: Path | None = None
    debug: bool = False

    @property
    def paths(self) -> dict[str, Path | None]:
        """The files by the options that name them."""
        return {"--json": self.json, "--html": self.html}

    def write(
        self,
        printer: report.Printer,
        data: Mapping[str, Any],
        *,
        overview: Overview | None = None,
        device: str = "",
        sections: Callable[[], list[Section]] = list,
    ) -> None:
        """Write the files that were asked for.

        The page begins with `overview` and has `sections`, which are made only for a page; what was
        printed is its last section.
        """
        from onnx_fuse import report

        if self.json:
            command = command_line.get().partition(" ")[2].partition(" ")[0]
            report.write_json(self.json, {"command": command} | dict(data))
        if self.html:
            html = page(printer, data, overview=overview, device=device, sections=sections())
            write_page(self.html, html)


def pages() -> Any:
    """The module of each command's sections, which is slow to import."""
    from onnx_fuse.report import pages

    return pages


def page(
    printer: report.Printer,
    data: Mapping[str, Any],
    *,
    sections: list[Section],
    overview: Overview | None = None,
    device: str = "",
    refresh: float = 0.0,
) -> Page:
    """The page of a command about the model, or the operator, that `data` names."""
    from onnx_fuse.report.page import Overview, Page, Section

    one = data.get("model") or data.get("input") or data.get("op")
    several = ", ".join(model["name"] for model in data.get("models", ()))
    return Page(
        Path(str(one)).name if one else several or "onnx-fuse",
        command_line.get(),
        [*sections, Section("Terminal", printer.blocks, folded=bool(sections))],
        overview or Overview(),
        {"device": device} if device else {},
        refresh,
    )


def write_page(path: Path, content: Page) -> None:
    """Write a page. Raises ModelError if the file cannot be written."""
    from onnx_fuse.report import page as pages

    pages.write(path, content)


def inputs(feeds: Mapping[str, Sequence[int]]) -> str:
    """The shapes of the inputs that were used, on one line."""
    return "inputs: " + ", ".join(f"{name} {list(shape)}" for name, shape in feeds.items())


def kernels(
    printer: report.Printer, program: Program, hw: Hardware, *, explain: bool = True
) -> list[dict[str, Any]]:
    """Show a program's kernels, the slowest ten or (`explain`) all, and return all as JSON values.

    `explain` also shows why each kernel was chosen, and which ones were not.
    """
    from collections import Counter
    from dataclasses import asdict

    from onnx_fuse import bench
    from onnx_fuse.runtime.plan import plan

    sites = bench.sites(program, hw)
    total = sum(s.seconds for s in sites)
    floor = sum(s.floor for s in sites)
    shown = sites if explain else sorted(sites, key=lambda s: -s.seconds)[:_LARGEST]
    columns = ["nodes", "kernel", "config", "µs", "of all", "of floor", *["why"] * explain]
    rows = [
        [
            " ".join(s.nodes[:3]) + (" …" if len(s.nodes) > 3 else ""),
            f"{s.op} {s.kernel}",
            s.config,
            f"{s.seconds * 1e6:.1f}",
            f"{s.seconds / total:.0%}",
            f"{s.floor / s.seconds:.0%}",
            *([s.why] if explain else []),
        ]
        for s in shown
    ]
    many = f"the {len(shown)} slowest of {len(sites)} calls" if len(shown) < len(sites) else "calls"
    printer.table(f"{many} on {hw.name}, predicted", columns, rows, left=3)
    refused = Counter((s.op, name, why) for s in sites for name, why in s.refused)
    rows = [[f"{op} {name}", why, str(count)] for (op, name, why), count in refused.items()]
    if rows and explain:
        printer.table("kernels that were not possible", ["kernel", "why", "calls"], rows, left=2)
    kinds = Counter(f"{s.op} {s.kernel}" for s in sites).most_common(_KINDS)
    shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in program.inputs)
    printer.text(
        f"{len(sites)} calls, predicted {total * 1e6:.1f} µs; without any other cost, arithmetic "
        f"and memory traffic take at least {floor * 1e6:.3g} µs (the floor)",
        f"most frequent: {', '.join(f'{count} {name}' for name, count in kinds)}",
        f"inputs: {shapes}",
        f"memory: {plan(program)}",
    )
    printer.text(*(f"in parts: {part}" for part in program.in_parts if explain))
    printer.text(*(f"on onnxruntime: {fallback}" for fallback in program.fallbacks))
    if len(shown) < len(sites):
        printer.text("--explain lists all calls, and why each kernel was chosen")
    return [asdict(s) for s in sites]


_LARGEST, _KINDS = 10, 4
