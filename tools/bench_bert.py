"""A BERT-base encoder in fp16 against torch.compile (needs torch), on one GPU, in one run.

    python tools/bench_bert.py [--shape B,T ...] [--layers N] [--quick] [--json FILE]

models/encoder.py's bert-base with random weights, one CUDA graph launch a run, feeds on the device.
The peer is the same network of torch modules under torch.compile, mode "reduce-overhead" (inductor
and CUDA graphs). The two run in turns, medians of nine. Then the time of each kind of kernel by
itself, L2 warm, launch included. `predictions.py --tune bert-32x128` tunes them.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
import encoder
import numpy as np
import torch as t
from bench_train import kernel_times
from gpu_events import in_turns, microseconds
from performance_page import save
from train_peers import Encoder

from onnx_fuse.program.problem import Hardware
from onnx_fuse.session import InferenceSession

SHAPES = ((1, 128), (32, 128), (8, 512))


class Peer(Encoder):
    """The encoder that models/encoder.py builds, in fp16."""

    def forward(self, ids: Any, keep: Any, types: Any) -> Any:
        kind = self.word.weight.dtype
        mask = (1 - keep[:, None, None].to(kind)) * t.finfo(kind).min
        x, pooled = self.encoded(ids, types, mask)
        return x.float(), pooled.float()


def compiled(c: encoder.Config, feeds: dict[str, np.ndarray]) -> Callable[[], float]:
    """Microseconds a run of torch.compile's encoder on these feeds."""
    with t.device("cuda"):
        peer = t.compile(Peer(c).half().eval(), mode="reduce-overhead", dynamic=False)
    given = [
        t.from_numpy(feeds[n]).cuda() for n in ("input_ids", "attention_mask", "token_type_ids")
    ]
    with t.no_grad():
        for _ in range(4):
            peer(*given)

    def once() -> float:
        with t.no_grad():
            return microseconds(lambda: peer(*given), 20)

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", help="batch,tokens", default=SHAPES,
                        type=lambda s: tuple(map(int, s.split(","))))  # fmt: skip
    parser.add_argument("--layers", type=int, default=encoder.SIZES["bert-base"].layers)
    parser.add_argument("--quick", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    c = dataclasses.replace(encoder.SIZES["bert-base"], layers=args.layers)
    session = InferenceSession(encoder.build(c), device="cuda", precision="fp16")
    hw, rng, rows = Hardware.detect(0), np.random.default_rng(0), []
    print(f"{hw.name}, torch {t.__version__}: bert-base of {c.layers} layers, fp16, us a run")
    for batch, tokens in args.shape:
        feeds = {n: np.zeros((batch, tokens), np.int64) for n in ("input_ids", "token_type_ids")}
        feeds["input_ids"] = rng.integers(0, c.vocab, (batch, tokens))
        feeds["attention_mask"] = np.ones((batch, tokens), np.int64)
        session.run(None, feeds)
        executable = session._on_cuda()
        ours = executable.instance(feeds)
        ours.capture()
        step = partial(executable.stream.timed, ours.launch)
        arms = {"onnx_fuse": lambda step=step: 1e6 * step()}
        if not args.quick:
            arms["compile"] = compiled(c, feeds)
        us = in_turns(arms)
        launches = sum(len(call.launches) for call in ours.program.calls)
        line = f"B{batch} T{tokens}: {us['onnx_fuse']:.1f} in {launches} launches"
        if "compile" in us:
            line += f"; torch.compile {us['compile']:.1f} ({us['onnx_fuse'] / us['compile']:.2f})"
        print(line)
        kinds = {name: (n, 1e6 * took) for name, (n, took) in kernel_times(ours).items()}
        for name, (calls, took) in sorted(kinds.items(), key=lambda item: -item[1][1]):
            print(f"    {took:8.1f}  {calls:3.0f} x {took / calls:7.2f}  {name}")
        print(f"    {sum(took for _, took in kinds.values()):8.1f}  by themselves")
        row = {"shape": [batch, tokens], "us": us, "launches": launches, "kernels": kinds}
        rows.append(row)
    if args.json:
        save(args.json, hw.name, t.__version__, rows)


if __name__ == "__main__":
    main()
