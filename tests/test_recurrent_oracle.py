"""The float64 forms of LSTM, GRU and RNN that check gradients, against onnxruntime's kernels."""

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from gradient_loops import WAYS, recurrent
from gradient_rows import F64
from support import Cli
from test_gradients import build, draw

from onnx_fuse.ops.opdef import OPS
from onnx_fuse.runtime import ort
from onnx_fuse.validation.gradients import check_gradients
from onnx_fuse.validation.reference import Reference, to_double

CALLS = {
    "LSTM": {
        "usual": "",
        "other": 'activations = ["Relu", "Tanh", "Sigmoid"]',
        "clipped": "clip = 0.3",
        "coupled": "input_forget = 1",
        "hard": 'activations = ["HardSigmoid", "Elu", "Softsign"], activation_alpha = [0.3, 0.9], '
        "activation_beta = [0.4]",
        "lines": 'activations = ["Affine", "ScaledTanh", "LeakyRelu"], '
        "activation_alpha = [0.3, 0.9, 0.05], activation_beta = [0.4, 0.6]",
        "kinks": 'activations = ["Softplus", "ThresholdedRelu", "Tanh"], activation_alpha = [0.2]',
    },
    "GRU": {
        "usual": "",
        "clipped": "clip = 0.3",
        "hard": 'activations = ["HardSigmoid", "Elu"]',
        "soft": 'activations = ["Softplus", "Softsign"]',
        "linear": "linear_before_reset = 1",
        "linear, clipped": "linear_before_reset = 1, clip = 0.3",
    },
    "RNN": {
        "usual": "",
        "clipped": "clip = 0.3",
        "relu": 'activations = ["Relu"]',
        "scaled": 'activations = ["ScaledTanh"], activation_alpha = [0.5], activation_beta = [0.8]',
        "leaky": 'activations = ["LeakyRelu"]',
    },
}
ALL_WAYS = WAYS | {
    "reverse, one empty": {"call": 'direction = "reverse"', "length": [2, 0, 4]},
    "bidirectional, one empty": {"call": 'direction = "bidirectional"', "length": [0, 3, 4]},
}


def twice(call: str, ways: str) -> str:
    """Activations of both directions; onnxruntime reads numbers for them in its own way."""
    if "bidirectional" not in ways or "activations = [" not in call:
        return call
    names = call[call.index("[") + 1 : call.index("]")]
    return call.replace(names, f"{names}, {names}")


ROWS = [
    recurrent(
        f"{name}, {ways}",
        kind,
        **{**ALL_WAYS[ways], "call": ", ".join(filter(None, [ALL_WAYS[ways].get("call"), each]))},
    )
    for kind, calls in CALLS.items()
    for name, call in calls.items()
    for ways in ALL_WAYS
    if "activation_" not in call or "bidirectional" not in ways
    for each in [twice(call, ways)]
] + [
    recurrent("peepholes", "LSTM", peepholes=True),
    recurrent(
        "peepholes, reverse, lengths", "LSTM", peepholes=True, **ALL_WAYS["reverse, lengths"]
    ),
    recurrent("peepholes, coupled", "LSTM", peepholes=True, call="input_forget = 1, clip = 0.5"),
    recurrent("no name for h, plain", "LSTM", states=0, outputs=("y", "c")),  # as in Y, "", Y_c
    recurrent("no name for y and h, plain", "LSTM", states=0, outputs=("c",)),
    recurrent("no name for y, plain", "GRU", states=0, outputs=("h",)),
]
WEIGHTS = ("w", "r", "b", "p")
CHECKED = [row for row in ROWS if row.name.endswith((" plain", "one empty", " peepholes"))]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_scans_in_float64_are_the_kernels_of_onnxruntime(row) -> None:
    arrays = draw(row)
    proto = build(row, arrays, dynamic=False)
    feeds = {v.name: arrays[v.name] for v in proto.graph.input}
    expected = ort.run(ort.session(proto.SerializeToString()), feeds, row.outputs)
    double = to_double(ir.from_proto(proto))
    assert "Scan" in {node.op_type for node in double.graph}
    wide = {k: a.astype(F64) if a.dtype.kind == "f" else a for k, a in feeds.items()}
    found = [Reference(double).run(list(row.outputs), wide)]
    if "activations" not in row.body:  # onnxruntime has the others in float32 alone
        found.append(ort.run(ort.session(double), wide, row.outputs))
    for each in found:
        for got, want in zip(each, expected, strict=True):
            assert got.dtype == F64
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)  # some roundings of float32


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("row", CHECKED, ids=lambda row: row.name)
def test_gradients_of_recurrent_weights_are_checked(row, dynamic: bool) -> None:
    arrays = draw(row)
    model = build(dataclasses.replace(row, fixed=WEIGHTS), arrays, dynamic)
    feeds = {v.name: arrays[v.name] for v in model.graph.input}
    check = check_gradients(model, feeds=feeds)
    assert {e.tensor for e in check.errors} == {n for n in WEIGHTS if n in arrays}
    assert check.ok, check.failed


@pytest.mark.parametrize("kind", CALLS)
def test_validate_grad_of_a_recurrent_model(
    kind: str, cli: Cli, saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = recurrent("", kind, **WAYS["bidirectional, lengths"])
    arrays = draw(row)
    fixed = dataclasses.replace(row, fixed=WEIGHTS, runtime=())
    path = saved(ir.from_proto(build(fixed, arrays, dynamic=False)))
    assert cli("validate", path, "--grad").code == 0
    right = OPS["", kind]

    def wrong(op, node, dys):
        dx, dw, *rest = right.grad(op, node, dys)
        return [dx, op.Mul(dw, 1.01), *rest]

    monkeypatch.setitem(OPS, ("", kind), dataclasses.replace(right, grad=wrong))
    assert "the gradient of 'w'" in cli.fails(3, "validate", path, "--grad")
