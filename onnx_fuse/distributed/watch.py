"""The thread of a rank that knows how the others are, and ends it with them.

A rank that waits in a collective cannot be told anything, so this thread ends the whole process.
Rank 0 hears from all others, and they from it: a link that closes without a farewell is the death
of its rank, one that is silent for `patience` seconds a rank that hangs, and one that is alive but
`stall` seconds behind another's steps a rank that stands still. Where all ranks wait for one step
on their GPUs, the one whose GPU has come to the fewest of its collectives hangs.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from onnx_fuse.distributed import wire

T = TypeVar("T")

BEAT = 2.0
"""Seconds between two signs of life."""
ENDED = 70
"""The exit code of a rank that ends because of another."""
LAUNCHED = "ONNX_FUSE_LAUNCHED"
"""The variable of a rank whose launcher says itself which rank ended, and of what."""


SLOW = 20
"""A wait for a step counts as one for ever when it is so many times as long as the last one."""


@dataclass(frozen=True)
class Sign:
    """What a rank says of itself: how far it is."""

    steps: int = 0
    """The steps that it has begun."""
    waits: float = 0.0
    """The seconds for which it has waited for a step; 0 while it does something else."""
    done: int = 0
    """The steps that its GPU has come to the end of."""
    met: int = 0
    """The collectives of the step under way that its GPU has come to."""

    _FORM = struct.Struct("<QdQQ")

    def packed(self) -> bytes:
        """The bytes of a sign of life."""
        return self._FORM.pack(self.steps, self.waits, self.done, self.met)

    @classmethod
    def of(cls, data: bytes | bytearray) -> Sign:
        """What `packed` gave."""
        return cls(*cls._FORM.unpack(data))


@dataclass
class _Peer:
    """What is known of a rank at the other end of a link."""

    heard: float = field(default_factory=time.monotonic)
    sign: Sign = field(default_factory=Sign)
    moved: float = field(default_factory=time.monotonic)


class Watch:
    """The thread of one rank. `links` has the control link of each rank that it hears from."""

    def __init__(
        self, rank: int, links: Mapping[int, socket.socket], patience: float, stall: float
    ) -> None:
        self.rank, self.links, self.patience, self.stall = rank, dict(links), patience, stall
        self.steps = 0
        """The steps that this rank has begun."""
        self.reached: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Counts the steps that the GPU has ended, and the collectives that it has come to in the
        one under way; any thread may call it."""
        self._waiting, self._last = 0.0, 0.0
        self._known: set[object] = set()
        self._peers = {other: _Peer() for other in links}
        self._lock = threading.Lock()
        self._parent = os.getppid()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="onnx_fuse ranks", daemon=True)
        self._thread.start()

    def fail(self, cause: str) -> None:
        """Tell the others that this rank ends, and why."""
        self._closed = True
        text = f"rank {self.rank} failed: {cause}"
        for link in list(self.links.values()):
            self._say(link, b"F", text.encode())

    def close(self) -> None:
        """Take leave of the others: that they end now or later is no fault."""
        if not self._closed:
            self._closed = True
            for link in list(self.links.values()):
                self._say(link, b"B")

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for the other ranks, or for a step of all."""
        self._waiting = time.monotonic()
        try:
            yield
        finally:
            self._waiting = 0.0

    def step(self, key: object, begin: Callable[[], Callable[[], T]]) -> Callable[[], T]:
        """Begin a step of all ranks by `begin`; what it returns waits for the step.

        Where no step of this `key` has begun before, `begin` may compile for long, which is no
        waiting for others.
        """
        self.steps += 1
        if key in self._known:
            with self.waiting():
                end = begin()
        else:
            end = begin()
            self._known.add(key)
        return partial(self._finish, end)

    def _finish(self, end: Callable[[], T]) -> T:
        began = time.monotonic()
        with self.waiting():
            result = end()
        self._last = time.monotonic() - began
        return result

    def _say(self, link: socket.socket, kind: bytes, data: bytes = b"") -> None:
        with self._lock, contextlib.suppress(OSError):  # its end is noticed where it is read
            wire.send(link, kind, data)

    def _run(self) -> None:
        beat = 0.0
        while not self._closed:
            now = time.monotonic()
            if now - beat >= BEAT:
                beat = now
                waiting = self._waiting
                sign = Sign(self.steps, now - waiting if waiting else 0.0, *self.reached())
                for link in list(self.links.values()):
                    self._say(link, b"A", sign.packed())
                self._check(now, sign)
            open_links = {link: rank for rank, link in self.links.items()}
            ready = select.select(list(open_links), [], [], BEAT / 4)[0]
            for link in ready:
                self._hear(open_links[link], link)

    def _hear(self, other: int, link: socket.socket) -> None:
        try:
            kind, data = wire.receive(link)
        except OSError:
            self._end(
                f"rank {other} ended without a message: it was killed, or it crashed", seen=True
            )
            return
        peer, now = self._peers[other], time.monotonic()
        peer.heard = now
        if kind == b"A":
            before, peer.sign = peer.sign, Sign.of(data)
            if before.steps != peer.sign.steps:
                peer.moved = now
        elif kind == b"B":
            del self.links[other], self._peers[other]
        else:
            self._end(data.decode(errors="replace"), seen=True)

    def _check(self, now: float, sign: Sign) -> None:
        if os.getppid() != self._parent:
            self._end("the launcher of the ranks has ended", seen=True)
        for other, peer in self._peers.items():
            if now - peer.heard > self.patience:
                self._end(f"rank {other} has not answered for {self.patience:.0f} s: it hangs")
            ahead = max(sign.steps, *(p.sign.steps for p in self._peers.values()))
            if peer.sign.steps < ahead and now - peer.moved > self.stall:
                self._end(
                    f"rank {other} has been at step {peer.sign.steps} for {self.stall:.0f} s, "
                    f"others wait at step {ahead}: it hangs"
                )
        limit = max(self.patience, SLOW * self._last) if self._last else self.stall
        if self.rank == 0 and self._peers:
            cause = hang({0: sign, **{r: p.sign for r, p in self._peers.items()}}, limit)
            if cause:
                self._end(cause)

    def _end(self, cause: str, *, seen: bool = False) -> None:
        """Broadcast and log the cause, and exit at once, without waiting for other threads.

        With `seen`, a launcher of this package prints the cause instead.
        """
        if self._closed:
            return
        for link in list(self.links.values()):
            self._say(link, b"F", cause.encode())
        first = 1 if cause.startswith("rank 0 ") else 0
        if self.rank == first and not (seen and os.environ.get(LAUNCHED)):
            with contextlib.suppress(OSError, ValueError):
                print(f"onnx-fuse: {cause}; all ranks end", file=sys.stderr, flush=True)
        os._exit(ENDED)


def hang(signs: Mapping[int, Sign], limit: float) -> str:
    """What hangs where all ranks have waited for a step for more than `limit` seconds, or ""."""
    waited = min(sign.waits for sign in signs.values())
    if waited <= limit:
        return ""
    least = min((p.done, p.met) for p in signs.values())
    behind = [rank for rank, p in signs.items() if (p.done, p.met) == least]
    if len(behind) == len(signs):
        return f"all ranks have waited for one step for {waited:.0f} s: what connects them hangs"
    names = ", ".join(map(str, sorted(behind)))
    return (
        f"rank {names} has not come to collective {least[1] + 1} of the step under way for "
        f"{waited:.0f} s, others wait: it hangs"
    )
