"""A Llama style decoder: `python models/llama.py -o llama.onnx [--size llama-8x2048]`.

input_ids [batch, sequence] int64 -> logits [batch, sequence, vocab] float32.
"""

import math
from dataclasses import dataclass

import gpt
import onnx_ir as ir
from common import Net, write


@dataclass(frozen=True)
class Config:
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2  # key and value heads, each shared by heads / kv_heads of the queries'
    width: int = 64
    hidden: int = 96  # of the gated unit
    vocab: int = 256
    base: int = 10000  # of the rotary embedding's wave lengths


SIZES = {"tiny": Config(), "llama-8x2048": Config(8, 32, 4, 2048, 5632, 32000)}


def rms_norm(net: Net, name: str, x: ir.Value, width: int) -> ir.Value:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, as exporters write it."""
    with net.scope(name):
        weight = net.full("weight", (width,), 1)
        mean = net.ReduceMean(net.Mul(x, x), [-1], keepdims=1)
        return net.Mul(net.Div(x, net.Sqrt(net.Add(mean, 1e-5))), weight)


def product(net: Net, name: str, x: ir.Value, n_in: int, n_out: int) -> ir.Value:
    """x [..., n_in] @ weight [n_in, n_out], without a bias."""
    with net.scope(name):
        return net.MatMul(x, net.normal("weight", (n_in, n_out), 0.02))


def angles(net: Net, positions: ir.Value, head: int, c: Config) -> tuple[ir.Value, ir.Value]:
    """cos and sin [T, head] of the rotary embedding, the frequencies twice."""
    pairs = net.Cast(net.Range(0, head, 2), to=ir.DataType.FLOAT)
    rates = net.Exp(net.Mul(pairs, -math.log(c.base) / head))
    at = net.Mul(
        net.Unsqueeze(net.Cast(positions, to=ir.DataType.FLOAT), [1]),
        net.Concat(rates, rates, axis=0),
    )
    return net.Cos(at), net.Sin(at)


def rotated(net: Net, x: ir.Value, cos: ir.Value, sin: ir.Value, head: int) -> ir.Value:
    """x cos + (-x2, x1) sin for the halves x1, x2 of each head of x [B, heads, T, head]."""
    first = net.Slice(x, [0], [head // 2], [-1])
    second = net.Slice(x, [head // 2], [head], [-1])
    turned = net.Concat(net.Neg(second), first, axis=-1)
    return net.Add(net.Mul(x, cos), net.Mul(turned, sin))


def attention(
    net: Net, x: ir.Value, mask: ir.Value, cos: ir.Value, sin: ir.Value, c: Config
) -> ir.Value:
    """Causal attention of heads that share keys and values: x [B, T, width] -> [B, T, width]."""
    head, share = c.width // c.heads, c.heads // c.kv_heads

    def heads(name: str, count: int) -> ir.Value:
        y = net.Reshape(product(net, name, x, c.width, count * head), [0, 0, count, head])
        return net.Transpose(y, perm=[0, 2, 1, 3])

    def repeated(y: ir.Value) -> ir.Value:
        if share == 1:
            return y
        shape = net.Shape(y)
        ends = (net.Slice(shape, [0], [2], [0]), net.Slice(shape, [2], [4], [0]))
        wide = net.Expand(net.Unsqueeze(y, [2]), net.Concat(ends[0], [share], ends[1], axis=0))
        return net.Reshape(wide, [0, c.heads, -1, head])

    q = rotated(net, heads("q", c.heads), cos, sin, head)
    k = repeated(rotated(net, heads("k", c.kv_heads), cos, sin, head))
    v = repeated(heads("v", c.kv_heads))
    scores = net.Mul(net.MatMul(q, net.Transpose(k, perm=[0, 1, 3, 2])), 1 / math.sqrt(head))
    weights = net.Softmax(net.Add(scores, mask), axis=-1)
    y = net.Transpose(net.MatMul(weights, v), perm=[0, 2, 1, 3])
    return product(net, "o", net.Reshape(y, [0, 0, c.width]), c.width, c.width)


def mlp(net: Net, x: ir.Value, c: Config) -> ir.Value:
    gate = product(net, "gate", x, c.width, c.hidden)
    up = product(net, "up", x, c.width, c.hidden)
    return product(net, "down", net.Mul(net.Mul(gate, net.Sigmoid(gate)), up), c.hidden, c.width)


def build(c: Config, seed: int = 0) -> ir.Model:
    if c.heads < 1 or c.width % (2 * c.heads):
        raise ValueError(f"width {c.width} is not heads {c.heads} times an even number")
    if c.kv_heads < 1 or c.heads % c.kv_heads:
        raise ValueError(f"heads {c.heads} are not a multiple of kv_heads {c.kv_heads}")
    net = Net("llama", seed)
    ids = net.input("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    positions = net.Range(0, net.Squeeze(net.Shape(ids, start=1, end=2), [0]), 1)
    with net.scope("tokens"):
        x = net.Gather(net.normal("weight", (c.vocab, c.width), 0.02), ids)
    with net.scope("mask"):
        mask = gpt.causal_mask(net, positions)
    with net.scope("rotary"):
        cos, sin = angles(net, positions, c.width // c.heads, c)
    for layer in range(c.layers):
        with net.scope(f"blocks.{layer}"):
            h = rms_norm(net, "attn_norm", x, c.width)
            with net.scope("attn"):
                x = net.Add(x, attention(net, h, mask, cos, sin, c))
            h = rms_norm(net, "mlp_norm", x, c.width)
            with net.scope("mlp"):
                x = net.Add(x, mlp(net, h, c))
    x = rms_norm(net, "norm", x, c.width)
    net.output(product(net, "head", x, c.width, c.vocab), "logits", ["batch", "sequence", c.vocab])
    return net.model()


if __name__ == "__main__":
    write(build, SIZES)
