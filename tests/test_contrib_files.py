"""Files with contrib operators: what fusion makes of them, what stays, and how they are trained."""

from collections import Counter
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from cases import DATA, FusionCase
from lowering import interpreted
from onnxruntime import quantization
from onnxruntime.quantization import matmul_nbits_quantizer
from support import Cli, assert_same, stock
from test_contrib import ROWS, Array, Row, random, run

from onnx_fuse import autodiff, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.importer import contrib
from onnx_fuse.importer.save import inline, save, to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.training import optim
from onnx_fuse.training.trainer import Trainer
from onnx_fuse.validation.check import check_outputs

_X, _V = "float[B,T,16] x", "float[16] g, float[16] b"
_LIN = "float[16,24] w, float[24] c"
_MS = "com.microsoft"


def case(name: str, inputs: str, body: str, fused: tuple[str, ...], **more: Any) -> FusionCase:
    return FusionCase(name, inputs, body.replace("ms.", f"{_MS}."), fused, **more)


# What a fusion takes a part of is written out; what none does stays the contrib node.
CASES = [
    case("gelu behind a product", f"{_X}, {_LIN}",
         "p = MatMul (x, w)\n y = ms.BiasGelu (p, c)", ("GemmGelu",)),
    case("tanh gelu behind a product", f"{_X}, {_LIN}",
         "p = MatMul (x, w)\n y = ms.FastGelu (p, c)", ("GemmGeluTanh",)),
    case("quick gelu behind a product", f"{_X}, {_LIN}",
         "p = MatMul (x, w)\n a = Add (p, c)\n y = ms.QuickGelu <alpha = 1.702> (a)",
         ("GemmQuickGelu",)),
    case("a norm of a sum before a product", f"{_X}, float[B,T,16] r, {_V}, {_LIN}",
         "n, m, v, s = ms.SkipLayerNormalization <epsilon = 1e-5> (x, r, g, b)\n"
         "p = MatMul (n, w)\n y = Add (p, c)", ("LayerNormGemm",), fed=("x", "r")),
    case("a norm of a sum", f"{_X}, float[B,T,16] r, {_V}",
         "y = ms.SkipLayerNormalization <epsilon = 1e-5> (x, r, g, b)", ("SkipLayerNorm",),
         fed=("x", "r"), output="float[B,T,16] y"),
    case("an RMS norm of a sum before a product", f"{_X}, float[B,T,16] r, {_V}, {_LIN}",
         "n = ms.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (x, r, g)\n"
         "p = MatMul (n, w)\n y = Add (p, c)", ("RMSNormGemm",), fed=("x", "r")),
    case("an RMS norm of the default domain", f"{_X}, {_V}, {_LIN}",
         "n = SimplifiedLayerNormalization <epsilon = 1e-5> (x, g)\n"
         "p = MatMul (n, w)\n y = Add (p, c)", ("RMSNormGemm",)),
    case("a product with an activation", "float[B,16] x, float[24,16] w, float[24] c",
         'y = ms.FusedGemm <transB = 1, activation = "Relu"> (x, w, c)', ("GemmRelu",),
         output="float[B,24] y"),
    case("a convolution with an activation", "float[B,3,8,8] x, float[4,3,3,3] w, float[4] c",
         'y = ms.FusedConv <activation = "Relu", kernel_shape = [3,3]> (x, w, c)', ("ConvRelu",),
         output="float[B,4,6,6] y"),
    case("attention", "float[B,T,16] x, float[16,72] w, float[72] c, int32[B,T] m",
         "y = ms.Attention <num_heads = 4> (x, w, c, m)", ("SdpaMask",), fed=("x", "m")),
    case("gelu by itself", _X, "y = ms.FastGelu (x)", (), output="float[B,T,16] y"),
    case("an RMS norm by itself", f"{_X}, {_V}",
         "y = SimplifiedLayerNormalization <epsilon = 1e-5> (x, g)", (),
         output="float[B,T,16] y"),
    case("transposed products by themselves", "float[B,16,T] x, float[B,16,24] k",
         "y = ms.FusedMatMul <transA = 1, alpha = 0.5> (x, k)", (), fed=("x", "k")),
]  # fmt: skip


# What onnxruntime's CPU runs faster whole is written out for our own kernels alone.
WHOLE = [
    case("attention of projected heads", "float[B,T,24] x, float[B,T,24] k, float[B,T,24] v",
         "y = ms.MultiHeadAttention <num_heads = 4> (x, k, v)", ("Sdpa",), fed=("x", "k", "v")),
    case("attention over a past",
         "float[B,T,16] x, float[16,72] w, float[72] c, float[2,B,4,P,6] past",
         "y, n = ms.Attention <num_heads = 4> (x, w, c, , past)", ("SdpaMask",),
         fed=("x", "past")),
    case("grouped heads",
         "float[B,T,64] x, float[B,T,32] k, float[B,T,32] v, int32[B] l, int32[1] t",
         "y, n, m = ms.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (x, k, v, , , l, t)",
         ("GroupedSdpaMask",), fed=("x", "k", "v", "l", "t"), output="float[B,T,64] y"),
]  # fmt: skip


@pytest.mark.parametrize("row", WHOLE, ids=lambda c: c.name)
def test_what_a_cpu_runs_faster_whole_is_fused_for_our_kernels_alone(row: FusionCase) -> None:
    kept, taken = (load(row.model()) for _ in range(2))
    rewrite.optimize(kept)
    assert Counter(n.op_type for n in kept.graph if n.domain) == Counter(
        n.op_type for n in row.model().graph if n.domain
    )
    # a node that has a kernel of ours is looked into where it is trained
    lowered = [n for n in taken.graph if (e := contrib.lookup(n)) is not None and e.lowered]
    rewrite.optimize(taken, own_kernels=True, training=bool(lowered))
    assert [n.op_type.removesuffix("Mask") for n in taken.graph if n.domain == FUSE][-1:] == [
        row.fused[0].removesuffix("Mask")
    ]
    assert not [n for n in taken.graph if contrib.lookup(n)]


@pytest.mark.parametrize("row", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("level", [0, 2])
def test_a_fusion_looks_into_the_bodies(row: FusionCase, level: int, tmp_path: Path) -> None:
    model = row.model()
    path = tmp_path / "model.onnx"
    path.write_bytes(to_proto(model).SerializeToString())
    before = Counter(n.op_type for n in model.graph if contrib.lookup(n))
    graph = load(path)
    report = rewrite.optimize(graph, level=level)
    after = Counter(n.op_type for n in graph.graph if contrib.lookup(n))
    if level and row.fused:
        assert set(row.fused) <= set(report.fusions)
        assert not after
    else:
        assert after == before
        assert not any(n.domain == FUSE for n in graph.graph)
    assert not any(n.metadata_props for n in graph.graph)
    for T in (1, 5):
        feeds = row.feeds(B=2, T=T)
        expected = run(model, feeds)
        for candidate in (graph, inline(graph)):
            assert_same(expected, run(candidate, feeds), rtol=1e-5, atol=1e-5)
    flat = inline(graph)
    assert not [n for n in flat.graph if n.domain or contrib.lookup(n)]
    onnx.checker.check_model(to_proto(flat))


@pytest.mark.parametrize("row", [*CASES, *WHOLE[:1]], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_hostile_numbers(row: FusionCase, dtype: str) -> None:
    wrong = hostile.check(row, hostile.TYPES[dtype])
    if wrong is None:
        pytest.skip(f"onnxruntime has no such graph in {dtype}")
    assert not wrong, "\n".join(wrong)


# ---- lowering --------------------------------------------------------------------------------

_FIRST: dict[Any, Row] = {}
for _row in ROWS:
    _steps = "in steps of" in _row.name
    _FIRST.setdefault((_row.op, _row.attributes.get("do_rotary"), _steps), _row)


@pytest.mark.parametrize("row", _FIRST.values(), ids=str)
def test_a_node_is_lowered_by_its_body(row: Row) -> None:
    model, feeds = row.model(), row.feeds()
    got = interpreted(model, feeds)
    for value, want in zip(model.graph.outputs, run(row.model(), feeds), strict=True):
        found = got[value.name or ""]
        assert (found.shape, found.dtype) == (want.shape, want.dtype)
        limit = row.steps if want.dtype.kind in "iu" else max(row.limit, 1e-5)
        np.testing.assert_allclose(
            found.astype(np.float64), want.astype(np.float64), rtol=limit, atol=limit
        )


# ---- files that onnxruntime wrote ------------------------------------------------------------


def optimized_by_onnxruntime(source: Path, target: Path, level: str) -> Path:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(source, options)
    return target


def gradients(path: Path, feeds: dict[str, Array]) -> dict[str, Array]:
    model = autodiff.gradient(path)
    session = stock(model, optimized=True)
    forward = onnxruntime.InferenceSession(path)
    ends = zip(forward.get_outputs(), forward.run(None, feeds), strict=True)
    dys = {f"{value.name}.grad": random(*y.shape) for value, y in ends}
    given = {i.name for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs() if o.name.endswith(".grad")]
    found = session.run(names, {k: v for k, v in {**feeds, **dys}.items() if k in given})
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize(
    ("name", "fused", "shared"),
    [
        ("bert__ts13", {"LayerNormGemmGelu", "SdpaMask", "MergedGemm"}, 25),
        ("gpt2__ts17", {"LayerNormGemmGeluTanh", "SdpaMaskNanGuard"}, 25),
        ("t5_encoder__ts17", {"RMSNormGemmRelu", "SdpaMask"}, 6),
    ],
)
def test_what_onnxruntimes_optimizer_wrote_is_fused_and_trained(
    name: str, fused: set[str], shared: int, tmp_path: Path
) -> None:
    """`shared` counts the weights that its file still has under the model's names."""
    source = DATA / f"{name}.onnx"
    path = optimized_by_onnxruntime(source, tmp_path / "ort.onnx", "ORT_ENABLE_EXTENDED")
    proto = onnx.load(path)
    assert any(n.domain == _MS or n.op_type == "SimplifiedLayerNormalization"
               for n in proto.graph.node)  # fmt: skip
    graph = load(path)
    assert fused <= set(rewrite.optimize(graph).fusions)
    save(graph, tmp_path / "fused.onnx", shapes=False)
    assert check_outputs(source, tmp_path / "fused.onnx").ok
    arrays = np.load(DATA / f"{name}.npz")
    inputs = onnxruntime.InferenceSession(source).get_inputs()
    feeds = {i.name: arrays[f"in_{i.name}"] for i in inputs}
    expected, got = gradients(source, feeds), gradients(path, feeds)
    common = [k for k in expected if k in got and got[k].shape == expected[k].shape]
    assert len(common) >= shared
    largest = max(np.abs(expected[key]).max() for key in common)
    for key in common:
        # a softmax does not see its keys' bias: that gradient is 0 but for rounding
        scale = np.abs(expected[key]).max() + 1e-3 * largest
        np.testing.assert_allclose(got[key] / scale, expected[key] / scale, atol=2e-4)


def test_what_onnxruntime_optimized_for_one_cpu_is_fused_and_checked(
    cli: Cli, tmp_path: Path
) -> None:
    """At its highest level convolutions are in blocks of channels, in operators of its own."""
    patches = FusionCase(
        "patches",
        "float[B,3,16,16] x, float[16,3,4,4] p, float[16] e, float[16] g, float[16] b, "
        "float[16,24] w, float[24] c",
        "f = Conv <kernel_shape = [4,4], strides = [4,4]> (x, p, e)\n"
        "to = Constant <value = int64[3] {0,16,-1}> ()\n r = Reshape (f, to)\n"
        "t = Transpose <perm = [0,2,1]> (r)\n n = LayerNormalization (t, g, b)\n"
        "m = MatMul (n, w)\n z = Add (m, c)\n y = Relu (z)",
        opset=17,
    )
    save(patches.model(), tmp_path / "m.onnx")
    path = optimized_by_onnxruntime(tmp_path / "m.onnx", tmp_path / "ort.onnx", "ORT_ENABLE_ALL")
    if not any(n.domain == "com.microsoft.nchwc" for n in onnx.load(path).graph.node):
        pytest.skip("onnxruntime has no blocked convolutions for this CPU")
    cli.done("optimize", path, "-o", tmp_path / "o.onnx")
    assert "LayerNormGemmRelu" in {n.op_type for n in onnx.load(tmp_path / "o.onnx").graph.node}


# ---- a block of BERT as onnxruntime's transformer optimizer writes it ------------------------

BLOCK = """
  a = com.microsoft.Attention <num_heads = 4> (x, wqkv, bqkv, mask)
  o = MatMul (a, wo)
  h = com.microsoft.SkipLayerNormalization (o, x, g1, b1, bo)
  f = MatMul (h, w1)
  u = com.microsoft.BiasGelu (f, c1)
  d = MatMul (u, w2)
  y = com.microsoft.SkipLayerNormalization (d, h, g2, b2, c2)
"""
BLOCK_CASE = case(
    "block",
    "float[B,T,16] x, int32[B,T] mask, float[16,48] wqkv, float[48] bqkv, float[16,16] wo, "
    "float[16] bo, float[16] g1, float[16] b1, float[16,32] w1, float[32] c1, float[32,16] w2, "
    "float[16] c2, float[16] g2, float[16] b2",
    BLOCK,
    ("LayerNormGemmGelu", "SdpaMask"),
    fed=("x", "mask"),
    output="float[B,T,16] y",
)


def test_a_block_of_contrib_operators_trains(tmp_path: Path) -> None:
    """The gradient by central differences of onnxruntime's own kernels; then some steps."""
    model = BLOCK_CASE.model()
    path = tmp_path / "block.onnx"
    path.write_bytes(to_proto(model).SerializeToString())
    feeds = BLOCK_CASE.feeds(B=2, T=5)
    feeds["mask"] = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
    dy = random(2, 5, 16)
    gradient = autodiff.gradient(path)
    assert not [n for n in gradient.graph if contrib.lookup(n)]
    session = stock(gradient, optimized=True)
    names = [o.name for o in session.get_outputs() if o.name.endswith(".grad")]
    assert len(names) == 12
    found = dict(zip(names, session.run(names, {**feeds, "y.grad": dy}), strict=True))
    # differences in float32: steps of 1e-2 leave errors of some 1e-3 of the largest
    for name in ("wqkv", "g1", "bo", "w2"):
        held = model.graph.initializers[name]
        array, at = held.const_value.numpy().copy(), (0,) * len(held.shape or ())
        ends = []
        for step in (1e-2, -1e-2):
            moved = array.copy()
            moved[at] += step
            held.const_value = ir.tensor(moved, name=name)
            ends.append(float((run(model, feeds)[0].astype(np.float64) * dy).sum()))
        held.const_value = ir.tensor(array, name=name)
        largest = float(np.abs(found[f"{name}.grad"]).max())
        assert found[f"{name}.grad"][at] == pytest.approx(
            (ends[0] - ends[1]) / 2e-2, abs=5e-3 * largest
        )
    trainer = Trainer(path, loss="mse", optimizer=optim.AdamW(lr=1e-2), device="cpu")
    losses = [trainer.step({**feeds, "labels": np.zeros((2, 5, 16), np.float32)}) for _ in range(5)]
    assert losses[-1] < losses[0]
    trainer.save(tmp_path / "tuned.onnx")
    kept = Counter(n.op_type for n in onnx.load(tmp_path / "tuned.onnx").graph.node)
    assert kept == Counter(n.op_type for n in model.graph)


def test_a_file_need_not_import_what_it_calls(tmp_path: Path) -> None:
    proto = to_proto(CASES[0].model())
    del proto.opset_import[1:]
    assert rewrite.optimize(load(proto)).fusions == {"GemmGelu": 1}


def test_inline_writes_a_contrib_node_out(cli: Cli, saved: Any, tmp_path: Path) -> None:
    model = CASES[-1].model()
    path, out = saved(model), tmp_path / "plain.onnx"
    assert cli("optimize", path, "-o", tmp_path / "kept.onnx").code == 0
    kept = onnx.load(tmp_path / "kept.onnx")
    assert [n.op_type for n in kept.graph.node] == ["FusedMatMul"]
    assert cli("optimize", path, "-o", out, "--inline").code == 0
    plain = onnx.load(out)
    assert not [n for n in plain.graph.node if n.domain]
    assert [o.domain for o in plain.opset_import] == [""]


BRANCHES = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
agraph (float[B,T,16] x, bool p, float[16,16] w, float[16] g, float[16] b)
=> (float[B,T,16] y) {
  val_0 = Neg (x)
  val_1 = MatMul (val_0, w)
  y = If (p) <
    then_branch = a () => (float[B,T,16] t) {
      n, m, v, s = com.microsoft.SkipLayerNormalization <epsilon = 1e-5> (val_1, x, g, b)
      q = MatMul (n, w)
      r = com.microsoft.BiasGelu (q, b)
      t = Add (r, s)
    },
    else_branch = c () => (float[B,T,16] e) {
      dead = com.microsoft.Gelu (val_1)
      h = com.microsoft.FastGelu (val_1, b)
      e = Add (h, val_0)
    }
  >
}"""


@pytest.mark.parametrize("taken", [True, False])
def test_bodies_in_branches_read_what_is_outside(taken: bool) -> None:
    model = text_model(BRANCHES)
    weights = {"w": random(16, 16), "g": random(16, seed=1), "b": random(16, seed=2)}
    feeds = {"x": random(2, 3, 16), "p": np.array(taken), **weights}
    expected = run(model, feeds)[0]
    written, graph = inline(model), load(model)
    rewrite.optimize(graph)
    for candidate in (written, graph, inline(graph)):
        np.testing.assert_allclose(run(candidate, feeds)[0], expected, rtol=1e-5, atol=1e-5)
    assert not [n for n in ir.traversal.RecursiveGraphIterator(written.graph) if n.domain]


# ---- files that onnxruntime's quantizers wrote -----------------------------------------------


def _dynamic(source: Path, target: Path) -> None:
    quantization.quantize_dynamic(source, target)


def _of_operators(source: Path, target: Path) -> None:
    class Feeds(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            arrays = np.load(source.with_suffix(".npz"))
            names = [i.name for i in onnxruntime.InferenceSession(source).get_inputs()]
            self.rest = [{name: arrays[f"in_{name}"] for name in names}]

        def get_next(self) -> dict[str, Array] | None:
            return self.rest.pop() if self.rest else None

    form = quantization.QuantFormat.QOperator
    quantization.quantize_static(source, target, Feeds(), quant_format=form)


def _four_bits(source: Path, target: Path) -> None:
    quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(
        onnx.load(source), block_size=16, is_symmetric=False
    )
    quantizer.process()
    quantizer.model.save_model_to_file(target)


@pytest.mark.parametrize(
    ("quantize", "kept"),
    [
        (_dynamic, {"DynamicQuantizeMatMul"}),
        (_of_operators, {"QLinearAdd", "QGemm"}),
        (_four_bits, {"MatMulNBits"}),
    ],
)
def test_what_onnxruntimes_quantizer_wrote_stays_what_it_is(
    quantize: Any, kept: set[str], tmp_path: Path
) -> None:
    quantize(DATA / "bert__ts13.onnx", tmp_path / "quantized.onnx")
    level = "ORT_ENABLE_EXTENDED"
    path = optimized_by_onnxruntime(tmp_path / "quantized.onnx", tmp_path / "ort.onnx", level)
    graph = load(path)
    rewrite.optimize(graph)
    assert kept <= {n.op_type for n in graph.graph if n.domain == _MS}
    assert all(v.shape is not None for n in graph.graph for v in n.outputs if v.uses())
    save(graph, tmp_path / "fused.onnx", shapes=False)
    assert check_outputs(path, tmp_path / "fused.onnx").ok
    flat = inline(graph)
    assert not [n for n in flat.graph if n.domain]
    onnx.checker.check_model(to_proto(flat))
