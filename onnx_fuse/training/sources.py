"""Batches from what users have: arrays, data sets with columns, loaders, generators.

PyTorch's loaders and Hugging Face's data sets are known by their methods, so neither is imported.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.distributed.world import World, pieces
from onnx_fuse.errors import DataError, UsageError
from onnx_fuse.training import data as arrays_of
from onnx_fuse.training.adapters import NAMES
from onnx_fuse.training.images import Images
from onnx_fuse.training.learner import Learner
from onnx_fuse.training.ranks import Spare

__all__ = ["Batch", "Data", "Source", "as_feeds", "source"]
__dir__ = __all__.copy

Data: TypeAlias = Any
"""Arrays by input name; a data set with columns; or an iterable of batches, or a function of the
epoch's number (from 0) that makes one. A batch is a mapping, or a tuple in the order of inputs."""
Batch: TypeAlias = Any
"""Arrays by input name, a tuple of them in the order of inputs, or the array of the only input."""
_CHUNK = 1 << 16  # labels checked at once, where the file is mapped


class Source(Protocol):
    """Training data as batches, the same ones for the same epoch."""

    examples: int
    """The number of examples, or 0 where it is not known."""
    batch_size: int
    """The number of examples in a batch, or 0 where the data comes in batches of its own."""
    steps: int | None
    """The number of batches in an epoch, or None where it is not known."""

    def batches(self, epoch: int, start: int, done: int) -> Iterator[dict[str, Array]]:
        """Yield the batches of `epoch` (from 0) from batch `start` on.

        `done` is the number of batches that were taken in all epochs so far.
        """
        ...  # pragma: no cover


@dataclass
class _Rows:
    """Examples that are chosen by their numbers, in an order of our own."""

    select: Callable[[Array], dict[str, Array]]
    examples: int
    batch_size: int
    steps: int | None
    seed: int
    shuffle: bool
    world: World | None = None

    def batches(self, epoch: int, start: int, done: int) -> Iterator[dict[str, Array]]:
        order = arrays_of.order(self.examples, self.seed, epoch, shuffle=self.shuffle)
        for i in range(start, self.steps or 0):
            # ascending, so that a mapped file is read forwards
            rows = np.sort(order[i * self.batch_size : (i + 1) * self.batch_size])
            some, spare = _part(len(rows), self.world)
            feeds = self.select(rows[some])
            yield Spare(feeds) if spare else feeds


@dataclass
class _Stream:
    """Batches that something else makes, in its own order; `once` if it makes them only once."""

    make: Callable[[int], Iterable[Any]]
    convert: Callable[[Any], dict[str, Array]]
    once: bool
    steps: int | None = None
    batch_size: int = 0
    examples: int = 0
    world: World | None = None
    _begun: bool = field(default=False, init=False)

    def batches(self, epoch: int, start: int, done: int) -> Iterator[dict[str, Array]]:
        skipped = start
        if self.once:
            skipped = 0 if self._begun else done
            self._begun = True
        batches = map(self.convert, itertools.islice(self.make(epoch), skipped, None))
        if self.world is None:
            yield from batches
            return
        for batch in batches:
            size = max((len(array) for array in batch.values() if array.ndim), default=0)
            some, spare = _part(size, self.world)
            feeds = {name: a[some] if a.ndim else a for name, a in batch.items()}
            yield Spare(feeds) if spare else feeds


def _part(rows: int, world: World | None) -> tuple[slice, bool]:
    """A rank's rows of a batch of all ranks; the first one, and True, where it would have none."""
    some = slice(rows) if world is None else pieces(rows, world.size, world.rank)
    return (some, False) if some.start != some.stop else (slice(1), True)


def source(
    trainer: Learner,
    data: Data,
    batch_size: int,
    *,
    shuffle: bool = True,
    again: bool = True,
    split: bool = False,
) -> Source:
    """The batches of `data` for the inputs of `trainer`.

    Args:
        trainer: The Trainer whose model reads the batches.
        data: Training data; a Source is returned as it is.
        batch_size: Number of examples in a batch, of data that has no batches of its own.
        shuffle: Draw a new order for each epoch, of data whose examples can be chosen.
        again: Whether the data is to be read more than once.
        split: Whether a batch is that of all ranks, of which each takes its rows.

    Raises:
        DataError: The data does not fit the model. Whole arrays are checked here.
        UsageError: The data has none of the known forms, or can be read only once, or `batch_size`
            is not the one that the model fixes.
    """
    if all(hasattr(data, name) for name in ("examples", "batch_size", "steps", "batches")):
        return data
    inputs, world = trainer.spec().feeds, trainer.world if split else None

    def convert(batch: object) -> dict[str, Array]:
        return as_feeds(batch, inputs)

    def chosen_by(select: Callable[[Array], dict[str, Array]], examples: int) -> _Rows:
        return _rows(select, examples, trainer, batch_size, shuffle, world)

    if isinstance(data, Mapping):
        lists = [v.name for v in inputs if NAMES in v.meta and isinstance(data.get(v.name), list)]
        if lists:
            data = {**data, **{name: np.asarray(data[name], object) for name in lists}}
        examples = _check_arrays(trainer, data)
        return chosen_by(
            lambda rows: {v.name or "": data[v.name or ""][rows] for v in inputs}, examples
        )
    if hasattr(data, "column_names") and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return chosen_by(lambda rows: convert(data[rows.tolist()]), len(data))
    if hasattr(data, "column_names") and callable(getattr(data, "iter", None)):
        _fixed(trainer, batch_size, world)
        return _Stream(
            lambda epoch: _at_epoch(data, epoch).iter(batch_size=batch_size),
            convert,
            once=False,
            batch_size=batch_size,
            world=world,
        )
    if _of_examples(data, convert, inputs):
        return chosen_by(lambda rows: convert(_collated([data[int(i)] for i in rows])), len(data))
    if callable(data) and not isinstance(data, Iterable):
        return _Stream(data, convert, once=False, world=world)
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise UsageError(
            f"training data of type {type(data).__name__}: give arrays by input name, a data set "
            "with columns, an iterable of batches, or a function that makes one"
        )
    once = iter(data) is data
    if once and again:
        raise UsageError(
            f"a {type(data).__name__} can be read only once, but is read in every epoch or "
            "evaluation: give a function that makes it, or steps_per_epoch"
        )
    return _Stream(
        (lambda epoch: data) if once else (lambda epoch: _at_epoch(data, epoch)),
        convert,
        once=once,
        steps=_length(data),
        world=world,
    )


def _of_examples(
    data: object, convert: Callable[[Any], dict[str, Array]], inputs: Sequence[ir.Value]
) -> bool:
    """Whether the items of `data` are examples, as of PyTorch's Dataset, and not batches."""
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or not len(data):
        return False
    if hasattr(data, "__iter__"):  # a list, or a loader
        return False
    first = convert(data[0])
    ranks = [(first[v.name].ndim, len(v.shape)) for v in inputs if v.name in first and v.shape]
    return bool(ranks) and all(of_item == wanted - 1 for of_item, wanted in ranks)


def _collated(examples: Sequence[Any]) -> Any:
    """Examples as a batch: a mapping of lists, or a tuple of arrays."""
    first = examples[0]
    if isinstance(first, Mapping):
        return {name: [each[name] for each in examples] for name in first}
    if isinstance(first, tuple | list):
        return tuple(_collated([each[i] for each in examples]) for i in range(len(first)))
    if isinstance(first, int | float):
        return list(examples)  # takes the type of its input
    return _array("an example", list(examples), None)


def _rows(
    select: Callable[[Array], dict[str, Array]],
    examples: int,
    trainer: Learner,
    batch_size: int,
    shuffle: bool,
    world: World | None,
) -> _Rows:
    """Examples in batches; a smaller last one counts unless the model fixes the size."""
    fixed = _fixed(trainer, batch_size, world)
    steps = examples // batch_size if fixed else math.ceil(examples / batch_size)
    if not steps:
        raise DataError(
            f"the data has {examples} examples, which do not fill one batch"
            + (f": the model fixes it at {batch_size}" if fixed else "")
        )
    return _Rows(select, examples, batch_size, steps, trainer.seed, shuffle, world)


def _fixed(trainer: Learner, batch_size: int, world: World | None) -> bool:
    """Whether the model fixes its batch. Raises UsageError where that is not a rank's part."""
    first = [v.shape[0] for v in trainer.spec().feeds if v.shape is not None and len(v.shape)]
    fixed = next((d for d in first if isinstance(d, int)), None)
    ranks = 1 if world is None else world.size
    if fixed is not None and fixed * ranks != batch_size:
        raise UsageError(
            f"the model's batch is fixed at {fixed}: give --batch-size {fixed * ranks}, or "
            "--free-batch"
        )
    return fixed is not None


def _check_arrays(trainer: Learner, data: Mapping[str, Array]) -> int:
    spec = trainer.spec()
    examples = arrays_of.count(data, spec.feeds)
    for target in spec.targets:
        labels = data[target.labels]
        for i in range(0, len(labels) if target.checked else 0, _CHUNK):
            target.check(labels[i : i + _CHUNK], i)
    return examples


def _at_epoch(data: object, epoch: int) -> Any:
    for each in (data, getattr(data, "sampler", None)):
        if tell := getattr(each, "set_epoch", None):
            tell(epoch)
    return data


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:  # a generator, or a loader over a stream
        return None


# ---- batches -----------------------------------------------------------------------------------


def as_feeds(batch: object, inputs: Sequence[ir.Value]) -> dict[str, Array]:
    """The arrays of a batch by the names of `inputs`.

    Args:
        batch: A mapping by name, whose labels may be called "label", or a tuple in the order of
            `inputs`, the labels last. Entries are arrays, tensors of PyTorch, or lists of numbers,
            which take the type of their input.
        inputs: The inputs that are fed.

    Raises:
        DataError: An input has no array, or a list holds no numbers of one shape.
    """
    names = [v.name or "" for v in inputs]
    if not isinstance(batch, Mapping):
        if not isinstance(batch, tuple | list):
            batch = (batch,)
        flat = list(_flattened(batch))
        if len(flat) != len(names):
            raise DataError(
                f"the model reads {', '.join(map(repr, names))}: {len(names)} arrays, "
                f"and the batch has {len(flat)}"
            )
        batch = dict(zip(names, flat, strict=True))
    if names and names[-1] not in batch and "label" in batch:
        batch = {**batch, names[-1]: batch["label"]}
    return {
        name: np.asarray(batch[name], object)
        if NAMES in v.meta
        else _array(name, batch[name], v.dtype)
        for v, name in zip(inputs, names, strict=True)
        if name in batch
    }


def _flattened(batch: Iterable[Any]) -> Iterator[Any]:
    for each in batch:
        if isinstance(each, tuple | list) and not all(isinstance(x, int | float) for x in each):
            yield from _flattened(each)
        else:
            yield each


def _array(name: str, data: object, dtype: ir.DataType | None) -> Array:
    if isinstance(data, np.ndarray | Images):
        return data  # type: ignore[return-value]
    if hasattr(data, "detach"):
        return np.asarray(data.detach().cpu().numpy())
    if not isinstance(data, list | tuple | int | float):
        return np.asarray(data)
    if isinstance(data, list | tuple) and data and hasattr(data[0], "shape"):
        return np.stack([_array(name, each, dtype) for each in data])
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise DataError(f"'{name}' holds lists of different lengths: pad them") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"'{name}' holds no numbers")
    # numbers of Python's have no type of their own
    kind = array.dtype if dtype is None else dtype.numpy()
    if array.dtype.kind == "f" and kind.kind in "iub":
        return array  # refused with the model's type, later
    return array.astype(kind)
