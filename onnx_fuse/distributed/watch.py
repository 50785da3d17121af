"""The thread of a rank that knows how the others are, and ends it with them.

A rank that waits in a collective cannot be told anything, so this thread ends the whole process.
Rank 0 hears from all others, and they from it: a link that closes without a farewell is the death
of its rank, one that is silent for `patience` seconds a rank that hangs, and one that is alive but
`stall` seconds behind another's steps a rank that stands still.
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
from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx_fuse.distributed import wire

BEAT = 2.0
"""Seconds between two signs of life."""
ENDED = 70
"""The exit code of a rank that ends because of another."""
LAUNCHED = "ONNX_FUSE_LAUNCHED"
"""The variable of a rank whose launcher says itself which rank ended, and of what."""


@dataclass
class _Peer:
    """What is known of a rank at the other end of a link."""

    heard: float = field(default_factory=time.monotonic)
    steps: int = 0
    moved: float = field(default_factory=time.monotonic)


class Watch:
    """The thread of one rank. `links` has the control link of each rank that it hears from."""

    def __init__(
        self, rank: int, links: Mapping[int, socket.socket], patience: float, stall: float
    ) -> None:
        self.rank, self.links, self.patience, self.stall = rank, dict(links), patience, stall
        self.steps = 0
        """The steps that this rank has begun."""
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

    def _say(self, link: socket.socket, kind: bytes, data: bytes = b"") -> None:
        with self._lock, contextlib.suppress(OSError):  # its end is noticed where it is read
            wire.send(link, kind, data)

    def _run(self) -> None:
        beat = 0.0
        while not self._closed:
            now = time.monotonic()
            if now - beat >= BEAT:
                beat = now
                for link in list(self.links.values()):
                    self._say(link, b"A", struct.pack("<Q", self.steps))
                self._check(now)
            open_links = {link: rank for rank, link in self.links.items()}
            ready = select.select(list(open_links), [], [], BEAT / 4)[0]
            for link in ready:
                self._hear(open_links[link], link)

    def _hear(self, other: int, link: socket.socket) -> None:
        try:
            kind, data = wire.receive(link)
        except OSError:
            self._end(f"rank {other} ended without a word: it was killed, or it crashed", seen=True)
            return
        peer, now = self._peers[other], time.monotonic()
        peer.heard = now
        if kind == b"A":
            (steps,) = struct.unpack("<Q", data)
            if steps != peer.steps:
                peer.steps, peer.moved = steps, now
        elif kind == b"B":
            del self.links[other], self._peers[other]
        else:
            self._end(data.decode(errors="replace"), seen=True)

    def _check(self, now: float) -> None:
        if os.getppid() != self._parent:
            self._end("what started the ranks has ended", seen=True)
        for other, peer in self._peers.items():
            if now - peer.heard > self.patience:
                self._end(f"rank {other} has not answered for {self.patience:.0f} s: it hangs")
            ahead = max(self.steps, *(p.steps for p in self._peers.values()))
            if peer.steps < ahead and now - peer.moved > self.stall:
                self._end(
                    f"rank {other} has been at step {peer.steps} for {self.stall:.0f} s, others "
                    f"wait at step {ahead}: it hangs"
                )

    def _end(self, cause: str, *, seen: bool = False) -> None:
        """Pass it on, say it, and end the process whatever its other threads wait for.

        `seen`: a launcher of ours says it better.
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
