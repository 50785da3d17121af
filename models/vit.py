"""A vision transformer: `python models/vit.py -o vit.onnx [--size vit-b16]`.

pixels [batch, 3, image, image] -> logits [batch, classes], both float32.
"""

import math
from dataclasses import dataclass

import onnx_ir as ir
from common import Net, write

EPSILON = 1e-6


@dataclass(frozen=True)
class Config:
    layers: int = 2
    heads: int = 2
    width: int = 32
    image: int = 32
    patch: int = 8
    classes: int = 10


SIZES = {"tiny": Config(), "vit-b16": Config(12, 12, 768, 224, 16, 1000)}


def attention(net: Net, x: ir.Value, c: Config) -> ir.Value:
    """softmax(q k^T / sqrt(head)) v in each head: x [B, T, width] -> [B, T, width]."""
    head = c.width // c.heads
    qkv = net.Reshape(net.linear("qkv", x, c.width, 3 * c.width, 0.02), [0, 0, 3, c.heads, head])
    q, k, v = (
        net.Squeeze(part, [0])
        for part in net.op("Split", net.Transpose(qkv, perm=[2, 0, 3, 1, 4]), outputs=3,
                           axis=0, num_outputs=3)
    )  # fmt: skip
    scores = net.Mul(net.MatMul(q, net.Transpose(k, perm=[0, 1, 3, 2])), 1 / math.sqrt(head))
    y = net.Transpose(net.MatMul(net.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
    return net.linear("proj", net.Reshape(y, [0, 0, c.width]), c.width, c.width, 0.02)


def patches(net: Net, pixels: ir.Value, c: Config) -> ir.Value:
    """The class token and a product of each patch, with position embeddings: [B, T, width]."""
    count = (c.image // c.patch) ** 2
    with net.scope("patch"):
        weight = net.normal("weight", (c.width, 3, c.patch, c.patch), 0.02)
        size = [c.patch, c.patch]
        x = net.Conv(pixels, weight, net.full("bias", (c.width,), 0), strides=size,
                     kernel_shape=size)  # fmt: skip
    x = net.Transpose(net.Reshape(x, [0, c.width, count]), perm=[0, 2, 1])
    batch = net.Shape(pixels, start=0, end=1)
    token = net.Expand(
        net.normal("class_token", (1, 1, c.width), 0.02), net.Concat(batch, [1, c.width], axis=0)
    )
    x = net.Concat(token, x, axis=1)
    return net.Add(x, net.normal("positions", (1, count + 1, c.width), 0.02))


def build(c: Config, seed: int = 0) -> ir.Model:
    if c.heads < 1 or c.width % c.heads:
        raise ValueError(f"width {c.width} is not a multiple of heads {c.heads}")
    if c.patch < 1 or c.image % c.patch:
        raise ValueError(f"image {c.image} is not a multiple of patch {c.patch}")
    net = Net("vit", seed)
    pixels = net.input("pixels", ir.DataType.FLOAT, ["batch", 3, c.image, c.image])
    with net.scope("embeddings"):
        x = patches(net, pixels, c)
    for layer in range(c.layers):
        with net.scope(f"blocks.{layer}"):
            h = net.layer_norm("norm1", x, c.width, EPSILON)
            with net.scope("attn"):
                h = attention(net, h, c)
            x = net.Add(x, h)
            h = net.layer_norm("norm2", x, c.width, EPSILON)
            with net.scope("mlp"):
                h = net.Gelu(net.linear("up", h, c.width, 4 * c.width, 0.02))
                x = net.Add(x, net.linear("down", h, 4 * c.width, c.width, 0.02))
    x = net.Gather(net.layer_norm("norm", x, c.width, EPSILON), 0, axis=1)
    logits = net.gemm("head", x, c.width, c.classes, 0.02)
    net.output(logits, "logits", ["batch", c.classes])
    return net.model()


if __name__ == "__main__":
    write(build, SIZES)
