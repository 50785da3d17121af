"""What the inputs and outputs of a decoder are for: ids, mask, positions, cache and logits."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError
from onnx_fuse.feeds import InputSpec
from onnx_fuse.ir.build import all_nodes, const_array
from onnx_fuse.ir.traits import VIEWS

if TYPE_CHECKING:
    import onnx_ir

_ROLES = {
    "ids": r"(decoder_)?(input_ids|ids|tokens)",
    "mask": r".*attention_mask|mask",
    "columns": r"cache_positions?",
    "positions": r".*positions?(_ids)?",
    "keep": r"num_logits_to_keep|logits_to_keep",
    "branch": r"use_cache_branch",
    "lengths": r"seqlens_k|past_seq(uence)?_len(gth)?s?",
    "total": r"total_seq(uence)?_len(gth)?",
}
"""Names of an input for each purpose; a past has any name with "past" or "cache"."""
_RANKS = {
    "ids": {2}, "mask": {2}, "columns": {1}, "positions": {1, 2}, "keep": {0, 1},
    "branch": {0, 1}, "lengths": {1, 2}, "total": {0, 1},
}  # fmt: skip
_SCHEME = r"\d+|keys?(?!_)|values?(?!_)|(?<![a-z])[kv](?![a-z])"
"""What past and present of one cache have in common in their names: a layer, and key or value."""


@dataclass(frozen=True)
class CacheTensor:
    """Keys or values of a layer: the input that has those so far, and the output with the new."""

    past: str
    present: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """-1 stands where the batch does, and the tokens of a cache that has no size of its own."""
    batch: int
    """The axis of the sequences."""
    axis: int
    """The axis of the tokens."""

    def sized(self, batch: int, tokens: int) -> tuple[int, ...]:
        """The shape for so many sequences, and tokens where the file does not fix their number."""
        fixed = self.shape[self.axis]
        sizes = {self.batch: batch, self.axis: tokens if fixed < 0 else fixed}
        return tuple(sizes.get(i, size) for i, size in enumerate(self.shape))


@dataclass(frozen=True)
class Decoder:
    """A decoder's inputs and outputs by purpose.

    The tokens of a cache "in slots" stand from its beginning, and each sequence has a length of its
    own (GroupQueryAttention). Else a cache has as many tokens of each sequence, the latest last.
    """

    roles: dict[str, InputSpec]
    logits: str
    flat: bool
    """Logits are [batch, vocabulary], of the last position alone."""
    vocabulary: int | None
    caches: tuple[CacheTensor, ...] = ()
    in_slots: bool = False
    fixed: bool = False
    """Past and present have one size; a cache that grows has not."""
    capacity: int | None = None
    """Tokens of a sequence, of which each has a place."""
    elastic: bool = False
    """A mask may be longer than the tokens so far: the graph asks how many it marks, and no more of
    it. All tokens of a cache in slots then have one shape."""
    outputs: Sequence[str] = field(default=(), compare=False)

    @property
    def counted(self) -> list[str]:
        """The int64 inputs that are one more in a run of the next token, if there is a cache."""
        roles = ("positions", "columns", "lengths") if self.caches else ()
        ends = [self.roles[role] for role in roles if role in self.roles]
        return [end.name for end in ends if end.dtype == np.int64]

    @property
    def width(self) -> int | None:
        """The number of ids that a run takes, where the file fixes it."""
        return _size(self.roles["ids"].shape[1])

    def feeds(
        self, ids: Array, counts: Array, total: int, known: Collection[str] = ()
    ) -> dict[str, Array]:
        """The inputs of a run but for the cache and those that are `known`.

        `ids` [B, S], perhaps on a GPU, are the latest tokens of sequences that have `counts` [B]
        tokens in all with them, and `total` places, the first or (in a cache that grows) the last
        of them in use.
        """
        places, columns = np.arange(total), np.arange(ids.shape[1])
        first = counts - ids.shape[1] if self.caches else 0 * counts
        count, left = counts[:, None], self.left
        values: dict[str, Callable[[], Any]] = {
            "mask": lambda: places >= total - count if left else places < count,
            "columns": lambda: first.max() + columns,
            "positions": lambda: np.maximum(first[:, None] + columns, 0),
            "keep": lambda: 1 if self.caches else 0,
            "branch": lambda: (counts > ids.shape[1]).any(),
            "lengths": lambda: counts - 1,
            "total": lambda: total,
        }
        kind = self.roles["ids"].dtype
        feeds = {self.roles["ids"].name: ids.astype(kind) if isinstance(ids, np.ndarray) else ids}
        for role, end in self.roles.items():
            if role == "ids" or end.name in known:
                continue
            array = np.asarray(values[role]()).astype(end.dtype)
            if role == "positions" and len(end.shape) == 1:
                array = array[0]
            elif role in ("keep", "branch", "total"):
                array = array.reshape([1] * len(end.shape))
            elif role == "lengths" and len(end.shape) == 2:
                array = array[:, None]
            feeds[end.name] = array
        return feeds

    @property
    def left(self) -> bool:
        """Whether shorter sequences of a batch are padded at their beginning."""
        return bool(self.caches) and not self.in_slots


def _size(dim: object) -> int | None:
    return dim if isinstance(dim, int) and dim > 0 else None


def decoder_of(inputs: Iterable[Any], outputs: Iterable[Any], graph: onnx_ir.Graph) -> Decoder:
    """Find out by names, ranks and types what each input and output is for.

    `inputs` and `outputs` are what a session says of them. Raises ModelError where the file has no
    decoder's inputs and outputs, or one that nobody can tell.
    """
    roles: dict[str, InputSpec] = {}
    pasts: list[InputSpec] = []
    for end in map(InputSpec, inputs):
        rank = len(end.shape or ())
        if rank >= 4 and re.search(r"past|cache|key|value", end.name):
            pasts.append(end)
            continue
        fitting = [r for r, names in _ROLES.items() if re.fullmatch(names, end.name)]
        role = next((r for r in fitting if rank in _RANKS[r] and r not in roles), None)
        if role is None:
            raise ModelError(
                f"input '{end.name}' ({end.type}, rank {rank}) is not one that generate fills: a "
                "decoder has input_ids [batch, sequence], and may have attention_mask, "
                "position_ids and past_key_values.N.key and .value"
            )
        roles[role] = end
    if "ids" not in roles:
        raise ModelError(
            "the model has no input_ids [batch, sequence]: it is not a decoder of text"
        )
    ends = [InputSpec(v) for v in outputs]
    logits = _logits(ends)
    caches = _caches(pasts, [v for v in ends if v is not logits])
    attentions = [n for n in all_nodes(graph) if n.op_type == "GroupQueryAttention"]
    sizes = {size for end, cache in zip(pasts, caches, strict=True)
             if (size := _size(end.shape[cache.axis]))}  # fmt: skip
    fixed = bool(sizes)
    tables = [n.inputs[7] for n in attentions if len(n.inputs) > 7 and n.inputs[7] is not None]
    if "positions" in roles:
        tables += _tables_of(next(v for v in graph.inputs if v.name == roles["positions"].name))
    sizes |= {rows for t in tables if t.shape is not None and (rows := _size(t.shape[0]))}
    if not caches and (width := _size(roles["ids"].shape[1])):
        sizes.add(width)
    # the inputs that say how many tokens there are in all
    counts = {roles[role].name for role in ("mask", "total") if role in roles}
    return Decoder(
        roles, logits.name, len(logits.shape) == 2, _size(logits.shape[-1]), caches,
        bool(attentions and caches), fixed, min(sizes, default=None),
        all(_asks_no_size(v) for v in graph.inputs if v.name in counts), [v.name for v in ends],
    )  # fmt: skip


def _asks_no_size(mask: onnx_ir.Value) -> bool:
    """Whether a mask is only summed, and its size, or the number `mask`, only goes to the input of
    GroupQueryAttention that says what the cache must have room for.
    """
    values = [(mask, len(mask.shape or ()) > 1)]
    for value, is_mask in values:
        if value.is_graph_output():
            return False
        for node, place in value.uses():
            kind = node.op_type
            if kind == "GroupQueryAttention" and place == 6 and not is_mask:
                continue
            axes = const_array(node.inputs[1]) if kind == "ReduceSum" and is_mask else None
            if place == 0 and axes is not None and axes.tolist() in ([1], [-1]):
                continue
            passes = {"Cast", "Identity"} if is_mask else VIEWS | {"Cast", "Gather", "Slice"}
            if place or (kind not in passes and not (is_mask and kind == "Shape")):
                return False
            values.append((node.outputs[0], is_mask and kind != "Shape"))
    return True


def _tables_of(positions: onnx_ir.Value) -> list[onnx_ir.Value]:
    """The tables of which positions choose rows."""
    tables, values = [], [positions]
    for value in values:
        for node, place in value.uses():
            table = node.inputs[0]
            if node.op_type == "Gather" and place == 1 and not node.attributes.get_int("axis", 0):
                tables += [] if table is None else [table]
            elif node.op_type in VIEWS | {"Cast"} and place == 0:
                values.append(node.outputs[0])
    return tables


def _logits(ends: Sequence[InputSpec]) -> InputSpec:
    floats = [v for v in ends if v.dtype.kind not in "iub" and len(v.shape or ()) in (2, 3)]
    floats = [v for v in floats if not re.search("hidden|embed|pool", v.name)]  # an encoder's
    logits = [v for v in floats if "logits" in v.name] or floats
    if len(logits) != 1:
        names = ", ".join(v.name for v in logits) or "none"
        raise ModelError(
            "generate needs one output 'logits' [batch, sequence, vocabulary] of floats; the "
            f"outputs that could be it are: {names}"
        )
    return logits[0]


def _caches(pasts: Sequence[InputSpec], others: Sequence[InputSpec]) -> tuple[CacheTensor, ...]:
    """Each past with its present: by layer and kind in their names, else by their order."""
    presents = [v for v in others if len(v.shape or ()) >= 4]
    by_name = {tuple(re.findall(_SCHEME, v.name)): v for v in presents}
    keys = [tuple(re.findall(_SCHEME, v.name)) for v in pasts]
    if len(by_name) == len(presents) and set(keys) <= set(by_name) and len(set(keys)) == len(keys):
        pairs = [(past, by_name[key]) for past, key in zip(pasts, keys, strict=True)]
    elif len(pasts) == len(presents):
        pairs = list(zip(pasts, presents, strict=True))
    else:
        raise ModelError(
            f"the model has {len(pasts)} inputs and {len(presents)} outputs of a cache, and their "
            "names do not say which belong together: name them past_key_values.N.key and "
            "present.N.key"
        )
    return tuple(_cache(past, present) for past, present in pairs)


def _cache(past: InputSpec, present: InputSpec) -> CacheTensor:
    """[batch, heads, tokens, head], [batch, tokens, heads, head], or with a first axis of 2."""
    batch = len(past.shape) - 4
    sizes = [_size(d) for d in past.shape]
    axes = [i for i in (batch + 2, batch + 1) if sizes[i] is None]
    axis = axes[0] if axes else batch + 2
    wanted = {i for i in range(len(sizes)) if i not in (batch, axis)}
    missing = [i for i in wanted if sizes[i] is None]
    if past.dtype != present.dtype or len(present.shape) != len(past.shape) or missing:
        raise ModelError(
            f"the cache '{past.name}' {past.shape} -> '{present.name}' {present.shape} must be "
            "[batch, heads, tokens, head] of one type, with the sizes of heads and head in the file"
        )
    shape = tuple(-1 if i == batch or size is None else size for i, size in enumerate(sizes))
    return CacheTensor(past.name, present.name, past.dtype, shape, batch, axis)
