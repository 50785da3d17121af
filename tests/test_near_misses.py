"""Each rule states what it asks of a graph, and graphs that miss one thing are computed right."""

from collections import Counter
from functools import cache

import hostile
import numpy as np
import onnx_ir as ir
import pytest
from cases import NEWEST_OPSET, FusionCase
from fusion_cases import FUSION_CASES
from near_misses import ROWS, near_misses

from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.ir.build import text_model
from onnx_fuse.ops.fused import RULES
from onnx_fuse.ops.rules import CONDITIONS, Rewriter, Rule
from onnx_fuse.runtime import ort

# What says why a graph stays and rewrites none, and another name of a node.
_UNCONDITIONAL = ("Log", "SwiGLU")


def applied(case: FusionCase, level: int) -> Counter[Rule]:
    """How often each rule rewrites the graph."""
    counts: Counter[Rule] = Counter()
    run = rewrite._applied

    def counted(rule: Rule, rw: Rewriter, node: ir.Node) -> object:
        changed = run(rule, rw, node)
        counts[rule] += bool(changed)
        return changed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewrite, "_applied", counted)
        rewrite.optimize(load(case.model()), level=level, fuse=["ConvAsGemm"])
    return counts


@cache
def rows() -> dict[Rule, list[FusionCase]]:
    """The smallest rows that each rule rewrites."""
    found: dict[Rule, list[FusionCase]] = {rule: [] for rule in RULES}
    cases = [c for c in (*ROWS, *FUSION_CASES) if c in ROWS or c.opset <= NEWEST_OPSET]
    for case in sorted(cases, key=lambda c: len(c.model().graph)):
        for rule in +applied(case, 3):
            if rule in found and len(found[rule]) < 3:
                found[rule].append(case)
    return found


# The first anchor by name: those of some rules come from sets, whose order differs by process.
RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{min(rule.anchors)}")


@RULE
def test_a_rule_states_its_conditions(rule: Rule) -> None:
    """Those that stop it in a row, and no others: the rows break each one alone."""
    stopping = set[str]()
    for row in rows()[rule]:
        level = max(row.level, rule.level)
        whole = applied(row, level)[rule]
        for miss in near_misses(row):
            if miss.condition not in stopping and applied(miss, level)[rule] < whole:
                stopping.add(miss.condition)
    assert stopping == set(rule.conditions.split())
    assert rows()[rule] or min(rule.anchors) == "Log"
    assert rule.conditions or min(rule.anchors) in _UNCONDITIONAL


@RULE
def test_a_near_miss_is_computed_right(rule: Rule) -> None:
    """Of the rule's smallest row: fused or not, at every level, on hostile numbers."""
    wrong = {}
    for row in rows()[rule][:1]:
        if row.opset > NEWEST_OPSET:
            pytest.skip("onnxruntime is older")
        for miss in near_misses(row):
            said = hostile.check(miss, ir.DataType.FLOAT)
            wrong |= {miss.name: said} if said else {}
    assert not wrong


def test_every_condition_is_some_rule_s() -> None:
    assert {name for rule in RULES for name in rule.conditions.split()} == set(CONDITIONS)


@pytest.mark.parametrize("dtype", ["float", "double", "float16"])
def test_the_mean_of_negative_zeros_has_another_sign_in_a_layer_norm(dtype: str) -> None:
    """The limit that `near_misses` spares, and why a bias of +0 is no way out."""
    model = text_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g ({dtype}[2,4] x, {dtype}[4] g, {dtype}[4] b)
            => ({dtype}[2,4] written, {dtype}[2,4] y, {dtype}[2,4] z) <int64[1] axes = {{-1}}>
        {{ mu = ReduceMean (x, axes)  written = Sub (x, mu)
        y = LayerNormalization (x, g)  z = LayerNormalization (x, g, b) }}"""
    )
    kind = model.graph.inputs[0].type.dtype.numpy()
    x = np.array([[-0.0] * 4, [-0.0, 0, 1, -1]], kind)
    feeds = {"x": x, "g": np.ones(4, kind), "b": np.zeros(4, kind)}
    found = [np.signbit(a[:, 0]).tolist() for a in ort.run(ort.session(model), feeds)]
    assert found == [[False, True], [True, True], [False, False]]
