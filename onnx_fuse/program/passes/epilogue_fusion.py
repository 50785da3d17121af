"""Fuse the calls before and after a kernel into it, by one rule for each kind.

A rule replaces a call and the call that computes its input by one, if a kernel serves it. Unless
that is always a gain, the cost models must predict that it is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnx_fuse.cuda.pointwise import FLOATS
from onnx_fuse.ops.activations import ACTIVATIONS as TABLE
from onnx_fuse.program.call import Call, Tensor, dense_strides
from onnx_fuse.program.contractions import Attention, PackedProduct
from onnx_fuse.program.data_movement import ScatterND
from onnx_fuse.program.epilogue import NONE
from onnx_fuse.program.expression import Tail
from onnx_fuse.program.passes.callgraph import (
    LARGE,
    Calls,
    operands_of,
    rename_buffer,
    rename_buffers,
    steps_of,
    whole,
)
from onnx_fuse.program.passes.column_sums import adds_up
from onnx_fuse.program.passes.pointwise_fusion import join, pointwise, without_stores
from onnx_fuse.program.problem import ITEMSIZE, AnyProblem, Contraction, GemmProblem, Value
from onnx_fuse.program.problems import IntegerConv, Norm, SlopeProduct
from onnx_fuse.program.size import any_batch

_SUMS = ("beta", "dact", "gate", "residual", "save_z")
BARE = ("act", *_SUMS)
"""What leaves no room for an operand in the epilogue of a Gemm."""
TAIL_TYPES = {*FLOATS, "int8", "uint8", "float8_e4m3fn"}
"""What a tail behind an IntegerConv reads and stores, and one behind a Norm stores."""
_BIAS = {"Gemm": "col1", "MatMulNBits": "bias"}
"""Product -> its operand that is a bias of columns."""


def _product(
    source: tuple[int, Call] | None, without: tuple[str, ...], ops: tuple[str, ...] = ("Gemm",)
) -> tuple[int, Call, Contraction] | None:
    """The product of one result there, if it has none of these attributes."""
    problem = source[1].problem if source is not None else None
    if source is None or not isinstance(problem, Contraction) or len(source[1].writes) != 1:
        return None
    if problem.op not in ops:
        return None
    return None if problem.epilogue.among(*without) else (*source, problem)


def _row(tensor: Tensor) -> bool:
    """Whether it is one row, broadcast over the axes before the last."""
    axes = [s for d, s in zip(tensor.shape[:-1], tensor.strides[:-1], strict=True) if d > 1]
    return bool(axes) and not any(axes) and tensor.strides[-1] == 1


def _column(tensor: Tensor) -> bool:
    """Whether it is one number for each row, broadcast over the last axis."""
    *axes, (size, last) = zip(tensor.shape, tensor.strides, strict=True)
    lead = zip(axes, dense_strides(tensor.shape[:-1]), strict=True)
    return size > 1 and not last and all(stride == d or n == 1 for (n, stride), d in lead)


def add(calls: Calls, i: int, call: Call) -> None:
    """y = a · b, s = y + r becomes one Gemm with the residual or bias r, if nothing else reads y.

    A bias is a row, or a column where y is one matrix and all its rows have numbers of their own.
    Where s is the sum of a SkipLayerNorm, that becomes a LayerNormalization of it.
    """
    norm = isinstance(call.problem, Norm) and call.problem.residual
    if not (norm or operands_of(call, "Add")):
        return
    if not all(t.dense or _row(t) or _column(t) for _, t in (*call.reads, *call.writes)):
        return
    reads, total = dict(call.reads), dict(call.writes).get("sum", call.writes[0][1])
    first, second = (reads["x"], reads["residual"]) if norm else reads.values()
    for y, r in ((first, second), (second, first)):
        source = _product(calls.sole_producer(i, y), BARE, ("Gemm", "MatMulNBits"))
        if source is None or not y.dense or r.offset or y.size != total.size:
            continue
        at, product, problem = source
        bias, column = not r.dense, _column(r)
        if column and (problem.op != "Gemm" or problem.batch):
            continue
        if bias and y.shape[-1] != problem.n:  # a view of the product in other rows
            continue
        if isinstance(problem, PackedProduct) and not (bias or problem.tiled):
            continue  # the kernel of weights in rows takes no residual
        if {y.dtype, r.dtype, total.dtype} != {problem.out}:
            continue
        if bias and (norm or problem.epilogue.bias or r.dtype not in FLOATS):
            continue
        kind, name = ("bias", _BIAS[problem.op]) if bias else ("residual", "c")
        if column:
            kind, name = "row_bias", "row0"
            r = replace(r, shape=(problem.m,), strides=(1,))
        elif bias:  # the row itself, once
            r = _last(r)
        fused = replace(
            product,
            problem=problem.with_epilogue(**{kind: True}),
            reads=(*product.reads, (name, r)),
            writes=(("y", total),),
        )
        if calls.fuse(at, i, fused, *([_norm_of(call, total)] if norm else []), here=True):
            return


def scale(calls: Calls, i: int, call: Call) -> None:
    """z = act(a · b + c), y = z g for a row g: the product writes y if nothing else reads z.

    Layer scale, where it is not folded into the weights. A residual may follow.
    """
    if not (tensors := operands_of(call, "Mul")):
        return
    first, second, y = tensors
    for z, g in ((first, second), (second, first)):
        source = _product(calls.sole_producer(i, z), (*_SUMS, "layernorm", "layer_scale"))
        if source is None or not (z.dense and y.dense and _row(g)) or g.offset:
            continue
        at, product, problem = source
        if g.shape[-1] != problem.n:  # a view of the product in other rows
            continue
        out = product.writes[0][1]
        same = out.dense and (out.offset, out.size) == (z.offset, z.size) and y.size == z.size
        types = {t.dtype for t in (out, z, g, y)} | {problem.dtype, problem.out}
        if not same or not problem.epilogue.bias or problem.epilogue.bias_dtype or len(types) > 1:
            continue
        if any(w >= at for w in calls.writers[g.buffer]) or not calls.may_write(at, i, y):
            continue
        g = _last(g)
        reads = (*product.reads, ("col0", g))
        fused = replace(product, problem=problem.with_epilogue(layer_scale=True), reads=reads)
        if calls.fuse(at, i, replace(fused, writes=(("y", y),))):
            return


def _norm_of(call: Call, total: Tensor) -> Call:
    """The LayerNormalization that is left of a SkipLayerNorm whose sum another call computes."""
    assert isinstance(call.problem, Norm)
    reads = {"x": total} | {n: t for n, t in call.reads if n not in ("x", "residual")}
    return replace(
        call,
        kernel="RMSNormalization" if call.problem.rms else "LayerNormalization",
        problem=replace(call.problem, residual=False),
        reads=tuple(reads.items()),
        writes=tuple((n, t) for n, t in call.writes if n != "sum"),
        bytes=sum(t.nbytes for _, t in (*reads.items(), *call.writes)) - total.nbytes,
    )


def activate(calls: Calls, i: int, call: Call) -> None:
    """z = a · b + c, y = act(z) becomes one Gemm, which stores z too where something reads it.

    Where z has a residual that comes before the activation as the epilogue's c, if that is faster:
    not every kernel has it.
    """
    act = _activation(call)
    if act is None:
        return
    (_, z), (_, y) = call.reads[0], call.writes[0]
    source = _product(calls.producer(z), ("act", "dact", "save_z", "layer_scale"))
    if source is None or len(calls.writers[y.buffer]) != 1:
        return
    at, product, plain = source
    if plain.epilogue.residual and (plain.epilogue.beta or plain.epilogue.residual is not True):
        return
    problem, out = _summed_first(plain), product.writes[0][1]
    # equal but for the strides of axes of one
    same = (out.offset, out.dtype, out.size) == (z.offset, z.dtype, z.size) and out.dense
    if not (same and y.dense and z.dense) or y.dtype != problem.out:
        return
    problem = problem.with_epilogue(**act)
    if z.buffer in calls.keep or calls.readers[z.buffer] != [i]:
        problem = problem.with_epilogue(save_z=True)
    residual = problem.epilogue.beta and plain.epilogue.residual
    if residual and not calls.pays((plain, pointwise(call)), (problem,)):
        return
    writes = (("y", y), ("z", z))[: 1 + bool(problem.epilogue.save_z)]
    calls.fuse(at, i, replace(product, problem=problem, writes=writes))


def _activation(call: Call) -> dict[str, Value] | None:
    """The epilogue's attributes for a pointwise call that is one activation of one tensor."""
    expression = call.expression
    if expression is None or len(expression.steps) != 1 or len(call.reads) != 1:
        return None
    row = TABLE.get(expression.steps[0].name)
    if row is None or len(expression.scalars) != len(row.numbers):
        return None
    numbers = dict(zip((name for name, _ in row.numbers), expression.scalars, strict=True))
    if any(numbers[name][1] != value for name, value in row.fixed if name in numbers):
        return None
    act: dict[str, Value] = {"act": row.key}
    return act | {"act_alpha": numbers["alpha"][1]} if row.attributes else act


def _summed_first(problem: Contraction) -> Contraction:
    """The problem with its residual as Gemm's C, which is added before the activation."""
    if not problem.epilogue.residual:
        return problem
    return problem.with_epilogue(residual=False, beta=1.0)


def cast(calls: Calls, i: int, call: Call) -> None:
    """z = a · b in 16 bits, y = float(z): the product writes y if nothing else reads z.

    Only small ones: a large product's wider stores take as long as the cast or longer.
    """
    if steps_of(call) != ["Cast"] or len(call.reads) != 1 or len(call.writes) != 1:
        return
    (_, z), (_, y) = call.reads[0], call.writes[0]
    at, product = calls.sole_producer(i, z) or (i, call)
    problem = product.problem
    if not isinstance(problem, GemmProblem) or problem.op not in ("Gemm", "LayerNormGemm"):
        return
    if not calls.may_write(at, i, y) or problem.epilogue.among("accumulate", *_SUMS):
        return
    if any_batch(z.size) >= LARGE or not whole(z.size, z, y) or y.dtype != "float32":
        return
    if dict(product.writes)["y"].size == z.size:
        writes = tuple((n, y if n == "y" else t) for n, t in product.writes)
        wider = problem.replace(out_dtype=y.dtype)
        calls.fuse(at, i, replace(product, problem=wider, writes=writes))


def slope(calls: Calls, i: int, call: Call) -> None:
    """dy = a · b, dz = dy act'(z): the product stores dz where nothing else reads dy.

    Its reader is a LayerNormGemmGrad, which is then one without an activation, or the pass of an
    activation's gradient, of which the sums for dbias are left.
    """
    problem, ts, how = call.problem, dict(call.reads), _slope(call)
    plain_only = (*BARE, "layer_scale")
    match = _product(calls.sole_producer(i, ts["dy"]), plain_only) if how is not None else None
    if how is None or match is None:
        return
    at, product, plain = match
    dy, z, dz = ts["dy"], ts["z"], product.writes[0][1]
    if dz.size != dy.size or max(calls.writers[z.buffer], default=-1) >= at:
        return
    fused, left = plain.with_epilogue(dact=True, **how), None
    ways: list[tuple[tuple[AnyProblem, ...], tuple[AnyProblem, ...]]] = [((), ())]
    if isinstance(problem, GemmProblem):
        left = replace(call, problem=replace(problem, epilogue=NONE))
        ways = [((), (replace(problem, epilogue=NONE),))]
    elif isinstance(problem, SlopeProduct):
        dz = dict(call.writes)["dz"]
        sums = tuple((n, t) for n, t in call.writes if n != "dz")
        if any(calls.readers[t.buffer] or t.buffer in calls.keep for _, t in sums):
            left = _column_sums(call, problem, dz, sums)
            ways = [((), (replace(problem, act=""),))]
            # or a product that reads dz adds up its columns in passing
            for after in (now for j in calls.readers[dz.buffer] for now in calls.now[j]):
                if adds_up(after, dz, (problem.m, problem.n)):
                    assert isinstance(after.problem, GemmProblem)
                    ways += [((after.problem,), (after.problem.with_epilogue(column_sums=True),))]
    if problem is None or not any(
        calls.pays((plain, problem, *before), (fused, *after)) for before, after in ways
    ):
        return
    joined = replace(product, problem=fused, reads=(*product.reads, ("c", z)), writes=(("y", dz),))
    calls.fuse(at, i, joined, *([left] if left is not None else []))


def _slope(call: Call) -> dict[str, Value] | None:
    """The activation, and its alpha, by whose slope at z the call multiplies its dy."""
    if isinstance(call.problem, GemmProblem) and call.problem.op == "LayerNormGemmGrad":
        forward = call.problem.epilogue
        return {"act": forward.act, "act_alpha": forward.act_alpha} if forward.act else None
    if not isinstance(call.problem, SlopeProduct) or not call.problem.act:
        return None
    return {"act": call.problem.act, "act_alpha": call.problem.act_alpha}


def _column_sums(
    call: Call, problem: SlopeProduct, dz: Tensor, sums: tuple[tuple[str, Tensor], ...]
) -> Call:
    """The pass of an activation's gradient over a dz that is there: dbias, or its parts."""
    problem = replace(problem, act="")
    return replace(call, problem=problem, reads=(("dy", dz),), writes=sums, bytes=dz.nbytes)


def add_to_gradient(calls: Calls, i: int, call: Call) -> None:
    """s = dx + r, dx a LayerNormGemmGrad's that nothing else reads: that call writes s.

    r is the gradient of the residual around it. The call reads r from where it is or, where nothing
    reads r afterwards, adds to it in place, whichever the cost models find cheaper; where the sum's
    own launch is cheapest, everything stays.
    """
    if not (tensors := operands_of(call, "Add")):
        return
    first, second, total = tensors
    readers, writers = calls.readers, calls.writers
    if writers[total.buffer] != [i] or not whole(total.size, *tensors):
        return
    if len({t.dtype for t in tensors}) > 1:
        return
    for dx, r in ((first, second), (second, first)):
        at, grad = calls.sole_producer(i, dx) or (i, call)
        problem = grad.problem
        if not isinstance(problem, GemmProblem) or problem.op != "LayerNormGemmGrad":
            continue
        if problem.add:
            continue
        if dict(grad.writes)["dx"].buffer != dx.buffer or not calls.may_write(at, i, total):
            continue
        before, after = writers[r.buffer], readers[total.buffer]
        if max(before, default=-1) >= at:
            continue
        ways = [problem.replace(add="apart")]
        read_later = max((j for j in readers[r.buffer] if j != i), default=-1) > at
        alone = before and not read_later and r.buffer not in calls.keep
        if alone and min(after, default=i) >= i and _all_of(calls, r):
            ways.append(problem.replace(add="here"))
        fused = min(ways, key=calls.seconds)
        if not calls.pays((problem, pointwise(call)), (fused,)):
            continue
        readers[r.buffer] = sorted(at if j == i else j for j in readers[r.buffer])
        writers[total.buffer] = [at]
        if fused.add == "here":
            same = {r.buffer: total.buffer}
            _rename(calls, same, at)
            readers[total.buffer] = sorted((*readers.pop(r.buffer), *after))
            writers[total.buffer] = [*writers.pop(r.buffer), at]
            r, (grad,) = rename_buffer(r, same), calls.now[at]
        fused_call = replace(
            grad,
            problem=fused,
            reads=(*grad.reads, ("add", r)),
            writes=tuple((n, total if n == "dx" else t) for n, t in grad.writes),
        )
        calls.fuse(at, i, fused_call)
        return


def _rename(calls: Calls, same: Mapping[int, int], *more: int) -> None:
    """Let what touches a buffer, and the calls at `more`, touch the one that stands for it."""
    users = (j for buffer in same for j in (*calls.readers[buffer], *calls.writers[buffer]))
    for j in {*users, *more}:
        calls.now[j] = tuple(rename_buffers(call, same) for call in calls.now[j])


def _all_of(calls: Calls, tensor: Tensor) -> bool:
    """Whether no call touches the tensor's buffer outside of it."""
    users = {*calls.readers[tensor.buffer], *calls.writers[tensor.buffer]}
    touched = [t for j in users for c in (calls.calls[j],) for _, t in (*c.reads, *c.writes)]
    others = [t for t in touched if t.buffer == tensor.buffer]
    ends = [t.offset + sum((d - 1) * max(s, 0) for d, s in zip(t.shape, t.strides, strict=True))
            for t in others]  # fmt: skip
    return max(ends) < tensor.size and {t.dtype for t in others} == {tensor.dtype}


def add_onto(calls: Calls, i: int, call: Call) -> None:
    """s = r + u, where u is rows summed into zeros: they are summed onto r, which becomes s.

    So the gradient of a table that is looked up and multiplied by takes no pass over it.
    """
    if not (tensors := operands_of(call, "Add")):
        return
    first, second, total = tensors
    if not whole(total.size, *tensors) or len({t.dtype for t in tensors}) > 1:
        return
    for u, r in ((first, second), (second, first)):
        at, scatter = calls.sole_producer(i, u) or (i, call)
        begin, _ = calls.sole_producer(i, r) or (i, call)
        problem = scatter.problem
        if not isinstance(problem, ScatterND) or not problem.fresh or begin == i:
            continue
        fused = replace(problem, fresh=False)
        if not calls.may_write(begin, i, total) or not _all_of(calls, r):
            continue
        if not calls.pays((problem, pointwise(call)), (fused,)):
            continue
        same = {r.buffer: total.buffer}
        fused_call = replace(
            scatter,
            problem=fused,
            reads=(*scatter.reads, ("before", total)),
            writes=(("y", total),),
        )
        if calls.fuse(at, i, fused_call, here=True):
            _rename(calls, same, i)
            calls.readers[total.buffer] = [i, *calls.readers[total.buffer]]
            calls.writers[total.buffer] = [begin, i]
            calls.readers[r.buffer] = calls.writers[r.buffer] = []
            return


def tail(calls: Calls, i: int, call: Call) -> None:
    """A pointwise call behind a kernel that takes a tail becomes part of it."""
    if call.expression is None or len(call.writes) != 1:
        return
    (_, y) = call.writes[0]
    for _, v in call.reads:
        at, before = calls.sole_producer(i, v) or (i, call)
        before, chain, v = _without_tail(before, call, v)
        tensors = [t for _, t in chain.reads]
        name = before.problem.stored if before.problem is not None else ""
        if before.problem is None or not name or not calls.may_write(at, i, y):
            continue
        others = [t for t in tensors if t is not v]
        mixed = isinstance(before.problem, IntegerConv)
        rows = [n for n, t in enumerate(others) if _row_of(before.problem, t)]
        each = [t for n, t in enumerate(others) if n not in rows]
        if dict(before.writes)[name].buffer != v.buffer or not whole(v.size, y, v, *each):
            continue
        kinds = {y.dtype, *(t.dtype for t in tensors)}
        if len(tensors) > 4 or (mixed and not kinds <= TAIL_TYPES):
            continue
        stored = TAIL_TYPES if isinstance(before.problem, Norm) else {*FLOATS}
        if isinstance(before.problem, Attention):
            stored = set() if others else TAIL_TYPES - {*FLOATS}
        if not mixed and ({t.dtype for t in tensors} != {v.dtype} or y.dtype not in stored):
            continue
        if any(w >= at for t in others for w in calls.writers[t.buffer]):
            continue
        shared = ITEMSIZE[y.dtype] == ITEMSIZE[v.dtype]
        if isinstance(before.problem, Attention):  # whose rows are those of heads
            y = replace(dict(before.writes)[name], buffer=y.buffer, dtype=y.dtype, offset=y.offset)
        assert chain.expression is not None
        types = tuple(t.dtype for t in others) if mixed else ()
        problem = before.problem.with_tail(
            Tail(chain.expression, tensors.index(v), y.dtype, types, tuple(rows))
        )
        fused = replace(
            before,
            kernel=f"{before.kernel}+{chain.expression.name}",
            problem=problem,
            reads=(
                *before.reads,
                *((f"e{n + 1}", _last(t) if n in rows else t) for n, t in enumerate(others)),
            ),
            writes=tuple((n, y if n == name else t) for n, t in before.writes),
            bytes=before.bytes + sum(t.nbytes for t in (y, *others)) - v.nbytes,
            inplace=tuple(pair for pair in before.inplace if shared or pair[0] != name),
        )
        # the kernel that takes these steps may be a slower one
        apart = (before.problem, pointwise(call))
        if before.problem.op == "Conv" and not calls.pays(apart, (problem,)):
            continue
        if calls.fuse(at, i, fused):
            return


def _row_of(problem: AnyProblem, tensor: Tensor) -> bool:
    """Whether it is one number for each filter of an IntegerConv, whose address is aligned."""
    if not isinstance(problem, IntegerConv) or not _row(tensor) or tensor.offset % 16:
        return False
    return bool(tensor.shape[-1] == problem.groups * problem.filters)


def _last(tensor: Tensor) -> Tensor:
    """A row that is broadcast, once."""
    return replace(tensor, shape=tensor.shape[-1:], strides=tensor.strides[-1:])


def _without_tail(before: Call, call: Call, v: Tensor) -> tuple[Call, Call, Tensor]:
    """An IntegerConv that has a tail as one without, the steps of its tail and of the call behind
    it as one, and what lies between; all three as they are for any other call.
    """
    problem = before.problem
    if not isinstance(problem, IntegerConv) or problem.tail is None:
        return before, call, v
    (_, y), expression = before.writes[0], problem.tail.expression
    sums = Tensor(-1, "float32", y.shape, dense_strides(y.shape))
    named = [t for name, t in before.reads if name in ("e1", "e2", "e3")]
    others = [t.expand(y.shape) for t in named]
    reads = [*others[: problem.tail.own], sums, *others[problem.tail.own :]]
    steps = replace(
        call,
        expression=expression,
        reads=tuple((f"a{n}", t) for n, t in enumerate(reads)),
        writes=(("y0", y),),
    )
    both = join(steps, call)
    if both is None:
        return before, call, v
    bare = replace(
        before,
        kernel=before.kernel.partition("+")[0],
        problem=replace(problem, tail=None),
        reads=tuple((name, t) for name, t in before.reads if t not in named),
        writes=(("y", sums),),
    )
    both = without_stores(both, lambda buffer: buffer == y.buffer)
    return bare, both, next(t for _, t in both.reads if t.buffer == sums.buffer)


BEFORE_CHAINS = (add_onto, add, scale, add, activate, slope, add_to_gradient)
BEHIND_CHAINS = (tail, cast)
"""The rules in their order: each sees what the one before has made."""
