"""Attention over caches, as decoders have it: each sequence against onnxruntime's CPU."""

import numpy as np
import onnx_ir as ir
import pytest
from lowering import interpreted
from support import stock
from test_caches import (
    BATCHES,
    BUFFERED,
    DECODERS,
    EXPORTED,
    FIXED,
    GROWTH,
    HALF,
    QUANTIZED,
    ROOMY,
    ROTARY,
    TURNED_FLOAT8,
    Buffered,
    Decoder,
    Exported,
    Fixed,
    lengths_of,
    told,
)
from test_coded_caches import CODED, Coded

from onnx_fuse import InferenceSession
from onnx_fuse.autodiff.load import load
from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime import device, growing
from onnx_fuse.runtime.tensor import DeviceTensor

pytestmark = pytest.mark.gpu


CASES = [*DECODERS, *QUANTIZED, TURNED_FLOAT8, *HALF]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_sequence_is_the_one_of_onnxruntime(case: Decoder) -> None:
    model, rng = case.model(), np.random.default_rng(5)
    ours = InferenceSession(model, device="cuda")
    names = [end.name for end in ours.get_outputs()]
    count = 0
    for sizes in BATCHES:
        if (feed := case.feeds(*sizes, rng)) is None:
            continue
        if case is TURNED_FLOAT8:
            wanted = interpreted(load(model.clone()), feed)
        else:
            wanted = case.answers(feed)
        got, again = ours.run(None, feed), ours.run(None, feed)
        for name, y, z in zip(names, got, again, strict=True):
            x = wanted[name]
            assert x.shape == y.shape
            np.testing.assert_array_equal(y, z, err_msg=f"{name}, again")
            for b, end in enumerate(lengths_of(feed)):
                part = b if name == "y" else (b, slice(None), slice(end))
                np.testing.assert_allclose(
                    y[part], x[part], rtol=case.limit, atol=case.limit,
                    err_msg=f"{name} of sequence {b} of {sizes}, {told(feed)} tokens",
                )  # fmt: skip
        count += 1
    assert count >= 2


@pytest.mark.parametrize(
    "case", [*EXPORTED, *FIXED, *BUFFERED, *CODED[:5]], ids=lambda case: case.name
)
def test_a_cache_is_the_one_of_onnxruntime(case: Exported | Fixed | Buffered | Coded) -> None:
    model, rng = case.model(), np.random.default_rng(7)
    theirs, ours = stock(model, optimized=True), InferenceSession(model, device="cuda")
    for sizes in GROWTH:
        if sizes[1] > 1 and getattr(case, "operator", "").startswith("Decoder"):
            continue
        feeds = case.feeds(*sizes, rng)
        # onnxruntime 1.30 attends to what is behind the tokens of a buffer, and rounds quotients
        # of halves by another rule than 1.32
        if isinstance(case, Buffered | Coded):
            wanted = list(interpreted(load(model.clone()), feeds).values())
        else:
            wanted = theirs.run(None, feeds)
        for x, y in zip(wanted, ours.run(None, feeds), strict=True):
            limits = {"rtol": case.limit, "atol": case.limit}
            np.testing.assert_allclose(y, x, **limits, err_msg=str(sizes))


def on_gpu(array: np.ndarray) -> DeviceTensor:
    memory, stream = device.Memory(array.nbytes, "a cache"), device.Stream()
    stream.upload(memory.address, array.ctypes.data, array.nbytes)
    stream.wait("a cache")
    return DeviceTensor(memory.address, array.shape, array.dtype.name, 0, memory)


@pytest.mark.parametrize("case", FIXED, ids=lambda case: case.name)
def test_a_cache_of_a_fixed_size_is_filled_where_it_stands(case: Fixed) -> None:
    """Past and present are one place; the bits of other places stay."""
    model, rng = case.model(), np.random.default_rng(9)
    ours = InferenceSession(model, device="cuda")
    for sizes in ((1, 1, 3), (2, 2, 9), (3, 1, 14)):
        feeds = case.feeds(*sizes, rng)
        wanted = dict(
            zip((end.name for end in ours.get_outputs()), ours.run(None, feeds), strict=True)
        )
        binding, names = ours.io_binding(), []
        for name, array in feeds.items():
            if name.startswith("past_"):
                place = on_gpu(array)
                names.append(name.replace("past", "present"))
                binding.bind_ortvalue_input(name, place)
                binding.bind_ortvalue_output(names[-1], place)
            else:
                binding.bind_cpu_input(name, array)
        binding.bind_output("y")
        ours.run_with_iobinding(binding)
        for name, array in zip([*names, "y"], binding.copy_outputs_to_cpu(), strict=True):
            np.testing.assert_array_equal(array, wanted[name], err_msg=f"{name} {sizes}")


@pytest.mark.parametrize("row", ROOMY, ids=lambda row: row.name)
def test_a_cache_that_grows_stays_where_it_is(
    row: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Presents become pasts for as many tokens as outgrow the first room."""
    monkeypatch.setattr(growing, "MODEST", 0)
    model, rng = row.model(), np.random.default_rng(9)
    theirs, ours = stock(model, optimized=True), InferenceSession(model, device="cuda")
    names = [end.name for end in theirs.get_outputs()]
    binding, exact, rooms = ours.io_binding(), {}, set()
    pasts: dict[str, object] = {}
    for token in range(growing.LEAST + 6):
        feeds = row.feeds(3, 1, 0, rng)
        new = {name: array for name, array in feeds.items() if "past" not in name}
        exact = exact or {name: array for name, array in feeds.items() if "past" in name}
        y, *presents = theirs.run(names, new | exact)
        exact = dict(zip(exact, presents, strict=True))
        for name, array in (new if token else feeds).items():
            binding.bind_cpu_input(name, array)
        for name, past in pasts.items():
            binding.bind_ortvalue_input(name, past)
        for name in names:
            binding.bind_output(name, "cpu" if name == "y" else "cuda")
        ours.run_with_iobinding(binding)
        found, *presents = binding.get_outputs()
        np.testing.assert_allclose(found, y, rtol=4e-3, atol=4e-3, err_msg=f"token {token}")
        pasts = dict(zip(exact, presents, strict=True))
        rooms |= {id(getattr(value, "rooms", None)) for value in presents}
    assert len(rooms) == 3  # the first run's presents are apart
    for name, past in pasts.items():
        np.testing.assert_allclose(np.asarray(past), exact[name], rtol=2e-3, atol=2e-3)


@pytest.mark.launches("sdpa/wgmma_sm90.cu", "sdpa_wgmma")
@pytest.mark.parametrize("head", [16, 64, 128])
@pytest.mark.parametrize("attributes", ["", ", local_window_size = 70", ", softcap = 5.0"])
def test_prompts_see_the_tokens_of_their_sequence(head: int, attributes: str) -> None:
    """Sequences of other lengths, some shorter than the rows; what is behind them is no number."""
    model = text_model(
        '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
        f" prompt (float16[B,S,{8 * head}] q, float16[B,2,P,{head}] past_k,"
        f" float16[B,2,P,{head}] past_v, int32[B] l, int32 total) => (float16[B,S,{4 * head}] y,"
        f" float16[B,2,P,{head}] present_k, float16[B,2,P,{head}] present_v) {{"
        " y, present_k, present_v = com.microsoft.GroupQueryAttention"
        f" <num_heads = 4, kv_num_heads = 2 {attributes}> (q, , , past_k, past_v, l, total) }}"
    )
    proto, rng = ir.serde.serialize_model(model), np.random.default_rng(head)
    ours = InferenceSession(model, device="cuda")
    for batch, new, room in ((1, 5, 40), (2, 150, 400), (3, 70, 300), (1, 200, 200)):
        last = rng.integers(0, room, batch)
        feed = {"q": rng.standard_normal((batch, new, 8 * head)).astype(np.float16)}
        for name in ("past_k", "past_v"):
            feed[name] = rng.standard_normal((batch, 2, room, head)).astype(np.float16)
            for b, end in enumerate(last):
                feed[name][b, :, end + 1 :] = np.nan
        feed |= {"l": last.astype(np.int32), "total": np.array(room, np.int32)}
        wanted = interpreted(load(proto.SerializeToString()), feed)["y"]
        assert np.isfinite(wanted).all()
        got, again = (ours.run(["y"], feed)[0] for _ in range(2))
        np.testing.assert_array_equal(got, again)
        note = f"{batch} of {new} rows that end at {last}"
        np.testing.assert_allclose(got, wanted, rtol=4e-3, atol=4e-3, err_msg=note)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("scales", ["", "PER_TENSOR", "PER_CHANNEL"])
def test_a_cache_is_filled_where_it_stands(scales: str, batch: int) -> None:
    """Past and present are bound to one place, token by token, for sequences of other lengths."""
    row = Decoder("shared", ROTARY, "float16", cache="shared", told="vector", scales=scales)
    model, rng = row.model(), np.random.default_rng(6)
    theirs, ours = stock(model, optimized=True), InferenceSession(model, device="cuda")
    room = 12
    lengths = np.array([0, 3], np.int32)[-batch:]
    kept, count = np.int8 if scales else np.float16, 1 if scales == "PER_TENSOR" else 32
    caches = {f"past_{x}": np.zeros((batch, 2, room, 16), kept) for x in "kv"}
    steps = {f"{x}s": rng.uniform(0.01, 0.1, count).astype(np.float32) for x in "kv" if scales}
    binding = ours.io_binding()
    held = {name: on_gpu(array) for name, array in caches.items()}
    for _ in range(room - 3):
        feed = {"q": rng.standard_normal((batch, 1, 128)).astype(np.float16), "l": lengths,
                "total": np.array([lengths.max() + 1], np.int32), **steps}  # fmt: skip
        y, *presents = theirs.run(None, feed | caches)
        caches = dict(zip(caches, presents, strict=True))
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        for name, place in held.items():
            binding.bind_ortvalue_input(name, place)
            binding.bind_ortvalue_output(name.replace("past", "present"), place)
        binding.bind_output("y")
        ours.run_with_iobinding(binding)
        got = binding.copy_outputs_to_cpu()[-1]
        np.testing.assert_allclose(got, y, rtol=4e-3, atol=4e-3)
        lengths = lengths + 1
    for name, place in held.items():
        for b, end in enumerate(lengths):
            np.testing.assert_allclose(
                place.numpy()[b, :, :end], caches[name][b, :, :end], rtol=2e-3, atol=2e-3
            )


@pytest.mark.launches("sdpa/one_query.cu", "sdpa_one_query")
@pytest.mark.parametrize("steps", ["int8", "float8e4m3fn"])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("head", [8, 64, 128, 256])
def test_a_quantized_cache_is_read_as_it_is(head: int, kind: str, steps: str) -> None:
    """A token of 1 and of 5 sequences, and a prompt; the floats in it are what tests can feed."""
    floats = f"float[B,2,P,{head}]"
    model = text_model(
        '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
        f" token (float[B,S,{8 * head}] x, {floats} past_k, {floats} past_v, int32[B] l,"
        f" int32 total, float[1,2,1,{head}] ks, float[1,2,1,{head}] vs) => (float[B,S,{4 * head}]"
        f" y, {floats} present_k, {floats} present_v) {{"
        f" q = Cast <to = {10 if kind == 'float16' else 16}> (x)"
        f" k0 = Cast <to = {3 if steps == 'int8' else 17}> (past_k)"
        f" v0 = Cast <to = {3 if steps == 'int8' else 17}> (past_v)"
        " z, k1, v1 = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2,"
        ' k_quant_type = "PER_CHANNEL", v_quant_type = "PER_CHANNEL">'
        " (q, , , k0, v0, l, total, , , , , , ks, vs) y = Cast <to = 1> (z)"
        " present_k = Cast <to = 1> (k1) present_v = Cast <to = 1> (v1) }"
    )
    proto, rng = ir.serde.serialize_model(model), np.random.default_rng(head)
    ours = InferenceSession(model, device="cuda")
    for batch, new, room in ((1, 1, 700), (5, 1, 300), (1, 9, 40)):
        feed = {"x": rng.standard_normal((batch, new, 8 * head)).astype(np.float32)}
        for x in "kv":
            feed[f"past_{x}"] = rng.integers(-128, 128, (batch, 2, room, head)).astype(np.float32)
            feed[f"{x}s"] = (2.0 ** -rng.integers(5, 8, (1, 2, 1, head))).astype(np.float32)
        feed["l"] = rng.integers(new - 1, room, batch).astype(np.int32)
        feed["total"] = np.array(room, np.int32)
        wanted = interpreted(load(proto.SerializeToString()), feed)
        got, again = ours.run(None, feed), ours.run(None, feed)
        limit = 4e-3 if kind == "float16" else 3e-2
        for end, x, y in zip(ours.get_outputs(), got, again, strict=True):
            np.testing.assert_array_equal(x, y)
            for b, last in enumerate(feed["l"]):
                part = b if end.name == "y" else (b, slice(None), slice(last + 1))
                np.testing.assert_allclose(
                    x[part], wanted[end.name][part], rtol=limit, atol=limit, err_msg=end.name
                )
