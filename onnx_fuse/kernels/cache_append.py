"""The candidate of `data_movement.CacheAppend`, and what attention over a cache shares with it."""

from __future__ import annotations

from onnx_fuse.cuda.pointwise import STORAGE
from onnx_fuse.kernels.kernel import Kernels
from onnx_fuse.kernels.rule_based import HeuristicKernel, access_width, typed
from onnx_fuse.program.contractions import Attention
from onnx_fuse.program.data_movement import CacheAppend
from onnx_fuse.program.launch import Arg, Launches, args
from onnx_fuse.program.problem import Hardware, KernelConfig


def step_args(p: Attention | CacheAppend) -> tuple[Arg, ...]:
    """The last arguments of kernels over a cache; none where that has numbers of q's type."""
    return args("key_step value_step") if p.cache else ()


def cache_macro(p: Attention | CacheAppend) -> dict[str, object]:
    """Of sdpa/cache.cuh."""
    return {"CACHE": STORAGE[p.cache] if p.cache else None}


def row_macros(p: CacheAppend) -> dict[str, int]:
    """Of sdpa/new_rows.cuh, and where new rows go."""
    return {
        "HALF": p.half, "TURNED": p.heads > 0, "NORMED": p.normed, "INTERLEAVED": p.interleaved,
        "COLUMNS": p.columns, "POSITIONS": ("", "first", "each", "rows").index(p.positions),
        "PLACED": ("", "each", "all").index(p.placed),
    }  # fmt: skip


class Append(HeuristicKernel[CacheAppend]):
    """sdpa/append.cu. Operands: q k v lengths cos sin q_scale k_scale positions past_key
    past_value key_step value_step, turned present_key present_value."""

    source, version = "sdpa/append.cu", 8

    def launch(self, problem: CacheAppend, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, whose threads walk over the new rows, then over a past that stands apart."""
        p, width = problem, access_width(problem.size, problem.dtype)
        while p.half and (2 * p.half if p.interleaved else p.half) % width:
            width //= 2
        made = args(
            "q k v lengths cos sin q_scale k_scale positions past_key past_value turned "
            "present_key present_value, i64 q_strides k_strides v_strides, "
            "i32 batch rows heads kv_heads length past context, f32 epsilon", p,
        ) + step_args(p)  # fmt: skip
        blocks = (4 if p.uniform else 2) * hw.sm_count  # a past that grows always stands apart
        return self.one(
            "cache_append", blocks, 256, *made, **typed(p), D=p.size, PIECE=width,
            UNIFORM=p.uniform, KEEP=p.keep, **row_macros(p), **cache_macro(p),
        )  # fmt: skip


KERNELS: Kernels = {"CacheAppend": (Append(),)}
