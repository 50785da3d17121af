"""Rows that nobody reads are not computed, and those that are read stay what they were."""

import numpy as np
import onnx_ir as ir
import pytest
from support import drawn, run

from onnx_fuse import Trainer, optim, rewrite
from onnx_fuse.ir.build import text_model
from onnx_fuse.ops.fused.gather_pushdown import NAME

FIRST = (
    "i = Constant<value = int64 {0}>() a = Constant<value = int64[1] {1}>()"
    " y0 = Gather<axis = 1>(x1, i) y = Unsqueeze(y0, a)"
)
LAST = "i = Constant<value = int64[1] {-1}>() y = Gather<axis = 1>(x1, i)"
TWO = "i = Constant<value = int64[2] {3, 1}>() y = Gather<axis = 1>(x1, i)"
SLICE = (
    "b = Constant<value = int64[1] {2}>() e = Constant<value = int64[1] {3}>()"
    " a = Constant<value = int64[1] {1}>() y = Slice(x1, b, e, a)"
)
CHOSEN = "i = ArgMax<axis = 0, keepdims = 1>(g) y = Gather<axis = 1>(x1, i)"
CHOSEN_ONE = (
    "i = ArgMax<axis = 0, keepdims = 0>(g) a = Constant<value = int64[1] {1}>()"
    " y0 = Gather<axis = 1>(x1, i) y = Unsqueeze(y0, a)"
)
RELU = "m = MatMul(x, w) x1 = Relu(m)"
BLOCK = (
    "n = LayerNormalization<axis = -1>(x, g, g) m = MatMul(n, w) r = Relu(m) p = MatMul(r, v)"
    " s = Add(p, g) x1 = Add(x, s)"
)


def model(body: str, also: str = "") -> ir.Model:
    """A graph of x [B, 5, 4] with the weights that the bodies name."""
    return text_model(
        "agraph (float[B,5,4] x, float[1,5,4] rows, float[4] g, float[4,6] w, float[6,4] v) =>"
        f" (float[a,b,c] y{also}) {{ {body} }}"
    )


def outputs(found: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    """What onnxruntime makes of the graph."""
    return run(found, drawn(found, seed=1) | {"x": x}, optimized=True)


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (f"{BLOCK} {FIRST}", 1),
        (f"{BLOCK} {LAST}", 1),
        (f"{BLOCK} {TWO}", 2),
        (f"{BLOCK} {SLICE}", 1),
        (f"{BLOCK} {CHOSEN}", 1),
        (f"{BLOCK} {CHOSEN_ONE}", 1),
        (f"q = Add(x, rows) m = MatMul(q, w) x1 = Tanh(m) {FIRST}", 1),
        (f"m = MatMul(x, w) t = Mul(m, m) x1 = Cast<to = 1>(t) {LAST}", 1),
    ],
)
@pytest.mark.parametrize("batch", [1, 3, 0])
def test_products_of_the_rows_alone(body: str, rows: int, batch: int) -> None:
    before, after = model(body), model(body)
    assert rewrite.optimize(after, level=1).fusions[NAME] == 1
    shapes = [v.shape for node in after.graph for v in node.outputs if node.op_type != "Constant"]
    whole = [s for s in shapes if s is not None and len(s) == 3 and s[1] == 5]
    assert not whole, f"a result of all rows, of which {rows} are read"
    x = np.random.default_rng(0).standard_normal((batch, 5, 4)).astype(np.float32)
    x[:, 2] = 1e30  # a row whose square overflows, which one body alone reads
    for old, new in zip(outputs(before, x), outputs(after, x), strict=True):
        assert old.shape == new.shape
        np.testing.assert_allclose(new, old, rtol=1e-5)


@pytest.mark.parametrize("index", ["int64 {-1}", "int64[1] {2}", "input"])
def test_a_packed_product_of_the_row_alone(index: str) -> None:
    """The head of a decoder whose weights have 4 bits, of which one position's logits are read."""
    place = "" if index == "input" else f"at = Constant <value = {index}> ()"
    text = (
        '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> agraph (float[B,5,32] x,'
        f" uint8[6,1,16] w, float[6] scale{', int64 at' if not place else ''}) => (float y) {{"
        f" {place} z = com.microsoft.MatMulNBits <K = 32, N = 6, bits = 4, block_size = 32>"
        " (x, w, scale) y = Gather <axis = 1> (z, at) }"
    )
    before, after, rng = text_model(text), text_model(text), np.random.default_rng(2)
    assert rewrite.optimize(after, level=1).fusions[NAME] == 1
    product = next(node for node in after.graph if node.op_type == "MatMulNBits")
    assert product.outputs[0].shape is not None
    assert product.outputs[0].shape[1] == 1
    feeds = {
        "x": rng.standard_normal((3, 5, 32)).astype(np.float32),
        "w": rng.integers(0, 256, (6, 1, 16)).astype(np.uint8),
        "scale": rng.standard_normal(6).astype(np.float32),
    }
    feeds |= {} if place else {"at": np.array(3)}
    (old,), (new,) = (run(found, feeds, optimized=True) for found in (before, after))
    np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "also"),
    [
        (f"{BLOCK} {FIRST}", ", float[d,e,f] x1"),  # all rows are returned
        (f"m = MatMul(x, w) x1 = Relu(m) z = ReduceSum(m) {FIRST}", ", float[d,e,f] z"),
        (f"x1 = Softmax<axis = 1>(x) {FIRST}", ""),  # made of all rows
        (f"m = MatMul(x, w) x1 = Softmax<axis = 1>(m) {FIRST}", ""),
        (f"x1 = LayerNormalization<axis = -1>(x, g, g) {FIRST}", ""),  # no product is saved
        (f"{RELU} i = Constant<value_ints = [0, 1, 2]>() y = Gather<axis = 1>(x1, i)", ""),  # most
        (f"{RELU} i = Constant<value_ints = [1]>() y = Gather<axis = 2>(x1, i)", ""),  # columns
    ],
)
def test_other_picks_stay(body: str, also: str) -> None:
    found = model(body, also)
    assert NAME not in rewrite.optimize(found, level=1).fusions


def steps_with_and_without(device: str, precision: str, rtol: float) -> None:
    """Steps of a vision transformer at level 0, which has no such rewrite, and at level 1.

    tests/gpu runs this too.
    """
    import vit

    rng = np.random.default_rng(0)
    feeds = {
        "pixels": rng.standard_normal((4, 3, 32, 32)).astype(np.float32),
        "labels": np.array([1, 0, 9, 4]),
    }
    found = []
    for level in (0, 1):
        trainer = Trainer(
            vit.build(vit.SIZES["tiny"]),
            loss="cross_entropy",
            optimizer=optim.SGD(0.1),
            level=level,
            device=device,
            precision=precision,
        )
        before = trainer.weights()
        losses = [float(trainer.step(feeds)) for _ in range(4)]
        moved = {name: array - before[name] for name, array in trainer.weights().items()}
        found.append((losses, moved))
    (first, old), (second, new) = found
    np.testing.assert_allclose(second, first, rtol=rtol)
    for name, array in old.items():
        apart = np.linalg.norm(new[name] - array)
        assert apart <= 10 * rtol * np.linalg.norm(array) + 1e-7, name


def test_a_step_has_the_same_gradients() -> None:
    steps_with_and_without("cpu", "fp32", 1e-5)
