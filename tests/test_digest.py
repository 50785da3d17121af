"""The digest of a kernel's code: what changes it, and that what it covers is all that compiles."""

from __future__ import annotations

import struct
from math import inf

import pytest

from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.constants import evaluate
from onnx_fuse.cuda.digest import reachable
from onnx_fuse.cuda.macros import as_defines
from onnx_fuse.cuda.source import Defines, source_text
from onnx_fuse.kernels import candidates, tuning
from onnx_fuse.ops.activations import activation_macros
from onnx_fuse.program.contractions import Attention, AttentionGrad, IntegerProduct, PackedProduct
from onnx_fuse.program.data_movement import BatchedCalls
from onnx_fuse.program.epilogue import Epilogue
from onnx_fuse.program.expression import Expression, Operation, Tail
from onnx_fuse.program.problem import CHIPS, GemmProblem, KernelConfig
from onnx_fuse.program.problems import Norm, NormGrad, NormGradSums, Pool, Softmax, Window

H200 = CHIPS["H200"]
SOURCE = """
#ifndef MORE
#define MORE 0
#endif
typedef unsigned int u32;
constexpr int STEP = MORE ? 8 : 4, WIDE = STEP * 2;  // both numbers
template <class E> struct Pair { E a, b; };
template <> struct Pair<double> { double a; };
__device__ float unused(float x) { return x * 3; }
__device__ float more(float x) { return x * 5; }
__device__ float used(float x) {
    if (MORE) return more(x);
    else if (WIDE == 8 && x > 0) x += 1;
    return x;
}
extern "C" __global__ void other(float* y) { y[0] = unused(y[1]); }
extern "C" __global__ void k(float* y) {
    Pair<float> p = {y[0], y[1]};
    for (int i = 0; i < STEP; i++) y[i] = used(p.a);
}
"""
# a change of SOURCE -> whether kernel `k` compiles to other code
CHANGES = {
    "a comment": ("// both numbers", "/* two of them */", False),
    "white space": ("    Pair<float> p", "\n  Pair< float >  p", False),
    "a function that nothing calls": ("x * 3", "x * 4", False),
    "a function that a branch not taken calls": ("x * 5", "x * 7", False),
    "another kernel": ("y[1]);", "y[2]);", False),
    "a macro nobody asks for": ("#ifndef MORE", "#define FEW 3\n#ifndef MORE", False),
    "a branch that is new and off": ("return x;", "if (MORE && x < 0) x = 0; return x;", False),
    "a constant under another name": ("WIDE", "BROAD", False),
    "a function that it calls": ("x += 1", "x += 2", True),
    "a type that it has": ("E a, b", "E b, a", True),
    "a constant": ("? 8 : 4", "? 8 : 2", True),
    "the default of a macro": ("#define MORE 0", "#define MORE 1", True),
    "itself": ("i < STEP", "i <= STEP", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_code_changes_what_is_reached(change: str) -> None:
    old, new, differs = CHANGES[change]
    assert old in SOURCE
    before, after = (reachable(text, "k", ()) for text in (SOURCE, SOURCE.replace(old, new)))
    assert (before != after) == differs


def test_a_macro_given_is_in_its_place() -> None:
    def reached(*defines: tuple[str, str]) -> list[list[str]]:
        return reachable(SOURCE, "k", defines)

    assert reached(("MORE", "0")) == reached(("OTHER", "9")) == reached()
    assert reached(("MORE", "1")) != reached()


def _code(cubin: bytes, entry: str) -> bytes:
    """The section .text.<entry> of an ELF file."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    for name, _, _, _, offset, length in sections:
        at = sections[names][4] + name
        if cubin[at : cubin.index(b"\0", at)] == f".text.{entry}".encode():
            return cubin[offset : offset + length]
    raise AssertionError(entry)


def _text(items: list[list[str]]) -> str:
    """Declarations as source again: macros first, directives on lines of their own."""
    lines = []
    for item in sorted(items, key=lambda item: item[:2] != ["#", "define"]):
        if item[:2] == ["#", "define"]:
            end = item.index(")") + 1
            lines.append(f"#define {''.join(item[2:end])} {' '.join(item[end:])}")
            continue
        lines.append(" ".join(f"\n{t}\n" if t.startswith("#") else t for t in item))
    return "\n".join(lines) + "\n"


GELU = activation_macros("gelu")


@pytest.mark.parametrize(
    ("source", "entry", "defines"),
    [
        ("pointwise/act_grad.cu", "act_grad_rows", as_defines({"T": "f16"}, GELU)),
        ("norm/row_stats.cu", "row_stats", ()),
        ("layernorm_gemm/skinny.cu", "gemm_skinny", ()),
        ("gemm/wgmma_sm90.cu", "gemm_wgmma", ()),
    ],
    ids=["act_grad", "row_stats", "skinny", "wgmma"],
)
def test_what_is_reached_compiles_to_the_same_code(
    source: str, entry: str, defines: Defines
) -> None:
    if not defines:  # those of a problem that has the kernel
        problem = GemmProblem.of("LayerNormGemm", m=128, n=768, k=768, dtype="bfloat16", bias=True)
        defines = next(
            call.defines
            for kernel in candidates("LayerNormGemm")
            if kernel.supports(problem, H200) is None
            for call in kernel.launch(problem, kernel.configs(problem, H200)[0], H200)
            if call.entry == entry
        )
    text = _text(reachable(source_text(source), entry, defines))
    whole, part = (
        nvrtc.compile(each, macros, H200.arch) for each, macros in ((source, defines), (text, ()))
    )
    assert _code(whole, entry) == _code(part, entry)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 + 4 * 2", 11),
        ("( 3 + 4 ) * 2 == 14", 1),
        ("0 && x", 0),
        ("x . y && 0", 0),
        ("f ( x ) && 0", None),
        ("x || 1", 1),
        ("x > 2", None),
        ("1 ? 0x10 : x", 16),
        ("x ? 2 : 2", 2),
        ("! 0 && - 1 < 0u", 1),
        ("- 7 / 2", -3),
        ("- 7 % 2", -1),
        ("sizeof ( f16 ) == 2", 1),
        ("sizeof ( E ) == 2", None),
        ("IS < f16 > && 0", 0),
        ("1.5f > 1", None),
        ("( int ) 3", None),
        ("1 +", None),
    ],
)
def test_the_value_of_an_expression(text: str, value: int | None) -> None:
    assert evaluate(text.split(" ")) == value


WINDOW = Window((1, 3, 3), (1, 2, 2), (1, 1, 1), (0, 1, 1), (0, 1, 1))
ADDED = Operation("Add", "float32", (0, 2))
TAIL = Tail(Expression(2, (("float", -inf),), (ADDED,), (3,)), 1, "float16")


def test_a_records_key_is_read_as_it_was_made() -> None:
    for problem in (
        GemmProblem.of(
            "Gemm", m=3, n=5, k=7, batch=(2, 3), math="tf32", a_strides=(0, 1), act="gelu"
        ),
        GemmProblem.of("Gemm", m=3, n=5, k=7, dtype="float16", out_dtype="float32", trans_b=True),
        GemmProblem.of(
            "LayerNormGemm", m=1, n=8, k=8, rms=True, bias=True, residual="norm", align=2
        ),
    ):
        name = tuning.key(problem.op, problem)
        found = tuning.read(name)
        assert isinstance(found, GemmProblem)
        assert tuning.key(problem.op, found) == name
        assert (found.m, found.batch, found.out, found.trans_b, found.epilogue.act) == (
            problem.m, problem.batch, problem.out, problem.trans_b, problem.epilogue.act
        )  # fmt: skip
    sizes = {"m": 9, "n": 8, "k": 16}
    for whole in (
        Softmax(outer=2, length=77, inner=1, dtype="float16"),
        Attention(**sizes, batch=(1, 2), dtype="float16", dv=16, causal=True, mask=(0, 0, 8, 1)),
        AttentionGrad(**sizes, batch=(1, 2), dtype="float32", dv=16, dq_strides=(96, 16, 32)),
        PackedProduct(**sizes, dtype="float16", zero="packed", epilogue=Epilogue(bias=True)),
        IntegerProduct(**sizes, dtype="uint8", za="each", lda=16, ldb=16),
        Norm(8, 64, "float16", "float16", epsilon=0.0, rms=True, tail=TAIL),
        NormGradSums(NormGrad(8, 64, "float16", "float16", "float32", 4, tail=TAIL), 2),
        Pool("max", 4, (1, 8, 8), (1, 4, 4), WINDOW, "float16", channels=4),
        BatchedCalls(
            Softmax(2, 77, 1, "float16"), 3, ("x", "y"), "plain", KernelConfig.of(team=32)
        ),
    ):
        assert tuning.read(tuning.key(whole.op, whole)) == whole
    assert "lda" not in tuning.key("Gemm", GemmProblem.of("Gemm", m=4, n=4, k=4, lda=4, align=8))
    with pytest.raises(TypeError, match="unexpected keyword argument 'folds'"):
        GemmProblem.of("LayerNormGemm", m=4, n=4, k=4, folds=True)
    for name in (
        "Gemm | of another version",
        "Sdpa | Sdpa m=1 float16 NN dv=8",
        "Pool | Pool window=Window(kernel=(1, 3, 3))",
        "Norm | Norm rows=8 length=64 dtype=float16 param=float16 tail=Add+Relu",
        "Norm | Norm rows=8 length=64 dtype=float16 param=float16 tail=Tail(own=print(1))",
    ):
        with pytest.raises(ValueError, match="is no problem of numbers and names"):
            tuning.read(name)
