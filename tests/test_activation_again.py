"""An activation that a training step makes again in its backward instead of keeping it."""

import pytest
from lowering import lowered

from onnx_fuse.ir.build import text_model
from onnx_fuse.program.call import Program, Tensor
from onnx_fuse.program.passes import activation_again
from onnx_fuse.program.problem import GemmProblem

STEP = """agraph (float16[4160,768] x, float16[768,3072] w, float16[3072] c, float16[3072,768] v,
    float16[4160,768] dy) => (float16[4160,768] y, float16[4160,768] dx, float16[768,3072] dw,
    float16[3072,768] dv OUTPUTS)
{ h, z = onnx_fuse.GemmSilu_z (x, w, c)  y = MatMul (h, v)
  dh = Gemm <transB = 1> (dy, v)  dx, dw, dc = onnx_fuse.GemmSiluGrad (dh, x, w, z)
  ht = Transpose <perm = [1, 0]> (h)  dv = MatMul (ht, dy) }"""
"""y = silu(x w + c) v and its gradients."""


def step(outputs: str = "") -> Program:
    model = text_model(STEP.replace("OUTPUTS", outputs))
    return lowered(model)


def made_again(program: Program) -> list[tuple[GemmProblem, Tensor]]:
    """The products that make an activation a second time, each with where it goes."""
    problems = ((call, call.problem) for call in program.calls)
    found = [(c, p) for c, p in problems if isinstance(p, GemmProblem) and p.epilogue.save_act]
    return [(p, dict(call.writes)["z"]) for call, p in found]


def test_the_gradient_of_the_weights_behind_it_reads_the_second() -> None:
    program = step()
    ((problem, again),) = made_again(program)
    assert (problem.epilogue.dact, problem.epilogue.act) == (True, "silu")
    (reader,) = (c for c in program.calls if again.buffer in {t.buffer for _, t in c.reads})
    dv = dict(program.outputs)["dv"]
    assert isinstance(dv, Tensor)
    assert dict(reader.writes)["y"].buffer == dv.buffer
    first, *_ = program.calls
    assert dict(first.writes)["y"].buffer not in {t.buffer for _, t in reader.reads}


def test_a_small_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_again, "LEAST", 1 << 30)
    assert not made_again(step())


def test_one_that_is_asked_for_is_kept() -> None:
    assert not made_again(step(", float16[4160,3072] h"))
