"""Vision models in fp16 on one GPU, beside torch.compile (channels_last) where torch is installed.

    python tools/bench_vision.py [--only NAME ... convolutions] [--quick] [--json FILE]

Each model runs through `InferenceSession`, inputs and outputs bound in place, with random weights
(models/); the peers are torchvision's. "convolutions" are the single ones of ResNet-50, 32 images,
beside cuDNN's. Times are medians, in microseconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir
import torch as t

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "models")]

from onnx_fuse import InferenceSession  # noqa: E402
from onnx_fuse.onnx.build import text_model  # noqa: E402

Once = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """A model of models/, its size there, its name in torchvision, and images a run."""

    module: str
    size: str
    peer: str
    batch: int


ROWS = {
    "resnet50-1": Row("resnet", "resnet50", "resnet50", 1),
    "resnet50-32": Row("resnet", "resnet50", "resnet50", 32),
    "resnet50-128": Row("resnet", "resnet50", "resnet50", 128),
    "convnext-16": Row("convnext", "convnext-tiny", "convnext_tiny", 16),
    "efficientnet-32": Row("efficientnet", "efficientnet-b0", "efficientnet_b0", 32),
}
# channels in, image, filters, kernel, stride
CONVOLUTIONS = (
    (3, 224, 64, 7, 2), (64, 56, 64, 1, 1), (64, 56, 64, 3, 1), (64, 56, 256, 1, 1),
    (256, 56, 64, 1, 1), (256, 56, 128, 1, 1), (128, 56, 128, 3, 2), (256, 56, 512, 1, 2),
    (128, 28, 512, 1, 1), (512, 28, 128, 1, 1), (128, 28, 128, 3, 1), (512, 28, 256, 1, 1),
    (256, 28, 256, 3, 2), (512, 28, 1024, 1, 2), (256, 14, 1024, 1, 1), (1024, 14, 256, 1, 1),
    (256, 14, 256, 3, 1), (1024, 14, 512, 1, 1), (512, 14, 512, 3, 2), (1024, 14, 2048, 1, 2),
    (512, 7, 2048, 1, 1), (2048, 7, 512, 1, 1), (512, 7, 512, 3, 1),
)  # fmt: skip


def timed(once: Once, repeats: int = 20, rounds: int = 7) -> float:
    """Microseconds of one call on the GPU: the median of rounds of so many."""
    found = []
    for _ in range(3):
        once()
    for _ in range(rounds):
        start, stop = (t.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            once()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) * 1e3 / repeats)
    return median(found)


def ours(model: Any, kind: Any, shape: tuple[int, ...], precision: str = "fp16") -> float:
    """Microseconds of a run of a session whose input and output stay on the GPU."""
    session = InferenceSession(model, device="cuda", precision=precision)
    x = t.randn(shape, device="cuda").to(getattr(t, np.dtype(kind).name))
    (y,) = session.run(None, {"x": x.cpu().numpy()})
    out = t.empty(y.shape, device="cuda", dtype=getattr(t, y.dtype.name))
    binding = session.io_binding()
    binding.bind_input("x", "cuda", 0, kind, shape, x.data_ptr())
    name = session.get_outputs()[0].name
    binding.bind_output(name, "cuda", 0, y.dtype.type, y.shape, out.data_ptr())
    stream = t.cuda.current_stream().cuda_stream
    return timed(lambda: session.run_with_iobinding(binding, stream=stream, synchronize=False))


def peer(name: str, shape: tuple[int, ...]) -> float:
    """Microseconds of torch.compile's run of torchvision's model."""
    import torchvision

    with t.device("cuda"):
        module = getattr(torchvision.models, name)().half().eval()
    module = module.to(memory_format=t.channels_last)
    compiled = t.compile(module, mode="reduce-overhead", dynamic=False)
    x = t.randn(shape, device="cuda").half().contiguous(memory_format=t.channels_last)
    with t.no_grad():
        return timed(lambda: compiled(x))


def convolution(c: int, image: int, m: int, k: int, s: int, batch: int = 32) -> tuple[float, float]:
    """Microseconds of a convolution of channels-last images: (ours, cuDNN's)."""
    pads, out = [k // 2] * 4, (image + 2 * (k // 2) - k) // s + 1
    model = text_model(
        f"agraph (float16[{batch},{image},{image},{c}] x, float16[{m},{c},{k},{k}] w)"
        f" => (float16[{batch},{out},{out},{m}] y) {{ a = Transpose<perm=[0,3,1,2]>(x)"
        f" b = Conv<strides=[{s},{s}],pads={pads}>(a, w) y = Transpose<perm=[0,2,3,1]>(b) }}"
    )
    weight = (t.randn(m, c, k, k) / (c * k * k) ** 0.5).half()
    value = model.graph.inputs.pop(1)
    value.const_value = ir.tensor(weight.numpy(), name="w")
    model.graph.register_initializer(value)
    x = t.randn(batch, c, image, image, device="cuda").half()
    x, weight = (v.cuda().contiguous(memory_format=t.channels_last) for v in (x, weight))
    graph = t.cuda.CUDAGraph()
    for _ in range(3):
        t.nn.functional.conv2d(x, weight, None, s, k // 2)
    with t.cuda.graph(graph):
        t.nn.functional.conv2d(x, weight, None, s, k // 2)
    return ours(model, np.float16, (batch, image, image, c), "fp32"), timed(graph.replay)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*ROWS, "convolutions"], default=[*ROWS])
    parser.add_argument("--quick", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    t.backends.cudnn.benchmark = True
    found: dict[str, tuple[float, float | None]] = {}

    def show(name: str, mine: float, theirs: float | None) -> None:
        found[name] = mine, theirs
        beside = f"  {theirs:9.1f}  {mine / theirs:5.2f}" if theirs else ""
        print(f"{name:30s} {mine:9.1f}{beside}", flush=True)

    print(f"{t.cuda.get_device_name()}, torch {t.__version__}: us, torch's, the ratio")
    for name in (name for name in args.only if name in ROWS):
        row = ROWS[name]
        builder, shape = importlib.import_module(row.module), (row.batch, 3, 224, 224)
        mine = ours(builder.build(builder.SIZES[row.size]), np.float32, shape)
        show(name, mine, None if args.quick else peer(row.peer, shape))
    if "convolutions" in args.only:
        ratios = []
        for c, image, m, k, s in CONVOLUTIONS:
            mine, theirs = convolution(c, image, m, k, s)
            show(f"{c} x {image}^2 to {m}, {k} x {k} / {s}", mine, theirs)
            ratios.append(log(mine / theirs))
        print(f"geometric mean of the ratios: {exp(sum(ratios) / len(ratios)):.3f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
