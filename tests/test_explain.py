"""Everything that stays has a reason: by class and neighbours, on small graphs and real ones."""

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from cases import RealCase, real_cases
from support import Cli, says, table, with_weights

from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.ir.build import text_model
from onnx_fuse.ops.rules import Rule, is_constant, is_float, label

_LN = "float[8] g, float[8] b"
_IMAGE = "float[2,4,5,5] x, float[4] g, float[4] b"

CLASSES = {
    *("LayerNormalization", "RMSNormalization", "BatchNormalization", "Softmax", "Attention"),
    *("Relu", "Gelu", "Silu", "QuickGelu", "Sigmoid", "Tanh", "Transpose", "Reshape", "Flatten"),
}

# graphs, and the reasons in any order
LEFT = table(globals())("""
norm_is_the_output:
  (float[3,8] x, $_LN) => (float[3,8] y) { y = LayerNormalization (x, g, b) }
  -> norm-readers: outputs of the model alone
norm_before_a_convolution:
  (float[2,5,8] x, $_LN, float[4,8,3] w) => (float[2,4,3] y)
  { n = LayerNormalization (x, g, b) t = Transpose <perm = [0,2,1]> (n) y = Conv (t, w) }
  -> norm-readers: read by a convolution; layout: a Transpose between a norm and a convolution
norm_before_a_computed_matrix:
  (float[2,3,8] x, float[2,8,3] v, $_LN) => (float[2,3,3] y)
  { n = LayerNormalization (x, g, b) t = Tanh (v) y = MatMul (n, t) }
  -> right-rank: 3; follows: an input
norm_cast_before_a_gated_product:
  (float[3,8] x, float[8] g, float16[8,4] v, float16[8,4] w) => (float16[3,4] y)
  { n = RMSNormalization (x, g) c = Cast <to = 10> (n) a = MatMul (c, v) s = Sigmoid (a)
  u = Mul (a, s) b = MatMul (c, w) y = Mul (u, b) }
  -> norm-cast: RMSNormalization
batch_norm_of_an_input:
  ($_IMAGE, float[4] v) => (float[2,4,5,5] y) { y = BatchNormalization (x, g, b, b, var) }
  -> follows: an input of the model
softmax_alone:
  (float[3,8] x) => (float[3,8] y) { y = Softmax (x) }
  -> no-attention: Softmax
activation_behind_a_sum:
  (float[3,8] x, float[3,8] r) => (float[3,8] y) { s = Add (x, r) y = Relu (s) }
  -> follows: Relu: it follows an Add; residual
activation_outside_the_table:
  (float[3,8] x) => (float[3,8] y) { a = Exp (x) y = Softsign (a) }
  -> activation: Softsign
instance_norm:
  ($_IMAGE) => (float[2,4,5,5] y) { y = InstanceNormalization (x, g, b) }
  -> norm-kernel: InstanceNormalization
""")


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_has_a_reason(name: str) -> None:
    text, wanted = LEFT[name]
    model = text_model(f"h {text}")
    held = [v for v in model.graph.inputs if v.name in ("g", "b", "w", "var")]
    with_weights(model, {v.name: np.ones(v.shape.numpy(), np.float32) for v in held})
    report = rewrite.optimize(model)
    assert [reason for reason in wanted.split("; ") if not says(report, reason)] == []


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("case", real_cases(), ids=lambda c: c.name)
def test_nothing_stays_without_a_word(case: RealCase, level: int) -> None:
    model = load(case.path)
    found = rewrite.optimize(model, level=level).not_fused
    named = {node for left in found for node in left.nodes}
    silent = [
        label(node)
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if node.op_type in CLASSES
        and (not node.domain or node.op_type in ("RMSNormalization", "Silu", "QuickGelu"))
        and is_float(node.outputs[0])
        and not is_constant(node.inputs[0])
        and label(node) not in named
    ]
    assert not silent
    assert len({left.reason for left in found}) == len(found), "equal reasons are one entry"


def test_views_that_part_and_join_are_looked_through_once() -> None:
    """Two paths a step: walked one by one, forty steps would never end."""
    steps = " ".join(
        f"a{i} = Transpose <perm = [1, 0]> (x{i}) b{i} = Reshape (x{i}, to)"
        f" x{i + 1} = Concat <axis = 0> (a{i}, b{i})"
        for i in range(40)
    )
    ends = "(float[N,M] x0, int64[2] to) => (float[P,Q] y)"
    model = text_model(f"h {ends} {{ {steps} y = Exp (x40) }}")
    assert rewrite.optimize(model).not_fused


def test_a_fusion_that_is_off_is_the_reason() -> None:
    path = next(case.path for case in real_cases() if "LayerNorm" not in case.name)
    model = load(path)
    assert says(rewrite.optimize(model, level=0), "off")


def test_the_rule_of_a_plug_in_says_why_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule("Mine", 1, ("Exp",), lambda rw, node: rw.refuse("Mine", [node], "not today"))
    monkeypatch.setattr(rewrite, "ADDED", [rule])
    model = text_model("h (float[3,8] x) => (float[3,8] y) { y = Exp (x) }")
    assert says(rewrite.optimize(model), "plugin: Exp: not today")


def test_a_refusal_of_what_a_later_rule_fused_is_not_told() -> None:
    """The first rule has no bias for its product; the norm is fused all the same."""
    model = text_model(
        "h (float[3,8] x, float[3,8] r, float[8] g, float[8] b) => (float[3,8] y, float[3,8] s)"
        " { s = Add (x, r) y = LayerNormalization (s, g, b) }"
    )
    report = rewrite.optimize(model)
    assert report.fusions == {"SkipLayerNorm": 1}
    assert report.not_fused == []


def test_the_command_tells_all_and_sends_nobody_to_an_option_that_is_on(
    cli: Cli, tmp_path: Path
) -> None:
    model = text_model("h (float[3,8] x) => (float[3,8] y) { y = Softmax (x) }")
    path = tmp_path / "m.onnx"
    path.write_bytes(ir.to_proto(model).SerializeToString())
    result = cli("optimize", path, "--explain", "--json", tmp_path / "r.json")
    assert result.code == 0
    assert "--explain says why" not in result.out
    (left,) = json.loads((tmp_path / "r.json").read_text())["not_fused"]
    assert (left["nodes"], left["code"]) == (["y"], "no-attention")
    assert left["reason"] in result.out
    model = text_model("h (float[3,8] x) => (float[3,8] y) { y = Exp (x) }")
    path.write_bytes(ir.to_proto(model).SerializeToString())
    result = cli("optimize", path, "--explain")
    assert "not fused: no norm, attention, activation, residual or layout is left" in result.out
    assert "--explain says why" in cli("optimize", path).out


def test_what_costs_time_on_the_cpu_is_for_own_kernels() -> None:
    text = """g (float[N,4,H,W] x) => (float[N,2,H,W] y) <float[4] s = {1,1,1,1}, float[4] b =
      {0,0,0,0}, float[2,4,1,1] w = {1,2,3,4,5,6,7,8}> { t = Transpose <perm = [0, 2, 3, 1]> (x)
      n = LayerNormalization (t, s, b) c = Transpose <perm = [0, 3, 1, 2]> (n) y = Conv (c, w) }"""
    for options in ({}, {"own_kernels": True}, {"fuse": ["ConvAsGemm"]}):
        report = rewrite.optimize(load(text_model(text)), **options)
        assert ("LayerNormGemm" in report.fusions) == bool(options)
        assert says(report, "cpu-slower") == (not options)
