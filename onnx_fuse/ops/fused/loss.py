"""LogSoftmax and negative log likelihood written apart, into one SoftmaxCrossEntropyLoss."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, dim, rank, sources
from onnx_fuse.ops.rules import Rewriter, Rule, attribute, consumers, producer
from onnx_fuse.reasons import Reason

NAME = "SoftmaxCrossEntropyLoss"


def _log_softmax(rw: Rewriter, log: ir.Node) -> bool:
    softmax = producer(log.inputs[0], "Softmax")
    if softmax is None or log.domain:
        return False
    return rw.refuse(NAME, [softmax, log], Reason("log-of-zero"))


def _nll(rw: Rewriter, nll: ir.Node) -> bool:
    log_softmax = producer(nll.inputs[0], "LogSoftmax")
    if log_softmax is None or nll.domain:
        return False
    log_p = log_softmax.outputs[0]
    if attribute(log_softmax, "axis", -1) not in (1, 1 - (rank(log_p) or 0)):
        return rw.refuse(NAME, [log_softmax, nll], Reason("class-axis"))
    shared = len(consumers(log_p)) > 1 or log_p.is_graph_output()
    inputs = [log_softmax.inputs[0], *nll.inputs[1:]]
    if shared and log_p in sources(nll.inputs[1:]):
        return rw.refuse(NAME, [log_softmax, nll], Reason("labels-computed"))
    some = all(dim(log_p, axis) for axis in (0, 1))
    if not (some or rw.training or NAME in rw.for_kernels):
        return rw.refuse(NAME, [log_softmax, nll], Reason("no-rows"))
    op = Builder()
    outputs = op.node(NAME, inputs, outputs=1 + shared, attributes=nll.attributes)
    rw.fusions[NAME] += 1
    if shared:
        return rw.replace(nll, op, [log_p, nll.outputs[0]], [outputs[1], outputs[0]])
    return rw.replace(nll, op, [nll.outputs[0]], [outputs])


RULES = (
    Rule(NAME, 1, ("Log",), _log_softmax),
    Rule(NAME, 1, ("NegativeLogLikelihoodLoss",), _nll, conditions="types ranks sizes body"),
)
