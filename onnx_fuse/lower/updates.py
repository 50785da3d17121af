"""Updates of optimizers: many nodes of one body, which is lowered and contracted once.

A step of a language model has some hundred of them, of thirty operators each; most of the time of
its lowering would go into making equal calls and contracting them again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.context import Context
from onnx_fuse.program.call import Call, Tensor
from onnx_fuse.program.passes.callgraph import rename_buffers
from onnx_fuse.program.passes.pointwise_fusion import fuse, view


def is_update(node: ir.Node) -> bool:
    """Whether the node is an update of `ops.update`, whose body works element by element."""
    return node.domain == FUSE and node.op_type.endswith("Update")


@dataclass(frozen=True)
class _RowUpdate:
    """The calls of an update after pointwise fusion, its operands and its results."""

    calls: tuple[Call, ...]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


class Updates:
    """The updates of a program so far, by what those have in common that have equal bodies."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _RowUpdate] = {}

    def keep(
        self, key: Hashable, calls: Sequence[Call], operands: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> list[Call]:  # fmt: skip
        """Fuse the calls of a body, and remember them for equal updates if all are pointwise."""
        if any(call.expression is None for call in calls):
            return list(calls)
        # numbers stay apart: all updates share them, and no element works them out again
        numbers = [call for call in calls if call.writes[0][1].size == 1]
        others = [call for call in calls if call.writes[0][1].size != 1]
        read = {t.buffer for call in others for _, t in call.reads}
        written = {t.buffer for t in results}
        fused = [*fuse(numbers, read | written), *fuse(others, written)]
        if len({t.buffer for t in operands}) == len(operands):
            known = _RowUpdate(tuple(fused), tuple(operands), tuple(results))
            self._known[key, tuple(map(view, operands))] = known
        return fused

    def again(
        self, ctx: Context, key: Hashable, operands: Sequence[Tensor], label: str
    ) -> list[Tensor] | None:
        """Append the calls of an earlier, equal update for these operands, and return the results.

        None where there was no such update, of operands with the same strides and offsets.
        """
        update = self._known.get((key, tuple(map(view, operands))))
        if update is None or len({t.buffer for t in operands}) < len(operands):
            return None
        pairs = zip(update.operands, operands, strict=True)
        same = {old.buffer: new.buffer for old, new in pairs}
        for call in update.calls:
            for _, t in call.writes:
                same[t.buffer] = ctx.scratch(t.dtype, t.shape).buffer
            ctx.append(replace(rename_buffers(call, same), nodes=(label,)))
        return [replace(t, buffer=same[t.buffer]) for t in update.results]
