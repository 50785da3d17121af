"""A perceptron of LayerNorm, Linear, GELU: `python models/mlp.py -o mlp.onnx --widths 64 128 10`.

x [batch, widths[0]] -> logits [batch, widths[-1]], float32.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir
from common import Net, write


@dataclass(frozen=True)
class Config:
    widths: tuple[int, ...] = (784, 512, 512, 512, 512, 10)


SIZES = {"mnist": Config(), "digits": Config((64, 128, 128, 10))}


def build(c: Config, seed: int = 0) -> ir.Model:
    if len(c.widths) < 2:
        raise ValueError("widths needs at least an input and an output")
    net = Net("mlp", seed)
    x = net.input("x", ir.DataType.FLOAT, ["batch", c.widths[0]])
    layers = list(pairwise(c.widths))
    for i, (n_in, n_out) in enumerate(layers):
        with net.scope(f"layers.{i}"):
            x = net.gemm("fc", net.layer_norm("norm", x, n_in), n_in, n_out, 1 / math.sqrt(n_in))
            if i + 1 < len(layers):
                x = net.Gelu(x)
    net.output(x, "logits", ["batch", c.widths[-1]])
    return net.model()


if __name__ == "__main__":
    write(build, SIZES)
