"""A BERT style encoder: `python models/encoder.py -o encoder.onnx [--size bert-base] [--prenorm]`.

input_ids, attention_mask (1: attend, 0: padding), token_type_ids, all [batch, sequence] int64
-> last_hidden_state [batch, sequence, width], pooler_output [batch, width], both float32; with
`--classes`, logits [batch, classes] of the pooler's output alone. At most `context` tokens a
sequence. `encoder.onnx` beside this file is what the defaults write.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from common import Net, write

EPSILON = 1e-12


@dataclass(frozen=True)
class Config:
    layers: int = 2
    heads: int = 2
    width: int = 32
    vocab: int = 256
    context: int = 128
    types: int = 2
    prenorm: bool = False  # LayerNorm before each sublayer and after the last, not after each
    classes: int = 0  # of a classifier, for fine-tuning


SIZES = {"tiny": Config(), "bert-base": Config(12, 12, 768, 30522, 512)}


def attention(net: Net, x: ir.Value, mask: ir.Value, c: Config) -> ir.Value:
    """softmax(q k^T / sqrt(head) + mask) v in each head: x [B, T, width] -> [B, T, width]."""
    head = c.width // c.heads

    def project(name: str, perm: list[int]) -> ir.Value:
        y = net.linear(name, x, c.width, c.width, 0.02)
        return net.Transpose(net.Reshape(y, [0, 0, c.heads, head]), perm=perm)

    q = project("query", [0, 2, 1, 3])  # [B, heads, T, head]
    k = project("key", [0, 2, 3, 1])  # [B, heads, head, T]
    v = project("value", [0, 2, 1, 3])
    scores = net.Add(net.Mul(net.MatMul(q, k), 1 / math.sqrt(head)), mask)
    y = net.Transpose(net.MatMul(net.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
    return net.linear("output", net.Reshape(y, [0, 0, c.width]), c.width, c.width, 0.02)


def mlp(net: Net, x: ir.Value, c: Config) -> ir.Value:
    h = net.Gelu(net.linear("up", x, c.width, 4 * c.width, 0.02))
    return net.linear("down", h, 4 * c.width, c.width, 0.02)


def embeddings(net: Net, ids: ir.Value, types: ir.Value, c: Config) -> ir.Value:
    """The sum of word, token type and position embeddings, [B, T, width]."""
    length = net.Squeeze(net.Shape(ids, start=1, end=2), [0])
    word = net.Gather(net.normal("word.weight", (c.vocab, c.width), 0.02), ids)
    kind = net.Gather(net.normal("token_type.weight", (c.types, c.width), 0.02), types)
    positions = net.normal("position.weight", (c.context, c.width), 0.02)
    position = net.Gather(positions, net.Range(0, length, 1))
    return net.Add(net.Add(word, kind), position)


def padding_mask(net: Net, mask: ir.Value) -> ir.Value:
    """[B, 1, 1, T] float32 for a mask [B, T]: 0 where it is 1, the lowest float where it is 0."""
    keep = net.Cast(net.Unsqueeze(mask, [1, 2]), to=ir.DataType.FLOAT)
    return net.Mul(net.Sub(1.0, keep), float(np.finfo(np.float32).min))


def residual(
    net: Net, name: str, x: ir.Value, sublayer: Callable[[ir.Value], ir.Value], c: Config
) -> ir.Value:
    """x + sublayer(norm(x)) if prenorm, else norm(x + sublayer(x))."""
    h = net.layer_norm(f"{name}_norm", x, c.width, EPSILON) if c.prenorm else x
    with net.scope(name):
        h = sublayer(h)
    x = net.Add(x, h)
    return x if c.prenorm else net.layer_norm(f"{name}_norm", x, c.width, EPSILON)


def build(c: Config, seed: int = 0) -> ir.Model:
    if c.heads < 1 or c.width % c.heads:
        raise ValueError(f"width {c.width} is not a multiple of heads {c.heads}")
    net = Net("encoder", seed)
    ids, attention_mask, types = (
        net.input(name, ir.DataType.INT64, ["batch", "sequence"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    )
    with net.scope("embeddings"):
        x = embeddings(net, ids, types, c)
        if not c.prenorm:
            x = net.layer_norm("norm", x, c.width, EPSILON)
    with net.scope("mask"):
        mask = padding_mask(net, attention_mask)
    for layer in range(c.layers):
        with net.scope(f"layers.{layer}"):
            x = residual(net, "attn", x, lambda h: attention(net, h, mask, c), c)
            x = residual(net, "mlp", x, lambda h: mlp(net, h, c), c)
    if c.prenorm:
        x = net.layer_norm("norm", x, c.width, EPSILON)
    with net.scope("pooler"):
        pooled = net.Tanh(net.gemm("dense", net.Gather(x, 0, axis=1), c.width, c.width, 0.02))
    if c.classes:
        logits = net.gemm("classifier", pooled, c.width, c.classes, 0.02)
        net.output(logits, "logits", ["batch", c.classes])
        return net.model()
    net.output(x, "last_hidden_state", ["batch", "sequence", c.width])
    net.output(pooled, "pooler_output", ["batch", c.width])
    return net.model()


if __name__ == "__main__":
    write(build, SIZES)
