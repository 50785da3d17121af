"""A Program run by NumPy: each call as its problem defines it, host calls by onnxruntime.

Lowering, views, passes and memory plans are so checked against onnxruntime without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.program.call import Call, Program, Tensor, dtype_of, run_loop
from onnx_fuse.program.epilogue import EXP_COLUMNS
from onnx_fuse.program.interpret import images
from onnx_fuse.program.interpret.memory import Memory
from onnx_fuse.program.interpret.steps import activated, evaluate
from onnx_fuse.program.losses import CrossEntropyChunk, ExpRows, LabelScore
from onnx_fuse.program.moves import PointwiseMany, PointwiseSums, ScatterND
from onnx_fuse.program.problem import AnyProblem, Collective, Problem, Product
from onnx_fuse.program.problems import (
    ChannelNorm,
    Conv,
    ConvWeightGrad,
    Float8,
    MergedMoments,
    PartSums,
    Pool,
    Reduce,
    Resample,
    RunningStats,
    SlopeProduct,
    SumSquares,
)
from onnx_fuse.program.products import Attention, IntegerProduct, PackedProduct

Exchange = Callable[[Collective, list[np.ndarray]], list[np.ndarray]]
Lowered = Callable[[ir.Model, Mapping[str, np.ndarray]], Program]

BATCHED = {"align", "lda", "ldb", "a_strides", "b_strides", "static_b"}
BATCHED |= {"row_bias", "residual", "beta", "act", "act_alpha"}
NORMS = ("LayerNormalization", "RMSNormalization")
"""Attributes of a plain product of several matrices."""


def initializers(model: ir.Model) -> dict[str, np.ndarray]:
    """The arrays of a graph's initializers."""
    values = {name: v.const_value for name, v in model.graph.initializers.items()}
    return {name: value.numpy() for name, value in values.items() if value is not None}


def by_onnxruntime(
    model: bytes, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """The outputs of a serialized model, run on the CPU."""
    import onnxruntime

    found: list[np.ndarray] = onnxruntime.InferenceSession(model).run(list(outputs), dict(feeds))
    return found


def _many(
    p: PointwiseMany, read: Mapping[str, np.ndarray], writes: Mapping[str, Tensor]
) -> list[np.ndarray]:
    """One expression over several sets of tensors; a number that all share is read once."""
    results = []
    for row, (reads, stores) in enumerate(p.items):
        names = [f"{k}.{row}" for k in range(len(reads))]
        values = [read[n] if n in read else read[f"a{k}"].flat[0] for k, n in enumerate(names)]
        to = [writes[f"{len(reads) + k}.{row}"] for k in range(len(stores))]
        results += evaluate(p.expression, values, to)
    return results


def _scattered(p: ScatterND, read: Mapping[str, np.ndarray]) -> np.ndarray:
    """Sums of rows, which is all that is interpreted, onto what is there or zeros."""
    assert p.reduction == "add"
    assert p.fresh == ("before" not in read)
    kind = read["update"].dtype
    y = np.zeros((p.rows, p.inner)) if p.fresh else read["before"].reshape(p.rows, p.inner)
    y = y.astype(np.float64)
    places = np.ravel_multi_index(tuple(read["index"].reshape(-1, len(p.dims)).T), p.dims, "wrap")
    np.add.at(y, places, read["update"].reshape(p.count, p.inner).astype(np.float64))
    return y.astype(kind)


def interpret(
    program: Program,
    feeds: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
    lowered: Lowered | None = None,
    exchange: Exchange | None = None,
    offsets: Mapping[int, int] | None = None,
) -> dict[str, np.ndarray]:
    """The program's outputs, by their names, of arrays `feeds` and `weights` by theirs.

    Buffers stand at `offsets` (id to bytes) of one arena, each that has none by itself. The later
    stages are lowered by `lowered`, and interpreted in their turn, or run by onnxruntime.
    Collectives are what `exchange` makes of this rank's tensors. Raises AssertionError for a
    problem or a flag that has no interpretation.
    """
    memory = Memory(program, offsets or {})
    for name, tensor in program.inputs:
        memory.view(tensor)[...] = feeds[name]
    for b in program.buffers:
        if b.kind == "weight" and b.id not in program.constants:
            memory.parts[b.id][...] = (
                np.ascontiguousarray(weights[b.name]).reshape(-1).view(np.uint8)
            )
    for buffer, array in program.constants.items():
        memory.parts[buffer][...] = array.reshape(-1).view(np.uint8)
    for call in (*program.setup, *program.calls):
        if call.expression is not None:
            reads = [memory.view(t).copy() for _, t in call.reads]
            for row in call.expression.rows:
                reads[row.load] = memory.rows(call.reads[row.load][1], row, reads[row.index])
            results = evaluate(call.expression, reads, [t for _, t in call.writes])
        elif (
            isinstance(call.problem, Product | Attention | Float8 | SlopeProduct)
            or call.kernel in NORMS
        ):
            read = {name: memory.view(t).astype(np.float64) for name, t in call.reads}
            found = _evaluated(call.problem, read)
            if isinstance(call.problem, Problem) and call.problem.epilogue.accumulate:
                found["y"] = found["y"] + memory.view(dict(call.writes)["y"])
            results = [found[name].reshape(t.shape) for name, t in call.writes]
        elif isinstance(call.problem, Reduce) and call.problem.reducer == "Sum":
            results = [_sums(call.problem, memory.view(call.reads[0][1]))]
        elif isinstance(call.problem, Conv | ConvWeightGrad | Pool | Reduce | Resample):
            results = [_image(call, memory)]
            if isinstance(call.problem, Conv) and call.problem.column_moments:
                rounded = results[0].astype(dtype_of(call.problem.dtype))
                results += [images.column_moments(rounded)]
        elif isinstance(call.problem, MergedMoments | ChannelNorm | RunningStats):
            read = {name: memory.view(t).astype(np.float64) for name, t in call.reads}
            found = images.normalized(call.problem, read)
            results = [found[name] for name, _ in call.writes]
        elif call.kernel.startswith("Copy x"):
            read = {name: memory.view(t).copy() for name, t in call.reads}
            results = [read[f"0{name[1:]}"] for name, _ in call.writes]
        elif isinstance(call.problem, PointwiseSums):
            views = call.problem.pointwise
            pairs = zip(views.reads, call.reads, strict=True)
            reads = [memory.view(replace(t, buffer=old.buffer)).copy() for t, (_, old) in pairs]
            results = evaluate(views.expression, reads, list(views.writes))
            axis = {"columns": 0, "rows": 1, "all": None}[call.problem.over]
            results.append(np.asarray(results[call.problem.summed], np.float32).sum(axis))
        elif isinstance(call.problem, PointwiseMany):
            read = {name: memory.view(t).copy() for name, t in call.reads}
            results = _many(call.problem, read, dict(call.writes))
        elif isinstance(call.problem, CrossEntropyChunk | LabelScore | ExpRows):
            read = {name: memory.view(t).copy() for name, t in call.reads}
            found = LOSSES[type(call.problem)](call.problem, read)
            results = [found[name] for name, _ in call.writes]
        elif isinstance(call.problem, SumSquares):
            given = (memory.view(t).astype(np.float64) for _, t in call.reads)
            results = [np.sum([np.square(x).sum() for x in given])]
        elif isinstance(call.problem, PartSums):
            results = [memory.view(call.reads[0][1]).sum(0)]
        elif isinstance(call.problem, Collective):
            assert exchange is not None, "a program of one rank of several"
            results = exchange(call.problem, [memory.view(t).copy() for _, t in call.reads])
        elif call.kernel == "DynamicQuantizeLinear":
            results = _range(memory.view(call.reads[0][1]))
        elif isinstance(call.problem, ScatterND):
            results = [_scattered(call.problem, {n: memory.view(t).copy() for n, t in call.reads})]
            results = [results[0].reshape(t.shape) for _, t in call.writes]
        elif call.kernel == "SortedRows":
            rows = memory.view(call.reads[0][1])
            order = np.lexsort(rows.T[::-1])
            results = [order if n == "indices" else np.zeros(1) for n, _ in call.writes]
        else:
            assert call.host, f"no interpreter for {call.kernel}"
            read = {n: memory.view(t).copy() for n, t in call.reads}
            results = by_onnxruntime(call.host, [n for n, _ in call.writes], read)
        for (_, tensor), result in zip(call.writes, results, strict=True):
            memory.view(tensor)[...] = np.reshape(result, tensor.shape)
    known: dict[str, np.ndarray] = {}
    for name, value in program.outputs:
        if value is not None:
            known[name] = memory.view(value).copy() if isinstance(value, Tensor) else value
    made: dict[str, np.ndarray] = {}
    for stage in program.stages:
        inputs = {n: made[n] if t is None else memory.view(t).copy() for n, t in stage.inputs}
        if stage.host or lowered is None:
            results = by_onnxruntime(stage.model, stage.outputs, inputs)
            made.update(zip(stage.outputs, results, strict=True))
            continue
        model = ir.serde.deserialize_model(onnx.ModelProto.FromString(stage.model))
        constants = initializers(model)
        if stage.loop is None:
            made |= interpret(lowered(model, inputs), inputs, constants, lowered)
            continue
        names, outputs = [v.name or "" for v in model.graph.inputs], stage.loop.outputs

        def once(given: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            own = {name: given[name] for name in names}  # noqa: B023 - called before the next stage
            found = interpret(lowered(model, own), own, constants, lowered)  # noqa: B023
            return [found[name] for name in outputs]  # noqa: B023

        made |= zip(stage.outputs, run_loop(stage.loop, inputs, once, np.stack), strict=True)
    return known | {name: made[name] for name, value in program.outputs if value is None}


def _image(call: Call, memory: Memory) -> np.ndarray:
    """The one result of a problem of images, through its tail."""
    p, (_, y) = call.problem, call.writes[0]
    read = {name: memory.view(t).astype(np.float64) for name, t in call.reads}
    if isinstance(p, Conv):
        v = images.convolution(p, read)
        if p.tail is not None:
            others = iter([name for name in ("e1", "e2", "e3") if name in read])
            loads = [
                v if i == p.tail.own else read[next(others)].reshape(v.shape)
                for i in range(p.tail.expression.loads)
            ]
            (v,) = evaluate(p.tail.expression, loads, [replace(y, shape=v.shape)])
    elif isinstance(p, ConvWeightGrad):
        v = images.weight_gradient(p, read)
    elif isinstance(p, Pool):
        v = images.pool(p, read["x"])
    elif isinstance(p, Resample):
        v = images.resample(p, read)
    else:
        assert isinstance(p, Reduce)
        v = images.reduction(p, read["x"])
    return v.reshape(y.shape)


def cross_entropy_chunk(
    p: CrossEntropyChunk, read: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """A chunk's losses and weights, and what takes the place of its scores."""
    x, label = read["x"].astype(np.float64), read["target"]
    counts = label != p.ignored
    log_p = x - np.logaddexp.reduce(x, axis=1, keepdims=True)
    each = read["weight"].astype(np.float64) if "weight" in read else np.ones(p.classes)
    safe = np.where(counts, label, 0)
    weight = np.where(counts, each[safe], 0)
    hard, soft = (1 - p.smoothing) * weight, p.smoothing / p.classes * counts
    rows = np.arange(p.rows)
    loss = np.where(counts, -hard * log_p[rows, safe], 0)
    if p.smoothing:
        loss = loss - np.where(counts, soft * (log_p * each).sum(1), 0)
    g = (hard + soft * each.sum())[:, None] * np.exp(log_p) - soft[:, None] * each
    g[rows, safe] -= hard
    return {"rows": np.stack([loss, weight], 1), "dx": g}


def label_score(p: LabelScore, read: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The references of a head's rows."""
    label = read["target"]
    counts = (label != p.ignored) & (label >= 0) & (label < p.classes)
    own = read["w"][np.where(counts, label, 0)].astype(np.float64)
    score = (read["x"].astype(np.float64) * own).sum(1)
    score = score + (
        read["bias"].astype(np.float64)[np.where(counts, label, 0)] if "bias" in read else 0
    )
    near = np.where(np.abs(score) < 1e30, score / np.log(2) + 64, 0)
    return {"to": np.where(counts, near, np.inf)}


def exp_rows(p: ExpRows, read: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The losses of rows of exponentials, and what is left of their gradient."""
    e, label, rows = read["e"].astype(np.float64), read["target"], np.arange(p.rows)
    counts, total = label != p.ignored, read["part"].astype(np.float64).sum(0)
    safe = np.where(counts, label, 0)
    own = e[rows, safe]
    assert ((own > 2.0**-80) & (total < 2.0**96))[counts].all(), "rows to be made anew"
    weight = read["weight"].astype(np.float64)[safe] if "weight" in read else np.ones(p.rows)
    weight, total = np.where(counts, weight, 0), np.where(counts, total, 1)
    scale, loss = weight / total, weight * np.log(total / np.where(counts, own, 1))
    e[rows, safe] -= np.where(counts, total, 0)
    scaled = scale[:, None] * read["x"].astype(np.float64)
    return {"e": e, "rows": np.stack([loss, weight], 1), "scale": scale, "scaled": scaled,
            "narrow": scale}  # fmt: skip


LOSSES: dict[type[AnyProblem], Callable[..., dict[str, np.ndarray]]] = {
    CrossEntropyChunk: cross_entropy_chunk, LabelScore: label_score, ExpRows: exp_rows,
}  # fmt: skip


def _sums(p: Reduce, x: np.ndarray) -> np.ndarray:
    """One pass of a sum over 4-byte floats, by chunks; partial sums travel as bytes."""
    assert (p.reducer, p.state) == ("Sum", 4), p
    flat = np.ascontiguousarray(x).reshape(-1)
    if p.from_state:
        flat = flat.view(np.float32)
    parts = flat.astype(np.float64).reshape(p.outer, p.length, p.inner)
    if not p.length:
        sums = np.zeros((p.outer, p.splits, p.inner))
    else:
        sums = np.add.reduceat(parts, np.arange(p.splits) * p.chunk, axis=1)
    return sums.astype(np.float32).reshape(-1).view(np.uint8) if p.to_state else sums


def _range(x: np.ndarray) -> list[np.ndarray]:
    """Scale and zero point of DynamicQuantizeLinear."""
    with np.errstate(all="ignore"):
        low, high = (f(x[~np.isnan(x)], initial=np.float32(0)) for f in (np.min, np.max))
        scale = np.float32(high - low) / np.float32(255) or np.float32(1)
        zero = np.rint(-low / scale)
    return [np.asarray(scale), np.asarray(255 if np.isnan(zero) else np.clip(zero, 0, 255))]


def _norm(read: Mapping[str, np.ndarray]) -> np.ndarray:
    x = read["x"]
    if "bias" not in read:  # RMSNormalization
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * read["scale"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * read["scale"] + read["bias"]


def _evaluated(p: AnyProblem | None, read: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if isinstance(p, Attention):
        return _attention(p, read)
    if isinstance(p, PackedProduct):
        return _nbits(p, read)
    if isinstance(p, IntegerProduct):
        return _integers(p, read)
    if isinstance(p, Float8):
        return _rounded(p, read)
    if isinstance(p, SlopeProduct):
        step, z, how = 1e-6, read["z"], Problem.of("Gemm", act=p.act, act_alpha=p.act_alpha)
        slope = (activated(how, z + step) - activated(how, z - step)) / (2 * step)
        dz = (read["dy"] * slope).reshape(p.m, p.n)
        return {"dz": dz, "part": np.stack([part.sum(0) for part in np.array_split(dz, p.parts)])}
    return _product(p, read) if isinstance(p, Problem) else {"y": _norm(read)}


def _rounded(p: Float8, read: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A tensor in float8 by its scale, its transpose, and its history with its largest number."""
    kind = dtype_of(p.kind)
    limits: Any = ml_dtypes.finfo
    most, top = float(limits(kind).max), read["history"].max()
    x, start = read["x"].reshape(p.m, p.k), -16 if p.kind == "float8_e5m2" else 0
    exponent = np.clip(np.ceil(np.log2(float(top) / most)), -60, 60) if top else start
    q = np.clip(np.ldexp(x, -int(exponent)), -most, most).astype(np.float32).astype(kind)
    largest = np.abs(x[np.isfinite(x)]).max(initial=0)
    following = np.append(largest, read["history"][:-1])
    sums = np.add.reduceat(x.reshape(p.m, p.k), np.arange(0, p.m, 128), axis=0)
    scale = np.ldexp(1.0, int(exponent))
    return {"q": q, "qt": q.T, "scale": scale, "next": following, "part": sums}


def _product(p: Problem, read: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A Gemm, or a LayerNormGemm with folded weights, as their modules define them."""
    assert p.op in ("Gemm", "LayerNormGemm"), p
    if p.batch:
        assert {name for name, v in p.extras.items() if v} <= BATCHED, p
        assert not p.trans_a | p.trans_b, p
        a, b = (read[name].reshape((*p.batch, *read[name].shape[-2:])) for name in "ab")
        v = a @ b + (read["row0"][:, None] if p.epilogue.row_bias else 0)
        c = read["c"].reshape(v.shape) if "c" in read else 0
        v = v + (c if p.epilogue.beta else 0)
        v = activated(p, v) if p.epilogue.act else v
        return {"y": v + (c if p.epilogue.residual else 0)}
    assert p.op == "Gemm" or not p.trans_a, p
    known = {
        "accumulate",
        "bias",
        "act",
        "residual",
        "moments",
        "column_sums",
        "column_moments",
        "parts",
        "folded",
        "epsilon",
        "static_b",
    }
    known |= {"gate", "rms", "act_alpha", "row_bias", "beta", "layer_scale", "save_z"}
    known |= {"exp", "row_scale"}
    known |= {"align", "lda", "ldb", "ldy", "b_dtype", "bias_dtype"}
    assert {name for name, v in p.extras.items() if v} <= known, p
    a, b = (
        read["a" if p.op == "Gemm" else "x"].reshape(p.m, p.k),
        read["b" if p.op == "Gemm" else "wq"],
    )
    b = b.reshape(p.n, p.k).T * read["scale_a"] * read["scale_b"] if p.b_dtype else b
    v, out = a @ b.reshape(p.k, p.n), {}
    v = v * read["row0"][:, None] if p.epilogue.row_scale else v
    if p.op == "LayerNormGemm":
        assert p.folded
        mean, square = a.mean(-1), a.var(-1) * p.k
        if p.rms:
            mean, square = np.zeros(p.m), (a**2).sum(-1)
        if p.parts:
            means, squares = np.moveaxis(read["part"], 2, 0)
            mean = means.mean(0)
            square = squares.sum(0) + ((means - mean) ** 2).sum(0) * (p.k / p.parts)
        out["mean"], out["rstd"] = mean, 1 / np.sqrt(square / p.k + p.epsilon)
        v = out["rstd"][:, None] * (v - np.outer(out["mean"], read["cs"])) + read["cv"]
    elif p.epilogue.bias:
        v = v + read["col1"]
    elif p.epilogue.row_bias:
        v = v + read["row0"][:, None]
    if p.epilogue.beta:
        v = v + p.epilogue.beta * read["c"].reshape(p.m, p.n)
    if p.epilogue.gate:  # pairs of a gate and another, 8 to a block: the even columns of y first
        blocks = v.reshape(p.m, -1, 2, 4, 2).swapaxes(2, 3).reshape(p.m, -1, 2)
        v, through = blocks[..., 0], blocks[..., 1]
    out |= {"z": v} if p.epilogue.save_z else {}
    if p.epilogue.act:
        v = activated(p, v)
    v = v * through if p.epilogue.gate else v
    if p.epilogue.layer_scale:
        v = v * read["col0"]
    if p.epilogue.residual:
        c = read["c"].reshape(p.m, p.n)
        if p.epilogue.residual == "norm":
            c = (c - read["row1"].reshape(-1, 1)) * read["row0"].reshape(-1, 1) * read["col0"]
        v = v + c
    if p.epilogue.exp:
        v = (
            np.exp2(v / np.log(2) - read["row0"][:, None])
            .astype(dtype_of(p.out))
            .astype(np.float64)
        )
        out["part"] = np.add.reduceat(v, np.arange(0, p.n, EXP_COLUMNS), axis=1).T
    if p.epilogue.moments:
        tiles = v.astype(dtype_of(p.out)).astype(np.float64)
        tiles = tiles.reshape(p.m, p.epilogue.moments, -1)
        out["part"] = np.stack([tiles.mean(-1).T, tiles.var(-1).T * tiles.shape[-1]], -1)
    if p.epilogue.column_sums:
        out["part"] = np.add.reduceat(a, np.arange(0, p.m, 64), axis=0)
    if p.epilogue.column_moments:
        out["part"] = images.column_moments(v.astype(dtype_of(p.out)))
    return out | {"y": v}


def _integers(p: IntegerProduct, read: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A GemmInteger as its module defines it."""
    a, b = read["a"].reshape((*p.batch, p.m, p.k)), read["b"].reshape((*p.batch, p.n, p.k))
    if p.za == "each" and p.za_step:
        a = a - read["za"].reshape(p.batch[-1], p.m, 1)
    elif p.za:
        a = a - read["za"].reshape(-1, 1)
    b = b - read["zb"].reshape(-1, 1) if p.zb else b
    return {"y": a @ b.swapaxes(-1, -2)}


def _nbits(p: PackedProduct, read: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A MatMulNBits as its module defines it."""
    bits, block, blocks = p.bits, p.block, p.blocks

    def unpacked(packed: np.ndarray) -> np.ndarray:
        each = packed.astype(np.uint8).reshape(p.n, -1, 1) >> np.arange(0, 8, bits)
        return (each & (2**bits - 1)).reshape(p.n, -1).astype(np.float64)

    scale = read["scale"].reshape(p.n, blocks)
    zero = np.full((p.n, blocks), 2.0 ** (bits - 1))
    if p.zero:
        packed = p.zero == "packed"
        zero = unpacked(read["zero"])[:, :blocks] if packed else read["zero"].reshape(p.n, blocks)
    group = read["groups"].astype(int) if p.groups else np.arange(p.k) // block
    w = (unpacked(read["q"])[:, : p.k] - zero[:, group]) * scale[:, group]
    y = read["a"].reshape(p.m, p.k) @ w.T
    return {"y": y + read["bias"] if p.epilogue.bias else y}


def _attention(p: Attention, read: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """y, or dq, dk, dv, of an Attention; operands are [B, H, S, D], masks [B, H, S, T]."""
    group, scale, cap = p.group, p.scale, p.softcap
    q, k, v = read["q"], *(np.repeat(read[name], group, 1) for name in "kv")
    with np.errstate(all="ignore"):
        z = scale * q @ k.swapaxes(2, 3)
        tanh = np.tanh(z)
        z, slope = (cap * tanh, cap * (1 - tanh**2)) if cap else (z, np.ones_like(z))
        for end in ("", "2"):
            if f"mask{end}" not in read:
                continue
            mask = read[f"mask{end}"]
            if p.keep2 if end else p.keep:
                z = np.where(mask != 0, z, p.fill2 if end else p.fill)
                slope = np.where(mask != 0, slope, 0)
            elif lowest := p.lowest:  # far beyond the digits that a score has
                z = np.float32(z) + np.float32(np.where(mask == -65504, lowest, mask))
            else:
                z = z + mask
        if p.causal:
            z = np.where(np.tri(*z.shape[2:]) != 0, z, -np.inf)
        if p.window:
            ahead = np.arange(z.shape[3]) - np.arange(z.shape[2])[:, None]
            left, right = (np.inf if n < 0 else n for n in p.window)
            z = np.where((ahead >= -left) & (ahead <= right), z, -np.inf)
        e = np.exp(z - z.max(-1, keepdims=True))
        w = e / e.sum(-1, keepdims=True)
        top = z.max(-1)
        if guard := p.guard:  # of rows that are masked whole, or of every NaN
            w = np.where(np.isnan(w) if guard == 2 else top[..., None] == -np.inf, 0, w)
        lse = np.stack([top, np.log(np.exp(z - top[..., None]).sum(-1))], -1)
    if p.op == "Sdpa":
        return {"y": w @ v, "lse": lse}
    dy = read["dy"]
    dz = w * (dy @ v.swapaxes(2, 3) - (dy * read["y"]).sum(-1, keepdims=True)) * slope * scale
    dk, dv = dz.swapaxes(2, 3) @ q, w.swapaxes(2, 3) @ dy
    heads = (read["k"].shape[0], read["k"].shape[1], group, *dk.shape[2:3])
    dk, dv = (g.reshape(*heads, g.shape[-1]).sum(2) for g in (dk, dv))
    return {"dq": dz @ k, "dk": dk, "dv": dv}
