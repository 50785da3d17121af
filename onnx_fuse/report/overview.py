"""What each command's page says first: the verdict, the most important numbers, what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_fuse.report.page import Overview
from onnx_fuse.report.pages import percent
from onnx_fuse.report.terminal import Summary

if TYPE_CHECKING:
    from onnx_fuse.bench import Comparison, RunResult
    from onnx_fuse.rewrite import Report
    from onnx_fuse.validation.check import Check
    from onnx_fuse.validation.gradients import GradientCheck


def optimized(
    paths: tuple[Path, Path],
    sizes: tuple[Summary, Summary],
    report: Report,
    checked: Check | None,
    kernels: Sequence[Mapping[str, Any]],
) -> Overview:
    """Of `optimize`, from and to these `paths`; `kernels` are the calls that were predicted."""
    model, output = paths
    before, after = sizes
    verdict = f"{report.operators} fused operators, {before.nodes} nodes became {after.nodes}"
    figures = {"nodes": f"{before.nodes} → {after.nodes}", **_difference(checked)}
    if kernels:
        figures["predicted on the GPU"] = f"{1e6 * sum(k['seconds'] for k in kernels):,.1f} µs"
    else:
        left = sum(len(r.nodes) for r in report.not_fused)
        figures["nodes that were not fused"] = str(left)
    if checked is not None:
        verdict += f", check {'ok' if checked.ok else 'FAILED'}"
    if checked is not None and not checked.ok:
        words: Sequence[object] = ("onnx-fuse", "validate", model, "--blame")
        return Overview(verdict, False, figures, {"Find the operator that differs": words})
    return Overview(
        verdict,
        None if checked is None else True,
        figures,
        {
            "Compare all gradients too": ("onnx-fuse", "validate", model, "--grad"),
            "Time both files": ("onnx-fuse", "bench", model, "--threads", 1),
            "Read the reasons for what was not fused": (
                "onnx-fuse", "optimize", model, "--explain", "-o", output
            ),
        },
    )  # fmt: skip


def validated(
    model: Path, against: Path | None, failure: str, checked: Check, gradients: GradientCheck | None
) -> Overview:
    """Of `validate`; `failure` says what differs, and is empty where nothing does."""
    verdict = failure or "the outputs agree" + (", and so do the gradients" if gradients else "")
    outputs = {d.output for d in checked.differences}
    runs = f"{len(checked.feeds)} × {len(outputs)}"
    figures = {**_difference(checked), "runs × outputs compared": runs}
    if gradients is not None:
        right = len(gradients.errors) - len(gradients.failed)
        figures["gradients that agree"] = f"{right} of {len(gradients.errors)}"
    same = ("onnx-fuse", "validate", model, *(("--against", against) if against else ()))
    commands: dict[str, Sequence[object]] = {}
    if not checked.ok:
        commands["Find the operator that differs"] = (*same, "--blame")
    elif failure:
        commands["Compare each tensor's gradient by itself"] = (*same, "--grad", "--all")
    else:
        if gradients is None:
            commands["Compare all gradients too"] = (*same, "--grad")
        commands["Time both files"] = ("onnx-fuse", "bench", against or model, "--threads", 1)
    return Overview(verdict, not failure, figures, commands)


def ran(model: Path, device: str, verdict: str, result: RunResult) -> Overview:
    """Of `run`, whose `verdict` says how long it took."""
    figures = {"time of a run": f"{result.milliseconds:.3g} ms"}
    commands: dict[str, Sequence[object]] = {}
    on = () if device == "cpu" else ("--device", device)
    if result.operators:
        slowest, (_, us) = max(result.operators.items(), key=lambda item: item[1][1])
        calls = sum(runs for runs, _ in result.operators.values())
        figures |= {"operators or kernels run": str(calls)}
        figures |= {f"of it in {slowest}": f"{us / result.total_us:.0%}"}
    else:
        commands["See the time by operator"] = ("onnx-fuse", "run", model, "--profile", *on)
    commands["Compare with the model as it was"] = ("onnx-fuse", "bench", model, *on)
    if device == "cpu":
        target = ("onnx-fuse", "optimize", model, "--target", "h200")
        commands["See the kernels of a GPU that is not here"] = target
    return Overview(verdict, None, figures, commands)


def benched(model: Path, device: str, first: str, result: Comparison) -> Overview:
    """Of `bench`; `first` is the name of the model that the fused one is compared with."""
    low, high = result.noise
    of = "the original" if first == "original" else first
    if low <= 1 <= high:
        verdict = f"the fused model is as fast as {of}, within the noise"
    else:
        how = "faster" if high < 1 else "slower"
        verdict = f"the fused model is {how}: it takes {result.ratio:.3f} of the time of {of}"
    on = () if device == "cpu" else ("--device", device)
    return Overview(
        verdict,
        None,
        {
            f"fused / {first}": f"{result.ratio:.3f}",
            "the same among pairs of sessions": f"{low:.3f} … {high:.3f}",
            "median of the fused model": f"{result.fused.median:.4g} ms",
        },
        {
            "See which operator takes the time": ("onnx-fuse", "run", model, "--profile", *on),
            "Keep these numbers, to compare a later run": (
                "onnx-fuse", "bench", model, *on, "--json", "before.json"
            ),
        },
    )  # fmt: skip


def trained(output: Path, device: str, history: Mapping[str, Any], *, over: bool) -> Overview:
    """Of `train`, so far or, where it is `over`, at its end."""
    losses, evaluations = history["losses"], history["metrics"]
    verdict = f"loss {losses[-1]:.4g} after {len(losses)} steps" if losses else "no steps"
    figures = {}
    if evaluations:
        best = min(evaluations, key=lambda record: record.get("validation_loss", float("inf")))
        last = evaluations[-1]
        for name in [name for name in last if name not in ("step", "epoch", "loss")][:2]:
            figures[name.replace("_", " ")] = f"{last[name]:.4g}"
        figures["step of the lowest validation loss"] = f"{best['step']:,.0f} of {len(losses):,}"
    elif losses:
        figures = {"loss": f"{losses[-1]:.4g}", "steps": f"{len(losses):,}"}
    speeds = [speed for speed in history["examples_per_second"] if speed]
    if speeds and len(figures) < 3:
        figures["examples a second"] = f"{sorted(speeds)[len(speeds) // 2]:,.0f}"
    if not over:
        return Overview(f"{verdict}, still training", None, figures)
    on = () if device == "cpu" else ("--device", device)
    commands: dict[str, Sequence[object]] = {
        "Check the new file and its gradients": ("onnx-fuse", "validate", output, "--grad"),
        "Run it": ("onnx-fuse", "run", output, *on),
    }
    return Overview(verdict, None, figures, commands)


def _difference(checked: Check | None) -> dict[str, str]:
    worst = checked.worst if checked is not None else None
    if worst is None:
        return {}
    return {"largest difference, of its limit": percent(worst.max_abs, worst.limit)}
