"""`onnx-fuse lab`: check and time every kernel of an operator."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import hardware_of, parse_mkn, parse_shapes, with_options
from onnx_fuse.errors import CheckFailed, UsageError, unknown

EXAMPLES = (
    "onnx-fuse lab LayerNormGemm --shape 8192,768,3072 --precision bf16",
    "onnx-fuse lab Gemm --candidate mma_sm80.cu --shape 512,768,3072 --precision bf16",
    "onnx-fuse lab Softmax --shape 8192,4096,1 --tune --freeze",
    "onnx-fuse lab my.ops::TanhScale --input-shapes x:512,768 scale:768",
)
OPTIONS = """
    op (OP): The operator, such as Gemm, or a registered one as domain::Name.
    shape (--shape M,K,N): Time at these sizes; may be repeated.
    input_shapes (--input-shapes NAME:4,8 ...): The shapes of a registered operator's inputs.
    candidate (--candidate FILE.cu): Also try this changed copy of a kernel's source; the file keeps
        its name.
    tune (--tune): Time all configurations, not only the likeliest.
    freeze (--freeze): Use the fastest at these sizes from now on.
    records (--records DIR): With --freeze, keep the records in this folder.
    limit (--limit, 1 or more): Check for this many seconds at most.
    """


@with_options(OPTIONS)
def lab(
    *,
    op: str,
    shape: list[str] | None = None,
    input_shapes: list[str] | None = None,
    precision: str = "fp32",
    candidate: Path | None = None,
    tune: bool = False,
    freeze: bool = False,
    records: Path | None = None,
    limit: float = 120,
    reports: show.Reports,
) -> None:
    """Check every configuration of OP's kernels on this GPU, and time them beside the roofline.

    Results are compared with those of the operator's most general kernel, at the sizes that are
    timed and at others of all kinds; those of a registered operator with its body's.
    ONNX_FUSE_DUMP=folder keeps the source, the macros and the SASS of each kernel.
    """
    files.check_paths({"--candidate": candidate}, {"--records": records, **reports.paths})
    import time

    from onnx_fuse import config, single_op_models
    from onnx_fuse import lab as bench
    from onnx_fuse.report import timing
    from onnx_fuse.report.page import Overview

    own = "::" in op
    if not own and op not in single_op_models.OPS:
        raise UsageError(unknown("operator", op, single_op_models.OPS))
    if shape if own else input_shapes:
        raise UsageError("--input-shapes is for operators domain::Name, --shape for the others")
    sizes = [parse_mkn(text) for text in shape or ["512,768,3072"]]
    if records and not freeze:
        raise UsageError("--records is where --freeze writes: add --freeze")
    printer, hw = show.printer(), hardware_of("cuda")
    if own:
        call, truth = bench.of_registered(op, parse_shapes(input_shapes), hw)
        calls, cases = [call], iter([(str(call.problem), call)])
    else:
        calls, truth = [bench.of(op, size, precision, hw) for size in sizes], None
        cases = bench.cases_of(op, precision, hw, sizes)
    kernels = bench.kernels_of(op, candidate, calls[0], hw)
    for name, reason in bench.left_out(op, calls[0], hw):
        printer.text(f"not here: {name}: {reason}")
    checked = list(bench.check(kernels, cases, hw, time.monotonic() + limit, truth))
    wrong = [row for row in checked if row.fault]
    printer.text(f"{len(checked)} configurations checked, {len(wrong)} wrong")
    for row in wrong:
        printer.text(f"wrong: {row.kernel} {row.config}: {row.fault}")
    sound = {(row.kernel, row.config) for row in checked if not row.fault}
    timed, winners = [], []
    tried: dict[str, list[list[str | float]]] = {}
    for call in calls:
        fastest = bench.measure(call, kernels, sound, hw, 1000 if tune else 6)
        timed += [row for row, _ in fastest]
        if fastest:
            winners.append((call, *fastest[0]))
        rows = [
            [f"{row.kernel} {row.config}", f"{row.us:.2f}", f"{row.floor:.0%}",
             f"{row.flops / 1e12:.3g}", f"{row.bandwidth / 1e9:.4g}",
             f"{row.predicted / row.us:.2f}"]
            for row, _ in fastest
        ]  # fmt: skip
        tried[str(call.problem)] = [
            [f"{row.kernel} {row.config}", row.us * 1e-6] for row, _ in fastest
        ]
        head = ["kernel", "µs", "of floor", "TFLOP/s", "GB/s", "predicted / measured"]
        printer.table(f"{call.problem} on {hw.name}", head, rows, left=1)
    for call, row, choice in winners if freeze else ():
        if isinstance(choice.kernel, bench.Variant):
            printer.text(
                f"not frozen: {row.kernel} is the fastest at {call.problem}: a record names no "
                "file, so put its text under cuda_src/ first"
            )
    if freeze:
        folder = records or config.CACHE_DIR.value / "tuning"
        printer.text(f"wrote {bench.freeze(op, winners, hw, folder)}")
    data = {"op": op, "gpu": hw.name, "checked": [asdict(r) for r in checked],
            "timed": [asdict(r) for r in timed]}  # fmt: skip
    reports.write(
        printer,
        data,
        overview=Overview(
            f"{len(wrong)} configurations wrong" if wrong else "every configuration is right",
            not wrong,
        ),
        device=hw.name,
        sections=lambda: timing.times(tried),
    )
    if wrong:
        raise CheckFailed(f"{len(wrong)} configurations of {op} compute something else")
