"""NumPy's answers to products: Gemm in all its forms, norms and products, packed weights."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from onnx_fuse.program import nbits_tiles
from onnx_fuse.program.call import dtype_of
from onnx_fuse.program.contractions import IntegerProduct, PackedProduct
from onnx_fuse.program.epilogue import EXP_COLUMNS
from onnx_fuse.program.interpret.data_movement import Results
from onnx_fuse.program.interpret.memory import CallOperands
from onnx_fuse.program.interpret.norms import column_moments
from onnx_fuse.program.interpret.steps import activated, activation, derivative
from onnx_fuse.program.problem import GemmProblem
from onnx_fuse.program.problems import SlopeProduct


def _batched(
    p: GemmProblem, of: CallOperands, name: str, rows: tuple[int, int, int, int]
) -> np.ndarray:
    """An operand [*batch, m, n]: (m, n, the strides of both), batch strides by the problem."""
    m, n, row, column = rows
    dense = {"a": p.m * p.k, "b": p.k * p.n, "c": p.m * p.n}.get(name, 0)
    batch = p.batch_strides(name, dense)[3 - len(p.batch) :] if p.batch else ()
    return of.strided(name, (*p.batch, m, n), (*batch, row, column))


def _left(p: GemmProblem, of: CallOperands, name: str = "a") -> np.ndarray:
    row, _ = p.ld
    return _batched(p, of, name, (p.m, p.k, 1, row) if p.trans_a else (p.m, p.k, row, 1))


def _right(p: GemmProblem, of: CallOperands, name: str = "b") -> np.ndarray:
    _, row = p.ld
    return _batched(p, of, name, (p.k, p.n, 1, row) if p.trans_b else (p.k, p.n, row, 1))


def _row(of: CallOperands, name: str, n: int) -> np.ndarray:
    """The n numbers from the first one of what is read."""
    return of.dense(name, n)


def _column(of: CallOperands, name: str, m: int) -> np.ndarray:
    return of.dense(name, m, 1)


def gemm(p: GemmProblem, of: CallOperands) -> Results:
    """A problem of products, as `op` says."""
    return {
        "Gemm": _gemm, "LayerNormGemm": _norm_gemm, "LayerNormGemmGrad": _norm_gemm_grad,
        "LayerNormLeafGrad": _leaf_grad,
    }[p.op](p, of)  # fmt: skip


def _gemm(p: GemmProblem, of: CallOperands) -> Results:
    assert not p.rows, p  # a kernel's own, inside of other problems
    assert not p.planes, p
    a, b = _left(p, of), _right(p, of)
    with np.errstate(all="ignore"):
        v = a @ b
        v = v * (_row(of, "scale_a", 1) * _row(of, "scale_b", 1)) if p.b_dtype else v
        results: Results = {}
        if p.parts:
            mean, rstd = _statistics(p, of, np.zeros((p.m, p.k)))
            results |= {"row0": rstd, "row1": mean}
        c = None
        if p.epilogue.among("beta", "dact", "residual"):
            c = _batched(p, of, "c", (p.m, p.n, *p.ldc))
        results |= _behind(p, of, v, c)
    if p.epilogue.column_sums:
        results["part"] = np.add.reduceat(a, np.arange(0, p.m, 64), axis=0)
    return results


def _behind(p: GemmProblem, of: CallOperands, v: np.ndarray, c: np.ndarray | None) -> Results:
    """What the epilogue makes of the sums v, in the order of its fields."""
    e, results = p.epilogue, Results()
    assert not e.dx, p  # a kernel's own, inside of LayerNormGemmGrad
    assert not e.dw, p
    v = v * e.alpha
    v = v * _column(of, "row0", p.m) if e.row_scale else v
    if e.layernorm:
        shift = 0 if p.rms else _column(of, "row1", p.m) * _row(of, "col0", p.n)
        v = _column(of, "row0", p.m) * (v - shift) + _row(of, "col1", p.n)
    elif e.bias:
        v = v + _row(of, "col1", p.n)
    elif e.row_bias:
        v = v + _column(of, "row0", p.m)
    if e.beta and c is not None:
        v = v + e.beta * c
    if e.exp:
        v = np.exp2(v / np.log(2) - _column(of, "row0", p.m))
        v = v.astype(dtype_of(p.out)).astype(np.float64)
        results["part"] = np.add.reduceat(v, np.arange(0, p.n, EXP_COLUMNS), axis=1).T
    through = None
    if e.gate:  # pairs of a gate and another, 8 to a block: the even columns first
        blocks = v.reshape(p.m, -1, 2, 4, 2).swapaxes(2, 3).reshape(p.m, -1, 2)
        results["z"] = v
        v, through = blocks[..., 0], blocks[..., 1]
    elif e.save_z:
        results["z"] = v
    if e.dact and c is not None:
        v = v * derivative(e.act, e.act_alpha, c)
        results |= {"z": activated(p, c)} if e.save_act else {}
    elif e.act:
        v = activated(p, v)
    v = v * through if through is not None else v
    v = v * _row(of, "col0", v.shape[-1]) if e.layer_scale else v
    if e.residual and c is not None:
        if e.residual == "norm":
            c = (c - _column(of, "row1", p.m)) * _column(of, "row0", p.m) * _row(of, "col0", p.n)
        v = v + c
    if e.accumulate:
        v = v.astype(dtype_of(p.out)).astype(np.float64)
        v = v + of.former("y").reshape(v.shape)
    if e.moments:
        tiles = v.astype(dtype_of(p.out)).astype(np.float64).reshape(p.m, e.moments, -1)
        results["part"] = np.stack([tiles.mean(-1).T, tiles.var(-1).T * tiles.shape[-1]], -1)
    if e.column_moments:
        results["part"] = column_moments(v.astype(dtype_of(p.out)))
    if e.exp:  # zeros from column n on
        wide = np.zeros((p.m, of.writes["y"].shape[-1]))
        wide[:, : p.n] = v
        v = wide
    return results | {"y": v}


def _statistics(p: GemmProblem, of: CallOperands, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """mean and rstd [m, 1] of x's rows, from the parts or as they are given where they are."""
    if p.stats:
        return (np.zeros((p.m, 1)) if p.rms else _column(of, "mean", p.m)), _column(of, "rstd", p.m)
    if p.parts:
        means, squares = np.moveaxis(of.dense("part", p.parts, p.m, 2), 2, 0)
        mean = means.mean(0)
        square = squares.sum(0) + ((means - mean) ** 2).sum(0) * (p.k / p.parts)
        mean, square = mean[:, None], square[:, None]
    else:
        mean = np.zeros((p.m, 1)) if p.rms else x.mean(1, keepdims=True)
        square = np.square(x - mean).sum(1, keepdims=True)
    return mean, 1 / np.sqrt(square / p.k + p.epsilon)


def _norm_gemm(p: GemmProblem, of: CallOperands) -> Results:
    """act(N(x) · w + c), by folded weights or by the norm's parameters."""
    assert not p.trans_a | bool(p.batch), p
    x = of.dense("x", p.m, p.k)
    with np.errstate(all="ignore"):
        mean, rstd = _statistics(p, of, x)
        if p.folded:
            v = rstd * (x @ _right(p, of, "wq") - mean * _row(of, "cs", p.n)) + _row(of, "cv", p.n)
        else:
            rows = (x - mean) * rstd * _row(of, "gamma", p.k)
            rows = rows + (_row(of, "beta", p.k) if "beta" in of else 0)
            v = rows @ _right(p, of, "w") + (_row(of, "c", p.n) if p.epilogue.bias else 0)
        r = of.dense("r", p.m, p.n) if p.epilogue.residual else None
        inner = replace(p, epilogue=replace(p.epilogue, bias=False))
        return {"mean": mean, "rstd": rstd} | _behind(inner, of, v, r)


def _norm_gemm_grad(p: GemmProblem, of: CallOperands) -> Results:
    """The gradients of act(N(x) · w + c) by dy, x, the statistics and z."""
    shape = (p.n, p.k) if p.trans_b else (p.k, p.n)
    dy, x, w = of.dense("dy", p.m, p.n), of.dense("x", p.m, p.k), of.dense("w", *shape)
    w = w.T if p.trans_b else w
    gamma, rstd = _row(of, "gamma", p.k), _column(of, "rstd", p.m)
    mean = 0 if p.rms else _column(of, "mean", p.m)
    beta = 0 if p.rms else _row(of, "beta", p.k)
    with np.errstate(all="ignore"):
        dz = dy
        if p.epilogue.act:
            z = of.dense("z", p.m, p.n)
            dz = dy * derivative(p.epilogue.act, p.epilogue.act_alpha, z)
        xh = (x - mean) * rstd
        dn = dz @ (gamma[:, None] * w).T
        dx = dn - xh * (dn * xh).mean(1, keepdims=True)
        dx = rstd * (dx if p.rms else dx - dn.mean(1, keepdims=True))
        if p.add:
            dx = dx + (of.dense("add", p.m, p.k) if p.add == "apart" else _held(p, of))
        dc, g = dz.sum(0), xh.T @ dz
        dw = gamma[:, None] * g + (0 if p.rms else np.outer(beta, dc))
    results = {"dx": dx, "dgamma": (w * g).sum(1), "dbeta": w @ dc, "dc": dc}
    return results | {"dw": dw.T if p.trans_b else dw}


def _held(p: GemmProblem, of: CallOperands) -> np.ndarray:
    """What dx holds before, which the gradient is added to."""
    return of.former("dx").reshape(p.m, p.k)


def _leaf_grad(p: GemmProblem, of: CallOperands) -> Results:
    """The gradients of W behind a norm whose x needs none."""
    a, b = _left(p, of), _right(p, of)
    g = a @ b  # of dt and xh, or `turned` of xh and dt
    w, features = of.dense("w", p.m, p.n), p.m if p.turned else p.n
    gamma, beta = (_row(of, name, features) for name in ("gamma", "beta"))
    if p.turned:
        dc = b.sum(0)
        dw = gamma[:, None] * g + np.outer(beta, dc)
        return {"dw": dw, "dgamma": (w * g).sum(1), "dbeta": w @ dc, "dc": dc}
    dc = a.sum(1)
    dw = g * gamma + np.outer(dc, beta)
    return {"dw": dw, "dgamma": (w * g).sum(0), "dbeta": dc @ w, "dc": dc}


def integers(p: IntegerProduct, of: CallOperands) -> Results:
    """Sums of products of integers, modulo 2^32."""
    lda, ldb = p.lda or p.k, p.ldb or p.k
    a = of.strided("a", (*p.batch, p.m, p.k), (*_steps(p.a_strides, p.batch, p.m * lda), lda, 1))
    b = of.strided("b", (*p.batch, p.n, p.k), (*_steps(p.b_strides, p.batch, p.n * ldb), ldb, 1))
    if p.za == "each" and p.za_step:
        a = a - of.strided("za", (p.batch[-1], p.m, 1), (p.za_step, 1, 1))
    elif p.za:
        a = a - _column(of, "za", p.m if p.za == "each" else 1)
    b = b - _column(of, "zb", p.n if p.zb == "each" else 1) if p.zb else b
    y = (a @ b.swapaxes(-1, -2)).astype(np.int64)
    return {"y": ((y + 2**31) % 2**32 - 2**31).astype(np.int32)}


def _steps(strides: tuple[int, ...], batch: tuple[int, ...], dense: int) -> tuple[int, ...]:
    """The strides of batch axes, dense where none are given."""
    if strides:
        return strides
    return tuple(dense * prod(batch[i + 1 :]) for i in range(len(batch)))


def packed(p: PackedProduct, of: CallOperands) -> Results:
    """a · wᵀ of weights of a few bits, a's rows normalised first where the problem says so."""
    a = of.dense("a", p.m, p.k)
    if p.norm:
        a = _normalised(p, of, a)
    q, scale, zero = _tiled_weights(p, of) if p.tiled else _weights(p, of)
    group = _row(of, "groups", p.k) if p.groups else np.arange(p.k) // p.block
    y = a @ ((q - zero[:, group]) * scale[:, group]).T
    epilogue = p.epilogue
    assert set(epilogue.given) <= {"bias", "residual", "gate", "act", "act_alpha"}, p
    if epilogue.bias:
        y = y + _row(of, "bias", p.n)
    if epilogue.gate:
        return {"y": activation(epilogue.act, epilogue.act_alpha, y[:, : p.n // 2])
                * y[:, p.n // 2 :]}  # fmt: skip
    if epilogue.act:
        y = activation(epilogue.act, epilogue.act_alpha, y)
    return {"y": y + of.dense("c", p.m, p.n) if epilogue.residual else y}


def _weights(p: PackedProduct, of: CallOperands) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, scale and zero points of rows."""

    def unpacked(name: str) -> np.ndarray:
        each = of.raw(name).astype(np.uint8).reshape(p.n, -1, 1) >> np.arange(0, 8, p.bits)
        return (each & (2**p.bits - 1)).reshape(p.n, -1).astype(np.float64)

    zero = np.full((p.n, p.blocks), 2.0 ** (p.bits - 1))
    if p.zero == "packed":
        zero = unpacked("zero")[:, : p.blocks]
    elif p.zero:
        zero = of.shaped("zero", p.n, p.blocks)
    return unpacked("q")[:, : p.k], of.shaped("scale", p.n, p.blocks), zero


def _tiled_weights(p: PackedProduct, of: CallOperands) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q = nbits_tiles.untiled(of.raw("q").reshape(-1, p.k // nbits_tiles.CHUNK, 32, 16), p.n)
    words = of.raw("scale").reshape(-1, p.blocks, 8, 4 if p.zero else 2)
    scale, zero = nbits_tiles.untiled_scales(words, p.n)
    if zero is None:
        zero = np.full((p.n, p.blocks), 8.0)
    return q.astype(np.float64), scale.astype(np.float64), zero.astype(np.float64)


def _normalised(p: PackedProduct, of: CallOperands, a: np.ndarray) -> np.ndarray:
    mean = 0.0 if p.norm == "rms" else a.mean(1, keepdims=True)
    with np.errstate(all="ignore"):
        rows = (a - mean) / np.sqrt(np.square(a - mean).mean(1, keepdims=True) + p.epsilon)
        rows = rows * _row(of, "gamma", p.k) + (_row(of, "beta", p.k) if "beta" in of else 0)
    return rows.astype(dtype_of(p.dtype)).astype(np.float64)


def slope_product(p: SlopeProduct, of: CallOperands) -> Results:
    """dz = dy act'(z), and its column sums, whole or in parts of rows."""
    dz = of.dense("dy", p.m, p.n)
    if p.act:
        dz = dz * derivative(p.act, p.act_alpha, of.dense("z", p.m, p.n))
    each = -(-p.m // p.parts)
    part = np.stack([dz[i * each : (i + 1) * each].sum(0) for i in range(p.parts)])
    return {"dz": dz, "part": part, "dbias": dz.sum(0)}
