"""Softmax candidates: a row a team of threads, or columns where the axis is not the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_fuse.cuda.macros import C_TYPES, accumulator, lanes, pow2
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.rule_based import (
    RuleBased,
    access_width,
    block_of,
    row_items,
    team_size,
    thread_choices,
)
from onnx_fuse.program.problem import Config, Hardware, Launch, Num, Ptr
from onnx_fuse.program.problems import Softmax

_KEPT = 32  # elements of a row a thread may hold in registers


def _macros(problem: Softmax) -> dict[str, Any]:
    dtype = problem.dtype
    return {"T": C_TYPES[dtype], "ACC": accumulator(dtype), "LOG": problem.log}


class Row(RuleBased):
    """softmax/row.cu. Operands: x y."""

    name = "row"
    source = "softmax/row.cu"
    free_axes = "yz"

    def supports(self, problem: Softmax, hw: Hardware) -> str | None:
        """None where the axis is the last, and otherwise the reason for a refusal."""
        return None if problem.inner == 1 else "a row's elements do not stand side by side"

    def configs(self, problem: Softmax, hw: Hardware) -> Sequence[Config]:
        """Half or twice the threads a row too."""
        vec = access_width(problem.length, problem.dtype)
        return thread_choices(team_size(problem.outer, problem.length, vec))

    def launch(self, problem: Softmax, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        outer, length = problem.outer, problem.length
        vec = access_width(length, problem.dtype)
        threads = config.integer("team") or team_size(outer, length, vec)
        items = row_items(length, vec, threads, _KEPT)
        threads = threads if items else 512  # a row read again: more rows at once hide its latency
        block = block_of(threads)
        return self.one(
            "softmax_row", -(-outer * threads // block), block,
            Ptr("x"), Ptr("y"), Num("i64", outer), Num("i64", length),
            **_macros(problem), VEC=vec, TEAM=threads, BLOCK=block, ITEMS=items,
        )  # fmt: skip


class Column(RuleBased):
    """softmax/column.cu. Operands: x y."""

    name = "column"
    source = "softmax/column.cu"
    free_axes = "yz"

    def launch(self, problem: Softmax, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch: a block for up to 32 columns."""
        inner = problem.inner
        bx = lanes(inner)
        by = min(1024 // bx, max(pow2(problem.length) // 4, 1))
        return self.one(
            "softmax_column", -(-inner // bx) * problem.outer, bx * by,
            Ptr("x"), Ptr("y"), Num("i64", problem.length), Num("i64", inner),
            **_macros(problem), BX=bx, BY=by,
        )  # fmt: skip


KERNELS: dict[str, Sequence[Kernel]] = {"Softmax": (Row(), Column())}
