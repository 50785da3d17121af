"""Trainer(residual_dtype="fp32"): the residual stream of a step in 16 bits stays float32."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from onnx_fuse import Trainer, optim
from onnx_fuse.errors import UsageError
from onnx_fuse.training.step import training_model

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import encoder
import gpt
import mlp


def sums(model: ir.Model, residual_dtype: str) -> list[ir.Node]:
    """The forward's Adds in float32 of a step in bf16."""
    graph, _ = training_model(
        model, loss="cross_entropy", optimizer=optim.SGD(), level=2, precision="bf16",
        residual_dtype=residual_dtype, fused=True,
    )  # fmt: skip
    adds = [n for n in graph.graph if n.op_type == "Add" and ".grad" not in str(n.name)]
    return [n for n in adds if n.outputs[0].dtype == ir.DataType.FLOAT]


def test_branches_add_to_float32_and_read_16_bits() -> None:
    config = gpt.Config(layers=3)
    assert not sums(gpt.build(config), "")
    wide = sums(gpt.build(config), "fp32")
    assert len(wide) == 1 + 2 * config.layers  # the embeddings' sum, and one a branch
    readers = [use.node for node in wide for use in node.outputs[0].uses()]
    assert {n.op_type for n in readers} == {"Add", "Cast"}


@pytest.mark.parametrize(("model", "count"), [(encoder.build(encoder.SIZES["tiny"]), 0),
                                              (mlp.build(mlp.SIZES["digits"]), 0)])  # fmt: skip
def test_other_sums_stay(model: ir.Model, count: int) -> None:
    """A bias, a mask, and sums behind which a norm begins anew."""
    assert len(sums(model, "fp32")) == count


def test_steps_are_near_those_of_float32() -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.integers(0, 256, (4, 16)) for name in ("input_ids", "labels")}

    def losses(**options: str) -> list[float]:
        trainer = Trainer(
            gpt.build(gpt.Config()), loss="cross_entropy", optimizer=optim.SGD(0.1), **options
        )
        return [float(trainer.step(feeds)) for _ in range(3)]

    half = losses(precision="fp16", residual_dtype="fp32")
    np.testing.assert_allclose(half, losses(), rtol=2e-3)  # float16's rounding of the branches


def test_another_type_is_refused() -> None:
    with pytest.raises(UsageError, match="residual_dtype is 'bf16'"):
        Trainer(mlp.build(mlp.SIZES["digits"]), loss="cross_entropy", residual_dtype="bf16")
