"""gpt.py's decoder with a cache: `python models/gpt_cache.py -o gpt.onnx [--size gpt2-small]`.

One token at a time. input_ids [batch, 1] int64, position [1] int64 (how many tokens came before),
past_key.L and past_value.L [batch, heads, past, width / heads] float16 of each layer L
-> logits [batch, 1, vocab] float32, present_key.L and present_value.L.

A growing cache (the default) is the past and the token's own keys and values, one longer each
time. A fixed one (`--capacity 1024`) has room for so many tokens, and the token fills the next.
"""

import math
from dataclasses import dataclass

import gpt
import numpy as np
import onnx_ir as ir
from common import Net, write


@dataclass(frozen=True)
class Config(gpt.Config):
    capacity: int = 0  # tokens that a fixed cache holds; 0: it grows


SIZES = {
    "tiny": Config(),
    "gpt2-small": Config(12, 12, 768, 50257, 1024),
    "gpt2-small-fixed": Config(12, 12, 768, 50257, 1024, capacity=512),
}


def cached(
    net: Net, kind: str, layer: int, new: ir.Value, position: ir.Value, c: Config
) -> ir.Value:
    """The keys or values of all tokens so far [batch, heads, tokens, head], from the newest's."""
    length: int | str = c.capacity or "past"
    shape = ["batch", c.heads, length, c.width // c.heads]
    past = net.input(f"past_{kind}.{layer}", ir.DataType.FLOAT16, shape)
    new = net.Cast(new, to=ir.DataType.FLOAT16)
    if c.capacity:
        # the token's place along the third axis, for each number that is written there
        place = net.Expand(net.Reshape(position, [1, 1, 1, 1]), net.Shape(new))
        present = net.ScatterElements(past, place, new, axis=2)
    else:
        present = net.Concat(past, new, axis=2)
    shape[2] = length if c.capacity else "tokens"
    net.output(present, f"present_{kind}.{layer}", shape)
    present.dtype = ir.DataType.FLOAT16
    return net.Cast(present, to=ir.DataType.FLOAT)


def attention(
    net: Net, x: ir.Value, position: ir.Value, mask: ir.Value | None, layer: int, c: Config
) -> ir.Value:
    """softmax(q k^T / sqrt(head) + mask) v in each head: x [B, 1, width] -> [B, 1, width]."""
    head = c.width // c.heads
    qkv = net.linear("qkv", x, c.width, 3 * c.width, 0.02)
    q, k, v = (
        net.Transpose(net.Reshape(part, [0, 0, c.heads, head]), perm=[0, 2, 1, 3])
        for part in net.op("Split", qkv, outputs=3, axis=-1, num_outputs=3)
    )
    k = cached(net, "key", layer, k, position, c)
    v = cached(net, "value", layer, v, position, c)
    scores = net.Mul(net.MatMul(q, net.Transpose(k, perm=[0, 1, 3, 2])), 1 / math.sqrt(head))
    if mask is not None:
        scores = net.Add(scores, mask)
    y = net.Transpose(net.MatMul(net.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
    residual = gpt.residual_std(c)
    return net.linear("proj", net.Reshape(y, [0, 0, c.width]), c.width, c.width, residual)


def build(c: Config, seed: int = 0) -> ir.Model:
    net = Net("gpt_cache", seed)
    ids = net.input("input_ids", ir.DataType.INT64, ["batch", 1])
    position = net.input("position", ir.DataType.INT64, [1])
    with net.scope("wte"):
        wte = net.normal("weight", (c.vocab, c.width), 0.02)
        x = net.Gather(wte, ids)
    with net.scope("wpe"):
        x = net.Add(x, net.Gather(net.normal("weight", (c.context, c.width), 0.02), position))
    mask = None
    if c.capacity:
        with net.scope("mask"):
            later = net.Greater(net.Range(0, c.capacity, 1), position)
            mask = net.Where(later, float(np.finfo(np.float32).min), 0.0)
    for layer in range(c.layers):
        with net.scope(f"blocks.{layer}"):
            h = net.layer_norm("ln_1", x, c.width)
            with net.scope("attn"):
                h = attention(net, h, position, mask, layer, c)
            x = net.Add(x, h)
            h = net.layer_norm("ln_2", x, c.width)
            with net.scope("mlp"):
                x = net.Add(x, gpt.mlp(net, h, c))
    x = net.layer_norm("ln_f", x, c.width)
    with net.scope("head"):
        logits = net.MatMul(x, net.Transpose(wte, perm=[1, 0]))
    net.output(logits, "logits", ["batch", 1, c.vocab])
    return net.model()


if __name__ == "__main__":
    write(build, SIZES)
