"""Training data as named arrays whose first axis counts examples: files, checks, their order."""

from __future__ import annotations

import csv
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.errors import DataError, ModelError, UsageError
from onnx_fuse.ir.constants import one_line
from onnx_fuse.runtime import ort
from onnx_fuse.runtime.tensor import DeviceTensor
from onnx_fuse.training.adapters import NAMES
from onnx_fuse.training.images import Images, read_folder

__all__ = [
    "Fitting",
    "check_freed_batch",
    "count",
    "fit",
    "left_out",
    "load",
    "load_examples",
    "order",
    "split",
]
__dir__ = __all__.copy

NOT_ARRAYS = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""The exceptions of `np.load` for a file that is damaged, encrypted or of another kind."""


def load(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Read the arrays of an .npz file, or map those of a folder of .npy files into memory.

    Raises DataError for a path that is neither, and for arrays of Python objects.
    """
    path = Path(path)
    try:
        if path.is_dir():
            arrays = {p.stem: np.load(p, mmap_mode="r") for p in sorted(path.glob("*.npy"))}
            if not arrays:
                raise DataError(
                    f"{path}: the folder holds no .npy file: it needs one for each input, by its "
                    "name, and labels.npy"
                )
            return arrays
        loaded = np.load(path)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            with loaded:
                return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file or folder") from error
    except NOT_ARRAYS as error:
        reason = why_not_arrays(error)
        raise DataError(f"{path}: not an .npz file or a folder of .npy files: {reason}") from error
    raise DataError(f"{path}: one unnamed array: save it by np.savez with the name of an input")


def load_examples(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of examples: a table (.csv, or .jsonl, an object a line), or what `load` reads.

    A folder of folders holds images, those of each class in its own.

    The columns of a table are lists by name; columns x.0, x.1, ... are one, of lists of numbers.
    Raises DataError for what is no such file.
    """
    path = Path(path)
    if path.is_dir() and not any(path.glob("*.npy")) and any(p.is_dir() for p in path.iterdir()):
        return read_folder(path)
    if path.suffix not in (".csv", ".jsonl"):
        return load(path)
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file) if path.suffix == ".csv" else filter(str.strip, file)
            for line in lines:
                read = json.loads(line) if isinstance(line, str) else _numbers(line)
                if not isinstance(read, dict) or (rows and read.keys() != rows[0].keys()):
                    raise ValueError("it has other names than the first")
                rows.append(read)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}: example {len(rows) + 1}: {one_line(error)}") from error
    names = rows[0] if rows else {}
    columns: dict[str, Any] = {}
    for name in names:
        stem, _, place = name.rpartition(".")
        parts = [f"{stem}.{i}" for i in range(len(names)) if f"{stem}.{i}" in names]
        grouped = bool(stem) and place.isdecimal()
        columns[stem if grouped else name] = [
            [row[part] for part in parts] if grouped else row[name] for row in rows
        ]
    return columns


def left_out(arrays: Iterable[str], inputs: Iterable[ir.Value]) -> str:
    """A sentence about the `arrays` that have the name of none of `inputs`, or "" without any."""
    surplus = sorted({*arrays} - {str(v.name) for v in inputs})
    names = ", ".join(f"'{name}'" for name in surplus)
    return f"left out, since no input has its name: {names}" if surplus else ""


def _numbers(row: Mapping[str | None, Any]) -> dict[str, float]:
    numbers = {}
    for name, text in row.items():
        if name is None or text is None:
            raise ValueError("it has another number of cells than the first line")
        digits = text.strip().removeprefix("-").isdecimal()
        numbers[name] = int(text) if digits else float(text)
    return numbers


def split(arrays: Mapping[str, Array], share: float, seed: int) -> tuple[dict[str, Array], ...]:
    """The examples in `arrays` in two parts, drawn by `seed`: those left, and `share` of all.

    Raises UsageError where one part has none.
    """
    examples = min((len(array) for array in arrays.values()), default=0)
    held_out = round(share * examples)
    if not 0 < held_out < examples:
        raise UsageError(f"a split by {share} leaves one part of {examples} examples empty")
    drawn = order(examples, seed, 0)
    parts = np.sort(drawn[held_out:]), np.sort(drawn[:held_out])
    kinds = np.ndarray, Images
    named = {name: array for name, array in arrays.items() if isinstance(array, kinds)}

    def taken(array: Array | Images, rows: Array) -> Any:
        return array.taken(rows) if isinstance(array, Images) else array[rows]

    return tuple({name: taken(array, rows) for name, array in named.items()} for rows in parts)


def why_not_arrays(error: BaseException) -> str:
    """Explain the error, one of NOT_ARRAYS, with which NumPy refused a file."""
    reason = getattr(error, "strerror", None) or one_line(error)
    # NumPy takes any file that it does not know for pickled objects
    return "it is another kind of file, or has Python objects" if "pickle" in reason else reason


def count(arrays: Mapping[str, Array], inputs: Sequence[ir.Value]) -> int:
    """Check that the arrays fit the inputs, whatever the batch; return the number of examples.

    Raises a DataError that names the array, what it is and what it should be.
    """
    sizes = {name: len(array) for name, array in fit(arrays, inputs, batch=False).items()}
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"'{k}' {n}" for k, n in sizes.items())
        raise DataError(f"the arrays differ in their number of examples: {listed}")
    (examples,) = set(sizes.values())
    if not examples:
        raise DataError("the arrays hold no example")
    return examples


def fit(
    arrays: Mapping[str, Any], inputs: Sequence[ir.Value], *, batch: bool = True
) -> dict[str, Array]:
    """The arrays in the types of the inputs, converted only where no value changes.

    Numbers of any type that a float input has exactly are such, as labels 1 and -1 are. Sizes of
    equal symbols must be equal. With `batch=False` the arrays are whole data sets, whose first axis
    is not the batch; they are checked but not converted. A tensor on the GPU stays there and must
    have the input's type, unless it says which adapters rows have. Raises DataError.
    """
    names = [v.name or "" for v in inputs]
    missing = [name for name in names if name not in arrays]
    if missing:
        raise DataError(
            f"no array for the input {', '.join(map(repr, missing))}: the model reads "
            f"{', '.join(map(repr, names))}, given are {', '.join(map(repr, arrays)) or 'none'}"
        )
    sizes: dict[str, tuple[int, str]] = {}
    fitted = {}
    for value, name in zip(inputs, names, strict=True):
        array = arrays[name]
        named = NAMES in value.meta  # few bytes, which are looked at wherever they are
        resident = isinstance(array, DeviceTensor) and not named
        if batch and named:
            array = _numbers_of_names(name, array, value.meta[NAMES])
        array = np.asarray(array) if batch and not resident else array
        dtype = value.dtype.numpy() if value.dtype is not None else array.dtype
        fixed = resident or not (named or np.can_cast(array.dtype, dtype, "safe"))
        if array.dtype != dtype and fixed and not _exact(array, dtype):
            raise DataError(
                f"'{name}' holds {array.dtype}, the model reads {dtype}: convert it by "
                f".astype('{dtype}')"
            )
        _check_shape(name, array.shape, value.shape, sizes, 0 if batch else 1)
        fitted[name] = np.asarray(array, dtype, order="C") if batch and not resident else array
    return fitted


def _exact(array: Array | DeviceTensor, dtype: np.dtype[Any]) -> bool:
    """Whether numbers on the host are floats of a type, each of them."""
    floats = dtype.kind == "f" or dtype.name == "bfloat16"
    if isinstance(array, DeviceTensor) or array.dtype.kind not in "iuf" or not floats:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        again = np.asarray(array, dtype).astype(array.dtype)
        return np.array_equal(again, np.asarray(array), equal_nan=True)


def _numbers_of_names(feed: str, rows: object, names: Sequence[str]) -> Array:
    """The place among `names` of each row's name, -1 for None; such places stay as they are."""
    numbers: dict[Any, int] = {None: -1, -1: -1}
    for i, name in enumerate(names):
        numbers |= {i: i, name: i}
    listed = np.asarray(rows, object) if not hasattr(rows, "dtype") else np.asarray(rows)
    every = listed.ravel().tolist()
    unknown = [
        each for each in every
        if type(each) is bool or not isinstance(each, str | int | np.integer | None)
        or each not in numbers
    ]  # fmt: skip
    if listed.ndim != 1 or unknown:
        raise DataError(
            f"'{feed}' holds {unknown[0] if unknown else listed.tolist()!r}: it has one of "
            f"{', '.join(names)}, or None, for each row"
        )
    return np.array([numbers[each] for each in every], np.int64)


def with_labels(arrays: Mapping[str, Array], inputs: Sequence[ir.Value]) -> dict[str, Array]:
    """The arrays, and zeros for those of `inputs` that are not among them, which are labels.

    Raises UsageError where the size of a label is that of none of the arrays.
    """
    sizes = {
        dim.value: size
        for value in inputs
        if value.name in arrays
        for dim, size in zip(value.shape or (), arrays[value.name or ""].shape, strict=False)
        if not isinstance(dim, int)
    }
    fed = dict(arrays)
    for value in inputs:
        if value.name in fed or value.name is None:
            continue
        if NAMES in value.meta:
            raise UsageError(f"'{value.name}' names the adapter of each row: give it, too")
        dims = [d if isinstance(d, int) else sizes.get(d.value) for d in value.shape or ()]
        if None in dims or value.dtype is None:
            raise UsageError(f"the shape of '{value.name}' is not that of an input: give its array")
        fed[value.name] = np.zeros([int(d or 0) for d in dims], value.dtype.numpy())
    return fed


class Fitting:
    """`fit` for step after step: feeds of the types and shapes of the last ones fit as well."""

    def __init__(self) -> None:
        self._fitted: dict[int, tuple[Any, ...]] = {}  # by the identity of the inputs

    def __call__(self, arrays: Mapping[str, Any], inputs: Sequence[ir.Value]) -> dict[str, Array]:
        """The arrays in the types of the inputs. Raises DataError."""
        named = any(NAMES in v.meta for v in inputs)  # numbers of one shape may name no adapter
        kinds = None if named else _kinds(arrays, inputs)
        if kinds is not None and kinds == self._fitted.get(id(inputs)):
            return {v.name or "": arrays[v.name or ""] for v in inputs}
        fitted = fit(arrays, inputs)
        if kinds is not None and all(arrays[name] is array for name, array in fitted.items()):
            self._fitted[id(inputs)] = kinds
        return fitted


def _kinds(arrays: Mapping[str, Any], inputs: Sequence[ir.Value]) -> tuple[Any, ...] | None:
    """A cheap key of the arrays' layouts; None if `fit` must convert one of them."""
    layouts = []
    for value in inputs:
        array = arrays.get(value.name or "")
        if type(array) is np.ndarray:
            if not array.flags.c_contiguous:
                return None
        elif type(array) is not DeviceTensor:
            return None
        layouts.append((type(array), array.dtype, array.shape))
    return tuple(layouts)


def _check_shape(
    name: str,
    got: tuple[int, ...],
    expected: ir.Shape | None,
    sizes: dict[str, tuple[int, str]],
    first: int,
) -> None:
    if expected is None:
        if first > len(got):
            raise DataError(f"'{name}' is a single number, not one for each example")
        return
    wanted = [d if isinstance(d, int) else d.value for d in expected]
    shown = f"[{', '.join('?' if d is None else str(d) for d in wanted)}]"
    if len(got) != len(wanted) or (first and not got):
        raise DataError(f"'{name}' has shape {list(got)}, the model reads {shown}")
    for i, (size, dim) in enumerate(zip(got, wanted, strict=True)):
        if i < first or dim is None:
            continue
        if isinstance(dim, int) and size != dim:
            raise DataError(f"'{name}' has shape {list(got)}, the model reads {shown}")
        if isinstance(dim, str):
            first_size, where = sizes.setdefault(dim, (size, name))
            if first_size != size:
                raise DataError(
                    f"'{name}' has shape {list(got)}: its axis {i}, '{dim}', is {first_size} in "
                    f"'{where}', and training assumes that sizes of one name are equal: rename "
                    "one in the file"
                )


def order(examples: int, seed: int, epoch: int, *, shuffle: bool = True) -> Array:
    """The order of the examples in an epoch, as indices (int64, [examples]).

    With `shuffle` it is drawn from `seed` and `epoch`. It depends only on the arguments, so that a
    resumed run agrees.
    """
    if not shuffle:
        return np.arange(examples)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(examples)


def check_freed_batch(
    model: ir.Model,
    arrays: Mapping[str, Any],
    names: Sequence[str],
    run: Callable[[], Mapping[str, Array]],
) -> None:
    """Compare a model with its batch freed to the original, on all rows that fill its batch.

    Args:
        model: The model with the batch that it was exported with.
        arrays: The feeds of the first batch, on the host or on a GPU.
        names: The outputs to compare.
        run: Computes them for that batch.

    Raises:
        ModelError: The outputs differ.
        DataError: The batch has too few rows.
    """
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    session = ort.session(model)
    size = int(session.get_inputs()[0].shape[0])
    rows = len(arrays[session.get_inputs()[0].name])
    if rows < size:
        raise DataError(
            f"the first batch has {rows} rows, but it needs at least {size}, the batch that the "
            "model was exported with"
        )
    head = "the batch of the model cannot be freed"
    try:
        outputs = run()
    except ModelError as error:
        raise ModelError(f"{head}: {error}") from error
    for i in range(0, rows - size + 1, size):
        feeds = {v.name: arrays[v.name][i : i + size] for v in session.get_inputs()}
        for name, y in zip(names, ort.run(session, feeds, names), strict=True):
            got = outputs[name][i : i + size]
            if got.shape != y.shape or not np.allclose(got, y, rtol=1e-3, atol=1e-4):
                raise ModelError(f"{head}: its output '{name}' changes")
