"""Optimizer updates of one kind: one body is lowered and contracted, others repeat its calls."""

from pathlib import Path

import numpy as np
import pytest
from lowering import program_of, weights_of
from support import answers, drawn, normal, stock, with_weights

from onnx_fuse.ir.build import text_model
from onnx_fuse.lower.updates import Updates
from onnx_fuse.program.interpret import interpret
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model
from onnx_fuse.training.trainer import Trainer

STEP = """agraph (float[6,8] w0, float[6,8] w1, float[5] w2, float[1] w3, float[6,8] g, float[5] h,
    float[1] k, float[6,8] m0, float[6,8] m1, float[5] m2, float[1] m3, float[6,8] w4,
    float[6,8] m4, float[6,8] w5, float[6,8] m5, float[2] rates) =>
    (float[6,8] a0, float[6,8] a1, float[5] a2, float[1] a3, float[6,8] a4, float[6,8] a5,
     float[6,8] b0, float[6,8] b1, float[5] b2, float[1] b3, float[6,8] b4, float[6,8] b5,
     float[6,8] again) <int64 zero = {0}, int64 one = {1}>
{ lr = Gather (rates, zero) other = Gather (rates, one)
  a0, b0 = onnx_fuse.LionUpdate <weight_decay: float = 0.1> (w0, g, m0, lr)
  a1, b1 = onnx_fuse.LionUpdate <weight_decay: float = 0.1> (w1, g, m1, lr)
  a2, b2 = onnx_fuse.LionUpdate <weight_decay: float = 0.1> (w2, h, m2, lr)
  a3, b3 = onnx_fuse.LionUpdate <weight_decay: float = 0.1> (w3, k, m3, lr)
  a4, b4 = onnx_fuse.LionUpdate <weight_decay: float = 0.1> (w4, g, m4, other)
  a5, b5 = onnx_fuse.LionUpdate <weight_decay: float = 0.1> (w5, g, m5, lr)
  again, unused = onnx_fuse.LionUpdate <weight_decay: float = 0.1> (w1, w1, m1, lr) }"""


def lion(w: np.ndarray, g: np.ndarray, m: np.ndarray, lr: float) -> tuple[np.ndarray, np.ndarray]:
    beta1, beta2 = optim.Lion().betas
    moved = w * (1 - lr * 0.1) - lr * np.sign(beta1 * m + (1 - beta1) * g)
    return moved, beta2 * m + (1 - beta2) * g


def test_each_update_is_of_its_own_operands(monkeypatch) -> None:
    repeated = []
    again = Updates.again
    monkeypatch.setattr(
        Updates, "again", lambda *given: repeated.append(again(*given)) or repeated[-1]
    )
    model = text_model(STEP)
    feeds = drawn(model) | {"rates": np.array([0.01, 0.02], np.float32)}
    program = program_of(model, feeds)
    # also where numbers that lie elsewhere were read meanwhile, as those of several adapters are
    repeats = [False, True, False, False, False, True, False]
    assert [found is not None for found in repeated] == repeats
    found = interpret(program, feeds, {})
    for i, g in enumerate("gghkgg"):
        want = lion(feeds[f"w{i}"], feeds[g], feeds[f"m{i}"], 0.02 if i == 4 else 0.01)
        for name, value in zip("ab", want, strict=True):
            np.testing.assert_allclose(found[f"{name}{i}"], value, rtol=1e-5, atol=1e-6)
    # one tensor that is two operands lies otherwise
    want, _ = lion(feeds["w1"], feeds["w1"], feeds["m1"], 0.01)
    np.testing.assert_allclose(found["again"], want, rtol=1e-5, atol=1e-6)


NET = """net (float[B,64] x, float[64,128] w, float[128] b, float[128,128] v, float[8,128] u) =>
    (float[B,8] y) { p = MatMul (x, w) q = Add (p, b) r = Tanh (q) s = MatMul (r, v) t = Tanh (s)
      y = Gemm <transB = 1> (t, u) }"""
OPTIMIZERS = {
    "one scalar state": optim.NAdam(groups=(optim.Group(("v",), start=3),)),
    "matrices and others": optim.Muon(adamw=("u",)),
    "8 bits": optim.AdamW8bit(),
    "rows and columns": optim.Adafactor(),
    "three states": optim.RMSprop(centered=True, momentum=0.9, eps=0.1),
}
LAUNCHES = {"one scalar state": 20, "matrices and others": 60, "8 bits": 30, "rows and columns": 58}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_step_of_each_optimizer_is_a_program(case: str) -> None:
    """Its launches give what onnxruntime gives, from the third update on."""
    rng, net = np.random.default_rng(3), text_model(NET)
    with_weights(net, lambda v: 0.1 * rng.standard_normal(v.shape.numpy(), np.float32))
    model, spec = training_model(net, loss="mse", optimizer=OPTIMIZERS[case], level=2)
    feeds = drawn(model, 4)
    feeds |= {s.name: np.array(s.initial) for s in spec.states}
    feeds |= {spec.lr: np.array(0.01, np.float32)} | ({spec.step: np.array(4)} if spec.step else {})
    run = stock(model, optimized=True)
    for _ in range(2):
        found = answers(run, feeds)
        feeds |= {state: found[new] for new, state in spec.successors.items()}
    program = program_of(model, feeds)
    assert (program.fallbacks, program.stages) == ((), ())
    assert len(program.calls) <= LAUNCHES.get(case, 16)
    expected, found = answers(run, feeds), interpret(program, feeds, weights_of(model))
    for name, want in expected.items():
        near = 1 if want.dtype.itemsize == 1 else 1e-5  # a code between two is either
        np.testing.assert_allclose(found[name].astype("d"), want, rtol=1e-4, atol=near)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_states_of_each_optimizer_go_on_to_the_same_bits(case: str, tmp_path: Path) -> None:
    rng, net = np.random.default_rng(3), text_model(NET)
    with_weights(net, lambda v: 0.1 * rng.standard_normal(v.shape.numpy(), np.float32))
    shapes = {"x": (4, 64), "labels": (4, 8)}
    first = Trainer(net, loss="mse", optimizer=OPTIMIZERS[case], accumulate=2, ema=0.9)
    for seed in range(5):
        first.step(normal(shapes, seed=seed))
    first.checkpoint(tmp_path)
    second = Trainer.resume(tmp_path, net)
    losses = [[t.step(normal(shapes, seed=seed)) for seed in range(5, 9)] for t in (first, second)]
    assert losses[0] == losses[1]
    states = second.state()
    assert all(a.tobytes() == states[name].tobytes() for name, a in first.state().items())
