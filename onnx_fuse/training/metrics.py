"""Metrics of an evaluation: counted batch by batch, and reported as one number each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from onnx_fuse.arrays import Array
from onnx_fuse.errors import UsageError, listed, unknown
from onnx_fuse.training.losses import Target
from onnx_fuse.training.spec import Spec

__all__ = [
    "F1",
    "Accuracy",
    "Evaluation",
    "Given",
    "Mean",
    "Metric",
    "Perplexity",
    "Selection",
    "TopK",
    "begin",
    "evaluation",
]
__dir__ = __all__.copy


class Evaluation(NamedTuple):
    """The result of `Trainer.evaluate` for one batch."""

    loss: float
    """The loss of the batch."""
    outputs: dict[str, Array]
    """The model's outputs by name."""
    counted: int
    """The number of labels other than ignore_index; 0 where labels are not classes."""
    hits: int
    """The number of those that the largest logit predicts."""


def evaluation(spec: Spec, feeds: Mapping[str, Array], results: Mapping[str, Array]) -> Evaluation:
    """The Evaluation of a batch `feeds`, for which the graph of `spec` gave `results`."""
    counted = hits = 0
    for target in [t for t in spec.targets if t.classes][:1]:
        labels = feeds[target.labels]
        counts = labels != target.ignored
        guesses = results[target.logits].argmax(target.class_axis)
        counted, hits = int(counts.sum()), int((counts & (guesses == labels)).sum())
    outputs = {name: results[name] for name in spec.outputs}
    return Evaluation(float(results[spec.loss]), outputs, counted, hits)


Function: TypeAlias = Callable[[Mapping[str, Array], Mapping[str, Array]], float]
"""A metric of a batch, from the model's outputs and the batch itself, both by name."""


class Metric(Protocol):
    """What a metric is asked for: `start` once, `update` for each batch, `result` at the end."""

    name: str
    """The name that the result has in records, tables and `monitor`."""

    def start(self, spec: Spec) -> None:
        """Begin anew, for a model whose inputs, outputs and labels `spec` describes."""
        ...  # pragma: no cover

    def update(self, found: Evaluation, feeds: Mapping[str, Array]) -> None:
        """Count a batch: `found` is what the model gave for the arrays `feeds`."""
        ...  # pragma: no cover

    def result(self) -> float:
        """The metric of all batches since `start`."""
        ...  # pragma: no cover


Given: TypeAlias = "str | Metric | Function"
"""A metric by its name ("accuracy", "top5", "perplexity", "f1"), as an object, or as a function."""


Selection: TypeAlias = "Sequence[Given] | Mapping[str, Function] | None"
"""The metrics of an evaluation, as a user gives them."""


class _Counting:
    """A ratio of two counts."""

    name = ""

    def __init__(self, output: str | None = None) -> None:
        self.output = output

    def start(self, spec: Spec) -> None:
        """Find the labels that the metric counts. Raises UsageError where there are none."""
        kinds = [t for t in spec.targets if t.classes and self.output in (None, t.logits)]
        if not kinds:
            raise UsageError(
                f"{self.name} needs labels that are class numbers"
                + (f", for the output '{self.output}'" if self.output else "")
            )
        self.target: Target = kinds[0]
        self.total = self.good = 0.0

    def labelled(self, found: Evaluation, feeds: Mapping[str, Array]) -> tuple[Array, Array]:
        """The logits [N, classes] and labels [N] of the examples that count."""
        logits = np.moveaxis(found.outputs[self.target.logits], self.target.class_axis, -1)
        labels = feeds[self.target.labels]
        counts = labels != self.target.ignored
        return logits[counts], labels[counts]

    def result(self) -> float:
        """The share, or NaN where nothing was counted."""
        return self.good / self.total if self.total else float("nan")


class TopK(_Counting):
    """The share of labels that are among the `k` largest logits, from 0 to 1.

    `output` names the logits where several losses have labels that are classes.
    """

    def __init__(self, k: int = 5, output: str | None = None) -> None:
        super().__init__(output)
        self.k, self.name = k, f"top{k}"

    def update(self, found: Evaluation, feeds: Mapping[str, Array]) -> None:
        """Count the labels of `feeds` for which fewer than k logits of `found` are larger."""
        logits, labels = self.labelled(found, feeds)
        of_label = np.take_along_axis(logits, labels[:, None], 1)
        self.good += float(((~(logits <= of_label)).sum(1) < self.k).sum())
        self.total += len(labels)


class Accuracy(TopK):
    """The share of labels that the largest logit of `output` predicts, from 0 to 1."""

    def __init__(self, output: str | None = None) -> None:
        super().__init__(1, output)
        self.name = "accuracy"

    def update(self, found: Evaluation, feeds: Mapping[str, Array]) -> None:
        """Count the labels of `feeds` that the first largest logit of `found` predicts."""
        logits, labels = self.labelled(found, feeds)
        self.good += float((logits.argmax(1) == labels).sum())
        self.total += len(labels)


class Perplexity(_Counting):
    """exp of the mean of -log softmax(logits)[label] over all labels, whatever the loss is.

    `output` names the logits where several losses have labels that are classes.
    """

    name = "perplexity"

    def update(self, found: Evaluation, feeds: Mapping[str, Array]) -> None:
        """Add up what the logits of `found` give for the labels of `feeds`, in float64."""
        logits, labels = self.labelled(found, feeds)
        logits = logits.astype(np.float64)
        top = logits.max(1, keepdims=True, initial=-np.inf)
        sums = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
        self.good += float((sums - np.take_along_axis(logits, labels[:, None], 1)[:, 0]).sum())
        self.total += len(labels)

    def result(self) -> float:
        """The perplexity, which is infinite where it is beyond float64."""
        with np.errstate(over="ignore"):
            return float(np.exp(super().result()))


class F1(_Counting):
    """2 tp / (2 tp + fp + fn), over all labels ("micro"), or as the mean of classes ("macro").

    `average` chooses between them. The mean is over the classes that some label or prediction is
    of. `output` names the logits where several losses have labels that are classes.
    """

    name = "f1"

    def __init__(self, average: str = "macro", output: str | None = None) -> None:
        super().__init__(output)
        if average not in ("macro", "micro"):
            raise UsageError(f"F1 has the averages macro and micro, not '{average}'")
        self.average = average

    def start(self, spec: Spec) -> None:
        super().start(spec)
        self.hits, self.wrong = (np.zeros(self.target.classes, np.int64) for _ in range(2))

    def update(self, found: Evaluation, feeds: Mapping[str, Array]) -> None:
        """Count the hits and errors of each class: `found` against the labels of `feeds`."""
        logits, labels = self.labelled(found, feeds)
        guesses = logits.argmax(1)
        classes = self.target.classes
        right = guesses == labels
        self.hits += np.bincount(labels[right], minlength=classes)
        self.wrong += np.bincount(labels[~right], minlength=classes)
        self.wrong += np.bincount(guesses[~right], minlength=classes)

    def result(self) -> float:
        hits, wrong = self.hits, self.wrong
        if self.average == "micro":
            hits, wrong = hits.sum(keepdims=True), wrong.sum(keepdims=True)
        seen = hits + wrong > 0
        if not seen.any():
            return float("nan")
        return float(np.mean(2 * hits[seen] / (2 * hits[seen] + wrong[seen])))


class Mean:
    """The mean over examples of `function(outputs, feeds)`, which gives the mean of a batch.

    `name` is the metric's name, by default the function's own.
    """

    def __init__(self, function: Function, name: str = "") -> None:
        self.function, self.name = function, name or getattr(function, "__name__", "metric")

    def start(self, spec: Spec) -> None:
        """Begin with no example counted."""
        self.total = self.rows = 0.0

    def update(self, found: Evaluation, feeds: Mapping[str, Array]) -> None:
        """Call the function with the outputs of `found` and the arrays of `feeds`."""
        rows = len(next(iter(feeds.values())))
        self.total += float(self.function(found.outputs, feeds)) * rows
        self.rows += rows

    def result(self) -> float:
        """The mean, or NaN where nothing was counted."""
        return self.total / self.rows if self.rows else float("nan")


def begin(given: Selection, spec: Spec) -> list[Metric]:
    """Make the metrics that `given` names, and start them for the model that `spec` describes.

    Args:
        given: Names, objects and functions; functions by name; or None for accuracy, where the
            labels are classes.
        spec: The meaning of the model's inputs and outputs.

    Raises:
        UsageError: A name is unknown or comes twice, or the labels are of another kind.
    """
    if given is None:
        given = ["accuracy"] if any(t.classes for t in spec.targets) else []
    if isinstance(given, Mapping):
        given = [Mean(function, name) for name, function in given.items()]
    chosen = [_metric(each) for each in listed("metrics", given)]
    names = [each.name for each in chosen]
    for name in names:
        if names.count(name) > 1 or name in ("step", "epoch", "loss", "validation_loss"):
            raise UsageError(f"the metric '{name}' comes twice: give one another name")
    for each in chosen:
        each.start(spec)
    return chosen


def _metric(metric: Given) -> Metric:
    if isinstance(metric, str):
        if top := re.fullmatch("top([1-9][0-9]*)", metric):
            return TopK(int(top[1]))
        kinds: dict[str, Callable[[], Metric]] = {
            "accuracy": Accuracy,
            "perplexity": Perplexity,
            "f1": F1,
        }
        if metric not in kinds:
            raise UsageError(
                f"{unknown('metric', metric, kinds)}, top5 (or another number), or give a function"
            )
        return kinds[metric]()
    if callable(getattr(metric, "update", None)):
        return metric  # type: ignore[return-value]
    if callable(metric):
        return Mean(metric)
    raise UsageError(f"a metric of type {type(metric).__name__}: give a name or a function")
