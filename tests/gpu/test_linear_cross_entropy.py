"""LinearCrossEntropy on a GPU: its chunk kernel, and a head's loss and gradients, in float64."""

from dataclasses import replace

import numpy as np
import pytest
from head_rows import CLASSES, HEADS, NAMES, assert_near, head_feeds, head_model, truth
from on_device import TYPES, Memory, poison, random, results, turned, wide

from onnx_fuse.kernels.loss import Chunk, Exp, Label
from onnx_fuse.lower import linear_cross_entropy
from onnx_fuse.program.epilogue import EXP_COLUMNS
from onnx_fuse.program.interpret.losses import chunk_losses
from onnx_fuse.program.losses import CrossEntropyChunk, ExpRows, LabelScore
from onnx_fuse.program.problem import GemmProblem, Hardware, KernelConfig
from onnx_fuse.runtime.executable import Executable

# of the largest number: float32 sums, or one rounding to 8 or 11 bits
TOLERANCE = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}


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
    want = chunk_losses(problem, read)
    few = replace(hw, sm_count=2)  # so that a block has several rows in turn
    ways = [(Chunk(), how) for how in Chunk().configs(problem, few)]
    blank = {"x": x, "rows": poison("float32", 9, 2)}
    for how, found in results(problem, few, read, blank, ways):
        np.testing.assert_allclose(found["rows"], want["rows"], rtol=2e-5, atol=2e-5)
        if gradient:
            got = wide(found["x"])
            assert not got[:, classes:].any()
            assert np.abs(got[:, :classes] - want["dx"]).max() < TOLERANCE[dtype], how


EXPONENTIALS = [
    GemmProblem.of("Gemm", m=m, n=n, k=k, dtype="bfloat16", exp=True, **more)
    for m, n, k, more in (
        (300, 2083, 264, {"ldy": 2112, "trans_b": True}),
        (70, 2112, 40, {"bias": True, "trans_b": True}),
        (130, 520, 64, {"ldy": 576, "ldb": 528, "bias": True}),
    )
]


@pytest.mark.parametrize("problem", EXPONENTIALS, ids=str)
def test_a_product_stores_exponentials_and_their_sums(problem: GemmProblem, hw: Hardware) -> None:
    """Sums are of e as it is stored; rows without a reference, and columns beyond n, are 0."""
    rng = np.random.default_rng(5)
    m, n, k, bf16 = problem.m, problem.n, problem.k, TYPES["bfloat16"]
    line, ldy, reach = problem.ldb or k, problem.ldy or n, -(-problem.n // EXP_COLUMNS)
    a = (rng.standard_normal((m, k)) / np.sqrt(k)).astype(bf16)
    b = (rng.standard_normal((n, k) if problem.trans_b else (k, line)) * 4).astype(bf16)
    bias, row0 = rng.standard_normal(n).astype(bf16), rng.uniform(-60, 70, m).astype(np.float32)
    row0[3::7] = np.inf
    bits = wide(a) @ (wide(b).T if problem.trans_b else wide(b)[:, :n])
    bits = (bits + wide(bias) * bool(problem.epilogue.bias)) / np.log(2) - wide(row0)[:, None]
    given = {"a": a, "b": b, "col1": bias, "row0": row0}
    with np.errstate(under="ignore"):
        want = np.exp2(bits)
    blank = {"y": poison("bfloat16", m, ldy), "part": poison("float32", reach, m)}
    for how, found in results(problem, hw, given, blank):
        y = wide(found["y"])
        assert not y[:, n:].any()
        assert not y[3::7].any()
        assert np.abs(y[:, :n] / np.where(want > 0, want, 1) - (want > 0)).max() < 5e-3, how
        sums = np.add.reduceat(y[:, :n], np.arange(0, n, EXP_COLUMNS), axis=1).T
        np.testing.assert_allclose(found["part"], sums, rtol=1e-5, err_msg=how)


SCALED = [
    GemmProblem.of("Gemm", m=m, n=n, k=k, dtype="bfloat16", row_scale=True, **more)
    for m, n, k, more in (
        (300, 72, 2083, {"lda": 2112}),
        (100, 768, 4096, {}),
        (130, 264, 136, {"trans_b": True, "bias": True}),
        (257, 384, 264, {"residual": True}),
    )
]


@pytest.mark.parametrize("problem", SCALED, ids=str)
def test_a_product_of_scaled_rows(problem: GemmProblem, hw: Hardware) -> None:
    rng = np.random.default_rng(6)
    m, n, k, line = problem.m, problem.n, problem.k, problem.lda or problem.k
    a, b = random(rng, "bfloat16", m, line), random(rng, "bfloat16", k, n)
    a[:, k:] = np.nan
    bias, c = random(rng, "bfloat16", n), random(rng, "bfloat16", m, n)
    row0 = np.exp2(rng.uniform(-60, 60, m)).astype(np.float32)
    want = wide(row0)[:, None] * (wide(a)[:, :k] @ wide(b))
    want = want + wide(bias) * bool(problem.epilogue.bias)
    want = want + wide(c) * bool(problem.epilogue.residual)
    given = {"a": a, "b": turned(b, problem.trans_b), "row0": row0, "c": c, "col1": bias}
    for how, found in results(problem, hw, given, {"y": poison("bfloat16", m, n)}):
        off = np.abs(wide(found["y"]) - want).max(1) / np.abs(want).max(1)
        assert off.max() < 6e-3, how


ROWS = 21
EXP_ROWS = [
    (2083, 2112, 48, False, "int64", False, False),
    (2083, 2112, 48, True, "int32", True, True),
    (640, 640, 776, False, "int32", True, True),
    (50257, 50304, 33, False, "int64", False, True),
]


@pytest.mark.launches("loss/exp_rows.cu", "label_score")
@pytest.mark.launches("loss/exp_rows.cu", "exp_rows")
@pytest.mark.parametrize("row", EXP_ROWS, ids=lambda row: "-".join(map(str, row)))
def test_rows_of_exponentials(row: tuple[object, ...], hw: Hardware) -> None:
    """References, and what becomes of the exponentials that a product makes with them."""
    classes, stride, k, transposed, labels, weighted, biased = row
    rng, bf16 = np.random.default_rng(0), TYPES["bfloat16"]
    x = (rng.standard_normal((ROWS, k)) / np.sqrt(k)).astype(bf16)
    w = (rng.standard_normal((classes, k)) * 4).astype(bf16)
    bias = rng.standard_normal(classes).astype(bf16)
    x[:, :3], w[:, :3] = 0, 0
    target = rng.integers(20, classes, ROWS).astype(labels)
    w[9, 0], w[10, 1], bias[13] = 1, 1, -np.inf
    x[2, 1], target[2] = 30, 10  # a confident row
    x[3, 0], x[4, 0], x[5, 0] = 60, 300, 1e38  # hopeless ones, the last two beyond the exponents
    target[6] = 13  # of -inf, with a bias
    target[[7, 10]], target[8] = 1, classes + 5  # ignored, no class
    x[9, 2], x[10, 2], x[11, 2], x[12, 0] = np.nan, np.nan, np.inf, -1e38
    target[12] = 9
    with np.errstate(all="ignore"):
        z = wide(x) @ wide(w).T + (wide(bias) if biased else 0)
        near = np.where(np.abs(z) < 1e30, z / np.log(2) + 64, 0)
    counts = (target != 1) & (target < classes)
    near = np.where(counts, near[np.arange(ROWS), np.where(counts, target, 0)], np.inf)
    shared = (ROWS, k, classes, k, classes if transposed else k, "bfloat16", labels, 1, transposed)
    given = {"x": x, "w": turned(w, transposed), "target": target}
    given |= {"bias": bias} if biased else {}
    given |= {"weight": np.abs(rng.standard_normal(classes)).astype("f4")} if weighted else {}
    memory = Memory(given | {"to": poison("float32", ROWS)})
    memory.run(Label(), LabelScore(*shared), KernelConfig.of(), hw)
    reference = memory.read("to")
    np.testing.assert_allclose(reference, near, rtol=1e-5, atol=1e-4)

    e = np.zeros((ROWS, stride), bf16)
    with np.errstate(all="ignore"):
        e[:, :classes] = np.exp2((z / np.log(2) - wide(reference)[:, None]).astype("f4"))
        part = np.add.reduceat(e.astype("f4"), np.arange(0, stride, EXP_COLUMNS), axis=1).T.copy()
    problem = ExpRows(
        ROWS, k, classes, stride, len(part), k, shared[4], "bfloat16", labels,
        ignored=1, turned=transposed,
    )  # fmt: skip
    blank = {"rows": poison("float32", ROWS, 2), "scale": poison("float32", ROWS),
             "narrow": poison("bfloat16", ROWS), "scaled": poison("bfloat16", ROWS, k)}  # fmt: skip
    memory = Memory(given | blank | {"e": e, "part": part})
    memory.run(Exp(), problem, KernelConfig.of(), hw)
    scale, rows, left = memory.read("scale"), wide(memory.read("rows")), wide(memory.read("e"))
    assert not left[:, classes:].any()
    np.testing.assert_array_equal(wide(memory.read("narrow")), wide(scale.astype(bf16)))
    with np.errstate(all="ignore"):
        g = wide(scale)[:, None] * left[:, :classes]
        scaled = wide(scale)[:, None] * wide(x)
    chunk = CrossEntropyChunk(ROWS, classes, stride, "bfloat16", labels, ignored=1)
    some = np.flatnonzero(~np.isin(np.arange(ROWS), (8, 9, 11)))
    read = {"x": z[some], "target": target[some]}
    read["x"][~counts[some]] = 0
    read |= {"weight": given["weight"]} if weighted else {}
    with np.errstate(all="ignore"):
        want = chunk_losses(replace(chunk, rows=len(some)), read)
    assert np.isnan(rows[[8, 9, 11], 0]).all()
    assert np.isnan(scale[[8, 9, 11]]).all()
    assert np.isnan(rows[8, 1])
    # scores that are made anew are rounded to 8 bits before their exp; those that are not may be
    # of a confident row, whose probabilities are the rest of 1 in float32
    np.testing.assert_allclose(rows[some], want["rows"], rtol=4e-3, atol=4e-3)
    anew = np.isin(some, (4, 5, 6, 12))
    bound = np.where(anew, 3e-2, 8e-3) * np.abs(want["dx"]).max(1, initial=1e-4)
    off = np.abs(g[some] - want["dx"]).max(1)
    assert (off < bound).all(), (off, bound)
    got = wide(memory.read("scaled"))
    np.testing.assert_allclose(got, scaled.astype(bf16).astype("f8"), rtol=8e-3, atol=1e-36)


def takes_exponentials(runner: Executable) -> bool:
    """Whether the product of the scores does, in the program that has run."""
    (instance,) = runner.instances()
    return any(isinstance(call.problem, ExpRows) for call in instance.program.calls)


@pytest.mark.parametrize(
    ("kind", "way"), [*((kind, "a pass") for kind in NAMES), ("bfloat16", "exponentials")]
)
@pytest.mark.parametrize("head", HEADS)
def test_a_head(
    head: str, kind: str, way: str, hw: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 256 * 2176 * 4)
    if hw.arch == "sm_90a":
        monkeypatch.setattr(linear_cross_entropy, "pays", lambda *_: way == "exponentials")
    model, feeds = head_model(head, kind), head_feeds(head, kind)
    runner, names = Executable(model), [value.name for value in model.graph.outputs]
    first, again = runner.run(None, feeds), runner.run(None, feeds)
    assert [a.tobytes() for a in first] == [a.tobytes() for a in again]
    assert takes_exponentials(runner) == (way == "exponentials" and hw.arch == "sm_90a")
    assert_near(dict(zip(names, first, strict=True)), truth(feeds, HEADS[head][0]), kind)


HOSTILE = {
    "scores of thousands": lambda feeds: feeds["x"].__imul__(TYPES["bfloat16"](64)),
    "a row of NaN": lambda feeds: feeds["x"].__setitem__(5, np.nan),
    "an ignored row of NaN": lambda feeds: feeds["x"].__setitem__(7, np.nan),
    "a row of infinities": lambda feeds: feeds["x"].__setitem__(5, np.inf),
    "an infinite weight": lambda feeds: feeds["w"].__setitem__(9, np.inf),
    "a label of no class": lambda feeds: feeds["labels"].__setitem__(5, CLASSES + 1),
    "no row that counts": lambda feeds: feeds["labels"].fill(-100),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("head", ["tied", "of a weight with a column a class"])
def test_both_ways_meet_hostile_numbers_alike(
    head: str, name: str, hw: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 256 * 2176 * 4)
    model, feeds, found = head_model(head, "bfloat16"), head_feeds(head, "bfloat16"), []
    if head != "tied" and name == "an infinite weight":
        feeds["w"][:, 9] = np.inf
    else:
        HOSTILE[name](feeds)
    names = [value.name for value in model.graph.outputs]
    for served in (False, hw.arch == "sm_90a"):
        monkeypatch.setattr(linear_cross_entropy, "pays", lambda *_, served=served: served)
        runner = Executable(model)
        found.append(dict(zip(names, map(wide, runner.run(None, feeds)), strict=True)))
        assert takes_exponentials(runner) == served
    one, other = found
    for key, a in one.items():
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(other[key]), key)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(other[key]), key)
        some = np.isfinite(a)
        # scores of thousands are rounded by up to 8 where they are made anew, and without them
        near = name != "scores of thousands" or key == "loss"
        if some.any() and near:
            largest = np.abs(a[some]).max() or 1.0
            assert np.abs(a[some] - other[key][some]).max() < 3e-2 * largest, key
