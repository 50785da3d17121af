"""The math kernels without a GPU: they compile clean for every architecture, and their geometry."""

import math
import re
import statistics
from collections import defaultdict
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from compiled import unclean
from math_cases import H200, cases
from support import waits

from onnx_fuse.cuda.source import source_root
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import candidates, sdpa, sdpa_grad_sm90, select
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.rule_based import access_width, team_size
from onnx_fuse.lower.pool import taps
from onnx_fuse.lower.reduce import passes, pieces
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Program
from onnx_fuse.program.contractions import Attention, AttentionGrad
from onnx_fuse.program.launch import Launch, Num, Ptr, TensorMap
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.program.problems import Conv, ConvWeightGrad, Softmax, Window
from onnx_fuse.program.size import Trace

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
PARKED = {("softmax/column.cu", "sm_120a"): 32}
"""(source, architecture) -> the bytes that ptxas spills although it could take more registers."""


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    return {f"{i} {case.name}": case.program() for i, case in enumerate(cases())}


def test_every_case_has_a_kernel(programs):
    """No case falls back, and every launch is one that a GPU takes."""
    for name, program in programs.items():
        assert not program.fallbacks, name
        assert not any(stage.host for stage in program.stages), name  # nor does what data decides
        for call in program.calls:
            for launch in call.launches:
                assert prod(launch.block) <= 1024, name
                assert all(n >= 1 for n in launch.grid), (name, launch.grid)
                assert launch.grid[0] < 2**31, name
                assert max(launch.grid[1:]) < 2**16, name
                assert launch.smem <= H200.smem_per_block, name
                parts = [a for a in launch.args if isinstance(a, Ptr) and a.name == "workspace"]
                assert all(part.offset % 16 == 0 for part in parts), name


def test_every_call_is_a_problem(programs):
    """But for what the passes have joined: one launch for several of a kind."""
    seen = set()
    for name, program in programs.items():
        for call in (*program.setup, *program.calls):
            if call.problem is None:
                assert " x" in call.kernel, (name, str(call))
                continue
            seen.add(call.problem.op)
            assert call.problem.floor(H200) >= 0
            assert str(call.problem).startswith(call.problem.op)
            assert call.choice.kernel in {k.name for k in candidates(call.problem.op)}
            assert all(x.waits == waits(x.source) for x in call.launches), str(call)
    assert len(seen) >= 25


def test_modules_compile_without_spills(programs):
    """Of each source the first module for its architectures, and the last for one more."""
    by_source = defaultdict(set)
    for program in programs.values():
        for call in program.calls:
            for launch in call.launches:
                if "\n" not in launch.source and not launch.source.startswith("gemm/"):
                    by_source[launch.source].add(launch.defines)
    assert len(by_source) >= 15
    for source, found in by_source.items():
        modules = sorted(found)
        for arch in ("sm_90a",) if "sm90" in source else ARCHS:
            others = {len(modules) - 1} - {0} if arch == "sm_90a" else ()
            wanted = [(source, modules[i]) for i in (0, *others)]
            assert unclean(wanted, arch, parked=PARKED.get((source, arch), 0)) == []


# ---- activations --------------------------------------------------------------------------------


def normal_tail(x: np.ndarray, terms: str) -> tuple[np.ndarray, np.ndarray]:
    """|x| and P(X < -|x|) as cuda_src/common.cuh computes it in float32 from its table `terms`."""
    text = (source_root() / "common.cuh").read_text()
    table = re.search(rf"float {terms}\[5\] = {{([^}}]*)}}", text)
    p = [np.float32(c.strip().rstrip("f")) for c in table[1].split(",")]
    a = np.minimum(np.abs(x), np.float32(16)).astype(np.float32)
    e = np.full_like(a, p[-1])
    for c in p[-2::-1]:  # fused: rounded once
        e = (e.astype(np.float64) * a + c).astype(np.float32)
    return a.astype(np.float64), np.exp2(e.astype(np.float64))


@pytest.mark.parametrize(
    ("terms", "value", "relative", "slope"),
    [("five", 2.4e-5, 3.2e-4, 5e-5), ("four", 1.9e-4, 2.8e-3, 4e-4)],
)
def test_gelu_for_16_bits_is_as_near_as_its_comment_says(terms, value, relative, slope):
    """The largest error of GELU and GELU' anywhere, and of itself above x = -2."""
    x = np.concatenate([np.linspace(-14, 14, 20001), np.geomspace(1e-7, 6e4, 2001)])
    x = np.concatenate([x, -x]).astype(np.float32)
    tail, phi = (
        np.vectorize(f) for f in (lambda v: math.erfc(v / 2**0.5) / 2, statistics.NormalDist().pdf)
    )
    wide = x.astype(np.float64)
    a, e = normal_tail(x, terms)
    y, truth = np.maximum(wide, 0) - a * e, wide * tail(-wide)
    assert np.abs(y - truth).max() <= value
    near = wide > -2
    assert (np.abs(y - truth)[near] <= relative * np.abs(truth[near])).all()
    assert (np.abs(y[wide < -14]) < 1e-20).all()
    cdf = np.where(wide < 0, e, 1 - e)
    bell = wide * phi(np.clip(wide, -40, 40))
    assert np.abs(cdf + bell - (tail(-wide) + bell)).max() <= slope


# ---- reductions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((5, 7), (1,), [(5, 7, 1)]),
        ((5, 7), (0,), [(1, 5, 7)]),
        ((2, 3, 4, 5), (0, 2), [(6, 4, 5), (1, 2, 15)]),
        ((2, 3, 4, 5), (1, 2), [(2, 12, 5)]),
        ((2, 1, 4), (0, 1, 2), [(1, 8, 1)]),
        ((3, 4), (), [(12, 1, 1)]),
    ],
)
def test_passes(shape, axes, expected):
    assert passes(shape, axes) == expected


@pytest.mark.parametrize("outer", [1, 7, 5000])
@pytest.mark.parametrize("length", [1, 33, 4096, 300001, 10**7])
@pytest.mark.parametrize("inner", [1, 6, 768])
def test_pieces_cover_the_length_in_whole_vectors(outer, length, inner):
    vec = access_width(length if inner == 1 else inner, "float16")
    chunk = pieces(outer, length, inner, vec)
    splits = -(-length // chunk)
    assert (splits - 1) * chunk < length <= splits * chunk
    assert splits == 1 or inner > 1 or chunk % vec == 0
    assert team_size(outer, chunk, vec) & (team_size(outer, chunk, vec) - 1) == 0


def softmax_launch(problem: Softmax) -> Launch:
    choice = select("Softmax", problem, H200)
    (launch,) = choice.launch(problem, H200)
    return launch


def test_rows_of_ordinary_length_stay_in_registers():
    for dtype in ("float32", "bfloat16"):
        for outer in (4, 5000):
            for length in (768, 1024, 2048, 4096, 8192, 16384):
                launch = softmax_launch(Softmax(outer, length, 1, dtype))
                assert int(dict(launch.defines)["ITEMS"]) > 0, (dtype, outer, length)


def test_softmax_launch_covers_every_row():
    choice = select("Softmax", Softmax(2, 50257, 1, "float32"), H200)
    for launch in choice.launch(Softmax(2, 50257, 1, "float32"), H200):  # a block a part of a row
        chunk, chunks = (int(a.value) for a in launch.args[-2:])
        assert launch.grid[0] == 2 * chunks
        assert chunk * (chunks - 1) < 50257 <= chunk * chunks
    for outer, length, inner in ((7, 5, 1), (3000, 768, 1), (200, 50257, 1), (4, 9, 33)):
        launch = softmax_launch(Softmax(outer, length, inner, "float32"))
        macros = dict(launch.defines)
        if inner == 1:
            teams = int(macros["BLOCK"]) // int(macros["TEAM"])
            assert launch.grid[0] * teams >= outer
            kept = int(macros["ITEMS"]) * int(macros["TEAM"]) * int(macros["VEC"])
            assert kept == 0 or kept >= length
        else:
            assert launch.grid[0] * int(macros["BX"]) >= outer * inner


# ---- convolutions -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("channels", [3, 16, 70, 512])
@pytest.mark.parametrize("filters", [1, 8, 65, 512])
def test_conv_splits_cover_the_sum_and_fit_the_workspace(dtype, channels, filters):
    one = (1, 1, 1)
    window = Window((1, 3, 3), one, one, (0, 1, 1), (0, 1, 1))
    problem = Conv(2, 1, channels, filters, (1, 7, 7), (1, 7, 7), window, dtype)
    choice = select("Conv", problem, H200)
    launches, workspace = choice.launch(problem, H200), choice.workspace(problem, H200)
    main = next(
        x for x in launches if x.entry.startswith("conv") and x.entry in ("conv", "conv_direct")
    )
    assert workspace >= max(
        (arg.offset for x in launches for arg in x.args if getattr(arg, "name", "") == "workspace"),
        default=0,
    )
    if main.entry == "conv":
        macros = dict(main.defines)
        assert main.grid[0] * int(macros["BN"]) >= 2 * 49
        assert main.grid[1] * int(macros["BM"]) >= filters
        assert (
            (main.grid[2] > 1) == (macros["SPLIT"] == "1") == (launches[-1].entry == "conv_finish")
        )


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("antialias", [False, True])
def test_resize_weights_add_up_to_one(mode, antialias):
    for length, resized in ((6, 11), (12, 5), (7, 7)):
        index, weight = taps(
            length, resized, resized / length, mode=mode, transform="half_pixel", nearest="floor",
            cubic=-0.75, exclude_outside=False, antialias=antialias, roi=(0.0, 1.0),
        )  # fmt: skip
        assert index.shape == weight.shape == (resized, index.shape[1])
        assert index.min() >= 0
        assert index.max() < length
        np.testing.assert_allclose(weight.sum(1), 1, atol=1e-6)


_CUBE = Window((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1))
_VOLUME = (1, 128, 128, (16, 32, 32), (16, 32, 32), _CUBE, "float16")


@pytest.mark.parametrize(
    "problem",
    [Conv(2, *_VOLUME, channels_last=True), ConvWeightGrad(2, *_VOLUME, "float16")],
    ids=["Conv", "ConvWeightGrad"],
)
def test_each_tile_over_volumes_compiles_without_spills(problem):
    """By tensor maps of five axes, which have a window of nine numbers."""
    (kernel,) = (k for k in candidates(problem.op) if k.name == "wgmma")
    assert kernel.supports(problem, H200) is None
    tiles = {how.attr("tile"): how for how in kernel.configs(problem, H200)[1:]}
    assert len(tiles) > 3
    for tile, how in tiles.items():
        product, *_ = kernel.launch(problem, how, H200)
        assert any(isinstance(a, TensorMap) and len(a.window) == 9 for a in product.args)
        # as of products
        assert unclean([product], parked=256 if tile == (2, 192, 1) else 0) == [], how


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dilations": (16, 1, 1), "before": (16, 1, 1), "after": (16, 1, 1)}, "does not hold"),
        ({"after": (1, 1, 2)}, "elsewhere"),
    ],
)
def test_volumes_by_tensor_maps_say_why_not(change, reason):
    problem = Conv(2, *_VOLUME, channels_last=True)
    problem = replace(problem, window=replace(problem.window, **change))
    (kernel,) = (k for k in candidates("Conv") if k.name == "wgmma")
    assert reason in str(kernel.supports(problem, H200))


# ---- attention ----------------------------------------------------------------------------------


def attention(op: str, width: int, dtype: str, **more) -> Attention:
    strides = {f"{name}_strides": (width * 8, width * 8, width) for name in "qkv"}
    return {"Sdpa": Attention, "SdpaGrad": AttentionGrad}[op](
        m=100, n=104, k=width, batch=(2, 4), dtype=dtype, dv=width,
        **strides, **more,
    )  # fmt: skip


def every_launch(kernel: Kernel, problem: Attention) -> list[Launch]:
    """Of all configurations on an H200."""
    configs = kernel.configs(problem, H200)
    return [x for config in configs for x in kernel.launch(problem, config, H200)]


@pytest.mark.parametrize("op", ["Sdpa", "SdpaGrad"])
@pytest.mark.parametrize("width", [5, 8, 64, 72, 128, 256])
@pytest.mark.parametrize("chip", ["H200", "4090"])
def test_attention_always_has_a_legal_kernel(op, width, chip):
    hw = CHIPS[chip]
    for dtype in ("float32", "bfloat16"):
        for mask in ((), (0, 0, 0, 1), (8, 8, 8, 1)):
            problem = attention(op, width, dtype, mask=mask)
            choice = select(op, problem, hw)
            if choice is None:  # its shared memory is too small: the op's body runs instead
                assert chip == "4090"
                assert width >= 128
                continue
            widest = 128 if op == "SdpaGrad" else 256
            if chip == "H200":
                half = dtype == "bfloat16" and width % 8 == 0 and width <= widest
                fast = ("wgmma", "wgmma_joint", "direct", "mma")
                assert choice.kernel.name in (fast if half else ("simt",))
            for launch in choice.launch(problem, hw):
                assert launch.smem <= hw.smem_per_block


@pytest.mark.parametrize("width", [40, 64, 72, 80, 96, 160])
def test_heads_of_other_sizes_compile_without_spills(width):
    """On Hopper, whose second product is as wide as the head; 77 keys are a prompt's."""
    hopper = sdpa.Wgmma()
    for keys, mask in ((77, ()), (200, (8, 8, 8, 1) if width in (40, 160) else ())):
        problem = replace(attention("Sdpa", width, "bfloat16", mask=mask), n=keys)
        assert unclean(every_launch(hopper, problem)) == []


def test_every_attention_configuration_compiles_without_spills():
    rows = (
        ("Sdpa", 64, (), 104),
        ("Sdpa", 64, (8, 8, 8, 1), 104),
        ("Sdpa", 64, (8, 8, 8, 1), 200),
        ("Sdpa", 64, (8, 8, 0, 1), 40),
        ("Sdpa", 128, (), 200),
        ("Sdpa", 128, (0, 0, 0, 1), 104),
        ("Sdpa", 128, (8, 8, 8, 1), 200),
        ("Sdpa", 256, (), 200),
        ("Sdpa", 256, (0, 0, 0, 1), 200),
        ("SdpaGrad", 64, (8, 8, 8, 1), 104),
        ("SdpaGrad", 128, (), 104),
    )
    every, row = (8, 8, 8, 1), (8, 8, 0, 1)
    steps = (  # conditions, two masks, a softcap, NaN guards
        ("Sdpa", 64, 200, {"mask": every, "keep": True}),
        ("Sdpa", 64, 200, {"mask": row, "keep": True, "guard": 2}),
        ("Sdpa", 128, 200, {"mask": every, "mask2": row, "keep2": True}),
        ("Sdpa", 128, 200, {"mask": every, "softcap": 2.0}),
        ("Sdpa", 128, 200, {"mask": (), "softcap": 2.0, "guard": 2}),
        ("Sdpa", 64, 104, {"mask": every, "lowest": -1e9}),
        ("Sdpa", 64, 200, {"mask": every, "lowest": -1e9}),
        ("Sdpa", 128, 200, {"mask": every, "lowest": -1e9, "softcap": 2.0}),
        ("Sdpa", 128, 200, {"mask": every, "mask2": row, "lowest": -1e9}),
        ("Sdpa", 256, 200, {"mask": row, "lowest": -1e9}),
        ("SdpaGrad", 64, 104, {"mask": every, "lowest": -1e9}),
        ("SdpaGrad", 128, 104, {"mask": every, "lowest": -1e9}),
        ("SdpaGrad", 64, 104, {"mask": every, "keep": True, "guard": 2}),
        ("SdpaGrad", 128, 104, {"mask": every, "mask2": row, "keep2": True}),
        ("SdpaGrad", 128, 104, {"mask": (), "softcap": 2.0}),
    )
    problems = [
        replace(attention(op, width, "bfloat16", mask=mask, causal=causal), n=keys)
        for op, width, mask, keys in rows
        for causal in (False, True)
    ]
    problems += [replace(attention(op, w, "float16", **more), n=n) for op, w, n, more in steps]
    launches = []
    for problem in problems:
        hopper = sdpa.Wgmma() if problem.op == "Sdpa" else sdpa_grad_sm90.WgmmaGrad()
        alone = problem.mask2 or (hopper.supports(problem, H200) or "")[:9] == "a softcap"
        few = problem.op == "Sdpa" and problem.k == 64 and not problem.mask2
        more = ((sdpa.Direct(),) if few else ()) + (() if alone else (hopper,))
        for kernel in (sdpa.SdpaMma(), *more):
            assert kernel.supports(problem, H200) is None
            launches += every_launch(kernel, problem)
    assert unclean(launches) == []


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"scale": -1.0}, "positive scales"),
        ({"mask": (0, 0, 5, 1)}, "16-byte pieces"),
        ({"k_strides": (512, 0, 64)}, "broadcast"),
        ({"dv": 512}, "too large"),
        ({"mask": (8, 8, 8, 1), "mask2": (8, 8, 8, 1)}, "two masks"),
        ({"mask": (8, 8, 0, 1), "packed": 300}, "a mask of one row"),
    ],
)
def test_attention_by_tma_says_why_not(more, reason):
    problem = replace(attention("Sdpa", 64, "float16"), **more)
    assert reason in str(sdpa.Wgmma().supports(problem, H200))
    assert sdpa.Wgmma().supports(attention("Sdpa", 64, "float16"), CHIPS["A100"])


def test_attention_takes_the_hopper_kernel_where_it_was_faster():
    for batch, tokens, width in ((32, 128, 64), (8, 128, 64), (8, 512, 64), (4, 2048, 128)):
        for op in ("Sdpa", "SdpaGrad") if batch * tokens >= 4096 else ("Sdpa",):
            problem = replace(
                attention(op, width, "float16"), batch=(batch, 12), m=tokens, n=tokens
            )
            narrow = op == "SdpaGrad" and width == 64
            assert select(op, problem, H200).kernel.name == ("wgmma_joint" if narrow else "wgmma")


def test_packed_attention_by_tma_compiles_without_spills():
    forward, backward = sdpa.Wgmma(), sdpa_grad_sm90.WgmmaGrad()
    for kernel, width, keys, more in (
        (forward, 64, 104, {"causal": True}), (forward, 64, 200, {"softcap": 2.0, "guard": 2}),
        (forward, 128, 200, {}), (backward, 64, 104, {}), (backward, 128, 200, {"causal": True}),
        *((forward, width, keys, {"guard": 0, "mask": (0, 0, keys, 1)})
          for width, keys in ((64, 104), (64, 200), (128, 200))),
    ):  # fmt: skip
        op = "Sdpa" if kernel is forward else "SdpaGrad"
        more = {"packed": 300, "guard": 1, **more}
        problem = replace(attention(op, width, "bfloat16", **more), m=keys, n=keys)
        assert unclean(every_launch(kernel, problem)) == []


@pytest.mark.parametrize("op", ["Sdpa", "SdpaGrad"])
def test_packed_attention_takes_the_hopper_kernel_where_it_was_faster(op):
    rows = ((33, 128, 2048, False), (17, 512, 4096, False), (9, 1024, 2816, True))
    for batch, longest, tokens, causal in rows:
        problem = attention(op, 64, "bfloat16", causal=causal, packed=tokens, guard=1)
        problem = replace(problem, batch=(batch, 12), m=longest, n=longest)
        name = "wgmma_joint" if op == "SdpaGrad" and longest == 128 else "wgmma"
        assert select(op, problem, H200).kernel.name == name
        # 33 is the least of its class, whose largest would have sequences half as long
        trace = Trace()
        open_ones = {"packed": trace.symbol("t", tokens), "batch": (trace.symbol("b", batch), 12)}
        assert select(op, replace(problem, **open_ones), H200).kernel.name == name


def test_the_joint_gradient_of_attention_is_taken_where_it_was_faster():
    for batch, tokens, causal, split in (
        (16, 1024, True, 2), (64, 197, False, 1), (5, 2048, True, 2), (32, 128, False, 1),
        (16, 1024, False, 2), (8, 512, True, 1),
    ):  # fmt: skip
        problem = attention("SdpaGrad", 64, "bfloat16", causal=causal)
        problem = replace(problem, batch=(batch, 12), m=tokens, n=tokens)
        choice = select("SdpaGrad", problem, H200)
        assert (choice.kernel.name, choice.config.attrs) == ("wgmma_joint", (("split", split),))


@pytest.mark.parametrize("more", [{}, {"causal": True}, {"causal": True, "guard": 2}])
def test_the_joint_gradient_of_attention_compiles_without_spills(more):
    kernel = sdpa_grad_sm90.WgmmaGradJoint()
    for width, dv in ((64, 64), (40, 32)):
        problem = replace(attention("SdpaGrad", width, "bfloat16", **more), m=400, n=400, dv=dv)
        assert [c.integer("split") for c in kernel.configs(problem, H200)] == [1, 2, 4]
        assert unclean(every_launch(kernel, problem)) == []


DIRECT, TMA, JOINT = sdpa.Direct(), sdpa_grad_sm90.WgmmaGrad(), sdpa_grad_sm90.WgmmaGradJoint()


@pytest.mark.parametrize(
    ("kernel", "more", "reason"),
    [
        (JOINT, {"softcap": 2.0}, "softcap"),
        (JOINT, {"mask": (8, 8, 0, 1)}, "a mask"),
        (JOINT, {"group": 2}, "share keys"),
        (JOINT, {"dv": 72}, "from 32 to 64"),
        (JOINT, {"m": 2049}, "2048 queries"),
        (JOINT, {"causal": True}, "after the last query"),
        (JOINT, {"dq_strides": (512, 64, 12)}, "16 bytes"),
        (DIRECT, {"k": 32, "dv": 32}, "not of 64"),
        (DIRECT, {"dtype": "float32"}, "16-bit"),
        (DIRECT, {"m": 16}, "few queries"),
        (DIRECT, {"n": 257}, "257 keys"),
        (DIRECT, {"window": (3, 3)}, "a window"),
        (DIRECT, {"mask": (8, 8, 8, 1), "mask2": (8, 8, 8, 1)}, "two masks"),
        (DIRECT, {"k_strides": (512, 512, 1 << 31)}, "31 bits"),
        (TMA, {"softcap": 2.0}, "softcap"),
        (TMA, {"dq_strides": (512, 64, 12)}, "16 bytes"),
        (TMA, {"dv": 136}, "too large"),
        (TMA, {"mask": (8, 8, 8, 1), "mask2": (8, 8, 8, 1)}, "two masks"),
    ],
    ids=lambda x: getattr(x, "name", None) or str(x),
)
def test_a_kernel_of_attention_says_why_not(kernel, more, reason):
    problem = attention("Sdpa" if kernel is DIRECT else "SdpaGrad", 64, "float16")
    assert kernel.supports(problem, H200) is None
    assert reason in str(kernel.supports(replace(problem, **more), H200))
    if kernel is DIRECT:
        assert "only on sm_90" in str(kernel.supports(problem, CHIPS["A100"]))


def test_gradients_of_attention_by_tma_go_where_they_fit():
    problem = attention("SdpaGrad", 64, "float16")
    assert [c.integer("split") for c in JOINT.configs(problem, H200)] == [1]
    longest = replace(problem, m=2048, n=2048)
    for config in JOINT.configs(longest, H200):
        (launch,) = JOINT.launch(longest, config, H200)
        assert launch.smem <= H200.smem_per_block
        assert launch.grid[0] % launch.cluster == 0
    joined = replace(problem, dq_strides=(512, 64, 192))
    assert TMA.supports(joined, H200) is None
    assert "parts of one tensor" in str(sdpa.MMA.supports(joined, H200))


@pytest.mark.parametrize(
    ("batch", "tokens", "chosen"),
    [
        (1, 64, "tiles=1"),
        (2, 64, ""),
        (1, 128, ""),
        (1, 200, "tiles=2"),
        (1, 256, "tiles=2"),
        (2, 128, ""),
        (2, 256, ""),
        (4, 128, ""),
    ],
)
def test_attention_of_few_keys_takes_what_was_fastest(batch, tokens, chosen):
    problem = attention("Sdpa", 64, "float16", mask=(0, 0, 0, 1))
    choice = select("Sdpa", replace(problem, batch=(batch, 12), m=tokens, n=tokens), H200)
    assert (choice.kernel.name == "direct") == bool(chosen)
    assert chosen in str(choice.config)


# ---- sorting -------------------------------------------------------------------------------------

WIDE_ROWS = "agraph (float[9000,6] x) => (float[N,6] y) { y = Unique <axis = 0> (x) }"


def test_the_launches_of_a_sort_are_a_sorting_network():
    """What scan/sort.cu does with the numbers it is given, by NumPy."""
    program = lower(text_model(WIDE_ROWS), {"x": ((9000, 6), "float32")}, H200)
    [call] = [c for c in program.calls if c.kernel == "SortedRows"]
    *sort, order = call.launches
    values = np.random.default_rng(0).integers(0, 3000, 9000)
    at: np.ndarray = np.zeros(0)

    def exchange(size: int, step: int) -> None:
        """Pairs `step` apart, each ascending where its index lacks the bit of `size`."""
        i = np.arange(len(at)).reshape(-1, 2, step)
        low, high = i[:, 0].reshape(-1), i[:, 1].reshape(-1)
        key = np.append(values, [values.max() + 1])[np.minimum(at, 9000)] * 2**15 + at
        swap = (key[low] > key[high]) == ((low & size) == 0)
        at[low], at[high] = np.where(swap, at[high], at[low]), np.where(swap, at[low], at[high])

    for launch in sort:
        numbers = [int(a.value) for a in launch.args if isinstance(a, Num)]
        chunk = int(dict(launch.defines)["SIZE"])
        if launch.entry == "sort_chunks":
            assert numbers == [9000, 6]
            at = np.arange(launch.grid[0] * chunk)
            sizes = [(2**k, 2**k // 2) for k in range(1, chunk.bit_length())]
        elif launch.entry == "sort_merge":
            sizes = [(numbers[1], chunk // 2)]
        else:
            exchange(*numbers[1:])
            sizes = []
        assert launch.grid[0] * chunk == len(at)
        for size, step in sizes:
            while step:
                exchange(size, step)
                step //= 2
    assert order.entry == "sort_order"
    np.testing.assert_array_equal(at[:9000], np.argsort(values, kind="stable"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_a_sort_of_wide_rows_compiles(arch):
    program = lower(text_model(WIDE_ROWS), {"x": ((9000, 6), "float32")}, H200)
    launches = [x for c in program.calls for x in c.launches if x.source == "scan/sort.cu"]
    assert unclean(launches, arch) == []
