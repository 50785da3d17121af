"""Text from ids: a decoder's tokens one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.generation.decoder import Array
from onnx_fuse.generation.engine import Engine
from onnx_fuse.generation.sampling import DRAWN, HISTORY, Sampling
from onnx_fuse.generation.speculation import Draft

__all__ = ["Generator", "generate"]
__dir__ = __all__.copy


class Generator:
    """The next tokens of a prompt one by one: `for token in Generator(model, ids)`.

    For one prompt each token is an int; for several, a list with one for each prompt, None where
    that has ended.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model of a decoder, whose sampler then runs in
            the same program, or an InferenceSession, which runs as it is.
        ids: The ids of a prompt, or a sequence of prompts of any lengths.
        max_new_tokens: Tokens after which it ends.
        temperature: The logits are divided by it before a token is drawn; 0 takes the most probable
            token.
        top_k: Draw from so many of the most probable tokens; 0 from all.
        top_p: Draw from the fewest most probable tokens whose probabilities reach this sum.
        min_p: Draw from tokens of at least this share of the highest probability.
        repetition_penalty: Logits of tokens that came before are divided by it where they are above
            0, and multiplied where below.
        eos: The id or ids that end a sequence; the last token of it is that one.
        seed: The same seed gives the same tokens on the same device; None draws others each time.
        chunk: Tokens of a prompt that go into one run, for prompts that would take too much memory.
        max_length: Tokens of a prompt and its continuation together, beyond which it is an error.
        device: "cpu", "cuda" or "cuda:1", of a model that is no session.
        precision: What "cuda" computes in, as InferenceSession has it.
        draft: A smaller decoder with the same ids, as `model` may be, which guesses tokens; `model`
            then looks at several in one run, and takes those that it would have chosen itself. It
            needs one prompt, and a temperature of 0 without a penalty.
        guesses: Tokens that the draft guesses for a run.

    Raises:
        UsageError: An option or a prompt is of no use, or the cache is full.
        ModelError: The model is no decoder, or its logits are not finite.
    """

    def __init__(
        self,
        model: Any,
        ids: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        eos: int | Iterable[int] = (),
        seed: int | None = None,
        chunk: int | None = None,
        max_length: int | None = None,
        device: str | None = None,
        precision: str = "fp32",
        draft: Any = None,
        guesses: int = 4,
    ) -> None:
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        self.is_one, self._prompts = prompts_of(ids)
        self._eos = ends_of(eos)
        for name, value in {
            "max_new_tokens": max_new_tokens,
            "chunk": chunk,
            "guesses": guesses,
        }.items():
            least = int(name != "max_new_tokens")
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}: it must be {least} or above")
        plain = not temperature and repetition_penalty == 1
        if draft is not None and not (self.is_one and plain):
            raise UsageError(
                "a draft needs one prompt, a temperature of 0 and no repetition_penalty: leave it "
                "out, or the other options"
            )
        lengths = [len(p) for p in self._prompts]
        positions = 1 if draft is None else guesses + 1
        ragged = len(set(lengths)) > 1
        self._engine = Engine(model, sampling, ragged, device, precision, positions)
        decoder, name = self._engine.decoder, self._engine.name
        limits = [limit for limit in (decoder.capacity, max_length) if limit is not None]
        self._limit = min(limits, default=None)
        self._left, self._chunk = max_new_tokens, chunk
        if decoder.caches and decoder.width is not None:
            if decoder.width > 1:
                raise ModelError(
                    f"{name}: input_ids has {decoder.width} tokens: it must be 1 or any"
                )
            if draft is not None:
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
        self._active = np.ones(len(lengths), bool)
        self._counts = np.array(lengths, np.int64)
        self._numbers = sampling.numbers(len(lengths))
        self._options = sampling
        room = max(lengths) + max_new_tokens
        self._room = room if self._limit is None else min(room, self._limit)
        self._begun, self._cache_bytes = False, 0
        self._guesses, self._ready = guesses, list[int]()
        self._draft = None
        if draft is not None:
            self._draft = Draft(draft, self._room, chunk, device, precision)

    def memory(self) -> dict[str, int]:
        """Bytes of the cache, and of all memory: the process's most on "cpu", else the GPU's."""
        return {
            "cache_bytes": self._cache_bytes + (self._draft.cache_bytes if self._draft else 0),
            "memory_bytes": self._engine.memory(),
        }

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._left <= 0 or not self._active.any():
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
        faults = np.flatnonzero(self._active & (answer < 0))
        if faults.size:
            row = int(faults[0])
            raise ModelError(
                f"{self._engine.name}: the logits of token {len(self.tokens[row])} of sequence "
                f"{row} are not finite: --precision fp32, or check the weights"
            )
        new: list[int | None] = [None] * len(answer)
        for row in map(int, np.flatnonzero(self._active)):
            new[row] = token = int(answer[row])
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
        # a sequence that has ended stays in its place, and the slot of its last token
        going = self._active if not engine.decoder.left else np.ones_like(self._active)
        self._check_room(int(self._counts.max(where=going, initial=0)) + 1)
        self._counts = self._counts + going
        if self._draft is not None:
            return self._agreed(self._draft)
        if not engine.decoder.caches:
            return self._whole()
        last = np.array([[t[-1]] for t in self.tokens])
        return engine.run(last, self._counts, self._draws())[:, -1]

    def _whole(self) -> Array:
        """A run of all tokens so far, of a model without a cache."""
        rows = [t[:n] for t, n in zip(self.tokens, self._counts, strict=True)]
        return self._engine.run(self._engine.padded(rows), self._counts, self._draws())[:, -1]

    def _agreed(self, draft: Draft) -> Array:
        """The next token, and in `_ready` those behind it of which a draft was right."""
        engine, tokens, count = self._engine, self.tokens[0], int(self._counts[0])
        guesses = draft.guesses(tokens, min(self._guesses, self._left - 1, self._room - count))
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


def ends_of(eos: int | Iterable[int]) -> set[int]:
    """The ids that end a sequence, of one or several."""
    return {int(e) for e in (eos if isinstance(eos, Iterable) else (eos,))}


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
    rows = list(ids)
    one = not rows or np.ndim(rows[0]) == 0
    prompts = [list(row) for row in ([rows] if one else rows)]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {row} is empty: give one id or more, such as that of BOS")
        if np.ndim(prompt) != 1 or np.asarray(prompt).dtype.kind not in "iu":
            raise UsageError(f"prompt {row} is not a sequence of integers: give the ids of tokens")
    return one, [[int(t) for t in prompt] for prompt in prompts]


def generate(
    model: Any,
    ids: Sequence[Any],
    *,
    stream: Callable[[int, int], object] | None = None,
    **options: Any,
) -> list[Any]:
    """The tokens that a decoder puts behind a prompt, or behind each of several.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model of a decoder, or an InferenceSession.
        ids: The ids of a prompt, or a sequence of prompts of any lengths.
        stream: Called with the number of the prompt and each of its tokens as soon as it is there.
        **options: As `Generator` has them: max_new_tokens, temperature, top_k, top_p, min_p,
            repetition_penalty, eos, seed, chunk, max_length, device, precision, draft, guesses.

    Returns:
        A list of the new tokens, or a list of such lists for several prompts.

    Raises:
        UsageError: An option or a prompt is of no use, or the cache is full.
        ModelError: The model is no decoder, or its logits are not finite.
    """
    generator = Generator(model, ids, **options)
    before = [len(t) for t in generator.tokens]
    one = generator.is_one
    for answer in generator:
        for row, token in enumerate([answer] if one else answer):
            if stream is not None and token is not None:
                stream(row, token)
    new = [t[n:] for t, n in zip(generator.tokens, before, strict=True)]
    return new[0] if one else new
