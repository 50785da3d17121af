"""Update ops against their formulas in float64, the standard's against its reference, schedules."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx.reference
import onnx_ir
import pytest
from support import assert_same, stock

from onnx_fuse import ops
from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.shape_ops import Writer
from onnx_fuse.ops.update import expand_standard_updates
from onnx_fuse.training import optim

LR, STEPS, SHAPE = 0.1, 4, (3, 5)
Array = np.ndarray[Any, Any]
Formula = Callable[[Array, Array, dict[str, Array], int], Array]


def sgd(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    return w - LR * g


def momentum(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    s["momentum"] = 0.9 * s["momentum"] + g
    return w - LR * s["momentum"]


def nesterov(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    s["momentum"] = 0.9 * s["momentum"] + g
    return w - LR * (g + 0.9 * s["momentum"])


def adam(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    s["exp_avg"] = 0.9 * s["exp_avg"] + 0.1 * g
    s["exp_avg_sq"] = 0.999 * s["exp_avg_sq"] + 0.001 * g**2
    m, v = s["exp_avg"] / (1 - 0.9**t), s["exp_avg_sq"] / (1 - 0.999**t)
    return w - LR * m / (np.sqrt(v) + 1e-8)


def adamw(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    return adam(w * (1 - LR * 0.2), g, s, t)


def adagrad(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    s["sum"] = s["sum"] + g**2
    return w - LR * g / (np.sqrt(s["sum"]) + 1e-10)


def lion(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    direction = np.sign(0.9 * s["exp_avg"] + 0.1 * g)
    s["exp_avg"] = 0.99 * s["exp_avg"] + 0.01 * g
    return w * (1 - LR * 0.2) - LR * direction


def adafactor(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    share, square = t**-0.8, g * g
    if "variance" in s:
        v = s["variance"] = s["variance"] + share * (square - s["variance"])
    else:
        for key, axis in (("row_var", -1), ("col_var", -2)):
            s[key] = s[key] + share * (square.mean(axis, keepdims=True) - s[key])
        mean = np.maximum(s["row_var"].mean(-2, keepdims=True), 2.0**-23)
        v = s["row_var"] * s["col_var"] / mean
    u = g / np.sqrt(np.maximum(v, 2.0**-46))
    rate = min(LR, t**-0.5) * max(1e-3, np.sqrt((w * w).mean()))
    return w * (1 - LR * 0.2) - rate / max(1, np.sqrt((u * u).mean())) * u


def muon(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    m = s["momentum_buffer"] = 0.95 * s["momentum_buffer"] + 0.05 * g
    x = 0.05 * g + 0.95 * m
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return w * (1 - LR * 0.2) - LR * np.sqrt(max(1, len(w) / len(w.T))) * x


def muon_like_adamw(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    factor = 0.2 * np.sqrt(max(w.shape)) / np.sqrt(max(1, len(w) / len(w.T)))
    kept = w * (1 - LR * 0.2)
    return kept + factor * (muon(w, g, s, t) - kept)


def nadam(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    mu, then = (0.9 * (1 - 0.5 * 0.96 ** (i * 0.004)) for i in (t, t + 1))
    p = s["mu_product"] = s["mu_product"] * mu
    s["exp_avg"] = 0.9 * s["exp_avg"] + 0.1 * g
    s["exp_avg_sq"] = 0.999 * s["exp_avg_sq"] + 0.001 * g**2
    ahead = (1 - mu) / (1 - p) * g + then / (1 - p * then) * s["exp_avg"]
    return w - LR * ahead / (np.sqrt(s["exp_avg_sq"] / (1 - 0.999**t)) + 1e-8)


def nadamw(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    return nadam(w, g, s, t) - w * LR * 0.2


def rmsprop(w: Array, g: Array, s: dict[str, Array], t: int) -> Array:
    v = s["square_avg"] = 0.99 * s["square_avg"] + 0.01 * g**2
    if "grad_avg" in s:
        s["grad_avg"] = 0.99 * s["grad_avg"] + 0.01 * g
        v = v - s["grad_avg"] ** 2
    step = g / (np.sqrt(v) + 1e-8)
    if "momentum" in s:
        step = s["momentum"] = 0.9 * s["momentum"] + step
    return w - LR * step


def l2(formula: Formula) -> Formula:
    return lambda w, g, s, t: formula(w, g + 0.2 * w, s, t)


UPDATES: dict[str, tuple[optim.Optimizer, Formula]] = {
    "sgd": (optim.SGD(), sgd),
    "sgd, decay": (optim.SGD(weight_decay=0.2), l2(sgd)),
    "momentum": (optim.SGD(momentum=0.9), momentum),
    "nesterov, decay": (optim.SGD(momentum=0.9, nesterov=True, weight_decay=0.2), l2(nesterov)),
    "adam": (optim.Adam(), adam),
    "adam, decay": (optim.Adam(weight_decay=0.2), l2(adam)),
    "adamw": (optim.AdamW(weight_decay=0.2), adamw),
    "adamw, not decayed": (optim.AdamW(weight_decay=0.2, no_decay=("w*",)), adam),
    "adagrad": (optim.Adagrad(initial_accumulator_value=0.5), adagrad),
    "lion": (optim.Lion(weight_decay=0.2), lion),
    "nadam": (optim.NAdam(), nadam),
    "nadam, decay": (optim.NAdam(weight_decay=0.2), l2(nadam)),
    "nadam, decoupled": (optim.NAdam(weight_decay=0.2, decoupled_weight_decay=True), nadamw),
    "rmsprop, decay": (optim.RMSprop(weight_decay=0.2), l2(rmsprop)),
    "rmsprop, momentum": (optim.RMSprop(momentum=0.9), rmsprop),
    "rmsprop, centered": (optim.RMSprop(centered=True), rmsprop),
    "rmsprop, all": (optim.RMSprop(centered=True, momentum=0.9), rmsprop),
    "adafactor": (optim.Adafactor(weight_decay=0.2, eps=(2.0**-23, 1e-3)), adafactor),
    "adafactor of a vector": (
        optim.Adafactor(weight_decay=0.2, eps=(2.0**-23, 1e-3)), adafactor
    ),
    "muon": (optim.Muon(weight_decay=0.2), muon),
    "muon of a tall matrix": (optim.Muon(weight_decay=0.2), muon),
    "muon, by AdamW's rates": (
        optim.Muon(weight_decay=0.2, adjust_lr_fn="match_rms_adamw"), muon_like_adamw
    ),
    "muon of a vector": (optim.Muon(weight_decay=0.2, eps=1e-8), adamw),
    "muon of a matrix of no columns": (optim.Muon(weight_decay=0.2, eps=1e-8), adamw),
    "muon of a named matrix": (optim.Muon(weight_decay=0.2, eps=1e-8, adamw=("w",)), adamw),
    "adamw8bit of a small weight": (optim.AdamW8bit(weight_decay=0.2), adamw),
}  # fmt: skip
SHAPES = {"vector": (4,), "tall matrix": (7, 3), "matrix of no columns": (3, 0)}


def update_model(optimizer: optim.Optimizer, arrays: dict[str, Array]) -> onnx_ir.Model:
    """(w, g, slots, lr, step) => (w1, new slots), of the types and shapes of `arrays`."""
    w, g, *slots = (
        onnx_ir.val(name, onnx_ir.DataType.from_numpy(array.dtype), array.shape)
        for name, array in arrays.items()
    )
    lr = onnx_ir.val("lr", onnx_ir.DataType.FLOAT, [])
    step = onnx_ir.val("step", onnx_ir.DataType.INT64, [])
    op = Writer()
    news = optimizer.update(op, "w", w, g, slots, lr, step)
    for old, value in zip((w, *slots), news, strict=True):
        value.name, value.shape, value.type = f"{old.name}.new", old.shape, old.type
    inputs = [w, g, *slots, lr, step]
    graph = onnx_ir.Graph(
        inputs, news, nodes=op.nodes, opset_imports={"": 21, FUSE: 1}, name="update"
    )
    return onnx_ir.Model(graph, ir_version=10)


def run_updates(
    optimizer: optim.Optimizer, shape: tuple[int, ...], dtype: Any, steps: int = STEPS
) -> Iterator[tuple[Array, Array, dict[str, Array]]]:
    """(gradient, weight, slots) of each update on stock onnxruntime; the first has no gradient."""
    rng = np.random.default_rng(1)
    w = rng.normal(size=shape).astype(dtype)
    g, slots = np.zeros_like(w), optimizer.initial("w", shape, np.dtype(dtype))
    run = stock(update_model(optimizer, {"w": w, "g": w, **slots}))
    names = {v.name for v in run.get_inputs()}
    yield g, w, slots
    for t in range(1, steps + 1):
        g = rng.normal(size=shape).astype(dtype)
        feeds = {"w": w, "g": g, **slots, "lr": np.array(LR, np.float32), "step": np.array(t)}
        w, *news = run.run(None, {k: v for k, v in feeds.items() if k in names})
        assert w.dtype == dtype
        slots = dict(zip(slots, news, strict=True))
        yield g, w, slots


def shape_of(name: str) -> tuple[int, ...]:
    return SHAPES.get(name.partition(" of a ")[2], SHAPE)


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 2e-6), (np.float64, 2e-7)])
@pytest.mark.parametrize("name", UPDATES)
def test_update_is_its_formula(name: str, dtype: type, rtol: float) -> None:
    """Over a few updates, on stock onnxruntime; hyperparameters are float32, hence rtol in f64."""
    optimizer, formula = UPDATES[name]
    if name.startswith("muon") and dtype == np.float32:
        rtol = 2e-5  # fifteen products after each other
    updates = run_updates(optimizer, shape_of(name), dtype)
    _, w, slots = next(updates)
    expected, state = w.astype(np.float64), {k: v.astype(np.float64) for k, v in slots.items()}
    for t, (g, w, news) in enumerate(updates, 1):
        slots, expected = news, formula(expected, g.astype(np.float64), state, t)
        np.testing.assert_allclose(w, expected, rtol=rtol, atol=rtol)
    for key, value in slots.items():
        np.testing.assert_allclose(value, state[key], rtol=10 * rtol, atol=rtol)


@pytest.mark.parametrize("name", UPDATES)
def test_update_is_pytorchs(name: str) -> None:
    torch = pytest.importorskip("torch")
    optimizer, _ = UPDATES[name]
    kind = getattr(torch.optim, type(optimizer).__name__, None)
    if kind is None or (optimizer.elementwise("w", shape_of(name)) and kind is torch.optim.Muon):
        pytest.skip("PyTorch has no such update")
    muons = ["betas", "ns_dtype"] if kind is torch.optim.Muon else []
    ours = ("no_decay", "groups", "adamw", *muons)
    options = {k: v for k, v in vars(optimizer).items() if k not in ours} | {"lr": LR}
    if any(optimizer.no_decay):
        options["weight_decay"] = 0.0
    updates = run_updates(optimizer, shape_of(name), np.float32)
    weight = torch.tensor(next(updates)[1], requires_grad=True)
    theirs = kind([weight], **options)
    # PyTorch multiplies in bfloat16, of which five iterations leave two digits
    atol = 0.05 if kind is torch.optim.Muon else 1e-5
    for g, w, _ in updates:
        weight.grad = torch.tensor(g)
        theirs.step()
        np.testing.assert_allclose(w, weight.detach().numpy(), rtol=1e-5, atol=atol)


def test_means_in_8_bits_are_near_those_of_adamw() -> None:
    """The codes are the nearest, no v becomes 0, and weights go AdamW's way."""
    shape = (32, 256)
    (_, w, means), (_, w8, codes) = (
        list(run_updates(kind(weight_decay=0.2), shape, np.float32, 20))[-1]
        for kind in (optim.AdamW, optim.AdamW8bit)
    )
    np.testing.assert_allclose(w8, w, rtol=0, atol=0.3 * LR)
    assert np.abs(w8 - w).mean() < 0.06 * LR
    m, v = codes["exp_avg"], codes["exp_avg_sq"]
    assert (m.dtype, v.dtype, v.min() > 0) == (np.int8, np.uint8, True)
    for code, law, name in ((m / 127.0, 3, "exp_avg"), (v / 255.0, 4, "exp_avg_sq")):
        scale, mean = codes[f"{name}.scale"], means[name]
        np.testing.assert_allclose(abs(mean).max(1, keepdims=True), scale, rtol=0.05)
        np.testing.assert_allclose(code**law * scale, mean, rtol=0.1, atol=0.02 * mean.max())
    held = sum(array.nbytes for array in codes.values())
    assert held < 0.26 * sum(array.nbytes for array in means.values())


@pytest.mark.parametrize("norm", [0.5, 2.0, 40.0])
def test_clip_factor(norm: float) -> None:
    model = text_model(
        "clip (float s) => (float n, float f) { n, f = onnx_fuse.ClipFactor <max_norm = 2.0> (s) }"
    )
    n, f = stock(model).run(None, {"s": np.array(norm**2, np.float32)})
    np.testing.assert_allclose(n, norm, rtol=1e-6)
    np.testing.assert_allclose(f, min(1, 2 / (norm + 1e-6)), rtol=1e-6)


STANDARD = {
    "Adam": "<alpha = 0.8, beta = 0.95, epsilon = 1e-3, norm_coefficient = 0.1, "
    "norm_coefficient_post = 0.01>",
    "Adagrad": "<decay_factor = 0.1, epsilon = 1e-3, norm_coefficient = 0.1>",
    "Momentum": '<alpha = 0.8, beta = 0.7, mode = "standard", norm_coefficient = 0.1>',
    "Momentum nesterov": '<alpha = 0.8, beta = 0.7, mode = "nesterov", norm_coefficient = 0.1>',
}


@pytest.mark.parametrize("t", [0, 1, 7])
@pytest.mark.parametrize("case", STANDARD)
def test_standard_update_as_plain_nodes(case: str, t: int) -> None:
    """Two parameters of different shapes in one node, against the reference of the onnx package."""
    op_type = case.split()[0]
    states = ["v", "h"] if op_type == "Adam" else ["h"]
    shapes = {"1": "2, 3", "2": "4"}
    names = [f"{kind}{i}" for kind in ("x", "g", *states) for i in shapes]
    outputs = [f"{kind}{i}" for kind in ("x", *states) for i in shapes]
    text = f"""<ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1]>
    update (float r, int64 t, {", ".join(f"float[{shapes[n[1]]}] {n}" for n in names)})
        => ({", ".join(f"float[{shapes[n[1]]}] {n}_new" for n in outputs)}) {{
        {", ".join(f"{n}_new" for n in outputs)} =
            ai.onnx.preview.training.{op_type} {STANDARD[case]} (r, t, {", ".join(names)})
    }}"""
    model = text_model(text)
    proto = to_proto(model)
    rng = np.random.default_rng(2)
    feeds = {n: np.abs(rng.normal(size=[int(d) for d in shapes[n[1]].split(",")])) for n in names}
    feeds = {n: np.asarray(a, np.float32) for n, a in {**feeds, "r": np.array(0.1)}.items()}
    feeds["t"] = np.array(t)
    expected = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    assert expand_standard_updates(model) == 1
    run = stock(model)
    assert [v.name for v in run.get_outputs()] == [f"{n}_new" for n in outputs]
    assert_same(run.run(None, feeds), expected, rtol=2e-6)


SCHEDULES = {
    "number": (optim.SGD(lr=0.5).rate, {0: 0.5, 99: 0.5}),
    "constant, warm": (optim.constant(1.0, warmup=4), {0: 0.25, 3: 1.0, 4: 1.0, 50: 1.0}),
    "linear": (optim.linear(1.0, 10, end=0.1), {0: 1.0, 5: 0.55, 10: 0.1, 50: 0.1}),
    "linear, warm": (optim.linear(2.0, 12, warmup=2), {0: 1.0, 2: 2.0, 7: 1.0, 12: 0.0}),
    "cosine": (
        optim.cosine(1.0, 8, end=0.2),
        {0: 1.0, 2: 0.6 + 0.4 * math.cos(math.pi / 4), 4: 0.6, 8: 0.2, 9: 0.2},
    ),
    "cyclic": (optim.cyclic(1.0, 2, end=0.5), {0: 0.5, 1: 0.75, 2: 1.0, 3: 0.75, 4: 0.5, 6: 1.0}),
    "step": (optim.step(1.0, 3, gamma=0.5), {0: 1.0, 2: 1.0, 3: 0.5, 5: 0.5, 6: 0.25}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name: str) -> None:
    rate, points = SCHEDULES[name]
    assert {s: rate(s) for s in points} == pytest.approx(points)


AS_IN_TORCH: dict[str, tuple[optim.Schedule, str, dict[str, Any]]] = {
    "exponential": (optim.exponential(0.5, 0.9), "ExponentialLR", {"gamma": 0.9}),
    "multistep": (
        optim.multistep(0.5, [3, 7, 7, 12], gamma=0.3),
        *("MultiStepLR", {"milestones": [3, 7, 7, 12], "gamma": 0.3}),
    ),
    "polynomial": (
        optim.polynomial(0.5, 20, power=2.0), "PolynomialLR", {"total_iters": 20, "power": 2.0}
    ),
    "restarts": (
        optim.restarts(0.5, 3, growth=2, end=0.1),
        *("CosineAnnealingWarmRestarts", {"T_0": 3, "T_mult": 2, "eta_min": 0.05}),
    ),
    "cyclic": (
        optim.cyclic(0.5, 3, gamma=0.5, end=0.2),
        "CyclicLR",
        {"base_lr": 0.1, "max_lr": 0.5, "step_size_up": 3, "mode": "triangular2",
         "cycle_momentum": False},
    ),
    "onecycle": (optim.onecycle(0.5, 24), "OneCycleLR", {"max_lr": 0.5, "total_steps": 24}),
    "cosine": (optim.cosine(0.5, 24), "CosineAnnealingLR", {"T_max": 24}),
    "step": (optim.step(0.5, 4, gamma=0.5), "StepLR", {"step_size": 4, "gamma": 0.5}),
    "custom": (
        optim.custom(0.5, lambda k: 1 / (1 + k)), "LambdaLR", {"lr_lambda": lambda k: 1 / (1 + k)}
    ),
    "sequential": (
        optim.sequential(
            [optim.exponential(0.5, 0.8), optim.step(0.5, 2), optim.cosine(0.5, 30)], [5, 9]
        ),
        *("SequentialLR", {"milestones": [5, 9], "schedulers": {
            "ExponentialLR": {"gamma": 0.8}, "StepLR": {"step_size": 2},
            "CosineAnnealingLR": {"T_max": 30}}}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_IN_TORCH)
def test_a_schedule_is_that_of_pytorch(name: str) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs, options = AS_IN_TORCH[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = torch.optim.lr_scheduler
    if theirs == "SequentialLR":
        parts = [getattr(scheduler, n)(optimizer, **o) for n, o in options["schedulers"].items()]
        options = {**options, "schedulers": parts}
    schedule = getattr(scheduler, theirs)(optimizer, **options)
    rates = []
    for _ in range(24):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [ours(i) for i in range(24)] == pytest.approx(rates, rel=1e-6)


def test_restarts_of_one_length_and_a_power_of_one() -> None:
    periods, straight = optim.restarts(1.0, 4), optim.polynomial(1.0, 10, end=0.2)
    assert [periods(i) for i in range(8)] == [periods(i % 4) for i in range(8)]
    assert periods(0) == 1.0
    assert [straight(i) for i in (0, 5, 10, 12)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


@pytest.mark.parametrize(
    "fields",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"lr": 1.0, "shape": "saw"},
        {"lr": 1.0, "every": 0},
        {"lr": "1e-3"},
        {"lr": 1.0, "warmup": 1.5},
        {"lr": 1.0, "shape": "restarts"},
        {"lr": 1.0, "shape": "multistep"},
        {"lr": 1.0, "shape": "polynomial"},
        {"lr": 1.0, "shape": "cosine", "steps": 5, "warmup": 5},
        {"lr": 1.0, "shape": "custom"},
        {"lr": 1.0, "shape": "sequential"},
        {"lr": 1.0, "shape": "sequential", "parts": [0.5]},
        {"lr": 1.0, "shape": "sequential", "parts": [optim.constant(1.0)], "milestones": [1]},
        {"lr": 1.0, "shape": "sequential", "parts": [optim.constant(1.0)] * 2, "milestones": [0]},
    ],
)
def test_schedule_refuses(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        optim.Schedule(**fields)


def test_a_pair_of_numbers_has_no_other_values() -> None:
    with pytest.raises(UsageError, match=r"betas is \(None, 0\.9\): it takes 2 numbers"):
        optim.Adam(betas=(None, 0.9))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (optim.Adam, {"betas": (0.9, 1.0)}),
        (optim.NAdam, {"eps": -1.0}),
        (optim.SGD, {"momentum": float("nan")}),
        (optim.Adafactor, {"d": 0.0}),
        (optim.Adafactor, {"beta2_decay": 0.5}),
        (optim.Adafactor, {"eps": (None, -1e-3)}),
    ],
)
def test_numbers_out_of_their_range_are_refused(make: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="it must be at"):
        make(**fields)


@pytest.mark.parametrize("name", UPDATES)
def test_json_round_trip(name: str) -> None:
    optimizer = dataclasses.replace(UPDATES[name][0], lr=optim.cosine(0.1, 50, warmup=3))
    assert optim.from_json(optim.to_json(optimizer)) == optimizer


def test_every_update_op_is_registered_without_a_gradient() -> None:
    rules = [o for o, _ in UPDATES.values() if not isinstance(o, optim.Adafactor)]
    kinds = [o.rule(decay)[0] for o in rules for decay in (0.0, 0.2)]
    assert all(isinstance(ops.OPS[FUSE, kind].grad, ops.NoGrad) for kind in kinds)
