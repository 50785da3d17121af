"""Batches without their padding beside the same with it, on one GPU.

    python tools/bench_padding.py [bert] [bert-step] [gpt-step]

BERT-base, a classifier: 32 sequences of 16 to 128 tokens, 2,048 in all, through InferenceSession in
fp16, and a step of Trainer in bf16. GPT-2 124M with a mask: a step with 8 sequences of 64 to 1,024
tokens, 2,800 in all. Medians over batches of other lengths; weights are random.
"""

import argparse
from statistics import median

import _paths  # noqa: F401
import encoder
import gpt
import numpy as np
import onnx_ir as ir
from gpu_events import host_seconds

from onnx_fuse import InferenceSession, Trainer, optim

BATCHES, ROUNDS = 8, 8
BERT = encoder.Config(12, 12, 768, 30522, 512, classes=2)
GPT = gpt.Config(12, 12, 768, 50257, 1024, masked=True)


def mask(seed: int, sequences: int, lengths: tuple[int, int], total: int) -> np.ndarray:
    """[sequences, most] of random lengths, the first one the longest, and `total` tokens."""
    fewest, most = lengths
    rng = np.random.default_rng(seed)
    found = rng.integers(fewest, 2 * total // sequences - fewest, sequences)
    found[0] = most
    while (missing := total - found.sum()) != 0:
        i = rng.integers(1, sequences)
        found[i] = np.clip(found[i] + missing, fewest, most)
    return (np.arange(most) < found[:, None]).astype(np.int64)


def bert(seed: int) -> dict[str, np.ndarray]:
    there = mask(seed, 32, (16, 128), 2048)
    ids = np.random.default_rng(seed).integers(0, BERT.vocab, there.shape)
    return {"input_ids": ids, "attention_mask": there, "token_type_ids": np.zeros_like(ids)}


def gpt_step(seed: int) -> dict[str, np.ndarray]:
    there = mask(seed, 8, (64, 1024), 2800)
    ids = np.random.default_rng(seed).integers(0, GPT.vocab, there.shape)
    labels = np.where(np.roll(there, -1, 1) & there, np.roll(ids, -1, 1), -100)
    return {"input_ids": ids, "attention_mask": there, "labels": labels}


BATCH = {"bert": bert, "bert-step": bert, "gpt-step": gpt_step}


def seconds(what: str, model: ir.Model, pack: bool) -> float:
    """A run, or a step while others are under way."""
    batches = [BATCH[what](seed) for seed in range(BATCHES)]
    if what == "bert":
        session = InferenceSession(model, device="cuda", precision="fp16", pack=pack)

        def work() -> None:
            for feeds in batches:
                session.run(None, feeds)
    else:
        batches = [{"labels": np.arange(32) % 2} | feeds for feeds in batches]
        adamw = optim.AdamW(lr=1e-5)
        trainer = Trainer(
            model, loss="cross_entropy", optimizer=adamw, precision="bf16", device="cuda", pack=pack
        )

        def work() -> None:
            for feeds in batches[:-1]:
                trainer.step(feeds)
            float(trainer.step(batches[-1]))

    return median(host_seconds(work, 1, 3 + ROUNDS)[3:]) / BATCHES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", nargs="*", help=", ".join(BATCH))
    asked = parser.parse_args().what or [*BATCH]
    if not {*asked} <= {*BATCH}:
        parser.error(f"choose of {', '.join(BATCH)}")
    for what in asked:
        model = gpt.build(GPT) if what == "gpt-step" else encoder.build(BERT)
        padded, packed = (1e3 * seconds(what, model, pack) for pack in (False, True))
        print(f"{what}: {padded:.3f} ms padded, {packed:.3f} packed, {packed / padded:.3f} of it")


if __name__ == "__main__":
    main()
