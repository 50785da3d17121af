"""`onnx-fuse validate`: compare a model, or its fusion, with its original."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from onnx_fuse.cli import checking, files, show
from onnx_fuse.cli.options import (
    check_device,
    check_precision,
    parse_dims,
    parse_shapes,
    with_options,
)
from onnx_fuse.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from onnx_fuse.report.page import Section

EXAMPLES = (
    "onnx-fuse validate --op LayerNormGemm --input-shapes x:4,8 scale:8 bias:8 w:8,16 c:16 --grad",
    "onnx-fuse validate model.onnx --grad",
    "onnx-fuse validate model.fused.onnx --against model.onnx --blame --inputs feeds.npz",
)
OPTIONS = """
    against (--against ORIGINAL): Compare MODEL with this file. Without it, MODEL is compared
        with its own fusion.
    op (--op): MODEL is an operator (LayerNormGemm, or domain::Name), compared with its body.
    grad (--grad): Also compare every gradient with central differences.
    all_ (--all): With --grad, compare each tensor by itself, not many at once.
    blame (--blame): Name the nodes that cause the difference.
    rtol (--rtol, 0.0 or more): Allow this difference, as a share of an output's largest value.
    atol (--atol, 0.0 or more): Also allow this absolute difference.
    """


@with_options(OPTIONS)
def validate(
    model: Path,
    against: Path | None = None,
    op: bool = False,
    grad: bool = False,
    all_: bool = False,
    blame: bool = False,
    device: str = "cpu",
    precision: str = "fp32",
    inputs: Path | None = None,
    input_shapes: list[str] | None = None,
    dim: list[str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    json: Path | None = None,
    html: Path | None = None,
    debug: bool = False,
) -> None:
    """Compare all outputs of MODEL with those of its fusion, or of ORIGINAL, on onnxruntime.

    The original always runs on onnxruntime; --device and --precision say where and how the other
    model runs.
    """
    if op:
        if against is not None:
            raise UsageError("--op compares an operator with its body: leave --against out")
        from onnx_fuse.validation.operator import operator_files

        with TemporaryDirectory(prefix="onnx-fuse-") as folder:
            shapes = parse_shapes(input_shapes)
            single, body = operator_files(str(model), shapes, Path(folder), trains=grad)
            validate(
                single, body, grad=grad, all_=all_, blame=blame, device=device, precision=precision,
                inputs=inputs, rtol=rtol, atol=atol, json=json, html=html, debug=debug,
            )  # fmt: skip
        return
    files.check_paths(
        {"MODEL": model, "--against": against, "--inputs": inputs},
        {"--json": json, "--html": html},
    )
    from onnx_fuse import report
    from onnx_fuse.importer.load import read
    from onnx_fuse.validation.request import Request

    printer = show.printer()
    check_device(device)
    check_precision(precision)
    if precision != "fp32" and (device != "cuda" or blame):
        raise UsageError(
            f"--precision {precision} needs --device cuda, and does not go with --blame"
        )
    if all_ and not grad:
        raise UsageError("--all needs --grad: it says how gradients are compared")
    original = against or model
    candidate: Any = model
    source = files.load(read(original), str(original))
    if against is None:
        from onnx_fuse import rewrite

        candidate = source.clone()
        rewrite.optimize(candidate)
    else:
        read(model)
    data: dict[str, Any] = {"model": str(model), "original": str(original)}
    request = Request(
        shapes=parse_shapes(input_shapes), dims=parse_dims(dim), rtol=rtol, atol=atol,
        device=device, precision=precision, blame=blame, along=html is not None, every=all_,
    )  # fmt: skip
    checked = checking.check(original, candidate, request, inputs)
    printer.text(*report.check_lines(checked))
    data["check"] = checked.to_dict()
    failure, gradients = "", None
    if not checked.ok:
        failure = f"differs from {original}"
        failure += f": {checked.culprits[0]}" if checked.culprits else ""
    elif grad:
        gradients = checking.gradients(model, None, request, inputs)
        data["gradients"] = gradients.to_dict()
        printer.text(*report.gradient_lines(gradients))
        if gradients.failed:
            first = gradients.failed[0]
            written_by = f", written by {first.kernel}," if first.kernel else ""
            failure = f"the gradient of '{first.tensor}', read by {first.op},{written_by} is wrong"

    def sections() -> list[Section]:
        from onnx_fuse.report import pages

        checked_graph = files.load(candidate, str(model)) if against else candidate
        return pages.validated(source, checked_graph, checked, gradients)

    show.write_reports(
        printer,
        data,
        json,
        html,
        verdict=failure or "the outputs agree" + (", and so do the gradients" if grad else ""),
        ok=not failure,
        device=f"{device}, {precision}",
        sections=sections,
    )
    if failure:
        raise CheckFailed(f"{model}: {failure}")
