"""The launches of scan/radix.cu, which several candidates sort pairs of a key and an index by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from onnx_fuse.kernels.kernel import WorkspaceArena, launch
from onnx_fuse.program.launch import Launch, Launches, Ptr, args

THREADS = 256
DIGIT = 8
"""Bits that a pass sorts by."""


def aligned(nbytes: int) -> int:
    """The bytes up to the next multiple of 16, where a tensor may begin."""
    return -(-nbytes // 16) * 16


@dataclass(frozen=True)
class RadixSort:
    """A stable sort of `rows` rows of `length` keys, of which the lowest `bits` bits differ.

    Its workspace begins at `base`: the keys to sort, their order, another pair of both, and counts.
    `payload`: 4 bytes of each key that come along in place of its index.
    """

    rows: int
    length: int
    bits: int
    base: int = 0
    payload: Ptr | None = None

    @property
    def item(self) -> int:
        """Bytes of a key."""
        return 8 if self.bits > 32 else 4

    @property
    def key(self) -> str:
        """The C type of a key."""
        return f"u{8 * self.item}"

    @property
    def passes(self) -> int:
        """Sorts by one digit each."""
        return -(-self.bits // DIGIT)

    @property
    def tiles(self) -> int:
        """Blocks a row."""
        return -(-self.length // (THREADS * (16 if self.item == 4 else 8)))

    @cached_property
    def _places(self) -> tuple[list[Ptr], int]:
        """Keys and their order, another pair, counts, totals, bits and sides; where they end."""
        arena, count = WorkspaceArena(self.base, 16), self.rows * self.length
        sizes = [self.item * count, 4 * count] * 2
        sizes += [1024 * self.rows * self.tiles, 1024 * self.rows]
        if self._may_skip:
            sizes += [self.item * self.rows * self.tiles, 4 * self.rows * (self.passes + 1)]
        return [arena.allocate(size) for size in sizes], arena.size

    def _pair(self, side: int) -> tuple[Ptr, Ptr]:
        key, at = self._places[0][2 * side : 2 * side + 2]
        return key, at

    @property
    def keys(self) -> Ptr:
        """Where the keys stand before the sort."""
        return self._pair(0)[0]

    @property
    def sorted(self) -> tuple[Ptr, Ptr]:
        """The keys in order, and the index of each in its row or its payload."""
        return self._pair(self.passes % 2)

    @property
    def _may_skip(self) -> bool:
        """Keys of 64 bits are seldom that large: passes of digits that all share are left out."""
        return self.item == 8

    @property
    def end(self) -> int:
        """The first byte after the workspace."""
        return self._places[1]

    @property
    def moved(self) -> int:
        """Bytes read and written: keys twice, pairs once each way, in every pass."""
        passes = self.passes * (3 * self.item + 8) + self._may_skip * self.item
        return passes * self.rows * self.length

    def launches(self) -> Launches:
        """Three launches a pass, behind those that find which are needed."""
        counts, totals, bits, sides, *_ = (*self._places[0][4:], Ptr("bits"), Ptr("sides"))  # null
        passes, blocks = self.passes, self.rows * self.tiles
        launches: list[Launch] = []

        def add(entry: str, blocks: int, first: bool, *made: Ptr, numbers: str, k: int = 0) -> None:
            more = args(numbers, self, k=k)
            macros = {"KEY": self.key, "FIRST": first}
            launches.append(launch("scan/radix.cu", entry, blocks, THREADS, *made, *more, **macros))

        if self._may_skip:
            add("radix_bits", blocks, False, self.keys, bits, numbers="i64 length tiles")
            add("radix_sides", self.rows, False, bits, sides, numbers="i64 tiles, i32 passes")
        for k in range(passes):
            (key, at), (key_to, at_to) = self._pair(k % 2), self._pair((k + 1) % 2)
            first = not k and self.payload is None
            if not k and self.payload is not None:
                at = self.payload
            which = "i64 length tiles, i32 k passes"
            add("radix_count", blocks, first, key, key_to, sides, counts, numbers=which, k=k)
            add("radix_offsets", self.rows << DIGIT, first, sides, counts, totals,
                numbers="i64 tiles, i32 k passes", k=k)  # fmt: skip
            add("radix_scatter", blocks, first, key, at, key_to, at_to, sides, counts, totals,
                numbers=which, k=k)  # fmt: skip
        return tuple(launches)
