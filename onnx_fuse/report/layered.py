"""Place the nodes of a graph in layers, from the top to the bottom, for a drawing of it.

The method is the usual one of Sugiyama, Tagawa and Toda (1981): layers by the longest path,
placeholders where an edge passes a layer, an order within each layer by the mean place of the
neighbours, and then coordinates. The coordinates of a layer are the weighted least-squares fit to
where its neighbours stand, under the condition that its boxes do not overlap, which isotonic
regression solves exactly in linear time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PITCH = 60
"""Distance of two layers."""
HEIGHT = 30
"""Height of a box."""
_GAP = 26  # between boxes of one layer
_NARROW = 10  # width of the room that a passing edge takes
_ORDERINGS = 6
_PLACINGS = 8
_MOST_PLACEHOLDERS = 15_000  # with more of them, long edges are drawn straight
_LONG = 24  # layers, then
_STRAIGHT = 8.0  # how much more a bend within an edge counts than one at its ends


@dataclass
class Layout:
    """The coordinates of the boxes and the edges of a drawn graph."""

    x: list[int]
    """The middle of each node's box, from the left."""
    y: list[int]
    """The top of each node's box."""
    paths: list[list[int]]
    """The points of each edge, as x0, y0, x1, y1, ..., its ends included."""
    width: int
    height: int


def layered(widths: Sequence[float], edges: Sequence[tuple[int, int]]) -> Layout:
    """The Layout of a graph without circles.

    Args:
        widths: The width of each node's box.
        edges: Pairs (source, target) of the numbers of nodes.
    """
    count = len(widths)
    targets: list[list[int]] = [[] for _ in range(count)]
    sources: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        targets[a].append(b)
        sources[b].append(a)
    layer = _layers(sources, targets)
    drawing = _Drawing(list(widths), layer)
    chains = [drawing.chain(node, targets[node]) for node in range(count)]
    drawing.order()
    drawing.place()
    left = min((x - w / 2 for x, w in zip(drawing.x, drawing.widths, strict=True)), default=0.0)
    xs = [round(x - left) for x in drawing.x]
    ys = [PITCH * k for k in drawing.layer]
    right = max((x + w / 2 for x, w in zip(xs, drawing.widths, strict=True)), default=0.0)
    paths = [_path(a, b, chains[a], drawing.layer, xs, ys) for a, b in edges]
    height = max(ys, default=0) + HEIGHT
    return Layout(xs[:count], ys[:count], paths, round(right), height)


def _layers(sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[int]:
    """The layer of each node: below all it reads; what reads nothing stands above its reader."""
    waiting = [len(s) for s in sources]
    ready = [node for node, n in enumerate(waiting) if not n]
    layer = [0] * len(sources)
    for node in ready:  # it grows
        for other in targets[node]:
            layer[other] = max(layer[other], layer[node] + 1)
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    for node in reversed(ready):
        if targets[node] and len(set(sources[node])) < len(set(targets[node])) + 1:
            # a node with one reader and nothing, or one thing, to read goes down to the reader
            lowest = min(layer[other] for other in targets[node]) - 1
            if not sources[node] or len(targets[node]) == 1:
                layer[node] = max(layer[node], lowest)
    return layer


def _path(
    a: int,
    b: int,
    chain: Sequence[int],
    layer: Sequence[int],
    xs: Sequence[int],
    ys: Sequence[int],
) -> list[int]:
    """An edge from the foot of one box, by its placeholders, to the head of the other."""
    points = [(xs[a], ys[a] + HEIGHT)]
    for k in chain[: max(layer[b] - layer[a] - 1, 0)]:
        points += [(xs[k], ys[k]), (xs[k], ys[k] + HEIGHT)]
    points.append((xs[b], ys[b]))
    bends = [
        here
        for before, here, after in zip(points, points[1:], points[2:], strict=False)
        if not before[0] == here[0] == after[0]
    ]
    return [number for point in (points[0], *bends, points[-1]) for number in point]


class _Drawing:
    """Nodes and placeholders in their layers. A source's edges share one chain of placeholders."""

    def __init__(self, widths: list[float], layer: list[int]) -> None:
        self.widths, self.layer = widths, layer
        self.real = len(widths)
        self.above: list[list[int]] = [[] for _ in widths]
        self.below: list[list[int]] = [[] for _ in widths]
        self.rows: list[list[int]] = [[] for _ in range(max(layer, default=0) + 1)]
        self.x: list[float] = []

    def chain(self, node: int, targets: Sequence[int]) -> list[int]:
        """Join a node with its targets; the placeholders on the way, from the top."""
        placeholders: list[int] = []
        start = self.layer[node]
        for target in sorted(set(targets), key=lambda t: self.layer[t]):
            span = self.layer[target] - start
            full = len(self.layer) - self.real > _MOST_PLACEHOLDERS
            if full and span > _LONG:
                continue
            while len(placeholders) < span - 1:
                placeholders.append(self._placeholder(placeholders[-1] if placeholders else node))
            self._join(placeholders[span - 2] if span > 1 else node, target)
        return placeholders

    def _placeholder(self, after: int) -> int:
        new = len(self.layer)
        self.layer.append(self.layer[after] + 1)
        self.widths.append(_NARROW)
        self.above.append([])
        self.below.append([])
        self._join(after, new)
        return new

    def _join(self, upper: int, lower: int) -> None:
        self.below[upper].append(lower)
        self.above[lower].append(upper)

    def order(self) -> None:
        """The order in each row: by the mean place of what a node is joined with, in sweeps."""
        place = [0.0] * len(self.layer)
        seen = [False] * len(self.layer)
        for root in range(len(self.layer)):  # neighbours begin side by side
            stack = [root]
            while stack:
                node = stack.pop()
                if seen[node]:
                    continue
                seen[node] = True
                self.rows[self.layer[node]].append(node)
                stack += [n for n in (*self.below[node], *self.above[node]) if not seen[n]]
        for row in self.rows:
            for i, node in enumerate(row):
                place[node] = i
        for turn in range(_ORDERINGS):
            down = turn % 2 == 0
            beside = self.above if down else self.below
            for row in self.rows if down else reversed(self.rows):
                if len(row) < 2:
                    continue
                mean = {
                    n: sum(place[m] for m in beside[n]) / len(beside[n]) if beside[n] else place[n]
                    for n in row
                }
                row.sort(key=mean.__getitem__)
                for i, node in enumerate(row):
                    place[node] = i

    def place(self) -> None:
        """The coordinates: each row in turn is fitted to the rows above, below, or both."""
        self.x = [0.0] * len(self.layer)
        for row in self.rows:
            at = 0.0
            for node in row:
                self.x[node] = at + self.widths[node] / 2
                at += self.widths[node] + _GAP
        for turn in range(_PLACINGS):
            rows = self.rows if turn % 2 == 0 else self.rows[::-1]
            for row in rows:
                self._fit(row, turn)

    def _fit(self, row: Sequence[int], turn: int) -> None:
        both = turn >= _PLACINGS - 4
        positions, weights, offsets = [], [], []
        at = 0.0
        for i, node in enumerate(row):
            if i:
                at += (self.widths[row[i - 1]] + self.widths[node]) / 2 + _GAP
            offsets.append(at)
            total = pull = 0.0
            near = self.above[node] if turn % 2 == 0 else self.below[node]
            others = self.below[node] if turn % 2 == 0 else self.above[node]
            for other in (*near, *others) if both or not near else near:
                weight = 1.0
                if node >= self.real:
                    weight = _STRAIGHT if other >= self.real else 2.0
                total += weight
                pull += weight * self.x[other]
            positions.append((pull / total if total else self.x[node]) - at)
            weights.append(total or 0.01)
        for node, fitted, offset in zip(row, _increasing(positions, weights), offsets, strict=True):
            self.x[node] = fitted + offset


def _increasing(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls, by weighted least squares (adjacent violators)."""
    means: list[float] = []
    totals: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while means and means[-1] > mean:
            other = totals.pop()
            mean = (means.pop() * other + mean * total) / (other + total)
            total += other
            count += counts.pop()
        means.append(mean)
        totals.append(total)
        counts.append(count)
    return [mean for mean, count in zip(means, counts, strict=True) for _ in range(count)]
