"""Cases of the reduction, norm, softmax, convolution, pool, scan, loss and attention kernels.

One row a case: operator, shapes, what it exercises. Truth is the onnx reference evaluator in
float64 on the same rounded inputs (`oracle`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import algebra_rows
import group_norms
import long_rows
import numpy as np
import onnx
import onnx_ir
import sdpa_packed
import sdpa_windows
import window_gradients
from conv_cases import CHANNELS_FIRST, CHANNELS_LAST
from onnx import helper
from onnx.reference import ReferenceEvaluator

import onnx_fuse.ops.fused.conv
import onnx_fuse.ops.fused.gradients
import onnx_fuse.ops.fused.norm
import onnx_fuse.ops.fused.window_gradients  # noqa: F401  (these register the fused operators)
from onnx_fuse import kernels
from onnx_fuse.importer.save import inline
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.kernels import Selection, candidates, select
from onnx_fuse.lower.walk import lower
from onnx_fuse.ops.fused.sdpa import KINDS
from onnx_fuse.program.call import Program, dtype_of
from onnx_fuse.program.launch import Launch
from onnx_fuse.program.passes import select as selection
from onnx_fuse.program.problem import CHIPS, AnyProblem, Hardware

H200 = CHIPS["H200"]
F32, F16, BF16, F64 = "float32", "float16", "bfloat16", "float64"
TOLERANCE = {F64: 1e-11, F32: 6e-6, F16: 1e-3, BF16: 8e-3}  # half an ulp; sums in float32


@dataclass(frozen=True)
class Case:
    """One node: inputs are shapes (random values), arrays, functions that give one, or None."""

    op: str
    inputs: tuple[Any, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    dtype: str = F32
    domain: str = ""
    note: str = ""
    offset: float = 0.0
    opset: int = 22

    @property
    def name(self) -> str:
        shapes = "_".join("x".join(map(str, s)) for s in self.inputs if isinstance(s, tuple))
        return f"{self.op}-{self.dtype}-{shapes}" + (f"-{self.note}" if self.note else "")

    def arrays(self) -> list[np.ndarray | None]:
        """The inputs, the same ones every time."""
        rng = np.random.default_rng(len(self.name))
        made: list[np.ndarray | None] = []
        for spec in self.inputs:
            spec = spec() if callable(spec) else spec
            if isinstance(spec, tuple):
                kind = dtype_of(self.dtype)
                if kind.kind in "iu":
                    made.append(rng.integers(0 if kind.kind == "u" else -9, 10, spec).astype(kind))
                elif kind.kind == "b":
                    made.append(rng.random(spec) < 0.5)
                else:
                    made.append((rng.standard_normal(spec) + self.offset).astype(kind))
            elif spec is not None and spec.dtype.kind == "f" and not spec.any():
                made.append(spec.astype(dtype_of(self.dtype)))
            else:
                made.append(spec)
        return made

    def model(self, arrays: Sequence[np.ndarray | None], wide: bool = False) -> onnx.ModelProto:
        """The node alone; `wide`: floats as float64. Vectors of int64 and zeros are constants."""
        names = [f"x{i}" if a is not None else "" for i, a in enumerate(arrays)]
        outs = [f"y{i}" for i in range(self.outputs)]
        # the statistics of truth are in float64 as well
        stashes = "RMS" in self.op or self.op == "BatchNormGrad"
        stashes |= self.op.startswith("GroupNorm") and self.domain == FUSE
        stash = {"stash_type": 11} if wide and stashes else {}
        node = helper.make_node(self.op, names, outs, domain=self.domain, **self.attrs, **stash)
        inputs, constants = [], []
        for i, (spec, a) in enumerate(zip(self.inputs, arrays, strict=True)):
            if a is None:
                continue
            blank = isinstance(spec, np.ndarray) and spec.dtype.kind == "f" and not spec.any()
            vector = isinstance(spec, np.ndarray) and spec.ndim <= 1 and self.op not in _LABELLED
            if vector or blank:
                number = widen(a) if wide and (blank or a.ndim == 0) else a
                constants.append(onnx.numpy_helper.from_array(number, names[i]))
                continue
            a = widen(a) if wide else a
            kind = helper.np_dtype_to_tensor_dtype(a.dtype)
            inputs.append(helper.make_tensor_value_info(names[i], kind, a.shape))
        graph = helper.make_graph(
            [node], "case", inputs, [onnx.ValueInfoProto(name=o) for o in outs], constants
        )
        opsets = [helper.make_opsetid("", self.opset)]
        if self.domain:
            opsets.append(helper.make_opsetid(FUSE, 1))
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def program(self, hw: Hardware = H200) -> Program:
        """The case lowered: no GPU is needed."""
        arrays = self.arrays()
        proto = self.model(arrays)
        model = onnx_ir.serde.deserialize_model(proto)
        shapes = {
            v.name or "": (arrays[int((v.name or "x0")[1:])].shape, kind_of(arrays, v.name))
            for v in model.graph.inputs
        }
        return lower(model, shapes, hw)

    def launches(self, hw: Hardware) -> list[Launch]:
        """Of every variant."""
        program = self.program(hw)
        found = [x for call in (*program.setup, *program.calls) for x in call.launches]
        return found + [x for own in launched(program, self.variants(program, hw), hw) for x in own]

    def variants(self, program: Program, hw: Hardware) -> list[Selection]:
        """Every legal kernel and configuration for the case's program but those chosen anyway."""
        found: dict[Selection, None] = {}
        for problem in problems_of(program):
            chosen = select(problem.op, problem, hw)
            assert chosen is not None
            for kernel in candidates(problem.op):
                if problem.op == "Pointwise" or kernel.supports(problem, hw) is not None:
                    continue  # pointwise kernels have tests of their own
                for how in kernel.configs(problem, hw):
                    if (kernel, how) != (chosen.kernel, chosen.config):
                        found[Selection(kernel, how, 0.0, "each")] = None
        return list(found)

    def _reference_is_wrong(self) -> bool:
        """Where onnx 1.23's reference evaluator raises or breaks the spec: truth is onnxruntime."""
        how = self.attrs.get("coordinate_transformation_mode")
        return (
            (self.op == "ConvTranspose" and self.attrs.get("group", 1) > 1)
            or (self.op in ("MaxPool", "ReduceLogSumExp") and self.dtype in ("int8", "int32"))
            or self.op == "LRN"  # its loop over channels runs over the batch
            or (self.op == "NegativeLogLikelihoodLoss" and "-0x" in self.name)
            or (self.op == "LpPool" and self.note == "ceil")
            # it clamps the position, where PyTorch and onnxruntime clamp each tap
            or (self.op == "GridSample" and self.note == "cubic border")
            or (self.op == "Resize" and how == "align_corners")  # its last corner is not aligned
            or (self.note == "a vector" and "max" in self.attrs.values())  # it leaves NaN out
        )

    def oracle(self) -> list[np.ndarray]:
        """The outputs in float64."""
        arrays = self.arrays()
        proto = self.model(arrays, wide=True)
        if self.domain:
            model = inline(onnx_ir.serde.deserialize_model(proto))
            proto = onnx_ir.serde.serialize_model(model)
        feeds = {
            f"x{i}": widen(a) for i, a in enumerate(arrays)
            if a is not None and f"x{i}" in {v.name for v in proto.graph.input}
        }  # fmt: skip
        if self._reference_is_wrong():
            if self.dtype in (F16, BF16):  # in which onnxruntime's CPU lacks kernels
                floats = (a is not None and a.dtype.kind not in "iub" for a in arrays)
                arrays = [a.astype(F32) if f else a for a, f in zip(arrays, floats, strict=True)]
            return _onnxruntime(self.model(arrays), arrays)
        with np.errstate(all="ignore"):
            return [np.asarray(y) for y in ReferenceEvaluator(proto).run(None, feeds)]


def problems_of(program: Program) -> list[AnyProblem]:
    """The problems of all calls."""
    return [call.problem for call in (*program.setup, *program.calls) if call.problem]


def launched(program: Program, choices: Sequence[Selection], hw: Hardware) -> list[list[Launch]]:
    """What each choice launches for the problems of a program that it serves."""
    served: dict[tuple[object, object], list[AnyProblem]] = {}
    for problem in problems_of(program):
        for kernel in candidates(problem.op):
            if kernel.supports(problem, hw) is None:
                for how in kernel.configs(problem, hw):
                    served.setdefault((kernel, how), []).append(problem)
    return [
        [
            x
            for problem in served[c.kernel, c.config]
            for x in c.kernel.launch(problem, c.config, hw)
        ]
        for c in choices
    ]


@contextmanager
def only(choice: Selection) -> Iterator[None]:
    """Within the block every problem that this kernel and configuration serve takes them."""

    def chosen(op: str, problem: AnyProblem, hw: Hardware, *prefs: Any) -> Selection | None:
        kernel = choice.kernel
        serves = kernel in candidates(op) and kernel.supports(problem, hw) is None
        if serves and choice.config in kernel.configs(problem, hw):
            return choice
        return select(op, problem, hw, *prefs)

    with patch.object(kernels, "select", chosen), patch.object(selection, "select", chosen):
        yield


def _onnxruntime(proto: onnx.ModelProto, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, {v.name: arrays[int(v.name[1:])] for v in session.get_inputs()}))


_LABELLED = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")


def kind_of(arrays: Sequence[np.ndarray | None], name: str | None) -> str:
    return arrays[int((name or "x0")[1:])].dtype.name


def widen(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) if a.dtype.kind == "f" or a.dtype.name == BF16 else a


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _reductions() -> Iterator[Case]:
    for name in ("Sum", "Mean", "SumSquare", "L1", "L2", "LogSumExp", "Prod", "Max", "Min"):
        yield Case(f"Reduce{name}", ((5, 33), i64(1)), note="short rows")
        yield Case(f"Reduce{name}", ((3, 7, 40), i64(1)), note="columns")
        yield Case(f"Reduce{name}", ((3, 70, 40), i64(1)), note="short columns")
    yield Case("ReduceLogSum", (np.abs(np.random.default_rng(0).standard_normal((9, 8, 7)))
                                .astype(np.float32), i64(0, 2)))  # fmt: skip
    for dtype in (F32, F16, BF16, F64):
        yield Case("ReduceMean", ((64, 768), i64(-1)), dtype=dtype, offset=3.0)
        yield Case("ReduceSum", ((1000, 96), i64(0)), dtype=dtype, note="split columns")
        yield Case("ReduceSum", ((250, 101), i64(0)), dtype=dtype, note="short columns")
        yield Case("ReduceSum", ((2, 300001), i64(1)), dtype=dtype, note="split rows, odd")
        yield Case("ReduceMax", ((6, 5, 64, 3), i64(0, 2)), dtype=dtype, note="alternating axes")
    yield Case("ReduceSum", ((40000, 1), None), {"keepdims": 0}, note="all")
    yield Case("ReduceSum", ((2, 8192), i64(1)), note="one pass in 16-byte loads")
    yield Case("ReduceMean", ((4, 6, 5, 7), i64(1, 3)), {"keepdims": 0})
    yield Case("ReduceL2", ((4, 6), i64()), {"noop_with_empty_axes": 1}, note="elementwise")
    yield Case("ReduceSum", ((2, 0, 4), i64(1)), note="empty")
    yield Case("ReduceSum", ((3, 1, 4), i64(1)), note="size 1")
    for dtype in ("int32", "int64", "uint64", "uint32"):
        yield Case("ReduceSum", ((5, 70), i64(1)), dtype=dtype)
        yield Case("ReduceMax", ((5, 70), i64(0)), dtype=dtype)
    for dtype in ("int8", "uint8", "bool", "int32"):
        name = "LogSumExp" if dtype == "int32" else "Min"
        yield Case(f"Reduce{name}", ((5, 64), i64(1)), dtype=dtype)
    ties = np.array([[1, 3, 3, 0], [2, 2, 2, 2], [-1, -5, -1, -5]], np.float32)
    for op in ("ArgMax", "ArgMin"):
        for last in (0, 1):
            yield Case(op, (ties,), {"axis": 1, "select_last_index": last}, note=f"ties {last}")
        yield Case(op, ((3, 100, 5),), {"axis": 1, "keepdims": 0})
        yield Case(op, ((2, 100000),), {"axis": 1}, note="split")
        yield Case(op, ((70, 9),), {"axis": 0}, dtype="int32")
    for dtype in ("bool", "int8"):
        for op in ("ReduceMax", "ReduceMin"):
            yield Case(op, ((2, 0, 4), i64(1)), {}, 1, dtype, opset=20, note="empty")


def _softmaxes() -> Iterator[Case]:
    for op in ("Softmax", "LogSoftmax"):
        for dtype in (F32, F16, BF16, F64):
            yield Case(op, ((37, 129),), dtype=dtype)
            yield Case(op, ((4, 1024),), dtype=dtype)
        yield Case(op, ((3, 50257),), note="row read again")
        yield Case(op, ((3, 40, 33),), {"axis": 1}, note="columns")
        yield Case(op, ((2, 300, 3),), {"axis": 1}, note="narrow")
        yield Case(op, ((8, 5),), {"axis": 0})
        yield Case(op, ((2000, 8),), note="sub-warp rows", offset=80.0)
    yield Case("Softmax", ((1100, 2048),), {}, 1, BF16, note="two warps a row")
    masked = np.where(np.tri(6, 70, dtype=bool), 1.5, -np.inf).astype(np.float32)
    yield Case("Softmax", (masked,), note="-inf entries")
    for shape, axis in (((3, 129), 1), ((3, 50257), 1), ((3, 40, 33), 1), ((129, 3), 0)):
        spoilt = np.random.default_rng(8).standard_normal(shape).astype(np.float32)
        first = np.moveaxis(spoilt, axis, -1)
        first[0, ..., 0], first[1, ..., 0], first[2, ..., -1] = np.nan, -np.inf, np.nan
        yield Case("Softmax", (spoilt,), {"axis": axis}, note=f"NaN at an end {shape}")


def _norms() -> Iterator[Case]:
    for dtype in (F32, F16, BF16, F64):
        for k in (33, 768, 4096):
            yield Case("LayerNormalization", ((9, k), (k,), (k,)), {"axis": -1}, 3, dtype)
            yield Case("RMSNormalization", ((9, k), (k,)), {}, 1, dtype, FUSE)
    yield Case(
        "LayerNormalization", ((5, 768), (768,), (768,)), offset=100.0, note="|mean|/std 100"
    )
    yield Case("LayerNormalization", ((2, 50000), (50000,), (50000,)), note="row read again")
    yield Case("LayerNormalization", ((4, 6, 5, 8), (5, 8), (5, 8)), {"axis": 2}, 3)
    yield Case("LayerNormalization", ((4, 64), (64,)), note="no bias")
    yield Case("LayerNormalization", ((1100, 2048), (2048,), (2048,)), {}, 3, BF16)
    yield Case("LayerNormalization", ((2000, 32), (32,), (32,)), note="sub-warp rows")
    for dtype in (F32, BF16):
        yield Case("SkipLayerNorm", ((7, 768), (7, 768), (768,), (768,)), {}, 2, dtype, FUSE)
        yield Case("SkipRMSNorm", ((7, 100), (7, 100), (100,)), {}, 2, dtype, FUSE)
    yield Case("SkipLayerNorm_mean_rstd", ((7, 64), (7, 64), (64,), (64,)), {}, 4, F32, FUSE)
    for dtype in (F32, F16, BF16):
        for k in (40, 768, 3000):
            rows, one = (1100, k) if k == 40 else (37, k), (k,)
            mean = np.linspace(-1, 1, rows[0], dtype=np.float32)[:, None]
            rstd = np.linspace(0.5, 2, rows[0], dtype=np.float32)[:, None]
            given = (rows, rows, one, mean, rstd)
            yield Case("LayerNormGrad", given, {}, 3, dtype, FUSE)
            yield Case("RMSNormalizationGrad", (*given[:3], rstd), {}, 2, dtype, FUSE)
            yield Case("SkipLayerNormGrad", (rows, *given), {}, 3, dtype, FUSE)
    for m in (1, 33, 256):
        for turned in ("", "Turned"):
            given = ((m, 77), (m, 50), (50, 77) if turned else (77, 50), (50,), (50,))
            yield Case(f"LayerNormLeafGrad{turned}", given, {}, 4, F32, FUSE)
    yield Case("LayerNormLeafGrad", ((9, 7), (9, 5), (7, 5), (5,), (5,)), {}, 4, F16, FUSE)
    for act, dtype in (("Gelu", F16), ("Gelu", BF16), ("Silu", BF16), ("LeakyRelu", F16)):
        for m in (1, 100, 1700):
            given = ((m, 72), (m, 40), (40, 72), (m, 72))
            yield Case(f"Gemm{act}Grad", given, {}, 3, dtype, FUSE)
    for dtype in (F32, F16):
        yield Case("GroupNormalization", ((2, 12, 5, 7), (12,), (12,)), {"num_groups": 3}, 1, dtype)
        yield Case("InstanceNormalization", ((2, 6, 8, 8), (6,), (6,)), {}, 1, dtype)
    yield Case("GroupNormalization", ((1, 4, 96, 96), (4,), (4,)), {"num_groups": 2}, note="long")
    variance = np.linspace(0.5, 2, 6, dtype=np.float32)
    for shape in ((3, 6, 4, 5), (9, 6)):
        stats = (shape, (6,), (6,), np.linspace(-1, 1, 6, dtype=np.float32), variance)
        yield Case("BatchNormalization", stats)
        yield Case(
            "BatchNormalization", stats, {"training_mode": 1}, 3, note="training", offset=5.0
        )

    for dtype in (F32, F16, BF16, F64):
        for shape in ((3, 6, 4, 5), (70, 6), (4, 5, 7, 7), (9, 3, 2, 3), (40, 8, 24, 16)):
            scale = np.linspace(0.5, 2, shape[1]).astype(dtype_of(F64 if dtype == F64 else F32))
            dy = np.random.default_rng(5).standard_normal(shape).astype(dtype_of(dtype))
            yield Case("BatchNormGrad", (dy, shape, scale), {}, 3, dtype, FUSE, offset=3.0)
    shape, scale = (
        (17000, 256),
        np.linspace(0.5, 2, 256).astype(np.float32),
    )  # threads go on to more
    dy = np.random.default_rng(5).standard_normal(shape).astype(dtype_of(BF16))
    yield Case("BatchNormGrad", (dy, shape, scale), {}, 3, BF16, FUSE, offset=3.0)
    stats = (shape, (256,), (256,), (256,), np.ones(256, np.float32))
    yield Case("BatchNormalization", stats, {"training_mode": 1}, 3, note="training", offset=5.0)


def _windows() -> Iterator[Case]:
    for dtype in (F32, F16, BF16, F64):
        yield Case("Conv", ((2, 3, 11, 12), (5, 3, 3, 3), (5,)), {"pads": [1, 1, 1, 1]}, 1, dtype)
    for note, attrs, shapes in CHANNELS_FIRST:
        yield Case("Conv", shapes, attrs, note=note)
    for dtype in (F32, F16, BF16, F64):
        yield Case("Conv", ((3, 24, 12, 14), (40, 24, 1, 1), (40,)), {}, 1, dtype, note="one tap")
        yield Case("Conv", ((3, 40, 7, 7), (72, 40, 1, 1), (72,)), {}, 1, dtype, note="odd rows")
    for attrs, x, w, dtype in CHANNELS_LAST:
        yield Case("Conv", (x, w, w[:1]), attrs, 1, dtype, note="channels last")
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        attrs = {"auto_pad": auto, "strides": [2, 2]}
        yield Case("Conv", ((1, 3, 9, 10), (6, 3, 4, 3)), attrs, note=auto)
        yield Case("ConvTranspose", ((1, 3, 5, 4), (3, 6, 4, 3)), attrs, note=auto)
    for dtype in (F32, BF16):
        attrs = {"strides": [2, 3], "pads": [1, 0, 1, 2], "output_padding": [1, 1]}
        yield Case("ConvTranspose", ((2, 6, 7, 5), (6, 10, 3, 4), (10,)), attrs, 1, dtype)
    yield Case("ConvTranspose", ((2, 6, 7, 5), (6, 5, 3, 3)), {"group": 2, "dilations": [2, 1]})
    yield Case("ConvTranspose", ((2, 6, 9), (6, 70, 3)), {"strides": [2]}, note="1-D")
    yield from (Case(*row) for row in (*window_gradients.rows(), *group_norms.rows()))
    for op, attrs in (
        ("MaxPool", {}), ("MaxPool", {"dilations": [2, 1]}), ("AveragePool", {}),
        ("AveragePool", {"count_include_pad": 1}), ("LpPool", {"p": 3}),
    ):  # fmt: skip
        attrs = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 1, 1, 0], **attrs}
        yield Case(op, ((2, 3, 10, 11),), attrs, 2 if op == "MaxPool" else 1)
        yield Case(op, ((2, 3, 10, 11),), {**attrs, "ceil_mode": 1}, note="ceil")
    yield Case("MaxPool", ((2, 3, 9),), {"kernel_shape": [2]}, 1, F16, note="1-D")
    yield Case("MaxPool", ((1, 2, 5, 5, 5),), {"kernel_shape": [2, 2, 2]}, note="3-D")
    yield Case("MaxPool", ((1, 2, 6, 6),), {"kernel_shape": [2, 2]}, 1, "int8")
    for op in ("GlobalAveragePool", "GlobalMaxPool"):
        yield Case(op, ((2, 3, 10, 11),))
    yield Case("LRN", ((2, 9, 4, 5),), {"size": 3, "alpha": 0.5})
    yield Case("LRN", ((2, 9, 4, 5),), {"size": 5, "alpha": 0.5, "beta": 0.5, "bias": 2.0})
    none = np.array([], np.float32)
    up, down = np.array([1, 1, 2, 1.5], np.float32), np.array([1, 1, 0.6, 0.5], np.float32)
    for mode in ("nearest", "linear", "cubic"):
        for scales in (up, down):
            for how in ("half_pixel", "asymmetric", "align_corners"):
                attrs = {"mode": mode, "coordinate_transformation_mode": how}
                yield Case("Resize", ((1, 2, 6, 8), none, scales), attrs, note=f"{mode} {how}")
        if mode != "nearest":
            attrs = {"mode": mode, "antialias": 1}
            yield Case("Resize", ((1, 2, 12, 10), none, down), attrs, note=f"{mode} antialias")
    yield Case(
        "Resize", ((1, 1, 4, 4), none, none, i64(1, 1, 3, 7)), {"mode": "linear"}, note="sizes"
    )


def _samples() -> Iterator[Case]:
    """Gathers with weights; fused activations behind a convolution."""
    attrs = {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1, 1, 1, 1], "dilations": [1, 1]}
    one = {"kernel_shape": [1, 1], "strides": [1, 1], "pads": [0] * 4, "dilations": [1, 1]}
    for name in ("Relu", "Silu", "LeakyRelu", "Tanh"):
        yield Case(f"Conv{name}", ((2, 16, 9, 8), (20, 16, 3, 3), (20,)), attrs, 1, F32, FUSE)
    yield Case("ConvRelu", ((2, 16, 9, 8), (20, 16, 3, 3), (20,)), attrs, 1, F16, FUSE)
    yield Case("ConvRelu", ((2, 16, 9, 8), (20, 16, 1, 1), (20,)), one, 1, F32, FUSE)
    yield Case("ConvRelu", ((2, 16, 9, 8), (20, 16, 1, 1), (20,)), one, 1, F16, FUSE)
    for dtype in (F32, F16):  # those that store: direct, tiles, the sum of split parts
        for x, w, group in (
            ((2, 8, 9, 8), (8, 1, 3, 3), 8),
            ((2, 16, 9, 8), (20, 16, 3, 3), 1),
            ((1, 512, 7, 7), (65, 512, 3, 3), 1),
        ):
            given, how = (x, w, w[:1]), attrs | {"group": group}
            yield Case("ConvAddRelu", (*given, (x[0], w[0], *x[2:])), how, 1, dtype, FUSE)
            yield Case("ConvPRelu", (*given, (w[0], 1, 1)), how, 1, dtype, FUSE)
        for size in (5, 80):  # rows in registers, and long ones by their moments
            given = ((2, 16, size, size), (16, 1, 1), (16, 1, 1))
            yield Case("GroupNormSilu", given, {"num_groups": 4}, 1, dtype, FUSE)
    for mode in ("nearest", "linear", "cubic"):
        for padding in ("zeros", "border", "reflection"):
            for corners in (0, 1):
                how = {"mode": mode, "padding_mode": padding, "align_corners": corners}
                yield Case(
                    "GridSample", ((2, 3, 6, 7), (2, 5, 4, 2)), how, note=f"{mode} {padding}"
                )
    yield Case("GridSample", ((1, 2, 4, 5, 6), (1, 3, 4, 2, 3)), {"mode": "linear"}, note="3-D")
    # 12 blocks of 2 x 3 from an image of 5 x 6 at stride (1, 1)
    yield Case("Col2Im", ((2, 18, 16), i64(5, 6), i64(2, 3)), {}, note="2-D")
    how = {"strides": [2, 2], "pads": [1, 1, 1, 1], "dilations": [1, 2]}
    yield Case("Col2Im", ((1, 12, 6), i64(5, 6), i64(2, 3)), how, note="strided")


def _regions() -> Iterator[Case]:
    """Regions of interest, moved taps and n-grams."""
    corners = np.array([[0, 0, 9, 9], [1.5, 2, 7.5, 6], [-3, 4, 20, 5], [5, 5, 5, 5]])
    index = np.array([[0], [1], [1], [0]])[:, 0]
    for dtype in (F32, F16, F64):
        rois = corners.astype(dtype_of(dtype))
        for how in (
            {"mode": "avg"},
            {"mode": "max", "sampling_ratio": 2},
            {"coordinate_transformation_mode": "output_half_pixel", "spatial_scale": 0.5},
        ):
            attrs = {"output_height": 3, "output_width": 2, "sampling_ratio": 3, **how}
            yield Case("RoiAlign", ((2, 3, 10, 8), rois, index), attrs, 1, dtype, note=str(how))
    for dtype in (F32, F16):
        shifts, pads = (2, 2 * 18, 9, 8), {"pads": [1, 1, 1, 1], "offset_group": 2}
        given = ((2, 4, 9, 8), (6, 2, 3, 3), shifts, (6,), (2, 2 * 9, 9, 8))
        yield Case("DeformConv", given, {**pads, "group": 2}, 1, dtype)
        strided = {"strides": [2, 1], "dilations": [1, 2]}
        given = ((1, 4, 9, 8), (5, 4, 3, 2), (1, 12, 4, 6))
        yield Case("DeformConv", given, strided, 1, dtype, note="strided")
    pool = {"pool_int64s": [2, 3, 5, 4, 5, 6, 7, 8, 6, 7], "ngram_counts": [0, 4]}
    pool |= {"ngram_indexes": [0, 1, 2, 3, 4, 6, 5], "weights": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]}
    words = np.random.default_rng(6).integers(2, 9, (3, 40))
    for mode, kind in (("TF", np.int32), ("IDF", np.int64), ("TFIDF", np.int64)):
        attrs = {"mode": mode, "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 2}
        yield Case("TfIdfVectorizer", (words.astype(kind),), attrs | pool, note=mode)


def _scans() -> Iterator[Case]:
    axis = np.array(1, np.int64)
    for attrs in ({}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1}):
        yield Case("CumSum", ((3, 2500), axis), attrs, 1, F64, note=str(attrs))
        yield Case("CumSum", ((3, 50, 6), axis), attrs, note=str(attrs))
        yield Case("CumSum", ((3, 70), axis), attrs, 1, "int64", note=str(attrs))
    for shape, at in (((3, 70), 1), ((3, 50, 6), 1)):
        for attrs in ({}, {"exclusive": 1, "reverse": 1}):
            yield Case("CumProd", (shape, np.array(at, np.int64)), attrs, opset=26, note=str(attrs))
    for largest in (0, 1):
        for shape, k, axis in (
            ((4, 9), 3, 1),
            ((3, 300, 2), 40, 1),
            ((2, 20000), 100, 1),
            ((5, 3000), 3000, 1),
        ):
            yield Case("TopK", (shape, i64(k)), {"axis": axis, "largest": largest}, 2, note=f"k{k}")
    yield Case("TopK", ((3, 50), i64(50)), {}, 2, "int64", note="ties")
    yield Case("TopK", ((3, 50), i64(7)), {}, 2, F16)
    zeros = np.float32([[0, -0.0, 1, -0.0, 0, -1], [-0.0, 0, -0.0, -0.0, -2, -3]])
    for largest in (0, 1):
        attrs = {"largest": largest}
        yield Case("TopK", (zeros, i64(4)), attrs, 2, note=f"zeros of both signs {largest}")
        for shape, k in (((2, 20000), 15000), ((2, 4097, 3), 4097)):  # sorted whole
            yield Case("TopK", (shape, i64(k)), {"axis": 1, **attrs}, 2, note=f"k{k}")
    yield Case("TopK", ((2, 9000), i64(8999)), {}, 2, "int64", note="ties of long rows")
    yield Case("Unique", ((70, 600),), {"axis": 0}, 4, note="long slices")
    yield Case("Unique", ((5000, 6),), {"axis": 0}, 4, note="many slices")


def _indexing() -> Iterator[Case]:
    rng = np.random.default_rng(3)
    rows, lines = rng.integers(-7, 7, (3, 4)), rng.integers(-7, 7, (7, 5, 6))
    for dtype in (F32, F16, "int8"):  # units of 16 bytes, of an element, and between
        yield Case("Gather", ((7, 5, 8), rows), {"axis": 0}, 1, dtype)
        yield Case("Gather", ((7, 5, 7), rows.astype(np.int32)), {"axis": 2}, 1, dtype)
        yield Case("GatherElements", ((7, 7, 6), lines), {"axis": 1}, 1, dtype)
    pairs = rng.integers(-3, 3, (4, 2, 2))
    yield Case("GatherND", ((3, 4, 8), pairs))
    yield Case("GatherND", ((4, 3, 3, 5), pairs.astype(np.int32)), {"batch_dims": 1}, 1, F64)
    for dtype in (F32, F16, F64, "int8"):
        yield Case("Transpose", ((70, 96),), {"perm": [1, 0]}, 1, dtype)
    yield Case("Transpose", ((3, 33, 41),), {"perm": [0, 2, 1]}, 1, BF16, note="odd")
    yield Case("Transpose", ((2, 36, 3, 5, 64),), {"perm": [4, 2, 3, 0, 1]}, note="five axes")
    unlike = np.argsort(rng.random((7, 5, 6)), 0)  # the order of equal indices is not defined
    for reduction in ("none", "add", "mul", "max", "min"):
        how = {"axis": 0, "reduction": reduction}
        index = unlike if reduction == "none" else lines
        yield Case("ScatterElements", ((7, 5, 6), index, (7, 5, 6)), how, note=reduction)
        points = pairs.reshape(8, 2) if reduction != "none" else np.array([[0, 1], [-1, 2]])
        how = {"reduction": reduction}
        yield Case("ScatterND", ((3, 4, 5), points, (len(points), 5)), how, note=reduction)
    yield Case("ScatterElements", ((7, 5, 6), unlike.astype(np.int32), (7, 5, 6)), {}, 1, F16)
    yield Case("ScatterND", ((70, 300), rng.integers(-70, 70, (300, 1)), (300, 300)),
               {"reduction": "add"}, 1, "int64", note="many")  # fmt: skip
    # sums of rows into zeros and into what there is: most once, few often, some never
    add = {"reduction": "add"}
    often = np.minimum(rng.integers(-300, 300, (700, 1)), rng.integers(0, 300, (700, 1)))
    for dtype in (F32, F16, BF16, F64):
        yield Case(
            "ScatterND", (np.zeros((300, 13)), often, (700, 13)), add, 1, dtype, note="zeros"
        )
        yield Case("ScatterND", ((300, 40), often, (700, 40)), add, 1, dtype, note="onto")
    types = rng.integers(0, 3, (5000, 1)).astype(np.int32)
    yield Case("ScatterND", (np.zeros((3, 1200)), types, (5000, 1200)), add, 1, BF16, note="types")
    same = np.full((3000, 1), 2)
    yield Case("ScatterND", (np.zeros((3, 64)), same, (3000, 64)), add, 1, F32, note="one row")
    pairs = np.stack([rng.integers(-7, 7, 500), rng.integers(0, 50, 500)], -1)
    yield Case("ScatterND", ((7, 50, 24), pairs, (500, 24)), add, 1, F16, note="pairs of indices")
    places = rng.integers(0, 4000, 900)
    yield Case("ScatterElements", (np.zeros(4000), places, (900,)), add, note="a vector")
    most, update = {"reduction": "max"}, rng.normal(size=900)
    update[::90] = np.nan
    yield Case("ScatterElements", (np.ones(4000), places % 40, update), most, note="a vector")


def _attention() -> Iterator[Case]:
    # kind, (B, H, Hkv), (S, T), (D, Dv), mask shape
    shapes = (
        ("", (2, 3, 3), (70, 70), (32, 32), None),
        ("", (1, 2, 2), (5, 131), (5, 7), None),
        ("Causal", (2, 2, 2), (130, 130), (64, 64), None),
        ("Causal", (1, 1, 1), (40, 100), (128, 128), None),
        ("Mask", (2, 4, 2), (33, 65), (40, 24), (2, 1, 33, 65)),
        ("Mask", (2, 2, 2), (64, 64), (64, 64), (2, 1, 1, 64)),
        ("Mask", (1, 4, 1), (20, 20), (16, 16), (4, 20, 20)),
        ("MaskGuard", (2, 4, 2), (70, 90), (16, 16), (2, 1, 70, 90)),
        ("Causal", (1, 4, 2), (200, 200), (72, 72), None),
        ("Causal", (1, 4, 2), (300, 300), (64, 64), None),
        ("Causal", (1, 2, 2), (400, 200), (64, 64), None),
        ("", (1, 2, 2), (64, 64), (256, 256), None),
        ("Mask", (2, 2, 1), (150, 264), (64, 64), (2, 1, 1, 264)),
        ("MaskGuard", (1, 2, 2), (70, 136), (72, 64), (1, 2, 70, 136)),
        ("Mask", (1, 2, 2), (130, 120), (32, 64), (1, 1, 130, 120)),
        ("", (1, 3, 1), (260, 330), (128, 128), None),
        ("Causal", (1, 2, 2), (150, 150), (160, 136), None),
        ("", (1, 4, 2), (150, 77), (40, 40), None),
        ("Causal", (1, 2, 2), (100, 80), (64, 48), None),
        ("", (2, 1, 1), (70, 66), (80, 72), None),
        ("", (1, 2, 1), (130, 77), (160, 160), None),
        ("", (1, 2, 2), (260, 330), (40, 40), None),
        ("Causal", (1, 2, 2), (200, 200), (40, 32), None),
        ("Mask", (1, 2, 2), (70, 136), (40, 40), (1, 2, 70, 136)),
        ("", (1, 2, 2), (130, 200), (96, 80), None),
        ("", (1, 2, 2), (70, 200), (32, 96), None),
        # more heads than clusters of two blocks, and of four
        ("Causal", (1, 70, 70), (150, 150), (64, 64), None),
        ("Causal", (1, 34, 34), (400, 400), (64, 64), None),
        # so too, with few queries: racecheck hangs where tiles outnumber stages (kernel-notes.md)
        ("", (1, 26, 26), (70, 400), (32, 32), None),
    )
    sizes = ((2, 4, 9, 8), (2, 2, 13, 8), (2, 2, 13, 16))
    for attrs in ({}, {"is_causal": 1}, {"scale": 0.5}, *sdpa_windows.NODES):
        opset = 25 if attrs in sdpa_windows.NODES else 23
        for dtype in (F32, F16):
            yield Case("Attention", sizes, attrs, 1, dtype, opset=opset, note=str(attrs))
    rng = np.random.default_rng(7)
    for kind, (b, h, hkv), (s, t), (d, dv), mask in shapes:
        for dtype in (F32, F16, BF16) if d < 256 else (F32,):
            masks = []
            if mask is not None:
                m = np.where(rng.random(mask) < 0.3, -np.inf, rng.standard_normal(mask))
                if kind == "MaskGuard":
                    m[:, :, 3] = -np.inf
                else:
                    m[..., 0] = 0.0
                masks.append(m.astype(dtype_of(dtype)))
            yield from _sdpa(rng, kind, (b, h, hkv), (s, t), (d, dv), dtype, masks)
    yield from _sdpa_steps()
    for row in (*sdpa_packed.rows(), *(("Mask", *row) for row in sdpa_windows.rows())):
        yield from _sdpa(rng, *row)


def _sdpa_steps() -> Iterator[Case]:
    """Conditions, two masks, a softcap, NaN guards: one row a value of the kernels' macros."""
    # kind, (B, H, Hkv), (S, T), (D, Dv), shapes of the masks and conditions
    rows = (
        ("Where", (2, 4, 2), (70, 136), (64, 64), ((2, 1, 70, 136),)),
        ("Where", (2, 2, 2), (40, 200), (64, 64), ((2, 1, 1, 200),)),
        ("Where", (1, 2, 2), (130, 120), (128, 128), ((1, 1, 130, 120),)),
        ("Where", (2, 2, 1), (33, 65), (40, 24), ((33, 65),)),
        ("Where", (1, 2, 2), (70, 264), (72, 256), ((1, 1, 1, 264),)),
        ("MaskWhere", (2, 4, 4), (70, 72), (32, 32), ((1, 4, 70, 72), (2, 1, 1, 72))),
        ("WhereMask", (2, 2, 2), (64, 64), (64, 64), ((64, 64), (2, 1, 1, 64))),
        ("WhereMask", (1, 2, 1), (33, 65), (128, 72), ((1, 1, 1, 65), (1, 2, 33, 65))),
        ("MaskMask", (2, 2, 2), (50, 88), (16, 16), ((1, 2, 50, 88), (2, 1, 50, 88))),
        ("WhereWhere", (1, 2, 2), (40, 40), (64, 64), ((1, 1, 40, 40), (1, 1, 1, 40))),
        ("NanGuard", (1, 2, 2), (70, 136), (64, 64), ()),
        ("MaskNanGuard", (2, 2, 2), (70, 136), (64, 64), ((2, 1, 70, 136),)),
        ("MaskNanGuard", (1, 4, 2), (33, 65), (40, 24), ((1, 1, 1, 65),)),
        ("WhereNanGuard", (1, 2, 2), (130, 264), (128, 128), ((1, 1, 130, 264),)),
        ("WideMask", (1, 2, 2), (40, 40), (64, 64), ((1, 1, 40, 40),)),
        ("CausalMaskGuard", (1, 2, 2), (70, 136), (64, 64), ((1, 1, 70, 136),)),
        ("Softcap", (1, 4, 2), (70, 136), (64, 64), ()),
        ("Softcap", (1, 2, 2), (70, 200), (256, 256), ()),
        ("SoftcapMask", (1, 2, 2), (130, 136), (128, 128), ((1, 1, 130, 136),)),
        ("SoftcapWhere", (2, 2, 2), (33, 65), (40, 24), ((2, 1, 1, 65),)),
        ("SoftcapCausal", (1, 2, 2), (130, 130), (64, 64), ()),
    )
    rng = np.random.default_rng(8)
    for kind, heads, sizes, widths, shapes in rows:
        steps = KINDS[f"Sdpa{kind}"].steps
        for dtype in (F32, F16, BF16) if widths[0] < 256 else (F16,):
            masks = []
            for i, (step, shape) in enumerate(zip(steps, shapes, strict=True)):
                dropped = rng.random(shape) < 0.4
                if step == "Where":
                    if shape[-2] > 3:
                        dropped[..., 3, :] = True  # a row masked whole: uniform weights
                    # far off as exporters have it, unless a sum with it would be rounded
                    fill = 0.5 if i else -1e4 if len(steps) == 1 else -8.0
                    masks += [~dropped, np.asarray(fill, dtype_of(dtype))]
                    continue
                mask = np.where(dropped, -np.inf, rng.standard_normal(shape))
                if "Guard" not in kind:
                    mask[..., 0] = 0.0
                elif shape[-2] > 3:
                    mask[..., 3, :] = -np.inf
                    mask[..., 4, 7] = np.nan if "Nan" in kind else 0.0
                masks.append(mask.astype(dtype_of(dtype)))
            yield from _sdpa(rng, kind, heads, sizes, widths, dtype, masks)


def _sdpa(
    rng: np.random.Generator, kind: str, heads: tuple[int, int, int], sizes: tuple[int, int],
    widths: tuple[int, int], dtype: str, masks: Sequence[np.ndarray], more: Any = (),
) -> Iterator[Case]:  # fmt: skip
    """One attention operator and its gradient on the same operands."""
    (b, h, hkv), (s, t), (d, dv) = heads, sizes, widths
    shapes = ((b, h, s, d), (b, hkv, t, d), (b, hkv, t, dv))
    arrays = [rng.standard_normal(n).astype(dtype_of(dtype)) for n in shapes]
    attrs = {"scale": d**-0.5, **dict(more)} | ({"softcap": 1.5} if "Softcap" in kind else {})
    if kind == "NanGuard":
        arrays[0][0, 0, 5, 3], arrays[2][0, 1, 2, 4] = np.nan, np.inf
    name = f"{'Grouped' * (h != hkv)}Sdpa{kind}"
    if h != hkv:
        attrs |= {"q_rows": [0, h, -1, 0], "kv_rows": [0, hkv, -1, 0]}
    given = (*arrays, *masks)
    forward = Case(f"{name}_lse", given, attrs, 2, dtype, FUSE, f"{s} {t} {d}")
    yield forward
    results = cache(forward.oracle)  # when the gradient is tested, not where cases are listed
    dy = rng.standard_normal((b, h, s, dv)).astype(dtype_of(dtype))
    y_and_lse = (lambda: results()[0].astype(dy.dtype)), (lambda: results()[1].astype(np.float32))
    given = (dy, *y_and_lse, *given)
    if kind != "NanGuard":  # its gradient is of what is not finite
        yield Case(f"{name}Grad", given, attrs, 3, dtype, FUSE, f"{s} {t} {d}")


@cache
def cases() -> tuple[Case, ...]:
    return (
        *_reductions(),
        *_softmaxes(),
        *_norms(),
        *_windows(),
        *_samples(),
        *_regions(),
        *_scans(),
        *_indexing(),
        *(Case(*row) for row in (*long_rows.rows(), *algebra_rows.rows())),
        *_attention(),
    )
