"""Proof that masks of attention hide the keys of padded tokens, and beside them only later ones.

What they add beside that, whatever the tokens are, is a bias of positions.

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
_BIASED = 2048
"""The greatest length of sequences with a bias of positions, whose numbers take long to compute."""
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
    bias: ir.Value | None = None
    """What they add to scores whatever the tokens are, such as T5's relative positions."""


def _data(node: ir.Node) -> Iterable[ir.Value | None]:
    return () if node.op_type in SIZES and not node.domain else node.inputs


def reached_inputs(values: Iterable[ir.Value | None]) -> list[ir.Value]:
    """The graph's inputs whose numbers, not only sizes, some values are made of."""
    return [v for v in sources(values, _data) if v.is_graph_input() and not v.is_initializer()]


def _bias(
    kind: Kind, masks: Sequence[ir.Value | None], source: ir.Value
) -> tuple[int, ir.Value] | None:
    """What masks add to scores whatever `source` holds, and which of them adds it.

    None where nothing is added, or more than one does.
    """

    def apart(value: ir.Value | None) -> bool:
        array = None if value is None else const_array(value)
        number = array is not None and array.size == 1  # the 0 of keys that are seen
        return value is not None and not number and source not in sources([value], _data)

    biases: list[tuple[int, ir.Value]] = []
    for i, value in enumerate(masks[at] for at in _mask_inputs(kind)):
        node = None if value is None else value.producer()
        parts = [value]
        if node is not None and not node.domain and not apart(value):
            parts = {"Where": [*node.inputs[1:2]], "Add": [*node.inputs]}.get(node.op_type, [])
        biases += [(i, v) for v in parts if v is not None and apart(v)]
    return biases[0] if len(biases) == 1 else None


def _mask_inputs(kind: Kind) -> Iterable[int]:
    """The places of the masks that are added among those of all steps."""
    at = 0
    for step in kind.steps:
        if step == "Mask":
            yield at
        at += 1 + (step == "Where")


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
    plain = _tried_out(kind, masks, source, evaluated, None)
    bias = _bias(kind, masks, source) if plain.reason else None
    return plain if bias is None else _tried_out(kind, masks, source, evaluated, bias)


def _tried_out(
    kind: Kind,
    masks: Sequence[ir.Value | None],
    source: ir.Value,
    evaluated: Evaluate,
    bias: tuple[int, ir.Value] | None,
) -> KeyMask:
    found: bool | None = None
    lengths = _lengths(masks, source, _BIASED if bias else LONGEST)
    for length in lengths:
        tried = _tried(length)
        if (batch := dim(source, 0)) is not None:
            tried = np.concatenate([tried, np.ones((-len(tried) % max(1, batch), length), bool)])
        at_once = batch or max(1, LONGEST // length) ** 2
        for one in np.split(tried, range(at_once, len(tried), at_once)):
            values = [v for v in masks if v is not None]
            arrays = evaluated([*values, *([bias[1]] if bias else [])], one.shape, one)
            if arrays is None:
                return KeyMask(reason="its mask cannot be evaluated by itself")
            base = (bias[0], arrays[-1]) if bias else None
            causal = _shown(kind, arrays[: len(values)], one, base)
            if causal is None or (length > 1 and found not in (None, causal)):
                return KeyMask(reason="its mask hides other keys than those of padded tokens")
            found = causal if length > 1 else found
    return KeyMask(bool(found), lengths[-1], bias=bias[1] if bias else None)


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


def _lengths(masks: Sequence[ir.Value | None], source: ir.Value, longest: int) -> list[int]:
    """Lengths to try, up to `longest`, that of tables in the graph or of what fits into memory."""
    if (static := dim(source, 1)) is not None:
        return [static]
    tables = [
        array.shape[-2:]
        for v in sources(masks, _data)
        # of a bucket for each distance, any length has its entry
        if not all(n.op_type == "Gather" and i == 0 for n, i in v.uses())
        if (array := const_array(v)) is not None
    ]
    most = isqrt(longest**2 // max(1, dim(source, 0) or 1))
    longest = min([most, *(min(sizes) for sizes in tables if len(sizes) > 1 and min(sizes) > 1)])
    return sorted({n for n in (1, 2, 7, 70) if n < longest} | {longest})


def _shown(
    kind: Kind, arrays: Sequence[Array], there: Array, bias: tuple[int, Array] | None
) -> bool | None:
    """Whether masks [.., S, T] hide the keys behind each query beside those that are not `there`.

    None where they hide anything else, or add anything else than `bias` to what they show.
    """
    batch, length = there.shape
    heads = 1
    if bias is not None:
        sizes = (1, 1, 1, 1, *bias[1].shape)[-4:]
        heads = sizes[1]
        if sizes[0] != 1 or not (bias[1] > HIDDEN).all() or np.isposinf(bias[1]).any():
            return None
    shape = (batch, heads, length, length)
    neutral, hidden = np.ones(shape, bool), np.zeros(shape, bool)
    rest, added = list(arrays), 0
    for step in kind.steps:
        array = rest.pop(0)
        if any(n not in (1, m) for n, m in zip(array.shape[::-1], shape[::-1], strict=False)):
            return None
        if step == "Where":
            kept, low = array.astype(bool), rest.pop(0)
            neutral, hidden = neutral & kept, hidden | (~kept & (low <= HIDDEN))
        else:
            base = bias[1] if bias is not None and bias[0] == added else 0
            neutral, hidden = neutral & (array == base), hidden | (array <= HIDDEN)
            added += 1
    seen = np.broadcast_to(there[:, None, None], shape)
    past = np.tril(np.ones((length, length), bool))
    for causal in (False, True):
        want = seen & past if causal else seen
        if (neutral == want).all() and (hidden == ~want).all():
            return causal
    return None
