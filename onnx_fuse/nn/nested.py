"""Nested arguments and results of functions: their Tensors in order, and all else as a form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from onnx_fuse.errors import UsageError
from onnx_fuse.nn.dispatch import frozen
from onnx_fuse.nn.tensor import Tensor


def flat(value: object, tensors: list[Tensor]) -> Any:
    """A key for what is no Tensor; the Tensors are appended in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if isinstance(value, list | tuple):
        return type(value), tuple([flat(v, tensors) for v in value])
    if isinstance(value, dict):
        return dict, tuple([(k, flat(v, tensors)) for k, v in value.items()])
    if isinstance(value, int | float | str | bool) or value is None:
        return type(value), frozen(value)
    try:
        hash(value)
    except TypeError as error:
        raise UsageError(
            f"a captured function takes Tensors and Python values, not {type(value).__name__}"
        ) from error
    return value


def form_of(value: object, tensors: list[Tensor]) -> Any:
    """The result with its Tensors left out, which are appended in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if isinstance(value, list | tuple):
        return [type(value), *[form_of(v, tensors) for v in value]]
    if isinstance(value, dict):
        return {k: form_of(v, tensors) for k, v in value.items()}
    return (value,)


def formed(shape: Any, tensors: Iterator[Tensor]) -> Any:
    """The result in its form again."""
    if shape is Tensor:
        return next(tensors)
    if isinstance(shape, list):
        kind, parts = shape[0], [formed(s, tensors) for s in shape[1:]]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    if isinstance(shape, dict):
        return {k: formed(s, tensors) for k, s in shape.items()}
    return shape[0]


def names_of(
    function: Callable[..., Any], args: Iterable[object], kwargs: Mapping[str, object]
) -> dict[int, str]:
    """The names of arguments that are Tensors, by identity."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {}
    names: dict[int, str] = {}
    for name, value in bound.items():
        inner: list[Tensor] = []
        if isinstance(value, Tensor | list | tuple | dict):
            flat(value, inner)
        many = len(inner) > 1
        names |= {id(t): f"{name}_{i}" if many else name for i, t in enumerate(inner)}
    return names
