"""A copy of what other calls have written: they write where it would have put it.

So the pieces of a Concat go straight to the places that a Transpose behind it gives them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from onnx_fuse.program.call import Call, Tensor
from onnx_fuse.program.passes.callgraph import Calls, nodes_of
from onnx_fuse.program.passes.copy_fusion import copied


def forward_copies(calls: Calls, i: int, call: Call) -> None:
    """Drop a copy that rearranges a buffer which pointwise calls fill for it alone."""
    x, readers, writers = copied(call), calls.readers, calls.writers
    if x is None or x.buffer in calls.keep or readers[x.buffer] != [i]:
        return
    (_, y), makers = call.writes[0], writers[x.buffer]
    touched = [j for j in (*readers[y.buffer], *writers[y.buffer]) if j != i]
    if not makers or any(makers[0] <= j <= i for j in touched):
        return
    moved: dict[int, Call] = {}
    pieces: dict[int, int] = defaultdict(int)  # elements by the places' first one
    for j in makers:
        (maker,) = (moved[j],) if j in moved else calls.now[j]
        if (to := _redirected(maker, x, y)) is None:
            return
        moved[j], (first, size) = to
        pieces[first] += size
    if sum(pieces.values()) != x.size or len(pieces) != len(makers):
        return
    for j, maker in moved.items():
        calls.now[j] = (replace(maker, nodes=nodes_of(maker, call)),)
    calls.now[i] = ()
    # `readers` need not change: no call after this one is asked about x
    writers[y.buffer] = sorted([*makers, *(j for j in writers[y.buffer] if j != i)])
    writers[x.buffer] = []


def _redirected(call: Call, x: Tensor, y: Tensor) -> tuple[Call, tuple[int, int]] | None:
    """The call that writes its part of x's buffer to where a copy of x puts it in y, and that
    part's first place and size; None where it is no pointwise call or the part no block of x.
    """
    overwrites = [t for _, t in call.writes if t.buffer == x.buffer]
    if call.expression is None or len(overwrites) != 1 or overwrites[0].dtype != x.dtype:
        return None
    (part,) = overwrites
    axes = sorted(
        ((step, size, to) for size, step, to in zip(x.shape, x.strides, y.strides, strict=True)
         if size != 1), reverse=True,
    )  # fmt: skip
    rest, offset = part.offset - x.offset, y.offset
    if rest < 0 or any(step < 1 for step, _, _ in axes):
        return None
    left = []  # places of each axis behind the part's last one
    for step, size, to in axes:
        first = min(rest // step, size - 1)
        rest -= first * step
        offset += first * to
        left.append(size - 1 - first)
    strides = []
    for size, step in zip(part.shape, part.strides, strict=True):
        # the axis that it goes along, perhaps several places at a time
        k = next((k for k, (least, _, _) in enumerate(axes) if least <= step), None)
        if size == 1 or k is None:
            strides.append(0)
            rest += size - 1
            continue
        least, _, to = axes[k]
        left[k] -= (size - 1) * (step // least)
        rest += step % least
        strides.append(step // least * to)
    if rest or any(n < 0 for n in left):
        return None
    place = Tensor(y.buffer, y.dtype, part.shape, tuple(strides), offset)
    writes = tuple((n, place if t is part else t) for n, t in call.writes)
    return replace(call, writes=writes), (part.offset, part.size)
