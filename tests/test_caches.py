"""Decoders as onnxruntime-genai writes them: GroupQueryAttention over a cache, without an option.

The lengths that the node is told follow from its caches: a growing cache holds past + new tokens,
a shared buffer is at least as long as the tokens after the call.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir
import pytest

from onnx_fuse import bench
from onnx_fuse.importer.save import inline
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.session import load
from onnx_fuse.validation.check import check_outputs
from onnx_fuse.validation.gradients import check_gradients
from onnx_fuse.validation.inputs import Feeds, generate


@dataclass(frozen=True)
class Decoder:
    """One layer of attention: 4 heads of 16 over 2 of keys and values.

    `told` is how the node learns lengths: by inputs of their own, or from an attention mask.
    """

    name: str
    attributes: str = ""
    kind: str = "float"
    packed: bool = True
    cache: str = "growing"  # shared, none
    told: str = "mask"  # vector, scalar

    def model(self) -> onnx_ir.Model:
        kind, inputs = self.kind, [f"{self.kind}[B,S,{128 if self.packed else 64}] q"]
        inputs += [] if self.packed else [f"{kind}[B,S,32] {x}" for x in "kv"]
        caches = [] if self.cache == "none" else ["past_k", "past_v"]
        inputs += [f"{kind}[B,2,P,16] {x}" for x in caches]
        body = ""
        if self.told == "mask":
            inputs.append("int64[B,T] attention_mask")
            body = (
                "axis = Constant <value_ints = [1]> ()  one = Constant <value_int = 1> ()"
                " n = ReduceSum (attention_mask, axis)  m = Sub (n, axis)  l = Cast <to = 6> (m)"
                " shape = Shape (attention_mask)  t = Gather (shape, one)"
                " total = Cast <to = 6> (t) "
            )
        else:
            inputs += ["int32[B] l", f"int32{'[1]' if self.told == 'vector' else ''} total"]
        rotary = "do_rotary = 1" in self.attributes
        size = "P" if self.cache == "shared" else "T"
        operands = ["q", *(("", "") if self.packed else "kv"), *(caches or ("", "")), "l", "total"]
        operands += ["cos", "sin"] if rotary else []
        numbers = np.random.default_rng(0).standard_normal(40 * 8).round(3)
        tables = [f"{kind}[40,8] {x} = {{{', '.join(map(str, numbers))}}}" for x in operands[7:]]
        text = (
            f'<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
            f" decoder ({', '.join(inputs)}) => ({kind}[B,S,64] y, {kind}[B,2,{size},16] present_k,"
            f" {kind}[B,2,{size},16] present_v)"
            f" {'<' + ', '.join(tables) + '>' if tables else ''} {{ {body}"
            " y, present_k, present_v = com.microsoft.GroupQueryAttention"
            f" <num_heads = 4, kv_num_heads = 2 {self.attributes}> ({', '.join(operands)}) }}"
        )
        return text_model(text)


ROTARY, WINDOW = ", do_rotary = 1", ", local_window_size = 3"
DECODERS = [
    Decoder("packed", ROTARY),
    Decoder("in pairs", ROTARY + ", rotary_interleaved = 1", packed=False),
    Decoder("without rotary", packed=False),
    Decoder("window", ROTARY + WINDOW),
    Decoder("softcap", ROTARY + ", softcap = 5.0, scale = 0.3"),
    Decoder("smooth", ROTARY + ", smooth_softmax = 1"),
    Decoder("shared buffer", ROTARY, cache="shared"),
    Decoder("shared buffer, all", ROTARY + WINDOW + ", softcap = 5.0, smooth_softmax = 1",
            packed=False, cache="shared"),
    Decoder("prompt", ROTARY, cache="none"),
    Decoder("float16", kind="float16", cache="shared"),
    Decoder("lengths given", ROTARY, told="vector"),
    Decoder("lengths given, a scalar", ROTARY + WINDOW, packed=False, told="scalar"),
    Decoder("lengths given, shared buffer", ROTARY, cache="shared", told="vector"),
    Decoder("lengths given, prompt", cache="none", told="scalar"),
]  # fmt: skip


@pytest.mark.parametrize("row", DECODERS, ids=lambda d: d.name)
def test_the_lengths_follow_from_the_caches(row: Decoder) -> None:
    """Generated inputs, onnxruntime's kernel against the body, the program of a GPU, gradients."""
    model = load(row.model())
    check = check_outputs(model, inline(model))
    assert check.ok, check.worst
    assert not any("refused" in note for note in check.notes)
    seen = set()
    for feed, _ in generate(model, lambda f: [np.ones(1)]):
        batch, new = feed["q"].shape[:2]
        past = feed["past_k"].shape[2] if "past_k" in feed else 0
        total = told(feed)
        assert total <= past if row.cache == "shared" else total == past + new
        assert row.cache == "none" or batch == 1 or new == 1  # onnxruntime takes no other
        seen.add((batch > 1, new > 1))
    assert row.cache == "none" or seen == {(True, False), (False, True)}
    assert bench.program(model, CHIPS["H200"]).calls
    assert row.kind == "float16" or check_gradients(model).ok


def told(feed: Feeds) -> int:
    """The number of tokens after the call; each sequence ends before it."""
    if "attention_mask" in feed:
        return feed["attention_mask"].shape[1]
    total = int(feed["total"].item())
    assert feed["l"].max() == total - 1
    assert feed["l"].min() >= 0
    return total
