"""Whole programs, as they are lowered for an H200, by NumPy: every problem, against onnxruntime."""

import importlib
import pkgutil
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from every_size import Subject, differ, sample
from every_size_models import GRAPHS, subjects
from lowering import arrays, interpreted, lowered, with_values
from math_cases import TOLERANCE, Case, cases, widen
from special_values import ROWS, assert_same, special_row
from support import drawn

from onnx_fuse import program, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.cuda import pointwise
from onnx_fuse.guard import Crash
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.interpret.memory import HostMemory
from onnx_fuse.program.interpret.recurrences import philox
from onnx_fuse.program.interpret.run import ANSWERS, by_onnxruntime
from onnx_fuse.program.interpret.steps import STEPS
from onnx_fuse.program.problem import AnyProblem, Collective, Contraction
from onnx_fuse.program.problems import Registered
from onnx_fuse.runtime import ort

ELSEWHERE = {Collective, Registered}
"""Answered by what ranks exchange, and by a body that a user wrote."""


def kinds(base: type[AnyProblem] = AnyProblem) -> Iterator[type[AnyProblem]]:
    """Every class of problems of the package."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith(f"{program.__name__}."):
            yield kind
        yield from kinds(kind)


def test_every_kind_of_problem_has_an_answer() -> None:
    for module in pkgutil.iter_modules(program.__path__, f"{program.__name__}."):
        importlib.import_module(module.name)
    shared = {Contraction, *(kind for kind in kinds() if kind.__name__.startswith("_"))}
    assert set(kinds()) - shared - ELSEWHERE == set(ANSWERS)


def test_every_step_of_an_expression_has_an_answer() -> None:
    assert set(pointwise.TABLE) - {"Iota"} <= set(STEPS)


MODELS = dict(subjects())
LARGE = [name for name in MODELS if not name.startswith(("fusion", "gradient", "contrib"))]
LARGE = [name for name in LARGE if name not in GRAPHS and "b16" not in name]
"""onnxruntime has no bfloat16 on a CPU."""
SOME = [name for name in MODELS if name.startswith(("fusion", "gradient"))][5::6]


@pytest.mark.parametrize("name", LARGE + SOME)
def test_a_whole_model_gives_onnxruntimes_results(name: str) -> None:
    """What is lowered is the graph that onnxruntime runs, by the bodies of its operators."""
    subject = Subject(name, *MODELS[name]())
    for seed, sizes in zip(range(20), sample(subject.symbols, 0), strict=False):
        fitted = subject.fitted({symbol: min(size, 7) for symbol, size in sizes.items()})
        feed = subject.feed(fitted, np.random.default_rng(seed))
        want = None if feed is None else subject.lowered_results(feed)
        if feed is not None and want is not None:
            break
    else:
        pytest.fail("onnxruntime refuses all sizes")
    assert not differ(interpreted(subject.graph, feed), want)


@pytest.mark.parametrize("indices", [False, True])
@pytest.mark.parametrize("dtype", ["float", "double", "float16"])
def test_a_max_pool_of_nan_and_infinities(dtype: str, indices: bool) -> None:
    """What differs without indices stands beside the tolerances of hostile.py."""
    outputs = "y, i" if indices else "y"
    model = text_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g ({dtype}[9,1,4] x) => ({dtype}[9,1,1] y{", int64[9,1,1] i" if indices else ""})
        {{ {outputs} = MaxPool <kernel_shape = [4]> (x) }}"""
    )
    nan, inf = np.nan, np.inf
    rows = [[-inf, 1, inf, -inf], [-inf, -5, -inf, -inf], [-inf] * 4, [nan] * 4, [1, nan, 2, 3]]
    rows += [[nan, 1, 2, 0], [1, 2, nan, 0], [-inf, nan, -inf, -inf], [1, 0, 0, nan]]
    x = np.array(rows, model.graph.inputs[0].type.dtype.numpy())[:, None]
    expected = ort.run(ort.session(model), {"x": x})
    if not indices and dtype != "double":
        expected[0][3:] = nan
        expected[0][2] = -inf
    found = interpreted(model, {"x": x})
    for value, want in zip(model.graph.outputs, expected, strict=True):
        np.testing.assert_array_equal(found[value.name], want, strict=True)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("operator", ["ArgMax", "ArgMin"])
def test_the_place_of_an_extreme_beside_nan(operator: str, axis: int, last: int) -> None:
    model = text_model(
        f"""agraph (float[N,M] x) => (int64[K] y) {{ y = {operator} <axis = {axis}, keepdims = 0,
        select_last_index = {last}> (x) }}"""
    )
    rng = np.random.default_rng(last)
    for sizes in ((1, 1), (3, 5), (40, 700), (3000, 2)):
        x = rng.choice(np.float32([1, 2, 3, np.nan, np.inf, -np.inf]), sizes)
        want = ort.run(ort.session(model), {"x": x})[0]
        np.testing.assert_array_equal(interpreted(model, {"x": x})["y"], want, strict=True)


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_nan_infinities_and_zeros_have_onnxruntimes_answer(name: str, kind: str) -> None:
    model, feeds, wanted = special_row(name, kind)
    found = interpreted(model, feeds)
    for output, want in wanted.items():
        assert_same(found[output], want)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("sizes", [(1, 0, 3), (1, 3, 0), (0, 3, 3)])
def test_regions_of_an_image_without_pixels_are_zero(sizes: tuple[int, ...], mode: str) -> None:
    """onnxruntime reads what lies behind such an image."""
    model = text_model(
        f"""agraph (float[B,2,H,W] x, float[1,4] boxes, int64[1] index) => (float[1,2,2,1] y)
        {{ y = RoiAlign <mode = "{mode}", output_height = 2> (x, boxes, index) }}"""
    )
    batch, *image = sizes
    feeds = {"x": np.zeros((batch, 2, *image), "f"), "boxes": np.array([[0, 0, 3, 3]], "f")}
    found = interpreted(model, feeds | {"index": np.zeros(1, np.int64)})["y"]
    np.testing.assert_array_equal(found, np.zeros((1, 2, 2, 1), "f"), strict=True)


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_regions_of_an_image_with_nan_and_infinities(mode: str) -> None:
    """A sample outside is the first pixel times 0; onnxruntime refuses an infinite box."""
    model = text_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[3,2,3,4] x, float[R,4] boxes, int64[R] index) => (float[R,2,2,2] y)
        {{ y = RoiAlign <mode = "{mode}", output_height = 2, output_width = 2, sampling_ratio = 2>
        (x, boxes, index) }}"""
    )
    rng = np.random.default_rng(0)
    x = rng.choice(np.float32([1, -2, 3, 4, np.nan, np.inf, -np.inf]), (3, 2, 3, 4))
    boxes = np.sort(rng.uniform(-3, 6, (9, 4)).astype("f"))
    feeds = {"x": x, "boxes": boxes, "index": np.arange(9) % 3}
    want = ort.run(ort.session(model), feeds)[0]
    assert np.isnan(want).any()
    assert np.isfinite(want).any()
    np.testing.assert_allclose(interpreted(model, feeds)["y"], want, rtol=1e-5)
    boxes[:4][np.eye(4, dtype=bool)] = np.inf
    np.testing.assert_array_equal(np.isnan(interpreted(model, feeds)["y"][:4]), True)


def suite() -> list[object]:
    """A part of the ONNX backend tests, of every operator."""
    from backend_suite import node_cases

    return list(node_cases.collect_testcases(None))


@pytest.mark.parametrize("part", range(4))
def test_the_backend_tests_pass_by_numpy(part: int) -> None:
    from backend_suite import outcome

    cases = suite()[part::32]
    found = {case.name: outcome(case, by_numpy=True) for case in cases}
    assert {k: v for k, v in found.items() if v[0] not in ("pass", "uncounted")} == {}
    assert sum(kind == "pass" for kind, _ in found.values()) > 20


OPERATORS = [case for case in cases()[7::24] if "float64" not in case.dtype]


@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
def test_an_operator_gives_float64s_results(case: Case) -> None:
    """A part of the cases that a GPU runs, within the same tolerances."""
    arrays, truths = case.arrays(), case.oracle()
    model = ir.serde.deserialize_model(case.model(arrays))
    found = interpreted(model, {v.name: arrays[int(v.name[1:])] for v in model.graph.inputs})
    for value, truth in zip(model.graph.outputs, truths, strict=True):
        y = found[value.name]
        assert y.shape == truth.shape
        allowed = max(TOLERANCE.get(kind, 0) for kind in (case.dtype, y.dtype.name))
        y, finite = widen(y), np.isfinite(truth)
        np.testing.assert_array_equal(np.isfinite(y), finite)
        largest = np.abs(truth[finite]).max(initial=1e-30)
        assert (np.abs(y[finite] - truth[finite]) <= allowed * largest).all()


def test_random_numbers_are_philoxs() -> None:
    """The vectors that come with its publication, https://doi.org/10.1145/2063384.2063405."""
    zero, ones = philox(np.zeros((1, 4), np.uint64), 0), 0xFFFFFFFF
    np.testing.assert_array_equal(zero, [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]])
    most = philox(np.full((1, 4), ones, np.uint64), 2**64 - 1)
    np.testing.assert_array_equal(most, [[0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]])


def test_a_crash_of_onnxruntime_leaves_the_process_alone() -> None:
    model = text_model("g (int64[1] x) => (int64[1] y) <int64 minus = {-1}> { y = Div (x, minus) }")
    with pytest.raises(Crash):
        by_onnxruntime(to_proto(model).SerializeToString(), ["y"], {"x": np.array([-(2**63)])})


def test_memory_that_nothing_has_written_shows() -> None:
    model = text_model("agraph (float[4] x) => (float[4] y) { n = Neg(x) y = Exp(n) }")
    feeds = {"x": np.ones(4, np.float32)}
    whole = with_values(model, feeds)
    memory = HostMemory(whole, {})
    assert all((part == 0xA5).all() for part in memory.parts.values())
    (name, tensor), *_ = whole.outputs
    with pytest.raises(ValueError, match="reaches beyond"):
        memory.view(tensor.part(0, 2, 3))
    np.testing.assert_allclose(interpret(whole, feeds, {})[name], np.exp(-feeds["x"]), rtol=1e-6)


def test_a_convolutions_bias_has_the_sum_over_images_and_pixels() -> None:
    """Two passes of a reduction, of which a pointwise call took the first one's rows for all."""
    import onnx_fuse

    model = text_model(
        "agraph (float[7,3,7,2] x, float[6,3,3,3] w, float[6] b) => (float[7,6,7,2] y) "
        "{ z = Conv <pads = [1,1,1,1]> (x, w, b) y = Relu(z) }"
    )
    graph = onnx_fuse.gradient(onnx_fuse.optimize(model), wrt=["b"])
    feeds = drawn(graph)
    subject = Subject("", graph, graph)
    want = subject.lowered_results(feeds)
    assert to_proto(graph).graph.output[-1].name == "b.grad"
    assert not differ(interpreted(graph, feeds), want)


def test_a_product_behind_a_norms_pointwise_steps_reads_what_they_make() -> None:
    model = text_model(
        "agraph (float[3,4] x, float[4] s, float[4,2] w) => (float[3,2] y) "
        "{ n = LayerNormalization(x, s) m = Mul(n, n) y = MatMul(m, w) }"
    )
    feeds = arrays(x=(3, 4), s=(4,), w=(4, 2))
    whole = with_values(model, feeds)
    assert [str(call.problem.tail) for call in whole.calls] == ["Mul"]
    (want,) = ort.session(model, as_written=True).run(None, feeds)
    np.testing.assert_allclose(interpret(whole, feeds, {})["y"], want, rtol=1e-5)


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("mask", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_attention_with_a_mask_of_any_float_type_is_one_program(dtype, mask, level) -> None:
    kinds = {"float16": "float16", "float32": "float", "bfloat16": "bfloat16"}
    q, m = kinds[dtype], kinds[mask]
    text = f"""<ir_version: 10, opset_import: ["": 23]>
    g ({q}[2,3,4,8] q, {q}[2,3,5,8] k, {q}[2,3,5,8] v, {m}[4,5] m) => ({q}[2,3,4,8] y)
    {{ y = Attention (q, k, v, m) }}"""
    shapes = {"q": (2, 3, 4, 8), "k": (2, 3, 5, 8), "v": (2, 3, 5, 8), "m": (4, 5)}
    types = {n: ml_dtypes.finfo(mask if n == "m" else dtype).dtype for n in shapes}
    feeds = {n: a.astype(types[n]) for n, a in arrays(**shapes).items()}
    graph = load(onnx.parser.parse_model(text))
    want = ort.session(graph, as_written=True).run(None, feeds)[0].astype(np.float32)
    rewrite.optimize(graph, level=level)
    assert not any(call.host for call in lowered(graph).calls)
    y = interpreted(graph, feeds)["y"].astype(np.float32)
    np.testing.assert_allclose(y, want, atol={"float32": 2e-6, "float16": 4e-3}.get(dtype, 3e-2))


def test_attention_of_heads_that_have_no_numbers() -> None:
    """Batches of more than 0 end onnxruntime's process."""
    shapes = {"q": (0, 3, 0), "k": (0, 1, 0), "v": (0, 1, 8)}
    graph = load(
        onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["": 21, "ms": 1]>
    g (float[B,S,W] q, float[B,T,W] k, float[B,T,V] v) => (float[B,S,V] y)
    { y = ms.MultiHeadAttention <num_heads = 4> (q, k, v) }""".replace("ms", "com.microsoft")
        )
    )
    feeds = arrays(**shapes)
    (want,) = ort.session(graph, as_written=True).run(None, feeds)
    assert interpreted(graph, feeds)["y"].shape == want.shape
