"""The single convolutions of ResNet-50 in fp16 on one GPU, 32 images, beside cuDNN's.

    python tools/bench_convolutions.py [--only forward dgrad wgrad] [--json FILE]

Each runs through `InferenceSession`, images channels last and bound in place: forward, and the
gradients of the images and of the weight. cuDNN's are those of PyTorch, as CUDA graphs. Times are
medians, in microseconds.
"""

import argparse
import json
from collections.abc import Collection, Iterator
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch as t
from bench_vision import Once, ours, timed
from gpu_events import captured
from gpu_turns import Turn

from onnx_fuse.ir.build import text_model

# channels in, image, filters, kernel, stride
CONVOLUTIONS = (
    (3, 224, 64, 7, 2), (64, 56, 64, 1, 1), (64, 56, 64, 3, 1), (64, 56, 256, 1, 1),
    (256, 56, 64, 1, 1), (256, 56, 128, 1, 1), (128, 56, 128, 3, 2), (256, 56, 512, 1, 2),
    (128, 28, 512, 1, 1), (512, 28, 128, 1, 1), (128, 28, 128, 3, 1), (512, 28, 256, 1, 1),
    (256, 28, 256, 3, 2), (512, 28, 1024, 1, 2), (256, 14, 1024, 1, 1), (1024, 14, 256, 1, 1),
    (256, 14, 256, 3, 1), (1024, 14, 512, 1, 1), (512, 14, 512, 3, 2), (1024, 14, 2048, 1, 2),
    (512, 7, 2048, 1, 1), (2048, 7, 512, 1, 1), (512, 7, 512, 3, 1),
)  # fmt: skip

WHAT = ("forward", "dgrad", "wgrad")
TURN = Turn()  # a process of no tool: it does not wait


def replayed(once: Once) -> float:
    """Microseconds of what a call enqueues, as a CUDA graph."""
    return timed(captured(once).replay, TURN)


def convolution(
    c: int, image: int, m: int, k: int, s: int, only: Collection[str], batch: int = 32
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

    def backward(*wanted: bool) -> Once:
        how = [s, s], [pad, pad], [1, 1], False, [0, 0], 1, wanted
        return lambda: t.ops.aten.convolution_backward(dy, given, w, None, *how)

    arms = {
        "forward": (forward, [x], lambda: t.nn.functional.conv2d(given, w, None, s, pad)),
        "dgrad": (data, [y], backward(True, False, False)),
        "wgrad": (filters, [y, x], backward(False, True, False)),
    }
    for what, (model, shapes, theirs) in arms.items():
        if what in only and (what != "dgrad" or c > 3):  # images need no gradient
            yield what, ours(model, np.float16, shapes, "fp32", TURN), replayed(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    t.backends.cudnn.benchmark = True
    found: dict[str, tuple[float, float]] = {}
    ratios: dict[str, list[float]] = {}
    print(f"{t.cuda.get_device_name()}, torch {t.__version__}: us, cuDNN's, the ratio", flush=True)
    for c, image, m, k, s in CONVOLUTIONS:
        for what, mine, theirs in convolution(c, image, m, k, s, args.only):
            name = f"{c} x {image}^2 to {m}, {k} x {k} / {s}, {what}"
            found[name] = mine, theirs
            ratios.setdefault(what, []).append(log(mine / theirs))
            print(f"{name:36s} {mine:9.1f} {theirs:9.1f}  {mine / theirs:5.2f}", flush=True)
    for what, logarithms in ratios.items():
        mean = exp(sum(logarithms) / len(logarithms))
        print(f"geometric mean of {len(logarithms)} ratios, {what}: {mean:.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
