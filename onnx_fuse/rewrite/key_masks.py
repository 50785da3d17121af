"""Proof that masks of attention hide the keys of padded tokens, and beside them only later ones.

A mask is computed from the input that says where tokens are. Each of its numbers is made of moved
and combined elements of that input; which element decides it is found by trying inputs that tell
all places of a sequence apart, and inputs of the greatest length that is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.ir.build import const_array, dim, sources
from onnx_fuse.ir.traits import BROADCASTS, POINTWISE, SIZES, VIEWS
from onnx_fuse.ops.fused.sdpa.kinds import Kind
from onnx_fuse.program.packing import LONGEST

HIDDEN = -1e4
"""What is added to a logit at or below this hides its key: exporters' masks are -10000 or less."""
_MOVES = VIEWS | {
    "Concat",
    "Expand",
    "Gather",
    "GatherElements",
    "GatherND",
    "Slice",
    "Split",
    "Tile",
    "Trilu",
}
_DENSE = 512
"""A length up to which masks are tried that tell every two places apart."""
_RANDOM = 4

Evaluate = Callable[[Sequence[ir.Value], tuple[int, int], Array], "list[Array] | None"]


@dataclass(frozen=True)
class KeyMask:
    """Whether masks hide padded keys; `reason` says why not."""

    causal: bool = False
    """They also hide from each query the keys behind it."""
    longest: int = LONGEST
    """The greatest length at which they were tried."""
    reason: str = ""


def _data(node: ir.Node) -> Iterable[ir.Value | None]:
    return () if node.op_type in SIZES and not node.domain else node.inputs


def reached_inputs(values: Iterable[ir.Value | None]) -> list[ir.Value]:
    """The graph's inputs whose numbers, not only sizes, some values are made of."""
    return [v for v in sources(values, _data) if v.is_graph_input() and not v.is_initializer()]


def key_mask(
    kind: Kind, masks: Sequence[ir.Value | None], source: ir.Value, evaluated: Evaluate
) -> KeyMask:
    """What the masks of an attention hide, as `evaluated` finds them for masks [B, S]."""
    made = [v for v in sources(masks, _data) if source in sources([v], _data)]
    for value in made:
        node = value.producer()
        allowed = POINTWISE | BROADCASTS | _MOVES
        if node is not None and (node.domain or node.op_type not in allowed):
            return KeyMask(reason=f"its mask is made by {node.domain or node.op_type}")
    found: bool | None = None
    lengths = _lengths(masks, source)
    for length in lengths:
        tried = _tried(length)
        if (batch := dim(source, 0)) is not None:
            tried = np.concatenate([tried, np.ones((-len(tried) % max(1, batch), length), bool)])
        at_once = batch or max(1, LONGEST // length) ** 2
        for one in np.split(tried, range(at_once, len(tried), at_once)):
            arrays = evaluated([v for v in masks if v is not None], one.shape, one)
            if arrays is None:
                return KeyMask(reason="its mask cannot be evaluated by itself")
            causal = _shown(kind, arrays, one)
            if causal is None or (length > 1 and found not in (None, causal)):
                return KeyMask(reason="its mask hides other keys than those of padded tokens")
            found = causal if length > 1 else found
    return KeyMask(causal=bool(found), longest=lengths[-1])


def _tried(length: int) -> Array:
    """bool [masks, length]: all, none, codes that tell every two places apart, and random ones.

    Of a great length there is one, in which half of the places are padding.
    """
    random = np.random.default_rng(length).random((_RANDOM, length)) < 0.5
    if length > _DENSE:
        return random[:1]
    bits = max(1, (length - 1).bit_length())
    codes = (np.arange(length) >> np.arange(bits)[:, None]) & 1 == 1
    ends = np.stack([np.ones(length, bool), np.zeros(length, bool)])
    return np.concatenate([ends, codes, ~codes, random])


def _lengths(masks: Sequence[ir.Value | None], source: ir.Value) -> list[int]:
    """Lengths to try, up to that of tables in the graph or of what fits into memory."""
    if (static := dim(source, 1)) is not None:
        return [static]
    tables = [
        array.shape[-2:] for v in sources(masks, _data) if (array := const_array(v)) is not None
    ]
    most = isqrt(LONGEST**2 // max(1, dim(source, 0) or 1))
    longest = min([most, *(min(sizes) for sizes in tables if len(sizes) > 1 and min(sizes) > 1)])
    return sorted({n for n in (1, 2, 7, 70) if n < longest} | {longest})


def _shown(kind: Kind, arrays: Sequence[Array], there: Array) -> bool | None:
    """Whether masks [.., S, T] hide the keys behind each query beside those that are not `there`.

    None where they hide anything else.
    """
    batch, length = there.shape
    shape = (batch, 1, length, length)
    neutral, hidden = np.ones(shape, bool), np.zeros(shape, bool)
    rest = list(arrays)
    for step in kind.steps:
        array = rest.pop(0)
        if any(n not in (1, m) for n, m in zip(array.shape[::-1], shape[::-1], strict=False)):
            return None
        if step == "Where":
            kept, low = array.astype(bool), rest.pop(0)
            neutral, hidden = neutral & kept, hidden | (~kept & (low <= HIDDEN))
        else:
            neutral, hidden = neutral & (array == 0), hidden | (array <= HIDDEN)
    seen = np.broadcast_to(there[:, None, None], shape)
    past = np.tril(np.ones((length, length), bool))
    for causal in (False, True):
        want = seen & past if causal else seen
        if (neutral == want).all() and (hidden == ~want).all():
            return causal
    return None
