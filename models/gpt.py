"""A GPT-2 style decoder: `python models/gpt.py -o gpt.onnx [--size gpt2-small]`.

input_ids [batch, sequence] int64 -> logits [batch, sequence, vocab] float32; sequence <= context.
With `--masked`, attention_mask [batch, sequence] int64 is 0 for padding, whose keys nobody sees.
"""

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from common import Net, write


@dataclass(frozen=True)
class Config:
    layers: int = 2
    heads: int = 2
    width: int = 64
    vocab: int = 256
    context: int = 128
    tied: bool = True  # the head multiplies by the transposed token embedding
    masked: bool = False  # an input hides the keys of padding


SIZES = {"tiny": Config(), "gpt2-small": Config(12, 12, 768, 50257, 1024)}


def attention(net: Net, x: ir.Value, mask: ir.Value, c: Config) -> ir.Value:
    """softmax(q k^T / sqrt(head) + mask) v in each head: x [B, T, width] -> [B, T, width]."""
    head = c.width // c.heads
    qkv = net.linear("qkv", x, c.width, 3 * c.width, 0.02)
    q, k, v = (
        net.Reshape(part, [0, 0, c.heads, head])
        for part in net.op("Split", qkv, outputs=3, axis=-1, num_outputs=3)
    )
    q, v = (
        net.Transpose(q, perm=[0, 2, 1, 3]),
        net.Transpose(v, perm=[0, 2, 1, 3]),
    )  # [B, heads, T, head]
    k = net.Transpose(k, perm=[0, 2, 3, 1])  # [B, heads, head, T]
    scores = net.Add(net.Mul(net.MatMul(q, k), 1 / math.sqrt(head)), mask)
    y = net.Transpose(net.MatMul(net.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
    return net.linear("proj", net.Reshape(y, [0, 0, c.width]), c.width, c.width, residual_std(c))


def mlp(net: Net, x: ir.Value, c: Config) -> ir.Value:
    h = net.Gelu(net.linear("fc", x, c.width, 4 * c.width, 0.02), approximate="tanh")
    return net.linear("proj", h, 4 * c.width, c.width, residual_std(c))


def residual_std(c: Config) -> float:
    # GPT-2: 2 * layers branches add into the residual stream, each scaled so that their sum is not
    return 0.02 / math.sqrt(2 * c.layers)


def causal_mask(net: Net, positions: ir.Value, padding: ir.Value | None = None) -> ir.Value:
    """[T, T] float32 for positions [T]: 0 where key <= query, else the lowest float.

    [B, 1, T, T] with the mask [B, T] of padding.
    """
    hidden = net.Greater(net.Unsqueeze(positions, [0]), net.Unsqueeze(positions, [1]))
    if padding is not None:
        keep = net.Cast(net.Unsqueeze(padding, [1, 2]), to=ir.DataType.BOOL)
        hidden = net.Or(hidden, net.Not(keep))
    return net.Where(hidden, float(np.finfo(np.float32).min), 0.0)


def build(c: Config, seed: int = 0) -> ir.Model:
    if c.heads < 1 or c.width % c.heads:
        raise ValueError(f"width {c.width} is not a multiple of heads {c.heads}")
    net = Net("gpt", seed)
    ids = net.input("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    padding = None
    if c.masked:
        padding = net.input("attention_mask", ir.DataType.INT64, ["batch", "sequence"])
    length = net.Squeeze(net.Shape(ids, start=1, end=2), [0])
    positions = net.Range(0, length, 1)
    with net.scope("wte"):
        wte = net.normal("weight", (c.vocab, c.width), 0.02)
        x = net.Gather(wte, ids)
    with net.scope("wpe"):
        x = net.Add(x, net.Gather(net.normal("weight", (c.context, c.width), 0.02), positions))
    with net.scope("mask"):
        mask = causal_mask(net, positions, padding)
    for layer in range(c.layers):
        with net.scope(f"blocks.{layer}"):
            h = net.layer_norm("ln_1", x, c.width)
            with net.scope("attn"):
                h = attention(net, h, mask, c)
            x = net.Add(x, h)
            h = net.layer_norm("ln_2", x, c.width)
            with net.scope("mlp"):
                h = mlp(net, h, c)
            x = net.Add(x, h)
    x = net.layer_norm("ln_f", x, c.width)
    with net.scope("head"):
        head = (
            net.Transpose(wte, perm=[1, 0])
            if c.tied
            else net.normal("weight", (c.width, c.vocab), 0.02)
        )
        net.output(net.MatMul(x, head), "logits", ["batch", "sequence", c.vocab])
    return net.model()


if __name__ == "__main__":
    write(build, SIZES)
