"""A BERT-base encoder in fp16 against torch.compile (needs torch), on one GPU, in one run.

    python tools/bench_bert.py [--shape B,T ...] [--layers N] [--quick] [--json FILE] [--freeze]

models/encoder.py's bert-base with random weights, one CUDA graph launch a run, feeds on the device.
The peer is the same network of torch modules under torch.compile, mode "reduce-overhead" (inductor
and CUDA graphs). The two run in turns, medians of nine. Then the time of each kind of kernel by
itself, L2 warm, launch included. `--freeze` tunes the products first and ships the records.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encoder
import numpy as np
import torch as t
from gpu_events import microseconds
from performance_page import save
from train_peers import Encoder

from onnx_fuse.kernels import tuning
from onnx_fuse.program.problem import Hardware
from onnx_fuse.session import InferenceSession
from onnx_fuse.tune import calls_of, tune

SHAPES = ((1, 128), (32, 128), (8, 512))
ORT = {(1, 128): 509, (32, 128): 1882, (8, 512): 2027}
"""us of onnxruntime's CUDA EP (1.31.1, its optimizer, CUDA graph) on an H200, measured 2026-11."""


class Peer(Encoder):
    """The encoder that models/encoder.py builds, in fp16."""

    def forward(self, ids: Any, keep: Any, types: Any) -> Any:
        kind = self.word.weight.dtype
        mask = (1 - keep[:, None, None].to(kind)) * t.finfo(kind).min
        x, pooled = self.encoded(ids, types, mask)
        return x.float(), pooled.float()


def in_turns(arms: dict[str, Callable[[], float]], rounds: int = 9) -> dict[str, float]:
    """Arm -> median of the seconds that it answers, in us."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            times[name].append(arm() * 1e6)
    return {name: median(values) for name, values in times.items()}


def compiled(c: encoder.Config, feeds: dict[str, np.ndarray]) -> Callable[[], float]:
    """Seconds a run of torch.compile's encoder on these feeds."""
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
            return microseconds(lambda: peer(*given), 20) / 1e6

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", help="batch,tokens", default=SHAPES,
                        type=lambda s: tuple(map(int, s.split(","))))  # fmt: skip
    parser.add_argument("--layers", type=int, default=encoder.SIZES["bert-base"].layers)
    parser.add_argument("--quick", action="store_true", help="without torch.compile")
    parser.add_argument("--freeze", action="store_true", help="tune first, ship the records")
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
        if args.freeze:
            program, _ = session.program(feeds)
            for _ in tune(calls_of(program), hw, folder=tuning.SHIPPED):
                pass
            executable.release_memory()  # the next instance is made of the new choices
        ours = executable.instance(feeds)
        ours.capture()
        arms = {"onnx_fuse": partial(executable.stream.timed, ours.launch)}
        if not args.quick:
            arms["compile"] = compiled(c, feeds)
        us = in_turns(arms)
        launches = sum(len(call.launches) for call in ours.program.calls)
        line = f"B{batch} T{tokens}: {us['onnx_fuse']:.1f} in {launches} launches"
        if "compile" in us:
            line += f"; torch.compile {us['compile']:.1f} ({us['onnx_fuse'] / us['compile']:.2f})"
        if (batch, tokens) in ORT:
            line += f"; onnxruntime, an earlier run: {ORT[batch, tokens]}"
        print(line)
        kinds: dict[str, list[float]] = {}
        for call, seconds in ours.profile():
            name = f"{call.kernel[:32]} {call.problem or ''}".strip()[:72]
            kinds.setdefault(f"{name} {call.why.split(':')[0]}", []).append(seconds * 1e6)
        for name, each in sorted(kinds.items(), key=lambda item: -sum(item[1])):
            print(f"    {sum(each):8.1f}  {len(each):3d} x {median(each):7.2f}  {name}")
        print(f"    {sum(map(sum, kinds.values())):8.1f}  by themselves")
        profile = {name: [len(each), sum(each)] for name, each in kinds.items()}
        rows.append({"shape": [batch, tokens], "us": us, "launches": launches, "kernels": profile})
    if args.json:
        save(args.json, hw.name, t.__version__, rows)


if __name__ == "__main__":
    main()
