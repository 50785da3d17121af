"""Optimizer updates of one kind: one body is lowered and contracted, others repeat its calls."""

import numpy as np
from lowering import program_of
from support import drawn

from onnx_fuse.ir.build import text_model
from onnx_fuse.lower.updates import Updates
from onnx_fuse.program.interpret import interpret
from onnx_fuse.training import optim

STEP = """agraph (float[6,8] w0, float[6,8] w1, float[5] w2, float[1] w3, float[6,8] g, float[5] h,
    float[1] k, float[6,8] m0, float[6,8] m1, float[5] m2, float[1] m3, float lr) =>
    (float[6,8] a0, float[6,8] a1, float[5] a2, float[1] a3,
     float[6,8] b0, float[6,8] b1, float[5] b2, float[1] b3, float[6,8] again)
{ a0, b0 = onnx_fuse.LionUpdate <weight_decay: float = 0.1> (w0, g, m0, lr)
  a1, b1 = onnx_fuse.LionUpdate <weight_decay: float = 0.1> (w1, g, m1, lr)
  a2, b2 = onnx_fuse.LionUpdate <weight_decay: float = 0.1> (w2, h, m2, lr)
  a3, b3 = onnx_fuse.LionUpdate <weight_decay: float = 0.1> (w3, k, m3, lr)
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
    feeds = drawn(model) | {"lr": np.array(0.01, np.float32)}
    program = program_of(model, feeds)
    assert [found is not None for found in repeated] == [False, True, False, False, False]
    found = interpret(program, feeds, {})
    for i, g in enumerate("gghk"):
        want = lion(feeds[f"w{i}"], feeds[g], feeds[f"m{i}"], 0.01)
        for name, value in zip("ab", want, strict=True):
            np.testing.assert_allclose(found[f"{name}{i}"], value, rtol=1e-5, atol=1e-6)
    # one tensor that is two operands lies otherwise
    want, _ = lion(feeds["w1"], feeds["w1"], feeds["m1"], 0.01)
    np.testing.assert_allclose(found["again"], want, rtol=1e-5, atol=1e-6)
