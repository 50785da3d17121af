"""MatMulNBits, and products of weights that stay in 2, 4 or 8 bits."""

from __future__ import annotations

from math import ceil, prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.kernels.matmul_nbits import FLOATS
from onnx_fuse.lower import linear
from onnx_fuse.lower.context import Context, Lowering, Unserved, apply
from onnx_fuse.lower.quant import four_bit_weights
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.contractions import PackedProduct
from onnx_fuse.program.epilogue import Epilogue
from onnx_fuse.program.nbits_tiles import CHUNK, tiled, tiled_scales


def product(
    ctx: Context,
    node: ir.Node,
    a: Tensor,
    y: Tensor,
    packed: dict[str, Tensor],
    *,
    n: int,
    bits: int,
    block: int,
    zero: str,
) -> None:
    """y [..., n] = a [..., k] · wᵀ + bias; `packed`: q, scale, and zero, groups, bias if any."""
    k = a.shape[-1]
    tiles = _tiles(ctx, a, packed, bits=bits, block=block, zero=zero)
    packed = tiles or packed
    fixed = [packed[name] for name in ("q", "scale", "zero") if name in packed]
    problem = PackedProduct(
        m=prod(a.shape[:-1]), n=n, k=k, dtype=a.dtype, math=ctx.math, bits=bits, block=block,
        blocks=ceil(k / block), zero=zero, groups="groups" in packed, tiled=tiles is not None,
        static_b=all(ctx.known(t) is not None for t in fixed),
        epilogue=Epilogue(bias="bias" in packed),
    )  # fmt: skip
    ctx.select(node, problem, {"a": a, **packed}, {"y": y})


def _tiles(
    ctx: Context, a: Tensor, packed: dict[str, Tensor], *, bits: int, block: int, zero: str
) -> dict[str, Tensor] | None:
    """The operands with constant 4-bit weights in an mma's order; None where they cannot be."""
    k, half = a.shape[-1], a.dtype in ("float16", "bfloat16")
    whole = k % CHUNK == 0 and k % block == 0 and (block == 32 or block % CHUNK == 0)
    if bits != 4 or not half or not whole or zero == "float" or "groups" in packed:
        return None
    points, how = None, "in tiles"
    if zero:
        tensor = packed["zero"]
        raw = ctx.known(tensor)
        if raw is None:
            return None
        halves = raw.reshape(-1, ceil(k / block / 2), 1) >> np.array([0, 4], np.uint8) & 15
        points = halves.reshape(len(halves), -1)[:, : k // block]
        how = f"{how} with {tensor.buffer} {tensor.offset}"
    q = ctx.packed(packed["q"], "in tiles", lambda array: tiled(array.reshape(-1, k // 2)))
    scale = ctx.packed(
        packed["scale"], how, lambda array: tiled_scales(array.reshape(-1, k // block), points)
    )
    if q is None or scale is None:
        return None
    bias = {"bias": packed["bias"]} if "bias" in packed else {}
    return {"q": q, "scale": scale, **bias}


def matmul_nbits(ctx: Context, node: ir.Node) -> None:
    """com.microsoft.MatMulNBits: a [..., K], q, scales, zero points, g_idx, bias."""
    sizes = [int(ctx.attr(node, name, default)) for name, default in
             (("K", 0), ("N", 0), ("bits", 4), ("block_size", 0))]  # fmt: skip
    k, n, bits, block = sizes
    if ctx.attr(node, "weight_prepacked", 0):
        raise Unserved("no-kernel", what="weights packed for another runtime's")
    if bits not in (2, 4, 8) or block < 16 or block & (block - 1):
        raise Unserved("no-kernel", what=f"{bits} bits in blocks of {block}")
    a = ctx.dense(node, 0)
    if a.dtype not in FLOATS:
        raise Unserved("no-kernel", what=a.dtype)
    if a.shape[-1:] != (k,):
        raise ValueError(f"rows of a have {a.shape[-1] if a.shape else 1} elements, but K is {k}")
    y = ctx.output(node, 0, (*a.shape[:-1], n), a.dtype)
    if not y.size:
        return
    names = {1: "q", 2: "scale", 3: "zero", 4: "groups", 5: "bias"}
    packed = {name: ctx.dense(node, i) for i, name in names.items() if ctx.has(node, i)}
    if not packed["q"].size or not k:  # weights left out
        return apply(ctx, node, y, "", packed.get("bias", 0))
    blocks = ceil(k / block)
    elements = {"q": n * blocks * block * bits // 8, "scale": n * blocks, "groups": k, "bias": n}
    zero = ""
    if "zero" in packed:
        zero = "packed" if packed["zero"].dtype == "uint8" else "float"
        elements["zero"] = n * (ceil(blocks * bits / 8) if zero == "packed" else blocks)
    for name, tensor in packed.items():
        if tensor.size != elements[name]:
            raise ValueError(f"{elements[name]} elements of {name} are needed, not {tensor.size}")
        like = name in ("scale", "bias") or (name, zero) == ("zero", "float")
        if like and tensor.dtype != a.dtype:
            raise Unserved("no-kernel", what=f"{a.dtype} with {name} in {tensor.dtype}")
    product(ctx, node, a, y, packed, n=n, bits=bits, block=block, zero=zero)


def _nibbles(array: np.ndarray) -> np.ndarray:
    """Pack rows of 4-bit integers two a byte, the first in the low bits; int4 is offset by 8."""
    signed = array.dtype.name == "int4"
    wide = array.astype(np.int8) + (8 if signed else 0)
    even = np.pad(wide, [(0, 0)] * (wide.ndim - 1) + [(0, wide.shape[-1] % 2)]).astype(np.uint8)
    return np.ascontiguousarray(even[..., ::2] | even[..., 1::2] << 4)


def matmul(ctx: Context, node: ir.Node) -> None:
    """MatMul; of dequantized 4-bit weights as MatMulNBits, from 4 bits."""
    value = node.inputs[1]
    source = value.producer() if value is not None else None
    if source is None or (source.domain, source.op_type) != ("", "DequantizeLinear"):
        return linear.matmul(ctx, node)
    a = ctx.view(node, 0)
    scale = ctx.view(source, 1)
    if not four_bit_weights(ctx, source) or a.dtype != scale.dtype or len(a.shape) < 2:
        return linear.matmul(ctx, node)
    q = ctx.view(source, 0)
    k, n = q.shape
    block = int(ctx.attr(source, "block_size", 0)) or k
    if a.shape[-1] != k or block > 1 << 20:
        return linear.matmul(ctx, node)
    blocks = ceil(k / block)

    def weights(array: np.ndarray) -> np.ndarray:
        whole = np.pad(array.astype(np.int8), [(0, blocks * block - k), (0, 0)])
        return _nibbles(np.ascontiguousarray(whole.T).astype(array.dtype))

    def rows(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.reshape(blocks, n).T)

    operands = {
        "q": ctx.packed(q, "two a byte", weights),
        "scale": ctx.packed(scale, "rows of blocks", rows),
    }
    zero = "packed" if ctx.has(source, 2) else ""
    if zero:
        operands["zero"] = ctx.packed(
            ctx.view(source, 2), "rows, two a byte", lambda array: _nibbles(rows(array))
        )
    elif q.dtype == "uint4":
        nothing = np.zeros((n, ceil(blocks / 2)), np.uint8)
        operands["zero"], zero = ctx.constant(nothing), "packed"
    packed = {name: t for name, t in operands.items() if t is not None}
    assert len(packed) == len(operands)
    a = ctx.contiguous(a)
    y = ctx.output(node, 0, (*a.shape[:-1], n), a.dtype)
    product(ctx, node, a, y, packed, n=n, bits=4, block=block, zero=zero)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("com.microsoft", "MatMulNBits"): matmul_nbits,
    ("", "MatMul"): matmul,
}
