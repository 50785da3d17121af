"""What stands before and behind a product of 4-bit weights in tiles becomes a part of it."""

from __future__ import annotations

from dataclasses import replace

from onnx_fuse.ops.activations import ACTIVATIONS
from onnx_fuse.program.call import Call, Tensor
from onnx_fuse.program.contractions import PackedProduct
from onnx_fuse.program.passes.callgraph import Calls, whole
from onnx_fuse.program.passes.pointwise_fusion import pointwise
from onnx_fuse.program.problems import Norm


def gate(calls: Calls, i: int, call: Call) -> None:
    """z = a · wᵀ, y = act(first half of z) * second half: the product writes y alone."""
    expression = call.expression
    if expression is None or len(call.reads) != 2 or len(call.writes) != 1 or expression.scalars:
        return
    names, (_, y) = [step.name for step in expression.steps], call.writes[0]
    row = ACTIVATIONS.get(names[0]) if len(names) == 2 and names[1] == "Mul" else None
    if row is None or row.numbers or expression.stores != (3,) or len(expression.steps[0].args) > 1:
        return
    (gated,) = expression.steps[0].args
    if gated > 1 or sorted(expression.steps[1].args) != [1 - gated, 2]:
        return
    halves = call.reads[gated][1], call.reads[1 - gated][1]
    z = halves[0].buffer
    if calls.readers[z] != [i, i] or len(calls.writers[z]) != 1 or z in calls.keep:
        return
    at = calls.writers[z][0]
    product = calls.now[at][0] if calls.now[at] else call
    p = product.problem
    if not isinstance(p, PackedProduct) or not p.tiled or set(p.epilogue.given) - {"bias"}:
        return
    whole_z = product.writes[0][1]
    places = [whole_z.offset, whole_z.offset + p.n // 2]
    if not (whole_z.dense and y.dense) or [t.offset for t in halves] != places:
        return
    if any(not _rows(t, p.m, p.n) for t in halves) or y.size != p.m * p.n // 2:
        return
    if {t.dtype for t in (*halves, y)} != {p.dtype} or not calls.may_write(at, i, y):
        return
    fused = p.with_epilogue(gate=True, act=row.key)
    if calls.pays((p, pointwise(call)), (fused,)):
        calls.fuse(at, i, replace(product, problem=fused, writes=(("y", y),)))


def _rows(half: Tensor, m: int, n: int) -> bool:
    """Whether it is n / 2 neighbours of each of m rows of n."""
    if half.size != m * n // 2 or half.shape[-1] != n // 2 or half.strides[-1] != 1:
        return False
    step = n
    for size, stride in zip(half.shape[-2::-1], half.strides[-2::-1], strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def normalise(calls: Calls, i: int, call: Call) -> None:
    """a = norm(x), y = a · wᵀ: the product normalises x itself, where nothing else reads a."""
    p = call.problem
    if not isinstance(p, PackedProduct) or not p.tiled or p.norm:
        return
    a = dict(call.reads)["a"]
    at, before = calls.sole_producer(i, a) or (i, call)
    norm = before.problem
    if not isinstance(norm, Norm) or norm.residual or norm.columns or norm.tail or norm.affine != 1:
        return
    reads, writes = dict(before.reads), dict(before.writes)
    x, parameters = reads["x"], [reads[name] for name in ("scale", "bias") if name in reads]
    if len(writes) > 1 or (norm.rows, norm.length) != (p.m, p.k):
        return
    if not whole(a.size, a, writes["y"]) or not x.dense or any(not t.dense for t in parameters):
        return
    if {t.dtype for t in (x, a, *parameters)} != {p.dtype} or norm.param != p.dtype:
        return
    if calls.written(at, i, x, *parameters):
        return
    both = replace(p, norm="rms" if norm.rms else "layer", epsilon=norm.epsilon)
    if not calls.pays((norm, p), (both,)):
        return
    named = zip(("gamma", "beta"), parameters, strict=False)
    others = tuple(pair for pair in call.reads if pair[0] != "a")
    fused = replace(call, kernel=f"{before.kernel}+{call.kernel}", problem=both,
                    reads=(("a", x), *others, *named))  # fmt: skip
    calls.fuse(at, i, fused, here=True)


RULES = (gate, normalise)
