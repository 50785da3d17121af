"""EfficientNet-B0, BatchNormalization folded: `python models/efficientnet.py -o net.onnx`.

x [batch, 3, height, width] -> logits [batch, classes], float32, any height and width.
"""

import math
from dataclasses import dataclass

import onnx_ir as ir
from common import Net, write

Stage = tuple[int, int, int, int, int]
STAGES: tuple[Stage, ...] = (
    (1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2), (6, 112, 3, 5, 1),
    (6, 192, 4, 5, 2), (6, 320, 1, 3, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    classes: int = 1000
    stem: int = 32
    head: int = 1280
    stages: tuple[Stage, ...] = STAGES  # expansion, channels, blocks, kernel, stride of the first


SIZES = {
    "efficientnet-b0": Config(),
    "tiny": Config(classes=10, stem=16, head=64, stages=((1, 16, 1, 3, 1), (4, 24, 2, 5, 2))),
}


def conv(
    net: Net, name: str, x: ir.Value, shape: tuple[int, int, int], stride: int = 1, group: int = 1
) -> ir.Value:
    """A convolution with its bias; shape is (channels in, channels out, kernel)."""
    n_in, n_out, kernel = shape
    with net.scope(name):
        std = math.sqrt(group / (n_in * kernel**2))
        weight = net.normal("weight", (n_out, n_in // group, kernel, kernel), std)
        return net.Conv(x, weight, net.normal("bias", (n_out,), 0.1), pads=[kernel // 2] * 4,
                        group=group, strides=[stride] * 2)  # fmt: skip


def silu(net: Net, x: ir.Value) -> ir.Value:
    return net.Mul(x, net.Sigmoid(x))


def block(
    net: Net, x: ir.Value, n_in: int, n_out: int, expansion: int, kernel: int, stride: int
) -> ir.Value:
    """Expansion, depthwise convolution, a gate by the channels' means, projection, residual."""
    wide, h = n_in * expansion, x
    if expansion > 1:
        h = silu(net, conv(net, "expand", h, (n_in, wide, 1)))
    h = silu(net, conv(net, "depthwise", h, (wide, wide, kernel), stride, wide))
    gate = silu(net, conv(net, "reduce", net.GlobalAveragePool(h), (wide, n_in // 4, 1)))
    h = net.Mul(h, net.Sigmoid(conv(net, "gate", gate, (n_in // 4, wide, 1))))
    h = conv(net, "project", h, (wide, n_out, 1))
    return net.Add(h, x) if stride == 1 and n_in == n_out else h


def build(c: Config, seed: int = 0) -> ir.Model:
    net = Net("efficientnet", seed)
    x = net.input("x", ir.DataType.FLOAT, ["batch", 3, "height", "width"])
    x = silu(net, conv(net, "stem", x, (3, c.stem, 3), 2))
    width = c.stem
    for stage, (expansion, channels, blocks, kernel, stride) in enumerate(c.stages):
        for i in range(blocks):
            with net.scope(f"stages.{stage}.{i}"):
                x = block(net, x, width, channels, expansion, kernel, stride if not i else 1)
            width = channels
    x = silu(net, conv(net, "top", x, (width, c.head, 1)))
    x = net.Flatten(net.GlobalAveragePool(x), axis=1)
    x = net.gemm("head", x, c.head, c.classes, 1 / math.sqrt(c.head))
    net.output(x, "logits", ["batch", c.classes])
    return net.model()


if __name__ == "__main__":
    write(build, SIZES)
