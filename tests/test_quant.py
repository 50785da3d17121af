"""Quantized models without a GPU: their programs, run by NumPy, give what onnxruntime does."""

import ml_dtypes
import numpy as np
import pytest
from compiled import unclean
from float8_cases import CODES8, FLOATS_OF_CODES
from lowering import interpreted, program_of, weights_of
from quant_cases import (
    ATTENTION,
    CASES,
    DEQUANTIZED,
    HELD,
    Quantized,
    dequantized,
    integers,
    quantized,
    scales,
    values,
)
from support import assert_same, run, stock

from onnx_fuse.autodiff.load import load
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import candidates, select
from onnx_fuse.lower import walk
from onnx_fuse.lower.quantized import ONE_TAP
from onnx_fuse.program.contractions import IntegerProduct, PackedProduct
from onnx_fuse.program.epilogue import Epilogue
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.passes.integer_sums import _factors
from onnx_fuse.program.problem import CHIPS, KernelConfig
from onnx_fuse.program.problems import IntegerConv, Window
from onnx_fuse.rewrite import optimize

H200 = CHIPS["H200"]


@pytest.mark.parametrize("case", [*CASES, *CODES8, *FLOATS_OF_CODES], ids=lambda c: c.name)
def test_programs_give_what_onnxruntime_gives(case: Quantized) -> None:
    found = case.program()
    assert not found.fallbacks
    got = interpret(found, case.feeds, case.weights)
    for (name, y), want in zip(got.items(), case.expected(), strict=True):
        case.check(name, y, want)


@pytest.mark.parametrize("case", HELD, ids=lambda c: c.name)
def test_weights_stay_in_4_bits_or_are_dequantized_once(case: Quantized) -> None:
    found = case.program()
    (call,) = found.calls
    four = "int4" in case.name
    assert call.problem.op == ("MatMulNBits" if four else "Gemm")
    held = {b.id for b in found.buffers if b.kind in ("weight", "constant")}
    kept = sum(t.nbytes for _, t in call.reads if t.buffer in held)
    k = call.problem.k
    assert kept <= (k * 64 // 2 + 1024 if four else k * 64 * 4)


@pytest.mark.parametrize("case", DEQUANTIZED, ids=lambda c: c.name)
def test_fused_operators_of_codes_are_calls_of_integers(case: Quantized) -> None:
    model = load(case.model)
    optimize(model, own_kernels=True)
    program = program_of(model, case.feeds)
    ops, plain = ([c.problem.op for c in p.calls] for p in (program, case.program()))
    assert ops.count("IntegerConv") == plain.count("IntegerConv")
    got = interpret(program, case.feeds, case.weights)
    for (name, y), want in zip(got.items(), case.expected(), strict=True):
        case.check(name, y, want)


@pytest.mark.parametrize(
    ("second", "merged"),
    [
        ("<axis = -1> (w1, s1, z1)", 2),
        ("(w1, s)", 2),
        ("<axis = 0> (w1, s0)", 1),
        ("(u1, s)", 1),
        ("<axis = 1, block_size = 6> (w1, s6)", 1),
    ],
)
def test_products_of_one_input_in_codes_are_merged(second: str, merged: int) -> None:
    shapes = {"s0": (6,), "s1": (8,), "s": (1,), "s6": (6, 2), "b0": (4,), "s2": (4,)}
    shapes |= {"w2": (6, 4), "w3": (6, 8)}  # floats, which are merged alone
    weights = {n: scales(shape) for n, shape in shapes.items()}
    weights |= {"w0": integers((6, 4), "int8"), "w1": integers((6, 8), "int8")}
    weights |= {"u1": integers((6, 8), "uint8"), "z1": np.arange(8, dtype=np.int8)}
    nodes = f"""
        f0 = DequantizeLinear <axis = 1> (w0, s2) m0 = MatMul (x, f0) y0 = Add (m0, b0)
        f1 = DequantizeLinear {second} m1 = MatMul (x, f1) y1 = Add (m1, s1)
        m2 = MatMul (x, w2) y2 = Add (m2, b0) m3 = MatMul (x, w3) y3 = Add (m3, s1)
    """
    outputs = {f"y{i}": ("float32", (2, 3, size)) for i, size in enumerate((4, 8, 4, 8))}
    case = quantized("", nodes, {"x": values((2, 3, 6))}, outputs, weights)
    model = load(case.model)
    assert optimize(model).fusions["MergedGemm"] == merged
    after = stock(to_proto(model).SerializeToString()).run(None, case.feeds)
    assert_same(after, case.expected(), rtol=1e-5, atol=1e-3)  # sums in another order


def test_codes_become_codes_in_one_call_a_convolution() -> None:
    for case in (c for c in DEQUANTIZED if "block" in c.name):
        first, second, largest, _ = (call.problem for call in case.program().calls)
        zero = 0 if " -128 " in case.name else first.border  # codes behind a Relu count from 0
        assert (largest.op, largest.dtype) == ("Pool", second.tail.dtype)
        assert first.op == second.op == "IntegerConv"
        assert (first.tail.dtype, second.border) == ("uint8" if zero == 0 else first.dtype, zero)
        assert second.tail.reads == (first.dtype,)


def test_sums_of_two_codes_in_steps_are_every_code() -> None:
    """Of every pair of integers, some of which most scales put between two codes."""
    rng, served = np.random.default_rng(0), 0
    for _ in range(40):
        zeros, (sa, sb, s) = rng.integers(-128, 128, 2), rng.uniform(0.01, 0.06, 3)
        sa, sb, s = (np.float32(x) for x in (sa, sb, s))
        ends = [(float(-128 - z), float(127 - z)) for z in zeros]
        factors = _factors(*ends, (float(sa), float(sb)), float(s), (0.0, 255.0))
        if factors is None:
            continue
        a, b = (np.arange(low, high + 1, dtype=np.float32) for low, high in ends)
        want = np.rint(np.clip(((a * sa)[:, None] + b * sb) / s, 0, 255))
        ka, kb = map(np.float32, factors)
        one = (a[:, None].astype(np.float64) * ka + b * kb).astype(np.float32)
        assert np.array_equal(np.rint(np.clip(one, 0, 255)), want)
        served += 1
    assert served > 30
    case = next(c for c in DEQUANTIZED if "block" in c.name)
    tails = [c.problem.tail for c in case.program().calls if c.problem.op == "IntegerConv"]
    assert ["Mul" in {step.name for step in t.expression.steps} for t in tails] == [False, True]
    assert _factors((-128.0, 127.0), (-128.0, 127.0), (4.0, 4.0), 0.5, (0.0, 255.0)) is None


@pytest.mark.parametrize("at", ["e", "k"])
def test_a_sum_of_codes_cast_to_integers_loses_its_fractions(at: str) -> None:
    """The model's own Casts are none of those that a DequantizeLinear has."""
    rng = np.random.default_rng(0)
    w, x = rng.integers(-127, 128, 256), rng.normal(size=(8, 16), scale=4).astype(np.float32)
    term, total = ("f", "k") if at == "e" else ("e", "f")
    lines = [f"i = Cast <to = 6> ({at}) f = Cast <to = 1> (i)", f"k = Add({term}, d)"]
    text = f"""agraph (float[8,16] x) => (int8[8,16] q)
    <int8 o = {{0}}, float s = {{0.1}}, float t = {{0.031}}, float u = {{0.002}},
     int8[16,16] w = {{{",".join(map(str, w))}}}>
    {{ c = QuantizeLinear(x, s, o) d = DequantizeLinear(c, s, o) v = DequantizeLinear(w, u, o)
      m = MatMul(d, v) p = QuantizeLinear(m, t, o) e = DequantizeLinear(p, t, o)
      {" ".join(lines if at == "e" else lines[::-1])} q = QuantizeLinear({total}, t, o) }}"""
    model = text_model(text)
    program = program_of(model, {"x": x})
    assert_same(interpret(program, {"x": x}, weights_of(model)).values(), run(model, {"x": x}))


def test_what_stands_behind_codes_is_part_of_a_product_or_a_norm() -> None:
    for case in (c for c in DEQUANTIZED if "rows" in c.name):
        product, summed, norm = (call.problem for call in case.program().calls)
        assert (product.op, product.tail.reads, product.tail.rows) == (
            "IntegerConv", ("float32",), (0,)
        )  # fmt: skip
        codes = case.feeds["x"].dtype.name
        assert (summed.tail.reads, norm.op, norm.tail.dtype) == ((codes,), "Norm", codes)


@pytest.mark.parametrize("case", ATTENTION, ids=lambda c: c.name)
def test_attention_stores_codes_where_a_kernel_of_wgmma_serves_it(case: Quantized) -> None:
    model = load(case.model)
    optimize(model, own_kernels=True)
    programs = [program_of(model, case.feeds, CHIPS[chip]) for chip in ("H200", "A100")]
    tails = [[c.problem.tail for c in p.calls if c.problem.op == "Sdpa"] for p in programs]
    kinds = [[tail and tail.dtype for tail in of] for of in tails]
    kind = case.expected()[0].dtype.name
    assert kinds == [[kind if case.feeds["q"].shape[1] > 1 else None], [None]]
    (y,) = interpret(programs[0], case.feeds, case.weights).values()
    case.check("y", y, case.expected()[0])
    assert unclean([x for c in programs[0].calls for x in c.launches], "sm_90a") == []


def test_convolutions_of_codes_copy_no_windows() -> None:
    for case in DEQUANTIZED:
        ops = [call.problem.op for call in case.program().calls]
        other = any(text in case.name for text in ("'group': 6", "(0,", "MaxPool"))
        assert ("IntegerConv" in ops) != other, case.name
        assert "GemmInteger" not in ops
    for case in (c for c in CASES if c.name.startswith("QLinearConv")):
        ops = [call.problem.op for call in case.program().calls]
        wider = " False " in case.name  # weights less their zero point are of 9 bits
        assert ("GemmInteger" in ops) == wider, case.name


def test_codes_of_float8_are_multiplied_as_they_are() -> None:
    for case in (*CODES8, *FLOATS_OF_CODES):
        if " (0," in case.name:
            continue
        problems = [call.problem for call in case.program().calls]
        products = [p for p in problems if p.op == "IntegerConv"]
        assert bool(products) == (case in CODES8), case.name
        if " Conv " not in case.name and "codes" in case.name and products:
            assert products[0].tail.dtype == "float8_e4m3fn"
        if "rows" in case.name:
            assert (len(products), problems[-2].op) == (2, "Norm")
            assert problems[-2].tail.dtype == "float8_e4m3fn"


def test_codes_whose_sums_int32_does_not_hold_stay_floats() -> None:
    for depth, held in ((33024, True), (33040, False)):
        case = dequantized("Conv", (1, depth, 1, 1), (8, depth, 1, 1))
        ops = [call.problem.op for call in case.program().calls]
        assert ("IntegerConv" in ops) == held


def test_products_of_rows_of_no_number_are_zero() -> None:
    """onnxruntime (1.32) gives what was in memory."""
    model = """<ir_version: 10, opset_import: ["" : 21]>
      g (uint8[3,K] a, uint8[K,5] b, uint8 z, float s) => (int32[3,5] x, uint8[3,5] y)
      { x = MatMulInteger (a, b, z, z) y = QLinearMatMul (a, s, z, b, s, z, s, z) }"""
    a, b = np.zeros((3, 0), np.uint8), np.zeros((0, 5), np.uint8)
    feeds = {"a": a, "b": b, "z": np.array(4, np.uint8), "s": np.array(0.5, np.float32)}
    found = interpreted(text_model(model), feeds)
    np.testing.assert_array_equal(found["x"], np.zeros((3, 5), np.int32))
    np.testing.assert_array_equal(found["y"], np.full((3, 5), 4, np.uint8))


def test_the_largest_of_codes_are_taken_of_codes() -> None:
    pools = [case for case in DEQUANTIZED if "MaxPool" in case.name]
    kinds = [
        c.problem.dtype for case in pools for c in case.program().calls if c.kernel == "MaxPool"
    ]
    assert kinds == ["int8", "float32", "float32", "float32"]


def compiled_kinds() -> list[Quantized]:
    """One case of each type: its generated kernels differ in nothing else that is ours."""
    found: dict[str, Quantized] = {}
    for case in CASES:
        found.setdefault(case.name.split()[0], case)
    return list(found.values())


@pytest.mark.parametrize("case", compiled_kinds(), ids=lambda c: c.name)
def test_kernels_compile_without_spills(case: Quantized) -> None:
    for chip in map(CHIPS.__getitem__, ("A100", "H200", "B200")):
        launches = [x for call in case.program(chip).calls for x in call.launches]
        assert unclean(launches, chip.arch) == []


_THREE = Window((1, 3, 3), (1, 2, 2), (1, 1, 1), (0, 1, 1), (0, 1, 1))
PROBLEMS = (
    IntegerConv(2, 1, 64, 64, (1, 9, 9), (1, 5, 5), _THREE, "int8", 5),
    IntegerConv(2, 1, 64, 63, (2, 9, 9), (2, 5, 5), _THREE, "uint8", 5),
    *(call.problem for case in (*DEQUANTIZED, *CODES8)
      if "192, 80" in case.name or "(137, 208) (208, 320) Gelu" in case.name
      for call in case.program().calls if isinstance(call.problem, IntegerConv)),
    PackedProduct(m=1, n=64, k=4096, dtype="float16", bits=4, block=32, blocks=128,
               zero="packed", static_b=True, epilogue=Epilogue(bias=True)),
    PackedProduct(m=8, n=64, k=4096, dtype="float32", bits=4, block=32, blocks=128,
               zero=""),
    PackedProduct(m=1, n=64, k=2048, dtype="float16", bits=4, block=32, blocks=64, tiled=True,
               zero="packed", norm="layer", epilogue=Epilogue(gate=True, act="silu")),
    PackedProduct(m=64, n=64, k=8192, dtype="bfloat16", bits=4, block=128, blocks=64, tiled=True,
               epilogue=Epilogue(residual=True)),
    IntegerProduct(m=64, n=64, k=64, dtype="uint8", b_dtype="int8",
               za="each", zb="each", lda=64, ldb=64),
)  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.op} {p.dtype}")
def test_every_configuration_compiles_without_spills(
    problem: PackedProduct | IntegerProduct | IntegerConv,
) -> None:
    kernels = [k for k in candidates(problem.op) if k.supports(problem, H200) is None]
    kernels = kernels if problem.op == "IntegerConv" else kernels[:1]
    for kernel, how in ((k, how) for k in kernels for how in k.configs(problem, H200)):
        (launch,) = kernel.launch(problem, how, H200)
        assert launch.smem <= H200.smem_per_block
        assert unclean([launch]) == [], how


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((1, 14336, 4096), "mma"), ((16, 14336, 4096), "mma"), ((256, 14336, 4096), "unpack_wgmma")],
)
def test_many_rows_unpack_the_weights_first(shape: tuple[int, int, int], kernel: str) -> None:
    m, n, k = shape
    problem = PackedProduct(m=m, n=n, k=k, dtype="float16", bits=4, block=32,
                         blocks=k // 32, zero="", static_b=True)  # fmt: skip
    choice = select(problem.op, problem, H200)
    assert choice.kernel.name == kernel
    forced = select(problem.op, problem, H200, {"MatMulNBits": "unpack_simt"})
    assert forced.kernel.name == "unpack_simt"


@pytest.mark.parametrize("width", [64, 768])
def test_the_cheapest_candidate_serves_rows_of_codes(width: int) -> None:
    sizes = (1, 1, 32)
    problem = IntegerConv(1, 1, width, width, sizes, sizes, ONE_TAP, "uint8")
    cost = {k.name: k.cost(problem, KernelConfig.of(), H200) for k in candidates(problem.op)}
    assert select(problem.op, problem, H200).kernel.name == min(cost, key=cost.__getitem__)


def test_a_cast_to_float8_is_saturated_where_asked() -> None:
    x = np.array([448, 465, 1e9, -np.inf, np.nan, 1e-3, 0.0], np.float32)
    for saturate, want in ((1, np.clip(x, -448, 448)), (0, x)):
        text = (
            f"agraph (float[7] x) => (float[7] y) {{ q = Cast<to=17, saturate={saturate}>(x) "
            "y = Cast<to=1>(q) }"
        )
        found = walk.lower(load(text_model(text)), {"x": (x.shape, "float32")}, H200)
        assert not found.fallbacks
        y = interpret(found, {"x": x}, {})["y"]
        np.testing.assert_array_equal(y, want.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
