"""Vision models in fp16 on one GPU, beside torch.compile (channels_last) where torch is installed.

    python tools/bench_vision.py [--only NAME ... convolutions] [--quick] [--json FILE]

Each model runs through `InferenceSession`, inputs and outputs bound in place, with random weights
(models/); the peers are torchvision's. "convolutions" are the single ones of ResNet-50, 32 images,
beside cuDNN's: forward, and the gradients of the images and of the weight. Times are medians, in
microseconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
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


def ours(
    model: Any, kind: Any, shapes: Mapping[str, tuple[int, ...]], precision: str = "fp16"
) -> float:
    """Microseconds of a run of a session whose inputs and output stay on the GPU."""
    session = InferenceSession(model, device="cuda", precision=precision)
    dtype = getattr(t, np.dtype(kind).name)
    feeds = {name: t.randn(shape, device="cuda").to(dtype) for name, shape in shapes.items()}
    (y,) = session.run(None, {name: x.cpu().numpy() for name, x in feeds.items()})
    out = t.empty(y.shape, device="cuda", dtype=getattr(t, y.dtype.name))
    binding = session.io_binding()
    for name, x in feeds.items():
        binding.bind_input(name, "cuda", 0, kind, x.shape, x.data_ptr())
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


def replayed(once: Once) -> float:
    """Microseconds of what a call enqueues, as a CUDA graph."""
    graph = t.cuda.CUDAGraph()
    for _ in range(3):
        once()
    with t.cuda.graph(graph):
        once()
    return timed(graph.replay)


def convolution(
    c: int, image: int, m: int, k: int, s: int, batch: int = 32
) -> Iterator[tuple[str, float, float]]:
    """Of a convolution of channels-last images: what, and microseconds (ours, cuDNN's)."""
    pad, out = k // 2, (image + 2 * (k // 2) - k) // s + 1
    x, y = (batch, image, image, c), (batch, out, out, m)
    weight = (t.randn(m, c, k, k) / (c * k * k) ** 0.5).half()

    def made(given: str, result: tuple[int, ...], nodes: str) -> Any:
        """A model whose last input of two, w, is the weight."""
        model = text_model(f"agraph ({given}) => (float16{list(result)} z) {{ {nodes} }}")
        if model.graph.inputs[1].name == "w":
            value = model.graph.inputs.pop(1)
            value.const_value = ir.tensor(weight.numpy(), name="w")
            model.graph.register_initializer(value)
        return model

    how = f"strides=[{s},{s}],pads={[pad] * 4}"
    rest = image - ((out - 1) * s - 2 * pad + k)
    first, last, held = "perm=[0,3,1,2]", "perm=[0,2,3,1]", f"float16[{m},{c},{k},{k}] w"
    images, slopes = f"float16{list(x)} x", f"float16{list(y)} y"
    forward = made(f"{images}, {held}", y, f"a = Transpose<{first}>(x) b = Conv<{how}>(a, w)"
                   f" z = Transpose<{last}>(b)")  # fmt: skip
    data = made(f"{slopes}, {held}", x, f"a = Transpose<{first}>(y)"
                f" b = ConvTranspose<{how},output_padding=[{rest},{rest}]>(a, w)"
                f" z = Transpose<{last}>(b)")  # fmt: skip
    filters = made(f"{slopes}, {images}", (m, c, k, k), f"a = Transpose<{first}>(y)"
                   f" b = Transpose<{first}>(x) z = onnx_fuse.ConvWeightGrad<{how},group=1,"
                   f"dilations=[1,1],kernel_shape=[{k},{k}],swap=[1,0,2,3]>(a, b)")  # fmt: skip
    given, dy, w = (
        v.cuda().half().contiguous(memory_format=t.channels_last)
        for v in (t.randn(batch, c, image, image), t.randn(batch, m, out, out), weight)
    )

    def backward(*wanted: bool) -> object:
        return t.ops.aten.convolution_backward(
            dy, given, w, None, [s, s], [pad, pad], [1, 1], False, [0, 0], 1, wanted
        )

    yield (
        "forward",
        ours(forward, np.float16, {"x": x}, "fp32"),
        replayed(lambda: t.nn.functional.conv2d(given, w, None, s, pad)),
    )
    if c > 3:  # images need no gradient
        yield (
            "dgrad",
            ours(data, np.float16, {"y": y}, "fp32"),
            replayed(lambda: backward(True, False, False)),
        )
    yield (
        "wgrad",
        ours(filters, np.float16, {"y": y, "x": x}, "fp32"),
        replayed(lambda: backward(False, True, False)),
    )


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
        print(f"{name:36s} {mine:9.1f}{beside}", flush=True)

    print(f"{t.cuda.get_device_name()}, torch {t.__version__}: us, torch's, the ratio")
    for name in (name for name in args.only if name in ROWS):
        row = ROWS[name]
        builder, shape = importlib.import_module(row.module), (row.batch, 3, 224, 224)
        mine = ours(builder.build(builder.SIZES[row.size]), np.float32, {"x": shape})
        show(name, mine, None if args.quick else peer(row.peer, shape))
    if "convolutions" in args.only:
        ratios: dict[str, list[float]] = {}
        for c, image, m, k, s in CONVOLUTIONS:
            for what, mine, theirs in convolution(c, image, m, k, s):
                show(f"{c} x {image}^2 to {m}, {k} x {k} / {s}, {what}", mine, theirs)
                ratios.setdefault(what, []).append(log(mine / theirs))
        for what, found_there in ratios.items():
            mean = exp(sum(found_there) / len(found_there))
            print(f"geometric mean of the ratios, {what}: {mean:.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
