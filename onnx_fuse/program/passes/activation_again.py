"""An activation that the backward makes a second time, from its input, instead of keeping it.

h = act(z) is kept for the gradient of the weights behind it, and z for dz = dh act'(z). The product
that stores dz reads z, and stores act(z) beside it; so h need not be kept until then. This takes
less memory by as much as h is, for one more store. The second h is of the z that was stored: it may
differ from the first, of the product's own sum, by that rounding.
"""

from __future__ import annotations

from dataclasses import replace

from onnx_fuse.program.call import Call
from onnx_fuse.program.passes.callgraph import Calls, rename_buffers, whole
from onnx_fuse.program.problem import GemmProblem
from onnx_fuse.program.size import coarse

LEAST = 16 << 20
"""Bytes from which an activation is not kept."""


def make_activation_again(calls: Calls, at: int, product: Call) -> None:
    """Let a product store act(c) beside its result times act'(c)."""
    problem = product.problem
    if not isinstance(problem, GemmProblem) or problem.op != "Gemm" or not problem.epilogue.dact:
        return
    c, y = dict(product.reads)["c"], dict(product.writes)["y"]
    source = calls.producer(c)
    first = None if source is None else source[1]
    if source is None or first is None or not isinstance(first.problem, GemmProblem):
        return
    forward, behind, results = first.problem.epilogue, problem.epilogue, dict(first.writes)
    if not forward.save_z or (forward.act, forward.act_alpha) != (behind.act, behind.act_alpha):
        return
    z, h = results["z"], results["y"]
    later = sorted({j for j in calls.readers[h.buffer] if j > at})
    if not later or h.buffer in calls.keep or calls.writers[h.buffer] != [source[0]]:
        return
    if not whole(y.size, z, h, c, y) or len({t.dtype for t in (z, h, c, y)}) > 1:
        return
    saving = problem.with_epilogue(save_act=True)
    if coarse(h.nbytes) < LEAST or not calls.serves(saving):
        return
    again = calls.ctx.scratch(h.dtype, y.shape)
    calls.now[at] = (replace(product, problem=saving, writes=(*product.writes, ("z", again))),)
    same = {h.buffer: again.buffer}
    for j in later:
        calls.now[j] = tuple(rename_buffers(call, same) for call in calls.now[j])
