"""The next token of logits: a graph of standard operators, which runs where the decoder runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.generation.options import DecoderOptions
from onnx_fuse.ir.build import Builder, add_input
from onnx_fuse.ir.constants import CANONICAL_OPSET, FUSE
from onnx_fuse.runtime.tensor import Argument

TOKEN = "next_token"
AFTER = "after."
"""What the name of an output begins with that is an input of the next run."""
LAST, DRAWN, HISTORY = "last_position", "drawn", "tokens_so_far"
"""Names of the sampler's inputs; a graph has those that its options need."""


def streams(seed: int | None, sequences: int) -> list[np.random.Generator]:
    """Random numbers for each sequence, by the seed and the sequence's place."""
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
    keys = (np.array([seed, row], np.uint64) for row in range(sequences))
    return [np.random.Generator(np.random.Philox(key=key)) for key in keys]


def sampler_inputs(
    sampling: DecoderOptions, ragged: bool
) -> dict[str, tuple[ir.DataType, list[Any]]]:
    """Type and shape of each input that the options need."""
    wanted: dict[str, tuple[bool, ir.DataType, list[Any]]] = {
        LAST: (ragged, ir.DataType.INT64, ["batch", "rows"]),
        DRAWN: (sampling.temperature > 0, ir.DataType.FLOAT, ["batch", 1]),
        HISTORY: (sampling.repetition_penalty != 1, ir.DataType.INT64, ["batch", "room"]),
    }
    return {name: (kind, shape) for name, (need, kind, shape) in wanted.items() if need}


def append_sampler(
    graph: ir.Graph,
    logits: ir.Value,
    sampling: DecoderOptions,
    ragged: bool,
    rows: int = 1,
    counted: Sequence[str] = (),
) -> None:
    """Put the output TOKEN int64 [B, R] in the place of the output `logits` [B, S, V] or [B, V].

    It is the token behind each of the last positions, at most `rows`, or behind those of each
    sequence's LAST where `ragged`; -1 where a logit is not a number. DRAWN are numbers in [0, 1),
    and HISTORY the tokens of each sequence, of which any may come again; with these, R is 1. For
    each of the int64 inputs `counted` there is an output AFTER of its name: its values and one.
    """
    ends = {n: add_input(graph, n, *end) for n, end in sampler_inputs(sampling, ragged).items()}
    op = Builder()
    # what takes the last rows moves up, so that no other row is computed
    if ragged:
        x = op.GatherND(logits, op.Unsqueeze(ends[LAST], [2]), batch_dims=1)
    elif logits.shape is not None and len(logits.shape) == 2:
        x = op.Unsqueeze(logits, [1])
    elif rows == 1:
        x = op.Gather(logits, [-1], axis=1)
    else:
        x = op.Slice(logits, [-rows], [np.iinfo(np.int64).max], [1])
    x = op.Cast(x, to=ir.DataType.FLOAT)
    x.dtype = ir.DataType.FLOAT
    one = HISTORY in ends or DRAWN in ends
    x = op.Squeeze(x, [1]) if one else x
    if HISTORY in ends:
        there = op.GatherElements(x, ends[HISTORY], axis=1)
        penalty = float(sampling.repetition_penalty)
        less = op.Where(op.Less(there, 0.0), op.Mul(there, penalty), op.Div(there, penalty))
        x = op.ScatterElements(x, ends[HISTORY], less, axis=1)
    if DRAWN in ends:
        # finite for logits of which some are -inf, and none is inf or not a number
        weight = op.ReduceLogSumExp(x, [-1], keepdims=1)
        token = _drawn(op, x, sampling, ends[DRAWN])
        token = op.Where(op.Less(op.Abs(weight), np.float32(np.inf)), token, -1)
    else:
        token = op.ArgMaxFinite(x, domain=FUSE, keepdims=int(one))
    token.name, token.shape = TOKEN, ir.Shape(["batch", "rows"])
    token.type = ir.TensorType(ir.DataType.INT64)
    place = next(i for i, v in enumerate(graph.outputs) if v is logits)
    graph.outputs[place] = token
    for value in [v for v in graph.inputs if v.name in counted]:
        after = op.Add(value, 1)
        after.name, after.shape, after.type = AFTER + str(value.name), value.shape, value.type
        graph.outputs.append(after)
    graph.extend(op.nodes)


def _drawn(op: Builder, x: ir.Value, sampling: DecoderOptions, drawn: ir.Value) -> ir.Value:
    """Where the sum of the probabilities goes beyond `drawn` of all of it; x [B, V] -> [B, 1]."""
    # the highest is 0, so that no temperature makes it infinite
    x = op.Div(op.Sub(x, op.ReduceMax(x, [1], keepdims=1)), max(float(sampling.temperature), 1e-30))
    x.dtype = ir.DataType.FLOAT
    places = None
    if sampling.top_k or sampling.top_p < 1:
        count = op.Slice(op.Shape(x), [1], [2], [0])
        if sampling.top_k:
            count = op.Min(count, [int(sampling.top_k)])
        x, places = op.TopK(x, count, outputs=2, axis=1)
    share = op.Softmax(x, axis=1)
    share.dtype = ir.DataType.FLOAT
    if sampling.top_p < 1:
        before = op.CumSum(share, 1, exclusive=1)
        share = op.Where(op.Less(before, float(sampling.top_p)), share, 0.0)
    if sampling.min_p:
        least = op.Mul(op.ReduceMax(share, [1], keepdims=1), float(sampling.min_p))
        share = op.Where(op.Less(share, least), 0.0, share)
    sums = op.CumSum(share, 1)
    whole = op.ReduceMax(sums, [1], keepdims=1)
    # a place whose sum is all of it is never passed: none behind it has a share
    passed = op.And(op.LessOrEqual(sums, op.Mul(whole, drawn)), op.Less(sums, whole))
    place = op.ReduceSum(op.Cast(passed, to=ir.DataType.INT64), [1], keepdims=1)
    return place if places is None else op.GatherElements(places, place, axis=1)


def sampler(logits: Argument, sampling: DecoderOptions, ragged: bool, rows: int = 1) -> ir.Model:
    """A model of its own, from an output `logits` as a session describes it."""
    from onnx_fuse.feeds import InputSpec

    spec = InputSpec(logits)
    kind = ir.DataType.from_numpy(spec.dtype)
    shape = ["batch", "sequence", spec.shape[-1]]
    opset = {"": CANONICAL_OPSET}
    graph = ir.Graph([], [], nodes=[], opset_imports=opset, name="sampler")
    value = add_input(graph, "logits", kind, shape if len(spec.shape) == 3 else shape[::2])
    graph.outputs.append(value)
    append_sampler(graph, value, sampling, ragged, rows)
    return ir.Model(graph, ir_version=10)
