"""llama.py's decoder with a cache: `python models/llama_cache.py -o llama.onnx [--size llama-1b]`.

It is what onnxruntime-genai exports: GroupQueryAttention, which rotates and appends, and
SkipSimplifiedLayerNormalization; float16 but for the logits, with MatMulNBits for `--bits 4`.

input_ids [batch, sequence] and attention_mask [batch, total] int64, which is 1 for each token so
far, past_key_values.L.key and .value [batch, kv_heads, past, head] of each layer L
-> logits [batch, sequence, vocab] float32, present.L.key and present.L.value.

A past that is longer than the tokens so far is a cache with room: present has its length, and may
be bound to its address.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import llama
import numpy as np
import onnx_ir as ir
from common import Net, write

MICROSOFT = "com.microsoft"
BLOCK = 32  # 4-bit weights that share a scale


@dataclass(frozen=True)
class Config(llama.Config):
    context: int = 512  # positions of the rotary tables
    bits: int = 16  # of the layers' weights: 16 or 4
    last: bool = False  # logits of the last token only
    cache: str = "float16"  # or int8, float8e4m3fn: then each channel has a scale


SIZES = {
    "tiny": Config(),
    "llama-1b": Config(16, 32, 8, 2048, 8192, 128256, 500000, 4096),
    "llama-1b-4bits": Config(16, 32, 8, 2048, 8192, 128256, 500000, 4096, 4),
}


def product(net: Net, name: str, x: ir.Value, n_in: int, n_out: int, bits: int) -> ir.Value:
    """x [..., n_in] @ weight, of 4 bits [n_out, blocks, BLOCK / 2] or float16 [n_in, n_out]."""
    if bits == 16:
        return llama.product(net, name, x, n_in, n_out)
    with net.scope(name):
        packed = net.rng.integers(0, 256, (n_out, n_in // BLOCK, BLOCK // 2), np.uint8)
        weight = net.initializer("weight_4bits", packed)
        scales = net.full("scales", (n_out, n_in // BLOCK), 0.005)
        shape = {"K": n_in, "N": n_out, "bits": bits, "block_size": BLOCK}
        return net.op("MatMulNBits", x, weight, scales, domain=MICROSOFT, **shape)[0]


def skip_norm(net: Net, name: str, x: ir.Value, skip: ir.Value, width: int) -> Sequence[ir.Value]:
    """(RMSNorm(x + skip) * weight, x + skip)."""
    with net.scope(name):
        weight = net.full("weight", (width,), 1)
        operator = "SkipSimplifiedLayerNormalization"
        y, _, _, total = net.op(
            operator, x, skip, weight, outputs=4, domain=MICROSOFT, epsilon=1e-5
        )
        return y, total


def attention(
    net: Net, h: ir.Value, layer: int, lengths: Sequence[ir.Value], c: Config
) -> ir.Value:
    """Of h [batch, sequence, width] over the layer's cache, without the product behind it."""
    head, kv_width = c.width // c.heads, c.kv_heads * c.width // c.heads
    shape = ["batch", c.kv_heads, "past", head]
    kinds = ("key", "value")
    stored = ir.DataType[c.cache.upper()]
    pasts = [net.input(f"past_key_values.{layer}.{kind}", stored, shape) for kind in kinds]
    scales: list[ir.Value | None] = []
    more: dict[str, str | int] = {}
    if stored != ir.DataType.FLOAT16:
        each = np.full((1, c.kv_heads, 1, head), 0.02, np.float32)
        scales = [None, None, None, *(net.initializer(f"{kind}_scale", each) for kind in kinds)]
        more = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL",
                "kv_cache_bit_width": 8}  # fmt: skip
    widths = {"q": c.width, "k": kv_width, "v": kv_width}
    q, k, v = (product(net, name, h, c.width, n, c.bits) for name, n in widths.items())
    tables = [net.graph.initializers[f"rotary.{name}"] for name in ("cos", "sin")]
    y, *presents = net.op(
        "GroupQueryAttention", q, k, v, *pasts, *lengths, *tables, *scales, outputs=3,
        domain=MICROSOFT, num_heads=c.heads, kv_num_heads=c.kv_heads, do_rotary=1,
        scale=head**-0.5, **more,
    )  # fmt: skip
    for kind, present in zip(kinds, presents, strict=True):
        net.output(present, f"present.{layer}.{kind}", shape)
        present.dtype = stored
    return y


def build(c: Config, seed: int = 0) -> ir.Model:
    head = c.width // c.heads
    net = Net("llama_cache", seed, np.float16)
    ids = net.input("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    mask = net.input("attention_mask", ir.DataType.INT64, ["batch", "total"])
    with net.scope("rotary"):
        rates = float(c.base) ** (-np.arange(0, head, 2) / head)
        angles = np.arange(c.context)[:, None] * rates
        net.initializer("cos", np.cos(angles).astype(np.float16))
        net.initializer("sin", np.sin(angles).astype(np.float16))
    with net.scope("lengths"):
        last = net.Cast(net.Sub(net.ReduceSum(mask, [1], keepdims=0), 1), to=ir.DataType.INT32)
        total = net.Cast(net.Squeeze(net.Shape(mask, start=1, end=2), [0]), to=ir.DataType.INT32)
    with net.scope("tokens"):
        x = net.Gather(net.normal("weight", (c.vocab, c.width), 0.02), ids)
    with net.scope("blocks.0.attn_norm"):
        weight = net.full("weight", (c.width,), 1)
        h = net.SimplifiedLayerNormalization(x, weight, axis=-1, epsilon=1e-5)
    for layer in range(c.layers):
        with net.scope(f"blocks.{layer}"):
            with net.scope("attn"):
                y = attention(net, h, layer, (last, total), c)
                y = product(net, "o", y, c.width, c.width, c.bits)
            h, x = skip_norm(net, "mlp_norm", x, y, c.width)
            with net.scope("mlp"):
                gate = product(net, "gate", h, c.width, c.hidden, c.bits)
                up = product(net, "up", h, c.width, c.hidden, c.bits)
                y = net.Mul(net.Mul(gate, net.Sigmoid(gate)), up)
                y = product(net, "down", y, c.hidden, c.width, c.bits)
        after = f"blocks.{layer + 1}.attn_norm" if layer + 1 < c.layers else "norm"
        h, x = skip_norm(net, after, x, y, c.width)
    logits = net.Cast(llama.product(net, "head", h, c.width, c.vocab), to=ir.DataType.FLOAT)
    if c.last:
        logits = net.Slice(logits, [-1], [2**63 - 1], [1])
    net.output(logits, "logits", ["batch", 1 if c.last else "sequence", c.vocab])
    return net.model()


if __name__ == "__main__":
    write(build, SIZES)
