"""Passes over the call list: drop unread calls, share equal ones, merge pointwise chains.

Calls form a graph by the buffers they read and write. A pointwise call is contracted into a
pointwise producer whose element it reads at the same place, if no other path leads from the one to
the other; what only the chain itself read is then never stored.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf, prod

from onnx_fuse.kernels import Choice, forced, refusals, select
from onnx_fuse.kernels.jit import source_text, without_bounds
from onnx_fuse.kernels.pointwise import (
    FLOATS,
    SCALAR,
    STORAGE,
    Expression,
    Row,
    Step,
    finish,
    inline,
    launch_many,
)
from onnx_fuse.llir import Call, Tensor
from onnx_fuse.problem import ITEMSIZE, Hardware, Launch, Num, Problem, Ptr, Table, Value

MAX_OPERANDS = 24
MAX_STEPS = 96
MAX_WAIT = 2 << 20
"""Bytes that a call may read at most to wait for others: what it reads must be kept that long."""
LARGE = 1 << 16
"""Elements from which a pass over a tensor weighs more than its launch."""
MAX_TABLE = 30_000
"""Bytes of kernel arguments that a batch of calls may take: 32 KiB from CUDA 12.1 on."""


def merge(
    calls: Sequence[Call],
    keep: Collection[int],
    hw: Hardware,
    prefs: Mapping[str, str] | None = None,
) -> tuple[Call, ...]:
    """The calls to run, in order; buffers in `keep` hold their final values afterwards."""
    alive = drop_unread(share(drop_unread(calls, keep), keep), keep)
    alive = act_in_epilogue(add_in_epilogue(alive, keep, hw, prefs), keep, hw, prefs)
    alive = slope_in_epilogue(alive, keep, hw, prefs)
    alive = add_in_gradient(alive, keep, hw, prefs)
    alive = cast_in_epilogue(suffixed(fuse(alive, keep), keep), keep, hw, prefs)
    alive = product_in_norm_grad(alive, keep, hw)
    # twice: what a batch has moved to the end lets its producers wait as well
    merged = batch(batch(alive))
    return tuple(finish(c) if c.expression else c for c in merged)


def drop_unread(calls: Sequence[Call], keep: Collection[int]) -> list[Call]:
    """Without the calls whose results nothing reads."""
    live, kept = set(keep), []
    for call in reversed(calls):
        if any(t.buffer in live for _, t in call.writes):
            live.update(t.buffer for _, t in call.reads)
            kept.append(call)
    return kept[::-1]


def share(calls: Sequence[Call], keep: Collection[int]) -> list[Call]:
    """Equal calls on equal operands run once."""
    writers: dict[int, int] = defaultdict(int)
    for call in calls:
        for _, tensor in call.writes:
            writers[tensor.buffer] += 1
    seen: dict[object, Call] = {}
    same: dict[int, int] = {}
    kept = []
    for old in calls:
        call = replace(old, reads=tuple((n, _moved(t, same)) for n, t in old.reads))
        own = [t.buffer for _, t in call.writes]
        pure = all(writers[b] == 1 and b not in keep for b in own)
        # a buffer that is written again later reads differently then
        pure = pure and all(writers[t.buffer] <= 1 for _, t in call.reads)
        pure = pure and not any(t.buffer in keep for _, t in call.reads)
        outputs = tuple((n, replace(t, buffer=-1)) for n, t in call.writes)
        key = (call.launches, call.expression, call.host, call.reads, outputs)
        if pure and key in seen:
            for (_, a), (_, b) in zip(call.writes, seen[key].writes, strict=True):
                same[a.buffer] = b.buffer
            continue
        if pure:
            seen[key] = call
        kept.append(call)
    return kept


def _moved(tensor: Tensor, same: dict[int, int]) -> Tensor:
    return replace(tensor, buffer=same[tensor.buffer]) if tensor.buffer in same else tensor


Uses = dict[int, list[int]]


def uses(calls: Sequence[Call]) -> tuple[Uses, Uses]:
    """Buffer -> the calls that read it, once for each operand, and those that write it."""
    readers: Uses = defaultdict(list)
    writers: Uses = defaultdict(list)
    for i, call in enumerate(calls):
        for _, tensor in call.reads:
            readers[tensor.buffer].append(i)
        for _, tensor in call.writes:
            writers[tensor.buffer].append(i)
    return readers, writers


def made_for(i: int, tensor: Tensor, of: tuple[Uses, Uses], keep: Collection[int]) -> int | None:
    """The call that alone writes what call `i` alone reads, once, and what nothing keeps."""
    readers, writers = (part[tensor.buffer] for part in of)
    alone = len(writers) == 1 and readers == [i] and tensor.buffer not in keep
    return writers[0] if alone else None


def may_write(at: int, i: int, tensor: Tensor, of: tuple[Uses, Uses]) -> bool:
    """Whether call `at` may write what call `i` does: no other does, and until then nothing reads
    it, as a state's value of before.
    """
    readers, writers = (part[tensor.buffer] for part in of)
    return writers == [i] and not any(at <= r < i for r in readers)


def chosen(call: Call, choice: Choice, hw: Hardware) -> Call:
    """The call with the launches of the candidate chosen for its problem."""
    assert call.problem is not None
    how = f"{choice.kernel.name} {choice.config}: {choice.why}, {choice.seconds * 1e6:.1f} us"
    return replace(
        call,
        launches=choice.launch(call.problem, hw),
        workspace=choice.workspace(call.problem, hw),
        why=how,
    )


def _epilogue(problem: Problem, hw: Hardware, prefs: Mapping[str, str] | None) -> Choice | None:
    """The kernel for more of an epilogue; None where the one asked for has no such."""
    if forced(prefs).get(problem.op) in refusals(problem.op, problem, hw):
        return None
    return select(problem.op, problem, hw, prefs)


def _seconds(
    problems: Sequence[Problem], hw: Hardware, prefs: Mapping[str, str] | None
) -> tuple[list[Choice], float]:
    """The kernels for all of them and what they take together; infinity where one has none."""
    found = [choice for p in problems if (choice := _epilogue(p, hw, prefs)) is not None]
    return found, sum(c.seconds for c in found) if len(found) == len(problems) else inf


def _bare(call: Call | None) -> bool:
    """Whether it is a product of one result whose epilogue has room for an operand."""
    if call is None or call.problem is None or call.problem.op != "Gemm" or len(call.writes) != 1:
        return False
    return not any(call.problem.attr(a) for a in ("act", "beta", "dact", "residual", "save_z"))


def add_in_epilogue(
    calls: Sequence[Call],
    keep: Collection[int],
    hw: Hardware,
    prefs: Mapping[str, str] | None = None,
) -> list[Call]:
    """y = a · b, s = y + r becomes one Gemm with the residual or bias r, if nothing else reads y.

    Where s is the sum of a SkipLayerNorm, that becomes a LayerNormalization of it.
    """
    readers, writers = uses(calls)
    result: list[tuple[Call, ...]] = [(call,) for call in calls]
    for i, call in enumerate(calls):
        norm = call if call.kernel == "SkipLayerNorm" else None
        added = call.expression is not None and [s.name for s in call.expression.steps] == ["Add"]
        if not (norm or (added and len(call.reads) == 2)):
            continue
        if not all(t.dense or _row(t) for _, t in (*call.reads, *call.writes)):
            continue
        total, pair = dict(call.writes).get("sum", call.writes[0][1]), [t for _, t in call.reads]
        if norm:
            pair = [dict(call.reads)[name] for name in ("x", "residual")]
        for y, r in (pair, pair[::-1]):
            at = writers[y.buffer]
            product = next(iter(result[at[0]]), None) if len(at) == 1 else None
            if product is None or len(readers[y.buffer]) != 1 or y.buffer in keep or r.offset:
                continue
            bias = not r.dense
            problem = product.problem
            if problem is None or not _bare(product):
                continue
            if {y.dtype, r.dtype, total.dtype} != {problem.out} or y.size != total.size:
                continue
            if not y.dense or (bias and (norm or problem.attr("bias") or r.dtype not in FLOATS)):
                continue
            problem = problem.having(**{"bias" if bias else "residual": True})
            choice = _epilogue(problem, hw, prefs)
            if choice is None:
                continue
            if bias:  # the row itself, once
                r = replace(r, shape=r.shape[-1:], strides=r.strides[-1:])
            merged = replace(
                product,
                nodes=tuple(dict.fromkeys((*product.nodes, *call.nodes))),
                problem=problem,
                reads=(*product.reads, ("col1" if bias else "c", r)),
                writes=(("y", total),),
            )
            result[at[0]] = ()
            result[i] = (chosen(merged, choice, hw), *([_norm_of(norm, total)] if norm else []))
            writers[total.buffer] = [i]
            break
    return [call for entry in result for call in entry]


def _row(tensor: Tensor) -> bool:
    """Whether it is one row, broadcast over the axes before the last."""
    axes = [s for d, s in zip(tensor.shape[:-1], tensor.strides[:-1], strict=True) if d > 1]
    return bool(axes) and not any(axes) and tensor.strides[-1] == 1


def _norm_of(call: Call, total: Tensor) -> Call:
    """The LayerNormalization of a SkipLayerNorm whose sum stands elsewhere."""
    (launch,) = call.launches
    defines = tuple((name, "0" if name == "RESIDUAL" else text) for name, text in launch.defines)
    reads = {"x": total} | {n: t for n, t in call.reads if n not in ("x", "residual")}
    return replace(
        call,
        kernel="LayerNormalization",
        launches=(replace(launch, defines=defines),),
        reads=tuple(reads.items()),
        writes=tuple((n, t) for n, t in call.writes if n != "sum"),
        bytes=sum(t.nbytes for _, t in (*reads.items(), *call.writes)) - total.nbytes,
    )


ACTIVATIONS = {
    "Relu": "relu", "Gelu": "gelu", "GeluTanh": "gelu_tanh", "Silu": "silu",
    "Sigmoid": "sigmoid", "Tanh": "tanh",
}  # fmt: skip
"""Pointwise step -> the epilogue's activation."""


def act_in_epilogue(
    calls: Sequence[Call],
    keep: Collection[int],
    hw: Hardware,
    prefs: Mapping[str, str] | None = None,
) -> list[Call]:
    """z = a · b + c, y = act(z) becomes one Gemm, which stores z too where something reads it."""
    readers, writers = uses(calls)
    result: list[Call | None] = list(calls)
    for i, call in enumerate(calls):
        steps = call.expression.steps if call.expression is not None else ()
        if len(steps) != 1 or steps[0].name not in ACTIVATIONS or len(call.reads) != 1:
            continue
        (_, z), (_, y) = call.reads[0], call.writes[0]
        at = writers[z.buffer]
        product = result[at[0]] if len(at) == 1 and len(writers[y.buffer]) == 1 else None
        problem = product.problem if product is not None else None
        if product is None or problem is None or problem.op != "Gemm" or len(product.writes) != 1:
            continue
        if any(problem.attr(a) for a in ("act", "dact", "residual", "save_z")):
            continue
        if product.writes[0][1] != z or not (y.dense and z.dense) or y.dtype != problem.out:
            continue
        read = z.buffer in keep or readers[z.buffer] != [i]
        problem = problem.having(
            act=ACTIVATIONS[steps[0].name], **({"save_z": True} if read else {})
        )
        choice = _epilogue(problem, hw, prefs)
        if choice is None:
            continue
        merged = replace(
            product,
            nodes=tuple(dict.fromkeys((*product.nodes, *call.nodes))),
            problem=problem,
            writes=(("y", y), *([("z", z)] if read else [])),
        )
        result[at[0]], result[i] = chosen(merged, choice, hw), None
    return [call for call in result if call is not None]


def cast_in_epilogue(
    calls: Sequence[Call],
    keep: Collection[int],
    hw: Hardware,
    prefs: Mapping[str, str] | None = None,
) -> list[Call]:
    """z = a · b in 16 bits, y = float(z): the product writes y if nothing else reads z.

    Only small ones: a large product's wider stores take as long as the cast or longer.
    """
    of = uses(calls)
    result: list[Call | None] = list(calls)
    for i, call in enumerate(calls):
        steps = call.expression.steps if call.expression is not None else ()
        if [s.name for s in steps] != ["Cast"] or len(call.reads) != 1 or len(call.writes) != 1:
            continue
        (_, z), (_, y) = call.reads[0], call.writes[0]
        at = made_for(i, z, of, keep)
        product = result[at] if at is not None else None
        problem = product.problem if product is not None else None
        if at is None or product is None or problem is None or not may_write(at, i, y, of):
            continue
        if problem.op not in ("Gemm", "LayerNormGemm"):
            continue
        if any(problem.attr(a) for a in ("accumulate", "beta", "dact", "residual", "save_z")):
            continue
        whole = all(t.dense and not t.offset and t.size == z.size for t in (z, y))
        if z.size >= LARGE or not whole or y.dtype != "float32":
            continue
        if dict(product.writes)["y"].size != z.size:
            continue
        wider = problem.having(out_dtype=y.dtype)
        choice = _epilogue(wider, hw, prefs)
        if choice is None:
            continue
        made = replace(
            product,
            nodes=tuple(dict.fromkeys((*product.nodes, *call.nodes))),
            problem=wider,
            writes=tuple((n, y if n == "y" else t) for n, t in product.writes),
        )
        result[at], result[i] = chosen(made, choice, hw), None
    return [call for call in result if call is not None]


def slope_in_epilogue(
    calls: Sequence[Call],
    keep: Collection[int],
    hw: Hardware,
    prefs: Mapping[str, str] | None = None,
) -> list[Call]:
    """dy = a · b, dz = dy act'(z): the product stores dz where nothing else reads dy.

    Its reader is a LayerNormGemmGrad, which is then one without an activation, or the pass of an
    activation's gradient, of which the sums for dbias are left. Only where that is cheaper by the
    cost models.
    """
    readers, writers = of = uses(calls)
    result: list[Call | None] = list(calls)
    for i, call in enumerate(calls):
        problem, given, how = call.problem, dict(call.reads), _slope(call)
        if how is None:
            continue
        dy, z = given["dy"], given["z"]
        at = made_for(i, dy, of, keep)
        product = result[at] if at is not None else None
        if at is None or product is None or product.problem is None or not _bare(product):
            continue
        if product.writes[0][1].size != dy.size or max(writers[z.buffer], default=-1) >= at:
            continue
        wanted = product.problem.having(dact=True, **how)
        choices, after = _seconds((wanted,), hw, prefs)
        before = _seconds((product.problem,), hw, prefs)[1]
        dz, left = product.writes[0][1], None
        if problem is not None:
            rest = tuple(pair for pair in problem.attrs if pair[0] not in how)
            plain = replace(problem, attrs=rest)
            found, seconds = _seconds((plain,), hw, prefs)
            left = chosen(replace(call, problem=plain), found[0], hw) if found else None
            before, after = before + _seconds((problem,), hw, prefs)[1], after + seconds
        else:
            dz = dict(call.writes)["dz"]
            rate = hw.bandwidth * (2 if 3 * dz.nbytes <= hw.l2_bytes / 2 else 1)
            before += hw.launch_seconds + 3 * dz.nbytes / rate
            sums = tuple((n, t) for n, t in call.writes if n != "dz")
            if any(readers[t.buffer] or t.buffer in keep for _, t in sums):
                left = _column_sums(call, dz, sums)
                after += hw.launch_seconds + dz.nbytes / rate
        if after >= before:
            continue
        nodes = tuple(dict.fromkeys((*product.nodes, *call.nodes)))
        reads = (*product.reads, ("c", z))
        made = replace(product, nodes=nodes, problem=wanted, reads=reads, writes=(("y", dz),))
        result[at], result[i] = chosen(made, choices[0], hw), left
    return [call for call in result if call is not None]


def _slope(call: Call) -> dict[str, Value] | None:
    """The activation, and its alpha, by whose slope at z the call multiplies its dy."""
    if call.problem is not None and call.problem.op == "LayerNormGemmGrad":
        attrs = dict(call.problem.attrs)
        how = {name: attrs[name] for name in ("act", "act_alpha") if attrs.get(name)}
        return how or None
    if [launch.entry for launch in call.launches] != ["act_grad_rows"]:
        return None
    (launch,) = call.launches
    (alpha,) = (a.value for a in launch.args if isinstance(a, Num) and a.ctype == "f32")
    return {"act": dict(launch.defines)["ACT"].lower(), "act_alpha": alpha}


def _column_sums(call: Call, dz: Tensor, sums: tuple[tuple[str, Tensor], ...]) -> Call:
    """The pass of an activation's gradient over a dz that is there: dbias, or its parts."""
    (launch,) = call.launches
    defines = tuple((name, "NONE" if name == "ACT" else text) for name, text in launch.defines)
    launch = replace(launch, defines=defines)
    return replace(call, launches=(launch,), reads=(("dy", dz),), writes=sums, bytes=dz.nbytes)


def add_in_gradient(
    calls: Sequence[Call],
    keep: Collection[int],
    hw: Hardware,
    prefs: Mapping[str, str] | None = None,
) -> list[Call]:
    """s = dx + r, dx a LayerNormGemmGrad's that nothing else reads: that call writes s.

    r, the gradient of the residual around it, is read from where it is, or, where nothing reads it
    afterwards, added to in place: what the cost models find cheaper, if the sum's launch is not.
    """
    readers, writers = uses(calls)
    result: list[Call | None] = list(calls)
    for i in range(len(calls)):
        call = result[i]
        if call is None or call.expression is None or len(call.reads) != 2:
            continue
        *pair, total = tensors = [t for _, t in (*call.reads, *call.writes)]
        if [s.name for s in call.expression.steps] != ["Add"] or writers[total.buffer] != [i]:
            continue
        if any(not t.dense or t.offset or t.size != total.size for t in tensors):
            continue
        if len({t.dtype for t in tensors}) > 1:
            continue
        for dx, r in (pair, pair[::-1]):
            made, before, after = writers[dx.buffer], writers[r.buffer], readers[total.buffer]
            at = made[0] if len(made) == 1 else i
            grad = result[at]
            problem = grad.problem if grad is not None else None
            if grad is None or problem is None or problem.op != "LayerNormGemmGrad":
                continue
            if dict(grad.writes)["dx"].buffer != dx.buffer or problem.attr("add"):
                continue
            if readers[dx.buffer] != [i] or dx.buffer in keep or max(before, default=-1) >= at:
                continue
            if any(at <= j < i for j in after):  # of a state's value before this
                continue
            ways = [problem.having(add="apart")]
            read_later = max((j for j in readers[r.buffer] if j != i), default=-1) > at
            alone = before and not read_later and r.buffer not in keep
            if alone and min(after, default=i) >= i and _all_of(calls, r):
                ways.append(problem.having(add="here"))
            wanted = min(ways, key=lambda p: _seconds((p,), hw, prefs)[1])
            choices, seconds = _seconds((wanted,), hw, prefs)
            launch = hw.launch_seconds + 3 * dx.nbytes / hw.bandwidth
            if seconds >= _seconds((problem,), hw, prefs)[1] + launch:
                continue
            readers[r.buffer] = sorted(at if j == i else j for j in readers[r.buffer])
            writers[total.buffer] = [at]
            if wanted.text("add") == "here":
                same = {r.buffer: total.buffer}
                result = [c and _elsewhere(c, same) for c in result]
                readers[total.buffer] = sorted((*readers.pop(r.buffer), *after))
                writers[total.buffer] = [*writers.pop(r.buffer), at]
                r, grad = _moved(r, same), result[at]
                assert grad is not None
            grad = replace(
                grad,
                nodes=tuple(dict.fromkeys((*grad.nodes, *call.nodes))),
                problem=wanted,
                reads=(*grad.reads, ("add", r)),
                writes=tuple((n, total if n == "dx" else t) for n, t in grad.writes),
            )
            result[at], result[i] = chosen(grad, choices[0], hw), None
            break
    return [call for call in result if call is not None]


def _elsewhere(call: Call, same: dict[int, int]) -> Call:
    """The call on other buffers."""
    reads, writes = (
        tuple((n, _moved(t, same)) for n, t in part) for part in (call.reads, call.writes)
    )
    return replace(call, reads=reads, writes=writes)


def _all_of(calls: Sequence[Call], tensor: Tensor) -> bool:
    """Whether no call touches the tensor's buffer outside of it."""
    others = [t for c in calls for _, t in (*c.reads, *c.writes) if t.buffer == tensor.buffer]
    ends = [t.offset + sum((d - 1) * max(s, 0) for d, s in zip(t.shape, t.strides, strict=True))
            for t in others]  # fmt: skip
    return max(ends) < tensor.size and {t.dtype for t in others} == {tensor.dtype}


def suffixed(calls: Sequence[Call], keep: Collection[int]) -> list[Call]:
    """A pointwise call behind a kernel that takes a suffix becomes part of it."""
    _, writers = of = uses(calls)
    result: list[Call | None] = list(calls)
    for i, call in enumerate(calls):
        if call.expression is None or len(call.writes) != 1 or not 1 <= len(call.reads) <= 4:
            continue
        (_, y), tensors = call.writes[0], [t for _, t in call.reads]
        for k, v in enumerate(tensors):
            at = made_for(i, v, of, keep)
            before = result[at] if at is not None else None
            if at is None or before is None or not before.suffix or not may_write(at, i, y, of):
                continue
            name, others = before.suffix, [t for t in tensors if t is not v]
            if dict(before.writes)[name].buffer != v.buffer:
                continue
            if any(not t.dense or t.offset or t.size != v.size for t in (y, *tensors)):
                continue
            if {t.dtype for t in tensors} != {v.dtype} or y.dtype not in FLOATS:
                continue
            if any(w >= at for t in others for w in writers[t.buffer]):
                continue
            names = {k: "v0"} | {j: f"v{n}" for n, j in enumerate(
                (j for j in range(len(tensors)) if j != k), 1)}  # fmt: skip
            text = inline(call.expression, [names[j] for j in range(len(tensors))])
            if text is None:
                continue
            (launch,) = before.launches
            macros = {"OPERANDS": str(len(others)), "SUFFIX(v0, v1, v2, v3)": text,
                      "TY": STORAGE[y.dtype]}  # fmt: skip
            macros = _whole_sectors(dict(launch.defines), v, y) | macros
            shared = ITEMSIZE[y.dtype] == ITEMSIZE[v.dtype]
            result[at] = replace(
                before,
                kernel=f"{before.kernel}+{call.expression.name}",
                nodes=tuple(dict.fromkeys((*before.nodes, *call.nodes))),
                launches=(replace(launch, defines=tuple(sorted(macros.items()))),),
                reads=(*before.reads, *((f"e{n}", t) for n, t in enumerate(others, 1))),
                writes=tuple((n, y if n == name else t) for n, t in before.writes),
                bytes=before.bytes + sum(t.nbytes for t in (y, *others)) - v.nbytes,
                inplace=tuple(pair for pair in before.inplace if shared or pair[0] != name),
                suffix="",
            )
            result[i] = None
            break
    return [call for call in result if call is not None]


def _whole_sectors(macros: dict[str, str], v: Tensor, y: Tensor) -> dict[str, str]:
    """VEC elements as many times ITEMS: where y is wider than v, a warp's store has no gaps."""
    vec, items = int(macros["VEC"]), int(macros["ITEMS"])
    less = min(vec, max(1, ITEMSIZE[y.dtype] // ITEMSIZE[v.dtype]))
    return macros | {"VEC": str(vec // less), "ITEMS": str(items * less)}


SMALL_K = 16
"""Elements of a row of dy's first factor that a LayerNorm's gradient may multiply by itself."""


def product_in_norm_grad(calls: Sequence[Call], keep: Collection[int], hw: Hardware) -> list[Call]:
    """dy = a · b over a few k, read by a LayerNormGrad alone: that makes its rows of dy itself.

    So a classifier's last layer does: a block reads b once a row, which L2 holds.
    """
    _, writers = of = uses(calls)
    result: list[Call | None] = list(calls)
    for i, call in enumerate(calls):
        reads = dict(call.reads)
        rows = "dy" in reads and "part" in dict(call.writes)
        if not rows or not call.kernel.startswith("LayerNormGrad"):
            continue
        dy, at = reads["dy"], made_for(i, reads["dy"], of, keep)
        product = result[at] if at is not None else None
        p = product.problem if product is not None else None
        if at is None or product is None or p is None or p.op != "Gemm":
            continue
        if p.k > SMALL_K or p.trans_a or p.batch:
            continue
        a, b = (dict(product.reads)[name] for name in ("a", "b"))
        lines = p.k if p.trans_b else p.n
        if {p.dtype, p.out, reads["scale"].dtype} != {"float32"}:
            continue
        if not {name for name, value in p.attrs if value} <= {"lda", "ldb", "align", "static_b"}:
            continue
        if p.integer("align", 16) % 16 or not dy.dense or dy.size != p.m * p.n:
            continue
        if p.integer("lda", p.k) != p.k or p.integer("ldb", lines) != lines:
            continue
        if any(at < w < i for t in (a, b) for w in writers[t.buffer]):
            continue
        again = p.m * p.k * p.n * ITEMSIZE[p.dtype] / hw.bandwidth
        if again > p.bytes / hw.bandwidth + hw.launch_seconds:
            continue
        (launch,) = call.launches
        macros = (("PRODUCT", str(p.k)), ("TURNED", str(int(p.trans_b))))
        result[at] = None
        result[i] = replace(
            call,
            kernel=f"{product.kernel}+{call.kernel}",
            nodes=tuple(dict.fromkeys((*product.nodes, *call.nodes))),
            launches=(replace(launch, defines=tuple(sorted((*launch.defines, *macros)))),),
            reads=(("dy", a), ("b", b), *((n, t) for n, t in call.reads if n != "dy")),
            flops=call.flops + p.flops,
            bytes=call.bytes - dy.nbytes + a.nbytes + b.nbytes,
            inplace=tuple(pair for pair in call.inplace if pair[1] != "dy"),
        )
    return [call for call in result if call is not None]


def fuse(calls: Sequence[Call], keep: Collection[int]) -> list[Call]:
    """Contract pointwise chains, then order the groups and forget stores nothing reads."""
    groups: dict[int, Call] = {}
    parents: dict[int, set[int]] = {}
    ancestors: list[int] = []
    home: dict[int, int] = {}  # call index -> group that holds it
    writers: dict[int, list[int]] = defaultdict(list)
    readers: dict[int, list[int]] = defaultdict(list)
    members: dict[int, set[int]] = {}
    all_readers: dict[int, set[int]] = defaultdict(set)
    for q, call in enumerate(calls):
        for _, tensor in call.reads:
            all_readers[tensor.buffer].add(q)

    def inner(inside: set[int], buffer: int) -> bool:
        """Whether nothing but these calls reads the buffer."""
        return buffer not in keep and all_readers[buffer] <= inside

    for q, call in enumerate(calls):
        read = {t.buffer for _, t in call.reads}
        wrote = {t.buffer for _, t in call.writes}
        direct = {w for b in read | wrote for w in writers[b]}
        direct |= {r for b in wrote for r in readers[b]}
        deps = {home[d] for d in direct}
        groups[q], parents[q], home[q], members[q] = call, deps, q, {q}
        mask = 0
        for d in deps:
            mask |= ancestors[d] | 1 << d
        ancestors.append(mask)
        for b in read:
            readers[b].append(q)
        for b in wrote:
            writers[b].append(q)
        group = q
        for p in sorted(deps, reverse=True):
            if p == group or p not in groups or groups[group].expression is None:
                continue
            if any(
                ancestors[e] >> p & 1 for e in _bits(ancestors[group]) if e != p and e in groups
            ):
                continue
            inside = members[p] | members[group]
            joined = join(groups[p], groups[group])
            if joined is not None:
                joined = _without(joined, partial(inner, inside))
            if joined is None or len(joined.reads) + len(joined.writes) > MAX_OPERANDS:
                continue
            members[p] = inside
            # `group` lives on in p: everything that knew it now knows p
            groups[p] = joined
            parents[p] = (parents[p] | parents[group]) - {p, group}
            extra = ancestors[group] & ~(1 << p)
            for g in groups:
                if ancestors[g] >> group & 1:
                    ancestors[g] = ancestors[g] & ~(1 << group) | 1 << p
                    parents[g] = {p if x == group else x for x in parents[g]}
            ancestors[p] |= extra
            for g in groups:
                if ancestors[g] >> p & 1:
                    ancestors[g] |= extra
            del groups[group]
            for index, h in home.items():
                if h == group:
                    home[index] = p
            group = p
    ordered = _order(groups, parents)
    return _forget([groups[g] for g in ordered], keep)


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _order(groups: dict[int, Call], parents: dict[int, set[int]]) -> list[int]:
    waiting = {g: len(parents[g]) for g in groups}
    children: dict[int, list[int]] = defaultdict(list)
    for g in groups:
        for p in parents[g]:
            children[p].append(g)
    ready = [g for g, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        g = heapq.heappop(ready)
        order.append(g)
        for child in children[g]:
            waiting[child] -= 1
            if waiting[child] == 0:
                heapq.heappush(ready, child)
    assert len(order) == len(groups), "the call graph has a cycle"
    return order


def _forget(calls: Sequence[Call], keep: Collection[int]) -> list[Call]:
    """Stores that nothing reads are dropped, then steps and loads without a use."""
    read = set(keep)
    for call in calls:
        read.update(t.buffer for _, t in call.reads)
    return [_without(call, lambda b: b not in read) if call.expression else call for call in calls]


def _without(call: Call, unread: Callable[[int], bool]) -> Call:
    """The call without its stores to buffers that are `unread`."""
    assert call.expression is not None
    stays = [i for i, (_, t) in enumerate(call.writes) if not unread(t.buffer)]
    stores = tuple(call.expression.stores[i] for i in stays)
    writes = tuple(call.writes[i][1] for i in stays)
    expression = replace(call.expression, stores=stores)
    return _renamed(call, expression, [t for _, t in call.reads], writes)


def _renamed(
    call: Call, expression: Expression, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> Call:
    """The call with unused steps and loads removed and its operands numbered again."""
    first = expression.loads + len(expression.scalars)
    needed = set(expression.stores)
    for i in reversed(range(len(expression.steps))):
        if first + i in needed:
            needed.update(expression.steps[i].args)
    rows = [row for row in expression.rows if row.load in needed]
    needed.update(row.index for row in rows)
    number: dict[int, int] = {}
    loads = [i for i in range(expression.loads) if i in needed]
    scalars = [i for i in range(len(expression.scalars)) if expression.loads + i in needed]
    steps = [i for i in range(len(expression.steps)) if first + i in needed]
    old = [*loads, *(expression.loads + i for i in scalars), *(first + i for i in steps)]
    number = {value: i for i, value in enumerate(old)}
    fresh = Expression(
        len(loads),
        tuple(expression.scalars[i] for i in scalars),
        tuple(
            replace(expression.steps[i], args=tuple(number[a] for a in expression.steps[i].args))
            for i in steps
        ),
        tuple(number[s] for s in expression.stores),
        tuple(replace(row, load=number[row.load], index=number[row.index]) for row in rows),
    )
    return replace(
        call,
        kernel=fresh.name,
        expression=fresh,
        reads=tuple((f"a{i}", reads[k]) for i, k in enumerate(loads)),
        writes=tuple((f"y{i}", t) for i, t in enumerate(writes)),
    )


def batch(calls: Sequence[Call]) -> list[Call]:
    """Equal expressions over many flat tensors, an optimizer's updates, become one launch.

    A call may wait for a later one of its kind if nothing in between reads what it writes or
    writes what it touches. Of large tensors those that are ready last have a launch of their own:
    the others' may run beside what makes them.
    """
    depth: dict[int, int] = defaultdict(int)  # of a buffer: the longest chain of calls to it
    depths = []
    for call in calls:
        depths.append(1 + max((depth[t.buffer] for _, t in call.reads), default=0))
        for _, tensor in call.writes:
            depth[tensor.buffer] = depths[-1]
    kinds: dict[object, list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        if (kind := _kind(call)) is not None:
            kinds[kind].append(i)
    gone: set[int] = set()
    placed: dict[int, list[Call]] = defaultdict(list)
    for members in kinds.values():
        run: list[int] = []
        for i in reversed(members):
            # `run` starts at its last member; earlier ones join as long as they may wait for it
            if run and not _may_wait(calls, i, run[0]):
                _place(calls, run, depths, gone, placed)
                run = []
            run.append(i)
        _place(calls, run, depths, gone, placed)
    result = []
    for i, call in enumerate(calls):
        if i not in gone:
            result.append(call)
        result += placed.get(i, [])
    return result


def _place(
    calls: Sequence[Call],
    run: Sequence[int],
    depths: Sequence[int],
    gone: set[int],
    placed: dict[int, list[Call]],
) -> None:
    """Put the members of a run as one call, or a few, where its last member stood."""
    if len(run) < 2:
        return
    members = list(reversed(run))
    large = [i for i in members if calls[i].expression and calls[i].writes[0][1].size >= LARGE]
    last = max((depths[i] for i in large), default=0)
    early = [i for i in large if depths[i] < last]
    then = [i for i in large if depths[i] == last < max(depths[j] for j in members)]
    apart = {*early, *then}
    rest = [i for i in members if i not in apart]
    columns = len(calls[run[0]].reads) + len(calls[run[0]].writes) + 2
    most = MAX_TABLE // (8 * columns)
    most = 1 << (most.bit_length() - 1)
    for some in (early, then, rest):
        parts = [[calls[i] for i in some[k : k + most]] for k in range(0, len(some), most)]
        placed[run[0]] += [_many(part) if len(part) > 1 else part[0] for part in parts]
    gone.update(run)


def _kind(call: Call) -> object | None:
    """What calls of one launch have in common; None for a call that stands alone."""
    if call.expression is None:
        return _twin(call)
    if not prod(call.writes[0][1].shape) or call.expression.rows:
        return None
    tensors = [t for _, t in (*call.reads, *call.writes)]
    flat = call.writes[0][1]
    if any(t.wide or not (t.dense or _single(t)) for t in tensors) or flat.size == 1:
        return None
    shared = tuple(t.buffer if _single(t) else -1 for _, t in call.reads)
    return call.expression, shared, tuple(t.dtype for t in tensors)


def _twin(call: Call) -> object | None:
    """The launch of a small call that a grid of several may run: equal but for its pointers."""
    if len(call.launches) != 1 or call.workspace or call.host:
        return None
    (launch,) = call.launches
    if (
        launch.cluster > 1
        or launch.smem
        or "\n" in launch.source
        or sum(t.nbytes for _, t in call.reads) > MAX_WAIT
        or not all(
            isinstance(arg, Num) or arg == Ptr(getattr(arg, "name", "")) for arg in launch.args
        )
        or free_axis(launch) is None
    ):
        return None
    bound = {name for name, _ in (*call.reads, *call.writes)}
    unbound = tuple(isinstance(arg, Ptr) and arg.name not in bound for arg in launch.args)
    return launch, unbound


def _single(tensor: Tensor) -> bool:
    """Whether every element is the same one."""
    return all(s == 0 or d == 1 for d, s in zip(tensor.shape, tensor.strides, strict=True))


def _may_wait(calls: Sequence[Call], i: int, until: int) -> bool:
    reads = {t.buffer for _, t in calls[i].reads}
    writes = {t.buffer for _, t in calls[i].writes}
    for call in calls[i + 1 : until + 1]:
        if any(t.buffer in writes for _, t in (*call.reads, *call.writes)):
            return False
        if any(t.buffer in reads for _, t in call.writes):
            return False
    return True


def _many(members: Sequence[Call]) -> Call:
    """One call of all members; their operands are bound under "column.row"."""
    first = members[0]
    if first.expression is None:
        return _twins(members)
    shared = [t if _single(t) else None for _, t in first.reads]
    items = [([t for _, t in c.reads], [t for _, t in c.writes]) for c in members]
    reads: dict[str, Tensor] = {f"a{r}": t for r, t in enumerate(shared) if t is not None}
    writes: dict[str, Tensor] = {}
    inputs = len(first.reads)
    for row, (r, w) in enumerate(items):
        reads |= {f"{k}.{row}": t for k, t in enumerate(r) if shared[k] is None}
        writes |= {f"{inputs + k}.{row}": t for k, t in enumerate(w)}
    return Call(
        f"{first.expression.name} x{len(members)}",
        tuple(dict.fromkeys(n for c in members for n in c.nodes)),
        (launch_many(first.expression, shared, items),),
        tuple(reads.items()),
        tuple(writes.items()),
        flops=sum(len(first.expression.steps) * w[0].size for _, w in items),
        bytes=sum(t.nbytes for r, w in items for t in (*r, *w)),
    )


def _twins(members: Sequence[Call]) -> Call:
    """One launch of equal ones over other pointers; operands are bound under "name.row"."""
    return Call(
        f"{members[0].kernel} x{len(members)}",
        tuple(dict.fromkeys(n for c in members for n in c.nodes)),
        (launch_twins(members),),
        tuple((f"{n}.{i}", t) for i, c in enumerate(members) for n, t in c.reads),
        tuple((f"{n}.{i}", t) for i, c in enumerate(members) for n, t in c.writes),
        flops=sum(c.flops for c in members),
        bytes=sum(c.bytes for c in members),
        why=members[0].why,
    )


def free_axis(launch: Launch) -> str | None:
    """A grid axis that the kernel does not look at: "y" or "z"; None where there is none."""
    # what common.cuh knows of the grid is the whole one's size
    text = source_text(launch.source).replace(source_text("common.cuh"), "")
    if "__grid_constant__" in text:
        return None
    for k, axis in ((1, "y"), (2, "z")):
        if launch.grid[k] == 1 and f"blockIdx.{axis}" not in text and f"gridDim.{axis}" not in text:
            return axis
    return None


def launch_twins(members: Sequence[Call]) -> Launch:
    """The members' kernel as a device function, called once a row of a table of pointers."""
    (launch,) = members[0].launches
    axis = free_axis(launch)
    pointers = [arg for arg in launch.args if isinstance(arg, Ptr)]
    rows = 1 << (len(members) - 1).bit_length()  # few distinct sources for many counts
    words: list[Ptr | int] = []
    for i, call in enumerate(members):
        bound = {name for name, _ in (*call.reads, *call.writes)}
        words += [Ptr(f"{p.name}.{i}") if p.name in bound else 0 for p in pointers]
    words += [0] * ((rows - len(members)) * len(pointers))
    parameters, passed, numbers = [], [], []
    for i, arg in enumerate(launch.args):
        if isinstance(arg, Num):
            parameters.append(f", {SCALAR[arg.ctype]} n{i}")
            passed.append(f"n{i}")
            numbers.append(arg)
        else:
            column = sum(isinstance(a, Ptr) for a in launch.args[:i])
            passed.append(f"TwinPointer{{rows.at[blockIdx.{axis}].p[{column}]}}")
    text = without_bounds(source_text(launch.source)).replace("__global__", "__device__ inline")
    source = f"""{text}
struct TwinPointer {{
    u64 p;
    template <class Pointee> __device__ operator Pointee*() const {{ return (Pointee*)p; }}
}};
struct TwinRow {{ u64 p[{len(pointers)}]; }};
struct TwinRows {{ TwinRow at[{rows}]; }};
extern "C" __global__ void __launch_bounds__({prod(launch.block)})
    twins(const __grid_constant__ TwinRows rows{"".join(parameters)}) {{
    after_previous_launch();
    {launch.entry}({", ".join(passed)});
}}
"""
    x, y, z = launch.grid
    grid = (x, len(members), z) if axis == "y" else (x, y, len(members))
    return Launch(
        source, "twins", grid, launch.block, (Table(tuple(words)), *numbers), launch.defines
    )


def refine(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    """The coarsest shape that both shapes are merges of, None where there is none."""
    if prod(a) != prod(b) or 0 in a:
        return None
    cuts = set()
    for shape in (a, b):
        step = 1
        for d in reversed(shape):
            step *= d
            cuts.add(step)
    ordered = sorted(cuts | {1})
    if any(high % low for low, high in pairwise(ordered)):
        return None
    return [high // low for low, high in pairwise(ordered)][::-1]


def join(a: Call, b: Call) -> Call | None:
    """One call that does `a`, then `b`, element by element; None where that is not possible."""
    if a.expression is None or b.expression is None:
        return None
    shape = list(a.writes[0][1].shape)
    other = list(b.writes[0][1].shape)
    common = shape if shape == other else refine(shape, other)
    if common is None or len(a.expression.steps) + len(b.expression.steps) > MAX_STEPS:
        return None
    views = [[t if list(t.shape) == common else t.reshape(common) for _, t in part]
             for part in (a.reads, a.writes, b.reads, b.writes)]  # fmt: skip
    if any(t is None for part in views for t in part):
        return None
    a_reads, a_writes, b_reads, b_writes = [[_plain(t) for t in part if t] for part in views]
    stored = {t.buffer: t for t in a_writes}
    if len(stored) < len(a_writes) or any(t.buffer in stored for t in b_writes):
        return None
    if any(t.buffer in stored and t != stored[t.buffer] for t in b_reads):
        return None
    # one element is read and written by one thread alone
    written = {t.buffer: t for t in b_writes}
    if any(t.buffer in written and t != written[t.buffer] for t in (*a_reads, *b_reads)):
        return None
    ea, eb = a.expression, b.expression
    if any(b_reads[i].buffer in stored for row in eb.rows for i in (row.load, row.index)):
        return None
    tables = [a_reads[row.load] for row in ea.rows] + [b_reads[row.load] for row in eb.rows]
    if any(t.buffer in written for t in tables):
        return None
    reads, wanted = _places(ea, a_reads), _places(eb, b_reads)
    source: dict[int, tuple[str, int]] = {}
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i][1] is not None):  # rows last
        t, row = wanted[i]
        if t.buffer in stored:
            source[i] = "a", ea.stores[a_writes.index(t)]
            continue
        place = t, row and replace(row, index=source[row.index][1])
        if place not in reads:
            reads.append(place)
        source[i] = "load", reads.index(place)
    scalars = list(ea.scalars)
    places = []
    for scalar in eb.scalars:
        if scalar not in scalars:
            scalars.append(scalar)
        places.append(scalars.index(scalar))
    base = len(reads)

    def from_a(i: int) -> int:
        if i < ea.loads:
            return i
        if i < ea.loads + len(ea.scalars):
            return base + i - ea.loads
        return base + len(scalars) + i - ea.loads - len(ea.scalars)

    def from_b(i: int) -> int:
        if i < eb.loads:
            kind, value = source[i]
            return from_a(value) if kind == "a" else value
        if i < eb.loads + len(eb.scalars):
            return base + places[i - eb.loads]
        return base + len(scalars) + len(ea.steps) + i - eb.loads - len(eb.scalars)

    def moved(step: Step, number: object) -> Step:
        return replace(step, args=tuple(number(i) for i in step.args))  # type: ignore[operator]

    expression = Expression(
        len(reads),
        tuple(scalars),
        tuple([moved(s, from_a) for s in ea.steps] + [moved(s, from_b) for s in eb.steps]),
        tuple([from_a(i) for i in ea.stores] + [from_b(i) for i in eb.stores]),
        tuple(replace(row, load=i) for i, (_, row) in enumerate(reads) if row is not None),
    )
    return replace(
        a,
        kernel=expression.name,
        nodes=tuple(dict.fromkeys((*a.nodes, *b.nodes))),
        expression=expression,
        reads=tuple((f"a{i}", t) for i, (t, _) in enumerate(reads)),
        writes=tuple((f"y{i}", t) for i, t in enumerate((*a_writes, *b_writes))),
    )


def _places(e: Expression, reads: Sequence[Tensor]) -> list[tuple[Tensor, Row | None]]:
    """Each read, and what chooses its rows, without its own number."""
    rows = {row.load: replace(row, load=-1) for row in e.rows}
    return [(t, rows.get(i)) for i, t in enumerate(reads)]


def _plain(tensor: Tensor) -> Tensor:
    """Strides of axes of size 1 set to 0, so that equal views compare equal."""
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    return replace(tensor, strides=tuple(0 if d == 1 else s for d, s in pairs))
