"""Heads with a cross-entropy: graphs, inputs and the truth in float64."""

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnx_fuse import autodiff, rewrite
from onnx_fuse.ir.build import text_model

CLASSES, WIDTH, ROWS = 2083, 16, 600
HEAD = "wt = Transpose <perm = [1, 0]> (w) l = MatMul (x, wt)"
LOSS = "loss = SoftmaxCrossEntropyLoss <ignore_index = -100> (z, labels)"
NAMES = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# of the largest number: 16-bit scores of up to 16 are rounded before their exp
TOLERANCE = {"float": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}


def feeds_of(kind: str, weight: str, **extra: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"x": (ROWS, WIDTH), "w": (CLASSES, WIDTH) if weight == "VK" else (WIDTH, CLASSES)}
    found = {
        name: rng.standard_normal(shape).astype(NAMES[kind])
        for name, shape in (shapes | extra).items()
    }
    labels = rng.integers(0, CLASSES, ROWS)
    labels[::7] = -100
    return found | {"labels": labels}


def truth(
    feeds: dict[str, np.ndarray], weight: str, smoothing: float = 0.0
) -> dict[str, np.ndarray]:
    """The mean loss and its gradients in float64."""
    wide = {name: a.astype(np.float64) for name, a in feeds.items()}
    x, w, labels = wide["x"], wide["w"] if weight == "VK" else wide["w"].T, feeds["labels"]
    z = x @ w.T + wide.get("c", 0.0)
    log_p = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
    counted = np.flatnonzero(labels >= 0)
    each = wide.get("each", np.ones(CLASSES))
    wanted = np.zeros_like(z)  # what every -log p counts for
    wanted[counted] = smoothing / CLASSES * each
    wanted[counted, labels[counted]] += (1 - smoothing) * each[labels[counted]]
    total = each[labels[counted]].sum()
    g = (np.exp(log_p) * wanted.sum(1, keepdims=True) - wanted) / total
    dw = g.T @ x
    return {
        "loss": np.asarray(-(wanted * log_p).sum() / total), "x.grad": g @ w,
        "w.grad": dw if weight == "VK" else dw.T, "c.grad": g.sum(0),
    }  # fmt: skip


def gradient_of(text: str, wrt: list[str]) -> ir.Model:
    model = text_model(f"agraph {text}")
    report = rewrite.optimize(model)
    assert report.fusions == {"LinearCrossEntropy": 1}
    return autodiff.gradient(model, wrt=wrt)


HEADS = {
    "tied": ("VK", HEAD, ()),
    "of a weight with a column a class": ("KV", "l = MatMul (x, w)", ()),
    "a Gemm with a bias": ("VK", "l = Gemm <transB = 1> (x, w, c)", ("c",)),
    "a product and a sum": ("KV", "m = MatMul (x, w) l = Add (m, c)", ("c",)),
}


def head_model(head: str, kind: str) -> ir.Model:
    """The mean loss of a head of HEADS in a type of NAMES, and the gradients of its operands."""
    weight, product, more = HEADS[head]
    shape = f"[{CLASSES}, {WIDTH}]" if weight == "VK" else f"[{WIDTH}, {CLASSES}]"
    bias = f", {kind}[{CLASSES}] c" if more else ""
    cast = "z = Cast <to = 1> (l)" if kind != "float" else "z = Identity (l)"
    return gradient_of(
        f"({kind}[M, {WIDTH}] x, {kind}{shape} w{bias}, int64[M] labels) => (float loss) "
        f"{{ {product} {cast} {LOSS} }}",
        ["x", "w", *more],
    )


def head_feeds(head: str, kind: str) -> dict[str, np.ndarray]:
    """What `head_model` reads."""
    weight, _, more = HEADS[head]
    extra = {"c": (CLASSES,)} if more else {}
    return feeds_of(kind, weight, **extra) | {"loss.grad": np.array(1, np.float32)}


def assert_near(got: dict[str, np.ndarray], want: dict[str, np.ndarray], kind: str) -> None:
    for name, array in got.items():
        error = np.abs(array.astype(np.float64) - want[name]).max() / np.abs(want[name]).max()
        assert error < TOLERANCE[kind], (name, error)
