"""What a training step takes on many GPUs, from what it takes on one: a model on paper.

    python tools/scale_model.py --step 23.5 --backward 14.5 [--model bert] [--reduce bf16]

The step of one GPU is measured (`tools/bench_gpus.py --only one`), in milliseconds, and so is the
part of it that is the backward. Gradients are ready in the order of the layers, the buckets are
those that the Trainer plans, and each is reduced as soon as it is full and the one before is done:

    seconds(bucket) = latency(N) + 2 (N - 1) / N * bytes / bandwidth        a ring within a machine
                    + 2 (M - 1) / M * bytes / (N * network)                 over M machines of N

What lasts longer than the backward is exposed. A reduction holds some multiprocessors, and a kernel
with a block for each of them waits for its last ones: it takes twice the time, so that half of the
GPU (`--slowdown`) is lost while a reduction runs. That is all that was changed after a measurement
of two GPUs, where a tenth was up to 5.7 % low; `--measured GPUS:MS` compares.
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


SLOWDOWN = 0.5
"""The part of a GPU that its kernels lose beside a reduction."""
Gradient = tuple[int, float]
"""The numbers of a gradient, and how much of the backward's work ends in it."""


def gpt2(
    layers: int = 12, width: int = 768, vocab: int = 50257, context: int = 1024
) -> list[Gradient]:
    """The embedding is that of the scores, too: their work is the first, its gradient the last."""
    scores = (2 * width, vocab * width)
    return [scores, *_blocks(layers, width), (vocab * width + context * width, 0)]


def bert(
    layers: int = 12, width: int = 768, vocab: int = 30522, context: int = 512
) -> list[Gradient]:
    """The pooler and the classifier of two classes; then the blocks and three embeddings."""
    pooler = (width * width + 3 * width + 2, 0)
    return [pooler, *_blocks(layers, width), (vocab * width + (context + 4) * width, 0)]


def _blocks(layers: int, width: int) -> list[Gradient]:
    square = width * width
    products = [4 * square, 4 * square, square, 3 * square]  # of the feed-forward and the attention
    small = (13 * width, 0.0)  # biases, and the two norms
    return [g for _ in range(layers) for g in (*((n, float(n)) for n in products), small)]


def resnet50() -> list[Gradient]:
    """A convolution's work is its numbers at each pixel of its result."""
    found: list[Gradient] = [(2048 * 1000 + 1000, 2048 * 1000)]
    for stage, blocks in reversed(list(enumerate((3, 4, 6, 3)))):
        width, pixels = 64 << stage, float((56 >> stage) ** 2)
        for block in reversed(range(blocks)):
            entering = 4 * width if block else 2 * width if stage else 64
            convolutions = [4 * width * width, 9 * width * width, entering * width]
            convolutions += [] if block else [entering * 4 * width]
            norms = 2 * (6 * width if block else 10 * width)
            found += [(n, n * pixels) for n in convolutions] + [(norms, 0.0)]
    return [*found, (3 * 49 * 64 + 128, 3 * 49 * 64 * 112.0**2)]


MODELS = {"gpt2": gpt2, "bert": bert, "resnet50": resnet50}


def step(
    model: str,
    alone: float,
    backward: float,
    gpus: int,
    itemsize: int = 2,
    links: Links = Links(),
    slow: float = SLOWDOWN,
) -> tuple[float, float]:
    """The milliseconds of a step on `gpus`, and those of communication that nothing hides."""
    gradients = MODELS[model]()
    sizes = [n * itemsize for n, _ in gradients]
    planned = buckets.plan(sizes)
    total = sum(work for _, work in gradients)
    ready = done = busy = 0.0
    for bucket in range(planned[-1] + 1):
        of_bucket = [i for i, b in enumerate(planned) if b == bucket]
        ready += backward / 1e3 * sum(gradients[i][1] for i in of_bucket) / total
        seconds = links.all_reduce(sum(sizes[i] for i in of_bucket), gpus)
        done = max(done, ready) + seconds
        busy += seconds
    exposed = max(0.0, done - backward / 1e3)
    slowed = slow * (busy - exposed)
    return alone + 1e3 * (exposed + slowed), 1e3 * exposed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--step", type=float, required=True, help="ms of a step on one GPU")
    parser.add_argument("--backward", type=float, required=True, help="ms of its backward")
    parser.add_argument("--rows", type=int, default=16, help="rows of the batch a GPU")
    parser.add_argument("--reduce", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--slowdown", type=float, default=SLOWDOWN)
    parser.add_argument("--machine", type=int, default=8, help="GPUs of a machine")
    parser.add_argument("--measured", action="append", default=[], metavar="GPUS:MS")
    args = parser.parse_args()
    links = Links(machine=args.machine)
    itemsize = 2 if args.reduce == "bf16" else 4
    measured = {int(g): float(ms) for g, _, ms in (m.partition(":") for m in args.measured)}
    print(f"{'GPUs':>5} {'ms':>8} {'exposed':>8} {'of linear':>9} {'rows/s':>10}  measured")
    for gpus in sorted({1, 2, 4, 8, 16, 64, 256, 1024, *measured}):
        found, exposed = step(
            args.model, args.step, args.backward, gpus, itemsize, links, args.slowdown
        )
        beside = ""
        if gpus in measured:
            beside = f"{measured[gpus]:.2f} ms, {found / measured[gpus] - 1:+.1%}"
        rate = 1e3 * gpus * args.rows / found
        print(
            f"{gpus:5} {found:8.2f} {exposed:8.2f} {args.step / found:9.3f} {rate:10,.0f}  {beside}"
        )


if __name__ == "__main__":
    main()
