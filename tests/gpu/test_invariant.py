"""A row's bits on the GPU whatever else is in its batch, in every precision."""

from pathlib import Path
from typing import Any

import convnet
import encoder
import gpt
import llama
import numpy as np
import pytest
from decoders import slotted
from support import write_adapter

from onnx_fuse import InferenceSession
from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import text_model
from onnx_fuse.validation.invariant import check_batch

pytestmark = pytest.mark.gpu
SMALL = encoder.Config(2, 4, 256, 300, 128)
MODELS: dict[str, tuple[Any, dict[str, int]]] = {
    "encoder": (lambda: encoder.build(SMALL), {"batch": 31, "sequence": 40}),
    "encoder, one token": (lambda: encoder.build(SMALL), {"batch": 9, "sequence": 1}),
    "gpt": (lambda: gpt.build(gpt.Config()), {"batch": 32, "sequence": 33}),
    "llama": (lambda: llama.build(llama.Config()), {"batch": 8, "sequence": 17}),
    "decoder": (slotted, {"batch": 8, "sequence": 1, "total": 12, "past": 12}),
    "convnet": (lambda: convnet.build(convnet.Config()), {"batch": 8, "height": 32, "width": 32}),
    "norm": (
        lambda: text_model("""norm (float[batch, T, 768] x, float[768] s, float[768] b)
            => (float[batch, T, 768] y) { y = LayerNormalization (x, s, b) }"""),
        {"batch": 32, "T": 40},
    ),
    "sums": (
        lambda: text_model("""sums (float[batch, 100000] x) => (float[batch, 1] y)
            <int64[1] last = {1}> { y = ReduceSum <keepdims = 1> (x, last) }"""),
        {"batch": 32},
    ),
    "softmax": (
        lambda: text_model("""rows (float[batch, 200000] x) => (float[batch, 200000] y)
            { y = Softmax (x) }"""),
        {"batch": 32},
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_same_bits_in_every_batch(name: str, precision: str) -> None:
    make, dims = MODELS[name]
    found = check_batch(make(), device="cuda", precision=precision, dims=dims)
    assert found.outputs
    assert found.ok, found.faults[:4]
    assert found.predicted is not None
    assert found.predicted[0] > 0


def test_the_length_of_others_may_be_of_no_effect_either() -> None:
    """A row alone at its own length, and among longer ones that its mask hides."""
    rng, lengths = np.random.default_rng(0), [96, 5, 17, 33, 64, 1, 90, 40]
    ids = rng.integers(0, 300, (8, 96))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": 0 * ids}
    for row, length in enumerate(lengths):
        feeds["attention_mask"][row, length:] = 0
    session = InferenceSession(
        encoder.build(SMALL), device="cuda", precision="fp16",
        batch_invariant={"batch": 8, "sequence": 96},
    )  # fmt: skip
    whole = session.run(None, feeds)
    for row, length in enumerate(lengths):
        alone = session.run(None, {k: a[row : row + 1, :length] for k, a in feeds.items()})
        assert alone[0][0].tobytes() == whole[0][row, :length].tobytes(), length
        assert alone[1][0].tobytes() == whole[1][row].tobytes(), length
    assert "batch-invariant: predicted" in session.explain(feeds)
    with pytest.raises(UsageError, match="holds for 'batch' up to 8"):
        session.run(None, {k: np.repeat(a, 2, axis=0) for k, a in feeds.items()})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_adapters_of_others_are_of_no_effect(precision: str, tmp_path: Path) -> None:
    model = gpt.build(gpt.Config())
    files = [str(write_adapter(tmp_path / f"{r}.safetensors", model, r, r)) for r in (12, 40, 3)]
    dims = {"batch": 9, "sequence": 33}
    found = check_batch(model, device="cuda", precision=precision, dims=dims, adapters=files)
    assert found.ok, found.faults[:4]
