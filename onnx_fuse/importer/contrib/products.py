"""Products with what onnxruntime fused into them: FusedMatMul, FusedGemm, FusedConv."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_fuse.importer.contrib.table import (
    CONV,
    Body,
    Input,
    Results,
    Unwritable,
    contrib,
    known_rank,
)


def _operand(op: Body, x: ir.Value, side: str) -> ir.Value:
    """The matrices of operand A or B of FusedMatMul.

    With `transBatch` the axes before the last stand one place to the right: (m, batch..., k).
    """
    trans, batch = op.attr(f"trans{side}", 0), op.attr(f"transBatch{side}", 0)
    if not trans and not batch:
        return x
    size = known_rank(x, side)
    if size < 2:
        return x  # a vector has nothing to transpose
    order = [*range(1, size - 1), 0, size - 1] if batch else list(range(size))
    if trans:
        order[-2:] = order[-1], order[-2]
    return op.Transpose(x, perm=order)


@contrib("FusedMatMul", "TransposeMatMul")
def fused_matmul(op: Body, a: ir.Value, b: ir.Value) -> ir.Value:
    product = op.MatMul(_operand(op, a, "A"), _operand(op, b, "B"))
    y: ir.Value = op.formula("product * alpha", product=product, alpha=op.attr("alpha", 1.0))
    return y


@contrib("FusedMatMulActivation")
def fused_matmul_activation(op: Body, a: ir.Value, b: ir.Value) -> Results:
    parameters = [op.attr(f"activation_{name}") for name in ("alpha", "beta")]
    return activated(op, fused_matmul(op, a, b), op.attr("activation", ""), parameters)


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
            result = op.formula("Clip(y, alpha, beta)", y=y, alpha=alpha, beta=beta)
        case _:
            raise Unwritable(f"its activation '{name}' is not known")
    return result


@contrib("FusedGemm")
def fused_gemm(op: Body, a: ir.Value, b: ir.Value, c: Input) -> Results:
    y = op.like("Gemm", [a, b, c], "alpha beta transA transB")
    name = op.attr("activation", "")
    second = "gamma" if name == "Selu" else "beta"
    return activated(op, y, name, [op.attr(f"activation_{k}") for k in ("alpha", second)])


@contrib("FusedConv")
def fused_conv(op: Body, x: ir.Value, w: ir.Value, bias: Input, added: Input) -> Results:
    """act(Conv(X, W, B) + Z)."""
    y = op.plus(op.like("Conv", [x, w, bias], CONV), added)
    return activated(op, y, op.attr("activation", ""), op.attr("activation_params", ()))
