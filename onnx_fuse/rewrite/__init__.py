"""Graph optimization: `optimize` runs the pipeline over a model in place and says what it did."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import onnx_fuse.ir  # noqa: F401  # first: it imports onnx_ir without sympy

# isort: split
import onnx_ir as ir

from onnx_fuse import progress
from onnx_fuse.errors import ModelError, UsageError, listed, unknown
from onnx_fuse.importer.shapes import infer_shapes, symbols_apart
from onnx_fuse.ir.build import all_nodes
from onnx_fuse.ir.constants import FUSE, base_name, one_line
from onnx_fuse.ops import OPS
from onnx_fuse.ops.bodies import carries_body
from onnx_fuse.ops.fused import RULES
from onnx_fuse.ops.rules import ADDED, Rewriter, Rule, isolated_subgraphs, nodes_in_order
from onnx_fuse.rewrite.batch_norm import FOLD_BATCH_NORM, fold_batch_norm
from onnx_fuse.rewrite.caches import GROWING_CACHE, grow_caches
from onnx_fuse.rewrite.canonicalize import (
    MISFITS,
    canonicalize,
    clean,
    refresh,
    shape_of_source,
    tidy_layout,
)
from onnx_fuse.rewrite.canonicalize import tidy_inlined as tidy_inlined
from onnx_fuse.rewrite.contrib import (
    attend_to_tokens,
    expand_where_fused,
    forget_regions,
    regions,
)
from onnx_fuse.rewrite.explain import Leftover, explain
from onnx_fuse.rewrite.gather_rows import GATHER_ROWS, gather_rows

LEVELS = {
    0: "one form for every graph: constants are folded, norms and activations are recognized",
    1: "level 0, and exact fusions",
    2: "level 1, merged matrix multiplications and gated units, and tidied layouts (the default)",
    3: "level 2, and rewrites that round differently",
}
FUSIONS: dict[str, int] = {FOLD_BATCH_NORM: 1, GATHER_ROWS: 2, GROWING_CACHE: 1}
FUSIONS |= {rule.name: rule.level for rule in RULES}
"""Name of every fusion and the level that turns it on; --fuse and --skip take these names."""


_CANONICAL = ("RMSNormalization", "Silu", "QuickGelu")  # forms of one op, nothing fused


@dataclass
class Report:
    """What `optimize` did to a model."""

    fusions: dict[str, int] = field(default_factory=dict)
    """The number of fused operators by name."""
    not_fused: list[Leftover] = field(default_factory=list)
    """The nodes that could have been fused but stayed, with the reason."""
    notes: list[str] = field(default_factory=list)
    """Sentences about merges and other decisions."""
    before: Counter[str] = field(default_factory=Counter)
    """The number of nodes by operator in the model as it came."""
    after: Counter[str] = field(default_factory=Counter)
    """The number of nodes by operator in the result."""

    @property
    def operators(self) -> int:
        """The number of fused operators in the result: of merged products, what they became."""
        return sum(n for name, n in self.fusions.items() if (FUSE, name) in OPS)


def op_counts(model: ir.Model) -> Counter[str]:
    """Nodes by operator, subgraphs included; Constant nodes are data, not operations."""
    nodes = all_nodes(model.graph)
    return Counter(
        f"{n.domain}.{n.op_type}" if n.domain else n.op_type
        for n in nodes
        if n.op_type != "Constant"
    )


def _fused(model: ir.Model, rw: Rewriter) -> dict[str, int]:
    """Fused ops in the result by name, exposed values aside; and rewrites that leave no op."""
    nodes = all_nodes(model.graph)
    names = (base_name(n) for n in nodes if carries_body(n))
    counts = Counter(name for name in names if name not in _CANONICAL)
    added = {rule.name for rule in ADDED}
    without_op = {name: k for name, k in rw.fusions.items() if (FUSE, name) not in OPS}
    counts.update({name: k for name, k in without_op.items() if name not in added})
    return dict(sorted(counts.items()))


def _applied(rule: Rule, rw: Rewriter, node: ir.Node) -> object:
    """Raises ModelError where ranks or types that the file states cannot be those of the node."""
    try:
        return rule.apply(rw, node)
    except MISFITS as error:
        raise ModelError(
            f"node '{node.name or node.outputs[0].name}' ({node.op_type}): its operands do not fit "
            f"what {rule.name} looks for ({type(error).__name__}: {one_line(error)}); "
            f"--skip {rule.name} leaves the node as it is"
        ) from error


def optimize(
    model: ir.Model,
    *,
    level: int = 2,
    fuse: Collection[str] = (),
    skip: Collection[str] = (),
    training: bool = False,
    own_kernels: bool = False,
) -> Report:
    """Optimize `model` in place up to `level` (see LEVELS).

    `fuse` turns fusions on whatever the level, `skip` turns them off (names: FUSIONS). With
    `training` every float initializer stays recoverable: nothing is folded away. `own_kernels` is
    for graphs that this runtime's kernels run, or that train: it also fuses what is in contrib
    operators that onnxruntime's CPU runs faster whole.
    """
    fuse, skip = listed("fuse", fuse), listed("skip", skip)
    for name in (*fuse, *skip):
        if name not in FUSIONS:
            raise UsageError(unknown("fusion", name, sorted(FUSIONS)))
    if level not in LEVELS:
        raise UsageError(f"the level is {level!r}: it must be 0, 1, 2 or 3")

    def wanted(name: str, lowest: int) -> bool:
        return name not in skip and (lowest <= level or name in fuse)

    def pipeline(model: ir.Model) -> tuple[Rewriter, set[str]]:
        rw, taken = Rewriter(model, training=training), set()
        rw.for_kernels = FUSIONS if own_kernels else fuse
        rw.notes += canonicalize(model, training=training)
        shape_of_source(model)
        infer_shapes(model, again=True)
        before = regions(model)
        if not training and wanted(FOLD_BATCH_NORM, 1) and (folded := fold_batch_norm(rw)):
            rw.fusions[FOLD_BATCH_NORM] = folded
            refresh(model)
            taken |= {region for node, region in before if node.graph is None}
        operators = {node.op_type for node in all_nodes(model.graph)}
        rules = (*RULES, *ADDED)
        for i, rule in enumerate(rules):
            progress.report("fusing", i, len(rules))
            if not wanted(rule.name, rule.level) or (training and not rule.training):
                continue
            if operators.isdisjoint(rule.anchors):
                continue
            before = regions(model)
            with isolated_subgraphs(model.graph):
                nodes = nodes_in_order(model.graph, rule.anchors)
                changed = [_applied(rule, rw, node) for node in nodes]
            if any(changed):
                shape_of_source(model)
                refresh(model)
                if rule.level:
                    taken |= {region for node, region in before if node.graph is None}
            operators = {node.op_type for node in all_nodes(model.graph)}
        tidied = level >= 2 and tidy_layout(model)
        if tidied and not training:
            infer_shapes(model, again=True)
        if not training and wanted(GATHER_ROWS, 2) and (gathered := gather_rows(model.graph)):
            rw.fusions[GATHER_ROWS] = gathered
            tidied = True
        if own_kernels and not training and wanted(GROWING_CACHE, 1):
            tidied |= bool(grow_caches(rw))
        clean(model)
        if tidied:
            infer_shapes(model, again=True)
        return rw, taken

    report = Report(before=op_counts(model))
    own_kernels |= training
    if own_kernels and attend_to_tokens(model):
        refresh(model)
    # what runs on own kernels asks whether sizes of one name are equal; onnxruntime does not
    with contextlib.nullcontext() if own_kernels else symbols_apart(model):
        reasons = expand_where_fused(
            model, lambda m: pipeline(m)[1], own_kernels=own_kernels, training=training
        )
        rw, _ = pipeline(model)
    forget_regions(model)
    report.fusions = _fused(model, rw)
    off = {name for name, lowest in FUSIONS.items() if not wanted(name, lowest)}
    refusals = [*rw.refusals, *reasons]
    report.not_fused = explain(model.graph, refusals, off, training=training)
    report.notes = rw.notes
    report.after = op_counts(model)
    return report
