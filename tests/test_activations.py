"""The table of activations: derivatives, CUDA text, and one call for each fused operator."""

import ctypes
import math

import cuda_on_host
import numpy as np
import onnx
import onnx.inliner
import pytest
from compiled import unclean
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from support import with_weights

from onnx_fuse.cuda.macros import defines
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.walk import lower
from onnx_fuse.ops import OPS
from onnx_fuse.ops.activations import ACTIVATIONS, activation_macros
from onnx_fuse.ops.formula import written_out
from onnx_fuse.ops.fused.gated import OPS as GATED
from onnx_fuse.program.problem import CHIPS

KINDS = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}
FAMILIES = ("Gemm", "LayerNormGemm", "RMSNormGemm", "Conv", "ConvAdd", "GroupNorm")
ALPHA = {"ClippedRelu": 6.0, "LeakyRelu": 0.3, "Elu": 0.7, "QuickGelu": 1.702, "HardSigmoid": 1 / 6}
"""What an activation with an attribute is tried with."""


def _call(name: str, act: str, how: str = "") -> str:
    given = ", ".join(filter(None, [how, f"alpha = {ALPHA[act]}" if act in ALPHA else ""]))
    return f"onnx_fuse.{name}" + (f"<{given}>" if given else "")


class Erf(OpRun):
    """In float64: that of the reference rounds to float32."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf)(x),)


# ---- in float64 ---------------------------------------------------------------------------------


def _run(act: str, text: str, result: str, feed: np.ndarray) -> np.ndarray:
    """What an ONNX text of an activation makes of z, in float64."""
    one = "dy = CastLike (Constant <value_float: float = 1.0> (), z)"
    body = written_out(f"{one}\n{text.replace('@alpha', str(ALPHA.get(act)))}")
    model = text_model(f"agraph (double[N] z) => (double[N] {result}) {{\n{body}\n}}")
    proto = onnx.shape_inference.infer_shapes(to_proto(model))
    proto = onnx.inliner.inline_selected_functions(
        proto, [("", "Gelu")], exclude=False, inline_schema_functions=True
    )
    (found,) = ReferenceEvaluator(proto, new_ops=[Erf]).run(None, {"z": feed})
    return np.asarray(found)


def _difference(act: str, z: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The slope at z by the central difference of the forward text."""
    above, below = (_run(act, f"y = {ACTIVATIONS[act].forward}", "y", z + d) for d in (step, -step))
    return (above - below) / (2 * step)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_derivative_is_that_of_the_value(act: str) -> None:
    """By central differences of the forward text in float64, away from where there is a corner."""
    z = np.linspace(-6.03, 6.07, 203)
    # the quotient is off by step² of the third derivative and by 1e-16 / step; the constants of the
    # text are float32's, off by 3e-8, some of them times 36
    derivative = _run(act, ACTIVATIONS[act].gradient_text(), "dz", z)
    np.testing.assert_allclose(derivative, _difference(act, z), atol=1e-6)


# ---- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [d.name for d in OPS.values() if d.body])
def test_each_operators_body_is_a_function(name: str) -> None:
    """Of values that are each made once, whatever the activation's text calls its own."""
    definition = OPS[FUSE, name]
    for exposed, overload in ((), ""), (definition.saves, ""), ((), "newer"):
        function = definition.function(exposed, overload=overload)
        assert all(value.producer() for value in function.outputs)


# ---- one call -----------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["", *ACTIVATIONS])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_operator_of_the_families_is_one_call(family: str, act: str, dtype: str) -> None:
    """With every activation of the table, on every architecture."""
    if family + act == "Conv":
        return  # ai.onnx's own
    conv = family.startswith("Conv")
    shapes = {"x": (2, 16, 9, 8), "w": (24, 16, 3, 3)} if conv else {"x": (32, 64), "w": (64, 48)}
    shapes["c"] = (shapes["w"][0 if conv else 1],)
    names = ["x", "w", "c"]
    if family == "ConvAdd":
        names, shapes["r"] = [*names, "r"], (2, 24, 9, 8)
    if "Norm" in family:
        affine = ["g", "b"] if family.startswith("Layer") else ["g"]
        names, shapes = ["x", *affine, "w", "c"], shapes | dict.fromkeys(affine, (64,))
    out = [2, 24, 9, 8] if conv else [32, 48]
    how = "kernel_shape=[3,3], strides=[1,1], pads=[1,1,1,1], dilations=[1,1], group=1" * conv
    if family == "GroupNorm":
        names, shapes = ["x", "g", "b"], {"x": (2, 16, 9, 8), "g": (16, 1, 1), "b": (16, 1, 1)}
        out, how = [2, 16, 9, 8], "num_groups=4"
    kind = KINDS[dtype]
    ends = ", ".join(f"{kind}{list(shapes[n])} {n}" for n in names)
    call = _call(family + act, act, how)
    model = text_model(f"agraph ({ends}) => ({kind}{out} y) {{ y = {call}({', '.join(names)}) }}")
    feeds = {n: (shapes[n], dtype) for n in names}
    for arch, hw in {hw.arch: hw for hw in CHIPS.values()}.items():
        calls = lower(model, feeds, hw).calls
        if conv and dtype != "float32":
            # images are copied to channels last, and back; a residual that lies otherwise is added
            # on the way back (in a stretch of convolutions: in the epilogue, test_channels_last)
            calls = [call for call in calls if call.kernel != "Copy"]
            assert len(calls) == 1 + (family == "ConvAdd"), (arch, [c.kernel for c in calls])
            continue
        assert len(calls) == 1, (arch, [c.kernel for c in calls])
        assert dict(calls[0].writes)["y"].shape == tuple(out)


@pytest.mark.parametrize("name", GATED)
def test_each_gated_product_is_one_call(name: str) -> None:
    """Of constant weights, for which alone their columns can be put side by side."""
    prefix, act = GATED[name].norm, GATED[name].activation
    affine = {"": "", "LayerNorm": "g, b, ", "RMSNorm": "g, "}[prefix]
    k, n = 64, 96
    held = {"g": (k,), "b": (k,), "w": (k, n), "c": (n,)}
    names = {name: held[name] for name in [*affine.replace(",", "").split(), "w", "c"]}
    ends = ", ".join(f"float16{list(shape)} {name}" for name, shape in names.items())
    model = text_model(
        f"agraph (float16[256,{k}] x, {ends}) => (float16[256,{n // 2}] y) "
        f"{{ y = {_call(name, act)}(x, {affine}w, c) }}"
    )
    with_weights(model, lambda value: np.full(names[value.name or ""], 0.5, np.float16))
    for arch, hw in {hw.arch: hw for hw in CHIPS.values()}.items():
        calls = lower(model, {"x": ((256, k), "float16")}, hw).calls
        assert len(calls) == 1, (arch, [c.kernel for c in calls])


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_an_activation_behind_a_product_that_no_rule_fused_is_in_its_epilogue(act: str) -> None:
    row = ACTIVATIONS[act]
    alpha = [f"alpha = {ALPHA[act]}"] if act in ALPHA else []
    given = ", ".join([*alpha, *(f'{k} = "{v}"' for k, v in row.fixed if isinstance(v, str))])
    domain = f"{row.domain}." if row.domain else ""
    text = (
        "agraph (float16[32,64] x, float16[64,48] w) => (float16[32,48] y) "
        f"{{ z = MatMul(x, w) y = {domain}{row.op_type} <{given}> (z) }}"
    ).replace("<>", "")
    shapes = {"x": ((32, 64), "float16"), "w": ((64, 48), "float16")}
    (call,) = lower(text_model(text), shapes, CHIPS["H200"]).calls
    assert call.problem.epilogue.act == row.key
    wanted = np.float32(ALPHA.get(act, 1))
    assert np.float32(call.problem.epilogue.act_alpha) == wanted


# ---- CUDA ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_cuda_text_compiles_to_registers_alone(act: str) -> None:
    """Its slope over rows of bfloat16, its value behind a convolution's sums in float32."""
    key = ACTIVATIONS[act].key
    slope = defines(T="bf16", **activation_macros(key))
    value = defines(T="float", ACC="float", **activation_macros(key))
    assert unclean([("pointwise/act_grad.cu", slope), ("conv/finish.cu", value)], "sm_80") == []


FUNCTIONS = """
extern "C" void value_{0}_{1}(long n, const float* x, float* y) {{
    for (long i = 0; i < n; i++) y[i] = act<{1}>(x[i], {2});
}}
extern "C" void slope_{0}_{1}(long n, const float* z, const float* dy, float* y) {{
    for (long i = 0; i < n; i++) y[i] = times_slope<{1}>(dy[i], z[i], {2});
}}
"""
POINTWISE = """
extern "C" void pointwise_{0}_{1}(long n, const {1}* x, {1}* y) {{
    for (long i = 0; i < n; i++) y[i] = {2};
}}
"""
ROUNDED = {"float": 2e-6, "f16": 1e-4, "bf16": 8e-4}
"""The type that a result is rounded to -> the largest error of GELU, as common.cuh states it, and
of a slope times a dy up to 2; others are as of float."""


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The CUDA texts of all activations, each in a namespace, as a library of this machine."""
    text = cuda_on_host.text_of("pointwise/math.cuh")
    parts = []
    for act, row in ACTIVATIONS.items():
        alpha = ALPHA.get(act, 1.0)
        macros = "".join(f"#define {name} {value}\n" for name, value in row.macros.items())
        own = "".join(FUNCTIONS.format(row.key, out, f"{alpha}f") for out in ROUNDED)
        numbers = [alpha if name in row.attributes else value for name, value in row.numbers]
        for kind in ("float", "double"):
            shown = row.pointwise.format("x[i]", *(f"({kind}){n!r}" for n in numbers), t=kind)
            own += POINTWISE.format(row.key, kind, shown)
        if row.normal:  # what is made of it is rounded to 16 bits or 8
            own += POINTWISE.format(f"short_{row.key}", "float", "short_gelu(x[i])")
        names = "".join(f"#undef {name}\n" for name in (*row.macros, "ACT_NORMAL", "DEVICE"))
        parts.append(f"{macros}namespace {row.key}_ {{ {text}\n{own} }}\n{names}")
    return cuda_on_host.library("\n".join(parts), tmp_path_factory.mktemp("activations"))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_cuda_text_computes_the_value_and_its_slope(act: str, on_host: ctypes.CDLL) -> None:
    """Run on this machine, against the ONNX text and its differences in float64."""
    row = ACTIVATIONS[act]
    z = np.linspace(-6.03, 6.07, 203).astype(np.float32)
    wide = z.astype(np.float64)
    y, slope = _run(act, f"y = {row.forward}", "y", wide), _difference(act, wide)
    dy = np.random.default_rng(0).uniform(-2, 2, z.size).astype(np.float32)
    for out in ROUNDED:
        error = ROUNDED[out if row.normal else "float"]
        for name, wanted, given in (("value", y, (z,)), ("slope", dy * slope, (z, dy))):
            found = cuda_on_host.over(getattr(on_host, f"{name}_{row.key}_{out}"), *given)
            np.testing.assert_allclose(found, wanted, rtol=error, atol=error, err_msg=name + out)
    if row.normal:
        ends = np.append(z, np.float32([-np.inf, np.inf, np.nan]))  # of which -inf gives NaN
        found = cuda_on_host.over(getattr(on_host, f"pointwise_short_{row.key}_float"), ends)
        np.testing.assert_allclose(found, [*y, np.nan, np.inf, np.nan], rtol=2e-7, atol=2e-7)
    for kind, error in (("float", 2e-6), ("double", 2e-7)):  # the text has float32's constants
        run = getattr(on_host, f"pointwise_{row.key}_{kind}")
        np.testing.assert_allclose(
            cuda_on_host.over(run, z if kind == "float" else wide), y, rtol=error, atol=error
        )
