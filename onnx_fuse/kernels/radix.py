"""The launches of scan/radix.cu, which several candidates sort pairs of a key and an index by."""

from __future__ import annotations

from dataclasses import dataclass

from onnx_fuse.cuda.macros import defines
from onnx_fuse.program.problem import Launch, Num, Ptr

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
    """

    rows: int
    length: int
    bits: int
    base: int = 0

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

    def _pair(self, side: int) -> tuple[Ptr, Ptr]:
        keys, at = (aligned(size * self.rows * self.length) for size in (self.item, 4))
        first = self.base + side * (keys + at)
        return Ptr("workspace", first), Ptr("workspace", first + keys)

    @property
    def keys(self) -> Ptr:
        """Where the keys stand before the sort."""
        return self._pair(0)[0]

    @property
    def sorted(self) -> tuple[Ptr, Ptr]:
        """The keys in order, and the index of each in its row."""
        return self._pair(self.passes % 2)

    @property
    def _counts(self) -> int:
        return 2 * self._pair(1)[0].offset - self.base

    @property
    def end(self) -> int:
        """The first byte after the workspace."""
        return self._counts + aligned(1024 * self.rows * (self.tiles + 1))

    @property
    def moved(self) -> int:
        """Bytes read and written: keys twice, pairs once each way, in every pass."""
        return self.passes * self.rows * self.length * (3 * self.item + 8)

    def launches(self) -> tuple[Launch, ...]:
        """Three launches a pass."""
        counts = Ptr("workspace", self._counts)
        totals = Ptr("workspace", self._counts + aligned(1024 * self.rows * self.tiles))
        length, tiles = Num("i64", self.length), Num("i64", self.tiles)
        found: list[Launch] = []

        def add(entry: str, blocks: int, first: bool, *args: Ptr | Num) -> None:
            grid, block = (blocks, 1, 1), (THREADS, 1, 1)
            macros = defines(KEY=self.key, FIRST=first)
            found.append(Launch("scan/radix.cu", entry, grid, block, args, macros))

        for k in range(self.passes):
            (key, at), (key_to, at_to) = self._pair(k % 2), self._pair((k + 1) % 2)
            shift, blocks = Num("i32", k * DIGIT), self.rows * self.tiles
            add("radix_count", blocks, not k, key, counts, length, tiles, shift)
            add("radix_offsets", self.rows << DIGIT, not k, counts, totals, tiles)
            add("radix_scatter", blocks, not k, key, at, key_to, at_to, counts, totals, length,
                tiles, shift)  # fmt: skip
        return tuple(found)
