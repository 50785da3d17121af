"""ResNet-50, BatchNormalization folded or for training: `python models/resnet.py -o resnet.onnx`.

x [batch, 3, height, width] -> logits [batch, classes], float32, any height and width.
"""

import math
from dataclasses import dataclass

import onnx_ir as ir
from common import Net, write


@dataclass(frozen=True)
class Config:
    classes: int = 1000
    width: int = 64  # of the first stage's 3 x 3 convolutions; each further stage doubles it
    blocks: tuple[int, ...] = (3, 4, 6, 3)  # of each stage
    training: bool = False  # BatchNormalization by the statistics of the batch, and no bias


SIZES = {
    "resnet50": Config(),
    "resnet50-training": Config(training=True),
    "tiny": Config(classes=10, width=16, blocks=(1, 1)),
}


def conv(
    net: Net, name: str, x: ir.Value, shape: tuple[int, int, int], stride: int, c: Config
) -> ir.Value:
    """A convolution with its bias or its norm; shape is (channels in, channels out, kernel)."""
    n_in, n_out, kernel = shape
    with net.scope(name):
        weight = net.normal(
            "weight", (n_out, n_in, kernel, kernel), math.sqrt(1 / (n_in * kernel**2))
        )
        pads, strides = [kernel // 2] * 4, [stride] * 2
        if c.training:
            x = net.Conv(x, weight, kernel_shape=[kernel] * 2, pads=pads, strides=strides)
            start = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}
            norm = [net.full(f"norm.{name}", (n_out,), value) for name, value in start.items()]
            return net.BatchNormalization(x, *norm, outputs=3, training_mode=1)
        bias = net.normal("bias", (n_out,), 0.1)
        return net.Conv(x, weight, bias, kernel_shape=[kernel] * 2, pads=pads, strides=strides)


def block(net: Net, x: ir.Value, n_in: int, width: int, stride: int, c: Config) -> ir.Value:
    """relu(x + expand(relu(conv(relu(reduce(x)))))), with a projection where the shape changes."""
    h = net.Relu(conv(net, "reduce", x, (n_in, width, 1), 1, c))
    h = net.Relu(conv(net, "conv", h, (width, width, 3), stride, c))
    h = conv(net, "expand", h, (width, 4 * width, 1), 1, c)
    if stride > 1 or n_in != 4 * width:
        x = conv(net, "shortcut", x, (n_in, 4 * width, 1), stride, c)
    return net.Relu(net.Add(h, x))


def build(c: Config, seed: int = 0) -> ir.Model:
    net = Net("resnet", seed)
    x = net.input("x", ir.DataType.FLOAT, ["batch", 3, "height", "width"])
    x = net.Relu(conv(net, "stem", x, (3, c.width, 7), 2, c))
    x = net.MaxPool(x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = c.width
    for stage, blocks in enumerate(c.blocks):
        for i in range(blocks):
            with net.scope(f"stages.{stage}.{i}"):
                stride = 2 if stage and not i else 1
                x = block(net, x, channels, c.width << stage, stride, c)
            channels = 4 * c.width << stage
    x = net.Flatten(net.GlobalAveragePool(x), axis=1)
    x = net.gemm("head", x, channels, c.classes, 1 / math.sqrt(channels))
    net.output(x, "logits", ["batch", c.classes])
    return net.model()


if __name__ == "__main__":
    write(build, SIZES)
