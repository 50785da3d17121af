"""ChannelNorm, RunningStats, ChannelGrad, GroupGrad: norms by statistics that stand elsewhere."""

from __future__ import annotations

from onnx_fuse.cuda.macros import lanes
from onnx_fuse.kernels.kernel import Kernels
from onnx_fuse.kernels.rule_based import Each, HeuristicKernel, access_width, tail_macros, typed
from onnx_fuse.ops.activations import activation_macros
from onnx_fuse.program.launch import Launches, args
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.problems import ChannelGrad, ChannelNorm, GroupGrad
from onnx_fuse.program.size import coarse


class ApplyChannelNorm(HeuristicKernel[ChannelNorm]):
    """layernorm/channel.cu. Operands: x scale bias mean variance e1 e2 e3 y."""

    source = "layernorm/channel.cu"
    free_axes = "yz"

    def launch(self, problem: ChannelNorm, config: KernelConfig, hw: Hardware) -> Launches:
        columns = problem.inner < _SHORT and (problem.pixels > 0 or not problem.group)
        across = problem.channels * problem.inner
        vec = access_width(across if columns else problem.inner, problem.dtype)
        threads, slots = problem.size // vec, 1
        if columns:
            pixels = problem.pixels or problem.size // across
            images = problem.size // (across * pixels)
            slots = _slots(pixels, images * across // vec, 3 * 256 * hw.sm_count)
            threads = images * (across // vec) * slots
        text = "x scale bias mean variance e1 e2 e3 y, i64 size channels inner group pixels slots"
        made = args(f"{text}, f32 epsilon", problem, group=max(problem.group, 1), slots=slots)
        return self.one(
            "channel_apply", -(-threads // 256), 256, *made, **typed(problem, P="param", M="stat"),
            VEC=vec, GROUPED=problem.group > 0, COLUMNS=columns, **tail_macros(problem.tail),
        )  # fmt: skip


class ChannelGradStages(HeuristicKernel[ChannelGrad]):
    """layernorm/channel_grad.cu. Operands: x dy scale bias mean variance part dscale dbias
    sums dx."""

    source = "layernorm/channel_grad.cu"
    free_axes = "z"

    def launch(self, problem: ChannelGrad, config: KernelConfig, hw: Hardware) -> Launches:
        batch, channels, inner = problem.batch, problem.channels, problem.inner
        columns, vec, tx = by_columns(problem), _width(problem), _across(problem)
        macros = typed(problem, P="param") | {
            "VEC": vec, "COLUMNS": columns, "TX": tx, "RELU": problem.relu,
        }  # fmt: skip
        if problem.stage == "sums":
            tiles = -(-channels * inner // (tx * vec)) if columns else channels
            names = "x dy scale bias mean variance part"
            made = args(f"{names}, u32 batch channels inner chunk, f32 epsilon", problem)
            return self.one("channel_sums", tiles * problem.splits, 256, *made, **macros)
        if problem.stage == "params":
            text = "u32 splits channels across, i64 count, f32 epsilon"
            made = args(f"part scale bias variance dscale dbias sums, {text}", problem,
                        across=inner if columns else 1, count=batch * inner)  # fmt: skip
            grid = (-(-channels // 32), 2, 1)
            return self.one("channel_params", grid, 1024, *made, **macros)
        size = batch * channels * inner
        slots = _slots(batch, channels * inner // vec, 2 * 256 * hw.sm_count)
        threads = channels * inner // vec * slots if columns else size // vec
        made = args("x dy mean sums dx, i64 size channels inner slots", problem, size=size,
                    slots=slots)  # fmt: skip
        return self.one("channel_dx", -(-threads // 256), 256, *made, **macros)


_BLOCKS = 512  # of a channel's sums: fixed, so that they are the shape's alone
_SHORT = (
    16  # elements of a channel that side by side are too few for vectors or blocks of their own
)
_FEW = 1 << 22
"""Elements that are few for a group's gradient: 2 x 320 x 64 x 64 took 7.2 and 5.9 us, sums and
dx, in accesses of 8 bytes, in those of 16 bytes 9.3 and 7.5; 8 x 128 x 256 x 256 took 3 % less in
those of 16 (H200, 2026-11)."""
_GROUP_BYTES = 4096
"""The blocks of a group's sums times the bytes of an access: of 16 bytes 256 blocks are faster than
512 or more (72.7 us, 77.0 and 84.8 of 8 x 128 x 256 x 256, H200, 2026-11)."""
_ROWS = 4  # rows of columns that a thread takes at a time: ROWS of the kernels


def _slots(rows: int, across: int, threads: int) -> int:
    """Threads that share the rows of each of `across` vectors, `threads` altogether."""
    return max(1, min(-(-rows // _ROWS), threads // across))


def by_columns(problem: ChannelGrad) -> bool:
    """Whether channels are too short for blocks of their own."""
    return problem.inner < _SHORT


def _width(problem: ChannelGrad) -> int:
    """Elements an access."""
    rows = problem.channels * problem.inner if by_columns(problem) else problem.inner
    return access_width(rows, problem.dtype)


def _across(problem: ChannelGrad) -> int:
    """Threads side by side of a block that sums columns."""
    return lanes(-(-problem.channels * problem.inner // _width(problem)))


def channel_chunks(problem: ChannelGrad) -> tuple[int, int]:
    """(chunks, elements or vectors a chunk) of a channel's sums."""
    channels, inner = problem.channels, problem.inner
    if by_columns(problem):
        across = _across(problem)
        tiles = -(-channels * inner // (across * _width(problem)))
        length, least = problem.batch, 8 * (256 // across)
    else:
        length = problem.batch * inner // _width(problem)
        tiles, least = channels, 1024
    splits = max(1, min(length // least, -(-_BLOCKS // tiles)))
    chunk = -(-length // splits)
    return -(-length // chunk), chunk


class Groups(HeuristicKernel[GroupGrad]):
    """layernorm/group_grad.cu. Operands: x dy scale bias mean variance part dscale dbias means
    dx."""

    source = "layernorm/group_grad.cu"
    free_axes = "z"

    def supports(self, problem: GroupGrad, hw: Hardware) -> str | None:
        if problem.act and problem.dtype == "float64":
            return "its activation is computed in float32"
        return None

    def launch(self, problem: GroupGrad, config: KernelConfig, hw: Hardware) -> Launches:
        p, across = problem, group_across(problem)
        images, channels, pixels, per = p.images, p.channels, p.pixels, p.per
        vec, team = _group_width(p), _team(p)
        macros = typed(p, P="param") | activation_macros(p.act) | {
            "VEC": vec, "LAST": p.last, "TX": across, "TEAM": team,
        }  # fmt: skip

        def one(entry: str, blocks: int, names: str, more: str, **values: int) -> Launches:
            made = args(f"{names}, u32 images channels pixels per splits{more}", p, **values)
            return self.one(entry, blocks, 256, *made, **macros)

        if p.stage == "params":
            blocks = images * (channels // per) + -(-channels // 8)
            names = "part scale variance dscale dbias means"
            return one("group_params", blocks, names, ", f32 epsilon")
        inside, ends = "x dy scale bias mean variance", " chunk, f32 epsilon act_alpha"
        if p.stage == "sums":
            blocks = -(-channels // (across * vec)) * p.splits * images
            if not p.last:
                blocks = -(-images * channels * p.splits * team // 256)
            return one("group_sums", blocks, f"{inside} part", ends)
        chunk = _ROWS * team
        if p.last:
            splits = _slots(pixels, images * channels // vec, 2 * 256 * hw.sm_count)
            blocks = -(-images * (channels // vec) * splits // 256)
        else:
            splits = -(-pixels // (vec * chunk))
            blocks = -(-images * channels * splits * team // 256)
        return one("group_dx", blocks, f"{inside} means dx", ends, splits=splits, chunk=chunk)


def _group_width(problem: GroupGrad) -> int:
    """Elements an access: of channels that are last and few fewer, so that more threads share."""
    p = problem
    few = p.last and coarse(p.images) * p.channels * coarse(p.pixels) <= _FEW
    return access_width(p.channels if p.last else p.pixels, p.dtype, most=8 if few else 16)


def group_across(problem: GroupGrad) -> int:
    """Threads side by side of a block that sums channels that are last."""
    return lanes(-(-problem.channels // _group_width(problem))) if problem.last else 1


def _team(problem: GroupGrad) -> int:
    """Threads of a channel's pixels: a warp where a block would have too little to do."""
    return 32 if coarse(problem.pixels) // _group_width(problem) <= 512 else 256


def group_chunks(problem: GroupGrad) -> tuple[int, int]:
    """(splits, vectors or rows of a chunk) of the sums of an image's channel."""
    vec, across = _group_width(problem), group_across(problem)
    if problem.last:
        blocks = coarse(problem.images) * -(-problem.channels // (across * vec))
        length, least = problem.pixels, 2 * _ROWS * (256 // across)
    else:
        blocks = coarse(problem.images) * problem.channels * _team(problem) // 256
        length, least = problem.pixels // vec, 2 * _ROWS * _team(problem)
    units = _GROUP_BYTES // (vec * ITEMSIZE[problem.dtype]) if problem.last else _BLOCKS
    splits = max(1, min(coarse(length) // least, -(-units // max(1, blocks))))
    chunk = -(-length // splits)
    return -(-length // chunk), chunk


KERNELS: Kernels = {
    "ChannelNorm": (ApplyChannelNorm(),),
    "RunningStats": (Each(  # a channel a thread
        "layernorm/channel.cu", "channel_running", "old_mean old_variance mean variance new_mean "
        "new_variance, i64 channels, f32 momentum",
        lambda p: typed(p, P="param", M="stat", R="old")
        | {"VEC": 1, "GROUPED": False, "COLUMNS": False},
        count="channels",
    ),),
    "ChannelGrad": (ChannelGradStages(),),
    "GroupGrad": (Groups(),),
}  # fmt: skip
