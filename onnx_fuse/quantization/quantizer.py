"""Quantize a model, measure the error of each layer, and give layers back to float."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import onnx_fuse.ir  # noqa: F401  # first: it imports onnx_ir without sympy

# isort: split
import numpy as np
import onnx_ir as ir

from onnx_fuse import api
from onnx_fuse.arrays import Array
from onnx_fuse.errors import CheckFailed, ModelError, UsageError, unknown
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import at_opset, inline, weight_bytes
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import required_inputs
from onnx_fuse.ir.constants import Model
from onnx_fuse.ir.names import Names
from onnx_fuse.ops.rules import Rewriter
from onnx_fuse.options import takes
from onnx_fuse.quantization import calibration, place, rounding
from onnx_fuse.quantization.layers import PRODUCTS, Layer, layers
from onnx_fuse.quantization.options import QuantizeOptions
from onnx_fuse.quantization.task_metric import TaskMetric
from onnx_fuse.rewrite.batch_norm import fold_batch_norm
from onnx_fuse.rewrite.canonicalize import canonicalize
from onnx_fuse.runtime import ort
from onnx_fuse.session import load
from onnx_fuse.training.metrics import Given as Metric
from onnx_fuse.validation.inputs import Feeds

__all__ = ["Quantized", "quantize"]
__dir__ = __all__.copy

KINDS = ("int8", "fp8", "int4-weights", "mixed")
"""What a model can be quantized to."""
BUDGET = 0.01
"""The error that "mixed" keeps within where none is given."""
_MEASURED = 4
"""Batches at most on which errors are measured; what a layer costs is measured on the first."""
_TIMED = 7
"""Runs that are timed."""
_SLOWER = 1.2
"""The ratio of their times from which a note says so; less may be noise."""
_SATURATED = 2.0
"""The ratio of errors, by integers and as the file is written, from which a note says so."""
_OPSETS = {"int8": 13, "fp8": 19, "int4-weights": 21}
_LAST_SIGNED = 20
"""The last opset in which onnxruntime's optimizations leave int8 activations right (1.32)."""


@dataclass(frozen=True)
class Quantized:
    """A quantized model, and how far it is from the float model."""

    model: Any
    """The model, in the kind that was given; a path gives a ModelProto."""
    layers: list[Layer]
    """All convolutions and matrix multiplications of the model, in its order."""
    errors: dict[str, float]
    """By output of floats, the norm of its difference from the float model's, of that norm."""
    bytes: tuple[int, int]
    """The bytes of all weights before and after."""
    seconds: tuple[float, float]
    """The time of one batch on onnxruntime's CPU before and after."""
    limit: float | None
    """The error that was asked for."""
    notes: list[str] = field(default_factory=list)
    """What a user should know of the calibration and of the errors."""
    metric: tuple[str, float, float] | None = None
    """The name of the metric, and its values of the float and of the quantized model."""
    loss: float = 0.0
    """What `limit` bounds: the largest error, or how much worse the metric became."""

    @property
    def error(self) -> float:
        """The largest of `errors`."""
        return max(self.errors.values(), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """All but the model, as JSON values."""
        return {
            "error": self.error,
            "errors": self.errors,
            "bytes": {"before": self.bytes[0], "after": self.bytes[1]},
            "seconds": {"before": self.seconds[0], "after": self.seconds[1]},
            "max_error": self.limit,
            "metric": dict(zip(("name", "before", "after"), self.metric or (), strict=False)),
            "layers": [asdict(layer) for layer in self.layers],
            "notes": self.notes,
        }


@dataclass(frozen=True)
class _QuantizeArguments(QuantizeOptions):
    model: Model
    strict: bool = field(default=True, kw_only=True)


@takes(_QuantizeArguments)
def quantize(options: _QuantizeArguments) -> Quantized:
    """Write a model with QuantizeLinear and DequantizeLinear, which stock onnxruntime runs.

    Norms, Softmax, matrix multiplications of two computed tensors, and by default the first and the
    last layers stay float. BatchNormalization is folded into the weights before it.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model, with weights in float32. It is not
            changed.
        {options}
        strict: Whether an error above `max_error` raises CheckFailed.

    Raises:
        ModelError: The model is malformed, does not run, or has no layer to quantize.
        UsageError: There is no such kind, method or node, or the data does not fit the model.
        CheckFailed: The error is above `max_error`.
    """
    model, to, max_error = options.model, options.to, options.max_error
    if to not in KINDS:
        raise UsageError(unknown("type", to, KINDS))
    if max_error is not None and not max_error > 0:
        raise UsageError(f"the largest error is {max_error}: it must be above 0")
    work = _Work(model, "int8" if to == "mixed" else to, options.ends, options.skip)
    work.calibrated(options.calibrate, options.method, labelled=options.metric is not None)
    if options.metric is not None:
        work.labelled(options.metric, options.data or options.calibrate)
    elif options.data is not None:
        raise UsageError("data for a metric was given, and no metric: name one (--metric)")
    limit = BUDGET if to == "mixed" and max_error is None else max_error
    if to == "mixed" and limit is not None:
        work.give_back(limit)
    result = work.result(model, limit)
    if options.strict and limit is not None and not result.loss <= limit:
        what = f"{result.loss:.3g} from the float model"
        if result.metric is not None:
            what = f"{result.loss:.3g} worse in {result.metric[0]} than the float model"
        raise CheckFailed(
            f'the quantized model is {what}, more than {limit:g}: try to="mixed", other '
            "calibration data or another method"
        )
    return result


class _Work:
    """A float model on its way to a quantized one."""

    def __init__(self, model: Model, to: str, ends: bool, skip: Sequence[str]) -> None:
        self.to, self.notes = to, list[str]()
        source = read(model)
        self.before = weight_bytes(source)
        graph = inline(load(source))
        quantized = any(node.op_type == "DequantizeLinear" for node in graph.graph)
        if quantized and to == "int8":  # onnxruntime's quantizer would name values twice
            raise ModelError("the model is quantized already: give the float model")
        canonicalize(graph, training=False)
        fold_batch_norm(Rewriter(graph))
        self.float, self.kind = self._written(graph, source.graph.opset_imports[""])
        self.base = self.float
        """The model that is quantized: the float one, or one that computes the same."""
        self.inputs: dict[str, rounding.Inputs] = {}
        self.shifts: dict[str, Array] = {}
        """By layer, what is taken from its bias where it is quantized."""
        self.task: TaskMetric | None = None
        naming = Names.of(self.float.graph)
        for node in self.float.graph:
            node.name = node.name or naming.fresh(f"{node.op_type}_{node.outputs[0].name}")
        infer_shapes(self.float)
        self.layers = layers(self.float.graph, to, ends=ends, skip=skip)
        for name in skip:
            if all(layer.name != name for layer in self.layers):
                raise UsageError(unknown("layer", name, [layer.name for layer in self.layers]))
        if not self.chosen:
            reasons = dict.fromkeys(layer.why for layer in self.layers)
            why = "; ".join(reasons) or "it has no convolution, Gemm or MatMul"
            raise ModelError(f"no layer can be quantized to {to}: {why}")

    def _written(self, graph: ir.Model, opset: int) -> tuple[ir.Model, str]:
        """The model in the oldest opset that will do, and the type of its activations in int8.

        uint8 where nodes need an opset in which onnxruntime breaks those in int8.
        """
        if self.to != "int8":
            return at_opset(graph, max(opset, _OPSETS[self.to])), ""
        try:
            return at_opset(graph, min(max(opset, _OPSETS["int8"]), _LAST_SIGNED)), "QInt8"
        except ModelError:
            return graph, "QUInt8"

    @property
    def chosen(self) -> list[str]:
        return [layer.name for layer in self.layers if layer.to != "float"]

    def calibrated(self, data: Any, method: str, *, labelled: bool = False) -> None:
        """Take the data, find the ranges, and run the float model.

        `labelled` data may have labels beside the inputs, which a metric reads.
        """
        for end in required_inputs(self.float):
            if end.shape and end.shape[0] == 0:
                raise ModelError(
                    f"the input '{end.name}' takes no row, so that no error can be measured: give "
                    "a file with a larger batch, or a dynamic one"
                )
        if data is None:
            self.feeds = calibration.made_up(self.float)
            if self.to != "int4-weights":
                self.notes.append(calibration.MADE_UP)
        else:
            self.feeds = [feeds for feeds, _ in calibration.rows(self.float, data, labelled)]
        self.ranges = None
        if self.to != "int4-weights":
            self.ranges = self._ranges(self.float, method)
            for node in [n for n in self.float.graph if n.name in self.chosen]:
                for value in (node.inputs[0], node.outputs[0]):
                    name = "" if value is None else str(value.name)
                    if name in self.ranges and not np.isfinite(self.ranges[name].range_value).all():
                        raise ModelError(
                            f"'{name}' is not finite on the calibration data: leave those rows out"
                        )
        self.expected = self._run(self.float)
        if data is not None:
            self._fit(method)

    def _fit(self, method: str) -> None:
        """Use what the data says about each layer's inputs, as far as errors become smaller."""
        error = self._error(self.chosen)

        def kept(what: str) -> bool:
            nonlocal error
            found, before = self._error(self.chosen), error
            if found < before:
                error = found
                self.notes.append(f"{what}: error {found:.3g}, and {before:.3g} without")
            return found < before

        if self.to == "int4-weights":
            inputs = rounding.observed(self.float, self.chosen, self.feeds, grams=True)
            self.inputs = inputs
            if not kept("rounding errors are corrected in the weights that follow (GPTQ)"):
                self.inputs = {}
        else:
            inputs = rounding.observed(self.float, self.chosen, self.feeds, grams=False)
            model, norms = rounding.smoothed(self.float, inputs)
            ranges = self.ranges
            if norms:
                self.base, self.ranges = model, self._ranges(model, method)
            if norms and kept(
                f"{norms} norms scale large channels down, and the weights up (SmoothQuant)"
            ):
                inputs = rounding.observed(model, self.chosen, self.feeds, grams=False)
            else:
                self.base, self.ranges = self.float, ranges
        self.shifts = rounding.shifts(self.base, self.placed(self.chosen), inputs)
        if not (self.shifts and kept("biases correct the mean error of rounded weights")):
            self.shifts = {}

    def labelled(self, metric: Metric, data: Any) -> None:
        if data is None:
            raise UsageError("a metric needs data: give rows with labels (--data or --calibrate)")
        self.task = TaskMetric(metric, self.float, data, self._outputs)

    def _ranges(self, model: ir.Model, method: str) -> Any:
        operators = (*PRODUCTS, *place.PASSING)
        return calibration.ranges(model, self.feeds, method, operators)

    def placed(self, names: Sequence[str]) -> ir.Model:
        if not names:
            return self.float
        vectors = {name: self.shifts[name] for name in names if name in self.shifts}
        base = rounding.shifted(self.base, vectors) if vectors else self.base
        if self.to == "int8":
            return place.in_int8(base, names, self.ranges, self.kind)
        if self.to == "fp8":
            return place.in_float8(base, names, self.ranges)
        return place.in_four_bits(base, names, self.inputs)

    def _exposed(self, model: ir.Model) -> ir.Model:
        """The model with the results of the chosen layers as its outputs, in their order."""
        clone = model.clone()
        nodes = {node.name: node for node in clone.graph}
        clone.graph.outputs.clear()
        clone.graph.outputs.extend(nodes[name].outputs[0] for name in self.chosen)
        return clone

    def _run(
        self, model: ir.Model, *, as_written: bool = False, batches: int = _MEASURED
    ) -> list[list[Array]]:
        return self._outputs(model, self.feeds[:batches], as_written=as_written)

    @staticmethod
    def _outputs(
        model: ir.Model, feeds: Sequence[Feeds], *, as_written: bool = False
    ) -> list[list[Array]]:
        with ort.faults("the model"):
            session = ort.session(model, as_written=as_written)
            return [ort.run(session, batch) for batch in feeds]

    def errors(
        self, model: ir.Model, batches: int = _MEASURED, *, as_written: bool = True
    ) -> dict[str, float]:
        """How far each float output is from the float model's, on the first batches.

        As the file is written: on some CPUs onnxruntime's sums of 8-bit products saturate.
        """
        names = [str(v.name) for v in self.float.graph.outputs]
        run = self._run(model, batches=batches, as_written=as_written)
        found = _distances(self.expected[:batches], run)
        return {name: found[i] for i, name in enumerate(names) if i in found}

    def give_back(self, limit: float) -> None:
        """Turn the layers that cost most back to float, as few as bring the error within a limit.

        What a layer costs is the error of the outputs where it alone is quantized.
        """
        costs = {name: self._error([name], batches=1) for name in self.chosen}
        order = sorted(costs, key=lambda name: costs[name])
        low, high = 0, len(order)  # with so many quantized the error holds, and with so many not
        if self._loss(order) <= limit:
            low = high
        while high - low > 1:
            middle = (low + high) // 2
            holds = self._loss(order[:middle]) <= limit
            low, high = (middle, high) if holds else (low, middle)
        rest = set(order[low:])
        why = f"one of the {len(rest)} that cost most, for an error of at most {limit:g}"
        for i, layer in enumerate(self.layers):
            layer = replace(layer, cost=costs.get(layer.name))
            self.layers[i] = replace(layer, to="float", why=why) if layer.name in rest else layer

    def _error(self, names: Sequence[str], batches: int = _MEASURED) -> float:
        return max(self.errors(self.placed(names), batches).values(), default=0.0)

    def _loss(self, names: Sequence[str]) -> float:
        """What the limit bounds, where these layers are quantized."""
        if self.task is None:
            return self._error(names)
        return self.task.worse(self.task.of(self.placed(names)))

    def result(self, given: Model, limit: float | None) -> Quantized:
        model = self.placed(self.chosen)
        inner = (self._run(self._exposed(each), as_written=True) for each in (self.float, model))
        found = _distances(*inner) if self.chosen else {}
        errors = {name: found.get(i) for i, name in enumerate(self.chosen)}
        described = [replace(layer, error=errors.get(layer.name)) for layer in self.layers]
        distances, metric = self.errors(model), None
        loss = max(distances.values(), default=0.0)
        here = max(self.errors(model, as_written=False).values(), default=0.0)
        if here > _SATURATED * max(distances.values(), default=0.0):
            self.notes.append(
                "onnxruntime's sums of 8-bit products saturate on this CPU, where the error is "
                f"{here:.3g}; they don't on CPUs with VNNI and on a GPU"
            )
        if self.task is not None:
            metric = self.task.name, self.task.before, self.task.of(model)
            loss = self.task.worse(metric[2])
        seconds = self._seconds(self.float), self._seconds(model)
        if seconds[1] > _SLOWER * seconds[0]:
            self.notes.append(
                f"on this CPU it takes {seconds[1] / seconds[0]:.1f} times as long as the float "
                "model: its layers are too small to pay for the conversions"
            )
        return Quantized(
            api.in_kind(given, model),
            described,
            distances,
            (self.before, weight_bytes(model)),
            seconds,
            limit,
            self.notes,
            metric,
            loss,
        )

    def _seconds(self, model: ir.Model) -> float:
        session, times = ort.session(model), []
        for _ in range(_TIMED):
            start = time.perf_counter()
            ort.run(session, self.feeds[0])
            times.append(time.perf_counter() - start)
        return median(times)


def _distances(expected: list[list[Any]], found: list[list[Any]]) -> dict[int, float]:
    """By the place of each output of floats, ‖found - expected‖ / ‖expected‖ over all batches."""
    distances = {}
    for i, first in enumerate(expected[0] if expected else ()):
        if not isinstance(first, np.ndarray) or first.dtype.kind != "f":
            continue
        error = norm = 0.0
        for pair in zip(expected, found, strict=True):
            a, b = (y[i].astype(np.float64) for y in pair)
            # what is infinite, or no number, in one of them alone counts in full
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            with np.errstate(invalid="ignore"):
                apart = np.nan_to_num(b - a, nan=np.inf, posinf=np.inf, neginf=-np.inf)
            error += float(np.square(np.where(same, 0, apart)).sum())
            norm += float(np.square(a[np.isfinite(a)]).sum())
        distances[i] = float(np.sqrt(error / norm)) if norm else float(error > 0)
    return distances
