"""Small decoders of random weights, in the forms that exporters write."""

from dataclasses import replace

import gpt_cache as gpt_cache
import llama_cache
import numpy as np
import onnx_ir as ir
from support import with_weights

from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model

VOCABULARY, WIDTH, HEADS, HEAD = 40, 16, 2, 8
WEIGHTS = {
    "wte": (VOCABULARY, WIDTH),
    "wpe": (64, WIDTH),
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "head": (WIDTH, VOCABULARY),
}
HEADER = '<ir_version: 10, opset_import: ["": 21]>'
IDS = "int64[batch,sequence] input_ids"
MASK = "int64[batch,total] attention_mask"
POSITIONS = "int64[batch,sequence] position_ids"
PAST = "float[batch,2,past,8] end0, float[batch,2,past,8] end1"
START = """
    tokens = Gather(wte, input_ids)
    zero = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    fresh = Shape<start = 1, end = 2>(input_ids)
    few = Squeeze(fresh)
"""
"""What every form begins with; `few` is the number of new tokens."""
BLOCK = """
    x = Add(tokens, places)
    qkv_of = MatMul(x, qkv)
    q0, k0, v0 = Split<axis = -1, num_outputs = 3>(qkv_of)
    parts = Constant<value = int64[4] {0, 0, 2, 8}>()
    q1 = Reshape(q0, parts)
    k1 = Reshape(k0, parts)
    v1 = Reshape(v0, parts)
    q = Transpose<perm = [0, 2, 1, 3]>(q1)
    k = Transpose<perm = [0, 2, 1, 3]>(k1)
    v = Transpose<perm = [0, 2, 1, 3]>(v1)
"""
ATTENTION = """
    row0 = Range(zero, all, one)
    row = Sub(row0, before)
    first = Range(zero, few, one)
    axis1 = Constant<value = int64[1] {1}>()
    column = Unsqueeze(first, axis1)
    seen = LessOrEqual(row, column)
    scores = MatMul(q, turned)
    low = Constant<value = float {-1e30}>()
    hidden = Where(allowed, scores, low)
    weights = Softmax<axis = -1>(hidden)
    y0 = MatMul(weights, values)
    y1 = Transpose<perm = [0, 2, 1, 3]>(y0)
    flat = Constant<value = int64[3] {0, 0, 16}>()
    y2 = Reshape(y1, flat)
    y3 = MatMul(y2, out)
    y = Add(x, y3)
    logits = MatMul(y, head)
"""
MASKED = """
    axes = Constant<value = int64[2] {1, 2}>()
    real0 = Cast<to = 9>(attention_mask)
    real = Unsqueeze(real0, axes)
    allowed = And(seen, real)
"""


def model_of(inputs: str, outputs: str, body: str, names: tuple[str, ...] = ()) -> ir.Model:
    """The graph with random weights; `names` are those of end0, end1, ... in the text."""
    kinds = ", ".join(f"float[{','.join(map(str, s))}] {n}" for n, s in WEIGHTS.items())
    text = f"{HEADER}\nagraph ({inputs}, {kinds}) => ({outputs}) {{\n{body}\n}}"
    rng = np.random.default_rng(7)
    draw = {n: 0.6 * rng.standard_normal(s).astype(np.float32) for n, s in WEIGHTS.items()}
    model = with_weights(text_model(text), draw)
    for value in (*model.graph.inputs, *model.graph.outputs):
        if (value.name or "").startswith("end"):
            value.name = names[int((value.name or "")[3:])]
    return model


NAMES = (
    "past_key_values.0.key", "past_key_values.0.value", "present.0.key", "present.0.value",
)  # fmt: skip


def growing(
    *, mask: bool = True, names: tuple[str, ...] = NAMES, positions: str = POSITIONS
) -> ir.Model:
    """Keys and values that grow by Concat, as optimum exports them."""
    inputs = [IDS, *([MASK] if mask else []), positions, PAST]
    outputs = "float[batch,sequence,40] logits, float[batch,2,T,8] end2, float[batch,2,T,8] end3"
    cache = """
        end2 = Concat<axis = 2>(end0, k)
        end3 = Concat<axis = 2>(end1, v)
        before1 = Shape<start = 2, end = 3>(end0)
        before = Squeeze(before1)
        all = Add(before, few)
        turned = Transpose<perm = [0, 1, 3, 2]>(end2)
        values = Identity(end3)
        places = Gather(wpe, position_ids)
    """.replace("position_ids", positions.split()[1])
    attention = ATTENTION.replace("hidden =", (MASKED if mask else "") + "hidden =")
    attention = attention if mask else attention.replace("allowed", "seen")
    body = START + cache.splitlines()[-2] + BLOCK + "\n".join(cache.splitlines()[:-2]) + attention
    return model_of(", ".join(inputs), outputs, body, names)


def whole(*, mask: bool = True, ids: str = IDS) -> ir.Model:
    """No cache: every run takes all tokens."""
    body = """
        range = Range(zero, few, one)
        places = Gather(wpe, range)
    """ + BLOCK + """
        all = Identity(few)
        before = Identity(zero)
        turned = Transpose<perm = [0, 1, 3, 2]>(k)
        values = Identity(v)
    """  # fmt: skip
    attention = ATTENTION.replace("hidden =", (MASKED if mask else "") + "hidden =")
    attention = attention if mask else attention.replace("allowed", "seen")
    inputs = ", ".join([ids, *([MASK.replace("total", "sequence")] if mask else [])])
    return model_of(inputs, "float[batch,S,40] logits", START + body + attention)


def slotted(layers: int = 2) -> ir.Model:
    """GroupQueryAttention over a cache with room, in float16."""
    return llama_cache.build(replace(llama_cache.SIZES["tiny"], layers=layers))


def bytes_of(model: ir.Model) -> bytes:
    return to_proto(model).SerializeToString()
