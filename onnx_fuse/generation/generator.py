"""Text from ids: a decoder's tokens one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import numpy as np

from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.generation.engine import Answer, Engine
from onnx_fuse.generation.options import GeneratorOptions
from onnx_fuse.generation.sampling import DRAWN, HISTORY, streams
from onnx_fuse.generation.speculation import Draft
from onnx_fuse.options import shared, takes
from onnx_fuse.runtime.tensor import DeviceTensor

__all__ = ["Generator", "generate"]
__dir__ = __all__.copy

AHEAD = 3
"""Runs that are under way while the host waits for the first of them."""


class Generator:
    """The next tokens of a prompt one by one: `for token in Generator(model, ids)`.

    For one prompt each token is an int; for several, a list with one for each prompt, None where
    that has ended.
    """

    @takes(GeneratorOptions)
    def __init__(self, options: GeneratorOptions) -> None:
        """Read the decoder, and check the prompts.

        Args:
            {options}

        Raises:
            UsageError: An option or a prompt is of no use, or the cache is full.
            ModelError: The model is no decoder, or its logits are not finite.
        """
        self.is_one, self._prompts = prompts_of(options.ids)
        self._eos = options.ends
        plain = not options.temperature and options.repetition_penalty == 1
        if options.draft is not None and not (self.is_one and plain):
            raise UsageError(
                "a draft needs one prompt, a temperature of 0 and no repetition_penalty: leave it "
                "out, or the other options"
            )
        lengths = [len(p) for p in self._prompts]
        positions = 1 if options.draft is None else options.guesses + 1
        ragged = len(set(lengths)) > 1
        self._engine = Engine(options.model, options, ragged, positions)
        if options.adapter is not None:
            self._engine.adapt(options.adapter, len(lengths))
        decoder, name = self._engine.decoder, self._engine.name
        limits = [n for n in (decoder.capacity, options.max_length) if n is not None]
        self._limit = min(limits, default=None)
        self._left, self._chunk = options.max_new_tokens, options.chunk
        if decoder.caches and decoder.width is not None:
            if decoder.width > 1:
                raise ModelError(
                    f"{name}: input_ids has {decoder.width} tokens: it must be 1 or any"
                )
            if options.draft is not None:
                raise ModelError(f"{name}: it takes one token at a time: leave the draft out")
            self._chunk = 1
        if decoder.left and ragged and not {"mask"} <= decoder.roles.keys():
            raise UsageError(
                f"{name}: prompts of different lengths need its input attention_mask, which it has "
                "not: generate from one prompt at a time"
            )
        checked_ids(self._prompts, self._engine)
        self._check_room(max(lengths))
        self.tokens: list[list[int]] = [[*p] for p in self._prompts]
        """The prompts and what came after them."""
        self._active = [True] * len(lengths)
        self._counts = np.array(lengths, np.int64)
        self._numbers = streams(options.seed, len(lengths))
        self._options = replace(options, model=None, draft=None)  # which may be large
        room = max(lengths) + options.max_new_tokens
        self._room = room if self._limit is None else min(room, self._limit)
        self._begun, self._cache_bytes = False, 0
        self._ready = list[int]()
        # the next run then depends on the host in nothing but the number of the token
        plain = options.repetition_penalty == 1 and (len(lengths) == 1 or not self._eos)
        self._is_ahead = self._engine.runs_ahead and plain and options.draft is None
        self._begun_runs = deque[Answer]()
        self._latest: DeviceTensor | None = None  # tokens of the last of them
        self._draft = None if options.draft is None else Draft(self._room, options)

    def memory(self) -> dict[str, int]:
        """Bytes of the cache, and of all memory: the process's most on "cpu", else the GPU's."""
        return {
            "cache_bytes": self._cache_bytes + (self._draft.cache_bytes if self._draft else 0),
            "memory_bytes": self._engine.memory(),
        }

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._left <= 0 or not any(self._active):
            raise StopIteration
        if not self._begun:
            self._cache_bytes = self._engine.allocate(len(self._counts), self._room)
            answer = self._prompt()
            self._begun = True
        elif self._ready:
            answer = np.array([self._ready.pop(0)])
        else:
            answer = self._step()
        self._left -= 1
        return self._taken(answer)

    def _taken(self, answer: Array) -> Any:
        values: list[int] = answer.tolist()
        for row in (i for i, token in enumerate(values) if token < 0 and self._active[i]):
            raise ModelError(
                f"{self._engine.name}: the logits of token {len(self.tokens[row])} of sequence "
                f"{row} are not finite: --precision fp32, or check the weights"
            )
        new: list[int | None] = [None] * len(values)
        for row, token in enumerate(values):
            if self._active[row]:
                new[row] = token
                self.tokens[row].append(token)
                self._active[row] = token not in self._eos
        return new[0] if self.is_one else new

    def _prompt(self) -> Array:
        """The first token of each sequence."""
        decoder, counts = self._engine.decoder, self._counts
        if not decoder.caches:
            return self._whole()
        if decoder.in_slots and len(counts) > 1 and (self._chunk or len(set(counts)) > 1):
            # each by itself: a row of the cache is a cache
            rows = [self._pieces(np.array([p]), counts[i : i + 1], i)
                    for i, p in enumerate(self._prompts)]  # fmt: skip
            return np.concatenate(rows)
        return self._pieces(self._engine.padded(self._prompts), counts)

    def _pieces(self, ids: Array, counts: Array, row: int | None = None) -> Array:
        length = ids.shape[1]
        step = self._chunk or length
        draws, slots = self._draws(row), None if row is None else (row, 1)
        for begin in range(0, length, step):
            end = min(begin + step, length)
            answer = self._engine.run(ids[:, begin:end], counts - (length - end), draws, slots)
        return answer[:, -1]

    def _step(self) -> Array:
        engine = self._engine
        if self._is_ahead:
            return self._step_ahead()
        # a sequence that has ended stays in its place, and the slot of its last token
        going = np.array(self._active) | engine.decoder.left
        self._check_room(int(self._counts.max(where=going, initial=0)) + 1)
        self._counts = self._counts + going
        if self._draft is not None:
            return self._agreed(self._draft)
        if not engine.decoder.caches:
            return self._whole()
        last = np.array([[t[-1]] for t in self.tokens])
        return engine.run(last, self._counts, self._draws())[:, -1]

    def _step_ahead(self) -> Array:
        """The next tokens, while runs for those behind them are under way."""
        runs, most, full = self._begun_runs, int(self._counts.max()), self._limit or 1 << 62
        while len(runs) < min(AHEAD, self._left) and not (runs and most >= full):
            most += 1
            self._check_room(most)
            self._counts = self._counts + 1
            ids = np.array([[t[-1]] for t in self.tokens]) if self._latest is None else self._latest
            run = self._engine.begin(ids, self._counts, self._draws())
            self._latest = run.tokens
            runs.append(run)
        return self._engine.taken(runs.popleft())[:, -1]

    def _whole(self) -> Array:
        """A run of all tokens so far, of a model without a cache."""
        rows = [t[:n] for t, n in zip(self.tokens, self._counts, strict=True)]
        return self._engine.run(self._engine.padded(rows), self._counts, self._draws())[:, -1]

    def _agreed(self, draft: Draft) -> Array:
        """The next token, and in `_ready` those behind it of which a draft was right."""
        engine, tokens, count = self._engine, self.tokens[0], int(self._counts[0])
        guesses = draft.guesses(
            tokens, min(self._options.guesses, self._left - 1, self._room - count)
        )
        if engine.decoder.vocabulary is not None:
            wrong = (i for i, g in enumerate(guesses) if g >= engine.decoder.vocabulary)
            guesses = guesses[: next(wrong, len(guesses))]
        new = tokens[-1:] if engine.decoder.caches else tokens
        ids = engine.padded([new + guesses])
        answer = engine.run(ids, self._counts + len(guesses))[0, -1 - len(guesses) :].tolist()
        right = next((i for i, g in enumerate(guesses) if g != answer[i]), len(guesses))
        engine.cut(count + right)
        self._counts = self._counts + right
        self._ready = answer[1 : right + 1]
        return np.array(answer[:1])

    def _draws(self, row: int | None = None) -> dict[str, Array]:
        """The sampler's inputs, of all sequences or of one."""
        rows = range(len(self.tokens)) if row is None else (row,)
        draws: dict[str, Array] = {}
        if self._options.temperature:
            drawn = [self._numbers[i].random(dtype=np.float32) for i in rows]
            draws[DRAWN] = np.array(drawn, np.float32)[:, None]
        if self._options.repetition_penalty != 1:
            kept = (self.tokens[i] for i in rows)
            draws[HISTORY] = np.array([t + t[:1] * (self._room - len(t)) for t in kept])
        return draws

    def _check_room(self, tokens: int) -> None:
        if self._limit is not None and tokens > self._limit:
            raise UsageError(
                f"{self._engine.name}: it holds {self._limit} tokens of a sequence, and token "
                f"{tokens} has no place: give a shorter prompt or fewer new tokens"
            )


def checked_ids(prompts: Sequence[Sequence[int]], engine: Engine) -> None:
    """Raise UsageError for an id that the decoder has not."""
    size = engine.decoder.vocabulary
    for row, prompt in enumerate(prompts):
        wrong = [t for t in prompt if t < 0 or (size is not None and t >= size)]
        if wrong:
            last = "its vocabulary" if size is None else size - 1
            raise UsageError(
                f"prompt {row} has the id {wrong[0]}: {engine.name} has the ids 0 to {last}"
            )


def prompts_of(ids: Sequence[Any]) -> tuple[bool, list[list[int]]]:
    """Whether there is one prompt alone, and the prompts as lists."""
    prompts: list[list[int]] = []
    try:
        rows = list(ids)
        one = not rows or np.ndim(rows[0]) == 0
        prompts.extend([index(t) for t in prompt] for prompt in ([rows] if one else rows))
    except (TypeError, ValueError):  # the latter where it holds lists of several lengths
        raise UsageError(
            f"prompt {len(prompts)} is not a sequence of integers: give the ids of tokens"
        ) from None
    if [] in prompts:
        row = prompts.index([])
        raise UsageError(f"prompt {row} is empty: give one id or more, such as that of BOS")
    return one, prompts


@dataclass(frozen=True)
class _GenerateArguments(GeneratorOptions):
    stream: Callable[[int, int], object] | None = field(default=None, kw_only=True)


@takes(_GenerateArguments)
def generate(options: _GenerateArguments) -> list[Any]:
    """The tokens with which a decoder continues a prompt, or each of several.

    Args:
        stream: Called with the number of the prompt and each of its tokens as soon as it is there.
        {options}

    Returns:
        A list of the new tokens, or a list of such lists for several prompts.

    Raises:
        UsageError: An option or a prompt is of no use, or the cache is full.
        ModelError: The model is no decoder, or its logits are not finite.
    """
    generator = Generator(**shared(GeneratorOptions, options))
    before = [len(t) for t in generator.tokens]
    one = generator.is_one
    for answer in generator:
        for row, token in enumerate([answer] if one else answer):
            if options.stream is not None and token is not None:
                options.stream(row, token)
    new = [t[n:] for t, n in zip(generator.tokens, before, strict=True)]
    return new[0] if one else new
