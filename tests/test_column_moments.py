"""A BatchNormalization's statistics from the tiles of the convolution or product before it."""

import numpy as np
import pytest
from lowering import program_of
from support import drawn

from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import candidates
from onnx_fuse.kernels.gemm_sm90 import Wgmma
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS, GemmProblem
from onnx_fuse.program.problems import Conv, MergedMoments, Reduce, Window

H200 = CHIPS["H200"]
NORM = "y, rm, rv = BatchNormalization<training_mode=1,momentum=0.75>(c, s, b, m, v)"
MADE = {  # what makes c [16, 64, 40, 39], of which x [16, 32, 40, 39] has another size
    "a convolution": ("c = Conv<pads=[1,1,1,1]>(x, u)", (64, 32, 3, 3)),
    "a convolution of one tap": ("p = Conv<pads=[1,1,1,1]>(x, k) c = Conv(p, u)", (64, 32, 1, 1)),
    "a bias and an activation": ("t = Conv<pads=[1,1,1,1]>(x, u, m) c = Relu(t)", (64, 32, 3, 3)),
}


def model_of(nodes: str, weight: tuple[int, ...], dtype: str = "float16", outputs: str = ""):
    filters = ", ".join(f"float[{weight[0]}] {name}" for name in "sbv")
    bias = f"{dtype if '(x, u, m)' in nodes else 'float'}[{weight[0]}] m"
    norm = NORM if "(x, u, m)" not in nodes else NORM.replace("s, b, m", "s, b, b")
    return text_model(
        f"agraph ({dtype}[16,32,40,39] x, {dtype}[32,32,3,3] k, {dtype}{list(weight)} u, "
        f"{filters}, {bias}) => "
        f"({dtype}[16,64,40,39] y, float[64] rm, float[64] rv{outputs}) {{ {nodes} {norm} }}"
    )


def feeds_of(model) -> dict[str, np.ndarray]:
    found = drawn(model)
    found["v"], found["s"] = np.abs(found["v"]) + 1, found["s"] + 3
    return found


@pytest.mark.parametrize("name", MADE)
def test_what_makes_the_input_of_a_norm_leaves_its_moments(name: str) -> None:
    model = model_of(*MADE[name], outputs=", float16[16,64,40,39] c")
    feeds = feeds_of(model)
    program = program_of(model, feeds)
    assert not [c for c in program.calls if isinstance(c.problem, Reduce)]
    (made,) = [c for c in program.calls if "part" in dict(c.writes)]
    assert (
        made.problem.column_moments
        if isinstance(made.problem, Conv)
        else (made.problem.epilogue.column_moments)
    )
    assert dict(made.writes)["part"].shape == (-(-16 * 40 * 39 // 64), 64, 2)
    found = interpret(program, feeds, {})
    c = found["c"].astype(np.float64)
    mean, variance = c.mean((0, 2, 3)), c.var((0, 2, 3))
    old = feeds["b" if "(x, u, m)" in MADE[name][0] else "m"]
    np.testing.assert_allclose(found["rm"], 0.75 * old + 0.25 * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["rv"], 0.75 * feeds["v"] + 0.25 * variance, rtol=1e-5)
    each = (1, 64, 1, 1)
    want = (c - mean.reshape(each)) / np.sqrt(variance.reshape(each) + 1e-5)
    want = want * feeds["s"].reshape(each) + feeds["b"].reshape(each)
    np.testing.assert_allclose(found["y"].astype(np.float64), want, rtol=2e-3, atol=4e-3)


CONV = MADE["a convolution"]


@pytest.mark.parametrize(
    ("nodes", "weight", "dtype", "chip"),
    [
        (*CONV, "float16", "A100"),
        (*CONV, "float", "H200"),  # no box of 16 bits
        ("c = Conv<pads=[1,1,1,1],group=2>(x, u)", (64, 16, 3, 3), "float16", "H200"),
        ("t = Conv<pads=[1,1,1,1]>(x, u) c = Neg(t)", CONV[1], "float16", "H200"),
    ],
    ids=["another chip", "another type", "groups", "other values"],
)
def test_other_norms_read_their_input(
    nodes: str, weight: tuple[int, ...], dtype: str, chip: str
) -> None:
    model = model_of(nodes, weight, dtype)
    program = program_of(model, feeds_of(model), CHIPS[chip])
    assert [c for c in program.calls if isinstance(c.problem, Reduce)]
    assert not [c for c in program.calls if isinstance(c.problem, MergedMoments)]


WANTED = GemmProblem.of("Gemm", m=300, n=384, k=264, dtype="bfloat16", column_moments=True)


@pytest.mark.parametrize(
    "changes",
    [{"n": 380}, {"dtype": "float32"}, {"out_dtype": "float32"}, {"batch": (2,)}, {"dw": True},
     {"accumulate": True}, {"save_z": True}, {"column_sums": True}, {"moments": 3}],
    ids=str,
)  # fmt: skip
def test_no_kernel_leaves_moments_of_what_it_does_not_store_whole(changes: dict) -> None:
    assert Wgmma().supports(WANTED, H200) is None
    for kernel in candidates("Gemm"):
        assert kernel.supports(WANTED.replace(**changes), H200)


def test_one_candidate_leaves_moments_of_columns() -> None:
    """A bias and an activation are done before; tiles are whole boxes, and k is not split."""
    full = WANTED.replace(bias=True, act="relu")
    assert [k.name for k in candidates("Gemm") if k.supports(full, H200) is None] == ["wgmma"]
    ways = Wgmma().configs(full, H200)
    assert {how.integer("splits") for how in ways} == {1}
    assert all(how.integers("tile")[1] % 64 == 0 for how in ways)
    window = Window((1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1), (0, 1, 1))
    conv = Conv(2, 1, 72, 40, (1, 11, 12), (1, 11, 12), window, "bfloat16")
    last = {"channels_last": True, "column_moments": True}
    conv = type(conv)(**{**conv.fields(), **last})
    assert [k.name for k in candidates("Conv") if k.supports(conv, H200) is None] == ["wgmma"]
    assert not conv.stored  # what stood behind would be of other values than the moments
