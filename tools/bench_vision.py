"""Vision models in fp16 on one GPU, beside torch.compile (channels_last) of the same network.

    python tools/bench_vision.py [--only NAME ...] [--quick] [--jobs N] [--limit S] [--json FILE]

Each model runs through `InferenceSession`, inputs and outputs bound in place, with random weights:
those of models/, or PyTorch's own modules, exported by it (SegFormer needs transformers). Each
measurement is a process with a limit of its own; `--jobs` of them compile beside each other, on all
GPUs, and are timed alone (gpu_turns.py). A row is printed as soon as it is there. Times are
medians, in microseconds. tools/bench_operators.py has single convolutions, bench_train.py training
steps.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _paths  # noqa: F401
import numpy as np
import onnx_ir as ir
import torch as t
from gpu_events import microseconds
from gpu_turns import Found, Turn, devices, say, together, told

from onnx_fuse import InferenceSession

Once = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """The shapes of a network's inputs and its module in PyTorch, NAME or NAME of another module.

    `built` is its module in models/ and its size there; without it, PyTorch exports the network.
    """

    shapes: Sequence[tuple[int, ...]]
    peer: str
    built: tuple[str, str] | None = None


def _images(batch: int, size: int = 224) -> tuple[tuple[int, ...], ...]:
    return ((batch, 3, size, size),)


ROWS = {
    "resnet50-1": Row(_images(1), "resnet50", ("resnet", "resnet50")),
    "resnet50-32": Row(_images(32), "resnet50", ("resnet", "resnet50")),
    "resnet50-128": Row(_images(128), "resnet50", ("resnet", "resnet50")),
    "convnext-16": Row(_images(16), "convnext_tiny", ("convnext", "convnext-tiny")),
    "efficientnet-32": Row(_images(32), "efficientnet_b0", ("efficientnet", "efficientnet-b0")),
    "vit-1": Row(_images(1), "vit_b_16", ("vit", "vit-b16")),
    "vit-32": Row(_images(32), "vit_b_16", ("vit", "vit-b16")),
    "swin-16": Row(_images(16), "swin_t"),
    "resnext50-32": Row(_images(32), "resnext50_32x4d"),
    "mobilenetv3-32": Row(_images(32), "mobilenet_v3_large"),
    "segformer-1": Row(_images(1, 512), "SegFormer"),
    "unet-2": Row(((2, 4, 64, 64), (2,), (2, 77, 768)), "UNet"),
    "vae-1": Row(((1, 4, 64, 64),), "Decoder"),
}


def timed(once: Once, turn: Turn, repeats: int = 20, rounds: int = 7) -> float:
    """Microseconds of one call on the GPU: the median of rounds of so many, in its turn."""
    for _ in range(3):
        once()
    t.cuda.synchronize()
    turn.take()
    for _ in range(3):
        once()
    return median(microseconds(once, repeats) for _ in range(rounds))


def network(name: str) -> t.nn.Module:
    """The module in PyTorch: of vision_networks, of transformers, or of torchvision."""
    if name in ("UNet", "Decoder"):
        made = getattr(importlib.import_module("vision_networks"), name)()
    elif name == "SegFormer":
        from transformers import SegformerConfig, SegformerForSemanticSegmentation

        class Logits(SegformerForSemanticSegmentation):
            """The scores alone."""

            def forward(self, x: t.Tensor) -> t.Tensor:
                return super().forward(x).logits

        made = Logits(SegformerConfig(num_labels=150))
    else:
        made = getattr(importlib.import_module("torchvision").models, name)()
    module: t.nn.Module = made.eval()
    return module


def graph(row: Row) -> ir.Model:
    """The model of models/, or PyTorch's export of its own."""
    if row.built is not None:
        builder = importlib.import_module(row.built[0])
        made: ir.Model = builder.build(builder.SIZES[row.built[1]])
        return made
    inputs = tuple(t.zeros(shape) for shape in row.shapes)
    names = [f"x{i}" for i in range(len(inputs))]
    with t.no_grad():
        exported = t.onnx.export(
            network(row.peer), inputs, dynamo=True, input_names=names, verbose=False
        )
    assert exported is not None
    return exported.model


def ours(
    model: Any, kind: Any, shapes: Sequence[tuple[int, ...]], precision: str, turn: Turn
) -> float:
    """Microseconds of a run of a session whose inputs and output stay on the GPU."""
    session = InferenceSession(model, device="cuda", precision=precision)
    inputs = [t.randn(shape, device="cuda").to(getattr(t, np.dtype(kind).name)) for shape in shapes]
    names = [v.name for v in session.get_inputs()]
    (y,) = session.run(None, {n: x.cpu().numpy() for n, x in zip(names, inputs, strict=True)})
    out = t.empty(y.shape, device="cuda", dtype=getattr(t, y.dtype.name))
    binding = session.io_binding()
    for name, x in zip(names, inputs, strict=True):
        binding.bind_input(name, "cuda", 0, kind, tuple(x.shape), x.data_ptr())
    name = session.get_outputs()[0].name
    binding.bind_output(name, "cuda", 0, y.dtype.type, y.shape, out.data_ptr())
    stream = t.cuda.current_stream().cuda_stream

    def once() -> None:
        session.run_with_iobinding(binding, stream=stream, synchronize=False)

    return timed(once, turn)


def in_fp16(row: Row, turn: Turn) -> float:
    return ours(graph(row), np.float32, row.shapes, "fp16", turn)


def peer(row: Row, turn: Turn) -> float:
    """Microseconds of torch.compile's run of PyTorch's module."""
    with t.device("cuda"):
        module = network(row.peer).half().to(memory_format=t.channels_last)
    compiled = t.compile(module, mode="reduce-overhead", dynamic=False)
    inputs = [t.randn(shape, device="cuda").half() for shape in row.shapes]
    inputs = [x.contiguous(memory_format=t.channels_last) if x.dim() == 4 else x for x in inputs]
    with t.no_grad():
        return timed(lambda: compiled(*inputs), turn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--quick", action="store_true", help="without torch.compile")
    parser.add_argument("--jobs", type=int, default=1, help="measurements that compile at once")
    parser.add_argument("--limit", type=float, default=180, help="seconds of each measurement")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        t.backends.cudnn.benchmark = True
        name, arm = args.worker
        row, turn = ROWS[name], Turn()
        measures = {"torch": peer, "ours": in_fp16}
        return say(us=measures[arm](row, turn))

    def measure(name: str, arm: str, where: Mapping[str, Any]) -> Found:
        return told([sys.executable, __file__, "--worker", name, arm], where, args.limit)

    found: dict[str, dict[str, float | str]] = {name: {} for name in args.only}
    arms = ("ours",) if args.quick else ("ours", "torch")
    print(f"{t.cuda.get_device_name()}, torch {t.__version__}: us, torch's, the ratio", flush=True)
    for name, arm, figures in together(args.only, arms, measure, devices(), args.jobs):
        times = found[name]
        times[arm] = figures.get("us") or figures.get("error", "no figure")[:120]
        if len(times) == len(arms):
            both = [times[arm] for arm in arms]
            shown = [x if isinstance(x, str) else f"{x:.1f}" for x in both]
            match both:
                case [float(mine), float(peers)]:
                    shown.append(f"{mine / peers:.2f}")
            print(f"{name:16s}" + "".join(f" {x:>10s}" for x in shown), flush=True)
    if args.json:
        rows = {name: [times[arm] for arm in arms] for name, times in found.items()}
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
