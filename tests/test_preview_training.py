"""Adagrad, Adam and Momentum of ai.onnx.preview.training, run by NumPy; no GPU."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir
import pytest
from interpret import interpret
from onnx.reference import ReferenceEvaluator

from onnx_fuse.kernels import merge
from onnx_fuse.lower import lower
from onnx_fuse.problem import CHIPS

ATTRIBUTES = {
    "Adagrad": {"decay_factor": 0.1, "epsilon": 1e-5, "norm_coefficient": 0.001},
    "Adam": {
        **{"alpha": 0.95, "beta": 0.1, "epsilon": 1e-7},
        **{"norm_coefficient": 0.001, "norm_coefficient_post": 0.01},
    },
    "Momentum": {"alpha": 0.95, "beta": 0.1, "norm_coefficient": 0.001, "mode": "standard"},
    "Nesterov": {"alpha": 0.95, "beta": 0.1, "norm_coefficient": 0.001, "mode": "nesterov"},
}
STATES = {"Adagrad": 1, "Adam": 2, "Momentum": 1, "Nesterov": 1}


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_update_is_that_of_the_reference(
    name: str, tensors: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "batch", list)  # the interpreter takes calls one by one
    rng = np.random.default_rng(0)
    kinds = 2 + STATES[name]  # X, G and the states
    feeds = {"r": np.array(0.1, np.float32), "t": np.array(count, np.int64)}
    for k in range(kinds):
        for i in range(tensors):
            feeds[f"v{k}_{i}"] = np.abs(rng.standard_normal((2 + i, 3))).astype(np.float32)
    outputs = [f"y{i}" for i in range((kinds - 1) * tensors)]
    domain = "ai.onnx.preview.training"
    op = "Momentum" if name == "Nesterov" else name
    node = onnx.helper.make_node(op, list(feeds), outputs, domain=domain, **ATTRIBUTES[name])
    ends = [
        onnx.helper.make_tensor_value_info(
            k, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape
        )
        for k, a in feeds.items()
    ]
    graph = onnx.helper.make_graph(
        [node], "update", ends, [onnx.ValueInfoProto(name=o) for o in outputs]
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(domain, 1)]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    want = ReferenceEvaluator(proto).run(None, feeds)
    shapes = {k: (a.shape, a.dtype.name) for k, a in feeds.items()}
    program = lower(onnx_ir.serde.deserialize_model(proto), shapes, CHIPS["H200"])
    assert not program.fallbacks
    got = interpret(program, feeds, {})
    for output, truth in zip(outputs, want, strict=True):
        np.testing.assert_allclose(got[output], truth, rtol=1e-5, atol=1e-6)
