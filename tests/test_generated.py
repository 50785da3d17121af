"""Kernels of pointwise, indexing and random ops compile for every type they claim; no GPU."""

import pytest

from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.pointwise import (
    COMPARES,
    FLOATS,
    LARGEST,
    NARROW_FLOATS,
    STORAGE,
    TABLE,
    Code,
    launch_of,
)
from onnx_fuse.ir.build import text_model
from onnx_fuse.lower import elementwise
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.problem import CHIPS

INTEGERS = ("Bitwise", "Shift")
LOGICAL = ("And", "Not", "Or", "Xor")
EXACT = (
    *("Abs", "Add", "ClipMax", "ClipMin", "Div", "FMod"),
    *("Max", "Min", "Mod", "Mul", "Neg", "Sub"),
)
"""Steps that integers have as well."""
# CUDA's own sine and cosine keep a table of digits of pi in local memory, for large arguments.
TRIGONOMETRIC = ("Cos", "Sin", "Tan")


def flat(buffer: int, dtype: str, size: int = 1000) -> Tensor:
    return Tensor(buffer, dtype, (size,), (1,))


def steps_of(dtype: str) -> list[str]:
    if dtype == "bool":
        return [*LOGICAL, "Equal", "Where"]
    if dtype in NARROW_FLOATS:  # moved, compared and cast; other operators have no such types
        return ["Equal", "Where", "Cast"]
    if dtype in FLOATS:
        left_out = (*LOGICAL, "Quantize", "Code")
        return [n for n in TABLE if not n.startswith(INTEGERS) and n not in left_out]
    # ONNX shifts unsigned integers, and int32
    shifts = [n for n in TABLE if n.startswith(INTEGERS)]
    return [*EXACT, *shifts, "Equal", "Less", "Where", "Sign", "Cast"]


# e8m0 holds scales: it is read, and nothing is cast to it
@pytest.mark.parametrize("dtype", [d for d in STORAGE if d != "float8_e8m0fnu"])
def test_every_step_compiles(dtype: str) -> None:
    code = Code()
    operands = [code.load(flat(i, dtype)) for i in range(3)]
    condition = code.load(flat(3, "bool"))
    stores, writes = [], []
    for name in steps_of(dtype):
        if name in TRIGONOMETRIC:
            continue
        first = condition if name == "Where" else operands[0]
        kind = "bool" if name in (*COMPARES, *LOGICAL) else "int64" if name == "Iota" else dtype
        stores.append(code.step(name, kind, first, *operands[1:]))
        writes.append(flat(10 + len(writes), kind))
    launch = launch_of(code.expression(*stores), code.reads, writes)
    (report,) = nvrtc.resources(launch.source).values()
    assert report.spill_bytes == 0


@pytest.mark.parametrize(
    ("dtype", "name", "other", "wanted"),
    [
        ("float32", "Add", 1, "__fmaf_rn(x0, x1, t1)"),
        ("bfloat16", "Sub", 1, "__fmaf_rn(x0, x1, -t1)"),
        ("float64", "Sub", 1, "__fma_rn(x0, x1, -t1)"),
        ("float32", "Sub", 0, "t0 - t0"),
        ("int32", "Add", 1, "t0 + t1"),
    ],
)
def test_which_of_two_products_joins_a_sum_is_said(dtype, name, other, wanted):
    """The compiler chose by what else the kernel computes: an update that writes copies had other
    bits.
    """
    code = Code()
    x = [code.load(flat(i, dtype)) for i in range(4)]
    products = [code.step("Mul", dtype, x[i], x[i + 1]) for i in (0, 2)]
    y = code.step(name, dtype, products[0], products[other])
    launch = launch_of(code.expression(y), code.reads, [flat(9, dtype)])
    assert wanted in launch.source


def test_steps_of_codes_compile() -> None:
    code = Code()
    number = code.step("Quantize", "float32", *(code.load(flat(i, "float32")) for i in range(6)))
    stores = code.step("Cast", "float16", number), code.step("Code", "int8", number)
    writes = [flat(10, "float16"), flat(11, "int8")]
    launch = launch_of(code.expression(*stores), code.reads, writes)
    (report,) = nvrtc.resources(launch.source).values()
    assert report.spill_bytes == 0


LAYOUTS = {
    "flat, with a tail": [((1001,), (1,)), ((1001,), (1,))],
    "a row for every row": [((8, 24), (0, 1)), ((8, 24), (24, 1))],
    "a number for every row": [((8, 24), (1, 0)), ((8, 24), (24, 1))],
    "transposed": [((6, 7, 8), (1, 6, 42)), ((6, 7, 8), (56, 8, 1))],
    "reversed": [((5, 8), (-8, 1)), ((5, 8), (8, 1))],
    "into a slice": [((4, 8), (8, 1)), ((4, 8), (20, 1))],
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_compile_without_local_memory(name: str, dtype: str) -> None:
    (shape, strides), (_, out) = LAYOUTS[name]
    code = Code()
    x = code.load(Tensor(0, dtype, shape, strides))
    launch = launch_of(code.expression(x), code.reads, [Tensor(1, dtype, shape, out)])
    assert nvrtc.resources(launch.source)["pointwise"].clean


def test_other_sizes_need_no_other_source() -> None:
    def source(rows: int, columns: int) -> str:
        code = Code()
        x = code.load(Tensor(0, "float32", (rows, columns), (1, rows)))
        write = Tensor(1, "float32", (rows, columns), (columns, 1))
        return launch_of(code.expression(x), code.reads, [write]).source

    assert source(8, 16) == source(24, 32)


ROWS = {
    # the table's and the index's strides over y
    "rows of whole vectors": ((6, 8), (0, 1), (1, 0)),
    "rows of odd length": ((6, 7), (0, 1), (1, 0)),
    "columns": ((5, 6), (8, 0), (0, 1)),
    "numbers, with a tail": ((1001,), (0,), (1,)),
    "one row, with a tail": ((1001,), (1,), (0,)),
}


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_by_indices_compile(name: str, dtype: str, index: str) -> None:
    shape, table, chosen = ROWS[name]
    code = Code()
    row = code.row(Tensor(0, dtype, shape, table), Tensor(1, index, shape, chosen), 8, 100)
    stored = (row, code.step("Add", dtype, row, row))
    strides = (shape[1], 1) if len(shape) == 2 else (1,)
    launch = launch_of(
        code.expression(*stored), code.reads, [Tensor(i, dtype, shape, strides) for i in (2, 3)]
    )
    assert nvrtc.resources(launch.source)["pointwise"].clean
    vectors = name.startswith("one row") or name.endswith("whole vectors")
    assert ("load<" in launch.source.split(" a1v")[1].split(";")[0]) == vectors


@pytest.mark.parametrize("shape", ["9,768", "9,4096", "3,33", "200,50000"])
@pytest.mark.parametrize("nodes", ["y = Cast<to=1>(n)", "a = Add(n, r) t = Gelu(a) y = Mul(t, q)"])
def test_norms_with_a_suffix_compile(nodes: str, shape: str) -> None:
    kind, size = "float" if "Cast" in nodes else "float16", tuple(map(int, shape.split(",")))
    model = text_model(
        f"agraph (float16[{shape}] x, float16[{size[1]}] g, float16[{size[1]}] b, "
        f"float16[{shape}] r, float16[{shape}] q) => ({kind}[{shape}] y) "
        f"{{ n = LayerNormalization(x, g, b) {nodes} }}"
    )
    shapes = dict.fromkeys("xrq", (size, "float16")) | dict.fromkeys("gb", (size[1:], "float16"))
    (call,) = lower(model, shapes, CHIPS["H200"]).calls
    (launch,) = call.launches
    assert nvrtc.resources(launch.source, launch.defines)["layernorm_row"].clean


CONVOLUTIONS = {
    # x, w, and the kernel that stores
    "direct": ((2, 8, 9, 9), (8, 1, 3, 3), "conv_direct"),
    "tiles": ((64, 16, 33, 34), (130, 16, 3, 3), "conv"),
    "split": ((1, 512, 7, 7), (65, 512, 3, 3), "conv_finish"),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])  # 16 bits: test_channels_last.py
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_with_a_residual_and_an_activation_are_one_call(name, dtype) -> None:
    x, w, entry = CONVOLUTIONS[name]
    y = (x[0], w[0], *x[2:])
    kind = dtype.replace("float64", "double").replace("float32", "float")
    ends = ", ".join(
        f"{kind}{list(shape)} {n}" for n, shape in (("x", x), ("w", w), ("c", w[:1]), ("r", y))
    )
    model = text_model(
        f"agraph ({ends}) => ({kind}{list(y)} y) {{ z = Conv<pads=[1,1,1,1], "
        f"group={x[1] // w[1]}>(x, w, c) s = Add(r, z) y = Relu(s) }}"
    )
    shapes = {"x": (x, dtype), "w": (w, dtype), "c": (w[:1], dtype), "r": (y, dtype)}
    (call,) = lower(model, shapes, CHIPS["H200"]).calls
    assert call.kernel == "Conv+Add+Relu"
    assert call.launches[-1].entry == entry
    for launch in call.launches:
        assert nvrtc.resources(launch.source, launch.defines)[launch.entry].clean


@pytest.mark.parametrize(("slope", "calls"), [("8,1,1", 1), ("8", 2), ("1,1,8", 2), ("1,8,1,1", 1)])
def test_a_slope_of_columns_is_none_of_filters(slope: str, calls: int) -> None:
    """As many columns as filters: a vector lies along the last axis."""
    text = (
        f"agraph (float[2,3,8,8] x, float[8,3,3,3] w, float[8] c, float[{slope}] a) => "
        "(float[2,8,8,8] y) { y = onnx_fuse.ConvPRelu<kernel_shape=[3,3], strides=[1,1], "
        "pads=[1,1,1,1], dilations=[1,1], group=1>(x, w, c, a) }"
    )
    sizes = {"x": (2, 3, 8, 8), "w": (8, 3, 3, 3), "c": (8,)}
    sizes["a"] = tuple(map(int, slope.split(",")))
    shapes = {name: (size, "float32") for name, size in sizes.items()}
    assert len(lower(text_model(text), shapes, CHIPS["H200"]).calls) == calls


@pytest.mark.parametrize("index", ["int", "i64"])
@pytest.mark.parametrize("unit", ["u8", "u16", "u32", "u64", "u128"])
def test_gathers(unit: str, index: str) -> None:
    reports = nvrtc.resources("indexing/gather.cu", (("IDX", index), ("T", unit)))
    assert all(report.clean for report in reports.values())


@pytest.mark.parametrize("unit", ["u8", "u16", "u32", "u64"])
def test_copies_of_pieces(unit: str) -> None:
    assert nvrtc.resources("indexing/pieces.cu", (("ROWS", "4"), ("T", unit)))["copy_pieces"].clean


@pytest.mark.parametrize("reduce", range(5))
@pytest.mark.parametrize("dtype", ["float", "double", "f16", "bf16", "i64", "u8", "bool"])
def test_scatters(dtype: str, reduce: int) -> None:
    defines = (("IDX", "i64"), ("REDUCE", str(reduce)), ("T", dtype))
    reports = nvrtc.resources("indexing/scatter.cu", defines)
    assert all(report.clean for report in reports.values())


@pytest.mark.parametrize("kind", range(4))
def test_random_numbers(kind: int) -> None:
    defines = (("FIXED", "0"), ("KIND", str(kind)), ("T", "f16"), ("X", "float"))
    assert nvrtc.resources("random/philox.cu", defines)["philox_fill"].clean


def test_batched_launches_compile() -> None:
    count = range(3)
    ends = ", ".join(f"float[64,32] x{i}" for i in count)
    outs = ", ".join(f"float[32] y{i}" for i in count)
    nodes = " ".join(f"y{i} = ReduceSum<keepdims=0>(x{i}, axes)" for i in count)
    model = text_model(f"agraph ({ends}) => ({outs}) <int64[1] axes = {{0}}> {{ {nodes} }}")
    shapes = {f"x{i}": ((64, 32), "float32") for i in count}
    calls = lower(model, shapes, CHIPS["H200"]).calls
    assert all("x3" in call.kernel for call in calls)
    for call in calls:
        (launch,) = call.launches
        assert nvrtc.resources(launch.source, launch.defines)["batched"].clean


def test_table_names_are_onnx_or_steps() -> None:
    served = {name for _, name in elementwise.LOWERINGS}
    inner = {"Identity", "Square", "GeluTanh", "FMod", "Iota", "ClipMax", "ClipMin", "Max", "Min"}
    inner |= {"Cast", "CastBool", "CastFloat16", "CastBFloat16", "ShiftLeft", "ShiftRight"}
    inner |= {"Saturate", "Scale", "Steps", "Quantize", "Code"}  # of quantization
    inner |= {f"Cast{name}" for name in LARGEST}
    assert set(TABLE) - served <= inner
