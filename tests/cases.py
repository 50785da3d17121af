"""The case tables that tests share: real exported graphs, and a small graph for each fusion.

More real graphs can be added without touching code: every `NAME__VARIANT.onnx` with its `.npz` in
the folder that ONNX_FUSE_CASES names is one more case.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state

from onnx_fuse.onnx.build import text_model

DATA = Path(__file__).parent / "data"


def _newest_opset() -> int:
    """The newest ai.onnx opset that the installed onnxruntime loads."""
    newest = 21
    for opset in range(22, onnx.defs.onnx_opset_version() + 1):
        model = text_model(
            f'<ir_version: 10, opset_import: ["" : {opset}]>\n'
            "agraph (float[N] x) => (float[N] y) { y = Relu (x) }"
        )
        try:
            onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
        except onnxruntime.capi.onnxruntime_pybind11_state.Fail:
            return newest
        newest = opset
    return newest


NEWEST_OPSET = _newest_opset()


@dataclass(frozen=True)
class RealCase:
    """One exported graph with stored feeds, outputs and gradients (tests/data/README.md)."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.path.with_suffix(".npz")) as stored:
            return {key: stored[key] for key in stored.files}

    @property
    def opset(self) -> int:
        model = onnx.load(self.path, load_external_data=False)
        return next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))

    def _named(self, prefix: str) -> dict[str, np.ndarray]:
        return {k[len(prefix) :]: v for k, v in self.arrays.items() if k.startswith(prefix)}

    @property
    def feeds(self) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """(inputs, expected outputs) of the two stored feeds, whose dynamic sizes differ."""
        return [
            (self._named("in_"), self._named("out_")),
            (self._named("in1_"), self._named("out1_")),
        ]

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        return self._named("grads_")


def real_cases() -> list[RealCase]:
    folders = [DATA, *map(Path, filter(None, [os.environ.get("ONNX_FUSE_CASES")]))]
    paths = {path.name: path for folder in folders for path in sorted(folder.glob("*__*.onnx"))}
    return [case for case in map(RealCase, paths.values()) if case.opset <= NEWEST_OPSET]


@dataclass(frozen=True)
class FusionCase:
    """A graph in ONNX text and the fused operators it becomes.

    Inputs beside those in `fed` are weights: random initializers. `fused` are the operators of
    domain onnx_fuse in the result, in order; `reason` is part of what is said of a near miss;
    `gone` are ai.onnx operators that must not be left. `spares` are hostile numbers left out, with
    the reason: a feed of hostile.py ("empty"), a type ("float16"), or both ("float16:huge").
    """

    name: str
    inputs: str
    body: str
    fused: tuple[str, ...] = ()
    reason: str = ""
    fed: tuple[str, ...] = ("x",)
    output: str = "float[B,T,24] y"
    level: int = 2
    opset: int = 21
    gone: tuple[str, ...] = ()
    spares: tuple[tuple[str, str], ...] = ()

    def spared(self, feed: str, dtype: str) -> str:
        """Why hostile numbers of this kind are left out, or nothing; see `spares`."""
        keys = [f"{dtype}:{feed}", feed or dtype]
        return next((reason for key, reason in self.spares if key in keys), "")

    def model(self, seed: int = 0) -> ir.Model:
        imports = f'["" : {self.opset}, "com.microsoft" : 1]'
        lines = "\n".join(f"  {line.strip()}" for line in self.body.splitlines() if line.strip())
        model = text_model(
            f"<ir_version: 10, opset_import: {imports}>\n"
            f"agraph ({self.inputs}) => ({self.output}) {{\n{lines}\n}}"
        )
        rng = np.random.default_rng(seed)
        for value in [v for v in model.graph.inputs if v.name not in self.fed]:
            assert value.shape is not None
            assert value.dtype is not None
            array = rng.standard_normal(value.shape.numpy()) * 0.5 + (value.name == "g")
            value.const_value = ir.tensor(array.astype(value.dtype.numpy()), name=value.name)
            model.graph.inputs.remove(value)
            model.graph.register_initializer(value)
        return model

    def feeds(self, **sizes: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(1)
        result = {}
        for value in self.model().graph.inputs:
            assert value.shape is not None
            assert value.dtype is not None
            shape = [d if isinstance(d, int) else sizes[str(d)] for d in value.shape]
            kind = value.dtype.numpy()
            whole = kind in (np.bool_, np.int64)
            draw = rng.integers(0, 2, shape) if whole else rng.standard_normal(shape)
            result[value.name or ""] = np.asarray(draw, kind)
        return result


_X, _LIN = "float[B,T,16] x", "float[16,24] w, float[24] c"
_AFFINE = "float[16] g, float[16] b"
_IN = f"{_X}, {_AFFINE}, {_LIN}"
_LN = "n = LayerNormalization <axis = -1> (x, g, b)\n"
_LINEAR = "m = MatMul (n, w)\n z = Add (m, c)\n"
_PLAIN = "m = MatMul (x, w)\n z = Add (m, c)\n"


_PAD = "p = Pad (n, pads)\n"
_PAD_AND_ROLL = (
    "one = Constant <value_ints = [1]> ()\n two = Constant <value_ints = [2]> ()\n"
    "end = Constant <value_ints = [99]> ()\n start = Constant <value_ints = [0]> ()\n"
    "q = Pad (n, pads)\n low = Slice (q, start, two, one)\n high = Slice (q, two, end, one)\n"
    "p = Concat <axis = 1> (high, low)\n"
)
_PADDED = "m = MatMul (v, w)\n y = Add (m, c)"


def _scalar(name: str, value: float) -> str:
    return f"{name} = Constant <value = float {{{value}}}> ()\n"


def _written_norm(mean: str, square: str, normalize: str, affine: str = "q = Mul (p, g)") -> str:
    """A LayerNorm (or, without `mean`, an RMSNorm) spelled out; d is what is squared."""
    return (
        "axes = Constant <value = int64[1] {-1}> ()\n"
        + _scalar("two", 2.0)
        + _scalar("one", 1.0)
        + _scalar("eps", 1e-12)
        + f"{mean}\n{square}\n"
        "v = ReduceMean (sq, axes)\n ve = Add (v, eps)\n std = Sqrt (ve)\n"
        f"{normalize}\n{affine}\n"
    )


_CENTRE = "mu = ReduceMean (x, axes)\n d = Sub (x, mu)"
_POW, _MUL = "sq = Pow (d, two)", "sq = Mul (d, d)"
_DIV = "p = Div (d, std)"
_RECIPROCAL = "r = Reciprocal (std)\n p = Mul (r, d)"
_ONE_OVER = "r = Div (one, std)\n p = Mul (d, r)"
_BIAS = "q = Mul (p, g)\n n = Add (q, b)"

_ERF = (
    _scalar("r2", 1.41421356)
    + _scalar("half", 0.5)
    + _scalar("one", 1.0)
    + ("u = Div (z, r2)\n e = Erf (u)\n e1 = Add (e, one)\n")
)
_TANH = (
    _scalar("half", 0.5)
    + _scalar("one", 1.0)
    + _scalar("three", 3.0)
    + _scalar("k", 0.7978845608)
    + _scalar("a", 0.044715)
)
_QKV = "float[B,H,S,8] q, float[B,H,T,8] k, float[B,H,T,8] v"
_SCORES = "kt = Transpose <perm = [0,1,3,2]> (k)\n s = MatMul (q, kt)\n"
_SCALE = _scalar("f", 0.35355339)
_ATT = {"fed": ("q", "k", "v", "mask"), "output": "float[B,H,S,8] y"}

FUSION_CASES = (
    # --- LayerNormalization in every form that exporters write -----------------------------------
    *(
        FusionCase(
            f"norm_with_{name}_of_one_number",
            f"{_X}, {affine}, {_LIN}",
            _LN + _LINEAR + "y = Identity (z)",
            ("LayerNormGemm",),
            spares=(("huge", "onnxruntime's variance overflows later where it broadcasts (1.32)"),),
        )
        for name, affine in (
            ("a_shift", "float[16] g, float[1] b"),
            ("a_scale", "float[1] g, float[16] b"),
        )
    ),
    FusionCase("norm_node", _IN, _LN + _LINEAR + "y = Identity (z)", ("LayerNormGemm",)),
    FusionCase(
        "norm_with_mean_and_rstd",
        _IN,
        "n, mean, rstd = LayerNormalization <axis = 2> (x, g, b)\n" + _LINEAR + "y = Identity (z)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "norm_without_bias",
        f"{_X}, float[16] g, {_LIN}",
        "n = LayerNormalization (x, g)\n" + _LINEAR + "y = Identity (z)",
        ("LayerNormGemm",),
    ),
    *(
        FusionCase(
            f"norm_written_out_{name}",
            _IN,
            _written_norm(_CENTRE, square, normalize, _BIAS) + _LINEAR + "y = Identity (z)",
            ("LayerNormGemm",),
        )
        for name, square, normalize in (
            ("pow_div", _POW, _DIV),
            ("mul_reciprocal", _MUL, _RECIPROCAL),
            ("mul_one_over", _MUL, _ONE_OVER),
        )
    ),
    FusionCase(
        "norm_written_out_width_from_sizes",  # [B·4, -1, 16], as patches are unfolded
        f"float[B,4,T,16] x, {_AFFINE}, {_LIN}",
        "zero = Constant <value = int64 {0}> ()\n four = Constant <value = int64 {4}> ()\n"
        "at = Constant <value = int64[1] {0}> ()\n rest = Constant <value = int64[1] {-1}> ()\n"
        "all = Shape (x)\n b0 = Gather (all, zero)\n t = Shape <start = 2, end = 3> (x)\n"
        "b4 = Mul (b0, four)\n b1 = Unsqueeze (b4, at)\n to = Concat <axis = 0> (b1, t, rest)\n"
        "x3 = Reshape (x, to)\n"
        + _written_norm(_CENTRE.replace("(x", "(x3"), _POW, _DIV, _BIAS)
        + _LINEAR
        + "y = Identity (z)",
        ("LayerNormGemm",),
        output="float[R,T,24] y",
    ),
    FusionCase(
        "norm_written_out_with_var_and_mean",  # torch.var_mean: its axes are put back by Reshape
        _IN,
        _scalar("eps", 1e-5)
        + _scalar("width", 16.0)
        + "last = Constant <value = int64[1] {2}> ()\n unit = Constant <value = int64[1] {1}> ()\n"
        "axes = Constant <value = int64[1] {-1}> ()\n"
        "b0 = Shape <start = 0, end = 1> (x)\n t0 = Shape <start = 1, end = 2> (x)\n"
        "to = Concat <axis = 0> (b0, t0, unit)\n"
        "mu = ReduceMean (x, last)\n d = Sub (x, mu)\n sq = Mul (d, d)\n"
        "v = ReduceMean <keepdims = 0> (sq, last)\n vr = Reshape (v, to)\n vx = Expand (vr, to)\n"
        "total = ReduceSum <keepdims = 0> (x, axes)\n tr = Reshape (total, to)\n"
        "mean = Div (tr, width)\n d2 = Sub (x, mean)\n"
        "ve = Add (vx, eps)\n std = Sqrt (ve)\n p = Div (d2, std)\n"
        + f"{_BIAS}\n"
        + _LINEAR
        + "y = Identity (z)",
        ("LayerNormGemm",),
        gone=("ReduceMean", "ReduceSum"),
        spares=(("float16:huge", "onnxruntime has float32 between operators without float16"),),
    ),
    FusionCase(
        "norm_written_out_around_an_rms_norm",
        _IN,
        _scalar("one", 1.0)
        + "axes = Constant <value = int64[1] {-1}> ()\n"
        + f"{_CENTRE}\n q = RMSNormalization (d, g)\n n = Add (q, b)\n"
        + _LINEAR
        + "y = Identity (z)",
        ("LayerNormGemm",),
        opset=23,
        gone=("ReduceMean",),
    ),
    FusionCase(
        "norm_written_out_operands_swapped",
        _IN,
        _written_norm(_CENTRE, _POW, _DIV, "q = Mul (g, p)\n n = Add (b, q)")
        + "m = MatMul (n, w)\n z = Add (c, m)\n y = Identity (z)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "norm_written_out_without_affine",
        f"{_X}, {_LIN}",
        _written_norm(_CENTRE, _POW, _DIV, "n = Identity (p)") + _LINEAR + "y = Identity (z)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "norm_with_casts_between",
        "float16[B,T,16] x, float16[16] g, float16[16] b, float16[16,24] w, float16[24] c",
        "xf = Cast <to = 1> (x)\n"
        + _written_norm(
            "mu = ReduceMean (xf, axes)\n d = Sub (xf, mu)",
            _POW,
            _DIV,
            "ph = Cast <to = 10> (p)\n q = Mul (ph, g)\n n = Add (q, b)",
        )
        + _LINEAR
        + "y = Identity (z)",
        ("LayerNormGemm",),
        output="float16[B,T,24] y",
    ),
    FusionCase(
        "norm_over_two_axes_stays",
        f"{_X}, float[5,16] g, float[5,16] b, {_LIN}".replace("B,T,16", "B,5,16"),
        "n = LayerNormalization <axis = 1> (x, g, b)\n" + _LINEAR + "y = Identity (z)",
        ("Gemm",),
        reason="normalizes from axis 1",
        output="float[B,5,24] y",
    ),
    # --- RMSNormalization -------------------------------------------------------------------------
    *(
        FusionCase(
            f"rms_{name}",
            f"{_X}, float[16] g, {_LIN}",
            _written_norm("d = Identity (x)", square, normalize, "n = Mul (g, p)")
            + _LINEAR
            + "y = Identity (z)",
            ("RMSNormGemm",),
        )
        for name, square, normalize in (
            ("pow_div", _POW, _DIV),
            ("mul_reciprocal", _MUL, _RECIPROCAL),
        )
    ),
    FusionCase(
        "rms_node",
        f"{_X}, float[16] g, {_LIN}",
        "n = RMSNormalization <axis = -1> (x, g)\n" + _LINEAR + "y = Identity (z)",
        ("RMSNormGemm",),
        opset=23,
    ),
    # --- Gemm with bias and activation ------------------------------------------------------------
    FusionCase("matmul_add", f"{_X}, {_LIN}", _PLAIN + "y = Identity (z)", ("Gemm",)),
    FusionCase(
        "bias_scalar",
        f"{_X}, float[16,24] w, float c",
        _PLAIN + "y = Relu (z)",
        ("GemmRelu",),
    ),
    FusionCase(
        "bias_per_row",
        "float[5,16] x, float[16,24] w, float[5,1] c",
        _PLAIN + "y = Relu (z)",
        ("GemmRelu",),
        output="float[5,24] y",
    ),
    FusionCase(
        "bias_none", f"{_X}, float[16,24] w", "z = MatMul (x, w)\n y = Relu (z)", ("GemmRelu",)
    ),
    FusionCase(
        "residual_is_no_bias",
        f"{_X}, float[B,T,24] r, float[16,24] w",
        "m = MatMul (x, w)\n y = Add (m, r)",
        fed=("x", "r"),
    ),
    FusionCase(
        "gemm_transposed_weight",
        "float[B,16] x, float[24,16] w, float[24] c",
        "z = Gemm <transB = 1> (x, w, c)\n y = Tanh (z)",
        ("GemmTanh",),
        output="float[B,24] y",
    ),
    FusionCase(
        "gemm_with_alpha_stays",
        "float[B,16] x, float[24,16] w, float[24] c",
        "z = Gemm <transB = 1, alpha = 0.5> (x, w, c)\n y = Tanh (z)",
        reason="alpha other than 1",
        output="float[B,24] y",
    ),
    *(
        FusionCase(f"activation_{name}", f"{_X}, {_LIN}", _PLAIN + body, (f"Gemm{fused}",))
        for name, fused, body in (
            ("leaky_relu", "LeakyRelu", "y = LeakyRelu <alpha = 0.2> (z)"),
            ("sigmoid", "Sigmoid", "y = Sigmoid (z)"),
            ("tanh", "Tanh", "y = Tanh (z)"),
            ("elu", "Elu", "y = Elu <alpha = 0.7> (z)"),
            ("selu", "Selu", "y = Selu (z)"),
            ("mish", "Mish", "y = Mish (z)"),
            ("mish_of_opset_17", "Mish", "s = Softplus (z)\n t = Tanh (s)\n y = Mul (z, t)"),
            ("softplus", "Softplus", "y = Softplus (z)"),
            ("hard_sigmoid", "HardSigmoid", "y = HardSigmoid <alpha = 0.16666667> (z)"),
            ("hard_swish", "HardSwish", "y = HardSwish (z)"),
            (
                "hard_swish_of_opset_13",
                "HardSwish",
                "s = HardSigmoid <alpha = 0.16666667> (z)\n y = Mul (s, z)",
            ),
            ("gelu", "Gelu", "y = Gelu (z)"),
            ("gelu_tanh", "GeluTanh", 'y = Gelu <approximate = "tanh"> (z)'),
            ("gelu_erf_half_last", "Gelu", _ERF + "t = Mul (z, e1)\n y = Mul (t, half)"),
            ("gelu_erf_half_first", "Gelu", _ERF + "h = Mul (half, z)\n y = Mul (h, e1)"),
            ("gelu_erf_half_inner", "Gelu", _ERF + "h = Mul (e1, half)\n y = Mul (z, h)"),
            (
                "gelu_tanh_pow",
                "GeluTanh",
                _TANH
                + "z3 = Pow (z, three)\n az = Mul (z3, a)\n i = Add (z, az)\n ki = Mul (i, k)\n"
                "t = Tanh (ki)\n t1 = Add (one, t)\n h = Mul (z, half)\n y = Mul (h, t1)",
            ),
            (
                "gelu_tanh_fast",
                "GeluTanh",
                _TANH
                + "zk = Mul (z, k)\n az = Mul (a, z)\n azz = Mul (az, z)\n i = Add (azz, one)\n"
                "ki = Mul (zk, i)\n t = Tanh (ki)\n t1 = Add (t, one)\n h = Mul (t1, z)\n"
                "y = Mul (h, half)",
            ),
            ("silu", "Silu", "s = Sigmoid (z)\n y = Mul (s, z)"),
            (
                "quick_gelu",
                "QuickGelu",
                _scalar("al", 1.702) + "az = Mul (al, z)\n s = Sigmoid (az)\n y = Mul (z, s)",
            ),
        )
    ),
    FusionCase(
        "activation_behind_a_reshape",
        f"{_X}, {_LIN}",
        _PLAIN
        + "to = Constant <value = int64[2] {-1, 24}> ()\n f = Reshape (z, to)\n y = Relu (f)",
        ("GemmRelu",),
        output="float[N,24] y",
    ),
    FusionCase(
        "activation_input_read_twice",
        f"{_X}, {_LIN}",
        _PLAIN + "t = Tanh (z)\n y = Mul (t, z)",
        ("Gemm",),
        reason="other reader",
    ),
    FusionCase("norm_and_activation", _IN, _LN + _LINEAR + "y = Gelu (z)", ("LayerNormGemmGelu",)),
    # --- layer scale ------------------------------------------------------------------------------
    FusionCase(
        "scale_of_columns",
        f"{_X}, {_LIN}, float[24] s",
        _PLAIN + "y0 = Mul (s, z)\n y = Relu (y0)",
        ("GemmRelu",),
        level=1,
        gone=("Mul",),
    ),
    FusionCase(
        "scale_of_a_gemm",
        "float[B,16] x, float[24,16] w, float[24] c, float[24] s",
        "z = Gemm <transB = 1> (x, w, c)\n t = Mul (z, s)\n y = Tanh (t)",
        ("GemmTanh",),
        level=3,
        output="float[B,24] y",
        gone=("Mul",),
    ),
    FusionCase(
        "scale_of_a_gemm_with_a_bias_of_rows_stays",  # as many rows as columns
        "float[24,16] x, float[16,24] w, float[24,1] c, float[24] s",
        "z = Gemm (x, w, c)\n t = Mul (z, s)\n y = Tanh (t)",
        level=3,
        output="float[24,24] y",
        reason="not one number a column",
    ),
    FusionCase(
        "scale_behind_nchw",
        "float[B,4,6,16] x, float[16,24] w, float[24] c, float[B,24,4,6] r, float[24,1,1] s",
        _PLAIN + "t = Transpose <perm = [0,3,1,2]> (z)\n t2 = Mul (t, s)\n y = Add (r, t2)",
        ("Gemm",),
        fed=("x", "r"),
        level=3,
        output="float[B,24,4,6] y",
        gone=("Mul",),
    ),
    FusionCase(
        "scale_behind_a_convolution",
        "float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, float[6] c, float[6,1,1] s",
        "z = Conv <pads = [1,1,1,1]> (x, w, c)\n t = Mul (z, s)\n y = Add (t, r)",
        ("ConvAdd",),
        fed=("x", "r"),
        level=3,
        output="float[B,6,S,T] y",
        gone=("Mul", "Add"),
    ),
    FusionCase(
        "scale_of_what_is_read_twice_stays",
        f"{_X}, {_LIN}, float[24] s",
        _PLAIN + "t = Mul (s, z)\n y = Add (t, z)",
        ("Gemm",),
        level=3,
        reason="layer scale that cannot be folded",
    ),
    FusionCase(
        "scale_of_rows_stays",
        "float[5,16] x, float[16,24] w, float[24] c, float[5,1] s",
        _PLAIN + "y = Mul (s, z)",
        ("Gemm",),
        level=3,
        output="float[5,24] y",
    ),
    # --- the norm's other readers -----------------------------------------------------------------
    FusionCase(
        "norm_read_by_a_residual",
        f"{_X}, {_AFFINE}, float[16,16] w, float[16] c",
        _LN + _LINEAR + "y = Add (z, n)",
        ("LayerNormGemm_n",),
        output="float[B,T,16] y",
    ),
    FusionCase(
        "norm_read_by_its_shape_only",
        _IN,
        _LN + _LINEAR + "sh = Shape (n)\n y = Identity (z)",
        ("LayerNormGemm",),
        output="float[B,T,24] y, int64[3] sh",
    ),
    FusionCase(
        "norm_through_a_gather",
        _IN,
        "i = Constant <value = int64 {0}> ()\n"
        + _LN
        + "r = Gather <axis = 1> (n, i)\n m = MatMul (r, w)\n y = Add (m, c)",
        ("LayerNormGemm",),
        output="float[B,24] y",
    ),
    FusionCase(
        "norm_through_a_roll",
        _IN,
        "zero = Constant <value = int64[1] {0}> ()\n one = Constant <value = int64[1] {1}> ()\n"
        "big = Constant <value = int64[1] {9999}> ()\n"
        + _LN
        + "head = Slice (n, zero, one, one)\n tail = Slice (n, one, big, one)\n"
        "r = Concat <axis = 1> (tail, head)\n m = MatMul (r, w)\n y = Add (m, c)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "norm_through_nchw_and_back",
        "float[B,4,6,16] x, float[16] g, float[16] b, float[16,24] w, float[24] c",
        "to = Constant <value = int64[3] {0, 24, 16}> ()\n"
        + _LN
        + "u = Transpose <perm = [0,3,1,2]> "
        "(n)\n v = Transpose <perm = [0,2,3,1]> (u)\n r = Reshape (v, to)\n m = MatMul (r, w)\n"
        "y = Add (m, c)",
        ("LayerNormGemm",),
        output="float[B,24,24] y",
        gone=("Transpose",),
    ),
    FusionCase(
        "norm_through_windows_of_nchw",
        "float[B,4,6,16] x, float[16] g, float[16] b, float[16,24] w, float[24] c",
        "six = Constant <value = int64[6] {-1, 16, 2, 2, 3, 2}> ()\n"
        "rows = Constant <value = int64[3] {-1, 4, 16}> ()\n" + _LN + "u = Transpose "
        "<perm = [0,3,1,2]> (n)\n s = Reshape (u, six)\n t = Transpose <perm = [0,2,4,3,5,1]> (s)\n"
        "r = Reshape (t, rows)\n m = MatMul (r, w)\n y = Add (m, c)",
        ("LayerNormGemm",),
        output="float[R,4,24] y",
    ),
    FusionCase(
        "norm_through_rows_that_are_mixed_stays",  # the last axis is 16, but of other elements
        "float[B,16,16] x, float[16] g, float[16] b, float[16,24] w, float[24] c",
        _LN + "u = Transpose <perm = [0,2,1]> (n)\n m = MatMul (u, w)\n y = Add (m, c)",
        ("Gemm",),
        reason="mixes its rows",
        output="float[B,16,24] y",
    ),
    FusionCase(
        "norm_without_bias_through_a_pad",
        f"{_X}, float[16] g, {_LIN}",
        "pads = Constant <value = int64[6] {0, 1, 0, 0, 2, 0}> ()\n"
        "n = LayerNormalization (x, g)\n p = Pad (n, pads)\n m = MatMul (p, w)\n y = Add (m, c)",
        ("LayerNormGemm",),
        output="float[B,U,24] y",
    ),
    FusionCase(
        "rms_through_a_pad",
        f"{_X}, float[16] g, {_LIN}",
        "pads = Constant <value = int64[6] {0, 1, 0, 0, 2, 0}> ()\n"
        + _written_norm("d = Identity (x)", _POW, _DIV, "n = Mul (g, p)")
        + "q2 = Pad (n, pads)\n m = MatMul (q2, w)\n y = Add (m, c)",
        ("RMSNormGemm",),
        output="float[B,U,24] y",
    ),
    FusionCase(
        "norm_of_no_epsilon_through_a_pad_stays",  # zeros become NaN
        f"{_X}, float[16] g, {_LIN}",
        "pads = Constant <value = int64[6] {0, 1, 0, 0, 2, 0}> ()\n"
        "n = LayerNormalization <epsilon = 0.0> (x, g)\n p = Pad (n, pads)\n m = MatMul (p, w)\n"
        "y = Add (m, c)",
        ("Gemm",),
        reason="a Pad between",
        output="float[B,U,24] y",
    ),
    FusionCase(
        "norm_with_bias_through_a_pad_stays",
        _IN,
        "pads = Constant <value = int64[6] {0, 1, 0, 0, 2, 0}> ()\n"
        + _LN
        + "p = Pad (n, pads)\n m = MatMul (p, w)\n y = Add (m, c)",
        ("Gemm",),
        reason="a Pad between adds rows of zeros",
        output="float[B,U,24] y",
    ),
    *(
        FusionCase(
            f"norm_with_bias_before_a_pad_{name}",  # [2, 3] padded to windows of [3, 3]
            f"float[B,2,3,16] x, {_AFFINE}, float[16,{n}] w"
            + (f", float[{n}] c" if tail.find("c)") > 0 else ""),
            "pads = Constant <value = int64[8] {0, 1, 2, 0, 0, 3, 1, 0}> ()\n"
            "cut = Constant <value = int64[6] {-1, 2, 3, 2, 3, 16}> ()\n"
            "flat = Constant <value = int64[3] {-1, 9, 16}> ()\n"
            f"none = Constant <value = float[24] {{0, -0.0{', 0' * 22}}}> ()\n"
            f"{_LN}{pad}t = Reshape (p, cut)\n u = Transpose <perm = [0,1,3,2,4,5]> (t)\n"
            f"v = Reshape (u, flat)\n{tail}",
            fused,
            output=f"float[U,9,{n}] y",
            reason=reason,
        )
        for name, n, pad, tail, fused, reason in (
            ("of_many_rows", 24, _PAD, _PADDED, ("LayerNormGemm",), ""),
            ("bias_less", 24, _PAD, "y = MatMul (v, w)", ("LayerNormGemm",), ""),
            (
                "of_a_zero_bias",
                24,
                _PAD,
                "m = MatMul (v, w)\n y = Add (m, none)",
                ("LayerNormGemm",),
                "",
            ),
            (
                "and_an_activation",
                24,
                _PAD,
                f"{_PADDED.replace('y', 'z')}\n y = Relu (z)",
                ("LayerNormGemm",),
                "",
            ),
            ("of_a_roll", 24, _PAD_AND_ROLL, _PADDED, ("LayerNormGemm",), ""),
            (
                "whose_sizes_are_asked_for",
                24,
                _PAD,
                "s = Shape (v)\n f = Cast <to = 1> (s)\n e = ReduceSum <keepdims = 0> (f)\n"
                "d = Shape <start = 1> (t)\n h = Cast <to = 1> (d)\n"
                "i = ReduceMax <keepdims = 0> (h)\n"
                "j = Div (e, i)\n" + _PADDED.replace("y =", "z =") + "\n y = Div (z, j)",
                ("LayerNormGemm",),
                "",
            ),
            ("of_many_columns_stays", 120, _PAD, _PADDED, ("Gemm",), "costs more than the norm's"),
            (
                "and_others_stays",
                24,
                _PAD,
                "e = Exp (v)\n f = Add (v, e)\n y = MatMul (f, w)",
                (),
                "",
            ),
            (
                "and_its_bias_of_rows_stays",
                24,
                _PAD,
                "k = Constant <value = float[9,1] {1,2,3,4,5,6,7,8,9}> ()\n m = MatMul (v, w)\n"
                "y = Add (m, k)",
                ("Gemm",),
                "not one number a column",
            ),
        )
    ),
    FusionCase(
        "norm_through_a_pad_of_ones_stays",
        f"{_X}, float[16] g, {_LIN}",
        "pads = Constant <value = int64[6] {0, 1, 0, 0, 2, 0}> ()\n"
        + _scalar("one", 1.0)
        + "n = LayerNormalization (x, g)\n p = Pad (n, pads, one)\n m = MatMul (p, w)\n"
        "y = Add (m, c)",
        ("Gemm",),
        reason="mixes its rows",
        output="float[B,U,24] y",
    ),
    FusionCase(
        "residual_then_norm",
        f"{_X}, float[B,T,16] r, {_AFFINE}",
        "x2 = Add (x, r)\n n = LayerNormalization (x2, g, b)\n t = Tanh (n)\n y = Add (t, x2)",
        ("SkipLayerNorm",),
        fed=("x", "r"),
        output="float[B,T,16] y",
    ),
    # --- merged products --------------------------------------------------------------------------
    FusionCase(
        "merge_query_key_value",
        f"{_X}, {_AFFINE}, float[16,8] w, float[16,4] w1, float[16,12] w2, float[8] c, "
        "float[12] c2",
        _LN + "m = MatMul (n, w)\n q = Add (m, c)\n k = MatMul (n, w1)\n m2 = MatMul (n, w2)\n"
        "v = Add (m2, c2)\n y = Concat <axis = -1> (q, k, v)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "merge_gate_and_up",
        f"{_X}, float[16] g, float[16,24] w, float[16,24] w1",
        _written_norm("d = Identity (x)", _POW, _DIV, "n = Mul (p, g)")
        + "a = MatMul (n, w)\n s = Sigmoid (a)\n gate = Mul (a, s)\n up = MatMul (n, w1)\n"
        "y = Mul (gate, up)",
        ("RMSNormGateFirstGemmSilu",),
    ),
    # --- gated products ---------------------------------------------------------------------------
    FusionCase(
        "gate_in_the_last_half_behind_a_layer_norm",
        f"{_X}, {_AFFINE}, float[16,48] w, float[48] c",
        _LN + "m = MatMul (n, w)\n z = Add (m, c)\n"
        "u, q = Split <axis = -1, num_outputs = 2> (z)\n o = Gelu (q)\n y = Mul (u, o)",
        ("LayerNormGateLastGemmGelu",),
        gone=("Split", "Mul"),
    ),
    FusionCase(
        "gate_in_the_first_slice",
        f"{_X}, float[16,48] w, float[48] c",
        "m = MatMul (x, w)\n z = Add (c, m)\n zero = Constant <value_ints = [0]> ()\n"
        "half = Constant <value_ints = [24]> ()\n all = Constant <value_ints = [48]> ()\n"
        "last = Constant <value_ints = [2]> ()\n q = Slice (z, zero, half, last)\n"
        'u = Slice (z, half, all, last)\n o = Gelu <approximate = "tanh"> (q)\n y = Mul (o, u)',
        ("GateFirstGemmGeluTanh",),
        gone=("Slice",),
    ),
    FusionCase(
        "gate_and_up_with_one_bias",
        f"{_X}, {_LIN}, float[16,24] w1",
        "m = MatMul (x, w)\n z = Add (m, c)\n u = MatMul (x, w1)\n o = Sigmoid (z)\ny = Mul (u, o)",
        ("GateFirstGemmSigmoid",),
    ),
    FusionCase(
        "gate_and_up_of_transposed_gemms",
        "float[B,16] x, float[24,16] w, float[24] c, float[24,16] w1, float[24] c1",
        "z = Gemm <transB = 1> (x, w, c)\n u = Gemm <transB = 1> (x, w1, c1)\n"
        "o = LeakyRelu <alpha = 0.3> (z)\n y = Mul (o, u)",
        ("GateFirstGemmLeakyRelu",),
        output="float[B,24] y",
    ),
    FusionCase(
        "gate_of_a_split_gemm_without_bias",
        "float[B,16] x, float[48,16] w",
        "z = Gemm <transB = 1> (x, w)\n n = Constant <value_ints = [24, 24]> ()\n"
        "u, q = Split <axis = 1> (z, n)\n o = Relu (q)\n y = Mul (u, o)",
        ("GateLastGemmRelu",),
        output="float[B,24] y",
    ),
    FusionCase(
        "gate_with_a_computed_weight",
        f"{_X}, float[16,48] w",
        "z = MatMul (x, w)\n q, u = Split <axis = -1, num_outputs = 2> (z)\n"
        + _scalar("a", 1.702)
        + "qa = Mul (q, a)\n s = Sigmoid (qa)\n o = Mul (q, s)\n y = Mul (o, u)",
        ("GateFirstGemmQuickGelu",),
        fed=("x", "w"),
    ),
    FusionCase(
        "gate_and_up_are_parts_below_level_2",
        f"{_X}, float[16,24] w, float[16,24] w1",
        "z = MatMul (x, w)\n u = MatMul (x, w1)\n o = Tanh (z)\n y = Mul (o, u)",
        ("GemmTanh",),
        level=1,
    ),
    FusionCase(
        "merge_not_at_level_1",
        f"{_X}, float[16,24] w, float[16,24] w1",
        "a = MatMul (x, w)\n b2 = MatMul (x, w1)\n y = Add (a, b2)",
        level=1,
    ),
    # --- attention --------------------------------------------------------------------------------
    FusionCase(
        "attention_without_mask",
        _QKV,
        _SCORES + _SCALE + "z = Mul (s, f)\n p = Softmax <axis = -1> (z)\n y = MatMul (p, v)",
        ("Sdpa",),
        **_ATT,
    ),
    *(
        FusionCase(
            f"attention_by_einsum_{name}",
            _QKV
            if name == "bhsd"
            else f"{q}, {q.replace('S', 'T').replace(' q', ' k')}, "
            f"{q.replace('S', 'T').replace(' q', ' v')}",
            f's = Einsum <equation = "{scores}"> (q, k)\n'
            + _SCALE
            + "z = Mul (s, f)\n p = Softmax <axis = -1> (z)\n"
            + f'y = Einsum <equation = "{mix}"> (p, v)',
            ("Sdpa",),
            fed=("q", "k", "v"),
            output=y,
            gone=("Einsum",),
            spares=(("empty", "onnxruntime's Einsum dies of a batch of none (1.32)"),),
        )
        for name, q, scores, mix, y in (
            ("bhsd", "", "bhid, bhjd -> bhij", "bhij, bhjd -> bhid", _ATT["output"]),
            ("bshd", "float[B,S,4,8] q", "bihd,bjhd->bhij", "bhij,bjhd->bihd", "float[B,S,4,8] y"),
        )
    ),
    FusionCase(
        "product_by_einsum",
        _IN,
        'n = LayerNormalization (x, g, b)\n m = Einsum <equation = "btk,kn->btn"> (n, w)\n'
        "y = Add (m, c)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "attention_mask_and_guard",
        f"{_QKV}, float[B,1,S,T] mask",
        _SCORES
        + _SCALE
        + _scalar("zero", 0.0)
        + "z = Mul (s, f)\n zm = Add (z, mask)\n p = Softmax (zm)\n i = IsNaN (p)\n"
        "pn = Where (i, zero, p)\n y = MatMul (pn, v)",
        ("SdpaMaskNanGuard",),
        **_ATT,
    ),
    FusionCase(
        "attention_mask_by_where",
        f"{_QKV}, bool[B,1,S,T] mask",
        _SCORES
        + _SCALE
        + _scalar("low", -3.4028235e38)
        + "z = Div (s, f)\n zm = Where (mask, z, low)\n p = Softmax (zm)\n y = MatMul (p, v)",
        ("SdpaWhere",),
        **_ATT,
    ),
    FusionCase(
        "attention_mask_before_the_scale",
        f"{_QKV}, float[B,1,S,T] mask",
        _SCORES
        + _scalar("f", 0.25)
        + "zm = Add (s, mask)\n z = Mul (zm, f)\n p = Softmax (z)\n y = MatMul (p, v)",
        ("SdpaMask",),
        **_ATT,
    ),
    FusionCase(
        "attention_where_before_the_scale",
        f"{_QKV}, bool[B,1,S,T] mask",
        _SCORES
        + _SCALE
        + _scalar("low", -3.4028235e38)
        + "zm = Where (mask, s, low)\n z = Mul (zm, f)\n p = Softmax (z)\n y = MatMul (p, v)",
        ("SdpaWhere",),
        **_ATT,
    ),
    FusionCase(
        "attention_mask_before_a_scale_that_rounds",
        f"{_QKV}, float[B,1,S,T] mask",
        _SCORES
        + _SCALE
        + "zm = Add (s, mask)\n z = Mul (zm, f)\n p = Softmax (z)\n y = MatMul (p, v)",
        reason="a mask is added before the scores are scaled by 0.353553",
        **_ATT,
    ),
    FusionCase(
        "attention_mask_enlarged_by_the_scale",
        f"{_QKV}, float[B,1,S,T] mask",
        _SCORES
        + _scalar("f", 2.0)
        + "zm = Add (s, mask)\n z = Mul (zm, f)\n p = Softmax (z)\n y = MatMul (p, v)",
        reason="a mask is added before the scores are scaled by 2",
        **_ATT,
    ),
    FusionCase(
        "attention_scaled_operands",
        "float[B,S,4,8] q, float[B,T,4,8] k, float[B,T,4,8] v",
        _scalar("f", 0.59460355) + "qt = Transpose <perm = [0,2,1,3]> (q)\n qs = Mul (qt, f)\n"
        "kt = Transpose <perm = [0,2,3,1]> (k)\n ks = Mul (kt, f)\n s = MatMul (qs, ks)\n"
        "p = Softmax (s)\n vt = Transpose <perm = [0,2,1,3]> (v)\n y = MatMul (p, vt)",
        ("Sdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_grouped_heads",
        "float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v",
        "two = Constant <value = int64[1] {2}> ()\n one = Constant <value = int64[1] {1}> ()\n"
        "b = Shape <start = 0, end = 1> (k)\n t = Shape <start = 2, end = 3> (k)\n"
        "h = Constant <value = int64[1] {4}> ()\n d = Constant <value = int64[1] {8}> ()\n"
        "five = Concat <axis = 0> (b, two, two, t, d)\n four = Concat <axis = 0> (b, h, t, d)\n"
        "k5 = Unsqueeze (k, two)\n ke = Expand (k5, five)\n kr = Reshape (ke, four)\n"
        "v5 = Unsqueeze (v, two)\n ve = Expand (v5, five)\n vr = Reshape (ve, four)\n"
        "kt = Transpose <perm = [0,1,3,2]> (kr)\n s = MatMul (q, kt)\n p = Softmax (s)\n"
        "y = MatMul (p, vr)",
        ("GroupedSdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_grouped_heads_turned_in_the_batch",
        "float[2,4,S,8] q, float[2,2,5,8] k, float[2,2,5,8] v",
        "two = Constant <value = int64[1] {2}> ()\n"
        "five = Constant <value = int64[5] {2,2,2,5,8}> ()\n"
        "flat = Constant <value = int64[3] {-1,5,8}> ()\n"
        "four = Constant <value = int64[4] {2,4,5,8}> ()\n"
        "turned = Constant <value = int64[4] {2,4,8,5}> ()\n"
        "k5 = Unsqueeze (k, two)\n ke = Expand (k5, five)\n kf = Reshape (ke, flat)\n"
        "kt3 = Transpose <perm = [0,2,1]> (kf)\n kt = Reshape (kt3, turned)\n"
        "v5 = Unsqueeze (v, two)\n ve = Expand (v5, five)\n vr = Reshape (ve, four)\n"
        "s = MatMul (q, kt)\n p = Softmax (s)\n y = MatMul (p, vr)",
        ("GroupedSdpa",),
        fed=("q", "k", "v"),
        output="float[2,4,S,8] y",
    ),
    FusionCase(
        "attention_grouped_heads_turned_in_a_free_batch",
        "float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v",
        "".join(
            f"i{i} = Constant <value_ints = [{i}]> ()\n" for i in (-1, 0, 1, 2, 3, 4, 8)
        ).replace("i-1", "less")
        + "b = Shape <end = 1> (k)\n t = Shape <start = 2, end = 3> (k)\n"
        "five = Concat <axis = 0> (b, i2, i2, t, i8)\n four = Concat <axis = 0> (b, i4, t, i8)\n"
        "k5 = Unsqueeze (k, i2)\n ke = Expand (k5, five)\n kr = Reshape (ke, four)\n"
        "v5 = Unsqueeze (v, i2)\n ve = Expand (v5, five)\n vr = Reshape (ve, four)\n"
        "sizes = Shape (kr)\n lead = Slice (sizes, i0, i2)\n rows = Slice (sizes, i2, i3)\n"
        "columns = Slice (sizes, i3, i4)\n flat = Concat <axis = 0> (less, rows, columns)\n"
        "turned = Concat <axis = 0> (lead, columns, rows)\n kf = Reshape (kr, flat)\n"
        "kt3 = Transpose <perm = [0,2,1]> (kf)\n kt = Reshape (kt3, turned)\n"
        "s = MatMul (q, kt)\n p = Softmax (s)\n y = MatMul (p, vr)",
        ("GroupedSdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
        spares=(("empty", "onnxruntime finds no -1 beside no elements"),),
    ),
    FusionCase(
        "attention_one_key_head_for_all",
        "float[B,4,S,8] q, float[B,1,T,8] k, float[B,1,T,8] v",
        _SCORES + "p = Softmax (s)\n y = MatMul (p, v)",
        ("GroupedSdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_heads_known_at_run_time",
        "float[B,H,S,8] q, float[B,G,T,8] k, float[B,G,T,8] v",
        _SCORES + "p = Softmax (s)\n y = MatMul (p, v)",
        ("Sdpa",),
        fed=("q", "k", "v"),
        output="float[B,H,S,8] y",
    ),
    FusionCase(
        "attention_node",
        "float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v",
        "y = Attention (q, k, v)",
        ("GroupedSdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
        opset=23,
    ),
    *(
        FusionCase(
            f"attention_node_{name}_with_a_row_masked_whole",  # that row is zero
            "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v",
            "zero = Constant <value = int64 {0}> ()\n one = Constant <value = int64 {1}> ()\n"
            "last = Constant <value = int64[1] {1}> ()\n at = Constant <value = int64[1] {0}> ()\n"
            "s1 = Shape <start = 2, end = 3> (q)\n t1 = Shape <start = 2, end = 3> (k)\n"
            "count = Squeeze (s1, at)\n row = Range (zero, count, one)\n"
            "is_one = Equal (row, one)\n column = Unsqueeze (is_one, last)\n"
            "size = Concat <axis = 0> (s1, t1)\n"
            f"{pick}\n mask = Expand (picked, size)\n y = Attention (q, k, v, mask)",
            ("SdpaMaskGuard",),
            fed=("q", "k", "v"),
            output="float[B,4,S,8] y",
            opset=23,
        )
        for name, pick in (
            ("bool", "picked = Not (column)"),
            (
                "float",
                _scalar("keep", 0.0)
                + _scalar("drop", -np.inf)
                + "picked = Where (column, drop, keep)",
            ),
        )
    ),
    FusionCase(
        "attention_node_causal_3d",
        "float[B,S,32] q, float[B,S,32] k, float[B,S,32] v",
        "y = Attention <q_num_heads = 4, kv_num_heads = 4, is_causal = 1> (q, k, v)",
        ("SdpaCausal",),
        fed=("q", "k", "v"),
        output="float[B,S,32] y",
        opset=23,
    ),
    *(
        FusionCase(
            f"attention_node_past_{name}_causal",
            f"float[B,4,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, float[B,2,3,8] pk, "
            f"float[B,2,3,8] pv, {name}[B,1,S,3] m0, {name}[B,1,S,S] m1",
            "m = Concat <axis = -1> (m0, m1)\n"
            "y, kk, vv = Attention <is_causal = 1> (q, k, v, m, pk, pv)",
            ("GroupedSdpaMaskGuard",),
            fed=("q", "k", "v", "pk", "pv", "m0", "m1"),
            output="float[B,4,S,8] y",
            opset=23,
        )
        for name in ("float", "bool")
    ),
    FusionCase(
        "attention_where_then_mask",
        f"{_QKV}, float[B,1,S,T] mask, bool[S,T] keep",
        _SCORES
        + _scalar("low", -1e9)
        + "w = Where (keep, s, low)\n zm = Add (w, mask)\n p = Softmax (zm)\n y = MatMul (p, v)",
        ("SdpaWhereMask",),
        fed=("q", "k", "v", "mask", "keep"),
        output=_ATT["output"],
    ),
    FusionCase(
        "attention_conditions_of_one_fill",
        f"{_QKV}, bool[B,1,S,T] mask, bool[S,T] drop",
        _SCORES
        + _scalar("low", -1e4)
        + "n = Not (mask)\n w = Where (n, low, s)\n zm = Where (drop, low, w)\n"
        "p = Softmax (zm)\n y = MatMul (p, v)",
        ("SdpaWhere",),
        fed=("q", "k", "v", "mask", "drop"),
        output=_ATT["output"],
    ),
    FusionCase(
        "attention_mask_subtracted",
        f"{_QKV}, float[B,1,S,T] mask",
        _SCORES + "zm = Sub (s, mask)\n p = Softmax (zm)\n y = MatMul (p, v)",
        ("SdpaMask",),
        **_ATT,
    ),
    FusionCase(
        "attention_three_masks",
        f"{_QKV}, float[B,1,S,T] mask, float[S,T] m2, float[B,1,1,T] m3",
        _SCORES + "z1 = Add (s, mask)\n z2 = Add (z1, m2)\n z3 = Add (z2, m3)\n"
        "p = Softmax (z3)\n y = MatMul (p, v)",
        reason="3 masks and conditions follow each other",
        fed=("q", "k", "v", "mask", "m2", "m3"),
        output=_ATT["output"],
    ),
    FusionCase(
        "attention_learned_temperature",
        "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, float[4,1,1] t",
        _SCORES + "z = Mul (s, t)\n p = Softmax (z)\n y = MatMul (p, v)",
        ("Sdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_temperature_fed",
        "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, float[4,1,1] t",
        _SCORES + "z = Mul (s, t)\n p = Softmax (z)\n y = MatMul (p, v)",
        reason="of any magnitude",
        fed=("q", "k", "v", "t"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_temperature_by_key",
        "float[B,4,S,8] q, float[B,4,5,8] k, float[B,4,5,8] v, float[4,1,5] t",
        _SCORES + "z = Mul (s, t)\n p = Softmax (z)\n y = MatMul (p, v)",
        reason="which differs by key",
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_values_first",  # v pᵀ
        "float[B,2,8,S] q, float[B,2,8,T] k, float[B,2,6,T] v",
        "qt = Transpose <perm = [0,1,3,2]> (q)\n s = MatMul (qt, k)\n"
        + _SCALE
        + "z = Mul (s, f)\n p = Softmax (z)\n pt = Transpose <perm = [0,1,3,2]> (p)\n"
        "y = MatMul (v, pt)",
        ("Sdpa",),
        fed=("q", "k", "v"),
        output="float[B,2,6,S] y",
    ),
    FusionCase(
        "attention_over_queries_stays",
        "float[B,2,5,8] q, float[B,2,5,8] k, float[B,2,5,8] v",
        _SCORES + "p = Softmax <axis = 2> (s)\n y = MatMul (p, v)",
        reason="the softmax is not over the keys",
        fed=("q", "k", "v"),
        output="float[B,2,5,8] y",
    ),
    *(
        FusionCase(
            f"attention_softcap_{name}",
            f"{_QKV}, float[B,1,S,T] mask",
            _SCORES
            + _SCALE
            + _scalar("cap", 3.0)
            + "z = Mul (s, f)\n c = Div (z, cap)\n t = Tanh (c)\n u = Mul (t, cap)\n"
            + f"{masked}\n p = Softmax (m)\n y = MatMul (p, v)",
            (fused,),
            reason=reason,
            **_ATT,
        )
        for name, masked, fused, reason in (
            ("and_mask", "m = Add (u, mask)", "SdpaSoftcapMask", ""),
            ("alone", "m = Identity (u)", "SdpaSoftcap", ""),
        )
    ),
    FusionCase(
        "attention_tanh_behind_a_mask",
        f"{_QKV}, float[B,1,S,T] mask",
        _SCORES + "m = Add (s, mask)\n t = Tanh (m)\n p = Softmax (t)\n y = MatMul (p, v)",
        reason="a Tanh behind a mask",
        **_ATT,
    ),
    FusionCase(
        "attention_in_windows",
        "float[B,3,2,4,8] q, float[B,3,2,5,8] k, float[B,3,2,5,6] v, float[2,4,5] bias",
        "kt = Transpose <perm = [0,1,2,4,3]> (k)\n s = MatMul (q, kt)\n z = Add (s, bias)\n"
        "p = Softmax (z)\n y = MatMul (p, v)",
        ("SdpaMask",),
        fed=("q", "k", "v"),
        output="float[B,3,2,4,6] y",
    ),
    FusionCase(
        "attention_in_shifted_windows",  # [B nW, H, S, T], with a mask of nW windows in between
        "float[B,4,5,8] x, float[1,4,5,5] bias, float[3,1,5,5] shift",
        "three = Constant <value = int64[4] {3,1,1,1}> ()\n x3 = Tile (x, three)\n"
        "five = Constant <value = int64[5] {-1,3,4,5,5}> ()\n"
        "four = Constant <value = int64[4] {-1,4,5,5}> ()\n"
        "kt = Transpose <perm = [0,1,3,2]> (x3)\n s = MatMul (x3, kt)\n z = Add (s, bias)\n"
        "w = Reshape (z, five)\n zero = Constant <value = int64[1] {0}> ()\n"
        "m = Unsqueeze (shift, zero)\n wm = Add (w, m)\n zm = Reshape (wm, four)\n"
        "p = Softmax (zm)\n y = MatMul (p, x3)",
        ("SdpaMaskMask",),
        output="float[N,4,5,8] y",
    ),
    *(
        FusionCase(
            f"attention_heads_in_the_batch{name}",
            f"{q}, bool[B,1,5,5] keep",
            f"{unfold}four = Constant <value = int64[4] {{-1,2,5,5}}> ()\n"
            "three = Constant <value = int64[3] {-1,5,5}> ()\n"
            "kt = Transpose <perm = [0,2,1]> (k)\n s = MatMul (q3, kt)\n"
            + _scalar("low", -3.4028235e38)
            + "w = Reshape (s, four)\n z = Where (keep, w, low)\n p = Softmax (z)\n"
            "p3 = Reshape (p, three)\n y = MatMul (p3, v3)",
            ("SdpaWhere",),
            fed=("q", "k4", "v", "keep"),
            output="float[M,5,8] y",
        )
        for name, q, unfold in (
            (
                "_unfolded",
                "float[B,2,5,8] q, float[B,2,5,8] k4, float[B,2,5,8] v",
                "rows = Constant <value = int64[3] {-1,5,8}> ()\n q3 = Reshape (q, rows)\n"
                "k = Reshape (k4, rows)\n v3 = Reshape (v, rows)\n",
            ),
        )
    ),
    FusionCase(
        "attention_of_one_head",
        "float[B,1,S,8] q, float[B,1,T,8] k, float[B,T,8] v, float[B,S,T] mask",
        _SCORES + "one = Constant <value = int64[1] {1}> ()\n w = Squeeze (s, one)\n"
        "m = Add (w, mask)\n p = Softmax (m)\n p4 = Unsqueeze (p, one)\n"
        "v4 = Unsqueeze (v, one)\n y = MatMul (p4, v4)",
        ("SdpaMask",),
        fed=("q", "k", "v", "mask"),
        output="float[B,1,S,8] y",
    ),
    FusionCase(
        "attention_weights_are_an_output",
        _QKV,
        _SCORES + "p = Softmax (s)\n y = MatMul (p, v)",
        reason="are an output of the model",
        fed=("q", "k", "v"),
        output="float[B,H,S,8] y, float[B,H,S,T] p",
    ),
    FusionCase(
        "attention_mild_where",
        f"{_QKV}, bool[B,1,S,T] mask",
        _SCORES
        + _scalar("low", -100.0)
        + "zm = Where (mask, s, low)\n p = Softmax (zm)\n y = MatMul (p, v)",
        ("SdpaWhere",),
        **_ATT,
    ),
    FusionCase(
        "activation_outside_the_table",
        f"{_X}, {_LIN}",
        _PLAIN + "y = Softsign (z)",
        ("Gemm",),
        reason="Softsign is none of the fused activations",
    ),
    # --- Conv, losses -----------------------------------------------------------------------------
    *(
        FusionCase(
            f"group_norm_{name}",
            "float[B,8,S,T] x, float[8,1,1] g, float[8,1,1] b",
            "to = Constant <value = int64[3] {0, 4, -1}> ()\n"
            "one = Constant <value = float[4] {1.0, 1.0, 1.0, 1.0}> ()\n"
            "zero = Constant <value = float[4] {0.0, 0.0, 0.0, 0.0}> ()\n"
            "v = Reshape (x, to)\n i = InstanceNormalization <epsilon = 0.001> (v, one, zero)\n"
            f"size = Shape (x)\n n = Reshape (i, size)\n{body}",
            (f"GroupNorm{fused}",),
            output="float[B,8,S,T] y",
            gone=("InstanceNormalization", "Silu", "Sigmoid"),
        )
        for name, fused, body in (
            ("alone", "", "m = Mul (g, n)\n y = Add (m, b)"),
            ("silu", "Silu", "m = Mul (n, g)\n z = Add (b, m)\n s = Sigmoid (z)\n y = Mul (s, z)"),
        )
    ),
    *(
        FusionCase(
            f"group_norm_node_{name}",
            "float[B,8,T] x, float[8] g, float[8] b",
            f"z = GroupNormalization <num_groups = 4> (x, g, b)\n{body}",
            (f"GroupNorm{fused}",),
            output="float[B,8,T] y",
            gone=("GroupNormalization", "Relu"),
        )
        for name, fused, body in (("alone", "", "y = Neg (z)"), ("relu", "Relu", "y = Relu (z)"))
    ),
    FusionCase(
        "norm_of_groups_in_half",
        "float16[B,8,T] x, float16[8] g, float16[8] b",
        "z = GroupNormalization <num_groups = 2> (x, g, b)\n y = Relu (z)",
        ("GroupNormRelu",),
        output="float16[B,8,T] y",
    ),
    FusionCase(
        "group_norm_with_scales_of_groups_stays",
        "float[B,8,S] x, float[4] g, float[4] b, float[8,1] u, float[8,1] w",
        "to = Constant <value = int64[3] {0, 4, -1}> ()\n v = Reshape (x, to)\n"
        "i = InstanceNormalization (v, g, b)\n size = Shape (x)\n n = Reshape (i, size)\n"
        "m = Mul (n, u)\n y = Add (m, w)",
        output="float[B,8,S] y",
        reason="are a group's, not a channel's",
    ),
    FusionCase(
        "conv_relu_without_bias",
        "float[B,3,S,T] x, float[6,3,3,3] w",
        "z = Conv <pads = [1,1,1,1], strides = [2,2]> (x, w)\n y = Relu (z)",
        ("ConvRelu",),
        output="float[B,6,P,Q] y",
    ),
    FusionCase(
        "conv_batch_norm_relu",
        "float[B,3,S,T] x, float[6,3,3,3] w, float[6] g, float[6] b",
        "var = Constant <value = float[6] {1.0, 0.5, 2.0, 1.5, 0.7, 3.0}> ()\n"
        "z = Conv <pads = [1,1,1,1]> (x, w)\n n = BatchNormalization (z, g, b, b, var)\n"
        "y = Relu (n)",
        ("ConvRelu",),
        output="float[B,6,P,Q] y",
    ),
    *(
        FusionCase(
            f"product_batch_norm_{name}",
            f"float[B,T,16] x, float[16,6] w, float[6] g, float[6] b{more}",
            "var = Constant <value = float[6] {1.0, 0.5, 2.0, 1.5, 0.7, 3.0}> ()\n"
            f"flat = Constant <value = int64[2] {{-1, 6}}> ()\n m = MatMul (x, w)\n {body}",
            fused,
            output=output,
            gone=gone,
        )
        for name, more, body, fused, output, gone in (
            (
                "through_a_reshape",
                "",
                "r = Reshape (m, flat)\n y = BatchNormalization (r, g, b, b, var)",
                ("Gemm",),
                "float[N,6] y",
                ("BatchNormalization",),
            ),
            (
                "of_a_biased_product",
                ", float[6] c",
                "a = Add (c, m)\n r = Reshape (a, flat)\n y = BatchNormalization (r, g, b, b, var)",
                ("Gemm",),
                "float[N,6] y",
                ("BatchNormalization",),
            ),
            (
                "through_a_transpose",
                "",
                "r = Transpose <perm = [0,2,1]> (m)\n n = BatchNormalization (r, g, b, b, var)\n"
                "y = Relu (n)",
                ("GemmRelu",),
                "float[B,6,T] y",
                ("BatchNormalization",),
            ),
            (
                "read_twice_stays",
                "",
                "r = Reshape (m, flat)\n n = BatchNormalization (r, g, b, b, var)\n y = Add (n, r)",
                (),
                "float[N,6] y",
                (),
            ),
            (
                "of_a_residual_stays",
                "",
                "t = Tanh (m)\n a = Add (m, t)\n r = Reshape (a, flat)\n"
                "y = BatchNormalization (r, g, b, b, var)",
                (),
                "float[N,6] y",
                (),
            ),
        )
    ),
    FusionCase(
        "product_batch_norm_of_other_axis_stays",
        "float[B,6,16] x, float[16,5] w, float[6] g, float[6] b",
        "var = Constant <value = float[6] {1.0, 0.5, 2.0, 1.5, 0.7, 3.0}> ()\n"
        "m = MatMul (x, w)\n y = BatchNormalization (m, g, b, b, var)",
        output="float[B,6,5] y",
    ),
    *(
        FusionCase(
            f"conv_add_{name}",
            "float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, float[6] c",
            "z = Conv <pads = [1,1,1,1]> (x, w, c)\n" + body,
            (f"ConvAdd{fused}",),
            fed=("x", "r"),
            output="float[B,6,S,T] y",
            gone=("Conv", "Add", "Relu"),
        )
        for name, fused, body in (
            ("relu", "Relu", "s = Add (z, r)\n y = Relu (s)"),
            ("silu", "Silu", "s = Add (r, z)\n g = Sigmoid (s)\n y = Mul (g, s)"),
            ("alone", "", "y = Add (r, z)"),
        )
    ),
    FusionCase(
        "conv_add_read_twice",
        "float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w",
        "z = Conv <pads = [1,1,1,1]> (x, w)\n s = Add (z, r)\n a = Relu (s)\n y = Mul (a, s)",
        ("ConvAdd",),
        fed=("x", "r"),
        output="float[B,6,S,T] y",
    ),
    FusionCase(
        "conv_add_of_two_convolutions",  # the larger filter takes the sum
        "float[B,3,S,T] x, float[B,6,S,T] u, float[6,3,1,1] w1, float[6,6,3,3] w, float[6] c",
        "d = Conv (x, w1)\n z = Conv <pads = [1,1,1,1]> (u, w, c)\n s = Add (d, z)\n y = Relu (s)",
        ("ConvAddRelu",),
        fed=("x", "u"),
        output="float[B,6,S,T] y",
        gone=("Add", "Relu"),
    ),
    FusionCase(
        "conv_add_broadcast_stays",
        "float[B,3,S,T] x, float[B,1,S,T] r, float[6,3,3,3] w",
        "z = Conv <pads = [1,1,1,1]> (x, w)\n s = Add (z, r)\n y = Relu (s)",
        fed=("x", "r"),
        output="float[B,6,S,T] y",
        reason="it follows an Add",
    ),
    FusionCase(
        "conv_prelu",
        "float[B,3,S,T] x, float[6,3,3,3] w, float[6] c, float[6,1,1] a",
        "z = Conv <pads = [1,1,1,1]> (x, w, c)\n y = PRelu (z, a)",
        ("ConvPRelu",),
        output="float[B,6,S,T] y",
        gone=("PRelu",),
    ),
    *(
        FusionCase(
            f"conv_as_the_slope_of_{name}_stays",
            "float[6,S,T] x, float[1,3,S,T] u, float[6,3,3,3] w",
            f"z = Conv <pads = [1,1,1,1]> (u, w)\n{body}",
            fed=("x", "u"),
            output="float[1,6,S,T] y",
        )
        for name, body in (
            (
                "another",
                "at = Constant <value = int64[1] {0}> ()\n v = Unsqueeze (x, at)\ny = PRelu (v, z)",
            ),
            ("itself", "y = PRelu (z, z)"),
        )
    ),
    FusionCase(
        "prelu_of_one_slope",
        f"{_X}, {_LIN}",
        _scalar("a", 0.25) + _PLAIN + "y = PRelu (z, a)",
        ("GemmLeakyRelu",),
    ),
    FusionCase(
        "prelu_of_a_slope_that_adds_an_axis_stays",
        f"{_X}, {_LIN}",
        "a = Constant <value = float[1,1,1,1] {0.25}> ()\n" + _PLAIN + "y = PRelu (z, a)",
        ("Gemm",),
        output="float[1,B,T,24] y",
    ),
    FusionCase(
        "prelu_of_a_negative_slope_stays",  # the sign of a zero
        f"{_X}, {_LIN}",
        _scalar("a", -0.25) + _PLAIN + "y = PRelu (z, a)",
        ("Gemm",),
        reason="PRelu is none of the fused activations",
    ),
    FusionCase(
        "conv_activation_behind_views",
        "float[B,3,S,T] x, float[6,3,3,3] w",
        "to = Constant <value = int64[3] {0, 6, -1}> ()\n"
        "z = Conv <pads = [1,1,1,1]> (x, w)\n f = Reshape (z, to)\n"
        "t = Transpose <perm = [0,2,1]> (f)\n y = Gelu (t)",
        ("ConvGelu",),
        output="float[B,N,6] y",
    ),
    FusionCase(
        "cross_entropy_written_out",
        "float[B,24] x, int64[B] labels",
        "l = LogSoftmax <axis = 1> (x)\n"
        "y = NegativeLogLikelihoodLoss <ignore_index = 5> (l, labels)",
        fed=("x", "labels"),
        output="float y",
        gone=("LogSoftmax", "NegativeLogLikelihoodLoss"),
        spares=(("empty", "onnxruntime's SoftmaxCrossEntropyLoss takes no batch of none (1.32)"),),
    ),
)
