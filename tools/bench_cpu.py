"""Training steps on the CPU through `Trainer.step`, beside torch's eager mode.

    python tools/bench_cpu.py [--only NAME ...] [--threads N] [--pairs N]

Networks of torch modules that PyTorch exports, in float32, with AdamW: ResNet-18 (8 images of 112
pixels), an LSTM of width 256 (32 sequences of 50 steps), and BERT-base with a classifier (4 x 64
tokens). The two take turns; times are medians of CPU time, so that other work on the machine counts
little, or of elapsed time with more threads than one, which wait for each other at work. The ratio
is the median of the pairs' ratios. Needs torch.
"""

import argparse
import io
import statistics
import time
from collections.abc import Callable
from typing import Any

import _paths  # noqa: F401
import encoder
import numpy as np
import torch as t
import train_peers
from torch import nn
from torch.nn import functional as fn

import onnx_fuse as of

Network = tuple[nn.Module, dict[str, Any]]


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch normalization, and what goes past them."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out)
        self.past: nn.Module = nn.Identity()
        if stride > 1 or n_in != n_out:
            past = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
            self.past = nn.Sequential(past, nn.BatchNorm2d(n_out))

    def forward(self, x: Any) -> Any:
        y = fn.relu(self.norm1(self.conv1(x)))
        return fn.relu(self.norm2(self.conv2(y)) + self.past(x))


class ResNet18(nn.Module):
    """ResNet-18 of 1,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm, self.pool = nn.BatchNorm2d(64), nn.MaxPool2d(3, 2, 1)
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        blocks = [block for i, o, s in sizes for block in (Block(i, o, s), Block(o, o, 1))]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(512, 1000)

    def forward(self, x: Any) -> Any:
        y = self.blocks(self.pool(fn.relu(self.norm(self.stem(x)))))
        return self.head(y.mean((2, 3)))


class Lstm(nn.Module):
    """The last state of an LSTM, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 256, batch_first=True), nn.Linear(256, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.lstm(x)[0][:, -1])


class Bert(nn.Module):
    """BERT-base with a classifier of two."""

    def __init__(self) -> None:
        super().__init__()
        config = encoder.SIZES["bert-base"]
        self.encoder = train_peers.Encoder(config)
        self.head = nn.Linear(config.width, 2)

    def forward(self, ids: Any, kinds: Any) -> Any:
        return self.head(self.encoder.encoded(ids, kinds, None)[1])


def tokens() -> dict[str, t.Tensor]:
    ids = t.randint(0, encoder.SIZES["bert-base"].vocab, (4, 64))
    return {"ids": ids, "kinds": t.zeros_like(ids)}


ROWS: dict[str, Callable[[], Network]] = {
    "resnet18": lambda: (ResNet18(), {"x": t.randn(8, 3, 112, 112)}),
    "lstm": lambda: (Lstm(), {"x": t.randn(32, 50, 64)}),
    "bert": lambda: (Bert(), tokens()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=15)
    args = parser.parse_args()
    t.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    kind = "CPU time" if args.threads == 1 else "elapsed time"
    print(f"ms of {kind}: ours, torch's, the ratio", flush=True)
    for name in args.only:
        t.manual_seed(0)
        net, inputs = ROWS[name]()
        labels = t.randint(0, 2, (len(next(iter(inputs.values()))),))
        file = io.BytesIO()
        t.onnx.export(
            net, tuple(inputs.values()), file, input_names=[*inputs], dynamo=False,
            training=t.onnx.TrainingMode.TRAINING, do_constant_folding=False,
        )  # fmt: skip
        trainer = of.Trainer(file.getvalue(), loss="cross_entropy", threads=args.threads)
        feeds = {key: x.numpy() for key, x in inputs.items()} | {"labels": labels.numpy()}
        optimizer = t.optim.AdamW(net.parameters())

        def theirs(
            net: Any = net, inputs: Any = inputs, y: Any = labels, o: Any = optimizer
        ) -> None:
            o.zero_grad()
            fn.cross_entropy(net(*inputs.values()), y).backward()
            o.step()

        def ours(trainer: Any = trainer, feeds: Any = feeds) -> None:
            float(trainer.step(feeds))

        times: dict[Any, list[float]] = {ours: [], theirs: []}
        for _ in range(args.pairs + 2):
            for work, found in times.items():
                begun = clock()
                work()
                found.append(1e3 * (clock() - begun))
        a, b = (np.array(found[2:]) for found in times.values())
        ratio = statistics.median(a / b)
        print(f"{name:10s} {np.median(a):8.1f} {np.median(b):8.1f} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
