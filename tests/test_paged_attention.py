"""PagedAttention, whose only kernels in onnxruntime are CUDA's: against NumPy, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from fake_gpu import FakeGpu
from onnx import helper

from onnx_fuse import InferenceSession
from onnx_fuse.errors import ModelError

HEADS, KV_HEADS, HEAD, PAGE, PAGES = 4, 2, 16, 4, 12
Array = np.ndarray[Any, Any]


@dataclass
class Case:
    """New tokens and cached tokens of each sequence, and what the node has beside them."""

    new: tuple[int, ...]
    past: tuple[int, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    merged: bool = False
    dtype: type = np.float32


CASES = {
    "mixed": Case((1, 5, 0, 3), (6, 0, 2, 3)),
    "one token each": Case((1, 1, 1), (0, 7, 3)),
    "one sequence": Case((7,), (0,)),
    "no token": Case((0, 0), (3, 0)),
    "no sequence": Case((), ()),
    "rotary": Case((2, 3), (5, 0), {"do_rotary": 1}),
    "interleaved": Case((2, 3), (5, 0), {"do_rotary": 1, "rotary_interleaved": 1}, merged=True),
    "window": Case((4, 1), (5, 9), {"local_window_size": 3, "softcap": 2.0, "scale": 0.7}),
    "both ways": Case((4, 2), (3, 1), {"is_causal": 0}),
    "slots": Case((3, 2), (2, 5), extras=("slots",)),
    "sink and norms": Case((2, 4), (1, 0), {"do_rotary": 1}, ("sink", "norms")),
    "half": Case((1, 5), (6, 0), {"do_rotary": 1}, merged=True, dtype=np.float16),
}


def feeds_of(case: Case) -> dict[str, Array]:
    rng, tokens, batch = np.random.default_rng(0), sum(case.new), len(case.new)
    ends = np.array(case.past, int) + case.new
    table = np.full((batch, 4), -1, np.int32)
    free = list(rng.permutation(PAGES - 1))  # the last page belongs to nobody
    for b, end in enumerate(ends):
        for i in range(-(-int(end) // PAGE)):
            table[b, i] = free.pop()
    caches = rng.standard_normal((2, PAGES, PAGE, KV_HEADS, HEAD))
    used = np.zeros((PAGES, PAGE), bool)
    for b, past in enumerate(case.past):
        for at in range(past):
            used[table[b, at // PAGE], at % PAGE] = True
    caches[:, ~used] = np.nan  # what nobody wrote is never read
    feeds = {
        "q": rng.standard_normal((tokens, HEADS * HEAD)),
        "k": rng.standard_normal((tokens, KV_HEADS * HEAD)),
        "v": rng.standard_normal((tokens, KV_HEADS * HEAD)),
        "key_cache": caches[0], "value_cache": caches[1],
        "cos": rng.uniform(-1, 1, (16, HEAD // 2)), "sin": rng.uniform(-1, 1, (16, HEAD // 2)),
        "sink": rng.standard_normal(HEADS), "q_gain": rng.uniform(0.5, 2, HEAD),
        "k_gain": rng.uniform(0.5, 2, HEAD),
    }  # fmt: skip
    feeds = {name: x.astype(case.dtype) for name, x in feeds.items()}
    if case.merged:
        feeds["q"] = np.concatenate([feeds["q"], feeds.pop("k"), feeds.pop("v")], axis=1)
    feeds |= {
        "starts": np.cumsum([0, *case.new]).astype(np.int32),
        "past": np.array(case.past, np.int32),
        "table": table,
    }
    slots = [
        table[b, at // PAGE] * PAGE + at % PAGE
        for b, (past, new) in enumerate(zip(case.past, case.new, strict=True))
        for at in range(past, past + new)
    ]
    feeds["slots"] = np.array(slots, np.int32)
    if "slots" in case.extras:
        feeds["slots"][1] = -1  # this token's key and value are not kept
        at = case.past[0] + 1
        used_before = rng.standard_normal((2, KV_HEADS, HEAD)).astype(case.dtype)
        for name, row in zip(("key_cache", "value_cache"), used_before, strict=True):
            feeds[name][table[0, at // PAGE], at % PAGE] = row
    return feeds


INPUTS = ("q", "k", "v", "key_cache", "value_cache", "starts", "past", "table")


def model_of(case: Case, feeds: dict[str, Array]) -> onnx.ModelProto:
    optional = {"cos": case.attributes.get("do_rotary"), "sin": case.attributes.get("do_rotary"),
                "slots": "slots" in case.extras, "sink": "sink" in case.extras,
                "q_gain": "norms" in case.extras, "k_gain": "norms" in case.extras}  # fmt: skip
    names = [n if n in feeds else "" for n in INPUTS] + [
        n if u else "" for n, u in optional.items()
    ]
    for name in [n for n in feeds if n not in names]:
        del feeds[name]
    open_axes = {"q": ["T", None], "k": ["T", None], "v": ["T", None], "starts": ["S"],
                 "past": ["B"], "table": ["B", "P"], "slots": ["T"]}  # fmt: skip
    node = helper.make_node(
        "PagedAttention", names, ["y", "keys", "values"], domain="com.microsoft",
        num_heads=HEADS, kv_num_heads=KV_HEADS, **case.attributes,
    )  # fmt: skip

    def typed(name: str, like: Array, shape: list[Any]) -> onnx.ValueInfoProto:
        shape = [d if d is not None else s for d, s in zip(shape, like.shape, strict=True)]
        kind = helper.np_dtype_to_tensor_dtype(like.dtype)
        return helper.make_tensor_value_info(name, kind, shape)

    inputs = [typed(n, x, open_axes.get(n, list(x.shape))) for n, x in feeds.items()]
    kind = helper.np_dtype_to_tensor_dtype(feeds["q"].dtype)
    outputs = [
        helper.make_tensor_value_info("y", kind, ["T", HEADS * HEAD]),
        *(helper.make_tensor_value_info(n, kind, [PAGES, PAGE, KV_HEADS, HEAD])
          for n in ("keys", "values")),
    ]  # fmt: skip
    graph = helper.make_graph([node], "paged", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def turned(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """x [N, h] turned by the angles of cos and sin [h / 2]."""
    a, b = (x[:, ::2], x[:, 1::2]) if interleaved else np.split(x, 2, axis=1)
    left, right = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return np.stack([left, right], axis=2).reshape(x.shape)
    return np.concatenate([left, right], axis=1)


def reference(case: Case, feeds: dict[str, Array]) -> list[Array]:
    """Outputs in float64, token by token."""
    of = {n: x.astype(np.float64) if x.dtype.kind == "f" else x for n, x in feeds.items()}
    attr = case.attributes
    q, k, v = of["q"], of.get("k"), of.get("v")
    if k is None:
        q, k, v = np.split(q, [HEADS * HEAD, (HEADS + KV_HEADS) * HEAD], axis=1)
    q, k, v = (x.reshape(len(x), n, HEAD) for x, n in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS)))
    if "norms" in case.extras:
        q, k = (
            x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * of[gain]
            for x, gain in ((q, "q_gain"), (k, "k_gain"))
        )
    keys, values = of["key_cache"].copy(), of["value_cache"].copy()
    y, rows = np.zeros((len(q), HEADS, HEAD)), []
    for b, (past, new) in enumerate(zip(case.past, case.new, strict=True)):
        for i in range(new):
            t, at = int(of["starts"][b]) + i, past + i
            qt, kt = q[t], k[t]
            if attr.get("do_rotary"):
                pairs = bool(attr.get("rotary_interleaved"))
                qt, kt = (turned(x, of["cos"][at], of["sin"][at], pairs) for x in (qt, kt))
            slot = of["table"][b, at // PAGE] * PAGE + at % PAGE
            slot = int(of["slots"][t]) if "slots" in of else slot
            if slot >= 0:
                keys[slot // PAGE, slot % PAGE], values[slot // PAGE, slot % PAGE] = kt, v[t]
            rows.append((b, t, at, qt))
    for b, t, at, qt in rows:
        end = at + 1 if attr.get("is_causal", 1) else case.past[b] + case.new[b]
        first = max(0, at - attr["local_window_size"] + 1) if "local_window_size" in attr else 0
        pages, within = of["table"][b, np.arange(first, end) // PAGE], np.arange(first, end) % PAGE
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = keys[pages, within, kv] @ qt[head] * attr.get("scale", HEAD**-0.5)
            if cap := attr.get("softcap"):
                scores = np.tanh(scores / cap) * cap
            extra = [of["sink"][head]] if "sink" in case.extras else []
            p = np.exp(np.append(scores, extra) - scores.max())
            y[t, head] = (p / p.sum())[: len(scores)] @ values[pages, within, kv]
    return [y.reshape(len(q), HEADS * HEAD), keys, values]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_tokens_attend_to_their_own_pages(name: str, device: str, gpu: FakeGpu) -> None:
    case = CASES[name]
    feeds = feeds_of(case)
    session = InferenceSession(model_of(case, feeds), device=device)
    tolerance = 2e-3 if case.dtype == np.float16 else 2e-6  # roundings of the type, in one layer
    for got, want in zip(session.run(None, feeds), reference(case, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_an_unmapped_page_is_neither_read_nor_written() -> None:
    case = Case((1, 1), (2, 2))
    feeds = feeds_of(case)
    feeds["table"][0] = -1
    y, keys, _ = InferenceSession(model_of(case, feeds), device="cpu").run(None, feeds)
    assert not y[0].any()
    assert np.isfinite(y).all()
    changed = ~np.isclose(keys, feeds["key_cache"], equal_nan=True)
    assert changed.any(axis=(1, 2, 3)).sum() == 1  # the other sequence's page


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_in_a_sequence_stays_in_it(bad: float, device: str, gpu: FakeGpu) -> None:
    case = CASES["mixed"]
    feeds = feeds_of(case)
    clean = reference(case, feeds)[0]
    feeds["v"][3], feeds["k"][4] = bad, np.nan  # tokens of the second sequence
    y, *_ = InferenceSession(model_of(case, feeds), device=device).run(None, feeds)
    others = [0, *range(6, 9)]
    np.testing.assert_allclose(y[others], clean[others], rtol=2e-6, atol=2e-6)
    assert not np.isfinite(y[5]).any()


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("smooth", [0, 1])
@pytest.mark.parametrize("new", [(1, 2), (0, 0), ()])
def test_a_table_without_entries_has_no_keys(
    new: tuple[int, ...], smooth: int, optimize: bool
) -> None:
    case = Case(new, (0,) * len(new), {"smooth_softmax": smooth})
    feeds = feeds_of(case)
    feeds["table"] = feeds["table"][:, :0]
    session = InferenceSession(model_of(case, feeds), device="cpu", optimize=optimize)
    y, keys, _ = session.run(None, feeds)
    assert y.shape == (sum(new), HEADS * HEAD)
    assert not y.any()
    np.testing.assert_array_equal(keys, feeds["key_cache"])


def test_as_the_file_stands_a_body_replaces_the_kernel_that_the_cpu_lacks() -> None:
    case = CASES["mixed"]
    feeds = feeds_of(case)
    session = InferenceSession(model_of(case, feeds), device="cpu", optimize=False)
    y, *_ = session.run(["y"], feeds)
    np.testing.assert_allclose(y, reference(case, feeds)[0], rtol=2e-6, atol=2e-6)


def test_a_quantized_cache_is_refused_by_name() -> None:
    case = Case((1,), (2,), dtype=np.float16)
    feeds = feeds_of(case)
    model = model_of(case, feeds)
    model.graph.node[0].attribute.append(helper.make_attribute("k_quant_type", "PER_TENSOR"))
    with pytest.raises(
        ModelError, match=r"no kernel for PagedAttention, .* its cache is quantized"
    ):
        InferenceSession(model, device="cpu").run(None, feeds)
