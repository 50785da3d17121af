"""A Program run by NumPy: pointwise calls step by step, products by their Problem, others as nodes.

Lowered with a table of the families under test alone, all other nodes of a model become host calls,
so lowering, views, chain merging and the plan are checked against onnxruntime without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from onnx_fuse.kernels.pointwise import Expression, Row
from onnx_fuse.llir import Program, Tensor
from onnx_fuse.problem import Problem
from onnx_fuse.runtime.plan import Plan, plan
from onnx_fuse.runtime.tensor import dtype_of

Lowered = Callable[[ir.Model, Mapping[str, np.ndarray]], Program]

_ERF = np.vectorize(math.erf, otypes=[float])


def _trunc_div(a: Any, b: Any) -> Any:
    return a / b if np.asarray(a).dtype.kind == "f" else np.trunc(np.true_divide(a, b))


STEPS: dict[str, Any] = {
    "Identity": lambda x: x,
    "Cast": lambda x: x,
    "CastFloat16": lambda x: np.asarray(x).astype(np.float16),
    "CastBool": lambda x: np.asarray(x) != 0,
    "Abs": np.abs,
    "Add": np.add,
    "And": np.logical_and,
    "ClipMax": np.minimum,
    "ClipMin": np.maximum,
    "Cos": np.cos,
    "Div": _trunc_div,
    "Equal": np.equal,
    "Erf": _ERF,
    "Exp": np.exp,
    "Gelu": lambda x: 0.5 * x * (1 + _ERF(x * 0.7071067811865476)),
    "GeluTanh": lambda x: 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "IsNaN": np.isnan,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Log": np.log,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mod": np.mod,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Pow": np.power,
    "QuickGelu": lambda x, a: x / (1 + np.exp(-a * x)),
    "Reciprocal": lambda x: 1 / x,
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Sign": np.sign,
    "Silu": lambda x: x / (1 + np.exp(-x)),
    "Sin": np.sin,
    "Sqrt": np.sqrt,
    "Square": lambda x: x * x,
    "Sub": np.subtract,
    "Tanh": np.tanh,
    "Where": np.where,
}


class Memory:
    """Buffers of a program as bytes: temporaries in one arena at the plan's offsets."""

    def __init__(self, program: Program, layout: Plan) -> None:
        self.arena = np.full(layout.arena, 0xA5, np.uint8)
        self.parts = {}
        for b in program.buffers:
            if b.id in layout.offsets:
                at = layout.offsets[b.id]
                self.parts[b.id] = self.arena[at : at + b.nbytes]
            else:
                self.parts[b.id] = np.full(b.nbytes, 0xA5, np.uint8)

    def view(self, t: Tensor) -> np.ndarray:
        dtype = dtype_of(t.dtype)
        flat = self.parts[t.buffer].view(dtype)[t.offset :]
        strides = [s * dtype.itemsize for s in t.strides]
        return np.lib.stride_tricks.as_strided(flat, t.shape, strides)

    def rows(self, t: Tensor, row: Row, index: np.ndarray) -> np.ndarray:
        """`t`, each element `row.step` elements further for each of `index`."""
        k = np.where(index < 0, index + row.size, index)
        inside = (k >= 0) & (k < row.size)
        at = t.offset + np.where(inside, k, 0) * row.step
        for places, step in zip(np.indices(t.shape), t.strides, strict=True):
            at = at + places * step
        found: np.ndarray = self.parts[t.buffer].view(dtype_of(t.dtype))[at]
        return np.where(inside, found, np.zeros((), found.dtype))


def interpret(
    program: Program,
    feeds: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
    lowered: Lowered | None = None,
) -> dict[str, np.ndarray]:
    """The program's outputs; temporaries really share memory as planned.

    Its later stages are lowered by `lowered`, and interpreted in their turn, or run by onnxruntime.
    """
    memory = Memory(program, plan(program))
    for name, tensor in program.inputs:
        memory.view(tensor)[...] = feeds[name]
    for b in program.buffers:
        if b.kind == "weight" and b.id not in program.constants:
            memory.parts[b.id][...] = (
                np.ascontiguousarray(weights[b.name]).reshape(-1).view(np.uint8)
            )
    for buffer, array in program.constants.items():
        memory.parts[buffer][...] = array.reshape(-1).view(np.uint8)
    for call in program.calls:
        if call.expression is not None:
            reads = [memory.view(t).copy() for _, t in call.reads]
            for row in call.expression.rows:
                reads[row.load] = memory.rows(call.reads[row.load][1], row, reads[row.index])
            results = _evaluate(call.expression, reads, [t for _, t in call.writes])
        elif call.problem is not None or call.kernel == "LayerNormalization":
            read = {name: memory.view(t).astype(np.float64) for name, t in call.reads}
            found = _product(call.problem, read) if call.problem is not None else {"y": _norm(read)}
            results = [found[name].reshape(t.shape) for name, t in call.writes]
        else:
            assert call.host, f"no interpreter for {call.kernel}"
            session = onnxruntime.InferenceSession(call.host)
            results = session.run(
                [n for n, _ in call.writes], {n: memory.view(t).copy() for n, t in call.reads}
            )
        for (_, tensor), result in zip(call.writes, results, strict=True):
            memory.view(tensor)[...] = result
    known = {}
    for name, value in program.outputs:
        known[name] = memory.view(value).copy() if isinstance(value, Tensor) else value
    made: dict[str, np.ndarray] = {}
    for stage in program.stages:
        inputs = {n: made[n] if t is None else memory.view(t).copy() for n, t in stage.inputs}
        if stage.host or lowered is None:
            session = onnxruntime.InferenceSession(stage.model)
            made.update(zip(stage.outputs, session.run(list(stage.outputs), inputs), strict=True))
            continue
        model = ir.serde.deserialize_model(onnx.ModelProto.FromString(stage.model))
        constants = {n: v.const_value.numpy() for n, v in model.graph.initializers.items()}
        made |= interpret(lowered(model, inputs), inputs, constants, lowered)
    return known | {name: made[name] for name, value in program.outputs if value is None}


def _norm(read: Mapping[str, np.ndarray]) -> np.ndarray:
    x = read["x"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * read["scale"] + read["bias"]


def _product(p: Problem, read: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A Gemm, or a LayerNormGemm with folded weights, as their modules define them; no batch."""
    assert p.op in ("Gemm", "LayerNormGemm"), p
    assert not p.batch, p
    assert not p.trans_a, p
    known = {"bias", "act", "residual", "moments", "parts", "folded", "epsilon", "static_b"}
    assert {name for name, v in p.attrs if v} <= known | {"align", "lda", "ldb"}, p
    a, b = (
        read["a" if p.op == "Gemm" else "x"].reshape(p.m, p.k),
        read["b" if p.op == "Gemm" else "wq"],
    )
    v, out = a @ b.reshape(p.k, p.n), {}
    if p.op == "LayerNormGemm":
        assert p.attr("folded")
        mean, square = a.mean(-1), a.var(-1) * p.k
        if p.attr("parts"):
            means, squares = np.moveaxis(read["part"], 2, 0)
            mean = means.mean(0)
            square = squares.sum(0) + ((means - mean) ** 2).sum(0) * (p.k / p.integer("parts"))
        out["mean"], out["rstd"] = mean, 1 / np.sqrt(square / p.k + p.number("epsilon"))
        v = out["rstd"][:, None] * (v - np.outer(out["mean"], read["cs"])) + read["cv"]
    elif p.attr("bias"):
        v = v + read["col1"]
    if p.attr("act"):
        v = STEPS[{"gelu": "Gelu", "relu": "Relu"}[p.text("act")]](v)
    if p.attr("residual"):
        c = read["c"].reshape(p.m, p.n)
        if p.attr("residual") == "norm":
            c = (c - read["row1"].reshape(-1, 1)) * read["row0"].reshape(-1, 1) * read["col0"]
        v = v + c
    if p.attr("moments"):
        tiles = v.astype(dtype_of(p.out)).astype(np.float64)
        tiles = tiles.reshape(p.m, p.integer("moments"), -1)
        out["part"] = np.stack([tiles.mean(-1).T, tiles.var(-1).T * tiles.shape[-1]], -1)
    return out | {"y": v}


def _evaluate(
    expression: Expression, reads: list[np.ndarray], writes: list[Tensor]
) -> list[np.ndarray]:
    values: list[Any] = [*reads, *(np.asarray(v) for _, v in expression.scalars)]
    with np.errstate(all="ignore"):
        for step in expression.steps:
            result = STEPS[step.name](*(values[a] for a in step.args))
            values.append(np.asarray(result).astype(dtype_of(step.dtype)))
    return [
        np.broadcast_to(values[s], t.shape) for s, t in zip(expression.stores, writes, strict=True)
    ]
