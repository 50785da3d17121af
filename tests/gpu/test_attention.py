"""Attention's kernels on hostile values: NaN, infinities and rows masked whole."""

import warnings

import numpy as np
import pytest
from lowering import program_of
from math_cases import only
from test_attention import CASES, GRAPHS, GUARD, REST, feeds_of, model_of, session
from test_fp16_range import GRAPHS as BEYOND
from test_fp16_range import feeds_of as beyond_feeds
from test_fp16_range import model_of as beyond_model

from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.kernels import Selection, candidates
from onnx_fuse.program.contractions import Attention
from onnx_fuse.program.problem import Hardware
from onnx_fuse.rewrite.precision import in_precision
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.validation.compare import COMPUTED

# float16: the graph rounds scores and weights, which kernels keep in float32
TOLERANCE = {"float": 1e-5, "float16": 6e-3}
HOSTILE = {"float": CASES, "float16": ("", "large", "mask -inf", *CASES[6:])}
FILL = {"float": -1e9, "float16": -65504.0}
ONE_QUERY = pytest.mark.launches("sdpa/one_query.cu", "sdpa_one_query")


@pytest.mark.parametrize(
    ("kind", "queries", "keys"),
    [("float", 5, 24), ("float16", 5, 24), pytest.param("float16", 1, 300, marks=ONE_QUERY)],
)
@pytest.mark.parametrize("guarded", [False, True], ids=["", "guarded"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_hostile_values(graph: str, guarded: bool, kind: str, queries: int, keys: int) -> None:
    between, inputs, _ = GRAPHS[graph]
    sizes = {"B": 2, "H": 3, "S": queries, "K": keys}
    original = model_of(between, inputs, kind, GUARD if guarded else REST, FILL[kind])
    model = load(original)
    rewrite.optimize(model, own_kernels=True)  # which takes names of sizes for sizes
    plain = session(original)
    feeds = feeds_of(original, "", sizes)
    hw = Hardware.detect()
    program = program_of(model, feeds, hw)
    (problem,) = [call.problem for call in program.calls if isinstance(call.problem, Attention)]
    tried = [
        (kernel, how)
        for kernel in candidates("Sdpa")
        if kernel.supports(problem, hw) is None
        for how in kernel.configs(problem, hw)[: None if kernel.name == "one_query" else 1 : 2]
    ]
    assert (queries == 1) == any(kernel.name == "one_query" for kernel, _ in tried)
    for kernel, how in tried:
        with only(Selection(kernel, how, 0.0, "each")):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                runner = Executable(model)
            for case in HOSTILE[kind]:
                if case.endswith("mask") and "mask" not in inputs:
                    continue
                feeds = feeds_of(original, case, sizes)
                expected = plain(feeds).astype(np.float64)
                got = runner.run(None, feeds)[0].astype(np.float64)
                note = f"{kernel.name} {how}: {case}"
                np.testing.assert_array_equal(np.isnan(got), np.isnan(expected), err_msg=note)
                finite = np.isfinite(expected)
                bound = TOLERANCE[kind] * max(1.0, np.abs(expected[finite]).max(initial=0))
                np.testing.assert_allclose(got[finite], expected[finite], atol=bound, err_msg=note)


@pytest.mark.parametrize("graph", [g for g, (_, _, floor) in BEYOND.items() if floor is not None])
def test_float32_masks_in_float16(graph: str) -> None:
    """A graph of float32 computed in float16, by each kernel: rows masked whole attend as there."""
    model = beyond_model(graph)
    feeds = beyond_feeds(model)
    expected = session(model)(feeds)
    rewrite.optimize(model)
    model, _ = in_precision(model, "fp16")
    hw = Hardware.detect()
    program = program_of(model, feeds, hw)
    (problem,) = [call.problem for call in program.calls if isinstance(call.problem, Attention)]
    limit = COMPUTED["fp16"]
    for kernel in [k for k in candidates("Sdpa") if k.supports(problem, hw) is None]:
        for config in kernel.configs(problem, hw):
            with only(Selection(kernel, config, 0.0, "each")):
                got = Executable(model).run(None, feeds)[0]
            atol = limit.atol + limit.rtol * np.abs(expected).max()
            np.testing.assert_allclose(got, expected, atol=atol, err_msg=f"{kernel.name} {config}")
