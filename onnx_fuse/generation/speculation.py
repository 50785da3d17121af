"""A smaller decoder guesses tokens, of which a run of the large one takes those that it had made.

A run over a few tokens reads the weights once, as a run over one does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx_fuse.generation.engine import Engine
from onnx_fuse.generation.options import GeneratorOptions


class Draft:
    """The smaller decoder, with a cache of its own. Its ids must mean what the large one's do."""

    def __init__(self, room: int, options: GeneratorOptions) -> None:
        self._engine = Engine(options.draft, options)
        decoder = self._engine.decoder
        self._limit = room if decoder.capacity is None else min(room, decoder.capacity)
        self.cache_bytes = self._engine.allocate(1, self._limit)
        self._chunk = 1 if decoder.width and decoder.caches else options.chunk
        self._cached: list[int] = []
        self._highest = (decoder.vocabulary or 1 << 31) - 1

    def guesses(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next tokens as this decoder has them, at most `count`."""
        engine = self._engine
        text = np.clip(tokens, 0, self._highest).tolist()
        same = next((i for i, (a, b) in enumerate(zip(self._cached, text, strict=False)) if a != b),
                    min(len(self._cached), len(text)))  # fmt: skip
        engine.cut(same)
        for _ in range(min(count, self._limit - len(text) + 1)):
            first = same if engine.decoder.caches else 0
            step = (engine.decoder.caches and self._chunk) or len(text)
            for begin in range(first, len(text), step):
                part = text[begin : begin + step]
                answer = engine.run(engine.padded([part]), np.array([begin + len(part)]))
            same = len(text)
            text.append(int(np.clip(answer[0, -1], 0, self._highest)))
        self._cached = text[:same]
        return text[len(tokens) :]
