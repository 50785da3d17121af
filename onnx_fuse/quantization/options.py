"""The options of quantization, each declared once as `onnx_fuse.options` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import os

    from onnx_fuse.training.metrics import Given as Metric


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """What a model is quantized to, and by which ranges."""

    TEXTS: ClassVar = """
        to (--to TYPE): The type: int8, fp8 (float8e4m3fn), int4-weights, or mixed: int8, with the
            layers that cost most accuracy left float until --max-error holds. | "int8" and "fp8"
            quantize inputs and weights (by channel) of Conv, Gemm and MatMul with onnxruntime's
            quantizer; "int4-weights" stores matrices in blocks of 32, and needs no data.
        calibrate (--calibrate DATA.npz): Find the ranges of activations on these inputs, arrays by
            the inputs' names. The default is random inputs. | Rows of typical data.
        method (--method NAME): Find ranges by minmax, entropy or percentile.
        max_error (--max-error E): Allow this error of an output, relative to its norm; with
            --metric, allow the metric to become this much worse. The default is 0.01 for mixed, and
            no limit for other types. | The error is the norm of the difference from the float
            model's output.
        metric (--metric NAME): Measure accuracy, top5 (or another number), perplexity or f1 before
            and after, with the array "labels" of the data. | Also an object of `training.metrics`,
            or a function of the outputs and the batch, both by name; larger is better but for
            perplexity.
        data (--data DATA.npz): Measure the metric on these rows. The default is those of
            --calibrate.
        ends (--ends): Quantize the first and the last layers, too.
        skip (--skip NODE): Leave the layer of this node float. | A list of names of nodes.
        """
    to: str = "int8"
    calibrate: str | os.PathLike[str] | Mapping[str, Any] | None = None
    method: str = "minmax"
    max_error: float | None = None
    metric: Metric | None = None
    data: str | os.PathLike[str] | Mapping[str, Any] | None = None
    ends: bool = False
    skip: Sequence[str] = ()
