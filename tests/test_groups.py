"""Groups of weights, running averages, schedules that change, and what a resumed run refuses."""

import itertools
from pathlib import Path
from typing import Any

import encoder
import gpt
import numpy as np
import pytest
from lowering import program_of, weights_of
from support import assert_near, normal

from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.interpret import interpret
from onnx_fuse.runtime.weights import zeros
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model
from onnx_fuse.training.trainer import Trainer

Array = np.ndarray[Any, Any]
MODEL = """net (float[batch, 3] x) => (float[batch, 2] y)
    <float[3, 4] w1 = {FIRST}, float[4] b1 = {0, 0.1, 0, 0}, float[4, 2] w2 = {SECOND}>
    { p = MatMul (x, w1)  h = Add (p, b1)
    y = MatMul (h, w2) }""".replace("FIRST", ", ".join(str(i / 12) for i in range(12))).replace(
    "SECOND", ", ".join(str(i / 8) for i in range(8))
)


def batch(seed: int) -> dict[str, Array]:
    return normal({"x": (8, 3), "labels": (8, 2)}, seed)


def gradients(w: dict[str, Array], feeds: dict[str, Array]) -> dict[str, Array]:
    """Of mean((y - t)²), in float64."""
    x, t = (feeds[k].astype(np.float64) for k in ("x", "labels"))
    h = x @ w["w1"] + w["b1"]
    d = 2 * (h @ w["w2"] - t) / t.size
    dh = d @ w["w2"].T
    return {"w1": x.T @ dh, "b1": dh.sum(0), "w2": h.T @ d}


def adamw(w: Array, g: Array, state: list[Array], t: int, lr: float, decay: float) -> Array:
    state[0] = 0.9 * state[0] + 0.1 * g
    state[1] = 0.999 * state[1] + 0.001 * g**2
    m, v = state[0] / (1 - 0.9**t), state[1] / (1 - 0.999**t)
    return w * (1 - lr * decay) - lr * m / (np.sqrt(v) + 1e-8)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_groups_and_averages_are_their_formulas(accumulate: int, precision: str) -> None:
    """AdamW with a tenth of the rate, a decay of its own, and a start after two updates.

    The norm that clips is that of the weights that train already. In fp16 the products of the
    portable backend are float32, so the difference is that of 16-bit values.
    """
    groups = (
        optim.Group("b*", lr=0.005, weight_decay=0.0),
        optim.Group("w2", weight_decay=0.5, start=2),
    )
    trainer = Trainer(
        text_model(MODEL),
        loss="mse",
        optimizer=optim.AdamW(lr=optim.linear(0.05, 20), weight_decay=0.1, groups=groups),
        clip_norm=0.2,
        accumulate=accumulate,
        precision=precision,
        ema=0.75,
    )
    factors = {"w1": (1.0, 0.1, 0), "b1": (0.1, 0.0, 0), "w2": (1.0, 0.5, 2)}
    w = {k: a.astype(np.float64) for k, a in trainer.weights().items()}
    mean = dict(w)
    slots = {k: [np.zeros_like(a), np.zeros_like(a)] for k, a in w.items()}
    for update in range(5):
        total = {k: np.zeros_like(a) for k, a in w.items()}
        for i in range(accumulate):
            feeds = batch(10 * update + i)
            trainer.step(feeds)
            for k, g in gradients(w, feeds).items():
                total[k] += g / accumulate
        begun = [k for k in w if update >= factors[k][2]]
        norm = np.sqrt(sum((total[k] ** 2).sum() for k in begun))
        for k in begun:
            scale, decay, start = factors[k]
            g = total[k] * min(1.0, 0.2 / (norm + 1e-6))
            rate = 0.05 * (1 - update / 20) * scale
            w[k] = adamw(w[k], g, slots[k], update - start + 1, rate, decay)
        mean = {k: 0.75 * mean[k] + 0.25 * w[k] for k in w}
        tolerance = 2e-6 if precision == "fp32" else 2e-3
        for found, expected in ((trainer.weights(), w), (trainer.weights(ema=True), mean)):
            for k in w:
                np.testing.assert_allclose(
                    found[k], expected[k], rtol=10 * tolerance, atol=tolerance
                )


def test_averages_are_evaluated_and_saved(tmp_path: Path) -> None:
    trainer = Trainer(text_model(MODEL), loss="mse", optimizer=optim.SGD(lr=0.1), ema=0.5)
    for i in range(3):
        trainer.step(batch(i))
    trainer.save(tmp_path / "average.onnx", ema=True)
    saved = Trainer(tmp_path / "average.onnx", loss="mse")
    expected = saved.evaluate(batch(9)).loss
    assert trainer.evaluate(batch(9), ema=True).loss == pytest.approx(expected, rel=1e-6)
    assert trainer.evaluate(batch(9)).loss != pytest.approx(expected, rel=1e-3)
    data = batch(9)
    history = trainer.fit(data, validation=data, batch_size=8, ema=True)
    assert history.metrics[0]["validation_loss"] == trainer.evaluate(data, ema=True).loss
    plain = Trainer(text_model(MODEL), loss="mse")
    for use in (plain.weights, lambda ema: plain.evaluate(data, ema=ema)):
        with pytest.raises(UsageError, match="keeps no averages of the weights"):
            use(ema=True)


def test_a_step_that_overflows_moves_no_average() -> None:
    """Float16: the scale is halved, and nothing else is changed."""
    trainer = Trainer(text_model(MODEL), loss="mse", precision="fp16", ema=0.5, loss_scale=2.0**127)
    before = trainer.state()
    feeds = batch(0)
    trainer.step({**feeds, "labels": feeds["labels"] * 10000})
    changed = {k for k, a in trainer.state().items() if not np.array_equal(a, before[k])}
    assert changed == {"loss_scale"}


@pytest.mark.parametrize("level", [0, 2])
def test_groups_of_merged_products_stay_apart(level: int) -> None:
    """Query, key and value are one product where their settings are equal, and three elsewhere."""
    model = gpt.build(gpt.Config())
    names = [n for n in Trainer(model, loss="cross_entropy").weights() if n.endswith("weight")]
    groups = [optim.Group(names[0], frozen=True)] + [
        optim.Group(name, scale=1 + i / 10) for i, name in enumerate(names[1:])
    ]
    ids = np.random.default_rng(0).integers(0, 256, (2, 9))
    feeds = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    moved = []
    for chosen in (groups, ()):
        trainer = Trainer(
            model, loss="cross_entropy", optimizer=optim.SGD(lr=0.1, groups=chosen), level=level
        )
        before = Trainer(model, loss="cross_entropy").weights()
        trainer.step(feeds)
        moved.append({k: a - before[k] for k, a in trainer.weights().items()})
    assert names[0] not in moved[0]
    for i, name in enumerate(names[1:]):
        expected = moved[1][name] * (1 + i / 10)
        np.testing.assert_allclose(moved[0][name], expected, rtol=2e-2, atol=2e-6, err_msg=name)


def test_the_first_group_counts() -> None:
    groups = (optim.Group("w1"), optim.Group("*", frozen=True))
    trainer = Trainer(text_model(MODEL), loss="mse", optimizer=optim.SGD(groups=groups))
    trainer.step(batch(0))
    assert set(trainer.weights()) == {"w1"}


def test_layer_decay_by_names() -> None:
    """Two layers: what is before them has two factors more than the last one, the head none."""
    model = encoder.build(encoder.SIZES["tiny"])
    names = list(Trainer(model, loss="mse").weights())
    groups = optim.layer_decay(model, 0.5)
    optimizer = optim.AdamW(lr=0.1, groups=groups)
    scales = {name: optimizer.setting(name)[0] for name in names}
    layers = {name: int(name.split(".")[1]) for name in names if name.split(".")[1].isdigit()}
    last = max(layers.values())
    assert last > 0
    for name, layer in layers.items():
        assert scales[name] == 0.5 ** (last + 1 - layer)
    begun = False
    for name in names:
        begun |= name in layers
        if name not in layers:
            assert scales[name] == (1.0 if begun else 0.5 ** (last + 2)), name
    with pytest.raises(UsageError, match="neither weights nor nodes have names with the number"):
        optim.layer_decay(text_model(MODEL), 0.5)


REFUSED: dict[str, tuple[Any, str]] = {
    "no match": (lambda: [optim.Group("head*")], r"'head\*' matches no weight"),
    "rate": (lambda: [optim.Group("w1", lr=-1.0)], "the lr of a group is -1.0"),
    "start": (lambda: [optim.Group("w1", start=-1)], "the start of a group is -1"),
    "all": (lambda: [optim.Group("*", frozen=True)], "every weight of the model is frozen"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_groups(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(UsageError, match=words):
        Trainer(text_model(MODEL), loss="mse", optimizer=optim.SGD(groups=tuple(make())))


def test_the_rate_of_a_live_trainer() -> None:
    """What is set counts from the next update on, for groups too."""
    groups = (optim.Group("b1", lr=0.02),)
    trainer = Trainer(
        text_model(MODEL), loss="mse", optimizer=optim.SGD(lr=optim.cosine(0.1, 9), groups=groups)
    )
    assert trainer.lr == 0.1
    trainer.step(batch(0))
    assert trainer.lr < 0.1
    trainer.lr = 0.5
    before = {k: a.astype(np.float64) for k, a in trainer.weights().items()}
    trainer.step(batch(1))
    g = gradients(before, batch(1))
    assert trainer.lr == 0.5
    for name, factor in (("w1", 1.0), ("b1", 0.2)):
        moved = before[name] - trainer.weights()[name]
        np.testing.assert_allclose(moved, 0.5 * factor * g[name], rtol=1e-3, atol=1e-6)
    history = trainer.fit(batch(2), batch_size=4)
    assert history.lr == [0.5, 0.5]


def build(**options: Any) -> Trainer:
    optimizer = options.pop("optimizer", optim.AdamW(lr=optim.cosine(0.1, 10)))
    return Trainer(text_model(MODEL), loss="mse", optimizer=optimizer, **options)


def test_a_resumed_run_may_last_longer(tmp_path: Path) -> None:
    """Only the number of steps of its schedule is another; any other change is named."""
    build().checkpoint(tmp_path)
    longer = build(optimizer=optim.AdamW(lr=optim.cosine(0.1, 20)))
    longer.restore(tmp_path)
    assert longer.lr == 0.1
    resumed = Trainer.resume(tmp_path, text_model(MODEL), schedule=optim.constant(0.3))
    assert resumed.lr == 0.3


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, "with seed 0, not 1: give the same, or another folder"),
    "clip": ({"clip_norm": 1.0}, "with clip_norm None, not 1.0"),
    "ema": ({"ema": 0.9}, "with ema None, not 0.9"),
    "optimizer": ({"optimizer": optim.Lion(lr=0.1)}, "with optimizer.name adamw, not lion"),
    "rate": (
        {"optimizer": optim.AdamW(lr=optim.cosine(0.2, 10))},
        r"optimizer.lr.lr 0.1, not 0.2: .*; Trainer.resume takes another schedule",
    ),
    "decay": (
        {"optimizer": optim.AdamW(lr=optim.cosine(0.1, 10), weight_decay=0.3)},
        "with optimizer.weight_decay 0.01, not 0.3",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_message_names_what_differs(case: str, tmp_path: Path) -> None:
    options, words = CHANGES[case]
    build().checkpoint(tmp_path)
    with pytest.raises(UsageError, match=words):
        build(**options).restore(tmp_path)


def test_all_of_it_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    groups = (optim.Group("w2", start=2, weight_decay=0.0), optim.Group("b*", scale=0.5))
    runs = [
        build(optimizer=optim.Adam(lr=optim.linear(0.1, 9), groups=groups), ema=0.9)
        for _ in range(2)
    ]
    for run, steps in zip(runs, (6, 3), strict=True):
        for i in range(steps):
            run.step(batch(i))
    runs[1].checkpoint(tmp_path)
    resumed = Trainer.resume(tmp_path, text_model(MODEL))
    for i in range(3, 6):
        resumed.step(batch(i))
    expected = runs[0].state()
    for name, array in resumed.state().items():
        assert array.tobytes() == expected[name].tobytes(), name
    assert set(itertools.chain(expected)) == set(resumed.state())


def test_the_step_on_a_gpu_is_the_same_program() -> None:
    """The Program that CUDA would run, by NumPy: no part of it is a host call."""
    groups = (optim.Group("w2", start=2), optim.Group("b*", scale=0.1, weight_decay=0.0))
    options = {"loss": "mse", "optimizer": optim.AdamW(lr=0.05, groups=groups), "ema": 0.75}
    graph, spec = training_model(text_model(MODEL), **options)
    successors = {s.next: s.name for s in spec.states}
    states = {s.name: np.asarray(s.initial) for s in spec.states}
    trainer = Trainer(text_model(MODEL), **options)
    for i in range(4):
        trainer.step(batch(i))
        scalars = {spec.lr: np.array(0.05, np.float32), spec.step: np.array(i + 1)}
        arrays = {**batch(i), **scalars, **states}
        program = program_of(graph, arrays, state=successors)
        found = interpret(program, arrays, weights_of(graph))
        states = {name: found[after] for after, name in successors.items()}
        assert not [call for call in program.calls if call.host]
    assert_near(states, trainer.state(), rtol=1e-5, atol=1e-6)


def test_first_states_of_an_optimizer_take_no_memory_on_the_host() -> None:
    """They are one number, broadcast; zeros are not uploaded either."""
    _, spec = training_model(text_model(MODEL), loss="mse", optimizer=optim.AdamW())
    slots = [s.initial for s in spec.states if s.kind == "slot"]
    assert {a.shape for a in slots} == {(3, 4), (4,), (4, 2)}
    assert all(zeros(a) for a in slots)
    numbers = (np.float32(-0.0), np.float32(1e-40), np.float64(np.nan))
    assert not any(zeros(np.broadcast_to(x, (2, 3))) for x in numbers)
    assert not zeros(np.zeros((2, 3)))
    assert not zeros(np.array(0.0))
