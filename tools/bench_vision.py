"""Vision models in fp16 on one GPU, beside torch.compile (channels_last) of the same network.

    python tools/bench_vision.py [--only NAME ...] [--quick] [--jobs N] [--limit S] [--json FILE]

Each model runs through `InferenceSession`, inputs and outputs bound in place, with random weights:
those of models/, or PyTorch's own modules, exported by it (SegFormer needs transformers). Each
measurement is a process with a limit of its own; `--jobs` of them compile beside each other, on all
GPUs, and are timed alone (gpu_turns.py). A row is printed as soon as it is there. Times are
medians, in microseconds. tools/bench_convolutions.py has single convolutions, bench_train.py
training steps.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir
import torch as t
from gpu_events import microseconds
from gpu_turns import Place, Turn, devices

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "models")]

from onnx_fuse import InferenceSession  # noqa: E402

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


def peer(row: Row, turn: Turn) -> float:
    """Microseconds of torch.compile's run of PyTorch's module."""
    with t.device("cuda"):
        module = network(row.peer).half().to(memory_format=t.channels_last)
    compiled = t.compile(module, mode="reduce-overhead", dynamic=False)
    inputs = [t.randn(shape, device="cuda").half() for shape in row.shapes]
    inputs = [x.contiguous(memory_format=t.channels_last) if x.dim() == 4 else x for x in inputs]
    with t.no_grad():
        return timed(lambda: compiled(*inputs), turn)


def measured(name: str, theirs: bool, limit: float, device: str, cache: Path) -> float | str:
    """Microseconds that a process of its own finds within the limit, or why it finds none."""
    command = [sys.executable, __file__, "--worker", name, *(["--theirs"] if theirs else [])]
    try:
        with Place(device, cache) as place:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, check=False,
                env=place.env, pass_fds=place.pass_fds,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"over {limit:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:120]
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--quick", action="store_true", help="without torch.compile")
    parser.add_argument("--jobs", type=int, default=1, help="measurements that compile at once")
    parser.add_argument("--limit", type=float, default=180, help="seconds of each measurement")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        t.backends.cudnn.benchmark = True
        row, turn = ROWS[args.worker], Turn()
        if args.theirs:
            print(peer(row, turn))
        else:
            print(ours(graph(row), np.float32, row.shapes, "fp16", turn))
        return
    found: dict[str, list[float | str]] = {name: [] for name in args.only}
    arms = (False,) if args.quick else (False, True)
    gpus = devices()
    print(f"{t.cuda.get_device_name()}, torch {t.__version__}: us, torch's, the ratio", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=args.jobs) as pool:
        runs = {}
        for i, name in enumerate(args.only):
            for theirs in arms:
                place = gpus[i % len(gpus)], Path(folder) / f"{name}.{theirs}"
                runs[pool.submit(measured, name, theirs, args.limit, *place)] = name
        for run in as_completed(runs):
            name = runs[run]
            found[name].append(run.result())
            if len(found[name]) == len(arms):
                times = found[name] = [r.result() for r, of in runs.items() if of == name]
                shown = [x if isinstance(x, str) else f"{x:.1f}" for x in times]
                match times:
                    case [float(mine), float(peers)]:
                        shown.append(f"{mine / peers:.2f}")
                print(f"{name:16s}" + "".join(f" {x:>10s}" for x in shown), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
