"""The options of `Generator`, `generate` and `Batcher`, as `onnx_fuse.options` reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import index
from typing import Any, ClassVar

from onnx_fuse.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """A decoder, where it runs, and how its next token is chosen."""

    TEXTS: ClassVar = """
        model: A path, bytes, ModelProto or onnx_ir.Model of a decoder, whose sampler then runs in
            the same program, or an InferenceSession, which runs as it is.
        device: "cpu", "cuda" or "cuda:1", of a model that is no session.
        precision: What "cuda" computes in, as InferenceSession has it.
        temperature (--temperature, 0 or more): Divide the logits by this number and draw; 0 takes
            the most probable token.
        top_k (--top-k, 0 or more): Draw from this many of the most probable tokens. | 0 draws from
            all.
        top_p (--top-p, above 0 to 1): Draw from the most probable tokens that reach this sum
            together.
        min_p (--min-p, 0 to 1): Draw from tokens of at least this share of the highest probability.
        repetition_penalty (--repetition-penalty, above 0): Lower the scores of tokens that
            occurred before by this factor. | Logits above 0 are divided by it, others multiplied.
        """
    model: object = field(kw_only=False)
    device: str | None = None
    precision: str = "fp32"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        cut = [f.name for f in fields(DecoderOptions)[-4:-1] if getattr(self, f.name) != f.default]
        if math.inf in (self.temperature, self.repetition_penalty):
            raise UsageError("temperature and repetition_penalty must be finite")
        if cut and not self.temperature:
            raise UsageError(f"{cut[0]} needs a temperature above 0: at 0 nothing is drawn")


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A prompt, how far it is continued, and by which random numbers."""

    TEXTS: ClassVar = """
        ids: The ids of a prompt; for a Generator, also a sequence of prompts of any lengths.
        max_new_tokens (--max-new-tokens, 0 or more): End after this many tokens.
        eos (--eos ID): End at this id, or at any of several. | It is the last token then.
        seed (--seed, 0 to 18446744073709551615): Draw the same tokens in each run with this
            number. | On the same device; None draws others each time.
        """
    ids: Sequence[Any] = field(kw_only=False)
    max_new_tokens: int = 128
    eos: int | Iterable[int] = ()
    seed: int | None = None

    @cached_property
    def ends(self) -> set[int]:
        """The ids that end a sequence. Raises UsageError for what is no id."""
        try:
            return set(map(index, self.eos if isinstance(self.eos, Iterable) else [self.eos]))
        except TypeError:
            raise UsageError(f"eos is {self.eos!r}: give the id of a token, or several") from None


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions(Continuation, DecoderOptions):
    """All options of a Generator."""

    TEXTS: ClassVar = """
        chunk (--chunk, 1 or more): Read the prompt in pieces of this many tokens, which takes less
            memory.
        max_length (--max-length, 1 or more): Allow this many tokens of the prompt and its
            continuation together.
        draft (--draft FILE): Let this smaller decoder guess tokens: the tokens stay the same and
            need fewer runs. | It has the same ids, and takes the types of `model`, which checks
            several guesses in one run, and keeps those that it would have chosen itself. It needs
            one prompt, and a temperature of 0 without a penalty.
        guesses (--guesses, 1 or more): Let the draft guess this many tokens for each run.
        adapter: The name of an adapter that `model`, a session, holds (`add_adapter`), or one for
            each prompt, None for those that have none.
        """
    chunk: int | None = None
    max_length: int | None = None
    draft: object = None
    guesses: int = 4
    adapter: str | Sequence[str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class BatcherOptions(DecoderOptions):
    """All options of a Batcher."""

    TEXTS: ClassVar = """
        max_tokens (1 or more): Tokens of one sequence, prompt and continuation, for which its slot
            has room.
        max_sequences (1 or more): Slots: sequences that are under way at once. Others wait.
        chunk (1 or more): Tokens of a prompt that go into one run, between two tokens of the
            others.
        """
    max_tokens: int = 2048
    max_sequences: int = 8
    chunk: int = 512
