"""LinearCrossEntropy on a GPU: its chunk kernel, and a head's loss and gradients, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from head_rows import HEADS, NAMES, assert_near, head_feeds, head_model, truth
from interpret import cross_entropy_chunk
from on_device import TYPES, Memory, wide

from onnx_fuse.kernels.loss import Chunk
from onnx_fuse.lower import linear_cross_entropy
from onnx_fuse.program.problem import Hardware
from onnx_fuse.program.problems import CrossEntropyChunk
from onnx_fuse.runtime.executable import Executable

# of the largest number: float32 sums, or one rounding to 8 or 11 bits
TOLERANCE = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}


@pytest.fixture(scope="module")
def hw() -> Hardware:
    return Hardware.detect(0)


CHUNKS = [
    (classes, stride, dtype, labels, smoothing, weighted, gradient)
    for dtype in TOLERANCE
    for classes, stride, labels, smoothing, weighted, gradient in (
        (2083, 2112, "int64", 0.0, False, True),
        (2083, 2083, "int32", 0.0, True, True),
        (50257, 50304, "int64", 0.1, True, True),
        (50257, 50304, "int64", 0.1, False, False),
        (3, 64, "int64", 0.3, False, True),
    )
]


@pytest.mark.launches("loss/chunk.cu", "cross_entropy_chunk")
@pytest.mark.parametrize("row", CHUNKS, ids=lambda row: "-".join(map(str, row)))
def test_a_chunk(row: tuple[object, ...], hw: Hardware) -> None:
    classes, stride, dtype, labels, smoothing, weighted, gradient = row
    problem = CrossEntropyChunk(
        9, classes, stride, dtype, labels, ignored=1, smoothing=smoothing, gradient=gradient
    )
    rng = np.random.default_rng(0)
    x = np.full((9, stride), np.nan, TYPES[dtype])
    x[:, :classes] = rng.standard_normal((9, classes)) * 4
    x[3, 1], x[4, 0] = -np.inf, 60
    target = rng.integers(0, classes, 9).astype(labels)
    target[[2, 5]] = 1
    read = {"x": x[:, :classes], "target": target}
    if weighted:
        read["weight"] = np.abs(rng.standard_normal(classes)).astype(np.float32)
    if smoothing:
        x[3, 1] = -30  # its share of the loss would be infinite
    want = cross_entropy_chunk(problem, read)
    few = replace(hw, sm_count=2)  # so that a block has several rows in turn
    for how in Chunk().configs(problem, few):
        memory = Memory({**read, "x": x, "rows": np.full((9, 2), np.nan, np.float32)})
        memory.run(Chunk(), problem, how, few)
        np.testing.assert_allclose(memory.read("rows"), want["rows"], rtol=2e-5, atol=2e-5)
        if gradient:
            got = wide(memory.read("x"))
            assert not got[:, classes:].any()
            assert np.abs(got[:, :classes] - want["dx"]).max() < TOLERANCE[dtype], how


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("head", HEADS)
def test_a_head(head: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 256 * 2176 * 4)
    model, feeds = head_model(head, kind), head_feeds(head, kind)
    runner, names = Executable(model), [value.name for value in model.graph.outputs]
    first, again = runner.run(None, feeds), runner.run(None, feeds)
    assert [a.tobytes() for a in first] == [a.tobytes() for a in again]
    assert_near(dict(zip(names, first, strict=True)), truth(feeds, HEADS[head][0]), kind)
