"""Sessions without padding: packed against padded, and graphs whose padding is read."""

import warnings
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cases import real_cases
from fake_gpu import FakeGpu
from lowering import interpreted, program_of
from support import step_results, table, with_weights

from onnx_fuse import InferenceSession, Trainer, deploy, optim, rewrite, session
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.importer import contrib
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.packing import Packing
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.rewrite.padding import NotPacked, pack
from onnx_fuse.runtime import ort
from onnx_fuse.runtime.deployed import Deployed
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.tensor import DeviceTensor
from onnx_fuse.runtime.zero_copy import over_bus
from onnx_fuse.training import backends, tokens
from onnx_fuse.training.step import training_model

ENCODER = Path(__file__).parents[1] / "models" / "encoder.onnx"
NAMES = (
    "bert__ts13", "bert_mlm__ts17", "gpt2__ts17", "gpt2__dynamo23", "llama__dynamo23",
    "t5_encoder__ts17",
)  # fmt: skip
MODELS = {"encoder": ENCODER} | {c.name: c.path for c in real_cases() if c.name in NAMES}
BATCHES = {
    "mixed": ((3, 7, 1, 5), 7), "ones": ((1, 1), 4), "full": ((6, 6), 6), "one": ((4,), 9),
    "of one": ((1,), 1),
}  # fmt: skip
"""(the lengths of sequences, S)"""
LEFT = "the padding before the tokens"

LAYER = """
    <ir_version: 10, opset_import: ["" : 23]>
    g (float[B,S,8] x, int64[B,S] m, float[8,8] w, float[8,4] u) => (float[B,4] y) {
        keep = Cast <to = 9> (m)
        at = Constant <value_ints = [1, 2]> ()
        %s
        head = Constant <value_ints = [0, 0, 2, 4]> ()
        p = MatMul (x, w)
        r = Reshape (p, head)
        h = Transpose <perm = [0, 2, 1, 3]> (r)
        a = Attention (h, h, h, k)
        t = Transpose <perm = [0, 2, 1, 3]> (a)
        flat = Constant <value_ints = [0, 0, 8]> ()
        z = Reshape (t, flat)
        s = Add (z, x)
        n = Tanh (s)
        zero = Constant <value_int = 0> ()
        %s
        y = MatMul (c, u)
    }"""
MASK = """own = Unsqueeze (keep, at) b = Shape <end = 1> (m) l = Shape <start = 1> (m)
        single = Constant <value_ints = [1]> () to = Concat <axis = 0> (b, single, l, l)
        k = Expand (own, to)"""
FIRST = "c = Gather <axis = 1> (n, zero)"
BESIDE = """e = Constant <value_ints = [4]> () sizes = Shape (m)
        whole = Concat <axis = 0> (sizes, e) o = ConstantOfShape (whole)
        n12 = Concat <axis = 2> (n, o) f = Constant <value_ints = [12]> ()
        ax = Constant <value_ints = [2]> () n8 = Slice (n12, e, f, ax)
        c = Gather <axis = 1> (n8, zero)"""


def layer(end: str = FIRST, mask: str = MASK) -> ir.Model:
    """One attention over rows that are inputs, how its mask is made, and what reads its result."""
    rng = np.random.default_rng(3)
    weights = {"w": rng.standard_normal((8, 8)), "u": rng.standard_normal((8, 4))}
    model = text_model(LAYER % (mask, end))
    return with_weights(model, {n: w.astype(np.float32) for n, w in weights.items()})


def optimized(model: ir.Model) -> ir.Model:
    rewrite.optimize(model, own_kernels=True)
    return model


@cache
def stored(name: str) -> tuple[ir.Model, ir.Model]:
    """A stored model, optimized, and packed."""
    model = optimized(session.load(MODELS[name]))
    return model, pack(model, zero=True)


def batch(
    packing: Packing, model: ir.Model, lengths: Sequence[int], size: int, left: bool = False
) -> dict[str, np.ndarray]:
    """Feeds with so many tokens a sequence; where there are floats, of NaN at the padding."""
    there = np.arange(size) < np.array(lengths)[:, None]
    there = there[:, ::-1] if left else there
    rng = np.random.default_rng(len(lengths))
    feeds = {packing.mask: there.astype(np.int64)}
    for value in model.graph.inputs:
        if value.name in packing.inputs and value.dtype == ir.DataType.FLOAT:
            rows = rng.standard_normal((*there.shape, value.shape[2])).astype(np.float32)
            feeds[value.name] = rows
        elif value.name in packing.inputs:
            most = 2 if "type" in value.name else 30
            feeds[value.name] = rng.integers(0, most, there.shape)
    return feeds


def packed_feeds(packing: Packing, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    more = packing.feeds(feeds[packing.mask], {n: a.shape for n, a in feeds.items()})
    assert not isinstance(more, str), more
    return feeds | more


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_have_the_rows_that_they_have_among_padding(name: str, left: bool) -> None:
    padded, packed = stored(name)
    packing = Packing.of(packed)
    whole, part = ort.session(padded), ort.session(packed)
    for lengths, size in BATCHES.values():
        feeds = batch(packing, padded, lengths, size, left=left and not packing.picked)
        there = feeds[packing.mask] != 0
        found = part.run(None, packed_feeds(packing, feeds))
        for got, want in zip(found, whole.run(None, feeds), strict=True):
            if got.ndim == 3:
                assert not got[~there].any()
                want = np.where(there[..., None], want, 0)
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_a_small_batch_is_read_in_the_memory_of_the_host() -> None:
    """Each input by one launch: ids, types and positions by the same, the mask by none."""
    _, packed = stored("encoder")
    packing = Packing.of(packed)
    feeds = packed_feeds(packing, batch(packing, packed, *BATCHES["mixed"]))
    program = program_of(packed, {v.name: feeds[v.name] for v in packed.graph.inputs})
    readers = {n: [c for c in program.calls if t.buffer in c.buffers] for n, t in program.inputs}
    once = (packing.rows, packing.offsets, packing.chosen, *packing.inputs)
    assert all(len(readers[name]) == 1 for name in once)
    assert all(over_bus(program, t, alone=True) for name, t in program.inputs if name in once)


def test_the_program_of_a_gpu_gives_the_same() -> None:
    _, packed = stored("encoder")
    packing = Packing.of(packed)
    feeds = packed_feeds(packing, batch(packing, packed, *BATCHES["mixed"]))
    found = interpreted(packed, {v.name: feeds[v.name] for v in packed.graph.inputs})
    for value, want in zip(packed.graph.outputs, ort.session(packed).run(None, feeds), strict=True):
        np.testing.assert_allclose(found[value.name], want, rtol=0, atol=1e-5)


JOINED = """f = Concat <axis = 2> (n, s) first, second = Split <axis = 2, num_outputs = 2> (f)
        q = Mul (first, second) c = Gather <axis = 1> (q, zero)"""

SOME = """some = Constant <value_ints = [1, 0, -5]> () one = Constant <value_ints = [1]> ()
        few = Gather <axis = 1> (n, some) sum = ReduceMean <keepdims = 0> (few, one)
        first = Gather <axis = 1> (n, zero) c = Sub (sum, first)"""


@pytest.mark.parametrize("hostile", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "end", [FIRST, BESIDE, JOINED, SOME], ids=["first", "beside", "joined", "some"]
)
def test_what_stands_at_the_padding_reaches_nothing(hostile: float, end: str) -> None:
    padded = optimized(layer(end))
    packed = pack(padded)
    packing = Packing.of(packed)
    feeds = batch(packing, padded, (3, 2, 5), 5)
    (want,) = ort.session(padded).run(None, feeds)
    x = np.where(feeds["m"][..., None] != 0, feeds["x"], np.float32(hostile))
    (found,) = ort.session(packed).run(None, packed_feeds(packing, feeds | {"x": x}))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("hostile", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_sequence(hostile: float) -> None:
    padded = optimized(layer())
    packed = pack(padded)
    packing = Packing.of(packed)
    feeds = batch(packing, padded, (3, 2, 5, 1), 5)
    (want,) = ort.session(padded).run(None, feeds)
    x = feeds["x"].copy()
    x[1, 1, ::2] = hostile
    (found,) = ort.session(packed).run(None, packed_feeds(packing, feeds | {"x": x}))
    others = [0, 2, 3]
    np.testing.assert_allclose(found[others], want[others], rtol=0, atol=1e-6)
    assert np.isnan(found[1]).all()


# why the padding is read; what stands behind the attention's layer
REFUSED = table(globals())("""
an_output: "has a row for each token, at the padding too"
  c = Identity (n)
a_sum: "(ReduceSum) may read rows of padding"
  one = Constant <value_ints = [1]> () c = ReduceSum <keepdims = 0> (n, one)
a_shift: "(Slice) may read rows of padding"
  from = Constant <value_ints = [1]> () end = Constant <value_ints = [9]> ()
  f = Slice (n, from, end, single) c = Gather <axis = 1> (f, zero)
a_number: "(Gather) may read rows of padding"
  i = ReduceMax <keepdims = 0> (m) j = Abs (i) c = Gather <axis = 1> (n, j)
""")


@pytest.mark.parametrize("name", REFUSED)
def test_padding_that_is_read_is_refused(name: str) -> None:
    end, reason = REFUSED[name]
    model = layer(end)
    if name == "an_output":
        model.graph.outputs[0].shape = ir.Shape(["B", "S", 4])
    with pytest.raises(NotPacked, match=reason.replace("(", r"\(").replace(")", r"\)")):
        pack(optimized(model))


WINDOW = """own = Unsqueeze (keep, at) l0 = Shape <start = 1> (m)
  no = Constant <value_ints = [0]> () l = Squeeze (l0, no)
  nil = Constant <value_int = 0> () each = Constant <value_int = 1> ()
  i = Range (nil, l, each) ax = Constant <value_ints = [1]> () j = Unsqueeze (i, ax)
  d0 = Sub (i, j) d = Abs (d0)"""
# why a mask does not serve, nothing where it does; how it is made
MASKS = table(globals())("""
plain: ""
  k = Unsqueeze (keep, at)
causal: ""
  own = Unsqueeze (keep, at) l = Shape <start = 1> (m) q = Concat <axis = 0> (l, l)
  o = ConstantOfShape <value = int64[1] {1}> (q) lower = Trilu <upper = 0> (o)
  past = Cast <to = 9> (lower) k = And (own, past)
of_queries: "hides other keys"
  far = Constant <value_ints = [1, 3]> () k = Unsqueeze (keep, far)
of_both: "hides other keys"
  far = Constant <value_ints = [1, 3]> () keys = Unsqueeze (keep, at)
  rows = Unsqueeze (keep, far) k = And (keys, rows)
turned: "hides other keys"
  n0 = Not (keep) k = Unsqueeze (n0, at)
a_window: "hides other keys"
  WINDOW most = Constant <value_int = 9> () near = LessOrEqual (d, most) k = And (own, near)
a_window_in_floats: "hides other keys"
  WINDOW df = Cast <to = 1> (d)
  most = Constant <value_float = 40.0> () near = LessOrEqual (df, most) k = And (own, near)
a_window_of_blocks: "hides other keys"
  WINDOW ten = Constant <value_int = 10> () blocks = Div (d, ten)
  most = Constant <value_int = 3> () near = LessOrEqual (blocks, most) k = And (own, near)
a_long_window: "hides other keys"
  WINDOW most = Constant <value_int = 4000> () near = LessOrEqual (d, most) k = And (own, near)
distances: ""
  WINDOW own1 = Cast <to = 1> (own) one = Constant <value_float = 1.0> () h0 = Sub (own1, one)
  low = Constant <value_float = 30000.0> () h1 = Mul (h0, low) df = Cast <to = 1> (d)
  slope = Constant <value_float = -0.25> () far = Mul (df, slope) k = Add (far, h1)
distances_chosen: ""
  WINDOW df = Cast <to = 1> (d) slope = Constant <value_float = -0.5> () far = Mul (df, slope)
  low = Constant <value_float = -65504.0> () k = Where (own, far, low)
distances_of_tokens: "hides other keys"
  WINDOW own1 = Cast <to = 1> (own) one = Constant <value_float = 1.0> () h0 = Sub (own1, one)
  low = Constant <value_float = 3.0> () h1 = Mul (h0, low) df = Cast <to = 1> (d)
  slope = Constant <value_float = -0.25> () far = Mul (df, slope) k = Add (far, h1)
distances_and_causal: "no kernel of ours has its mask"
  WINDOW q = Concat <axis = 0> (l0, l0) o = ConstantOfShape <value = int64[1] {1}> (q)
  lower = Trilu <upper = 0> (o) past = Cast <to = 9> (lower) both = And (own, past)
  df = Cast <to = 1> (d) slope = Constant <value_float = -0.5> () far = Mul (df, slope)
  low = Constant <value_float = -65504.0> () k = Where (both, far, low)
summed: "its mask is made by CumSum"
  o1 = Constant <value_int = 1> () s0 = CumSum (m, o1) b0 = Cast <to = 9> (s0)
  k = Unsqueeze (b0, at)
""")


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_must_hide_padding_and_nothing_else(name: str) -> None:
    mask, reason = MASKS[name]
    model = optimized(layer(mask=mask.replace("WINDOW", WINDOW)))
    if reason:
        with pytest.raises(NotPacked, match=reason):
            pack(model)
        return
    packed = pack(model)
    assert any("Causal" in n.op_type for n in packed.graph) == (name == "causal")


@pytest.mark.parametrize(
    ("mask", "shape", "reason"),
    [
        ([[1, 1], [0, 0]], (2, 2), "a sequence has no token"),
        ([[1, 2]], (1, 2), "other numbers than 0 and 1"),
        ([[0, 1]], (1, 2), "a row that is read is padding"),
        ([[1, 1]], (1, 3), "other sizes than the mask"),
        (np.ones((1, 5000)), (1, 5000), "its sequences are longer than 4096"),
        (np.ones((0, 4)), (0, 4), "its mask has shape"),
        (np.ones((2, 0)), (2, 0), "its mask has shape"),
    ],
)
def test_a_batch_that_cannot_be_packed_says_why(mask, shape, reason) -> None:
    packing = Packing("m", "r", "p", "o", ("x",), (0,))
    assert reason in packing.feeds(np.array(mask), {"x": shape})


def test_few_sizes_of_tokens_serve_all_batches() -> None:
    packing, found = Packing("m", "r", "p", "o", ()), set()
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(1, 129, 32)
        mask = np.arange(128) < lengths[:, None]
        feeds = packing.feeds(mask, {})
        rows, offsets = feeds["r"], feeds["o"]
        assert offsets[-1] == mask.sum() <= rows.shape[1] < mask.sum() + 128
        assert mask.ravel()[rows[0]].all()
        found.add(rows.shape[1])
    assert len(found) < 16


def test_a_session_packs_what_it_can(gpu: FakeGpu) -> None:
    rows = layer("c = Identity (n)")
    rows.graph.outputs[0].shape = ir.Shape(["B", "S", 4])
    plain = InferenceSession(to_proto(rows), device="cuda")
    packed = InferenceSession(to_proto(rows), device="cuda", pack="zero")
    ends = [[v.name for v in s.get_inputs()] for s in (plain, packed)]
    assert ends[0] == ends[1]
    x = np.random.default_rng(1).standard_normal((2, 6, 8)).astype(np.float32)
    mask = (np.arange(6) < np.array([[2], [5]])).astype(np.int64)
    for there in (mask, np.ones_like(mask), mask, mask):
        (want,) = plain.run(None, {"x": x, "m": there})
        (found,) = packed.run(None, {"x": x, "m": there})
        np.testing.assert_allclose(found, want * there[..., None], rtol=0, atol=1e-5)
    assert "padding is packed: 7 rows for 2 x 6" in packed.explain({"x": x, "m": mask})
    empty = {"x": x, "m": mask * [[1], [0]]}
    with pytest.warns(
        UserWarning, match="runs with its padding \\(said once\\): a sequence has no"
    ):
        (found,) = packed.run(None, empty)
    np.testing.assert_array_equal(found, plain.run(None, empty)[0])
    assert "packed" not in packed.explain(empty)
    with pytest.raises(UsageError, match="takes no adapters"):
        packed.add_adapter("a", "a.safetensors")


@pytest.mark.usefixtures("no_compiler")
def test_a_compiled_file_packs_what_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a program for each number of tokens; what these compute, by NumPy."""
    rows = layer("c = Identity (n)")
    rows.graph.outputs[0].shape = ir.Shape(["B", "S", 4])
    model, path = to_proto(rows), tmp_path / "model.fused"
    padded = optimized(session.load(model))
    packed = pack(padded, zero=True)
    h200 = {"h": CHIPS["H200"]}
    deploy.compile(model, path, targets=h200, ranges={"B": (1, 3), "S": (1, 6)}, pack="zero")
    FakeGpu().use(monkeypatch)
    ran = []

    def run_by_numpy(executable: Executable, names: Any, feeds: Any) -> list[Any]:
        arrays = {name: executable.host_value(value) for name, value in feeds.items()}
        shapes = {name: (a.shape, a.dtype.name) for name, a in arrays.items()}
        assert {n: (t.shape, t.dtype) for n, t in executable.program(shapes).inputs} == shapes
        ran.append(Packing.of(packed).rows in arrays)
        found = interpreted(packed if ran[-1] else padded, arrays)
        return [found[name] for name in names]

    monkeypatch.setattr(Executable, "run", run_by_numpy)
    plain, file = (InferenceSession(path, device="cuda", pack=kind) for kind in (False, "zero"))
    assert [v.name for v in file.get_inputs()] == ["x", "m"]
    rng = np.random.default_rng(1)
    for lengths in ((1,), (6,), (2, 5), (6, 6, 6), (1, 1, 4), (3, 0)):
        x = rng.standard_normal((len(lengths), max(lengths), 8)).astype(np.float32)
        mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
        with warnings.catch_warnings(record=True):
            (found,) = file.run(None, {"x": x, "m": mask})
        assert ran.pop() == (min(lengths) > 0)
        (want,) = plain.run(None, {"x": x, "m": mask})
        assert not ran.pop()
        seen = mask[..., None] if min(lengths) else 1
        np.testing.assert_allclose(found, want * seen, rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match="compute the padding: compile it with --pack exact"):
        InferenceSession(path, device="cuda", pack=True)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("names", [("B", "tokens"), ("offsets", "S")])
def test_axes_may_be_called_tokens_or_offsets(tmp_path: Path, names: tuple[str, str]) -> None:
    model, path, ranges = layer("c = Identity (n)"), tmp_path / "model.fused", ((1, 2), (3, 4))
    for value, *more in ((model.graph.inputs[0], 8), (model.graph.inputs[1],)):
        value.shape = ir.Shape([*names, *more])
    model.graph.outputs[0].shape = ir.Shape([*names, 4])
    sizes, h200 = dict(zip(names, ranges, strict=True)), {"h": CHIPS["H200"]}
    deploy.compile(to_proto(model), path, targets=h200, ranges=sizes, pack="zero")
    assert Deployed(path).packed("zero")


@pytest.mark.usefixtures("no_compiler")
def test_too_many_numbers_of_tokens_are_refused_at_once(tmp_path: Path) -> None:
    model = layer("c = Identity (n)")
    model.graph.outputs[0].shape = ir.Shape(["B", "S", 4])
    sizes, h200 = {"B": (1000, 1003), "S": (1000, 1800)}, {"h": CHIPS["H200"]}
    with pytest.raises(UsageError, match=r"over 131,072 numbers .* give narrower ranges"):
        deploy.compile(to_proto(model), tmp_path / "m", targets=h200, ranges=sizes, pack="zero")


REMOVED = """
    <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    g (float[B,S,8] x, int32[B] n, float[8,24] w, float[24] b) => (float[B,S,8] y) {
        t, at, starts, longest = com.microsoft.RemovePadding (x, n)
        a = com.microsoft.PackedAttention <num_heads = 2> (t, w, b, at, starts)
        s = Add (a, t)
        y = com.microsoft.RestorePadding (s, at)
    }"""
KEPT = """
    <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    g (float[B,S,8] x, int32[B] n, float[8,24] w, float[24] b) => (float[B,S,8] y) {
        a = com.microsoft.Attention <num_heads = 2> (x, w, b, n)
        five = Constant <value = int32[5] {0, 1, 2, 3, 4}> () last = Constant <value_ints = [1]> ()
        c = Unsqueeze (n, last) k0 = Less (five, c) end = Constant <value_ints = [2]> ()
        k = Unsqueeze (k0, end) nothing = Constant <value_float = 0.0> ()
        z = Where (k, a, nothing)
        y = Add (z, x)
    }"""


HEADS = """p = MatMul (t, w) q, k, v = Split <axis = 1, num_outputs = 3> (p)
        a = com.microsoft.PackedMultiHeadAttention <num_heads = 2> (q, k, v, b, at, starts)"""
IN_ONE = """p = MatMul (t, w) form = Constant <value_ints = [0, 3, 2, 4]> () r = Reshape (p, form)
        r3 = Transpose <perm = [0, 2, 1, 3]> (r)
        a = com.microsoft.PackedMultiHeadAttention <num_heads = 2> (r3, , , b, at, starts)"""
ATTENDED = "a = com.microsoft.PackedAttention <num_heads = 2> (t, w, b, at, starts)"
ADDED = {"": (), "of the batch": ("B", 1, "S", "S"), "of heads": (1, 2, 5, 5)}


def removed_and_kept(form: str, added: str) -> tuple[ir.Model, ir.Model]:
    """A layer over tokens, and over rows with their padding; an addend of their scores."""
    removed, kept = REMOVED.replace(ATTENDED, form), KEPT
    if ADDED[added]:
        removed, kept = (
            removed.replace("starts)", "starts, bias)"),
            kept.replace("n)", "n, , bias)"),
        )
        bias = f"float[24] b, float[{','.join(map(str, ADDED[added]))}] bias)"
        removed, kept = (text.replace("float[24] b)", bias) for text in (removed, kept))
    return text_model(removed), text_model(kept)


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("form", [ATTENDED, HEADS, IN_ONE], ids=["whole", "heads", "in one"])
def test_nodes_that_remove_padding_run(form: str, added: str, gpu: FakeGpu) -> None:
    models = removed_and_kept(form, added)
    removed = InferenceSession(to_proto(models[0]), device="cuda")
    kept = InferenceSession(to_proto(models[1]))
    rng = np.random.default_rng(3)
    weights = {"w": rng.standard_normal((8, 24)), "b": rng.standard_normal(24)}
    weights = {name: w.astype(np.float32) for name, w in weights.items()}
    for lengths in ((3, 1, 5), (5, 5), (1,), (2, 0, 4)):
        counts = np.array(lengths, np.int32)
        if ADDED[added]:
            sizes = (len(counts) if ADDED[added][0] == "B" else 1, ADDED[added][1], 5, 5)
            weights["bias"] = rng.standard_normal(sizes).astype(np.float32)
        there = (np.arange(5) < counts[:, None])[..., None]
        x = np.where(there, rng.standard_normal((len(counts), 5, 8)).astype(np.float32), 0)
        (want,) = kept.run(None, {"x": x, "n": counts, **weights})
        hostile = {"x": np.where(there, x, np.nan), "n": counts, **weights}
        if ADDED[added] and max(lengths) < 5:
            hostile["bias"] = weights["bias"].copy()
            hostile["bias"][:, :, max(lengths) :] = hostile["bias"][..., max(lengths) :] = np.nan
        (found,) = removed.run(None, hostile)
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    hostile["x"][0, 0] = np.inf  # what is no number stays in its sequence
    np.testing.assert_array_equal(removed.run(None, hostile)[0][2:], found[2:])
    assert f"SdpaPacked{'Mask' if added else 'Guard'}" in removed.explain(hostile)


@pytest.mark.parametrize("form", [ATTENDED, HEADS, IN_ONE], ids=["whole", "heads", "in one"])
def test_nodes_that_remove_padding_train(form: str) -> None:
    """Their update is that of the same layer with padding, of what scores have added, too."""
    rng, updates = np.random.default_rng(4), []
    shapes = {"w": (8, 24), "b": (24,), "bias": (1, 2, 5, 5)}
    weights = {name: rng.standard_normal(n).astype(np.float32) for name, n in shapes.items()}
    counts, x = np.array([3, 1, 5, 0], np.int32), rng.standard_normal((4, 5, 8)).astype("f")
    there = (np.arange(5) < counts[:, None])[..., None]
    feeds = {"x": np.where(there, x, 0), "n": counts, "labels": np.where(there, x[::-1], 0)}
    for model in removed_and_kept(form, "of heads"):
        graph, spec = training_model(
            with_weights(model, weights),
            loss="mse",
            optimizer="sgd",
            fused=True,
            level=2,
            loss_options={"reduction": "sum"},
        )
        packed = {n.op_type for n in graph.graph if "Packed" in n.op_type}
        names = {f"SdpaPackedMask{end}" for end in ("_lse", "Grad", "GradMasks")}
        assert packed == (names if not updates else set())
        contrib.expand(graph, lambda node: True)  # onnxruntime's CPU has no RemovePadding
        first = {state.name: np.asarray(state.initial) for state in spec.states}
        updates.append(step_results(graph, spec, feeds | first))
    for found, want in zip(*updates, strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:a batch runs with its padding")
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_what_is_bound_is_packed(gpu: FakeGpu, where: str) -> None:
    rows = layer("c = Identity (n)")
    rows.graph.outputs[0].shape = ir.Shape(["B", "S", 4])
    plain, packed = (
        InferenceSession(to_proto(rows), device="cuda", pack=pack) for pack in (False, "zero")
    )
    rng, binding = np.random.default_rng(1), packed.io_binding()
    for name in packed.get_outputs():
        binding.bind_output(name.name, where)
    mask = np.zeros((2, 6), np.int64)
    binding.bind_cpu_input("m", mask)
    for lengths in ((2, 5), (5, 2), (6, 6), (0, 3), (0, 2), (4, 3)):
        x = rng.standard_normal((2, 6, 8)).astype(np.float32)
        mask[:] = np.arange(6) < np.array(lengths)[:, None]
        for on_gpu in (False, True):
            feeds = {"x": x, "m": mask}
            for name, value in feeds.items() if on_gpu else ():
                copy = value.copy()
                here = DeviceTensor(copy.ctypes.data, copy.shape, copy.dtype, 0, copy)
                binding.bind_ortvalue_input(name, here)
            if not on_gpu:
                binding.bind_cpu_input("x", x)
                binding.bind_cpu_input("m", mask)
            packed.run_with_iobinding(binding, synchronize=on_gpu)
            (want,), (found,) = plain.run(None, feeds), binding.copy_outputs_to_cpu()
            seen = mask[..., None] if min(lengths) else 1
            np.testing.assert_allclose(found, want * seen, rtol=0, atol=1e-5)


def test_what_is_bound_prepares_nothing_anew(gpu: FakeGpu, monkeypatch: Any) -> None:
    """Nor does it keep memory of batches that have been: numbers of tokens come again."""
    packed = InferenceSession(to_proto(layer()), device="cuda", pack=True)
    rng, binding, prepared = np.random.default_rng(1), packed.io_binding(), []
    plain, bound, batches = InferenceSession(to_proto(layer())), Executable._bound, []
    binding.bind_output("y", "cuda")
    monkeypatch.setattr(Executable, "_bound", lambda *given: (prepared.append(1), bound(*given))[1])
    for turn in range(4):
        binding.bind_output("y", "cuda" if turn < 3 else "cpu")
        for lengths in ((2, 5), (5, 2), (6, 6), (4, 3), (1, 1)):
            x = rng.standard_normal((2, 6, 8)).astype(np.float32)
            feeds = {"x": x, "m": (np.arange(6) < np.array(lengths)[:, None]).astype(np.int64)}
            for name, a in feeds.items():
                here = DeviceTensor(a.ctypes.data, a.shape, a.dtype, 0, a)
                batches.append(weakref.ref(a))
                if turn % 2:
                    binding.bind_ortvalue_input(name, here)
                else:
                    binding.bind_input(name, "cuda", 0, a.dtype, a.shape, a.ctypes.data)
            was = len(prepared)
            packed.run_with_iobinding(binding)
            (found,), (want,) = binding.copy_outputs_to_cpu(), plain.run(None, feeds)
            np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
            assert turn != 2 or len(prepared) == was
    assert len(binding.kept) > 3
    del x, feeds, a, here
    assert sum(old() is not None for old in batches) == 2  # those that are still bound


def test_what_a_session_refuses(gpu: FakeGpu) -> None:
    with pytest.raises(ModelError, match="pack='zero' gives zeros there"):
        InferenceSession(ENCODER, device="cuda", pack=True)
    with pytest.raises(UsageError, match="pack is for device 'cuda'"):
        InferenceSession(ENCODER, pack=True)
    with pytest.raises(UsageError, match="there is no pack='all'"):
        InferenceSession(ENCODER, device="cuda", pack="all")


@pytest.mark.parametrize("name", ["encoder", "gpt2__dynamo23", "t5_encoder__ts17"])
def test_a_step_over_tokens_makes_the_same_update(name: str) -> None:
    options = {"loss": "cross_entropy", "optimizer": "sgd", "fused": True, "level": 2}
    options |= {"output": "pooler_output"} if name == "encoder" else {}
    graph, spec = training_model(MODELS[name], **options)
    packed, over = training_model(MODELS[name], pack=True, **options)
    feeds = batch(over.packing, packed, *BATCHES["mixed"])
    rng = np.random.default_rng(5)
    there = feeds[over.packing.mask] != 0
    feeds["labels"] = np.where(there, rng.integers(0, 20, there.shape), -100)
    if name == "encoder":
        feeds["labels"] = rng.integers(0, 20, len(there))
    more = tokens.feeds(over.packing, over.targets, feeds)
    assert not isinstance(more, str), more
    first = {state.name: np.asarray(state.initial) for state in spec.states}
    want = step_results(graph, spec, feeds | first)
    found = step_results(packed, over, feeds | more | first)
    assert len(want) > 15
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("each", [False, True])
def test_a_trainer_packs_what_it_can(
    each: bool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both run on onnxruntime: what launches several kernels is beyond the GPU of host memory."""
    monkeypatch.setattr(backends, "backend", lambda states, *_: backends.Portable(states))
    model = layer("c = Identity (n)" if each else FIRST)
    model.graph.outputs[0].shape = ir.Shape(["B", "S", 4] if each else ["B", 4])
    options = {"loss": "cross_entropy", "device": "cuda", "optimizer": optim.SGD(lr=0.1)}
    padded, packed = (Trainer(to_proto(model), pack=pack, **options) for pack in (False, True))
    rng = np.random.default_rng(1)
    mask = (np.arange(6) < np.array([[2], [5]])).astype(np.int64)

    def step(there: np.ndarray, counted: np.ndarray) -> None:
        x = rng.standard_normal((2, 6, 8)).astype(np.float32)
        labels = rng.integers(0, 4, (2, 6) if each else 2)
        labels = np.where(counted, labels, -100) if each else labels
        feeds = {"x": x, "m": there, "labels": labels}
        assert float(packed.step(feeds)) == pytest.approx(float(padded.step(feeds)), rel=1e-5)

    for _ in range(4):
        step(mask, mask != 0)
    with pytest.warns(UserWarning, match="counts at the padding" if each else "has no token"):
        step(mask if each else mask * [[1], [0]], mask == mask)
    for name, w in padded.weights().items():
        np.testing.assert_allclose(packed.weights()[name], w, rtol=1e-4, atol=1e-6)


def test_what_a_trainer_refuses() -> None:
    with pytest.raises(UsageError, match="pack is for steps on one GPU"):
        Trainer(ENCODER, loss="mse", pack=True)
    with pytest.raises(NotPacked, match="compares each token with more than a class"):
        training_model(ENCODER, loss="mse", pack=True, level=2)
