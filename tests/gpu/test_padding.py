"""Batches without their padding on a GPU: packed against padded, sessions and steps."""

import numpy as np
import pytest
from test_padding import MODELS

from onnx_fuse import InferenceSession, Trainer, optim

BATCHES = (((16, 70, 33, 1), 70), ((5, 0), 9), ((128,), 128), ((8, 8), 8))


def batch(lengths: tuple[int, ...], size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    there = np.arange(size) < np.array(lengths)[:, None]
    return {
        "input_ids": rng.integers(0, 100, there.shape),
        "attention_mask": there.astype(np.int64),
        "token_type_ids": np.zeros(there.shape, np.int64),
    }


@pytest.mark.filterwarnings("ignore:a batch runs with its padding")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", ["encoder", "t5_encoder__ts17"])
def test_tokens_have_the_rows_that_they_have_among_padding(name: str, precision: str) -> None:
    options = {"device": "cuda", "precision": precision}
    padded, packed = (InferenceSession(MODELS[name], pack=p, **options) for p in (False, "zero"))
    rng, limit = np.random.default_rng(0), 1e-4 if precision == "fp32" else 4e-2
    for lengths, size in BATCHES * 3:
        fed = batch(lengths, size, rng)
        feeds = {v.name: fed[v.name] for v in padded.get_inputs()}
        want, found = padded.run(None, feeds), packed.run(None, feeds)
        if min(lengths):
            want[0] = want[0] * feeds["attention_mask"][..., None]
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=limit)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["encoder", "gpt2__dynamo23", "t5_encoder__ts17"])
def test_steps_over_tokens_learn_the_same(name: str, precision: str) -> None:
    options = {"output": "pooler_output"} if name == "encoder" else {}
    options |= {"loss": "cross_entropy", "optimizer": optim.SGD(lr=0.05), "device": "cuda"}
    options |= {"precision": precision, "level": 2}
    padded, packed = (Trainer(MODELS[name], pack=p, **options) for p in (False, True))
    rng = np.random.default_rng(1)
    for lengths in ((16, 30, 33, 1), (40, 2, 3, 40), (16, 30, 33, 1), (7, 30, 33, 3)):
        feeds = batch(lengths, 40, rng)
        there = feeds["attention_mask"] != 0
        labels = np.where(there, rng.integers(0, 30, there.shape), -100)
        feeds["labels"] = labels[:, 0] if name == "encoder" else labels
        fed = {v.name: feeds[v.name] for v in padded.spec().feeds}
        losses = float(packed.step(fed)), float(padded.step(fed))
        assert losses[0] == pytest.approx(losses[1], rel=1e-4 if precision == "fp32" else 2e-2)
    limit = 1e-4 if precision == "fp32" else 2e-2
    for key, w in padded.weights().items():
        np.testing.assert_allclose(packed.weights()[key], w, rtol=0, atol=limit)
