"""Cases of the quantized operators: models, feeds, and what onnxruntime's CPU makes of them.

Scales are feeds, so that nothing is worked out before the program runs; integers of less than 8
bits and float8 are initializers or stay inside, since onnxruntime has no arrays of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import stock, sums_saturate

from onnx_fuse.autodiff.load import load
from onnx_fuse.kernels import Selection, candidates
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Program
from onnx_fuse.program.problem import CHIPS, Hardware

KINDS = {
    "int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "int16": TensorProto.INT16,
    "uint16": TensorProto.UINT16, "int4": TensorProto.INT4, "uint4": TensorProto.UINT4,
    "float8_e4m3fn": TensorProto.FLOAT8E4M3FN, "float8_e5m2": TensorProto.FLOAT8E5M2,
    "float8_e4m3fnuz": TensorProto.FLOAT8E4M3FNUZ, "float8_e5m2fnuz": TensorProto.FLOAT8E5M2FNUZ,
    "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int32": TensorProto.INT32,
    "bfloat16": TensorProto.BFLOAT16,
}  # fmt: skip
INTS = ("int8", "uint8", "int16", "uint16", "int4", "uint4")
FLOATS8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


@dataclass(frozen=True)
class Quantized:
    """A model, what is fed to it, and how near to onnxruntime's its outputs must be."""

    name: str
    model: bytes = field(repr=False)
    feeds: dict[str, np.ndarray] = field(repr=False)
    tolerance: float = 0.0
    """As a part of the largest element; 0: the same bits, but for the NaN's own."""
    want: tuple[np.ndarray, ...] = field(default=(), repr=False)
    """What onnxruntime does not compute."""
    steps: int = 0
    """By how many steps of quantization integers may differ, which float sums came before."""
    relative: float = 0.0
    """As a part of the element itself, for steps of float8, which grow with it."""
    newest: bool = False
    """Whether onnxruntime before 1.32 errs: numbers beyond int32, `precision`, halves to float8."""

    @property
    def weights(self) -> dict[str, np.ndarray]:
        graph = onnx.load_from_string(self.model).graph
        return {t.name: numpy_helper.to_array(t) for t in graph.initializer}

    def expected(self) -> list[np.ndarray]:
        if self.newest and tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 32):
            pytest.skip("onnxruntime before 1.32 quantizes such numbers otherwise")
        if "('uint8', 'int8'" in self.name and sums_saturate():
            pytest.skip("onnxruntime's sums of uint8 times int8 saturate on this CPU")
        ends = onnx.load_from_string(self.model).graph.output
        kinds = [helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in ends]
        found = self.want or stock(self.model).run(None, self.feeds)
        # onnxruntime gives float8 as bytes
        return [y if y.dtype == k else y.view(k) for y, k in zip(found, kinds, strict=True)]

    def program(self, hw: Hardware = CHIPS["H200"]) -> Program:
        """The case lowered: no GPU is needed."""
        shapes = {name: (a.shape, a.dtype.name) for name, a in self.feeds.items()}
        return lower(load(self.model), shapes, hw)

    def variants(self, program: Program, hw: Hardware) -> list[Selection]:
        """Our own kernels in every configuration, and one of each that unpacks for another."""
        found = []
        for problem in (call.problem for call in program.calls):
            if problem is None or problem.op not in ("MatMulNBits", "GemmInteger", "IntegerConv"):
                continue
            for kernel in candidates(problem.op):
                if kernel.supports(problem, hw) is None:
                    hows = kernel.configs(problem, hw)
                    hows = hows[:1] if kernel.name.startswith("unpack") else hows
                    found += [Selection(kernel, how, 0.0, "each") for how in hows]
        return found

    def check(self, name: str, y: np.ndarray, want: np.ndarray) -> None:
        assert (y.shape, y.dtype) == (want.shape, want.dtype), name
        if self.steps and want.dtype.kind in "iu":
            assert np.abs(y.astype(int) - want.astype(int)).max(initial=0) <= self.steps, name
            return
        if not self.tolerance:
            np.testing.assert_array_equal(y, want, err_msg=name)
            return
        y, wide = y.astype(np.float64), want.astype(np.float64)
        bound = self.tolerance * np.abs(wide).max(initial=0, where=np.isfinite(wide))
        np.testing.assert_allclose(y, wide, self.relative, bound, err_msg=name)


def quantized(
    name: str, nodes: str, feeds: dict[str, np.ndarray],
    outputs: dict[str, tuple[str, tuple[Any, ...]]],
    weights: dict[str, np.ndarray] | None = None, opset: int = 23, **how: Any,
) -> Quantized:  # fmt: skip
    """The case of nodes as ONNX text; the feeds are its inputs, its initializers `weights`."""
    kinds = {n: (a.dtype.name, a.shape) for n, a in feeds.items()}
    inputs, ends = (
        [helper.make_tensor_value_info(n, KINDS[kind], shape) for n, (kind, shape) in each.items()]
        for each in (kinds, outputs)
    )
    held = [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()]
    parsed = onnx.parser.parse_graph(f"g () => () {{ {nodes} }}").node
    graph = helper.make_graph(parsed, "quantized", inputs, ends, held)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return Quantized(name, model.SerializeToString(), feeds, **how)


def written(attributes: dict[str, Any]) -> str:
    """Attributes as ONNX text."""
    values = {k: f'"{v}"' if isinstance(v, str) else v for k, v in attributes.items()}
    return f"<{', '.join(f'{k} = {v}' for k, v in values.items())}>" if values else ""


HOSTILE = [np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3e38, -3e38, 1e-40, 65504]


def values(shape: tuple[int, ...], dtype: str = "float32", spread: float = 60) -> np.ndarray:
    """Normal numbers, the first of them hostile."""
    rng = np.random.default_rng(sum(shape))
    x = (rng.standard_normal(shape) * spread).astype(np.float32)
    flat = x.reshape(-1)
    flat[: len(HOSTILE)] = HOSTILE[: flat.size]
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def scales(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(7)
    return rng.uniform(0.1, 2, shape).astype(np.float32).astype(dtype)


def integers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    kind = getattr(ml_dtypes, dtype, dtype)
    info = ml_dtypes.iinfo(kind) if dtype in ("int4", "uint4") else np.iinfo(kind)
    return rng.integers(int(info.min), int(info.max) + 1, shape).astype(kind)


# name -> shape of x, of scale, attributes
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "tensor": ((7, 33), (), {}),
    "axis": ((3, 5, 7), (5,), {"axis": 1}),
    "last axis": ((9, 16), (16,), {"axis": -1}),
    "blocked": ((4, 96, 3), (4, 3, 3), {"axis": 1, "block_size": 32}),
    "blocked along the last axis": ((6, 32), (6, 2), {"axis": -1, "block_size": 16}),
    "the last block is part of one": ((5, 21), (3, 21), {"axis": 0, "block_size": 2}),
    "empty": ((0, 4), (), {}),
}


def linear(
    kind: str, layout: str, dtype: str = "float32", zero: bool = True, **more: Any
) -> Quantized:
    """Quantize, and dequantize what came out."""
    shape, scale_shape, attrs = LAYOUTS[layout]
    feeds = {"x": values(shape, dtype), "s": scales(scale_shape, dtype)}
    weights = {"z": integers(scale_shape, kind)} if zero else {}
    point = ", z" if zero else ""
    first = attrs | more | ({} if zero else {"output_dtype": KINDS[kind]})
    nodes = (
        f"q = QuantizeLinear {written(first)} (x, s{point}) "
        f"y = DequantizeLinear {written(attrs)} (q, s{point})"
    )
    outputs = {"y": (dtype, shape)} | ({"q": (kind, shape)} if kind in INTS[:4] else {})
    extra = "".join(f", {k}={v}" for k, v in more.items()) + ("" if zero else ", no zero point")
    name = f"{kind} {dtype} {layout}{extra}"
    return quantized(name, nodes, feeds, outputs, weights, newest=True)


def floats8(kind: str, layout: str, dtype: str = "float32") -> Quantized:
    """Quantize to a float8 and dequantize."""
    shape, scale_shape, attrs = LAYOUTS[layout]
    feeds = {"x": values(shape, dtype, 5), "s": scales(scale_shape, dtype)}
    weights = {"z": np.zeros(scale_shape, getattr(ml_dtypes, kind))}
    how = written(attrs)
    nodes = f"q = QuantizeLinear {how} (x, s, z) y = DequantizeLinear {how} (q, s, z)"
    name = f"{kind} {dtype} {layout}"
    return quantized(name, nodes, feeds, {"y": (dtype, shape)}, weights, newest=True)


def weights_of(kind: str, dtype: str) -> Quantized:
    """Dequantize an initializer, as the weights of models are."""
    weights = {"q": integers((32, 6), kind), "z": integers((2, 6), kind)}
    node = "y = DequantizeLinear <axis = 0, block_size = 16> (q, s, z)"
    feeds, outputs = {"s": scales((2, 6), dtype)}, {"y": (dtype, (32, 6))}
    return quantized(f"{kind} weights to {dtype}", node, feeds, outputs, weights)


def dynamic(x: np.ndarray, name: str) -> Quantized:
    outputs = {"y": ("uint8", x.shape), "s": ("float32", ()), "z": ("uint8", ())}
    return quantized(f"dynamic {name}", "y, s, z = DynamicQuantizeLinear (x)", {"x": x}, outputs)


PRODUCT = {"float32": 2e-5, "float16": 2e-3}
"""Tolerances of products, which sum in another order."""


def nbits(
    m: int, n: int, k: int, bits: int, block: int, dtype: str = "float32", zero: str = "",
    bias: bool = False, groups: bool = False, batch: tuple[int, ...] = (),
) -> Quantized:  # fmt: skip
    """com.microsoft.MatMulNBits; the weights are initializers."""
    rng = np.random.default_rng(n + k)
    blocks = -(-k // block)
    feeds = {"a": rng.standard_normal((*batch, m, k)).astype(dtype)}
    weights = {
        "q": rng.integers(0, 256, (n, blocks, block * bits // 8)).astype(np.uint8),
        "scale": (rng.uniform(0.5, 2, (n, blocks)) / 2**bits).astype(dtype),
    }
    if zero == "packed":
        weights["zero"] = rng.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8)
    elif zero:
        weights["zero"] = rng.uniform(0, 2**bits, (n, blocks)).astype(dtype)
    if groups:
        weights["groups"] = rng.integers(0, blocks, k).astype(np.int32)
    if bias:
        weights["bias"] = rng.standard_normal(n).astype(dtype)
    given = [name if name in weights else "" for name in ("q", "scale", "zero", "groups", "bias")]
    how = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": 1}
    node = f"y = com.microsoft.MatMulNBits {written(how)} ({', '.join(['a', *given])})"
    outputs = {"y": (dtype, (*batch, m, n))}
    flags = "".join(
        f" {x}" for x in (zero and f"zero {zero}", bias and "bias", groups and "groups") if x
    )
    name = f"MatMulNBits {m}x{k}x{n} {bits} bits of {block} {dtype}{flags}"
    return quantized(name, node, feeds, outputs, weights, tolerance=PRODUCT[dtype])


def gated_layer(m: int, zero: str, block: int, norm: str) -> Quantized:
    """norm(x + r), a product of two halves with a gate, and a product to which the sum is added."""
    k, hidden, dtype = 256, 128, "float16"
    rng = np.random.default_rng(m + block)
    feeds = {name: rng.standard_normal((m, k)).astype(dtype) for name in ("x", "r")}
    weights = {"g": rng.uniform(0.5, 1.5, k).astype(dtype)}

    def product(a: str, y: str, n: int, k: int) -> str:
        blocks = k // block
        weights[f"q{y}"] = rng.integers(0, 256, (n, blocks, block // 2)).astype(np.uint8)
        weights[f"s{y}"] = (rng.uniform(0.5, 2, (n, blocks)) / 64).astype(dtype)
        if zero:
            weights[f"z{y}"] = rng.integers(0, 256, (n, -(-blocks // 2))).astype(np.uint8)
        how = written({"K": k, "N": n, "bits": 4, "block_size": block})
        points = f", z{y}" if zero else ""
        return f"{y} = com.microsoft.MatMulNBits {how} ({a}, q{y}, s{y}{points})"

    if norm == "Layer":
        weights["b"] = rng.standard_normal(k).astype(dtype)
    after = "g, b" if norm == "Layer" else "g"
    nodes = f"""t = Add (x, r) n = {norm}Normalization <epsilon = 0.00001> (t, {after})
        {product("n", "z", 2 * hidden, k)}
        a, u = Split <axis = -1, num_outputs = 2> (z) f = Gelu (a) h = Mul (f, u)
        {product("h", "d", k, hidden)}
        y = Add (d, t) v = {norm}Normalization <epsilon = 0.00001> (y, {after})
        {product("v", "w", 48, k)}"""
    name = f"MatMulNBits gated {m} rows, blocks of {block}, {zero} {norm}"
    outputs = {"y": (dtype, (m, k)), "w": (dtype, (m, 48))}
    # float16 rounds what stands between, and one rounding more or less is that of a norm's result
    return quantized(name, nodes, feeds, outputs, weights, tolerance=6e-3)


NBITS = [
    gated_layer(1, "", 32, "RMS"),
    gated_layer(3, "packed", 32, "Layer"),
    gated_layer(12, "", 128, "RMS"),
    gated_layer(100, "packed", 32, "RMS"),
    gated_layer(300, "", 32, "Layer"),
    nbits(1, 40, 2048, 4, 32, "float16"),
    nbits(9, 24, 1088, 4, 32, "float16", "packed", bias=True),
    nbits(33, 48, 512, 4, 64, "float16", "packed"),
    nbits(70, 40, 384, 4, 128, "float16", "packed", bias=True),
    nbits(1, 48, 256, 4, 32),
    nbits(3, 40, 200, 4, 16, zero="packed"),
    nbits(1, 33, 512, 4, 128, "float16", "packed", bias=True),
    nbits(2, 16, 96, 4, 64, "float16"),
    nbits(8, 64, 1024, 4, 32, "float16", "packed"),
    nbits(5, 64, 1024, 4, 256, "float16", "packed"),
    nbits(17, 31, 4160, 4, 64, "float16", "packed"),
    nbits(1, 48, 256, 8, 32, zero="packed"),
    nbits(4, 48, 768, 8, 16, "float16", bias=True),
    nbits(7, 48, 768, 8, 128, "float16", "packed"),
    nbits(2, 3, 100, 4, 32, batch=(2,)),
    nbits(2, 24, 64, 4, 32, zero="float"),
    nbits(2, 24, 64, 4, 32, groups=True),
    nbits(100, 24, 64, 4, 32, "float16"),
    nbits(2, 24, 64, 8, 32, "float32", zero="packed", batch=(3, 2)),
]
"""What serves them: few rows and many, rows of weights that are no multiple of anything."""


def held_weights(kind: str, block: int, zero: bool, dtype: str = "float32") -> Quantized:
    """DequantizeLinear of weights [k, n] that are initializers, and the MatMul that reads them."""
    shape = (2, 64) if block else (64,)
    attrs = {"axis": 0, "block_size": block} if block else {"axis": 1}
    rng = np.random.default_rng(5)
    feeds = {"x": rng.standard_normal((3, 2 * block or 48)).astype(dtype)}
    weights = {"q": integers((2 * block or 48, 64), kind), "s": scales(shape, dtype)}
    weights |= {"z": integers(shape, kind)} if zero else {}
    point = ", z" if zero else ""
    nodes = f"w = DequantizeLinear {written(attrs)} (q, s{point}) y = MatMul (x, w)"
    name, outputs = f"held {kind} {block} {dtype} {zero}", {"y": (dtype, (3, 64))}
    return quantized(name, nodes, feeds, outputs, weights, tolerance=PRODUCT[dtype])


HELD = [
    *(held_weights(kind, block, zero) for kind in ("int4", "uint4") for block in (0, 32)
      for zero in (False, True)),
    held_weights("uint4", 16, True, "float16"),
    held_weights("int8", 0, True),
    held_weights("uint8", 32, False),
]  # fmt: skip


def products(
    a: tuple[int, ...], b: tuple[int, ...], kinds: tuple[str, str], zeros: tuple[Any, Any],
    held: bool = True,
) -> Quantized:  # fmt: skip
    """MatMulInteger; zero points by their shape, None where absent; b is an initializer if held."""
    every = {"a": integers(a, kinds[0]), "b": integers(b, kinds[1])}
    every |= {
        name: integers(shape, kind)
        for name, shape, kind in zip(("za", "zb"), zeros, kinds, strict=True)
        if shape is not None
    }
    feeds = {k: v for k, v in every.items() if not (held and k in ("b", "zb"))}
    weights = {k: v for k, v in every.items() if k not in feeds}
    given = ["a", "b", *("" if s is None else n for n, s in zip(("za", "zb"), zeros, strict=True))]
    node = f"y = MatMulInteger ({', '.join(given)})"
    name = f"MatMulInteger {a} {b} {kinds} {zeros}{'' if held else ' fed'}"
    want: tuple[np.ndarray, ...] = ()
    if zeros[0]:  # onnxruntime refuses a zero point for each row of a
        left = every["a"].astype(np.int32) - every["za"].astype(np.int32)[:, None]
        right = every["b"].astype(np.int32) - every.get("zb", np.zeros(1)).astype(np.int32)
        want = (left @ right,)
    shape = (np.zeros(a, np.int8) @ np.zeros(b, np.int8)).shape
    return quantized(name, node, feeds, {"y": ("int32", shape)}, weights, want=want)


def qlinear_matmul(
    a: tuple[int, ...], b: tuple[int, ...], kinds: tuple[str, str, str], each: bool, held: bool
) -> Quantized:
    """QLinearMatMul; b's scale and zero point one a column if `each`."""
    column = (b[-1],) if each else ()
    every = {
        "a": integers(a, kinds[0]), "sa": np.float32(0.017), "za": integers((), kinds[0]),
        "b": integers(b, kinds[1]), "sb": scales(column) / np.float32(90),
        "zb": integers(column, kinds[1]), "sy": np.float32(0.61), "zy": integers((), kinds[2]),
    }  # fmt: skip
    every = {name: np.asarray(array) for name, array in every.items()}
    feeds = {k: v for k, v in every.items() if k == "a" or not held}
    weights = {k: v for k, v in every.items() if k not in feeds}
    node = f"y = QLinearMatMul ({', '.join(every)})"
    name = f"QLinearMatMul {a} {b} {kinds} {'each' if each else 'one'} {held}"
    shape = (np.zeros(a, np.int8) @ np.zeros(b, np.int8)).shape
    return quantized(name, node, feeds, {"y": (kinds[2], shape)}, weights)


def convolution(
    x: tuple[int, ...], w: tuple[int, ...], kinds: tuple[str, str], op: str, each: bool = False,
    bias: bool = False, **attrs: Any,
) -> Quantized:  # fmt: skip
    """ConvInteger and QLinearConv; w's scale and zero point one a filter if `each`."""
    filters = (w[0],) if each else ()
    parts = {"x": integers(x, kinds[0]), "w": integers(w, kinds[1])}
    parts |= {"zx": integers((), kinds[0]), "zw": integers(filters, kinds[1])}
    given = ["x", "w", "zx", "zw"]
    if op == "QLinearConv":
        # onnxruntime takes no other zero point for a signed filter of several
        parts["zw"] = np.zeros(filters, kinds[1]) if each else parts["zw"]
        parts |= {"sx": np.float32(0.02), "sw": scales(filters) / np.float32(100)}
        parts |= {"sy": np.float32(0.11), "zy": integers((), kinds[0])}
        given = ["x", "sx", "zx", "w", "sw", "zw", "sy", "zy"]
        if bias:
            rng = np.random.default_rng(3)
            parts["bias"] = rng.integers(-9000, 9000, w[0]).astype(np.int32)
            given.append("bias")
    weights = {k: np.asarray(v) for k, v in parts.items() if k != "x"}
    node = f"y = {op} {written(attrs)} ({', '.join(given)})"
    kind = "int32" if op == "ConvInteger" else kinds[0]
    outputs = {"y": (kind, ("n", "c", *"dhw"[: len(x) - 2]))}
    name = f"{op} {x} {w} {kinds} {each} {attrs}"
    return quantized(name, node, {"x": parts["x"]}, outputs, weights)


PRODUCTS = [
    products((5, 64), (64, 33), ("uint8", "int8"), ((), ())),
    products((5, 70), (70, 33), ("uint8", "uint8"), ((), (33,))),
    products((5, 70), (70, 33), ("int8", "int8"), ((5,), None), held=False),
    products((5, 16), (16, 48), ("uint8", "int8"), (None, ()), held=False),
    products((2, 3, 5, 48), (48, 20), ("uint8", "int8"), ((), (20,))),
    products((2, 3, 5, 20), (2, 3, 20, 9), ("int8", "uint8"), ((), ()), held=False),
    products((3, 5, 20), (3, 20, 9), ("uint8", "uint8"), ((), (3, 1, 9)), held=False),
    products((4, 129), (129, 1), ("uint8", "int8"), ((), ())),
    products((200, 512), (512, 300), ("uint8", "int8"), ((), (300,))),
    products((150, 96), (96, 140), ("int8", "int8"), ((150,), (140,)), held=False),
    qlinear_matmul((7, 64), (64, 48), ("uint8", "int8", "uint8"), True, True),
    qlinear_matmul((2, 7, 30), (30, 9), ("uint8", "uint8", "uint8"), False, True),
    qlinear_matmul((2, 7, 30), (2, 30, 9), ("int8", "int8", "int8"), False, False),
    convolution((2, 16, 9, 9), (8, 16, 3, 3), ("uint8", "uint8"), "ConvInteger", pads=[1, 1, 1, 1]),
    convolution((1, 6, 12), (8, 3, 4), ("uint8", "uint8"), "ConvInteger", group=2, strides=[2]),
    convolution((2, 5, 7, 8), (8, 5, 3, 2), ("uint8", "int8"), "QLinearConv", True, True,
                strides=[2, 1], pads=[1, 0, 2, 1]),
    convolution((2, 32, 6, 6), (16, 32, 1, 1), ("uint8", "int8"), "QLinearConv", True, True),
    convolution((2, 32, 6, 6), (16, 32, 1, 1), ("int8", "int8"), "QLinearConv", bias=True),
    convolution((1, 12, 10, 10), (12, 1, 3, 3), ("uint8", "uint8"), "QLinearConv", group=12,
                auto_pad="SAME_UPPER"),
    convolution((1, 4, 5, 6, 7), (6, 4, 2, 3, 3), ("uint8", "uint8"), "QLinearConv", bias=True),
]  # fmt: skip


def dequantized(
    op: str, x: tuple[int, ...], w: tuple[int, ...], kinds: tuple[str, str] = ("int8", "int8"),
    zero: int | None = None, act: str = "", residual: bool = False, plain: bool = False,
    bias: bool = True, **attrs: Any,
) -> Quantized:  # fmt: skip
    """Codes x and w, dequantized, `op` of them, perhaps a residual, `act`, and quantized again.

    w's scales are one a filter; those of uint8 have zero points of 128. `plain`: y stays float.
    """
    rng, kind = np.random.default_rng(sum(x) + sum(w)), kinds[0]
    turned = op == "MatMul" or (op == "Gemm" and not attrs.get("transB"))
    filters, axis = (w[-1], len(w) - 1) if turned else (w[0], 0)
    zero = int(np.iinfo(kind).min) if zero is None else zero
    top = 0.02 / (np.prod(w) / filters) ** 0.5  # by which some codes of y saturate
    sw = rng.uniform(top / 2, top, filters).astype(np.float32)
    weights = {
        "w": integers(w, kinds[1]), "s": np.float32(0.5), "z": np.array(zero, kind), "sw": sw,
        "zw": np.full(filters, 128 * (kinds[1] == "uint8"), kinds[1]),
        "sy": np.float32(0.004 if act == "Sigmoid" else 0.6),
        "b": rng.integers(-3000, 3000, filters).astype(np.int32), "sb": sw / 2,
    }  # fmt: skip
    feeds = {"x": integers(x, kind)}
    nodes = (
        f"fx = DequantizeLinear (x, s, z) fw = DequantizeLinear <axis = {axis}> (w, sw, zw) "
        "fb = DequantizeLinear <axis = 0> (b, sb) "
    )
    more = ", fb" if bias and op != "MatMul" else ""
    nodes += f"v = {op} {written(attrs)} (fx, fw{more}) "
    last, form = "v", tuple(f"d{i}" for i in range(len(x)))
    held = {n: np.asarray(a) for n, a in weights.items()}
    if residual:
        (y,) = quantized("", nodes, feeds, {"v": ("float32", form)}, held).expected()
        feeds["q"] = integers(y.shape, kind)
        nodes, last = nodes + "r = DequantizeLinear (q, s, z) v1 = Add (v, r) ", "v1"
    if act:
        nodes, last = nodes + f"v2 = {act} ({last}) ", "v2"
    if not plain:
        nodes, last = nodes + f"y = QuantizeLinear ({last}, sy, z)", "y"
    name = f"dequantized {op} {x} {w} {kinds} {zero} {act} {residual} {plain} {bias} {attrs}"
    outputs = {last: ("float32" if plain else kind, form)}
    return quantized(name, nodes, feeds, outputs, held, tolerance=2e-6, steps=1)


def block(kind: str, zero: int, n: int = 16) -> Quantized:
    """A residual block of n channels from codes to codes: two convolutions, a sum with x, the
    largest of it.
    """
    rng = np.random.default_rng(8)
    weights = {
        "s": np.array(0.05, np.float32), "z": np.array(zero, kind),
        "sw": scales((n,)) / np.float32(100), "zw": np.zeros(n, np.int8),
        "w0": integers((n, n, 1, 1), "int8"), "w1": integers((n, n, 3, 3), "int8"),
        "b": (rng.standard_normal(n) / 4).astype(np.float32),
    }  # fmt: skip
    nodes = """
        x = Transpose <perm = [0, 3, 1, 2]> (pixels) fx = DequantizeLinear (x, s, z)
        f0 = DequantizeLinear <axis = 0> (w0, sw, zw) f1 = DequantizeLinear <axis = 0> (w1, sw, zw)
        c0 = Conv (fx, f0, b) r0 = Relu (c0) q0 = QuantizeLinear (r0, s, z)
        d0 = DequantizeLinear (q0, s, z) c1 = Conv <pads = [1, 1, 1, 1]> (d0, f1, b)
        q1 = QuantizeLinear (c1, s, z) d1 = DequantizeLinear (q1, s, z)
        a = Add (d1, fx) r1 = Relu (a) q2 = QuantizeLinear (r1, s, z)
        d2 = DequantizeLinear (q2, s, z)
        m = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (d2)
        q3 = QuantizeLinear (m, s, z) d3 = DequantizeLinear (q3, s, z)
        y = Transpose <perm = [0, 2, 3, 1]> (d3)
    """
    feeds, outputs = {"pixels": integers((2, 6, 6, n), kind)}, {"y": ("float32", (2, 6, 6, n))}
    # a code that another rounding has moved moves those behind it
    name = f"block of codes {kind} {zero} {n}"
    return quantized(name, nodes, feeds, outputs, weights, tolerance=0.014)


def rows(kind: str, zero: int) -> Quantized:
    """Products from codes to codes with what stands between as codes: a bias, a GELU, a sum and
    its norm.
    """
    weights = {
        "s": np.array(0.03, np.float32), "z": np.array(zero, kind),
        "sw": scales((48,)) / np.float32(700), "zw": np.zeros(48, np.int8),
        "w": integers((32, 48), "int8"), "b": np.linspace(-2, 2, 48, dtype=np.float32),
        "v": integers((48, 32), "int8"), "one": np.linspace(0.5, 2, 32, dtype=np.float32),
    }  # fmt: skip
    nodes = """
        fx = DequantizeLinear (x, s, z) fw = DequantizeLinear <axis = 1> (w, sw, zw)
        m = MatMul (fx, fw) q0 = QuantizeLinear (m, s, z) d0 = DequantizeLinear (q0, s, z)
        a = Add (d0, b) q1 = QuantizeLinear (a, s, z) d1 = DequantizeLinear (q1, s, z)
        g = Gelu (d1) y = QuantizeLinear (g, s, z) d2 = DequantizeLinear (y, s, z)
        fv = DequantizeLinear (v, s) n = MatMul (d2, fv) r = Add (n, fx)
        l = LayerNormalization (r, one, one) q3 = QuantizeLinear (l, s, z)
    """
    feeds, outputs = {"x": integers((2, 5, 32), kind)}, {"y": (kind, (2, 5, 48))}
    outputs["q3"] = (kind, (2, 5, 32))
    name = f"rows of codes {kind} {zero}"
    return quantized(name, nodes, feeds, outputs, weights, steps=2)


def stem(kind: str, zero: int, x: tuple[int, ...], w: tuple[int, ...], **attrs: Any) -> Quantized:
    """A first convolution of images that the graph quantizes, and its codes."""
    rng = np.random.default_rng(4)
    weights = {
        "s": np.float32(0.03), "z": np.array(zero, kind), "w": integers(w, "int8"),
        "sw": scales((w[0],)) / np.float32(np.prod(w[1:])), "zw": np.zeros(w[0], np.int8),
    }  # fmt: skip
    nodes = f"""
        q = QuantizeLinear (x, s, z) fx = DequantizeLinear (q, s, z)
        fw = DequantizeLinear <axis = 0> (w, sw, zw) v = Conv {written(attrs)} (fx, fw)
        y = QuantizeLinear (v, s, z)
    """
    images = (rng.standard_normal(x) * 3).astype(np.float32)
    if images.size:
        images.reshape(-1)[:4] = np.nan, np.inf, -np.inf, -0.0
    held = {n: np.asarray(a) for n, a in weights.items()}
    form = tuple(f"d{i}" for i in range(len(x)))
    name = f"dequantized stem {kind} {zero} {x} {w} {attrs}"
    return quantized(name, nodes, {"x": images}, {"y": (kind, form)}, held, steps=1)


def pool(kind: str, scale: float, again: float, **attrs: Any) -> Quantized:
    """The largest of dequantized numbers, and their codes by the scale `again`."""
    numbers = {"s": np.float32(scale), "t": np.float32(again), "z": np.array(9, kind)}
    nodes = (
        "f = DequantizeLinear (x, s, z) "
        f"p = MaxPool {written({'kernel_shape': [3, 3], **attrs})} (f) y = QuantizeLinear (p, t, z)"
    )
    outputs = {"y": (kind, tuple("nchw")), "p": ("float32", tuple("nchw"))}
    held = {n: np.asarray(a) for n, a in numbers.items()}
    name = f"dequantized MaxPool {kind} {scale} {again} {attrs}"
    return quantized(name, nodes, {"x": integers((2, 3, 7, 8), kind)}, outputs, held)


DEQUANTIZED = [
    dequantized("Conv", (2, 16, 9, 9), (24, 16, 3, 3), pads=[1, 1, 1, 1]),
    dequantized("Conv", (2, 16, 9, 9), (24, 16, 3, 3), ("uint8", "int8"), 255, pads=[1, 0, 2, 1]),
    dequantized("Conv", (1, 32, 8, 9), (16, 32, 1, 1), zero=127, residual=True, act="Relu"),
    dequantized("Conv", (1, 32, 8, 8), (17, 32, 1, 1), zero=3, strides=[2, 2], residual=True),
    dequantized("Conv", (2, 3, 20, 22), (8, 3, 7, 7), zero=-5, strides=[2, 2], pads=[3] * 4),
    dequantized("Conv", (2, 3, 9, 8), (8, 3, 3, 3), ("uint8", "uint8"), 7, dilations=[2, 2],
                pads=[2] * 4, act="Sigmoid"),
    dequantized("Conv", (1, 48, 7, 7), (33, 16, 3, 3), group=3, pads=[1] * 4),
    dequantized("Conv", (1, 6, 7, 7), (6, 1, 3, 3), group=6, pads=[1] * 4),
    dequantized("Conv", (2, 5, 17), (8, 5, 4), zero=0, strides=[3], act="Relu", bias=False),
    dequantized("Conv", (1, 16, 4, 5, 6), (8, 16, 2, 3, 3), auto_pad="SAME_UPPER", plain=True),
    dequantized("Conv", (0, 16, 9, 9), (24, 16, 3, 3)),
    dequantized("MatMul", (3, 5, 32), (32, 24)),
    dequantized("MatMul", (7, 48), (48, 17), ("uint8", "int8"), 255, residual=True, act="Relu"),
    dequantized("MatMul", (2, 3, 64), (64, 8), ("uint8", "uint8"), 3, act="Sigmoid"),
    dequantized("Gemm", (5, 32), (32, 40), zero=127),
    dequantized("Gemm", (1, 400), (24, 400), ("uint8", "int8"), 77, act="Relu", transB=1),
    dequantized("Gemm", (9, 16), (24, 16), zero=0, transB=1, bias=False, plain=True),
    dequantized("MatMul", (0, 32), (32, 24)),
    pool("int8", 0.3, 0.3, strides=[2, 2], pads=[1, 1, 1, 1]),
    pool("uint8", 0.3, 0.3, ceil_mode=1, strides=[2, 2]),
    pool("int8", 0.3, 0.2, dilations=[2, 2], pads=[2, 2, 2, 2]),
    pool("uint8", -0.3, -0.3),
    rows("int8", -7),
    rows("uint8", 128),
    block("int8", -128),
    block("uint8", 100),
    block("int8", -128, 64),
    block("uint8", 0, 64),
    dequantized("Conv", (2, 16, 9, 9), (24, 16, 3, 3), ("uint8", "int8"), 0, plain=True),
    stem("int8", -5, (2, 3, 20, 24), (16, 3, 7, 7), strides=[2, 2], pads=[3] * 4),
    stem("uint8", 77, (2, 3, 12, 18), (16, 3, 3, 3), strides=[2, 2], pads=[0, 1, 1, 0]),
    stem("int8", 5, (2, 4, 16, 9), (24, 4, 4, 3), strides=[4, 1], pads=[0, 1, 0, 1]),
    stem("int8", 5, (1, 3, 19, 24), (16, 3, 7, 7), strides=[2, 2], pads=[3] * 4),
    stem("uint8", 0, (2, 3, 8, 12), (16, 3, 2, 3), strides=[2, 3]),
    stem("int8", 0, (2, 1, 40), (16, 1, 5), strides=[4], pads=[2, 2]),
    stem("int8", 0, (0, 3, 20, 24), (16, 3, 7, 7), strides=[2, 2], pads=[3] * 4),
    dequantized("Conv", (2, 64, 18, 17), (192, 64, 3, 3), pads=[1] * 4, residual=True),
    dequantized("Conv", (1, 160, 13, 13), (132, 160, 1, 1), zero=-128, strides=[2, 2]),
    dequantized("Conv", (3, 80, 19, 17), (192, 80, 3, 3), ("uint8", "int8"), 0, strides=[2, 2],
                pads=[1, 0, 1, 2], residual=True, act="Relu"),
    dequantized("Conv", (2, 16, 3, 9, 8), (64, 16, 3, 2, 3), zero=0, pads=[1, 1, 2] * 2,
                dilations=[1, 2, 2], plain=True),
    dequantized("MatMul", (137, 208), (208, 320), zero=-7, residual=True, act="Sigmoid"),
    stem("int8", -5, (2, 3, 34, 40), (64, 3, 7, 7), strides=[2, 2], pads=[3] * 4),
    dequantized("Conv", (2, 80, 19, 21), (192, 80, 3, 3), ("uint8", "int8"), 0, pads=[1] * 4,
                residual=True, act="Relu"),
    dequantized("Conv", (2, 64, 9, 7), (64, 64, 2, 3), zero=0, pads=[1, 0, 0, 2], act="Relu"),
    dequantized("Conv", (1, 64, 1, 1), (64, 64, 3, 3), zero=0, pads=[1] * 4, plain=True),
    dequantized("MatMul", (1, 64), (64, 64), ("uint8", "int8"), 0, residual=True),
]  # fmt: skip
"""What are calls of integers, but for groups of few channels."""


def _cases() -> Iterator[Quantized]:
    for kind in INTS:
        for layout in LAYOUTS:
            yield linear(kind, layout)
    for kind in INTS[:4]:
        yield linear(kind, "axis", "float16")
        yield linear(kind, "tensor", "float16", precision=KINDS["float32"])
        yield linear(kind, "tensor", precision=KINDS["float16"])
        yield linear(kind, "blocked", zero=False)
    for kind in FLOATS8:
        for layout in ("tensor", "axis", "blocked"):
            yield floats8(kind, layout)
        yield floats8(kind, "tensor", "float16")
    for kind in INTS:
        yield weights_of(kind, "float32")
        yield weights_of(kind, "float16")
    plain = np.random.default_rng(0).standard_normal((70, 61)).astype(np.float32)
    yield dynamic(plain, "normal")
    yield dynamic(np.abs(plain) + 1, "positive")
    yield dynamic(-np.abs(plain) - 1, "negative")
    yield dynamic(np.zeros((3, 3), np.float32), "zeros")
    yield dynamic(np.array([1e-40, 2e-40], np.float32), "tiny")
    yield dynamic(np.array([np.nan, 1, 2], np.float32), "NaN first")
    yield dynamic(np.array([1, np.nan], np.float32), "NaN last")
    yield dynamic(np.array([np.inf, 1], np.float32), "infinity")
    yield dynamic(np.array([-np.inf, 1], np.float32), "negative infinity")
    yield dynamic(np.array([1e38, -3e38], np.float32), "a range beyond float32")
    yield dynamic(np.zeros((0,), np.float32), "empty")


def attention(kind: str, batch: int, heads: int, length: int, size: int) -> Quantized:
    """Attention in float16 whose result is quantized to the bytes `kind`."""
    rng, shape = np.random.default_rng(size), (batch, length, heads * size)
    feeds = {n: rng.standard_normal(shape).astype(np.float16) for n in "qkv"}
    scale, zero = np.float32(0.02), np.array(5, kind)
    weights = {"s": scale, "z": zero}
    text = f"""a = Attention <q_num_heads = {heads}, kv_num_heads = {heads}> (q, k, v)
        f = Cast <to = 1> (a) y = QuantizeLinear(f, s, z)"""
    q, k, v = (
        a.astype(np.float64).reshape(batch, length, heads, size).swapaxes(1, 2)
        for a in feeds.values()
    )
    e = np.exp(q @ k.swapaxes(2, 3) * size**-0.5)
    y = (e / e.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(shape)
    ends = np.iinfo(kind)
    codes = np.clip(np.rint(y / scale) + zero, ends.min, ends.max).astype(kind)
    name = f"attention to {kind} {batch} {heads} {length} {size}"
    return quantized(name, text, feeds, {"y": (kind, shape)}, weights, want=(codes,), steps=1)


ATTENTION = [
    attention("int8", 2, 3, 70, 64), attention("uint8", 1, 2, 130, 80),
    attention("int8", 1, 1, 300, 128), attention("int8", 2, 2, 2, 16),
    attention("uint8", 2, 2, 1, 64),
]  # fmt: skip
CASES = [*_cases(), *NBITS, *HELD, *PRODUCTS, *DEQUANTIZED, *ATTENTION]
