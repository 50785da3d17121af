"""Training steps at many lengths: a program a class of lengths, the same bits in any order."""

from collections.abc import Sequence

import gpt
import numpy as np
import pytest

from onnx_fuse import Trainer, optim
from onnx_fuse.runtime.specialize import Specializer

LENGTHS = (100, 65, 128, 82, 81, 180, 129, 192, 131)
"""Two classes, on both sides of the limits at which a kernel's rule changes its mind."""


@pytest.mark.parametrize("batch", [3, 4])
def test_a_length_trains_alike_whichever_came_first(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradient norms of steps that change no weight, beside float32's on the CPU."""
    monkeypatch.setenv("ONNX_FUSE_CACHE_MB", "0")  # programs are of this process alone
    made: list[Specializer] = []
    first = Specializer.__init__

    def init(self: Specializer, *given: object, **named: object) -> None:
        first(self, *given, **named)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Specializer, "__init__", init)
    model = gpt.build(gpt.Config(1, 12, 768, 50257, 1024))
    rng = np.random.default_rng(0)
    ids = {n: rng.integers(0, 50257, (batch, n)) for n in LENGTHS}

    def steps(lengths: Sequence[int], device: str, precision: str) -> dict[int, tuple[float, ...]]:
        trainer = Trainer(
            model, loss="cross_entropy", optimizer=optim.SGD(lr=0.0), clip_norm=np.inf,
            precision=precision, device=device,
        )  # fmt: skip
        found: dict[int, tuple[float, ...]] = {}
        for n in lengths:
            run = trainer.start({"input_ids": ids[n], "labels": ids[n]})
            loss = trainer.finish(run)
            assert run.norm is not None
            assert found.setdefault(n, (loss, run.norm)) == (loss, run.norm)
        return found

    again = (*LENGTHS[:2] * 4, *LENGTHS)  # two become graphs, and others take over from those
    forward = steps((*LENGTHS, *again), "cuda", "bf16")
    assert max(each.traced for each in made) == 2
    assert steps(LENGTHS[::-1], "cuda", "bf16") == forward
    some = LENGTHS[:3]
    want = steps(some, "cpu", "fp32")
    # the norm is one of bfloat16 gradients
    np.testing.assert_allclose([forward[n] for n in some], [want[n] for n in some], rtol=1e-2)
