"""A row's bits whatever else is in its batch: choices of kernels, refusals, and the check."""

import re
from pathlib import Path
from typing import Any

import encoder
import gpt
import numpy as np
import pytest
from support import Cli

from onnx_fuse import InferenceSession, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.rewrite.precision import in_precision
from onnx_fuse.runtime.invariance import check, note
from onnx_fuse.runtime.specialize import Specializer
from onnx_fuse.validation.invariant import check_batch

NORM = text_model("""norm (float[batch, T, 768] x, float[768] s, float[768] b)
    => (float[batch, T, 768] y) { y = LayerNormalization (x, s, b) }""")
SUMS = text_model("""sums (float[batch, 1000000] x) => (float[batch, 1] y)
    <int64[1] last = {1}> { y = ReduceSum <keepdims = 1> (x, last) }""")
SOFTMAX = text_model("""rows (float[batch, 4000000] x) => (float[batch, 4000000] y)
    { y = Softmax (x) }""")
ENCODER = encoder.build(encoder.Config(1, 12, 768, 300, 512))
MODELS: dict[str, tuple[Any, str]] = {
    "encoder": (ENCODER, "fp16"),
    "gpt": (gpt.build(gpt.Config()), "bf16"),
    "norm": (NORM, "fp32"),
    "sums": (SUMS, "fp32"),
    "softmax": (SOFTMAX, "fp32"),
}
SUMMING = re.compile("Gemm|MatMul|Norm|Sdpa|Reduce|Softmax")
NOT_OF_SUMS = {"NEXT_ALONE", "ROWS"}
"""Macros of when the next launch begins, and of the rows of a tile."""


def choices(model: Any, batch: int, tokens: int, limit: Any) -> list[Any]:
    """The kernel, configuration and macros of each call that adds something up."""
    graph = load(model)
    rewrite.optimize(graph, level=2, own_kernels=True)
    graph, math = in_precision(graph, MODELS_PRECISION[id(model)])
    note(graph, limit)
    sizes = {"batch": batch, "sequence": tokens, "T": tokens}
    shapes = {
        str(v.name): (
            tuple(d if isinstance(d, int) else sizes[str(d.value)] for d in v.shape or ()),
            v.dtype.numpy().name if v.dtype else "",
        )
        for v in graph.graph.inputs
    }
    program = Specializer(graph, CHIPS["H200"], math=math).of(shapes).program
    found = []
    for call in program.calls:
        if SUMMING.search(call.kernel):
            macros = [
                {k: v for k, v in launch.defines if k not in NOT_OF_SUMS}
                for launch in call.launches
            ]
            parts: Any = getattr(call.problem, "chunk", None)  # a number of the launch, no macro
            if call.kernel == "Softmax":
                parts = [launch.grid[0] // batch for launch in call.launches]
            found.append((call.kernel, call.why.partition(":")[0], macros, parts))
    return found


MODELS_PRECISION = {id(model): precision for model, precision in MODELS.values()}


@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_those_of_the_largest_batch(name: str) -> None:
    model, _ = MODELS[name]
    batches = (1, 2, 7, 32)
    first, *others = (choices(model, batch, 40, True) for batch in batches)
    assert first
    for batch, other in zip(batches[1:], others, strict=True):
        assert other == first, f"{batch} rows"
    usual = [choices(model, batch, 40, False) for batch in (2, 32)]
    assert usual[0] != usual[1], "and otherwise they are not"


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no name": ("?", True, "the first dimension of 'x' has none"),
    "another name": ("batch", {"rows": 4}, "no input has a dynamic dimension 'rows'"),
    "no dimension": ("batch", {}, "batch_invariant names no dimension"),
    "no size": ("batch", {"batch": 0}, "batch_invariant is 0 for 'batch': give the largest"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_dimension_that_cannot_be_is_refused(case: str) -> None:
    size, wanted, words = REFUSED[case]
    model = text_model(f"g (float[{size}, 3] x) => (float[{size}, 3] y) {{ y = Relu (x) }}")
    with pytest.raises(UsageError, match=words):
        note(model, wanted)


def test_a_batch_beyond_the_limit_is_refused() -> None:
    model = text_model("g (float[batch, 3] x) => (float[batch, 3] y) { y = Relu (x) }")
    note(model, 4)
    check(model, {"x": np.ones((4, 3))})
    with pytest.raises(UsageError, match="holds for 'batch' up to 4, and 'x' has 5"):
        check(model, {"x": np.ones((5, 3))})
    with pytest.raises(UsageError, match="batch_invariant needs device 'cuda'"):
        InferenceSession(model, batch_invariant=True)
    fixed = text_model("g (float[2, 3] x) => (float[2, 3] y) { y = Relu (x) }")
    note(fixed, True)
    assert not fixed.metadata_props


def test_shapes_that_depend_on_values_are_refused() -> None:
    model = load(text_model("g (float[batch, 3] x) => (int64[2, n] y) { y = NonZero (x) }"))
    note(model, True)
    with pytest.raises(UsageError, match="batch_invariant cannot be kept"):
        Specializer(model, CHIPS["H200"]).of({"x": ((2, 3), "float32")})


def test_the_check_finds_rows_that_depend_on_others(cli: Cli, tmp_path: Path) -> None:
    """A mean over the batch, and what each element is by itself."""
    for body, ok in (("m = ReduceMean (x, axes) y = Sub (x, m)", False), ("y = Exp (x)", True)):
        model = text_model(f"""g (float[batch, 6] x) => (float[batch, 6] y)
            <int64[1] axes = {{0}}> {{ {body} }}""")
        save(model, tmp_path / "model.onnx")
        found = check_batch(model)
        assert found.ok == ok
        assert (found.batch, found.outputs) == (8, ["y"])
        args = ["validate", str(tmp_path / "model.onnx"), "--batch-invariant"]
        assert cli.report(*args, code=0 if ok else 3)["batch_invariant"]["ok"] == ok
        said = "each row has the same bits" if ok else "'y' of row 0 alone has other bits in 6 of 6"
        assert said in cli.last.out
    args += ["--adapters", "a.safetensors"]
    assert "a.safetensors: No such file or directory" in cli.fails(1, *args)
    args.remove("--batch-invariant")
    assert "--adapters is for --batch-invariant" in cli.fails(2, *args)
