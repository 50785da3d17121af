"""The numbers that another shape of an open program changes in its launches' arguments.

A launch whose grid, shared memory or arguments hold open sizes is a Change. Its `words` are those
of `cuda.arguments`, where addresses count from buffers; from which ones is the same for every
shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onnx_fuse.cuda.arguments import words_of
from onnx_fuse.program.call import Call, Program
from onnx_fuse.program.launch import Launch, TensorMap
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.program.size import OpenSize

Change = tuple[int, int, tuple[int, int, int], int, tuple[Any, ...], int]
"""(number of the call, of its launch, grid, bytes of shared memory, words, `Launch.sync`)."""


def workspace_key(call: int) -> int:
    """The key of a call's workspace among the buffers."""
    return -1 - call


def places(i: int, call: Call) -> dict[str, tuple[int, int]]:
    """(buffer, offset in bytes) of each operand of call `i` by name, its workspace included."""
    found = {
        name: (t.buffer, t.offset * ITEMSIZE[t.dtype]) for name, t in (*call.reads, *call.writes)
    }
    if call.workspace:
        found["workspace"] = workspace_key(i), 0
    return found


def operands(address: Mapping[int, int], i: int, call: Call) -> dict[str, int]:
    """The addresses of call `i`'s operands by name; `address` has each buffer's and workspace's."""
    return {name: address[buffer] + at for name, (buffer, at) in places(i, call).items()}


def changes(program: Program) -> tuple[Change, ...] | None:
    """The launches that hold open sizes; None where another shape changes more than arguments."""
    updates = []
    for i, call in enumerate(program.calls):
        for j, launch in enumerate(call.launches):
            numbers = words(i, call, launch)
            if launch.of_library:
                if launch.product is not None and launch.product.trace is not None:
                    return None
                continue
            if _is_open((launch.block, launch.cluster)):
                return None
            if _is_open((launch.grid, launch.smem, numbers, launch.sync)):
                updates.append((i, j, launch.grid, launch.smem, numbers, launch.sync))
    return tuple(updates)


def all_launches(program: Program, before: Program) -> tuple[Change, ...] | None:
    """All launches of a shape of which nothing else is known; None where a kernel is another.

    `before` is another shape of the same open program.
    """
    updates = []
    for i, (call, old) in enumerate(zip(program.calls, before.calls, strict=True)):
        for j, (x, y) in enumerate(zip(call.launches, old.launches, strict=True)):
            alike = replace(x, grid=y.grid, smem=y.smem, args=y.args, sync=y.sync) == y
            if x.of_library or not alike:
                return None
            updates.append((i, j, x.grid, x.smem, words(i, call, x), x.sync))
    return tuple(updates)


def words(i: int, call: Call, launch: Launch) -> tuple[Any, ...]:
    """The words of a launch of call `i`, whose addresses count from buffers."""
    return words_of(launch.args, places(i, call))[0]


def _is_open(value: object) -> bool:
    if isinstance(value, tuple):
        return any(_is_open(part) for part in value)
    if isinstance(value, TensorMap):
        return _is_open((value.shape, value.strides, value.box))
    return isinstance(value, OpenSize)
