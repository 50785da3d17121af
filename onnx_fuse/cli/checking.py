"""Compare a model with its original, in a way that survives a crash of onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_fuse.cli import files

if TYPE_CHECKING:
    import onnx_ir

    from onnx_fuse.validation.check import Check
    from onnx_fuse.validation.gradients import GradientCheck
    from onnx_fuse.validation.request import Request


def check(
    original: Path,
    candidate: Path | onnx_ir.Model,
    request: Request,
    inputs: Path | None = None,
    source: onnx_ir.Model | None = None,
) -> Check:
    """Compare `candidate` with the file `original`, on the arrays of the file `inputs` if given.

    `source` and what is raised are as in `check_outputs`.
    """
    from onnx_fuse.validation.check import check_outputs
    from onnx_fuse.validation.inputs import read_feeds

    def work() -> Check:
        feeds = [read_feeds(inputs, files.load(original, str(original)))] if inputs else None
        return check_outputs(original, candidate, replace(request, feeds=feeds), source=source)

    return guarded(work, str(original), request.place)


def gradients(
    model: Path, written: Path | None, request: Request, inputs: Path | None = None
) -> GradientCheck:
    """Check every gradient of `model`, or those that the file `written` for it computes.

    Raises the errors of `check_gradients`.
    """
    from onnx_fuse.autodiff import gradient_names
    from onnx_fuse.validation.gradients import check_written, compare_gradients
    from onnx_fuse.validation.inputs import read_feeds

    def work() -> GradientCheck:
        source = model if written is None else written
        feeds = None
        if inputs is not None:
            graph = files.load(source, str(source))
            seeds = gradient_names(graph.graph.inputs).values() if written else ()
            feeds = [read_feeds(inputs, graph, seeds)]
        check = compare_gradients if written is None else check_written
        return check(source, replace(request, feeds=feeds))

    return guarded(work, str(model), request.place)


def guarded(work: Callable[[], Any], name: str, device: str) -> Any:
    """Run `work` so that a crash of onnxruntime becomes a ModelError and not the process's end."""
    from onnx_fuse.runtime import ort

    if device == "cpu":
        return ort.guarded(work, name)
    with ort.faults(name):  # a CUDA context does not survive a fork
        return work()
