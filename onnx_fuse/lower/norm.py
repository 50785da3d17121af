"""Normalizations: Layer, RMS, Skip (residual), Group, Instance and Batch.

Rows that fit in registers take one kernel (layernorm/row.cu); few long rows, and BatchNormalization
in training, take the split reduction to moments and then layernorm/channel.cu.
"""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from onnx_fuse.cuda.macros import C_TYPES, FLOATS, accumulator, defines, pow2
from onnx_fuse.lower.reduce import block_of, reduction, team, vector
from onnx_fuse.lower.softmax import row_items
from onnx_fuse.onnx.common import FUSE
from onnx_fuse.onnx.names import FusedName
from onnx_fuse.program.call import Context, Lowering, Tensor
from onnx_fuse.program.problem import ITEMSIZE, Launch, Num, Ptr

_GRAD_THREADS = 202752  # of a gradient's row loops: fixed, so that its sums are the shape's alone
_CHANNEL_BLOCKS = 1024  # of a channel's sums, likewise
_KEPT = 40  # elements of a row a thread may hold in registers


def row_launch(
    rows: int, length: int, x: str, *, param: str, stat: str, rms: bool, residual: bool,
    affine: int, groups: int = 1, channels: int = 1, inner: int = 1, epsilon: float,
) -> Launch:  # fmt: skip
    """Launch of layernorm/row.cu; names x residual scale bias e1 e2 e3 w c y sum mean rstd z."""
    vec = min(vector(length, x), vector(inner, x) if affine == 2 else 16)
    if affine == 1:
        vec = min(vec, vector(length, param))
    threads = team(rows, length, vec)
    block = block_of(threads)
    names = ("x", "residual", "scale", "bias", "e1", "e2", "e3", "w", "c", "y", "sum", "mean",
             "rstd", "z")  # fmt: skip
    numbers = (rows, length, groups, channels, inner)
    return Launch(
        "layernorm/row.cu", "layernorm_row", (-(-rows * threads // block), 1, 1), (block, 1, 1),
        (*map(Ptr, names), *(Num("i64", n) for n in numbers), Num("f32", epsilon)),
        defines(
            T=C_TYPES[x], P=C_TYPES[param], M=C_TYPES[stat], ACC=accumulator(x), VEC=vec,
            ITEMS=row_items(length, vec, threads, _KEPT), TEAM=threads, BLOCK=block, RMS=rms,
            RESIDUAL=residual, AFFINE=affine,
        ),
    )  # fmt: skip


def layer_norm(ctx: Context, node: ir.Node) -> str | None:
    """LayerNormalization, RMSNormalization, SkipLayerNorm, SkipRMSNorm over the trailing axes."""
    name = FusedName.of(node.op_type)
    skip, rms = name.skip, name.rms
    x = ctx.dense(node, 0)
    if x.dtype not in FLOATS:
        return f"no kernel for {x.dtype}"
    scale = ctx.dense(node, 1 + skip)
    axis = ctx.attr(node, "axis", -1) % len(x.shape)
    length = prod(x.shape[axis:])
    if scale.size != length:
        return "the scale does not have the shape of a row"
    reads = {"x": x, "scale": scale}
    if skip:
        reads["residual"] = ctx.dense(node, 1)
        if reads["residual"].shape != x.shape:
            return "the residual is broadcast"
    if not rms and ctx.has(node, 2 + skip):
        reads["bias"] = ctx.dense(node, 2 + skip)
    outputs = ["y", "sum"] if skip else ["y"]
    outputs += name.exposed if node.domain == FUSE else ["mean", "rstd"]
    writes = {
        name: ctx.output(node, i, *(() if name in ("mean", "rstd") else (x.shape, x.dtype)))
        for i, name in enumerate(outputs)
        if i < len(node.outputs) and (i == 0 or ctx.wants(node, i) or name == "sum")
    }
    if not x.size:
        return None
    stat = next((writes[n].dtype for n in ("mean", "rstd") if n in writes), "float32")
    launch = row_launch(
        x.size // length, length, x.dtype, param=scale.dtype, stat=stat, rms=rms, residual=skip,
        affine=1, epsilon=ctx.attr(node, "epsilon", 1e-5),
    )  # fmt: skip
    ctx.call(node, launch, reads, writes, inplace=[("y", "x")], suffix="y")
    return None


def layer_norm_grad(ctx: Context, node: ir.Node) -> str | None:
    """LayerNormGrad, RMSNormalizationGrad, their Skip forms: dx, dscale, dbias by mean, rstd."""
    op = FusedName.of(node.op_type)
    skip, rms = op.skip, op.rms
    names = ["dy", *(["ds"] if skip else []), "x", "scale", *([] if rms else ["mean"]), "rstd"]
    reads = {name: ctx.dense(node, i) for i, name in enumerate(names)}
    x, scale, rstd = reads["x"], reads["scale"], reads["rstd"]
    length = x.shape[-1] if x.shape else 1
    if x.dtype not in FLOATS or any(reads[n].dtype != x.dtype for n in ("dy", "ds") if n in reads):
        return f"no kernel for {x.dtype}"
    if scale.size != length or not x.size:
        return "the scale does not have the shape of a row"
    rows, vec = x.size // length, min(vector(length, x.dtype), vector(length, scale.dtype))
    threads = min(1024, max(32, pow2(-(-length // (vec * (2 if ITEMSIZE[x.dtype] == 2 else 4))))))
    if rows <= 2048:  # few rows: more threads each, or a block would wait for memory alone
        threads = max(threads, min(128, pow2(-(-length // vec))))
    items = -(-length // (vec * threads))
    if items * vec > 16:
        return f"rows of {length} do not fit in registers"
    # enough blocks to fill a GPU, few enough that their parts weigh little beside x
    parts = min(-(-rows // min(8, max(1, rows // 256))), _GRAD_THREADS // threads)
    acc = accumulator(x.dtype)
    part = ctx.scratch("float64" if acc == "double" else "float32", (parts, 2, length))
    dx = {"dx": ctx.output(node, 0, x.shape, x.dtype)} if ctx.wants(node, 0) else {}
    params = {n: ctx.output(node, i, scale.shape, scale.dtype)
              for i, n in enumerate(["dscale"] if rms else ["dscale", "dbias"], 1)}  # fmt: skip
    macros = defines(
        T=C_TYPES[x.dtype], P=C_TYPES[scale.dtype], M=C_TYPES[rstd.dtype], ACC=acc, VEC=vec,
        ITEMS=items, TEAM=threads, RMS=rms, SKIP=skip,
    )  # fmt: skip
    pointers = map(
        Ptr, ("x", "dy", "scale", "mean", "rstd", "ds", "e1", "e2", "e3", "b", "dx", "part")
    )
    main = Launch(
        "layernorm/grad.cu", "layernorm_dx", (parts, 1, 1), (threads, 1, 1),
        (*pointers, Num("i64", rows), Num("i64", length)), macros,
    )  # fmt: skip
    writes = {**dx, "part": part}
    inplace = [(w, r) for w in dx for r in ("dy", "x")]
    ctx.call(node, main, reads, writes, inplace=inplace, suffix="dx" if dx else "")
    finish = Launch(
        "layernorm/grad.cu", "layernorm_dparams", (-(-length // 32), len(params), 1), (1024, 1, 1),
        (*map(Ptr, ("part", "dscale", "dbias")), Num("i32", parts), Num("i64", length)), macros,
    )  # fmt: skip
    ctx.call(node, finish, {"part": part}, params)
    return None


def group_norm(ctx: Context, node: ir.Node) -> str | None:
    """GroupNormalization and InstanceNormalization (a group a channel): scale, bias by channel."""
    x, scale, bias = (ctx.dense(node, i) for i in range(3))
    if x.dtype not in FLOATS:
        return f"no kernel for {x.dtype}"
    batch, channels, inner = x.shape[0], x.shape[1], prod(x.shape[2:])
    groups = ctx.attr(node, "num_groups", channels)
    if scale.size != channels:
        return "scale and bias are per group (opset 18)"
    y = ctx.output(node, 0, x.shape, x.dtype)
    if not x.size:
        return None
    rows, per, epsilon = batch * groups, channels // groups, ctx.attr(node, "epsilon", 1e-5)
    length = per * inner
    if length > 32768 or (length > 4096 and rows < 64):
        mean, variance = (ctx.scratch(_stat(x), (rows,)) for _ in range(2))
        reduction(ctx, node, x, mean, "Moments", [1], variance, (rows, length))
        _apply(ctx, node, (x, scale, bias, mean, variance), y, per, epsilon)
        return None
    launch = row_launch(
        rows, length, x.dtype, param=scale.dtype, stat="float32", rms=False, residual=False,
        affine=2, groups=groups, channels=per, inner=inner, epsilon=epsilon,
    )  # fmt: skip
    reads = {"x": x, "scale": scale, "bias": bias}
    ctx.call(node, launch, reads, {"y": y}, inplace=[("y", "x")], suffix="y")
    return None


def batch_norm(ctx: Context, node: ir.Node) -> str | None:
    """BatchNormalization: by the running statistics, or in training by the batch's own."""
    x, scale, bias, mean, variance = (ctx.dense(node, i) for i in range(5))
    if x.dtype not in FLOATS:
        return f"no kernel for {x.dtype}"
    channels, inner = (x.shape[1], prod(x.shape[2:])) if len(x.shape) > 1 else (1, 1)
    y = ctx.output(node, 0, x.shape, x.dtype)
    if not x.size:
        return None
    if ctx.attr(node, "training_mode", 0):
        old = (mean, variance)
        mean, variance = (ctx.scratch(_stat(x), (channels,)) for _ in range(2))
        shape = (x.size // (channels * inner), channels, inner)
        reduction(ctx, node, x, mean, "Moments", [0, 2], variance, shape)
        if any(ctx.wants(node, i) for i in (1, 2) if i < len(node.outputs)):
            new = [ctx.output(node, 1), ctx.output(node, 2)]
            names = ("old_mean", "old_variance", "mean", "variance", "new_mean", "new_variance")
            momentum = Num("f32", ctx.attr(node, "momentum", 0.9))
            launch = Launch(
                "layernorm/channel.cu", "channel_running", (-(-channels // 256), 1, 1),
                (256, 1, 1), (*map(Ptr, names), Num("i64", channels), momentum),
                _macros(x, scale, mean, 1, False) + defines(R=C_TYPES[old[0].dtype]),
            )  # fmt: skip
            tensors = (*old, mean, variance, *new)
            bound = dict(zip(names, tensors, strict=True))
            ctx.call(
                node, launch, {n: bound[n] for n in names[:4]}, {n: bound[n] for n in names[4:]}
            )
    _apply(ctx, node, (x, scale, bias, mean, variance), y, 0, ctx.attr(node, "epsilon", 1e-5))
    return None


def batch_norm_grad(ctx: Context, node: ir.Node) -> str | None:
    """BatchNormGrad: dx, dscale, dbias; the forward's mean and variance are the same calls."""
    dy, x, scale = (ctx.dense(node, i) for i in range(3))
    if x.dtype not in FLOATS or dy.dtype != x.dtype:
        return f"no kernel for {x.dtype}"
    batch, channels, inner = x.shape[0], x.shape[1], prod(x.shape[2:])
    if not x.size or x.size >= 2**32:
        return "nothing to reduce, or 32-bit indices do not reach"
    stat, columns, vec = _stat(x), inner < 16, vector(inner, x.dtype)
    mean, variance = (ctx.scratch(stat, (channels,)) for _ in range(2))
    reduction(ctx, node, x, mean, "Moments", [0, 2], variance, (batch, channels, inner))
    if columns:
        tiles, length, least = -(-channels * inner // 32), batch, 32
    else:
        tiles, length, least = channels, batch * inner // vec, 1024
    splits = max(1, min(length // least, -(-_CHANNEL_BLOCKS // tiles)))
    chunk = -(-length // splits)
    splits, per = -(-length // chunk), inner if columns else 1
    part, sums = ctx.scratch(stat, (splits, 2, channels * per)), ctx.scratch(stat, (2, channels))
    source, epsilon = "layernorm/channel_grad.cu", Num("f32", ctx.attr(node, "epsilon", 1e-5))
    macros = defines(
        T=C_TYPES[x.dtype], P=C_TYPES[scale.dtype], ACC=accumulator(x.dtype), VEC=vec,
        COLUMNS=columns,
    )  # fmt: skip
    given = {"x": x, "dy": dy, "mean": mean, "variance": variance}
    ctx.call(node, Launch(
        source, "channel_sums", (tiles * splits, 1, 1), (256, 1, 1),
        (*map(Ptr, given), Ptr("part"),
         *(Num("u32", n) for n in (batch, channels, inner, chunk)), epsilon), macros,
    ), given, {"part": part})  # fmt: skip
    params = {name: ctx.output(node, i, scale.shape, scale.dtype)
              for i, name in ((1, "dscale"), (2, "dbias")) if ctx.wants(node, i)}  # fmt: skip
    ctx.call(node, Launch(
        source, "channel_params", (-(-channels // 32), 2, 1), (1024, 1, 1),
        (*map(Ptr, ("part", "dscale", "dbias", "sums")),
         *(Num("u32", n) for n in (splits, channels, per))), macros,
    ), {"part": part}, {**params, "sums": sums})  # fmt: skip
    if not ctx.wants(node, 0):
        return None
    reads = {"x": x, "dy": dy, "scale": scale, "mean": mean, "variance": variance, "sums": sums}
    numbers = (x.size, channels, inner, batch * inner)
    ctx.call(node, Launch(
        source, "channel_dx", (-(-x.size // (256 * vec)), 1, 1), (256, 1, 1),
        (*map(Ptr, reads), Ptr("dx"), *(Num("i64", n) for n in numbers), epsilon), macros,
    ), reads, {"dx": ctx.output(node, 0, x.shape, x.dtype)},
       inplace=[("dx", "dy"), ("dx", "x")])  # fmt: skip
    return None


def _stat(x: Tensor) -> str:
    return "float64" if x.dtype == "float64" else "float32"


def _macros(
    x: Tensor, param: Tensor, stat: Tensor, vec: int, grouped: bool
) -> tuple[tuple[str, str], ...]:
    types = {"T": x, "P": param, "M": stat}
    return defines(
        **{k: C_TYPES[t.dtype] for k, t in types.items()},
        ACC=accumulator(x.dtype), VEC=vec, GROUPED=grouped,
    )  # fmt: skip


def _apply(
    ctx: Context, node: ir.Node, reads: tuple[Tensor, ...], y: Tensor, per: int, epsilon: float
) -> None:
    """y by given statistics; `per` channels share one, or 0: one a channel over the batch."""
    x = reads[0]
    channels, inner = (x.shape[1], prod(x.shape[2:])) if len(x.shape) > 1 else (1, 1)
    vec = vector(inner, x.dtype)
    names = ("x", "scale", "bias", "mean", "variance")
    numbers = (x.size, channels, inner, max(per, 1))
    launch = Launch(
        "layernorm/channel.cu", "channel_apply", (-(-x.size // (256 * vec)), 1, 1), (256, 1, 1),
        (*map(Ptr, (*names, "e1", "e2", "e3", "y")), *(Num("i64", n) for n in numbers),
         Num("f32", epsilon)),
        _macros(x, reads[1], reads[3], vec, per > 0),
    )  # fmt: skip
    bound = dict(zip(names, reads, strict=True))
    ctx.call(node, launch, bound, {"y": y}, inplace=[("y", "x")], suffix="y")


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "LayerNormalization"): layer_norm,
    ("", "RMSNormalization"): layer_norm,
    (FUSE, "RMSNormalization"): layer_norm,
    (FUSE, "SkipLayerNorm"): layer_norm,
    (FUSE, "SkipRMSNorm"): layer_norm,
    (FUSE, "LayerNormGrad"): layer_norm_grad,
    (FUSE, "RMSNormalizationGrad"): layer_norm_grad,
    (FUSE, "SkipLayerNormGrad"): layer_norm_grad,
    (FUSE, "SkipRMSNormGrad"): layer_norm_grad,
    ("", "GroupNormalization"): group_norm,
    ("", "InstanceNormalization"): group_norm,
    ("", "BatchNormalization"): batch_norm,
    (FUSE, "BatchNormGrad"): batch_norm_grad,
}
