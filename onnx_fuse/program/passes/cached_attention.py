"""Attention of one new token takes the token's key and value into the cache itself."""

from __future__ import annotations

from dataclasses import replace

from onnx_fuse.program.call import Call, Tensor
from onnx_fuse.program.contractions import CACHE_OPERANDS, Attention, CachedAttention
from onnx_fuse.program.data_movement import CacheAppend
from onnx_fuse.program.passes.callgraph import Calls, whole


def append_in_attention(calls: Calls, i: int, call: Call) -> None:
    """present = past with a new row, y = attention over it: one launch, where nobody else waits."""
    p, reads = call.problem, dict(call.reads)
    if type(p) is not Attention or p.packed or p.m != 1:
        return
    at, before = calls.producer(reads["k"]) or (i, call)
    append, presents = before.problem, dict(before.writes)
    if not isinstance(append, CacheAppend) or append.rows != 1 or not before.inplace:
        return
    if any(_is_other(presents[name], reads[x]) for name, x in _PRESENTS.items()):
        return
    given = dict(before.reads)
    if "lengths" in reads and given.get("lengths", reads["lengths"]) != reads["lengths"]:
        return
    if append.heads:
        turned = presents.pop("turned")
        if _is_other(turned, reads["q"]) or calls.sole_producer(i, turned) is None:
            return
        reads["q"] = given["q"]
    if any(at < r < i for t in presents.values() for r in calls.readers[t.buffer]):
        return
    reads = {name: t for name, t in reads.items() if name not in ("k", "v")}
    reads |= {CACHE_OPERANDS.get(name, name): t for name, t in given.items() if name != "q"}
    if calls.written(at, i, *reads.values()):
        return
    strides = {"q_strides": append.q_strides} if append.heads else {}
    both = CachedAttention(**{**p.fields(), **strides, "append": append})
    if not calls.serves(both) or not calls.pays((append, p), (both,)):
        return
    fused = replace(
        call, kernel=f"{before.kernel}+{call.kernel}", problem=both,
        reads=tuple(reads.items()), writes=(*call.writes, *presents.items()),
        inplace=tuple((write, CACHE_OPERANDS[read]) for write, read in before.inplace),
    )  # fmt: skip
    calls.fuse(at, i, fused, here=True)


_PRESENTS = {"present_key": "k", "present_value": "v"}


def _is_other(written: Tensor, read: Tensor) -> bool:
    """Whether what is read is not all that was written, in its order."""
    return written.buffer != read.buffer or not whole(written.size, written, read)
