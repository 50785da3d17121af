"""A bias's gradient from the tiles of a product that reads the same rows."""

import dataclasses

import encoder
import numpy as np
import pytest
from lowering import lowered, program_of

from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels.gemm_sm90 import Wgmma
from onnx_fuse.program.data_movement import PointwiseSums
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS, GemmProblem
from onnx_fuse.program.problems import PartSums, Reduce, SlopeProduct
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model

WIDTH, WIDE = 256, 512
STEP = """agraph (float16[M, 256] dy, float16[256, 512] w) => (float16[M, 512] dx, float16[256] db)
<int64[1] rows = {0}, int64[1] one = {1}> { NODES }"""


def model_of(nodes: str):
    return text_model(STEP.replace("NODES", nodes))


PRODUCT, SUM = "dx = MatMul (dy, w)", "db = ReduceSum <keepdims = 0> (dy, rows)"


@pytest.mark.parametrize("rows", [8192, 12300])
@pytest.mark.parametrize("nodes", [f"{PRODUCT} {SUM}", f"{SUM} {PRODUCT}"])
def test_the_product_leaves_sums_of_its_rows(nodes: str, rows: int) -> None:
    rng = np.random.default_rng(0)
    feeds = {"dy": rng.standard_normal((rows, WIDTH)).astype(np.float16),
             "w": (rng.standard_normal((WIDTH, WIDE)) / 16).astype(np.float16)}  # fmt: skip
    program = program_of(model_of(nodes), feeds)
    product, sums = program.calls
    assert isinstance(product.problem, GemmProblem)
    assert product.problem.epilogue.column_sums
    assert dict(product.writes)["part"].shape == (-(-rows // 64), WIDTH)
    assert isinstance(sums.problem, PartSums)
    found = interpret(program, feeds, {})
    want = feeds["dy"].astype(np.float64).sum(0)
    assert np.abs(found["db"] - want).max() <= 1e-3 * np.abs(want).max()  # a float16's rounding
    np.testing.assert_allclose(
        found["dx"].astype(np.float64), feeds["dy"].astype(np.float64) @ feeds["w"], atol=5e-3
    )


@pytest.mark.parametrize(
    ("nodes", "chip"),
    [
        (f"{PRODUCT} n = Neg (dy) {SUM.replace('dy', 'n')}", "H200"),  # of other values
        (f"{PRODUCT} {SUM.replace('Sum', 'Max')}", "H200"),
        (f"{SUM} u = Unsqueeze (db, one) c = Add (w, u) dx = MatMul (dy, c)", "H200"),  # is read
        (f"{PRODUCT} {SUM}", "A100"),
    ],
)
def test_other_sums_stay(nodes: str, chip: str) -> None:
    program = lowered(model_of(nodes), CHIPS[chip], size=8192)
    assert any(isinstance(call.problem, Reduce | PointwiseSums) for call in program.calls)


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem.of("Gemm", m=300, n=384, k=264, dtype="bfloat16", trans_a=True),
        GemmProblem.of("Gemm", m=300, n=384, k=260, dtype="float32"),
        GemmProblem.of("Gemm", m=300, n=384, k=264, dtype="bfloat16", batch=(2,)),
    ],
    ids=str,
)
def test_only_rows_of_one_operand_are_summed(problem: GemmProblem) -> None:
    assert Wgmma().supports(problem.with_epilogue(column_sums=True), CHIPS["H200"])


def test_a_bias_before_an_activation_is_summed_by_the_next_product() -> None:
    """Of an encoder's layer: the product before made dz, and no pass over it is left.

    Of the last layer the classes read 32 rows, whose sums are a small call.
    """
    config = dataclasses.replace(encoder.SIZES["bert-base"], layers=2, vocab=64, classes=2)
    graph, spec = training_model(
        encoder.build(config), loss="cross_entropy", optimizer=optim.SGD(), level=2,
        precision="bf16", fused=True,
    )  # fmt: skip
    feeds = {s.name: np.asarray(s.initial) for s in spec.states}
    names = ("input_ids", "attention_mask", "token_type_ids")
    feeds |= {name: np.zeros((32, 128), np.int64) for name in names}
    feeds |= {"labels": np.zeros(32, np.int64), spec.lr: np.array(0.1, np.float32)}
    feeds = {str(v.name): feeds[str(v.name)] for v in graph.graph.inputs}
    program = program_of(graph, feeds, state={s.next: s.name for s in spec.states if s.next})
    apart = [call.problem for call in program.calls if isinstance(call.problem, SlopeProduct)]
    assert {problem.m for problem in apart} <= {32}
    made = [dict(call.writes)["part"] for call in program.calls if "part" in dict(call.writes)]
    assert (64, 3072) in [part.shape for part in made]
