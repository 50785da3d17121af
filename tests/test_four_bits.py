"""Weights of 4 bits stay packed, whatever is fused around their product."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from lowering import program_of, weights_of
from onnx import numpy_helper
from support import assert_same, run

from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.importer.save import to_proto
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import Contraction
from onnx_fuse.runtime import ort

K, N, BLOCK = 64, 48, 32
NORMS = {
    "": "",
    "LayerNormalization": "h = LayerNormalization (x, g, b)",
    "RMSNormalization": "h = RMSNormalization (x, g)",
}


def model_of(norm: str, tail: str, dtype: str, contrib: bool, k: int = K, n: int = N) -> ir.Model:
    """Norm, product of 4-bit weights and what `tail` makes of it."""
    rng = np.random.default_rng(0)
    product = "m = MatMul (x, w)" if not norm else "m = MatMul (h, w)"
    kind = {"float32": "float"}.get(dtype, dtype)
    lines = [NORMS[norm], "w = DequantizeLinear <axis = 0, block_size = 32> (q, s)", product]
    if contrib:
        how = f"<K = {k}, N = {n}, bits = 4, block_size = {BLOCK}>"
        lines[1:] = [f"m = com.microsoft.MatMulNBits {how} ({'h' if norm else 'x'}, q, s)"]
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
        f"agraph ({kind}[2,3,{k}] x) => ({kind}[2,3,{n}] y) {{ {' '.join(lines)} {tail} }}"
    )
    arrays = {"g": rng.random(k) + 0.5, "b": rng.random(k), "c": rng.standard_normal(n)}
    arrays["s"] = rng.random((n, k // BLOCK) if contrib else (k // BLOCK, n)) / 4
    weights = rng.integers(-8, 8, (k, n))
    q = weights.astype(ml_dtypes.int4)
    if contrib:
        q = rng.integers(0, 256, (n, k // BLOCK, BLOCK // 2)).astype(np.uint8)
    tensors = [numpy_helper.from_array(a.astype(dtype), name) for name, a in arrays.items()]
    proto.graph.initializer.extend([*tensors, numpy_helper.from_array(q, "q")])
    return load(proto)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "tail",
    ["y = Identity (m)", "y = Add (m, c)", "z = Add (c, m) y = Gelu (z)", "y = Relu (m)"],
    ids=["", "bias", "bias and gelu", "relu"],
)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("contrib", [False, True], ids=["dequantized", "MatMulNBits"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_weights_of_a_product_stay_in_four_bits(
    dtype: str, contrib: bool, norm: str, tail: str, level: int
) -> None:
    model = model_of(norm, tail, dtype, contrib)
    feeds = {"x": np.random.default_rng(2).standard_normal((2, 3, K)).astype(dtype)}
    (expected,) = run(model, feeds)  # as it is: onnxruntime's optimizations multiply in 8 bits
    rewrite.optimize(model, level=level, own_kernels=True)
    program = program_of(model, feeds)
    (product,) = [call.problem for call in program.calls if isinstance(call.problem, Contraction)]
    assert product.op == "MatMulNBits"
    held = [b.nbytes for b in program.buffers if b.kind in ("weight", "constant")]
    assert max(held) <= K * N // 2
    assert bool(product.epilogue.bias) == ("c" in tail)
    found = interpret(program, feeds, weights_of(model))["y"]
    limit = {"float32": 1e-5, "float16": 1e-2}[dtype] * np.abs(expected.astype(np.float64)).max()
    np.testing.assert_allclose(found, expected, atol=limit)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_weight_made_of_eight_bits_folds_with_the_norm(dtype: str) -> None:
    """It is made once, for the program; the norm's scale goes into it as into any other."""
    k, n = 256, 512  # smaller ones are constants of the program
    model = model_of("LayerNormalization", "y = Add (m, c)", dtype, False, k, n)
    proto = ir.serde.serialize_model(model)
    wide = np.random.default_rng(1).integers(-128, 128, (k, n)).astype(np.int8)
    kept = [t for t in proto.graph.initializer if t.name != "q"]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend([*kept, numpy_helper.from_array(wide, "q")])
    model = load(proto)
    feeds = {"x": np.random.default_rng(2).standard_normal((2, 3, k)).astype(dtype)}
    (expected,) = run(model, feeds)  # as it is: onnxruntime's optimizations multiply in 8 bits
    rewrite.optimize(model)
    assert [n.op_type for n in model.graph] == ["DequantizeLinear", "LayerNormGemm"]
    for _ in range(2):  # another shape finds what the first has made
        program = program_of(model, feeds)
        assert [c.problem.op for c in program.calls if isinstance(c.problem, Contraction)] == [
            "LayerNormGemm"
        ]
    if dtype == "float16":
        found = interpret(program, feeds, weights_of(model))["y"]
        limit = 1e-2 * np.abs(expected.astype(np.float64)).max()
        np.testing.assert_allclose(found, expected, atol=limit)


@pytest.mark.parametrize(
    ("second", "merged"),
    [
        ("(x, q2, s2, z2)", 1),
        ("(x, q2, s2)", 0),
        ("(x, q2, s2, z2, order)", 0),
        ("(x, q, s2, z2)", 0),
        ("(twice, q2, s2, z2)", 0),
    ],
    ids=["alike", "without zero points", "columns in another order", "one weight", "other inputs"],
)
def test_products_of_one_input_are_merged_with_their_blocks(second: str, merged: int) -> None:
    rng, widths = np.random.default_rng(4), (N, N if "(x, q, " in second else 2 * N)
    how = f"K = {K}, bits = 4, block_size = {BLOCK}"
    lines = [
        f"{y} = com.microsoft.MatMulNBits <{how}, N = {n}> {names}"
        for y, n, names in zip("ab", widths, ("(x, q, s, z)", second), strict=True)
    ]
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
        f"agraph (float[M,{K}] x) => (float[M,{widths[0]}] a, float[M,{widths[1]}] b)"
        f" {{ twice = Add (x, x) {' '.join(lines)} }}"
    )
    arrays = {"order": np.arange(K, dtype=np.int32) // BLOCK}
    for end, n in zip(("", "2"), widths, strict=True):
        arrays[f"q{end}"] = rng.integers(0, 256, (n, K // BLOCK, BLOCK // 2)).astype(np.uint8)
        arrays[f"s{end}"] = (rng.random((n, K // BLOCK)) / 4).astype(np.float32)
        arrays[f"z{end}"] = rng.integers(0, 256, (n, K // BLOCK // 2)).astype(np.uint8)
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    model = load(proto)
    before = to_proto(model).SerializeToString()
    assert rewrite.optimize(model, own_kernels=True).fusions.get("MergedGemm", 0) == merged
    for rows in (0, 1, 3):
        x = rng.standard_normal((rows, K)).astype(np.float32)
        x[:1] = np.where(np.arange(K) == 5, np.inf, x[:1])
        both = (before, to_proto(model).SerializeToString())
        first, after = (ort.run(ort.session(m, as_written=True), {"x": x}) for m in both)
        assert_same(after, first)
