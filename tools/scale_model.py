"""What a training step takes on many GPUs, from what it takes on one: a model on paper.

    python tools/scale_model.py --step 23.5 --backward 14.5 [--model gpt2-small] [--reduce bf16]

The step of one GPU is measured (`tools/bench_gpus.py --only one`), in milliseconds, and so is the
part of it that is the backward. Gradients are ready in the order of the layers, the buckets are
those that the Trainer plans, and each is reduced as soon as it is full and the one before is done:

    seconds(bucket) = latency(N) + 2 (N - 1) / N * bytes / bandwidth        a ring within a machine
                    + 2 (M - 1) / M * bytes / (N * network)                 over M machines of N

What lasts longer than the backward is exposed. While a reduction runs the kernels beside it have
`--slowdown` less of the GPU. Nothing is fitted to a measurement of many GPUs; `--measured GPUS:MS`
compares.
"""

import argparse
from dataclasses import dataclass

import _paths  # noqa: F401

from onnx_fuse.distributed import buckets


@dataclass(frozen=True)
class Links:
    """What connects the GPUs; the defaults are data sheets' figures at the rates NCCL reaches."""

    machine: int = 8
    """GPUs of a machine."""
    nvlink: float = 370e9
    """Bytes a second of a ring over NVLink 4, of 450e9 in each direction."""
    network: float = 45e9
    """Bytes a second of a GPU's own network card, of 50e9 (400 Gbit/s)."""
    latency: float = 12e-6
    """Seconds of a collective of no bytes within a machine."""
    hop: float = 3e-6
    """Seconds that each doubling of the machines adds."""

    def all_reduce(self, nbytes: float, gpus: int) -> float:
        """Seconds of one all-reduce over `gpus`."""
        if gpus == 1:
            return 0.0
        inside = min(gpus, self.machine)
        machines = -(-gpus // self.machine)
        seconds = self.latency + 2 * (inside - 1) / inside * nbytes / self.nvlink
        if machines > 1:
            hops = (machines - 1).bit_length()
            share = nbytes / inside / self.network
            seconds += hops * self.hop + 2 * (machines - 1) / machines * share
        return seconds


WIDTHS = {"gpt2-small": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280),
          "gpt2-xl": (48, 1600)}  # fmt: skip
VOCAB, CONTEXT = 50257, 1024


def gradients(model: str) -> list[int]:
    """The numbers of the gradients in the order in which the backward makes them."""
    layers, width = WIDTHS[model]
    layer = [4 * width * width, 4 * width * width, width * width, 3 * width * width]
    small = [13 * width]  # biases, and the two norms
    return [2 * width, *(n for _ in range(layers) for n in layer + small),
            VOCAB * width + CONTEXT * width]  # fmt: skip


def step(
    model: str, alone: float, backward: float, gpus: int, itemsize: int, links: Links, slow: float
) -> tuple[float, float]:
    """The milliseconds of a step on `gpus`, and those of communication that nothing hides."""
    sizes = [n * itemsize for n in gradients(model)]
    planned = buckets.plan(sizes)
    total = sum(sizes[:-1])
    ready = done = busy = 0.0
    for bucket in range(planned[-1] + 1):
        nbytes = sum(n for n, b in zip(sizes, planned, strict=True) if b == bucket)
        ready += backward / 1e3 * min(1.0, nbytes / total)
        last = bucket == planned[-1]
        seconds = links.all_reduce(nbytes, gpus)
        done = max(done, backward / 1e3 if last else min(ready, backward / 1e3)) + seconds
        busy += seconds
    exposed = max(0.0, done - backward / 1e3)
    slowed = slow * (busy - exposed)
    return alone + 1e3 * (exposed + slowed), 1e3 * exposed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WIDTHS, default="gpt2-small")
    parser.add_argument("--step", type=float, required=True, help="ms of a step on one GPU")
    parser.add_argument("--backward", type=float, required=True, help="ms of its backward")
    parser.add_argument("--tokens", type=int, default=16 * 1024, help="tokens a GPU")
    parser.add_argument("--reduce", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--slowdown", type=float, default=0.1)
    parser.add_argument("--machine", type=int, default=8, help="GPUs of a machine")
    parser.add_argument("--measured", action="append", default=[], metavar="GPUS:MS")
    args = parser.parse_args()
    links = Links(machine=args.machine)
    itemsize = 2 if args.reduce == "bf16" else 4
    measured = {int(g): float(ms) for g, _, ms in (m.partition(":") for m in args.measured)}
    print(f"{'GPUs':>5} {'ms':>8} {'exposed':>8} {'of linear':>9} {'M tokens/s':>10}  measured")
    for gpus in sorted({1, 2, 4, 8, 16, 64, 256, 1024, *measured}):
        found, exposed = step(
            args.model, args.step, args.backward, gpus, itemsize, links, args.slowdown
        )
        beside = ""
        if gpus in measured:
            beside = f"{measured[gpus]:.2f} ms, {found / measured[gpus] - 1:+.1%}"
        rate = gpus * args.tokens / found / 1e3
        print(
            f"{gpus:5} {found:8.2f} {exposed:8.2f} {args.step / found:9.3f} {rate:10.2f}  {beside}"
        )


if __name__ == "__main__":
    main()
