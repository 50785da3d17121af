"""The numbers that another shape of an open program changes in its launches' arguments.

A launch whose grid or arguments hold open sizes is a Change. Its `words` stand for the arguments in
the order of `cuda.arguments`, an offset in bytes for each address; which buffer's address is added
to that is the same for every shape (`spots`). The word of the launch's own memory, "sync", is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from onnx_fuse.cuda.arguments import words_of
from onnx_fuse.program.call import Call, Program
from onnx_fuse.program.problem import ITEMSIZE, Launch, TensorMap
from onnx_fuse.program.size import OpenSize

Change = tuple[int, int, tuple[int, int, int], tuple[Any, ...], int]
"""(number of the call, of its launch, grid, words, bytes of `Launch.sync`)."""


class Spots(NamedTuple):
    """The places of a launch's addresses and TMA descriptors, as (word, buffer)."""

    addresses: tuple[tuple[int, int], ...]
    maps: tuple[tuple[int, int], ...]


def workspace_key(call: int) -> int:
    """The key of a call's workspace among the buffers."""
    return -1 - call


def operands(address: Mapping[int, int], i: int, call: Call) -> dict[str, int]:
    """The addresses of call `i`'s operands by name; `address` has each buffer's and workspace's."""
    pointers = {
        name: address[t.buffer] + t.offset * ITEMSIZE[t.dtype] if t.offset else address[t.buffer]
        for name, t in (*call.reads, *call.writes)
    }
    if call.workspace:
        pointers["workspace"] = address[workspace_key(i)]
    return pointers


def changes(program: Program) -> tuple[Change, ...] | None:
    """The launches that hold open sizes; None where another shape changes more than arguments."""
    updates = []
    for i, call in enumerate(program.calls):
        for j, launch in enumerate(call.launches):
            numbers = tuple(word for word, _ in words(i, call, launch))
            if launch.of_library:
                if launch.product is not None and launch.product.trace is not None:
                    return None
                continue
            if _is_open((launch.block, launch.smem, launch.cluster)):
                return None
            if _is_open((launch.grid, numbers, launch.sync)):
                updates.append((i, j, launch.grid, numbers, launch.sync))
    return tuple(updates)


def all_launches(program: Program, before: Program) -> tuple[Change, ...] | None:
    """All launches of a shape of which nothing else is known; None where a kernel is another.

    `before` is another shape of the same open program.
    """
    updates = []
    for i, (call, old) in enumerate(zip(program.calls, before.calls, strict=True)):
        for j, (x, y) in enumerate(zip(call.launches, old.launches, strict=True)):
            if x.of_library or replace(x, grid=y.grid, args=y.args, sync=y.sync) != y:
                return None
            updates.append((i, j, x.grid, tuple([w for w, _ in words(i, call, x)]), x.sync))
    return tuple(updates)


def spots(i: int, call: Call, launch: Launch) -> Spots:
    """The places of the addresses in a launch of call `i`."""
    addresses: list[tuple[int, int]] = []
    maps: list[tuple[int, int]] = []
    for at, (word, buffer) in enumerate(words(i, call, launch)):
        if buffer is not None:
            (maps if isinstance(word, tuple) else addresses).append((at, buffer))
    return Spots(tuple(addresses), tuple(maps))


def words(i: int, call: Call, launch: Launch) -> list[tuple[Any, int | None]]:
    """Each word: a number, or an offset and the buffer it counts from; (map, offset) of a map."""
    operands = dict((*call.reads, *call.writes))
    numbers, addresses = words_of(launch.args)
    result: list[tuple[Any, int | None]] = [(number, None) for number in numbers]
    for at, name, offset, descriptor in addresses:
        word, buffer, tensor = 0, None, operands.get(name)
        if name == "workspace" and call.workspace:
            word, buffer = offset, workspace_key(i)
        elif tensor is not None:
            word, buffer = tensor.offset * ITEMSIZE[tensor.dtype] + offset, tensor.buffer
        result[at] = (word if descriptor is None else (descriptor, word)), buffer
    return result


def _is_open(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_is_open(part) for part in value)
    if isinstance(value, TensorMap):
        return _is_open((value.shape, value.strides, value.box))
    return isinstance(value, OpenSize)
