"""`onnx-fuse gradient`: write the graph of a model's gradients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onnx_fuse.cli import checking, files, show
from onnx_fuse.cli.options import split_names, with_options
from onnx_fuse.cli.train_options import parse_values
from onnx_fuse.errors import CheckFailed
from onnx_fuse.options import SizeOptions, shared

if TYPE_CHECKING:
    from onnx_fuse.validation.gradients import GradientCheck


EXAMPLES = (
    "onnx-fuse gradient model.onnx --loss cross_entropy -o model.grad.onnx",
    "onnx-fuse gradient model.onnx --wrt x --wrt layer1.weight --check",
    "onnx-fuse gradient model.onnx --loss mse --order 2 -o model.hvp.onnx",
)
OPTIONS = """
    output (-o, --output OUT): Write to this file. The default is MODEL with the ending
        .grad.onnx.
    loss (--loss NAME): Differentiate this loss (cross_entropy, mse, ...) or this scalar output.
        Without it, the graph computes a vector-Jacobian product: it has an input y.grad for
        each output y.
    loss_option (--loss-option NAME=VALUE): Set an option of the loss, such as gamma=3.
    order (--order, 1 to 2): With 2, add Hessian-vector products: an input w.vector for each w.grad,
        and an output w.hvp.
    wrt (--wrt NAME): Differentiate by this weight or input. The default is every weight.
    check (--check): Compare the gradients with central differences.
    """


@with_options(OPTIONS)
def gradient(
    *,
    model: Path,
    output: Path | None = None,
    loss: str | None = None,
    loss_option: list[str] | None = None,
    order: int = 1,
    wrt: list[str] | None = None,
    check: bool = False,
    inputs: Path | None = None,
    sizes: SizeOptions,
    reports: show.Reports,
) -> None:
    """Write a graph that computes MODEL's gradients, as ONNX that any runtime can run.

    The file is kept only if onnxruntime loads the graph. --check runs it on --inputs, or
    on inputs of the sizes that --input-shapes and --dim give.
    """
    from onnx_fuse import autodiff, progress, report
    from onnx_fuse.files import written
    from onnx_fuse.importer.load import read
    from onnx_fuse.importer.save import save
    from onnx_fuse.report.page import Overview
    from onnx_fuse.validation.request import Request

    output = output or files.default_output(model, ".grad.onnx")
    files.check_paths(
        {"MODEL": model, "--inputs": inputs}, {"-o": files.with_weights(output), **reports.paths}
    )
    printer = show.printer()
    original = read(model)
    progress.report("making the backward")
    result = autodiff.gradient(
        *(files.load(original, str(model)), split_names(wrt) or None, loss, order),
        **parse_values("--loss-option", loss_option),
    )
    request = Request(**shared(Request, sizes))
    checked: GradientCheck | None = None
    with written(output) as draft:
        progress.report(f"writing {output.name}")
        save(result, draft)
        summaries = [
            report.summary(original, "model", model),
            report.summary(result, "gradient", draft),
        ]
        checking.guarded(lambda: _loads(draft), f"{model}: its gradient", "cpu")
        if check:
            checked = checking.gradients(model, draft, request, inputs)
        failed = checked is not None and not checked.ok
        if failed:
            for path in draft.parent.iterdir():
                path.unlink()
    printer.table("", ["", *(m.name for m in summaries)], report.models_rows(summaries))
    original_outputs = {v.name for v in original.graph.outputs}
    added = [str(v.name) for v in result.graph.outputs if v.name not in original_outputs]
    data = {
        "input": str(model),
        "output": None if failed else str(output),
        "gradients": added,
        "models": [*map(report.as_dict, summaries)],
        "check": checked.to_dict() if checked else None,
    }
    if checked is not None:
        printer.text(*report.gradient_lines(checked))

    reports.write(
        printer,
        data,
        overview=Overview(
            f"{len(added)} gradients" + ("" if checked is None else ", checked"),
            None if checked is None else checked.ok,
        ),
        sections=lambda: show.pages().inspected({"model": original, "gradient": result}),
    )
    if checked is not None and not checked.ok:
        first = checked.failed[0]
        raise CheckFailed(
            f"{model}: the gradient of '{first.tensor}', read by {first.op}, is wrong "
            "(nothing was written)"
        )
    printer.text(f"wrote {output}")


def _loads(path: Path) -> None:
    from onnx_fuse.runtime import ort

    ort.session(path)
