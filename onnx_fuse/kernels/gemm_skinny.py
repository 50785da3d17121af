"""Few rows, or small sizes: one launch that streams w once (cuda_src/layernorm_gemm/skinny.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from onnx_fuse.kernels.gemm_portable import (
    ACTIVATIONS,
    C_TYPES,
    aligned,
    as_defines,
    epilogue_defines,
    ld,
    type_defines,
)
from onnx_fuse.problem import ITEMSIZE, Arg, Config, Hardware, Launch, Num, Problem, Ptr


class Skinny:
    """A Gemm, or a LayerNormGemm with its statistics in the same launch."""

    name = "skinny"
    source = "layernorm_gemm/skinny.cu"

    def sources(self) -> tuple[str, ...]:
        """The kernel."""
        return (self.source,)

    def supports(self, problem: Problem, hw: Hardware) -> str | None:
        """None, or why not."""
        if hw.cc < 80:
            return f"mma.sync with bf16 needs sm_80, this is {hw.arch}"
        if problem.dtype not in ("float16", "bfloat16"):
            return f"for 16-bit operands, not {problem.dtype}"
        if problem.out not in ("float16", "bfloat16", "float32"):
            return f"no {problem.out} result"
        if problem.batch or problem.trans_a:
            return "no batches, and rows of x contiguous"
        if problem.m > 512:
            return f"{problem.m} rows (at most 512): w would be read too often"
        if problem.k % 8 or not aligned(problem):
            return f"k={problem.k} is not a multiple of 8, or rows are not 16-byte aligned"
        if problem.attr("dw"):
            return "no row sums of the result"
        extra = [x for x in ("beta", "dact", "dx", "residual") if problem.attr(x)]
        if len(extra) > 1:
            return f"the epilogue takes one extra operand, not {extra}"
        if extra and (problem.integer("c_rows", problem.n), problem.integer("c_cols", 1)) != (
            problem.n,
            1,
        ):
            return "c is read as a dense [M, N]"
        act = problem.text("act")
        return f"no activation {act!r}" if act and act not in ACTIVATIONS else None

    def configs(self, problem: Problem, hw: Hardware) -> Sequence[Config]:
        """Rows and columns a block, warps that share k."""
        rows = (1,) if problem.m <= 16 else (1, 2)
        return [
            Config.of(mt=mt, nt=nt, warps=warps)
            for mt in rows
            for nt in (4, 2, 1)
            for warps in (16, 8, 4)
            if not (not problem.trans_b and problem.n % nt)
        ]

    def cost(self, problem: Problem, config: Config, hw: Hardware) -> float:
        """Latency of the chain load, multiply, add, store; w's bytes; L2's bytes."""
        mt, nt, warps = (config.integer(name) for name in ("mt", "nt", "warps"))
        blocks_m, blocks_n = ceil(problem.m / (16 * mt)), ceil(problem.n / (8 * nt))
        blocks = blocks_m * blocks_n
        chunks = ceil(problem.k / 32 / warps)
        unroll = self._unroll(mt, nt, warps)
        per_sm = max(1, min(16 // warps * 2, 4))
        waves = ceil(blocks / (hw.sm_count * per_sm))
        # bytes a block has in flight, against latency times bandwidth (about 26 KB an SM)
        flight = min(chunks, unroll) * warps * 32 * 16 * (nt + 2 * mt)
        resident = min(per_sm, ceil(blocks / hw.sm_count))
        fed = min(1.0, blocks / hw.sm_count) * min(1.0, flight * resident / 4e4)
        l2 = blocks * 2 * problem.k * (16 * mt + 8 * nt) / (1.3 * hw.bandwidth)
        stream = problem.bytes / (0.9 * hw.bandwidth * max(fed, 0.02))
        chain = (1.0 + 0.5 * waves * ceil(chunks / unroll)) * 1e-6
        both = (
            0.6e-6 + 0.5 * l2 if problem.op == "LayerNormGemm" and not problem.attr("folded") else 0
        )
        return hw.launch_seconds + max(chain, stream, l2) + both

    def workspace(self, problem: Problem, config: Config, hw: Hardware) -> int:
        """None."""
        return 0

    def _unroll(self, mt: int, nt: int, warps: int) -> int:
        """Chunks a lane holds at once: what the registers allow (4 a 16-byte load)."""
        fit = (56 if warps == 16 else 96) // (4 * (nt + 2 * mt))
        return 4 if fit >= 4 else 2 if fit >= 2 else 1

    def launch(self, problem: Problem, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One call."""
        mt, nt, warps = (config.integer(name) for name in ("mt", "nt", "warps"))
        norm = problem.op == "LayerNormGemm"
        mode = 0 if not norm else 1 if problem.attr("folded") else 2
        folded = {"EPI_LN": 1} if mode == 1 else {}
        types = type_defines(problem) | ({"TV": "float"} if mode == 1 else {})
        epilogue = epilogue_defines(problem)
        if mode == 1:
            epilogue.pop("EPI_BIAS", None)  # it is in cv
        defines = as_defines(
            types, epilogue, folded,
            {"TP": C_TYPES[problem.dtype], "TRANS_B": problem.trans_b, "MT": mt, "NT": nt,
             "WARPS": warps, "UNROLL": self._unroll(mt, nt, warps), "LN": mode},
            {"RMS": 1} if problem.attr("rms") else {},
        )  # fmt: skip
        lda, ldb = ld(problem)
        if norm:
            names = ("x", "wq" if mode == 1 else "w", "r", "cs", "cv" if mode == 1 else "c")
        else:
            names = ("a", "b", "c", "col0", "col1")
        x, w, c, col0, col1 = names
        args: tuple[Arg, ...] = (
            Ptr(x), Ptr(w), Ptr("y"), Ptr("z"), Ptr(c),
            Num("i32", problem.m), Num("i32", problem.n), Num("i32", problem.k),
            Num("i64", lda), Num("i64", ldb), Num("f32", problem.number("epsilon", 1e-5)),
            Ptr("mean"), Ptr("rstd"), Ptr("gamma"), Ptr("beta"),
            Ptr("row0"), Ptr("row1"), Ptr("row2"), Ptr("row3"), Ptr(col0), Ptr(col1),
            Num("f32", problem.number("alpha", 1.0)), Num("f32", problem.number("beta")),
            Num("f32", problem.number("act_alpha", 1.0)),
        )  # fmt: skip
        grid = (ceil(problem.n / (8 * nt)), ceil(problem.m / (16 * mt)), 1)
        smem = ITEMSIZE["float32"] * warps * 16 * mt * 8 * nt
        return (
            Launch(self.source, "gemm_skinny", grid, (32 * warps, 1, 1), args, defines, smem=smem),
        )
