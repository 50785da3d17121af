"""What a graph over the tokens of a batch is fed, beside its own inputs (`rewrite.padding`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse.arrays import Array

if TYPE_CHECKING:
    import onnx_ir as ir

PROPERTY = "onnx_fuse.packing"
"""Of a packed model: its Packing, as JSON."""
TOKENS, OFFSETS = "padding.tokens", "padding.offsets"
"""The symbols of T and B + 1: a model may have axes called `tokens` or `offsets` itself."""
LONGEST = 4096
"""The greatest length at which masks are tried: a window or a table of another one shows there."""
_MOST = 1 << 15
"""Sequences of a batch that is packed: the blocks of a launch along z, with some to spare."""


@dataclass(frozen=True)
class Packing:
    """What a packed model is fed beside its own inputs."""

    mask: str
    """The input, [B, S], that is 1 where there is a token and 0 where there is padding."""
    rows: str
    """int64 [1, T]: where each token stands among all B x S places; behind the last, any does."""
    places: str
    """int64 [B, S]: the row of each token; for padding, that of any. "": no output has them all."""
    offsets: str
    """int64 [B + 1]: where each sequence begins, and the last one ends."""
    inputs: tuple[str, ...]
    """The inputs whose first two axes are the mask's."""
    picked: tuple[int, ...] = ()
    """Places of which the graph reads the row in every sequence, so that a token must stand there;
    negative ones count from the end."""
    outputs: tuple[str, ...] = ()
    """The outputs that have stayed rows of tokens, [1, T, ..]."""
    longest: int = LONGEST
    """The greatest S at which the masks were tried."""
    chosen: str = ""
    """int64 [B, picks]: the rows at the places `picked`. "": there are none."""

    @classmethod
    def of(cls, model: ir.Model) -> Packing | None:
        """That of a packed model, None for any other."""
        text = model.metadata_props.get(PROPERTY)
        return None if text is None else cls.from_json(json.loads(text))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Packing:
        """That whose fields, as `asdict` has them, JSON gave back."""
        lists = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
        return cls(**{**fields, **lists})

    @property
    def added(self) -> tuple[str, ...]:
        """The inputs that the graph had not before."""
        return tuple(filter(None, (self.rows, self.places, self.offsets, self.chosen)))

    def feeds(self, mask: Array, shapes: Mapping[str, Sequence[int]]) -> dict[str, Array] | str:
        """What the added inputs are fed for a batch, or why it cannot be packed.

        T is rounded up so that there are few, and fewer rows behind the last sequence than one may
        have. `shapes` are those of the other feeds.
        """
        if mask.ndim != 2 or not mask.size or len(mask) > _MOST:
            return f"its mask has shape {mask.shape}"
        if mask.shape[1] > self.longest:
            return f"its sequences are longer than {self.longest}, up to where its masks are known"
        if any(tuple(shapes[name][:2]) != mask.shape for name in self.inputs):
            return "its inputs have other sizes than the mask"
        there = mask != 0
        if mask.dtype.kind in "biu":  # comparing two types would take as long as all the rest
            others = int(np.bitwise_or.reduce(mask, axis=None)) not in (0, 1)
        else:
            others = not (mask == there).all()
        if others:
            return "its mask has other numbers than 0 and 1"
        batch, length = mask.shape
        at = there.ravel().nonzero()[0]
        found = at.searchsorted(_searched(batch, length, self.picked))
        offsets = found[: batch + 1]
        picked = all(-length <= i < length and there[:, i].all() for i in self.picked)
        if not (picked and self.picked) and (offsets[1:] == offsets[:-1]).any():
            return "a sequence has no token"
        if not picked:
            return "a row that is read is padding"
        more = row_count(len(at), length) - len(at)
        rows = np.concatenate((at, at[:more])) if more else at
        fed: dict[str, Array] = {self.rows: rows[None], self.offsets: offsets}
        if self.chosen:
            fed[self.chosen] = found[batch + 1 :].reshape(batch, -1)
        if self.places:
            row_of = np.zeros(mask.size, np.int64)
            row_of[at] = np.arange(len(at))
            fed[self.places] = row_of.reshape(mask.shape)
        return fed


def row_count(tokens: int, length: int) -> int:
    """The rows for so many tokens in sequences of a length: few counts serve all batches."""
    step = 1 << (max(1, min(length, tokens // 8)).bit_length() - 1)
    return -(-tokens // step) * step


@lru_cache(maxsize=16)
def _searched(batch: int, length: int, picked: Sequence[int]) -> Array:
    """The places whose rows are asked for: the begin of each sequence, the end, those picked."""
    starts = np.arange(batch + 1) * length
    picks = starts[:-1, None] + np.array([place % length for place in picked], np.int64)
    return np.concatenate((starts, picks.ravel()))
