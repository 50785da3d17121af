"""Cross-entropies: of rows of scores, or of exponentials that a product has taken of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels.kernel import Kernels
from onnx_fuse.kernels.rule_based import (
    HeuristicKernel,
    access_width,
    block_of,
    team_size,
    thread_choices,
    typed,
)
from onnx_fuse.program.launch import Launches, args
from onnx_fuse.program.losses import CrossEntropy, CrossEntropyChunk, ExpRows, LabelScore
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.size import minimum, upper_bound

_MOST = 512  # threads a row
_LONG = 64 << 10  # bytes of a row, of which a multiprocessor's shared memory holds three at most
_NONE_IGNORED = -(2**62)
S = TypeVar("S", LabelScore, ExpRows)


class LossRows(HeuristicKernel[CrossEntropy]):
    """loss/cross_entropy.cu. Operands: x target weight loss rows log_prob slope dx."""

    name = "row"
    source = "loss/cross_entropy.cu"
    free_axes = "yz"

    def configs(self, problem: CrossEntropy, hw: Hardware) -> Sequence[KernelConfig]:
        if problem.inner != 1 or problem.stage == "total":
            return (KernelConfig.of(),)
        return [how for how in thread_choices(self._team(problem, KernelConfig.of())[1])
                if how.integer("team") <= _MOST]  # fmt: skip

    def _team(self, problem: CrossEntropy, config: KernelConfig) -> tuple[int, int]:
        """Elements an access and threads a row."""
        if problem.inner != 1:
            return 1, 1
        vec = access_width(problem.classes, problem.dtype)
        rule = min(_MOST, team_size(problem.rows, problem.classes, vec))
        return vec, config.integer("team") or rule

    def launch(self, problem: CrossEntropy, config: KernelConfig, hw: Hardware) -> Launches:
        vec, threads = self._team(problem, config)
        block = block_of(threads)
        macros = typed(problem, I="labels") | {
            "LOG_SOFTMAX": problem.log_softmax, "MEAN": problem.mean, "VEC": vec, "TEAM": threads,
            "BLOCK": block,
        }  # fmt: skip
        if problem.stage == "total":
            total = args("rows loss, i64 rows", problem)
            return self.one("cross_entropy_total", 1, 1024, *total, **macros)
        entry, text = "cross_entropy_grad", "x target slope dx, i64 rows classes inner"
        ignored = _NONE_IGNORED if problem.ignored is None else problem.ignored
        if problem.stage == "rows":
            entry = "cross_entropy_row"
            text = "x target weight loss rows log_prob, i64 rows classes inner ignored"
        made = args(text, problem, ignored=ignored)
        return self.one(entry, -(-problem.rows * threads // block), block, *made, **macros)


class Chunk(HeuristicKernel[CrossEntropyChunk]):
    """loss/chunk.cu. Operands: x target weight rows."""

    name = "block"
    source = "loss/chunk.cu"

    def supports(self, problem: CrossEntropyChunk, hw: Hardware) -> str | None:
        if problem.dtype not in ("float32", "float16", "bfloat16"):
            return f"no kernel for {problem.dtype}"
        return "too many classes" if problem.stride >= 2**30 else None

    def configs(self, problem: CrossEntropyChunk, hw: Hardware) -> Sequence[KernelConfig]:
        """Other counts of threads a row; the row in shared memory, or ahead of its turn."""
        held = (0, 1) if self._bytes(problem) <= hw.smem_per_block - 1024 else (0,)
        ways = [KernelConfig.of(team=n, shared=s) for n in (256, 512, 1024) for s in held]
        if self._ahead(problem, hw):
            ways += [KernelConfig.of(team=n, ahead=1) for n in (512, 1024)]
        return [KernelConfig.of(), *ways]

    def _ahead(self, problem: CrossEntropyChunk, hw: Hardware) -> bool:
        """Whether a block's shared memory holds the next row as well, by bulk copies."""
        size = self._bytes(problem)
        return hw.cc >= 90 and size % 16 == 0 and 2 * size <= hw.smem_per_block - 1024

    def _bytes(self, problem: CrossEntropyChunk) -> int:
        return problem.stride * ITEMSIZE[problem.dtype]

    def launch(self, problem: CrossEntropyChunk, config: KernelConfig, hw: Hardware) -> Launches:
        vec = access_width(problem.stride, problem.dtype)
        block = config.integer("team")
        held, ahead = bool(config.integer("shared")), bool(config.integer("ahead"))
        if not block:
            block = min(512, max(32, team_size(problem.rows, problem.stride, vec)))
            # while one row is worked on the next one comes: to a block of long rows itself, else
            # to the multiprocessor's other block (4096 rows of 50304: 251 us in place of 263)
            long = self._bytes(problem) >= _LONG and upper_bound(problem.rows) >= 4 * hw.sm_count
            ahead = long and self._ahead(problem, hw)
            held = not ahead and 2 * self._bytes(problem) < hw.smem_per_block - 4096
        shared = (2 if ahead else int(held)) * self._bytes(problem)
        blocks = minimum(problem.rows, hw.sm_count) if ahead else problem.rows
        return self.one(
            "cross_entropy_chunk", blocks, block,
            *args("x target weight rows, i32 rows classes stride, i64 ignored, f32 smoothing",
                  problem),
            smem=shared, **typed(problem, I="labels", W="weights"), VEC=vec, TEAM=block,
            SHARED=held, GRAD=problem.gradient, SMOOTH=problem.smoothing != 0, AHEAD=ahead or None,
        )  # fmt: skip


class _OfProduct(HeuristicKernel[S]):
    """What loss/exp_rows.cu makes beside a product of scores whose epilogue takes exponentials."""

    name = "exp"
    source = "loss/exp_rows.cu"

    def supports(self, problem: S, hw: Hardware) -> str | None:
        if problem.dtype != "bfloat16":
            return f"exponentials of {problem.dtype} have no room for any score"
        sizes = (problem.ldx, problem.ldw, problem.classes)
        return "too many classes" if any(size >= 2**30 for size in sizes) else None

    def macros(self, problem: S) -> dict[str, Any]:
        """The types, how x and W are read, and the macros of the other entry as it needs none."""
        steps = (problem.k, problem.ldx, *(() if problem.turned else (problem.ldw,)))
        vec = min(access_width(step, problem.dtype) for step in steps)
        return {
            "T": C_TYPES[problem.dtype], "I": C_TYPES[problem.labels], "W": "float",
            "ACC": "float", "VEC": vec, "TURNED": problem.turned, "SCALED": False,
        }  # fmt: skip


class Label(_OfProduct[LabelScore]):
    """Its entry label_score. Operands: those of LabelScore."""

    def launch(self, problem: LabelScore, config: KernelConfig, hw: Hardware) -> Launches:
        made = args("x w bias target to, i32 rows k classes ldx ldw, i64 ignored", problem)
        return self.one("label_score", -(-problem.rows // 8), 256, *made, **self.macros(problem))


class Exp(_OfProduct[ExpRows]):
    """Its entry exp_rows. Operands: those of ExpRows."""

    def cost(self, problem: ExpRows, config: KernelConfig, hw: Hardware) -> float:
        """What the chip needs at least, a launch, and what waits for what before it.

        A row's sums wait for memory, and its x for them: 4096 rows of 50257 classes took 9 to 15 us
        in place of 6 (H200, 2026-11).
        """
        return super().cost(problem, config, hw) + self.numbers(hw)["start"]

    def launch(self, problem: ExpRows, config: KernelConfig, hw: Hardware) -> Launches:
        names = "e part x w bias target weight rows scale narrow scaled"
        numbers = "i32 rows k classes stride parts ldx ldw, i64 ignored"
        macros = {"W": C_TYPES[problem.weights], "SCALED": problem.scaled}
        return self.one(
            "exp_rows", -(-problem.rows // 16), 512, *args(f"{names}, {numbers}", problem),
            **(self.macros(problem) | macros),
        )  # fmt: skip


KERNELS: Kernels = {
    "CrossEntropy": (LossRows(),),
    "CrossEntropyChunk": (Chunk(),),
    "LabelScore": (Label(),),
    "ExpRows": (Exp(),),
}
