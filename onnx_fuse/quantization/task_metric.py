"""A metric of a model on rows with labels, run by onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.errors import UsageError
from onnx_fuse.ops.loss import class_axis
from onnx_fuse.quantization import calibration
from onnx_fuse.quantization.calibration import LABELS
from onnx_fuse.training import metrics
from onnx_fuse.training.losses import Target
from onnx_fuse.training.spec import Spec
from onnx_fuse.validation.inputs import Feeds


class TaskMetric:
    """A metric of several models of the same inputs and outputs, on the same rows."""

    def __init__(
        self,
        metric: metrics.Given,
        model: ir.Model,
        data: str | os.PathLike[str] | Mapping[str, Array],
        run: Callable[[ir.Model, Sequence[Feeds]], list[list[Array]]],
    ) -> None:
        """`model` is the float one, and `run` gives the outputs of a model for each batch.

        Raises ModelError or UsageError where data, labels and metric do not fit.
        """
        self._names = tuple(str(v.name) for v in model.graph.outputs)
        self._run = run
        rows = calibration.rows(model, data, labelled=True)
        self._feeds, self._labels = [feeds for feeds, _ in rows], [labels for _, labels in rows]
        expected = run(model, self._feeds)
        logits, labels = expected[0][0], self._labels[0]
        self._spec = self._described(logits, labels)
        (self._metric,) = metrics.begin([metric], self._spec)
        self.before = self._counted(expected)

    def _described(self, logits: Array, labels: Array | None) -> Spec:
        """What a metric asks of a model: the first output, whose classes the labels count."""
        targets = []
        if labels is not None:
            axis = class_axis(logits.ndim, {})
            shape = [n for i, n in enumerate(logits.shape) if i != axis]
            if labels.dtype.kind not in "iu" or [*labels.shape] != shape:
                raise UsageError(
                    f"the array '{LABELS}' has the shape {list(labels.shape)} of {labels.dtype}: "
                    f"the classes of '{self._names[0]}' are integers of shape {shape}"
                )
            target = Target(self._names[0], LABELS, logits.shape[axis], axis)
            for batch in self._labels:
                if batch is not None:
                    target.check(batch.astype(np.int64))
            targets = [target]
        return Spec((), tuple(targets), "", "", "", "", "", self._names, ())

    @property
    def name(self) -> str:
        """The metric's name."""
        return self._metric.name

    def of(self, model: ir.Model) -> float:
        """The metric of a model."""
        return self._counted(self._run(model, self._feeds))

    def worse(self, value: float) -> float:
        """How much worse a value is than the float model's; 0 where it is better."""
        change = value - self.before
        return max(change if isinstance(self._metric, metrics.Perplexity) else -change, 0.0)

    def _counted(self, results: Sequence[Sequence[Array]]) -> float:
        metric = self._metric
        metric.start(self._spec)
        for feeds, labels, found in zip(self._feeds, self._labels, results, strict=True):
            outputs = dict(zip(self._names, found, strict=True))
            batch = feeds if labels is None else feeds | {LABELS: labels}
            metric.update(metrics.Evaluation(float("nan"), outputs, 0, 0), batch)
        return float(metric.result())
