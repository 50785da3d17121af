"""Tuning records: their keys, and the versions of kernels that they are of."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import kernel_versions
import pytest

from onnx_fuse.kernels import tuning
from onnx_fuse.program import hardware
from onnx_fuse.program.contractions import Attention, AttentionGrad, IntegerProduct, PackedProduct
from onnx_fuse.program.data_movement import BatchedCalls
from onnx_fuse.program.epilogue import Epilogue
from onnx_fuse.program.expression import Expression, Operation, Tail
from onnx_fuse.program.hardware import CHIPS
from onnx_fuse.program.problem import GemmProblem, KernelConfig
from onnx_fuse.program.problems import Norm, NormGrad, NormGradSums, Pool, Softmax, Window


def test_the_sources_of_kernels_are_those_that_versions_were_stored_for() -> None:
    stored = json.loads(kernel_versions.STORED.read_text())
    ask = "python tools/kernel_versions.py says which versions to raise, and stores them"
    assert kernel_versions.digests() == stored["sources"], ask
    assert kernel_versions.versions() == stored["versions"], ask


def test_a_digest_leaves_out_comments_and_spaces_alone() -> None:
    text = 'float x = 1;  // one\nasm("// no comment");'
    assert kernel_versions._digest(text) == kernel_versions._digest(
        'float /* a */ x = 1;\n\n  asm("// no comment");'
    )
    for other in (text.replace("1;", "2;"), text.replace("no comment", "another")):
        assert kernel_versions._digest(text) != kernel_versions._digest(other)


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


def test_a_cost_has_few_numbers_and_is_a_kernels() -> None:
    package = Path(hardware.__file__).parents[1]
    texts = "".join(path.read_text() for path in (package / "kernels").glob("*.py"))
    costs = json.loads((hardware.FOLDER / "H200.json").read_text())["costs"]
    for kernel, numbers in costs.items():
        assert f'"{kernel}"' in texts, kernel
        assert 1 <= len(numbers) <= 6, kernel
        assert all(0 < number < inf for number in numbers.values()), kernel
        assert replace(CHIPS["A100"], name="another").costs(kernel) == numbers
