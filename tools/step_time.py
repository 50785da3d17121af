"""One AdamW step of a perceptron on a GPU: microseconds of its one graph launch.

    python tools/step_time.py [--widths 784 512 10 ...] [--batch 256] [--level L] [--profile]

models/mlp.py's blocks of LayerNorm, Linear and GELU with random weights, feeds, fp32, IEEE
products. Medians of nine times twenty launches, feeds and states on the device. --profile adds each
kernel by itself, L2 warm, launch included: side by side they take less than their sum.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mlp
import numpy as np

from onnx_fuse import Trainer, optim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=list(mlp.Config().widths))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    trainer = Trainer(
        mlp.build(mlp.Config(tuple(args.widths))),
        loss="cross_entropy",
        optimizer=optim.AdamW(),
        device="cuda",
        level=args.level,
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((args.batch, args.widths[0])).astype(np.float32)
    feeds = {"x": x, "labels": rng.integers(0, args.widths[-1], args.batch)}
    losses = [float(trainer.step(feeds)) for _ in range(3)]
    executable = trainer._device._states._executables["update"]
    (instance,) = executable.instances()
    instance.capture()
    times = [executable.stream.timed(instance.launch) * 1e6 for _ in range(9)]
    launches = sum(len(call.launches) for call in instance.program.calls)
    shape = "-".join(map(str, args.widths))
    print(f"{shape}, batch {args.batch}, level {args.level}: {median(times):.1f} us", end="")
    print(f" ({min(times):.1f} to {max(times):.1f}), {launches} launches, losses {losses}")
    if args.profile:
        found = instance.profile()
        for call, seconds in found:
            grids = " ".join("x".join(map(str, launch.grid)) for launch in call.launches)
            print(f"{seconds * 1e6:7.2f} us  {call.kernel[:48]:48s} {grids}  {call.why}")
        print(f"{sum(seconds for _, seconds in found) * 1e6:7.2f} us  by themselves")


if __name__ == "__main__":
    main()
