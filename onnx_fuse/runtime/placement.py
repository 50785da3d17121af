"""Where the inputs and outputs of a run stand: the caller's memory where they can."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from onnx_fuse.program.call import Tensor
from onnx_fuse.runtime.tensor import DeviceTensors

ALIGNED = 16
"""Bytes that an address must be a multiple of, to be read or written in place."""


_ANY = 1 << 62  # more bytes than there are


@dataclass(frozen=True)
class Placement:
    """Where a run's inputs and outputs stand: an address for each of `Instance.movable`.

    `copied` outputs are made in the instance's own memory and copied from there; `fed` says whether
    inputs on the GPU are copied to it. All this is so as well while such an input has other bytes,
    up to those of `reach`.
    """

    where: tuple[int, ...]
    copied: frozenset[str] = frozenset()
    fed: bool = False
    reach: Mapping[str, int] = field(default_factory=dict)


def placed(
    home: Mapping[int, int],
    ins: Iterable[tuple[str, Tensor]],
    outs: Mapping[str, Tensor],
    inputs: DeviceTensors,
    outputs: DeviceTensors,
    may_share: Callable[[str, str], bool],
) -> Placement:
    """In place what can be: aligned addresses, and outputs that overlap nothing else bound.

    `home` has the address of each buffer of the program's ends `ins` and `outs` otherwise. An
    output may stand exactly where an input does, where `may_share` says so of the two.
    """
    where, fed = dict(home), False
    borrowed: dict[str, tuple[int, int]] = {}  # memory of the caller's that inputs stand in
    at: dict[tuple[int, int], list[str]] = {}
    for name, tensor in ins:
        array = inputs.get(name)
        if array is None:
            continue
        if (low := array.address) % ALIGNED == 0:
            where[tensor.buffer] = low
            span = borrowed[name] = low, low + array.nbytes
            at.setdefault(span, []).append(name)
        else:
            fed = True
    used: list[tuple[int, int, str]] = []
    for name, target in outputs.items():
        span = target.address, target.address + target.nbytes
        used.append((*span, name))
        for source in at.get(span, ()):
            if source in borrowed and may_share(name, source):
                del borrowed[source]
                break
    used += [(low, high, "") for low, high in borrowed.values()]
    copied = overlapping(used)
    for name, target in outputs.items():
        output = outs.get(name)
        if output is None or target.address % ALIGNED:
            copied.add(name)
        elif name not in copied:
            where[output.buffer] = target.address
    starts = sorted([low for low, _, _ in used])
    reach = dict.fromkeys(inputs, 0)
    for name, (low, _) in borrowed.items() if not copied else ():
        after = bisect_right(starts, low)
        reach[name] = starts[after] - low if after < len(starts) else _ANY
    return Placement(tuple(where.values()), frozenset(copied), fed, reach)


def overlapping(used: list[tuple[int, int, str]]) -> set[str]:
    """The names of pieces of memory (from, to, name) that share bytes with another piece."""
    overlaps: set[str] = set()
    end, widest = 0, ""
    for low, high, name in sorted(used):
        if low < min(end, high):
            overlaps |= {name, widest}
        if high > end:
            end, widest = high, name
    return overlaps - {""}
