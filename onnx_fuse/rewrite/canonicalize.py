"""Level 0: constants, dead code and no-ops go, by onnx-ir's and onnxscript's own passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from onnx_fuse.errors import ModelError
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import (
    all_nodes,
    const_array,
    given,
    rank,
    remove_unused_nodes,
    rename_shadowing_values,
)
from onnx_fuse.ir.constants import DEFAULT, FUSE, one_line, quiet
from onnx_fuse.ir.traits import POINTWISE
from onnx_fuse.ops.rules import (
    CONSTANT,
    consumers,
    freeze_shared,
    is_float,
    isolated_subgraphs,
    number,
)
from onnx_fuse.rewrite.einsum import write_products
from onnx_fuse.rewrite.fold import fold_constants
from onnx_fuse.rewrite.sizes import infer_reshapes

_PURE = ("", FUSE, "com.microsoft", "ai.onnx.ml")

_ROUNDS = 12
"""Rounds of folding at most: where each layer's padding depends on its size, one a layer."""


def clean(model: ir.Model) -> None:
    """Remove dead and repeated nodes and unused initializers; sort the rest topologically."""
    remove_unused_nodes(model)
    rename_shadowing_values(model.graph)
    common_passes.TopologicalSortPass()(model)
    nodes = all_nodes(model.graph)
    if not any(_stays_apart(n) for n in nodes):
        common_passes.CommonSubexpressionEliminationPass()(model)


def _stays_apart(node: ir.Node) -> bool:
    """Whether onnx-ir's elimination of repeated nodes must not see this one.

    It knows the other random operators, but would make one of two Dropouts, or of two nodes of
    which nobody knows what they do; and it cannot hash an Optional's type.
    """
    return (
        node.op_type in ("Bernoulli", "Dropout")
        or node.domain not in _PURE
        or any(a.type == ir.AttributeType.TYPE_PROTO for a in node.attributes.values())
    )


def refresh(model: ir.Model) -> None:
    """Clean the model after a rewrite, and infer the shapes of what is new."""
    clean(model)
    infer_shapes(model, again=True)


def rewrite_each(
    model: ir.Model, op_type: str, rewritten: Callable[[ir.Graph, ir.Node], bool]
) -> int:
    """Ask a rewrite at each standard node of a type in the main graph; how many it rewrote."""
    nodes = [node for node in model.graph if node.op_type == op_type and not node.domain]
    count = sum(rewritten(model.graph, node) for node in nodes)
    if count:
        refresh(model)
    return count


def fold_sizes(model: ir.Model, *, training: bool) -> Callable[[ir.Node], bool]:
    """Fold constants, sizes that are known among them; returns which nodes may be folded."""
    _lift_constants(model)
    parameters = {
        value
        for value in model.graph.initializers.values()
        if is_float(value) and CONSTANT not in value.metadata_props
    }

    def wanted(node: ir.Node) -> bool:
        if node.op_type == "DequantizeLinear":
            return False  # a weight of few bits stays one
        return not (training and any(v in parameters for v in node.inputs))

    for _ in range(_ROUNDS):  # shapes known after one round make more of them constants
        infer_shapes(model)
        changed = infer_reshapes(model)
        _lift_constants(model)
        changed = fold_constants(model, wanted) or changed
        _lift_constants(model)
        if not changed:
            break
    return wanted


def canonicalize(model: ir.Model, *, training: bool) -> list[str]:
    """Fold constants and drop no-ops; returns remarks for the report.

    With `training`, no float weight is folded into another.
    """
    wanted = fold_sizes(model, training=training)
    notes = _sequences(model)
    _drop_identities(model)
    no_ops = ["no_op_cast", "no_op_transpose", "no_op_expand", "unsqueeze_unsqueeze"]
    if any(n.op_type == "Expand" and rank(given(n, 1)) == 0 for n in all_nodes(model.graph)):
        no_ops.remove("no_op_expand")  # onnxruntime takes a number for one size, the rule does not
    if _apply(model, no_ops, _may_do_nothing):
        _drop_identities(model)  # which a Cast to the same type has become
    _drop_no_ops(model)
    if write_products(model):
        fold_constants(model, wanted)  # the weights among the operands, in their new shapes
        _lift_constants(model)
    clean(model)
    open_ = [v.name or "" for v in model.graph.inputs if DEFAULT in v.meta]
    if open_:
        notes.append(
            f"{len(open_)} inputs have a default that a caller may override ({', '.join(open_[:3])}"
            f"{', …' if len(open_) > 3 else ''}): they are not constants, so nodes that read "
            "them are not folded"
        )
    return notes


def tidy_inlined(model: ir.Model) -> None:
    """Remove what inlined bodies leave: casts of constants, and biases that add nothing."""
    infer_shapes(model)
    fold_constants(model, lambda node: node.op_type == "Cast")
    _drop_no_ops(model)
    clean(model)


def _sequences(model: ir.Model) -> list[str]:
    """Remove, by onnxscript's folding, sequences whose elements alone are read again."""
    if not any(
        n.op_type in ("ConcatFromSequence", "SequenceAt", "SplitToSequence") and not n.domain
        for n in all_nodes(model.graph)
    ):
        return []
    from onnxscript.optimizer import fold_constants as fold_sequences

    for node in all_nodes(model.graph):
        if node.op_type == "SplitToSequence" and not node.domain and rank(given(node, 1)) == 1:
            node.attributes.pop("keepdims", None)  # sizes in a vector keep the axis; it asks first
    with quiet("onnxscript"):  # it logs what it leaves alone
        # It evaluates nothing, since its evaluator is not onnxruntime.
        try:
            fold_sequences(model, should_fold=lambda node: False)
        except RuntimeError as error:
            return [f"{error}: it and the nodes after it stay unchanged"]
    for node in all_nodes(model.graph):
        if node.op_type == "SequenceConstruct" and not node.inputs:
            kind = node.outputs[0].type
            node.op_type = "SequenceEmpty"  # a split of no elements has no parts
            if kind is not None:
                node.attributes["dtype"] = ir.AttrInt64("dtype", int(kind.dtype))
    infer_shapes(model)
    return []


MISFITS = (ArithmeticError, IndexError, ValueError)
"""What a rewrite raises where ranks or sizes do not fit the operator; all else is its own fault."""


def _is_identity_transpose(node: ir.Node) -> bool:
    perm = node.attributes.get("perm") if node.op_type == "Transpose" else None
    return perm is not None and (perm.is_ref() or list(perm.value) == sorted(perm.value))


def _repeats(node: ir.Node, *ops: str) -> bool:
    """Whether the node is one of `ops` and reads the result of a node of the same operator."""
    x = node.inputs[0] if node.op_type in ops and node.inputs else None
    maker = None if x is None else x.producer()
    return maker is not None and maker.op_type == node.op_type


def _may_do_nothing(node: ir.Node) -> bool:
    """Whether one of the rules for Cast, Transpose, Expand and Unsqueeze may apply to it."""
    to = node.attributes.get("to") if node.op_type == "Cast" else None
    if to is not None and node.inputs and node.inputs[0] is not None:
        return to.is_ref() or node.inputs[0].dtype == to.value
    return node.op_type == "Expand" or _is_identity_transpose(node) or _repeats(node, "Unsqueeze")


def _apply(model: ir.Model, names: Sequence[str], may: Callable[[ir.Node], bool]) -> int:
    """Apply onnxscript's rules of these names where they `may` apply to a node; how many times."""
    matching = [n for n in all_nodes(model.graph) if may(n)]
    if not matching:
        return 0  # importing onnxscript takes longer than most graphs
    from onnxscript.rewriter import RewriteRuleSet
    from onnxscript.rewriter.rules import common

    rules = [getattr(common, f"{name}_rule") for name in names]
    with isolated_subgraphs(model.graph):
        try:
            return int(RewriteRuleSet(rules).apply_to_model(model))
        except (*MISFITS, AssertionError, TypeError) as error:
            # onnxscript's alone: its rules believe that operands are what the operators ask for
            kinds = ", ".join(sorted({n.op_type for n in matching}))
            raise ModelError(
                f"a node among {kinds} has operands that do not fit it ({one_line(error)})"
            ) from error


def _drop_identities(model: ir.Model) -> None:
    """Let readers of Identity(x) read x; an Identity that makes an output leaves its name to x.

    onnx-ir's pass (1.1) renames x even where x is an output itself, whose name is then lost.
    """
    for node in list(all_nodes(model.graph)):
        x, graph = (node.inputs[0] if node.inputs else None), node.graph
        if node.op_type != "Identity" or node.domain or x is None or graph is None:
            continue
        y = node.outputs[0]
        for use in tuple(y.uses()):
            use.node.replace_input_with(use.idx, x)
        producer = x.producer()
        if not y.is_graph_output():
            with contextlib.suppress(ValueError):  # the file contradicts itself: x keeps its own
                x.merge_shapes(y.shape)
        elif producer is not None and producer.graph is graph and not x.is_graph_output():
            name, x.type, x.shape = y.name, y.type or x.type, y.shape or x.shape
            graph.outputs[:] = [x if v is y else v for v in graph.outputs]
            graph.remove(node, safe=True)
            x.name = name


# x + -0, x - 0, x * 1, x / 1, by the position of the constant and its value; x + 0 is no no-op:
# it makes 0 of -0. onnxscript has rules for these, but they compare with a tolerance: to them
# BERT's epsilon of 1e-12 is zero (0.7.2).
_NEUTRAL = {"Add": (0, 1, -0.0), "Sub": (1, 1, 0.0), "Mul": (0, 1, 1.0), "Div": (1, 1, 1.0)}


def _is_neutral(node: ir.Node, index: int, neutral: float) -> bool:
    held = number(node, index)
    signed = is_float(node.outputs[0]) and neutral == 0
    return held == neutral and (not signed or bool(np.signbit(held) == np.signbit(neutral)))


def _drop_no_ops(model: ir.Model) -> None:
    for node in list(all_nodes(model.graph)):
        if node.domain or not node.outputs or node.outputs[0].is_graph_output():
            continue
        operand: ir.Value | None = None
        if node.op_type in _NEUTRAL:
            first, last, neutral = _NEUTRAL[node.op_type]
            for i in range(first, last + 1):
                if _is_neutral(node, i, neutral):
                    operand = node.inputs[1 - i]
        elif node.op_type == "Dropout" and not (
            len(node.outputs) > 1 and consumers(node.outputs[1])
        ):
            _, ratio, mode = (*node.inputs, None, None)[:3]
            held = [const_array(value) for value in (ratio, mode) if value is not None]
            # it drops nothing where it does not train, or at a ratio of 0
            if mode is None or any(array is not None and not array.any() for array in held):
                operand = node.inputs[0]
        elif node.op_type == "Pad":
            pads = const_array(node.inputs[1])
            if pads is not None and not pads.any():
                operand = node.inputs[0]
        if operand is not None and operand.dtype == node.outputs[0].dtype:
            node.outputs[0].replace_all_uses_with(operand)
            freeze_shared(node.outputs)


_NORMS = frozenset(("LayerNormalization", "RMSNormalization", "Softmax", "LogSoftmax"))


def shape_of_source(model: ir.Model) -> None:
    """Shape(f(x)) = Shape(x) where f keeps shapes: a Shape must not count as a norm's reader."""
    for node in all_nodes(model.graph):
        while node.op_type == "Shape" and (x := node.inputs[0]) is not None:
            producer = x.producer()
            if (
                producer is None
                or producer.op_type not in POINTWISE | _NORMS
                or producer.domain not in ("", FUSE)
                or producer.outputs[0] is not x  # LayerNormalization's Mean is of another
                or producer.graph is not node.graph
            ):
                break
            node.replace_input_with(0, producer.inputs[0])


def _lift_constants(model: ir.Model) -> None:
    before = set(model.graph.initializers)
    for node in all_nodes(model.graph):  # the pass names tensors, which clones of the model share
        held = node.attributes.get("value") if node.op_type == "Constant" else None
        if held is not None and not held.is_ref() and held.type == ir.AttributeType.TENSOR:
            tensor = held.as_tensor()
            if tensor.dtype != ir.DataType.STRING:
                copy = ir.Tensor(tensor.numpy(), tensor.dtype)
                node.attributes["value"] = ir.AttrTensor("value", copy)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for name in set(model.graph.initializers) - before:
        model.graph.initializers[name].metadata_props[CONSTANT] = "1"


def tidy_layout(model: ir.Model) -> bool:
    """Merge Transposes, and Reshapes, that stand back to back (level 2); return whether any did."""
    pairs = ("transpose_transpose", "no_op_transpose", "reshape_reshape")
    count = _apply(
        model, pairs, lambda n: _repeats(n, "Transpose", "Reshape") or _is_identity_transpose(n)
    )
    _lift_constants(model)
    return count > 0
