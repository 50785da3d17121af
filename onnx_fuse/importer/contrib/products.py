"""Products with what onnxruntime fused into them: FusedMatMul, FusedGemm, FusedConv."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_fuse.importer.contrib.table import (
    CONV,
    Body,
    Results,
    Unwritable,
    attr,
    contrib,
    known_rank,
    needed,
)
from onnx_fuse.ir.build import given


def _operand(op: Body, node: ir.Node, i: int, side: str) -> ir.Value:
    """The matrices of operand A or B of FusedMatMul.

    With `transBatch` the axes before the last stand one place to the right: (m, batch..., k).
    """
    x, trans, batch = (
        needed(node, i),
        attr(node, f"trans{side}", 0),
        attr(node, f"transBatch{side}", 0),
    )
    if not trans and not batch:
        return x
    size = known_rank(x, side)
    if size < 2:
        return x  # a vector has nothing to transpose
    order = [*range(1, size - 1), 0, size - 1] if batch else list(range(size))
    if trans:
        order[-2:] = order[-1], order[-2]
    return op.Transpose(x, perm=order)


def _product(op: Body, node: ir.Node) -> ir.Value:
    a, b = (_operand(op, node, i, side) for i, side in enumerate("AB"))
    y, alpha = op.MatMul(a, b), attr(node, "alpha", 1.0)
    return y if alpha == 1.0 else op.Mul(y, op.number(alpha, y))


@contrib("FusedMatMul", "TransposeMatMul")
def fused_matmul(op: Body, node: ir.Node) -> Results:
    return [_product(op, node)]


@contrib("FusedMatMulActivation")
def fused_matmul_activation(op: Body, node: ir.Node) -> Results:
    parameters = [attr(node, f"activation_{name}") for name in ("alpha", "beta")]
    return [activated(op, _product(op, node), attr(node, "activation", ""), parameters)]


def activated(op: Body, y: ir.Value, name: str, parameters: Sequence[float | None]) -> ir.Value:
    """act(y) for an activation of onnxruntime's fused operators; absent parameters default."""
    alpha, beta = (*parameters, None, None)[:2]
    result: ir.Value
    match name:
        case "":
            return y
        case "Relu" | "Sigmoid" | "Tanh" | "Softplus" | "Softsign":
            result = op.node(name, [y])
        case "LeakyRelu" | "Elu" | "ThresholdedRelu":
            result = op.node(name, [y], alpha=alpha)
        case "HardSigmoid" | "Selu":
            last = {"HardSigmoid": "beta", "Selu": "gamma"}[name]
            result = op.node(name, [y], alpha=alpha, **{last: beta})
        case "Clip":
            if alpha is None or beta is None:
                raise Unwritable("its activation Clip has no bounds")
            result = op.Clip(y, op.number(alpha, y), op.number(beta, y))
        case _:
            raise Unwritable(f"its activation '{name}' is not known")
    return result


@contrib("FusedGemm")
def fused_gemm(op: Body, node: ir.Node) -> Results:
    operands = [needed(node, 0), needed(node, 1), given(node, 2)]
    y = op.like("Gemm", node, operands, "alpha beta transA transB")
    name = attr(node, "activation", "")
    second = "gamma" if name == "Selu" else "beta"
    parameters = [attr(node, f"activation_{k}") for k in ("alpha", second)]
    return [activated(op, y, name, parameters)]


@contrib("FusedConv")
def fused_conv(op: Body, node: ir.Node) -> Results:
    """act(Conv(X, W, B) + Z)."""
    x, added = needed(node, 0), given(node, 3)
    y = op.like("Conv", node, [x, needed(node, 1), given(node, 2)], CONV)
    if added is not None:
        y = op.Add(y, added)
    parameters = attr(node, "activation_params", ())
    return [activated(op, y, attr(node, "activation", ""), list(parameters))]
