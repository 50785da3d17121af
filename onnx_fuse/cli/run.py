"""`onnx-fuse run`: run a model once, and show its outputs and its time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_fuse.cli import checking, files, show
from onnx_fuse.cli.options import PACKS, with_options
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.options import RunOptions

EXAMPLES = (
    "onnx-fuse run model.onnx --inputs feeds.npz -o outputs.npz",
    "onnx-fuse run model.onnx --device cuda --precision fp16 --dim batch=8 --profile",
)
OPTIONS = """
    output (-o, --output OUT.npz): Write the outputs to this file.
    profile (--profile): Show the time by operator (as onnxruntime counts it) or, on cuda, by
        kernel.
    gpus (--gpus, 1 or more): Spread the batch of --inputs over this many GPUs, or sessions on
        the CPU.
    recompile (--recompile): Compile the graph that is in a compiled file anew, for this GPU and
        any shape.
    pack (--pack WHAT): Compute on cuda only the tokens, not the padding that the model's attention
        mask hides: exact, or zero to get zeros at the padding of outputs.
    explain (--explain): List each kernel on cuda, its predicted time and why it was chosen.
    """


@with_options(OPTIONS)
def run(
    *,
    model: Path,
    inputs: Path | None = None,
    output: Path | None = None,
    options: RunOptions,
    profile: bool = False,
    gpus: int = 1,
    recompile: bool = False,
    pack: str = "",
    explain: bool = False,
    trace: Path | None = None,
    reports: show.Reports,
) -> None:
    """Fuse MODEL and run it on given or generated inputs; show outputs and the median time."""
    files.check_paths(
        {"MODEL": model, "--inputs": inputs}, {"-o": output, "--trace": trace, **reports.paths}
    )
    import numpy as np

    from onnx_fuse import bench
    from onnx_fuse.container import is_container
    from onnx_fuse.files import written
    from onnx_fuse.importer.shapes import fix_shapes
    from onnx_fuse.report import overview
    from onnx_fuse.runtime.deployed import first_shapes
    from onnx_fuse.validation.inputs import read_feeds

    printer = show.printer()
    device, precision = options.device, options.precision
    names = options.providers
    if names and (gpus > 1 or profile or trace):
        raise UsageError("--providers shows outputs and time: leave out --gpus and --profile")
    if gpus > 1 and (profile or trace or explain or reports.html):
        raise UsageError("--gpus shows outputs and time: leave out --profile, --explain and --html")
    if pack and (device != "cuda" or gpus > 1 or pack not in PACKS):
        raise UsageError("--pack takes exact or zero, with --device cuda and without --gpus")
    if explain and device != "cuda":
        raise UsageError(
            "--explain needs --device cuda; without a GPU, onnx-fuse optimize MODEL --target h200 "
            "lists the kernels"
        )
    graph = files.load(model, str(model))
    feeds = read_feeds(inputs, graph) if inputs else None
    compiled = device == "cuda" and not recompile and is_container(model)
    if compiled and not (feeds or options.shapes or options.dims):
        fix_shapes(graph, first_shapes(model))
    fix_shapes(graph, options.shapes or {}, options.dims)
    result = checking.guarded(
        lambda: bench.run_once(
            graph,
            feeds,
            device=device,
            precision=precision,
            profile=profile or trace is not None,
            compiled=model if compiled else None,
            gpus=gpus,
            providers=names,
            pack=PACKS[pack],
        ),
        str(model),
        names[0] if names else device,
    )
    where = result.providers[0] if names else device
    printer.text(show.inputs({k: list(v.shape) for k, v in result.feeds.items()}))
    rows = [_described(name, y) for name, y in result.outputs.items()]
    printer.table("outputs", ["name", "dtype", "shape", "min … max"], rows, left=3)
    if profile:
        rows = [
            [op, str(n), f"{us:,.0f}", f"{us / result.total_us:.1%}"]
            for op, (n, us) in result.operators.items()
        ]
        calls = sum(n for n, _ in result.operators.values())
        rows += [[], ["all", str(calls), f"{result.total_us:,.0f}", "100.0%"]]
        how = "of each call by itself" if device == "cuda" else "under onnxruntime's profiler"
        printer.table(f"time {how}", ["operator", "runs", "µs", "share"], rows)
    kernels = show.kernels(printer, result.program, result.hardware) if explain else []
    several = f"the median of {result.runs} runs" if result.runs > 1 else "one run after the first"
    took = f"{result.milliseconds:.3g} ms on {where}, {several}"
    printer.text(took)
    data = {
        "model": str(model),
        "device": device,
        "providers": [*result.providers],
        "milliseconds": result.milliseconds,
        "runs": result.runs,
        "inputs": {k: list(v.shape) for k, v in result.feeds.items()},
        "outputs": {
            k: {"dtype": str(v.dtype), "shape": list(v.shape)}
            if _is_tensor(v)
            else {"type": type(v).__name__}
            for k, v in result.outputs.items()
        },
        "operators": {k: {"runs": n, "us": us} for k, (n, us) in result.operators.items()},
        "kernels": kernels,
        "output": str(output) if output else None,
    }
    if output:
        with written(output) as draft, draft.open("wb") as file:
            np.savez(file, **_arrays(result.outputs))
    if trace and result.profile:
        from onnx_fuse.report import trace as traces

        traces.write(trace, str(model), traces.of_profile(result.profile, result.program))

    def sections() -> Any:
        from onnx_fuse import rewrite
        from onnx_fuse.report import timing

        fused = graph.clone()
        rewrite.optimize(fused, own_kernels=device == "cuda")
        return timing.ran(result, fused)

    reports.write(
        printer,
        data,
        overview=overview.ran(model, device, took, result),
        device=result.hardware.name if result.hardware else where,
        sections=sections,
    )


def _is_tensor(value: object) -> bool:
    return hasattr(value, "dtype")


def _described(name: str, value: Any) -> list[str]:
    """A row of the table of outputs; a sequence or map shows its type and length alone."""
    if _is_tensor(value):
        return [name, str(value.dtype), str(list(value.shape)), _range(value)]
    return [name, type(value).__name__, str(len(value)) if value is not None else "", ""]


def _arrays(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs as an .npz file holds them. Raises ModelError for one that is no tensor."""
    for name, value in outputs.items():
        if not _is_tensor(value):
            raise ModelError(
                f"output '{name}' is a {type(value).__name__}, which an .npz file cannot hold: "
                "leave -o out to see what it is"
            )
    return dict(outputs)


def _range(array: Any) -> str:
    if array.dtype.name == "bfloat16":
        array = array.astype("float32")
    if not array.size or array.dtype.kind not in "biuf":
        return ""
    return f"{array.min():.6g} … {array.max():.6g}"
