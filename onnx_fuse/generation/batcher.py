"""Requests that come and go, in one batch over the slots of a decoder's cache."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Any

import numpy as np

from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.generation.engine import Answer, Engine
from onnx_fuse.generation.generator import checked_ids, prompts_of
from onnx_fuse.generation.options import BatcherOptions, Continuation
from onnx_fuse.generation.sampling import DRAWN, HISTORY, streams
from onnx_fuse.options import takes

__all__ = ["Batcher", "Request"]
__dir__ = __all__.copy


class Request:
    """A prompt that a `Batcher` continues: iterate over its tokens, or wait for all of them.

    `for` and `async for` give tokens as they come; `result()` and `await` give a list of all. It
    comes from `Batcher.submit`, with a `prompt` and the `options` of its continuation.
    """

    def __init__(self, prompt: list[int], options: Continuation) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        """The new tokens so far."""
        self._count, self._eos = options.max_new_tokens, options.ends
        [self._numbers] = streams(options.seed, 1)
        self._cached, self._coming = 0, 0  # tokens in the cache; new ones, with those under way
        self._cancelled = False
        self._future: Future[list[int]] = Future()
        self._changed = Lock()
        self._listeners: list[Callable[[int | None], object]] = []

    def cancel(self) -> None:
        """End it with the tokens that there are."""
        self._cancelled = True

    def result(self, timeout: float | None = None) -> list[int]:
        """All new tokens. `timeout` is in seconds.

        Raises TimeoutError where they take longer, and ModelError or DeviceError where it failed.
        """
        return self._future.result(timeout)

    def __await__(self) -> Generator[Any, None, list[int]]:
        return asyncio.wrap_future(self._future).__await__()

    def __iter__(self) -> Iterator[int]:
        queue: SimpleQueue[int | None] = SimpleQueue()
        self._listen(queue.put)
        while (token := queue.get()) is not None:
            yield token
        self._future.result()

    async def __aiter__(self) -> AsyncIterator[int]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[int | None]()

        def put(token: int | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, token)

        self._listen(put)
        try:
            while (token := await queue.get()) is not None:
                yield token
        finally:
            with self._changed:
                self._listeners = [each for each in self._listeners if each is not put]
        await self

    def _listen(self, put: Callable[[int | None], object]) -> None:
        """Tell the tokens so far and those that come, and None at the end."""
        with self._changed:
            for token in self.tokens:
                put(token)
            if self._future.done():
                put(None)
            else:
                self._listeners.append(put)

    def _take(self, token: int) -> None:
        with self._changed:
            self.tokens.append(token)
            for put in self._listeners:
                put(token)

    def _end(self, error: BaseException | None = None) -> None:
        with self._changed:
            if error is None:
                self._future.set_result(self.tokens)
            else:
                self._future.set_exception(error)
            for put in self._listeners:
                put(None)
            self._listeners = []

    def _is_done(self) -> bool:
        last = self.tokens[-1] if self.tokens else None
        return self._cancelled or len(self.tokens) >= self._count or last in self._eos


SHORTEST = 32
"""Tokens of a prompt for which a run takes hardly longer than for one."""


def piece(begin: int, size: int, chunk: int) -> tuple[int, int]:
    """Which tokens of a prompt go into the next run: `begin` of its `size` are in the cache.

    The last ones go with as many before them as make a power of two, so that there are few shapes;
    those are computed again.
    """
    left = size - begin
    if left >= chunk or size <= SHORTEST:
        return begin, begin + min(left, chunk)
    width = min(max(SHORTEST, 1 << (left - 1).bit_length()), chunk)
    if width <= size:
        return size - width, size
    return begin, begin + (1 << left.bit_length() - 1)


class Batcher:
    """Continues many prompts at once: each begins when a slot is free, and ends by itself.

    A thread runs the decoder, which must have GroupQueryAttention over its cache: in turn a piece
    of one new prompt, and a token of each sequence that is under way. Any thread may submit.
    """

    @takes(BatcherOptions)
    def __init__(self, options: BatcherOptions) -> None:
        """Make the slots, and begin to wait for requests.

        Args:
            {options}

        Raises:
            UsageError: An option is of no use.
            ModelError: The model is no decoder with GroupQueryAttention.
        """
        self._sampling = replace(options, model=None)
        self._engine = Engine(options.model, options)
        decoder = self._engine.decoder
        if not decoder.in_slots or decoder.width is not None:
            raise ModelError(
                f"{self._engine.name}: a Batcher needs a decoder with GroupQueryAttention and free "
                "sizes, in whose cache each sequence has a length of its own: use generate"
            )
        self._room = min(options.max_tokens, decoder.capacity or options.max_tokens)
        self._chunk = options.chunk
        self.cache_bytes = self._engine.allocate(options.max_sequences, self._room)
        self._slots: list[Request | None] = [None] * options.max_sequences
        self._begun: tuple[list[Request | None], Answer] | None = None  # a run under way
        self._waiting: deque[Request] = deque()
        self._closed: BaseException | None = None
        self._work = Condition()
        self._thread = Thread(target=self._serve, name="onnx_fuse.Batcher", daemon=True)
        self._thread.start()

    @takes(Continuation)
    def submit(self, options: Continuation) -> Request:
        """Let a prompt be continued as soon as a slot is free; returns at once.

        Args:
            {options}

        Raises:
            UsageError: The prompt is of no use, has no room in a slot, or the batcher is closed.
        """
        one, prompts = prompts_of(options.ids)
        if not one:
            raise UsageError("submit takes one prompt: call it for each")
        checked_ids(prompts, self._engine)
        [prompt] = prompts
        if len(prompt) + options.max_new_tokens > self._room:
            raise UsageError(
                f"a prompt of {len(prompt)} tokens and {options.max_new_tokens} new ones do not "
                f"fit a slot of {self._room}: give fewer, or a larger max_tokens"
            )
        request = Request(prompt, options)
        with self._work:
            if self._closed is not None:
                raise UsageError(f"the batcher takes no requests: {self._closed}")
            self._waiting.append(request)
            self._work.notify()
        return request

    def close(self) -> None:
        """End all requests with the tokens that they have, and the thread."""
        self._stop(UsageError("it is closed"))
        self._thread.join()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self, reason: BaseException) -> None:
        with self._work:
            self._closed = self._closed or reason
            self._work.notify()

    def _serve(self) -> None:
        failure: BaseException | None = None
        try:
            while self._admit():
                self._prefill()
                self._decode()
            self._read_begun()
        except Exception as error:  # noqa: BLE001 - each request raises it where it is waited for
            failure = error
            self._stop(error)
        with self._work:
            left = [*filter(None, self._slots), *self._waiting]
            self._slots, self._waiting = [None] * len(self._slots), deque()
        for request in left:
            request._end(failure)

    def _admit(self) -> bool:
        """Free the slots of what is done, and fill them; wait for work. False where it is over."""
        with self._work:
            while self._closed is None:
                for i, request in enumerate(self._slots):
                    while request is None or request._is_done():
                        if request is not None:
                            request._end()
                        request = self._waiting.popleft() if self._waiting else None
                        self._slots[i] = request
                        if request is None:
                            break
                if any(self._slots):
                    return True
                self._work.wait()
        return False

    def _prefill(self) -> None:
        """A piece of the first prompt that is not in the cache yet."""
        for i, request in enumerate(self._slots):
            if request is not None and request._cached < len(request.prompt):
                size = len(request.prompt)
                begin, end = piece(request._cached, size, self._chunk)
                request._cached = end
                ids = np.array([request.prompt[begin:end]])
                draws = self._draws([request if end == size else None])
                answer = self._engine.run(ids, np.array([end]), draws, (i, 1))
                if end == size:
                    request._coming = 1
                    self._taken([request], answer)
                return

    def _decode(self) -> None:
        """A token of each sequence whose prompt is in the cache.

        On a GPU a run begins before the tokens of the last one are read, where it needs no others.
        """
        rows, begun = self._continued(), self._begun
        if begun is not None and not (
            any(rows) and len(rows) == len(begun[0])
            and all(r is None or r._coming > len(r.tokens) for r in rows)
        ):  # fmt: skip
            self._read_begun()
            rows, begun = self._continued(), None
        if not any(rows):
            return
        count, draws = len(rows), self._draws(rows)
        ids = np.zeros((count, 1), np.int64)
        counts = np.ones(count, np.int64)
        for i, request in enumerate(rows):
            if request is not None:
                ids[i], counts[i] = request.tokens[-1], len(request.prompt) + request._coming
                request._coming += 1
            elif (other := self._slots[i]) is not None:
                # what is written there, the next piece of its prompt writes over
                counts[i] = min(other._cached + 1, self._room)
        if not self._engine.runs_ahead or self._sampling.repetition_penalty != 1:
            self._taken(rows, self._engine.run(ids, counts, draws, (0, count)))
            return
        last = ids if begun is None else begun[1].tokens
        following = rows, self._engine.begin(last, counts, draws, (0, count))
        if begun is not None:
            self._read_begun()
        self._begun = following
        if all(request is None or request._is_done() for request in rows):
            self._read_begun()

    def _continued(self) -> list[Request | None]:
        """The sequences of which a run makes another token, in the first slots; a power of four of
        these, so that there are few shapes.
        """
        rows = [
            r if r and r.tokens and not r._is_done() and r._coming < r._count else None
            for r in self._slots
        ]
        highest = max((i for i, request in enumerate(rows) if request), default=0)
        count = 1
        while count <= highest:
            count *= 4
        return rows[:count]

    def _read_begun(self) -> None:
        """Wait for the tokens of the run that is under way."""
        if self._begun is not None:
            (rows, answer), self._begun = self._begun, None
            self._taken(rows, self._engine.taken(answer))

    def _draws(self, rows: Sequence[Request | None]) -> dict[str, Array]:
        """The sampler's inputs; a row without a request gets any."""
        draws: dict[str, Array] = {}
        if self._sampling.temperature:
            drawn = [r._numbers.random(dtype=np.float32) if r else 0 for r in rows]
            draws[DRAWN] = np.array(drawn, np.float32)[:, None]
        if self._sampling.repetition_penalty != 1:
            texts = [r.prompt + r.tokens if r else [0] for r in rows]
            draws[HISTORY] = np.array([t + t[:1] * (self._room - len(t)) for t in texts])
        return draws

    def _taken(self, rows: Sequence[Request | None], answer: Array) -> None:
        for request, token in zip(rows, answer[:, -1].tolist(), strict=True):
            if request is None or request._future.done() or request._is_done():
                continue  # it ended while this run was under way
            if token >= 0:
                request._take(token)
            else:
                place = len(request.prompt) + len(request.tokens)
                error = ModelError(
                    f"{self._engine.name}: the logits of token {place} are not finite: check the "
                    "weights, or take precision fp32"
                )
                self._slots[self._slots.index(request)] = None
                request._end(error)
