"""Losses of one's own as ONNX, and several losses with weights."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import pytest
from onnxscript import FLOAT
from onnxscript import opset18 as op
from support import answers, assert_near, normal, stock

from onnx_fuse import autodiff, nn
from onnx_fuse.errors import DataError, ModelError, OnnxFuseError, UsageError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.nn import functional as F
from onnx_fuse.training import data, fit, optim
from onnx_fuse.training.losses import Term
from onnx_fuse.training.trainer import Trainer

Array = np.ndarray[Any, Any]
MODEL = """net (float[batch, 3] x) => (float[batch, 4] y, float[batch, 2] z)
    <float[3, 4] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2},
     float[3, 2] v = {0.6, 0.5, 0.4, 0.3, 0.2, 0.1}> { y = MatMul (x, w)  z = MatMul (x, v) }"""
TYPES = '<ir_version: 9, opset_import: ["" : 18]>'
MSE = f"""{TYPES} mse (float[n, c] guess, float[n, c] labels) => (float loss)
    {{ d = Sub (guess, labels)  s = Mul (d, d)  loss = ReduceMean <keepdims = 0> (s) }}"""
# reads both outputs by name, has names that the model has, and a constant that does not train
BOTH = f"""{TYPES} both (float[n, 2] z, float[n, 4] t, float[n, 4] y) => (float loss, float[n, 4] d)
    <float[2] w = {{0.5, 2.0}}, bool yes = {{1}}> {{
    x = Mul (z, w)
    a = ReduceSumSquare <keepdims = 0> (x)
    d = Sub (y, t)
    b = ReduceSumSquare <keepdims = 0> (d)
    loss = If (yes) <
        then_branch = g1 () => (float loss) {{ loss = Add (a, b) }},
        else_branch = g2 () => (float loss) {{ loss = Sub (a, b) }}>
}}"""


@onnxscript.script()
def annotated(guess: FLOAT["n", "c"], labels: FLOAT["n", "c"]) -> FLOAT:  # noqa: F821
    d = op.Sub(guess, labels)
    return op.ReduceMean(op.Mul(d, d), keepdims=0)


@onnxscript.script()
def plain(guess, labels):  # type: ignore[no-untyped-def]
    d = op.Sub(guess, labels)
    return op.ReduceMean(op.Mul(d, d), keepdims=0)


def batch(seed: int = 0, rows: int = 6) -> dict[str, Array]:
    return normal({"x": (rows, 3), "labels": (rows, 4)}, seed)


def model() -> Any:
    return text_model(MODEL)


GIVEN: dict[str, Callable[[], Any]] = {
    "a ModelProto": lambda: onnx.parser.parse_model(MSE),
    "bytes": lambda: onnx.parser.parse_model(MSE).SerializeToString(),
    "an onnx_ir.Model": lambda: text_model(MSE),
    "onnxscript with types": lambda: annotated,
    "onnxscript without": lambda: plain,
    "a FunctionProto": lambda: plain.to_function_proto(),
}


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("form", GIVEN)
def test_a_loss_as_onnx_is_the_loss_by_name(form: str, level: int, tmp_path: Path) -> None:
    given = GIVEN[form]()
    runs = [
        Trainer(model(), loss=loss, optimizer=optim.SGD(lr=0.1), level=level)
        for loss in ("mse", given)
    ]
    losses = [[float(run.step(batch(i))) for i in range(3)] for run in runs]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    assert_near(runs[1].weights(), runs[0].weights(), rtol=1e-5)
    assert runs[1].evaluate(batch(9)).loss == pytest.approx(runs[0].evaluate(batch(9)).loss)


def test_a_loss_in_a_file_reads_outputs_by_name(tmp_path: Path) -> None:
    """Its constants stay; its names are not mixed up with the model's; `z` reaches it, too."""
    onnx.save(onnx.parser.parse_model(BOTH), tmp_path / "both.onnx")
    trainer = Trainer(model(), loss=str(tmp_path / "both.onnx"), optimizer=optim.SGD(lr=0.01))
    assert set(trainer.weights()) == {"w", "v"}
    w, v = (a.astype(np.float64) for a in trainer.weights().values())
    feeds = {"x": batch()["x"], "t": batch()["labels"]}
    x, t = (a.astype(np.float64) for a in feeds.values())
    d, scaled = x @ w - t, x @ v * [0.5, 2.0]
    assert trainer.step(feeds) == pytest.approx((d**2).sum() + (scaled**2).sum(), rel=1e-5)
    found = trainer.weights()
    expected = {"w": w - 0.02 * x.T @ d, "v": v - 0.02 * x.T @ (scaled * [0.5, 2.0])}
    assert_near(found, expected, rtol=1e-5, atol=1e-6)
    trainer.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx").graph
    assert [n.op_type for n in saved.node] == ["MatMul", "MatMul"]


def test_several_losses_are_their_weighted_sum() -> None:
    """Classes on one output, numbers on the other; the first loss's metrics are reported."""
    terms = [
        Term("cross_entropy", "y", 0.5, options={"label_smoothing": 0.1, "ignore_index": 3}),
        Term("mse", "z", 2.0, labels="values"),
        Term(onnx.parser.parse_model(MSE.replace("c]", "2]")), "z", 0.25, labels="values2"),
    ]
    rng = np.random.default_rng(0)
    feeds = {
        "x": batch()["x"],
        "labels": np.array([0, 1, 2, 3, 0, 1]),
        "values": rng.normal(size=(6, 2)).astype(np.float32),
    }
    feeds["values2"] = feeds["values"]
    whole = Trainer(model(), loss=terms, optimizer=optim.SGD(lr=0.1))
    parts = [
        Trainer(model(), loss="cross_entropy", output="y", loss_options=dict(terms[0].options)),
        Trainer(model(), loss="mse", output="z"),
    ]
    own = [feeds, {"x": feeds["x"], "labels": feeds["values"]}]
    losses = [part.evaluate(each).loss for part, each in zip(parts, own, strict=True)]
    assert whole.step(feeds) == pytest.approx(0.5 * losses[0] + 2.25 * losses[1], rel=1e-6)
    found = fit.evaluate(whole, feeds, metrics=["accuracy"])
    assert found["validation_loss"] < 0.5 * losses[0] + 2.25 * losses[1]
    y = whole.evaluate(feeds).outputs["y"]
    counted = feeds["labels"] != 3
    assert found["accuracy"] == (y.argmax(1) == feeds["labels"])[counted].mean()
    with pytest.raises(DataError, match="no array for the input 'values'"):
        whole.step({k: a for k, a in feeds.items() if k != "values"})
    with pytest.raises(DataError, match=r"'labels' holds 4 at \[0\]"):
        whole.step({**feeds, "labels": np.full(6, 4)})


def test_terms_may_share_their_labels() -> None:
    """A distance by two norms of one output: one input is fed."""
    terms = [Term("mse", labels="t"), Term("l1", weight=0.5, labels="t")]
    trainer = Trainer(model(), loss=terms)
    assert [v.name for v in trainer.spec().feeds] == ["x", "t"]
    feeds = {"x": batch()["x"], "t": batch()["labels"]}
    d = trainer.evaluate(feeds).outputs["y"] - feeds["t"]
    assert trainer.step(feeds) == pytest.approx((d**2).mean() + 0.5 * abs(d).mean(), rel=1e-5)


def test_a_run_with_a_loss_of_its_own_is_resumed_with_it(tmp_path: Path) -> None:
    first = Trainer(model(), loss=plain)
    first.step(batch())
    first.checkpoint(tmp_path / "own")
    with pytest.raises(UsageError, match="has a loss that is a model: give it as loss="):
        Trainer.resume(tmp_path / "own", model())
    with pytest.raises(UsageError, match="was started with loss"):
        Trainer.resume(tmp_path / "own", model(), loss=onnx.parser.parse_model(BOTH))
    resumed = Trainer.resume(tmp_path / "own", model(), loss=plain)
    assert resumed.step(batch(1)) == first.step(batch(1))
    several = Trainer(model(), loss=[Term("mse"), Term("l1", "z", labels="t")])
    several.checkpoint(tmp_path / "named")
    Trainer.resume(tmp_path / "named", model())


WRONG = MSE.replace("float[n, c] guess, float[n, c]", "double[n, c] guess, double[n, c]")
REFUSED: dict[str, tuple[Any, type[OnnxFuseError], str]] = {
    "type": (7, UsageError, "a loss of type int: give a name, a model or a function"),
    "empty": ([], UsageError, "several losses are a list of Term"),
    "names": (["mse", "l1"], UsageError, "several losses are a list of Term"),
    "output": ([Term("mse", "q")], UsageError, "the model has no output 'q': it has y, z"),
    "double": (
        onnx.parser.parse_model(WRONG.replace("(float loss)", "(double loss)")),
        ModelError,
        "the loss reads 'guess' as DOUBLE, but the model's 'y' is FLOAT",
    ),
    "no scalar": (
        onnx.parser.parse_model(
            MSE.replace("keepdims = 0", "keepdims = 1").replace("float loss", "float[1, 1] loss")
        ),
        ModelError,
        "must be a float scalar",
    ),
    "labels": (
        [Term("mse", labels="t"), Term("cross_entropy", labels="t")],
        UsageError,
        "'t' is FLOAT, but a loss reads INT64 there",
    ),
    "file": ("missing.onnx", ModelError, "missing.onnx: No such file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    given, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        Trainer(to_proto(model()), loss=given)


# ---- losses by name ----------------------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def log_softmax(x: Array) -> Array:
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


def entropy(x: Array, t: Array) -> Array:
    """-log softmax(x)[t] of each row."""
    return -np.take_along_axis(log_softmax(x), t[..., None], -1)[..., 0]


def focal(x: Array, t: Array, alpha: float = 0.25, gamma: float = 2.0) -> Array:
    p = sigmoid(x)
    hit = p * t + (1 - p) * (1 - t)
    return -np.log(hit) * (1 - hit) ** gamma * (alpha * t + (1 - alpha) * (1 - t))


def dice(x: Array, t: Array, smooth: float = 1.0) -> Array:
    axes = tuple(range(min(2, x.ndim - 1), x.ndim))
    both = (sigmoid(x) * t).sum(axes)
    return 1 - (2 * both + smooth) / (sigmoid(x).sum(axes) + t.sum(axes) + smooth)


def multi_margin(x: Array, t: Array, p: int = 1, margin: float = 1.0) -> Array:
    own = np.take_along_axis(x, t[:, None], 1)
    others = np.arange(x.shape[1]) != t[:, None]
    return (np.maximum(0, margin - own + x) ** p * others).sum(1) / x.shape[1]


def poisson(x: Array, t: Array, log_input: bool = True, full: bool = False) -> Array:
    s = np.where(t > 1, t, 1)
    more = np.where(t > 1, s * np.log(s) - s + np.log(2 * np.pi * s) / 2, 0) if full else 0
    return (np.exp(x) - t * x if log_input else x - t * np.log(x + 1e-8)) + more


def cosine(x: Array, y: Array) -> Array:
    """The cosine of each row of x with each of y."""
    return (x @ y.T) / np.linalg.norm(x, axis=1)[:, None] / np.linalg.norm(y, axis=1)


def cosine_embedding(x: Array, y: Array, t: Array, margin: float = 0.0) -> Array:
    c = np.diagonal(cosine(x, y))
    return np.where(t == 1, 1 - c, np.maximum(0, c - margin))


def triplet(x: Array, p: Array, n: Array, margin: float = 1.0, swap: bool = False) -> Array:
    near, far, last = (np.linalg.norm(d + 1e-6, axis=1) for d in (x - p, x - n, p - n))
    return np.maximum(0, near - (np.minimum(far, last) if swap else far) + margin)


def contrastive(x: Array, y: Array, temperature: float = 0.07, symmetric: bool = False) -> Array:
    scores, own = cosine(x, y) / temperature, np.arange(len(x))
    one = entropy(scores, own)
    return (one + entropy(scores.T, own)) / 2 if symmetric else one


def ctc(x: Array, t: Array, steps: Array, counts: Array, zero_infinity: bool = False) -> Array:
    """By all ways to write each sequence, one after another."""
    losses = []
    for scores, label, length, count in zip(log_softmax(x), t, steps, counts, strict=True):
        total = -np.inf
        for path in itertools.product(range(x.shape[2]), repeat=int(length)):
            spelt = [c for c, _ in itertools.groupby(path) if c]
            if spelt == label[:count].tolist():
                total = np.logaddexp(total, scores[range(length), path].sum())
        losses.append(-total / max(count, 1))
    return np.where(np.isinf(losses), 0.0, losses) if zero_infinity else np.array(losses)


def normal_of(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).normal(size=shape)


X4, Y4, Z4 = normal_of(3, 4), normal_of(3, 4)[::-1] * 1.1, normal_of(4, 3).T
BITS = (normal_of(4, 3).T > 0) * 1.0
POSITIVE, CLASSES = np.abs(X4[::-1]) * 3, np.array([1, 3, 0])
SEQUENCES = {"labels": np.array([[1, 1, 2], [2, 1, -100], [-100] * 3, [2, 2, 2]])}
LENGTHS = np.full(4, 4), np.array([3, 2, 0, 3])
Row = tuple[str, dict[str, Any], list[Array], dict[str, Array], Callable[..., Array], str]
NAMED: dict[str, Row] = {
    "kl_div": (
        *("kl_div", {}, [X4], {"labels": POSITIVE}),
        *(lambda x, t: t * (np.log(t) - x), "kl_div"),
    ),
    "kl_div of logarithms": (
        *("kl_div", {"log_target": True}, [X4], {"labels": Y4}),
        *(lambda x, t: np.exp(t) * (t - x), "kl_div"),
    ),
    "focal": ("focal", {}, [X4], {"labels": BITS}, focal, ""),
    "focal, gamma": (
        *("focal", {"gamma": 0.5, "alpha": 0.6}, [X4], {"labels": BITS}),
        *(lambda x, t: focal(x, t, 0.6, 0.5), ""),
    ),
    "softmax_focal": (
        *("softmax_focal", {}, [X4], {"labels": CLASSES}),
        *(lambda x, t: entropy(x, t) * (1 - np.exp(-entropy(x, t))) ** 2, ""),
    ),
    "dice": ("dice", {}, [X4], {"labels": BITS}, dice, ""),
    "dice of images": (
        "dice", {}, [normal_of(2, 3, 2, 2)], {"labels": (normal_of(2, 3, 2, 2) > 1) * 1.0}, dice, ""
    ),
    "hinge": (
        *("hinge", {"margin": 0.5}, [X4], {"labels": 2 * BITS - 1}),
        *(lambda x, t: np.maximum(0, 0.5 - t * x), ""),
    ),
    "multi_margin": (
        "multi_margin", {}, [X4], {"labels": CLASSES}, multi_margin, "multi_margin_loss"
    ),
    "multi_margin, squares": (
        *("multi_margin", {"p": 2, "margin": 0.5}, [X4], {"labels": CLASSES}),
        *(lambda x, t: multi_margin(x, t, 2, 0.5), "multi_margin_loss"),
    ),
    "poisson_nll": (
        *("poisson_nll", {"full": True}, [X4], {"labels": POSITIVE}),
        *(lambda x, t: poisson(x, t, full=True), "poisson_nll_loss"),
    ),
    "poisson_nll of rates": (
        *("poisson_nll", {"log_input": False}, [POSITIVE], {"labels": POSITIVE[::-1]}),
        *(lambda x, t: poisson(x, t, log_input=False), "poisson_nll_loss"),
    ),
    "cosine_embedding": (
        *("cosine_embedding", {"margin": 0.1}, [X4, Y4], {"labels": np.array([1.0, -1.0, -1.0])}),
        *(lambda x, y, t: cosine_embedding(x, y, t, 0.1), "cosine_embedding_loss"),
    ),
    "triplet": ("triplet", {}, [X4, Y4, Z4], {}, triplet, "triplet_margin_loss"),
    "triplet, swapped": (
        *("triplet", {"swap": True, "margin": 2.0}, [X4, Y4, Z4], {}),
        *(lambda x, p, n: triplet(x, p, n, 2.0, True), "triplet_margin_loss"),
    ),
    "contrastive": ("contrastive", {}, [X4, Y4], {}, contrastive, ""),
    "contrastive, both ways": (
        *("contrastive", {"symmetric": True, "temperature": 0.5}, [X4, Y4], {}),
        *(lambda x, y: contrastive(x, y, 0.5, True), ""),
    ),
    "ctc": (
        *("ctc", {"zero_infinity": True}, [normal_of(4, 4, 3)], SEQUENCES),
        *(lambda x, t: ctc(x, t, *LENGTHS, zero_infinity=True), ""),
    ),
    "ctc with lengths": (
        *("ctc", {"input_lengths": "steps", "target_lengths": "counts"}, [normal_of(4, 4, 3)]),
        {
            "labels": np.maximum(SEQUENCES["labels"], 1), "steps": np.array([4, 2, 3, 1]),
            "counts": np.ones(4, np.int64),
        },
        *(lambda x, t, steps, counts: ctc(x, t, steps, counts), ""),
    ),
}  # fmt: skip


def gradient_graph(row: Row, dtype: Any, **options: Any) -> tuple[Any, dict[str, Array]]:
    """A loss of outputs that are the inputs x0, x1, ..., with its gradients, and its feeds."""
    loss, given, values, labels, _, _ = row
    kind = "double" if dtype == np.float64 else "float"
    shapes = [f"{kind}[{','.join(['N', *map(str, v.shape[1:])])}]" for v in values]
    inputs = ", ".join(f"{s} x{i}" for i, s in enumerate(shapes))
    outputs = ", ".join(f"{s} y{i}" for i, s in enumerate(shapes))
    lines = " ".join(f"y{i} = Identity (x{i})" for i in range(len(values)))
    names = [f"x{i}" for i in range(len(values))]
    graph = autodiff.gradient(
        text_model(f"agraph ({inputs}) => ({outputs}) {{ {lines} }}"),
        names,
        loss,
        **given,
        **options,
    )
    feeds = {name: v.astype(dtype) for name, v in zip(names, values, strict=True)}
    feeds |= {k: v.astype(dtype) if v.dtype.kind == "f" else v for k, v in labels.items()}
    return graph, feeds


def gradient_of(row: Row, dtype: Any, **options: Any) -> tuple[Any, dict[str, Array]]:
    """The loss, and its gradients by the names of the inputs that are outputs."""
    graph, feeds = gradient_graph(row, dtype, **options)
    found = answers(stock(graph, optimized=True), feeds)
    return found["loss"], {k[:2]: v for k, v in found.items() if k.endswith(".grad")}


@pytest.mark.parametrize("case", NAMED)
def test_a_loss_by_name_is_its_formula(case: str) -> None:
    """By NumPy in float64, its gradient by central differences."""
    loss, _, values, labels, reference, _ = row = NAMED[case]
    exact = loss != "focal"  # onnxruntime has no Softplus in float64
    dtype, rtol = (np.float64, 1e-6) if exact else (np.float32, 1e-5)
    found, gradients = gradient_of(row, dtype)
    wanted = reference(*values, *labels.values())
    np.testing.assert_allclose(found, wanted.mean(), rtol=rtol)
    total, _ = gradient_of(row, dtype, reduction="sum")
    if loss != "ctc":  # whose mean is over the number of labels, too
        np.testing.assert_allclose(total, wanted.sum(), rtol=rtol)
    for i, (value, slope) in enumerate(zip(values, gradients.values(), strict=True)):
        d, h = np.cos(np.arange(value.size)).reshape(value.shape), 1e-6
        up, down = (
            reference(*values[:i], value + s * h * d, *values[i + 1 :], *labels.values()).mean()
            for s in (1, -1)
        )
        assert np.vdot(slope, d) == pytest.approx((up - down) / (2 * h), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("case", [name for name, row in NAMED.items() if row[-1]])
def test_a_loss_by_name_is_pytorchs(case: str) -> None:
    torch = pytest.importorskip("torch")
    _, options, values, labels, _, name = row = NAMED[case]
    found, gradients = gradient_of(row, np.float64)
    tensors = [torch.tensor(v.copy(), requires_grad=True) for v in values]
    targets = [torch.tensor(v.copy()) for v in labels.values()]
    wanted = getattr(torch.nn.functional, name)(*tensors, *targets, **options)
    wanted.backward()
    np.testing.assert_allclose(found, wanted.item(), rtol=1e-6)
    for tensor, slope in zip(tensors, gradients.values(), strict=True):
        np.testing.assert_allclose(slope, tensor.grad.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_ctc_is_pytorchs(seed: int) -> None:
    """In float32 and through some time; infinite losses have no gradient here, and NaN there."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    x, labels = rng.normal(size=(5, 12, 6)).astype("f"), rng.integers(1, 6, (5, 7))
    steps, counts = rng.integers(6, 13, 5), rng.integers(0, 8, 5)
    given = {"labels": labels, "steps": steps, "counts": counts}
    names = {"input_lengths": "steps", "target_lengths": "counts"}
    for options in ({}, {"zero_infinity": True}):
        tensor = torch.tensor(x, requires_grad=True)
        log_p = torch.log_softmax(tensor, -1).transpose(0, 1)
        targets = [torch.tensor(a) for a in given.values()]
        wanted = torch.nn.functional.ctc_loss(log_p, *targets, **options)
        wanted.backward()
        row: Row = ("ctc", names | options, [x], given, ctc, "")
        found, gradients = gradient_of(row, np.float32)
        np.testing.assert_allclose(found, wanted.item(), rtol=1e-5)
        expected = np.nan_to_num(tensor.grad.numpy())
        np.testing.assert_allclose(gradients["x0"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", NAMED)
def test_a_function_of_nn_is_the_loss_by_name(case: str) -> None:
    loss, options, values, labels, _, name = row = NAMED[case]
    function = getattr(F, name or f"{loss}_loss", None)
    if function is None:
        pytest.skip("onnx_fuse.nn has no such function")
    if loss == "ctc":  # time comes first there, and lengths are given
        row = (*row[:2], [values[0]], labels, *row[4:])
        labels = {"labels": labels["labels"], "steps": LENGTHS[0], "counts": LENGTHS[1]} | labels
        options = {k: v for k, v in options.items() if k == "zero_infinity"}
    dtype = np.float32 if loss == "focal" else np.float64
    found, gradients = gradient_of(row, dtype)
    tensors = [nn.Tensor(v.astype(dtype), requires_grad=True) for v in values]
    read = [t.permute(1, 0, 2) for t in tensors] if loss == "ctc" else tensors
    fed = [nn.Tensor(v.astype(dtype) if v.dtype.kind == "f" else v) for v in labels.values()]
    y = function(*read, *fed, **options)
    y.backward()
    np.testing.assert_allclose(y.numpy(), found, rtol=1e-6)
    for tensor, slope in zip(tensors, gradients.values(), strict=True):
        np.testing.assert_allclose(tensor.grad.numpy(), slope, rtol=1e-5, atol=1e-7)


NN_LOSSES = {name: row for row in NAMED.values()
             if (name := row[5] or f"{row[0]}_loss") in F.__all__}  # fmt: skip


@pytest.mark.parametrize("name", NN_LOSSES)
def test_each_loss_of_nn_adds_up_to_the_sum(name: str) -> None:
    loss, options, values, labels, _, _ = NN_LOSSES[name]
    of_rows = ("contrastive", "cosine_embedding", "ctc", "multi_margin", "triplet")
    dtype = np.float32 if loss == "focal" else np.float64
    options = {k: v for k, v in options.items() if not isinstance(v, str)}
    if loss == "ctc":
        labels = {"labels": labels["labels"], "steps": LENGTHS[0], "counts": LENGTHS[1]}
    sums, slopes = [], []
    for reduction in ("sum", "none"):
        tensors = [nn.Tensor(v.astype(dtype), requires_grad=True) for v in values]
        read = [t.permute(1, 0, 2) for t in tensors] if loss == "ctc" else tensors
        fed = [v.astype(dtype) if v.dtype.kind == "f" else v for v in labels.values()]
        y = getattr(F, name)(*read, *fed, **options, reduction=reduction)
        assert y.ndim == (0 if reduction == "sum" else 2 - (loss in of_rows))
        y.backward(nn.ones(*y.shape, dtype=y.dtype))
        sums.append(y.sum().numpy())
        slopes.append([t.grad.numpy() for t in tensors])
    np.testing.assert_allclose(*sums, rtol=1e-5)
    for pair in zip(*slopes, strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 4, 3, 2), (0, 4), (2, 0, 4)])
def test_each_cross_entropy_has_the_place_of_its_label(shape: Any, smoothing: float) -> None:
    x, axis = normal_of(*shape), 1 if len(shape) == 4 else len(shape) - 1
    labels = np.arange(x.size // 4).reshape(shape[:axis] + shape[axis + 1 :]) % 4
    log_p = x - np.log(np.exp(x).sum(axis, keepdims=True))
    hard = np.take_along_axis(log_p, np.expand_dims(labels, axis), axis).squeeze(axis)
    wanted = -(1 - smoothing) * hard - smoothing * log_p.mean(axis)
    y = F.cross_entropy(x, labels, label_smoothing=smoothing, reduction="none")
    np.testing.assert_allclose(y.numpy(), wanted, rtol=1e-6, strict=True)


ONES, NONE_COUNTS = {"labels": np.ones((1, 2))}, {"labels": np.full(3, -100)}
TWICE, ONCE = ({"labels": np.array([[1] * n])} for n in (2, 1))
HOSTILE: dict[str, tuple[Any, ...]] = {
    # loss and options, outputs, labels, loss, the gradient's largest magnitude (None: it is finite)
    "huge scores": ("focal", {}, [np.array([[1e30, -1e30]])], ONES, 1.25e29, 0.125),
    "huge scores of classes": (
        "softmax_focal", {}, [np.array([[1e30, -1e30]])], {"labels": np.array([1])}, 2e30, 1.0
    ),
    "huge embeddings": (
        "contrastive", {}, [X4 * 1e15, X4 * 1e15], {}, contrastive(X4, X4).mean(), 0.0
    ),
    "no embedding": ("contrastive", {}, [X4 * 0, X4], {}, np.log(3), None),
    "a corner": ("hinge", {}, [np.ones((1, 2))], ONES, 0.0, 0.5),
    "equal distances": ("triplet", {"margin": 0.0}, [X4, Y4, Y4], {}, 0.0, None),
    "one place": ("triplet", {}, [X4, X4, X4], {}, 1.0, None),
    "no label counts": ("softmax_focal", {}, [X4], NONE_COUNTS, np.nan, 0.0),
    "a margin that is just met": (
        "multi_margin", {}, [np.array([[0.0, 1.0]])], {"labels": np.array([1])}, 0.0, 0.0
    ),
    "no label has a margin": ("multi_margin", {}, [X4], NONE_COUNTS, np.nan, 0.0),
    "a class of inf has squares": (
        *("multi_margin", {"p": 2}, [np.array([[0.0, np.inf]])], {"labels": np.array([1])}),
        *(0.0, 0.0),
    ),
    "NaN": ("hinge", {}, [np.full((1, 2), np.nan)], ONES, np.nan, None),
    "probabilities of 0": (
        "kl_div", {}, [np.array([[-1.0, -2.0]])], {"labels": np.array([[0.0, 1.0]])}, 1.0, 0.5
    ),
    "no way": ("ctc", {}, [normal_of(1, 2, 3)], TWICE, np.inf, 0.0),
    "no way counts 0": ("ctc", {"zero_infinity": True}, [normal_of(1, 2, 3)], TWICE, 0.0, 0.0),
    "a class of -inf": ("ctc", {}, [np.array([[[-np.inf, 0.0, 0.0]]])], ONCE, np.log(2), 0.5),
    "huge scores in time": ("ctc", {}, [np.array([[[0.0, 1e30]]])], ONCE, 0.0, 0.0),
    "NaN in time": ("ctc", {}, [np.array([[[0.0, np.nan]]])], ONCE, np.nan, None),
    "no labels": (
        *("ctc", {}, [np.zeros((2, 3, 2))], {"labels": np.zeros((2, 0), np.int64)}),
        *(3 * np.log(2), 0.25),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_loss_by_name_of_hostile_values(case: str) -> None:
    *row, loss, top = HOSTILE[case]
    found, gradients = gradient_of((*row, focal, ""), np.float32)
    np.testing.assert_allclose(found, loss, rtol=1e-5, atol=1e-6)
    largest = max(np.abs(slope).max() for slope in gradients.values())
    if top is not None:
        np.testing.assert_allclose(largest, top, rtol=1e-4, atol=1e-6)
    assert np.isfinite(largest) or "NaN" in case


PAIR = """net (float[B,3] a, float[B,3] b) => (float[B,4] x, float[B,4] y)
    <float[3, 4] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, -0.8, 0.9, 1.0, 1.1, -1.2}>
    { x = MatMul (a, w)  y = MatMul (b, w) }"""


@pytest.mark.parametrize("loss", ["contrastive", "cosine_embedding", "ctc"])
def test_a_trainer_feeds_what_a_loss_reads(loss: str, tmp_path: Path) -> None:
    """Two outputs and no labels, a number for each row, or sequences and their lengths."""
    rng = np.random.default_rng(0)
    text, shape = PAIR, (6, 3)
    more: dict[str, Array] = {"labels": np.float32([1, -1, 1, 1, -1, 1])}
    options: dict[str, Any] = {}
    if loss == "contrastive":
        more = {}
    elif loss == "ctc":
        text = PAIR.replace("[B,", "[B,T,")
        shape = (6, 5, 3)
        more = {"labels": rng.integers(1, 4, (6, 2)), "steps": np.array([5, 4, 5, 4, 5, 5])}
        options = {"input_lengths": "steps"}
    feeds = {name: rng.normal(size=shape).astype("f") for name in ("a", "b")} | more
    adam = optim.Adam(lr=0.02)
    trainer = Trainer(text_model(text), loss=loss, loss_options=options, optimizer=adam)
    first = trainer.evaluate(feeds).loss
    fit.fit(trainer, feeds, epochs=20, batch_size=3, folder=tmp_path)
    assert trainer.evaluate(feeds).loss < 0.95 * first
    again = Trainer.resume(tmp_path, text_model(text))
    assert again.step(feeds) == trainer.step(feeds)


BY_NAME: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"loss": "mse", "loss_options": {"delta": 1}}, "option of mse 'delta': choose"),
    "outputs": ({"loss": "triplet"}, "triplet reads 3 outputs of the model, which has y, z: name"),
    "reduction": (
        {"loss": "l1", "loss_options": {"reduction": "none"}}, "unknown reduction 'none': choose"
    ),
    "text": ({"loss": "huber", "loss_options": {"delta": "big"}}, "delta is 'big': it takes a num"),
    "lengths": ({"loss": "ctc", "loss_options": {"input_lengths": 5}}, "is 5: it takes a text"),
    "power": ({"loss": "multi_margin", "loss_options": {"p": 3}}, "p is 3.0: multi_margin takes 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_NAME)
def test_refuses_options_of_a_loss_by_name(case: str) -> None:
    options, words = BY_NAME[case]
    with pytest.raises(UsageError, match=words):
        Trainer(text_model(MODEL), **options)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.float64, np.float16])
def test_labels_of_any_type_are_those_of_the_scores(dtype: Any) -> None:
    """As PyTorch has it; a number that float32 has not stays refused."""
    trainer = Trainer(text_model(PAIR), loss="cosine_embedding", optimizer=optim.SGD(lr=0.0))
    feeds = normal({"a": (3, 3), "b": (3, 3)}, 0)
    labels = np.array([1, 1, 0] if dtype is np.uint8 else [1, -1, 1]).astype(dtype)
    losses = [float(trainer.step({**feeds, "labels": t})) for t in (labels, labels.astype("f"))]
    assert losses[0] == losses[1]
    for wrong in (np.full(3, 2**60 + 1), np.full(3, 0.1), np.full(3, 1j)):
        with pytest.raises(DataError, match=f"'labels' holds {wrong.dtype}, the model reads float"):
            trainer.step({**feeds, "labels": wrong})


def test_labels_of_a_bfloat16_input_may_be_integers() -> None:
    value = ir.Value(name="labels", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.BFLOAT16))
    fitted = data.fit({"labels": np.array([1, -1])}, [value])["labels"]
    assert fitted.dtype == ir.DataType.BFLOAT16.numpy()
    with pytest.raises(DataError, match="'labels' holds int64, the model reads bfloat16"):
        data.fit({"labels": np.array([257, 1])}, [value])


def test_labels_of_a_sequence_are_checked() -> None:
    trainer = Trainer(text_model(PAIR.replace("[B,", "[B,T,")), loss="ctc")
    feeds = {name: np.zeros((1, 5, 3), np.float32) for name in ("a", "b")}
    with pytest.raises(DataError, match=r"'labels' holds 4 at \[0, 1\]: the model has the classes"):
        trainer.step({**feeds, "labels": np.array([[1, 4]])})
