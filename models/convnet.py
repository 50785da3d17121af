"""A small residual network with BatchNormalization: `python models/convnet.py -o convnet.onnx`.

x [batch, channels, height, width] -> logits [batch, classes], float32, any height and width.
"""

import math
from dataclasses import dataclass

import onnx_ir as ir
from common import Net, write


@dataclass(frozen=True)
class Config:
    channels: int = 3
    classes: int = 10
    width: int = 16  # of the first stage; each further one doubles it and halves the image
    stages: int = 3
    blocks: int = 1  # residual blocks a stage
    training: bool = False  # BatchNormalization by the statistics of the batch


SIZES = {"tiny": Config(), "resnet20": Config(blocks=3)}


def conv_norm(
    net: Net, name: str, x: ir.Value, shape: tuple[int, int, int], stride: int, c: Config
) -> ir.Value:
    """BatchNormalization(Conv(x)); shape is (channels in, channels out, kernel)."""
    n_in, n_out, kernel = shape
    with net.scope(name):
        std = math.sqrt(2 / (n_in * kernel**2))
        weight = net.normal("conv.weight", (n_out, n_in, kernel, kernel), std)
        pads, strides = [kernel // 2] * 4, [stride] * 2
        x = net.Conv(x, weight, kernel_shape=[kernel] * 2, pads=pads, strides=strides)
        start = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}
        norm = [net.full(f"norm.{name}", (n_out,), value) for name, value in start.items()]
        if c.training:
            return net.BatchNormalization(x, *norm, outputs=3, training_mode=1)
        return net.BatchNormalization(x, *norm)


def block(net: Net, x: ir.Value, n_in: int, n_out: int, stride: int, c: Config) -> ir.Value:
    """relu(x + conv(relu(conv(x)))), with a 1x1 projection of x where its shape changes."""
    h = net.Relu(conv_norm(net, "conv1", x, (n_in, n_out, 3), stride, c))
    h = conv_norm(net, "conv2", h, (n_out, n_out, 3), 1, c)
    if stride > 1 or n_in != n_out:
        x = conv_norm(net, "shortcut", x, (n_in, n_out, 1), stride, c)
    return net.Relu(net.Add(x, h))


def build(c: Config, seed: int = 0) -> ir.Model:
    net = Net("convnet", seed)
    x = net.input("x", ir.DataType.FLOAT, ["batch", c.channels, "height", "width"])
    x = net.Relu(conv_norm(net, "stem", x, (c.channels, c.width, 3), 1, c))
    width = c.width
    for stage in range(c.stages):
        for i in range(c.blocks):
            n_in, n_out, stride = width, c.width << stage, 2 if stage and not i else 1
            with net.scope(f"stages.{stage}.{i}"):
                x = block(net, x, n_in, n_out, stride, c)
            width = n_out
    x = net.Flatten(net.GlobalAveragePool(x), axis=1)
    x = net.gemm("head", x, width, c.classes, 1 / math.sqrt(width))
    net.output(x, "logits", ["batch", c.classes])
    return net.model()


if __name__ == "__main__":
    write(build, SIZES)
