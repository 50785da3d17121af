"""Level 0: constants, dead code and no-ops go, by onnx-ir's and onnxscript's own passes."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from onnx_fuse.ops.rewrite import attribute, is_float

FOLD_LIMIT = (
    1 << 16
)  # elements; a larger constant costs more in the file than its nodes at run time


def clean(model: ir.Model) -> None:
    """Dead nodes, functions and initializers go; the rest in topological order."""
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.TopologicalSortPass()(model)


def canonicalize(model: ir.Model, *, training: bool) -> None:
    """Fold constants and drop no-ops. With `training`, no float weight is folded into another."""
    from onnxscript.optimizer import fold_constants
    from onnxscript.rewriter import RewriteRuleSet
    from onnxscript.rewriter.rules import common as rules

    _lift_constants(model)
    parameters = {
        value
        for value in model.graph.initializers.values()
        if is_float(value) and value.const_value is not None and value.const_value.size > 1
    }

    def should_fold(node: ir.Node) -> bool | None:
        """Only what costs nothing to keep: never a matrix that would be stored twice."""
        if training and any(v in parameters for v in node.inputs if v is not None):
            return False
        return None

    fold_constants(
        model, input_size_limit=FOLD_LIMIT, output_size_limit=FOLD_LIMIT, should_fold=should_fold
    )
    _lift_constants(model)
    common_passes.IdentityEliminationPass()(model)
    no_ops = [
        *(r for rule in (rules.mul_by_1_rule, rules.add_0_rule) for r in rule.commute()),
        rules.sub_0_rule,
        rules.div_by_1_rule,
        rules.dropout_zero_rule,
        rules.dropout_inference_rule,
        rules.no_op_cast_rule,
        rules.no_op_transpose_rule,
        rules.no_op_expand_rule,
        rules.unsqueeze_unsqueeze_rule,
    ]
    RewriteRuleSet(no_ops).apply_to_model(model)
    common_passes.CommonSubexpressionEliminationPass()(model)
    clean(model)


def _lift_constants(model: ir.Model) -> None:
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def fold_batch_norm(model: ir.Model) -> int:
    """Fold inference BatchNormalization into the Conv, ConvTranspose or Gemm before it; how many."""
    from onnxscript.rewriter import RewriteRuleSet
    from onnxscript.rewriter.rules import common as rules

    nodes = [n for n in model.graph if n.op_type == "BatchNormalization" and not n.domain]
    if any(attribute(n, "training_mode", 0) for n in nodes):
        return 0  # the rules do not look at training_mode
    return int(
        RewriteRuleSet(
            [
                rules.fuse_batchnorm_into_conv_rule,
                rules.fuse_batchnorm_into_conv_transpose_rule,
                rules.fuse_batchnorm_into_gemm_rule,
            ]
        ).apply_to_model(model)
    )


def tidy_layout(model: ir.Model) -> None:
    """Level 2: back-to-back Transposes and Reshapes become one."""
    from onnxscript.rewriter import RewriteRuleSet
    from onnxscript.rewriter.rules import common as rules

    RewriteRuleSet(
        [rules.transpose_transpose_rule, rules.no_op_transpose_rule, rules.reshape_reshape_rule]
    ).apply_to_model(model)
    _lift_constants(model)
