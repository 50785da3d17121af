"""ConvNeXt: `python models/convnext.py -o convnext.onnx`, as PyTorch's exporters write it.

x [batch, 3, height, width] -> logits [batch, classes], float32; sides are multiples of 32.
"""

import math
from dataclasses import dataclass

import onnx_ir as ir
from common import Net, write

EPSILON = 1e-6
FIRST, LAST = [0, 3, 1, 2], [0, 2, 3, 1]  # the order of axes with the channels second, and last


@dataclass(frozen=True)
class Config:
    classes: int = 1000
    blocks: tuple[int, ...] = (3, 3, 9, 3)  # of each stage
    width: int = 96  # of the first stage; each further one doubles it and halves the image


SIZES = {"convnext-tiny": Config(), "tiny": Config(classes=10, blocks=(1, 1), width=16)}


def conv(
    net: Net, name: str, x: ir.Value, shape: tuple[int, int, int], stride: int, group: int = 1
) -> ir.Value:
    """A convolution with its bias; shape is (channels in, channels out, kernel)."""
    n_in, n_out, kernel = shape
    with net.scope(name):
        std = math.sqrt(group / (n_in * kernel**2))
        weight = net.normal("weight", (n_out, n_in // group, kernel, kernel), std)
        pads = [kernel // 2 if stride == 1 else 0] * 4
        return net.Conv(x, weight, net.normal("bias", (n_out,), 0.1), pads=pads, group=group,
                        strides=[stride] * 2)  # fmt: skip


def norm(net: Net, name: str, x: ir.Value, width: int) -> ir.Value:
    with net.scope(name):
        scale, bias = net.full("weight", (width,), 1), net.full("bias", (width,), 0)
        return net.LayerNormalization(x, scale, bias, axis=-1, epsilon=EPSILON)


def block(net: Net, x: ir.Value, width: int) -> ir.Value:
    """x + gamma * linear(gelu(linear(norm(depthwise(x)))))."""
    h = net.Transpose(conv(net, "depthwise", x, (width, width, 7), 1, width), perm=LAST)
    h = norm(net, "norm", h, width)
    h = net.linear("wide", h, width, 4 * width, 1 / math.sqrt(width))
    h = net.op("Gelu", h)[0]
    h = net.linear("narrow", h, 4 * width, width, 1 / math.sqrt(4 * width))
    h = net.Mul(h, net.normal("gamma", (width,), 0.5))
    return net.Add(net.Transpose(h, perm=FIRST), x)


def build(c: Config, seed: int = 0) -> ir.Model:
    net = Net("convnext", seed)
    x = net.input("x", ir.DataType.FLOAT, ["batch", 3, "height", "width"])
    width = c.width
    x = net.Transpose(conv(net, "stem", x, (3, width, 4), 4), perm=LAST)
    x = net.Transpose(norm(net, "stem.norm", x, width), perm=FIRST)
    for stage, blocks in enumerate(c.blocks):
        with net.scope(f"stages.{stage}"):
            if stage:
                x = norm(net, "norm", net.Transpose(x, perm=LAST), width)
                x = net.Transpose(x, perm=FIRST)
                x = conv(net, "down", x, (width, 2 * width, 2), 2)
                width *= 2
            for i in range(blocks):
                with net.scope(str(i)):
                    x = block(net, x, width)
    x = norm(net, "norm", net.Flatten(net.GlobalAveragePool(x), axis=1), width)
    x = net.gemm("head", x, width, c.classes, 1 / math.sqrt(width))
    net.output(x, "logits", ["batch", c.classes])
    return net.model()


if __name__ == "__main__":
    write(build, SIZES)
