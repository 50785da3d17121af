"""Why something stays as it is: a code with its values, and the one table of their wordings."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TABLE = """
# any operator
activation: {op} is not one of the activations that fuse ({names})
bias-shape: its bias is not known, or not one number a column
computed: computed in the graph, or an input of it: {what}
between: {op} stands between {above} and {below}
cpu-slower: onnxruntime's CPU takes longer for the Gemm (--fuse ConvAsGemm makes it)
follows: it follows {source}, not {wanted}
near: its constants are near those of {op}, but not the same
not-finite: the folded weights would not be finite, or too small to keep their digits
not-float32: its {what} {number} is a {dtype} that an attribute, a float32, does not hold exactly
off: what would fuse it is off (--level, --skip): {fusions}
other-readers: other nodes, or an output of the model, read {what}, too
plugin: {text}
scaled: {what} other than 1
trained: its parameters are trained, so they are not folded into {what}
unknown: known only when it runs: {what}
unlike: it overflows, or loses a sign, where {op} does not
unfused: it does not fuse with {others}
# matrix multiplications
computed-matrix: it is multiplied by a computed matrix, not by a weight: that needs its result
few-biases: only some of the matrix multiplications have a bias, and it is trained
gradient-rows: no kernel has its gradient at {sizes}: only rows of multiples of 8 are aligned
right-rank: the right operand has rank {rank}, not a weight's 2
transposed: transA=1: the left operand is transposed
# gated units
gate-halves: its parts are not the halves of the columns of a matrix multiplication
gate-merged: its weights are parts of a merged one
gate-weight: both matrix multiplications are with the same weight
gate-widths: its two matrix multiplications differ in their number of columns
# a Pad between a norm and a matrix multiplication
zero-rows: a Pad after the norm adds rows of zeros, which the norm's bias would change; {why}
padded-axis: the rows do not lie along the last axis where they are padded
padded-bias: the matrix multiplication's bias has more axes than the norm
padded-cost: the matrix multiplication could come before the Pad, but to pad {columns} columns
  instead of {width} costs more than the norm's pass
padded-readers: not all that read the padded rows are matrix multiplications that can come first
padded-trained: the result for the added rows depends on a parameter that is trained
padded-weight: the weight is not known, or not finite
# norms
broadcast: the residual is broadcast
codes: the residual is quantized, and the matrix multiplication before the sum adds it
norm-axes: a norm in standard operators, over other axes than the last or in an unknown form
norm-axis: it normalizes from axis {axis} on, but a fused norm only the last axis
norm-cast: a Cast between it and the matrix multiplication rounds its result
norm-form: it contains a Cast or a constant of more axes, but the fused norm has one type and rank
norm-kernel: no kernel fuses {op} with the operators after it
norm-mixed: the operators between it and the MatMul ({views}) mix its rows
norm-readers: a norm fuses only with a MatMul or Gemm by a weight, but it is read by {readers}
norm-scale: its scale is of another type or width
norm-type: it is computed in {dtype}, and {name} computes in float32
norm-weight: norm and weight have different dtypes
# group and batch norms
batch-dtypes: its parameters are of {dtypes}: the folded weights would be rounded once more
batch-fit: its parameters do not fit the {op} before it
batch-training: in training mode it uses the statistics of the batch, which cannot be folded
group-reshape: its reader is not a Reshape to its input's shape
group-scale: it has no scale and bias for each channel
group-sums: its sums are not float32, or are those of float64 rounded to it
# convolutions
auto-pad: auto_pad depends on the input's size
no-spatial-axes: the weight has no spatial axes
transpose-cost: the Transpose would move {width} numbers a pixel, not {channels}, which costs more
  than the norm
# losses
class-axis: LogSoftmax is not along the class axis 1
label-rows: the number of rows is known of the scores, but not of the labels
labels-computed: its labels or weights are computed from the probabilities
log-of-zero: Log is -inf where Softmax rounds to 0, and LogSoftmax is finite there
no-rows: the batch may be empty, which onnxruntime's SoftmaxCrossEntropyLoss refuses
row-losses: the loss of each row is an output, not their sum
# attention
adds-axes: {what} adds axes to the scores
divisor: the scores are a divisor
double-gradient: the gradient of attention in double precision is computed operator by operator
double-softcap: a Tanh in double precision, whose factor an attribute cannot hold
fill: a Where replaces scores by something other than a constant number
leading-axes: the scores' leading axes change, or may change, between {above} and {below}
mask-columns: its mask has another number of columns than there are keys
mask-grows: a mask makes the scores larger
mask-scaled: a mask is added before the scores are scaled by {number:g}
masks: {count} masks and conditions follow each other; two are the most
mixing-view: a {op} that may mix queries or keys {place} the softmax
mixed-types: queries and keys are multiplied in float32, weights and values in 16 bits
no-attention: it is not attention: no matrix multiplication of its result with values follows
no-operator: no fused attention operator supports its inputs and outputs
no-guard: a Where changes the weights by more than a guard against NaN
operand-scale: queries or keys are scaled by a very large or small constant
past: it has a past of only keys or only values, or lengths of its keys beside a past
ranks: the operands of its matrix multiplications are, or may be, vectors or of unequal rank
score-scale: the scores are {how} by {number:g}
scores: the scores come from {op}, not from a MatMul, scale and masks
scores-cast: the scores are cast from {source} to {target}
scores-type: {op} in {dtype} follows a matrix multiplication in {other}
sizes-apart: {what} is not known to be of one size
softmax-axis: the softmax is not over the keys
softmax-precision: its softmax_precision is not float32
sums-queries: the matrix multiplication with v sums over the queries
tanh: a Tanh follows a mask or another Tanh
tensor-scale: the scores are scaled by the tensor '{name}'{how}
unrecognized: unrecognized attention: its scores come from {source}, or other operators follow it
weights-reader: the weights go into {op}, not into a matrix multiplication with v
weights-type: the weights are of another type than the scores, or are cast to one
# operators on a GPU
broadcast-heads: its queries, keys and values have batches or heads that broadcast
empty: it is empty, or too large for indices of 32 bits
faster: its parts are faster{by}
four-bits: its weight stays in 4 bits, so a fused matrix multiplication is computed in parts
misfit: {what} do not fit {to}
kernels: {reasons}
no-kernel: no kernel for {what}
not-a-row: {what} is not one row
results: no kernel gives {names}
unserved: no kernel
# whatever else is left
gate: the gate of a gated unit: a GPU multiplies the halves after the matrix multiplication,
  in the same pass, because {why}
gate-off: the gate of a gated unit: a GPU multiplies the halves in the same pass; --level 2 fuses
  them into the matrix multiplication ({fusion})
has-activation: the {op} before it has an activation already
heads: it splits or joins the heads around fused attention
layer-scale: layer scale: {option} folds it into the weight, which rounds differently
layout: no fusion includes a {op} between {before} and {after}
residual: a sum of two tensors fuses only with a norm or a convolution; {after}{where}
residual-norm: the norm after it is part of a matrix multiplication, and other nodes read the sum
whole: it stays whole: {why}
whole-cpu: onnxruntime's CPU runs it faster whole; a session on a GPU looks into it
"""
_ROWS = re.findall(r"(?m)^([a-z\d-]+): (.*(?:\n  .*)*)", _TABLE)
WORDINGS = {code: wording.replace("\n ", "") for code, wording in _ROWS}
"""What a user reads, by code."""


@dataclass(frozen=True, init=False)
class Reason:
    """A code of WORDINGS, and the values that its wording names, of which one may be a Reason."""

    name: str
    values: tuple[tuple[str, object], ...]

    def __init__(self, name: str, /, **values: object) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "values", tuple(values.items()))

    @property
    def code(self) -> str:
        """The name; `name/code` where a value is a reason."""
        inner = (value.code for _, value in self.values if isinstance(value, Reason))
        return "/".join((self.name, *inner))

    def __str__(self) -> str:
        return WORDINGS[self.name].format(**dict(self.values))
