"""Update ops against their formulas in float64, the standard's against its reference, schedules."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.reference
import onnx_ir
import pytest
from support import assert_same, stock

from onnx_fuse import ops
from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import Builder, text_model
from onnx_fuse.ir.constants import FUSE
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
}


def update_model(optimizer: optim.Optimizer, dtype: np.dtype[Any]) -> onnx_ir.Model:
    """(w, g, slots, lr, step) => (w1, new slots), all of SHAPE but the last two."""
    kind = onnx_ir.DataType.from_numpy(dtype)
    like = {"shape": onnx_ir.Shape(SHAPE), "type": onnx_ir.TensorType(kind)}
    w, g, *slots = (onnx_ir.Value(name=n, **like) for n in ("w", "g", *optimizer.slots))
    lr = onnx_ir.val("lr", onnx_ir.DataType.FLOAT, [])
    step = onnx_ir.val("step", onnx_ir.DataType.INT64, [])
    op = Builder()
    news = optimizer.update(op, "w", w, g, slots, lr, step)
    for name, value in zip(("w", *optimizer.slots), news, strict=True):
        value.name, value.shape, value.type = f"{name}.new", like["shape"], like["type"]
    inputs = [w, g, *slots, lr, step]
    graph = onnx_ir.Graph(
        inputs, news, nodes=op.nodes, opset_imports={"": 21, FUSE: 1}, name="update"
    )
    return onnx_ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 2e-6), (np.float64, 2e-7)])
@pytest.mark.parametrize("name", UPDATES)
def test_update_is_its_formula(name: str, dtype: type, rtol: float) -> None:
    """Over a few updates, on stock onnxruntime; hyperparameters are float32, hence rtol in f64."""
    optimizer, formula = UPDATES[name]
    run = stock(update_model(optimizer, np.dtype(dtype)))
    rng = np.random.default_rng(1)
    w = rng.normal(size=SHAPE).astype(dtype)
    slots = {k: np.full(SHAPE, v, dtype) for k, v in optimizer.slots.items()}
    expected, state = w.astype(np.float64), {k: v.astype(np.float64) for k, v in slots.items()}
    for t in range(1, STEPS + 1):
        g = rng.normal(size=SHAPE).astype(dtype)
        expected = formula(expected, g.astype(np.float64), state, t)
        scalars = {"lr": np.array(LR, np.float32), "step": np.array(t)}
        feeds = {"w": w, "g": g, **slots, **scalars}
        names = {v.name for v in run.get_inputs()}
        w, *news = run.run(None, {k: v for k, v in feeds.items() if k in names})
        slots = dict(zip(slots, news, strict=True))
    assert w.dtype == dtype
    np.testing.assert_allclose(w, expected, rtol=rtol, atol=rtol)
    for key, value in slots.items():
        np.testing.assert_allclose(value, state[key], rtol=10 * rtol, atol=rtol)


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
    "onecycle": (optim.onecycle(0.5, 24), "OneCycleLR", {"max_lr": 0.5, "total_steps": 24}),
    "cosine": (optim.cosine(0.5, 24), "CosineAnnealingLR", {"T_max": 24}),
    "step": (optim.step(0.5, 4, gamma=0.5), "StepLR", {"step_size": 4, "gamma": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_IN_TORCH)
def test_a_schedule_is_that_of_pytorch(name: str) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs, options = AS_IN_TORCH[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = getattr(torch.optim.lr_scheduler, theirs)(optimizer, **options)
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
    ],
)
def test_schedule_refuses(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        optim.Schedule(**fields)


@pytest.mark.parametrize("name", UPDATES)
def test_json_round_trip(name: str) -> None:
    optimizer = dataclasses.replace(UPDATES[name][0], lr=optim.cosine(0.1, 50, warmup=3))
    assert optim.from_json(optim.to_json(optimizer)) == optimizer


def test_every_update_op_is_registered_without_a_gradient() -> None:
    kinds = [o.rule(decay)[0] for o, _ in UPDATES.values() for decay in (0.0, 0.2)]
    assert all(isinstance(ops.OPS[FUSE, kind].grad, ops.NoGrad) for kind in kinds)
