"""Pointwise candidates: a transpose through tiles, or a kernel generated for the expression.

Operands: a0, a1, ... y0, y1, ...
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx_fuse.cuda.pointwise import launch_of, launch_transpose
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.rule_based import RuleBased
from onnx_fuse.program.moves import Pointwise
from onnx_fuse.program.problem import Config, Hardware, Launch


def _transposed(problem: Pointwise) -> Launch | None:
    if problem.expression.steps or len(problem.reads) != 1 or len(problem.writes) != 1:
        return None
    return launch_transpose(problem.reads[0], problem.writes[0])


class Tiles(RuleBased):
    """A candidate of indexing/transpose.cu."""

    name = "tiles"
    source = "indexing/transpose.cu"
    free_axes = "yz"

    def supports(self, problem: Pointwise, hw: Hardware) -> str | None:
        """A copy between views that run along different axes."""
        return None if _transposed(problem) else "no copy between two axes, both of which are long"

    def launch(self, problem: Pointwise, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        found = _transposed(problem)
        assert found is not None
        return (found,)


class Generated(RuleBased):
    """A kernel whose text is the expression; sizes and strides are its arguments."""

    name = "generated"

    def launch(self, problem: Pointwise, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        return (launch_of(problem.expression, problem.reads, problem.writes),)


KERNELS: dict[str, Sequence[Kernel]] = {"Pointwise": (Tiles(), Generated())}
