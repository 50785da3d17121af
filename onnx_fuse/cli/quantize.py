"""`onnx-fuse quantize`: store a model in few bits, and show what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_fuse.cli import checking, files, show
from onnx_fuse.cli.options import with_options
from onnx_fuse.errors import CheckFailed
from onnx_fuse.quantization.options import QuantizeOptions

if TYPE_CHECKING:
    from onnx_fuse.quantization.quantizer import Quantized

EXAMPLES = (
    "onnx-fuse quantize model.onnx --calibrate data.npz --to int8 -o model.int8.onnx",
    "onnx-fuse quantize model.onnx --calibrate data.npz --to mixed --max-error 0.02 --explain",
    "onnx-fuse quantize model.onnx --calibrate train.npz --data test.npz --metric accuracy",
)
OPTIONS = """
    output (-o, --output OUT): Write to this file. The default is MODEL with the ending
        .quantized.onnx.
    explain (--explain): List the layers, with the reason for the type of each.
    keep (--keep): Keep the result even if it is beyond --max-error.
    """


@with_options(OPTIONS)
def quantize(
    *,
    model: Path,
    output: Path | None = None,
    options: QuantizeOptions,
    explain: bool = False,
    keep: bool = False,
    external: bool = False,
    reports: show.Reports,
) -> None:
    """Write MODEL with QuantizeLinear and DequantizeLinear, which stock onnxruntime runs."""
    from onnx_fuse import progress
    from onnx_fuse.files import written
    from onnx_fuse.importer.load import read
    from onnx_fuse.importer.save import save
    from onnx_fuse.quantization import quantizer
    from onnx_fuse.report.page import Overview

    output = output or files.default_output(model, ".quantized.onnx")
    calibrate: Any = options.calibrate
    data: Any = options.data
    files.check_paths(
        {"MODEL": model, "--calibrate": calibrate, "--data": data},
        {"-o": files.with_weights(output), **reports.paths},
    )
    printer = show.printer()
    progress.report("quantizing")

    def work() -> Quantized:
        return quantizer.quantize(model, **vars(options), strict=False)

    result: Quantized = checking.guarded(work, str(model), "cpu")
    failed = result.limit is not None and not result.loss <= result.limit
    if keep or not failed:
        with written(output) as draft:
            progress.report(f"writing {output.name}")
            save(read(result.model), draft, external=external)
    columns = ["layer", "operator", "type", "error", *(["cost"] if options.to == "mixed" else [])]
    printer.table(
        "layers, by their error against float",
        [*columns, "why"] if explain else columns,
        _rows(result, cost=options.to == "mixed", explain=explain),
        left=3,
    )
    before, after = (f"{n / 1e3:,.0f} kB" for n in result.bytes)
    float_ms, ms = (f"{s * 1e3:.2f} ms" for s in result.seconds)
    rows = [["weights", before, after], ["onnxruntime, one batch", float_ms, ms]]
    rows += [[f"error of {name}", "0", f"{error:.3g}"] for name, error in result.errors.items()]
    figures = {"weights": f"{before} to {after}", "one batch": f"{float_ms} to {ms}"}
    if result.metric is not None:
        label, *values = result.metric
        rows.append([label, *(f"{value:.4g}" for value in values)])
        figures[label] = " to ".join(rows[-1][1:])
    printer.table("", ["", "float", options.to], rows)
    printer.text(*result.notes)

    many = sum(layer.to != "float" for layer in result.layers)
    verdict = f"{many} of {len(result.layers)} layers in {options.to}, error {result.error:.3g}"
    kept = not failed or keep
    reports.write(
        printer,
        {"input": str(model), "output": str(output) if kept else None, **result.to_dict()},
        overview=Overview(
            verdict,
            None if result.limit is None else not failed,
            figures,
            _next(output, options) if kept else {},
        ),
        device="CPU",
        sections=lambda: show.pages().quantized(result.layers),
    )
    if failed:
        found = f"the error is {result.loss:.3g}"
        if result.metric is not None:
            found = f"{result.metric[0]} is {result.loss:.3g} worse"
        raise CheckFailed(
            f"{model}: {found}, above --max-error {result.limit:g}"
            + ("" if keep else " (nothing was written)")
        )
    printer.text(f"wrote {output}")


def _next(output: Path, options: QuantizeOptions) -> dict[str, list[object]]:
    """What to do with the file: check its programs, or repair it by training."""
    train = ["train", output, "--data", "DATA.npz", "--loss", "cross_entropy"]
    data = ["--inputs", options.calibrate] if options.calibrate is not None else []
    return {
        "Check it on this machine.": ["validate", output, *data],
        "Train it as it is, where it is too far from the float model.": train,
    }


def _rows(result: Quantized, *, cost: bool, explain: bool) -> Iterator[list[str]]:
    for layer in result.layers:
        yield [
            layer.name,
            layer.op,
            layer.to,
            "" if layer.error is None else f"{layer.error:.3g}",
            *([("" if layer.cost is None else f"{layer.cost:.3g}")] if cost else []),
            *([layer.why] if explain else []),
        ]
