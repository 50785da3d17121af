"""TfIdfVectorizer: counts of n-grams of integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_fuse.lower.context import Context, Lowering, Unserved
from onnx_fuse.program.data_movement import NGrams

MODES = {"TF": 0, "IDF": 1, "TFIDF": 2}


def entries(
    counts: Sequence[int], words: int, columns: Sequence[int], low: int, high: int, skips: int
) -> np.ndarray | None:
    """int32 [columns, 3]: first word in the pool, number of words, distances that count.

    `counts[n - 1]` is where the n-grams of n words begin in the pool, `columns` the output column
    of each. N-grams of one word count once, whatever `skips` allows. None where two n-grams share a
    column.
    """
    table = np.zeros((max(columns) + 1, 3), np.int32)
    gram = 0
    for n, (begin, end) in enumerate(zip(counts, [*counts[1:], words], strict=True), 1):
        for first in range(begin, end, n):
            if low <= n <= high:
                if table[columns[gram], 1]:
                    return None
                table[columns[gram]] = first, n, 1 if n == 1 else skips + 1
            gram += 1
    return table


def tfidf(ctx: Context, node: ir.Node) -> None:
    """y [..., columns] of x [..., words]: how often each n-gram of the pool stands in a row."""
    x = ctx.dense(node, 0)
    pool = ctx.attr(node, "pool_int64s")
    if x.dtype not in ("int32", "int64") or not pool:
        raise Unserved("no-kernel", what="strings")
    table = entries(
        ctx.attr(node, "ngram_counts"), len(pool), ctx.attr(node, "ngram_indexes"),
        ctx.attr(node, "min_gram_length"), ctx.attr(node, "max_gram_length"),
        ctx.attr(node, "max_skip_count"),
    )  # fmt: skip
    if table is None:
        raise Unserved("no-kernel", what="n-grams that share a column")
    width = len(table)
    y = ctx.output(node, 0, (*x.shape[:-1], width), "float32")
    reads = {"x": x, "pool": ctx.constant(np.array(pool, np.int64)), "entry": ctx.constant(table)}
    if weights := ctx.attr(node, "weights"):
        # onnxruntime takes the weight that stands at the column's place, so this does as well
        by_column = np.ones(width, np.float32)
        by_column[: len(weights)] = weights[:width]
        reads["weight"] = ctx.constant(by_column)
    words = x.shape[-1] if x.shape else 1
    problem = NGrams(y.size, width, words, x.dtype, MODES[ctx.attr(node, "mode")])
    ctx.select(node, problem, reads, {"y": y})


LOWERINGS: dict[tuple[str, str], Lowering] = {("", "TfIdfVectorizer"): tfidf}
