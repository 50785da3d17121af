"""Kernels without a GPU: each compiles for the architectures it claims; what select chooses."""

import dataclasses
import pickle
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda.pathfinder
import mlp
import pytest
from compiled import unclean
from cuda.bindings import driver
from lowering import lowered
from support import python, waits

from onnx_fuse import config
from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.source import Defines, source_root
from onnx_fuse.errors import DeviceError, UsageError
from onnx_fuse.importer.load import read
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import candidates, cublaslt, refusals, select, tuning
from onnx_fuse.kernels.gemm_fp8 import E4M3, E5M2
from onnx_fuse.kernels.gemm_sm90 import Wgmma
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.layernorm_gemm_grad_small import TILES, FewRowsGrad
from onnx_fuse.kernels.norm_launches import fold_columns
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.contractions import Attention, AttentionGrad, CachedAttention
from onnx_fuse.program.data_movement import CacheAppend
from onnx_fuse.program.launch import Launch
from onnx_fuse.program.problem import CHIPS, GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.problems import Conv, Float8, MergedMoments, Window
from onnx_fuse.runtime import instance
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model

H200, A100, B200 = CHIPS["H200"], CHIPS["A100"], CHIPS["B200"]
OTHERS = (
    dataclasses.replace(CHIPS["L4"], arch="sm_86"), CHIPS["L4"],
    dataclasses.replace(CHIPS["4090"], arch="sm_120a"),
)  # fmt: skip
"""Chips with less shared memory, for which the best configuration of each kernel is compiled: the
code is that of sm_80, or of sm_90 where it asks for that, but configurations and registers differ.
"""

# Exceptions to "no spills", in bytes. 192 accumulators a thread leave 40 registers: a few values
# are parked around the main loop. The SIMT tile has 128 registers, so that two blocks share an SM:
# addresses are parked; at its worst (gelu, z kept, sm_80) the loop reads 18 back beside 1024 FMAs.
# The smaller tile parks one address where a column's scale and a residual follow.
# NVRTC 13.0 parks more than 13.5 does where the tile has dx's epilogue (116 and 96 bytes, sm_80).
# dw in float32 has 128 accumulators and the row sums of four columns: NVRTC 13.5 parks three
# values, 13.0 eight.
PARKED = {
    "(2, 192, 1)": 256, "simt tile=128": 176, "simt tile=64": 8, "dw_tile=(2, 128, 1)": 32,
    "simt dx_tile=128": 144, "simt dw_tile=128": 48,
}  # fmt: skip

BF16 = {"dtype": "bfloat16"}
THREE = Window((1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1), (0, 1, 1))
CONV = Conv(
    64, 1, 128, 128, (1, 28, 28), (1, 28, 28), THREE, "bfloat16", channels_last=True,
    column_moments=True,
)  # fmt: skip
FIRST = Conv(
    64, 1, 3, 64, (1, 224, 224), (1, 112, 112),
    Window((1, 7, 7), (1, 2, 2), (1, 1, 1), (0, 3, 3), (0, 3, 3)), "bfloat16",
    channels_last=True, planar=True, column_moments=True,
)  # fmt: skip
gemm = GemmProblem.of
TF32 = gemm("Gemm", m=4096, n=768, k=768, trans_b=True, math="tf32")
FLOAT8 = {"dtype": E4M3, "out_dtype": "bfloat16"}
# op problem: what of the code it reaches
APPENDS = [
    CacheAppend(
        batch=2, rows=1, heads=8, kv_heads=2, size=64, length=512, past=511, dtype="float16",
        q_strides=(512, 64, 512), k_strides=(128, 64, 128), v_strides=(128, 64, 128), half=32,
        context=512, **how,
    )
    for how in (
        {}, {"keep": True}, {"uniform": True, "columns": True, "positions": "rows"},
        {"uniform": True, "columns": True, "positions": "rows", "normed": True},
        {"keep": True, "columns": True, "positions": "rows", "placed": "each"},
        {"cache": "int8"}, {"cache": "float8_e4m3fn"},
    )
]  # fmt: skip


def attended(append: CacheAppend) -> CachedAttention:
    """Attention of the new token over a cache."""
    how = {"mask": (0, 0, 0, 1)} if append.placed else {"lengths": True}
    return CachedAttention(
        1, append.length, append.size, (append.batch, append.heads), append.dtype, append.size,
        group=append.heads // append.kv_heads, append=append, cache=append.cache,
        sink=append.cache != "", **how,
    )  # fmt: skip


PROBLEMS = (
    gemm("Gemm", m=512, n=768, k=768, **BF16),  # TMA stores, b with n contiguous
    gemm("Gemm", m=512, n=768, k=768, trans_b=True, dtype="float16", bias=True, act="gelu"),
    gemm("Gemm", m=190, n=201, k=136, trans_b=True, **BF16),  # plain stores, ragged
    gemm("Gemm", m=768, n=3072, k=8192, trans_a=True, dw=True, **BF16),  # split k, row sums
    gemm("Gemm", m=512, n=768, k=768, trans_b=True, dx=True, save_z=True, **BF16),
    gemm("Gemm", m=512, n=768, k=768, residual=True, act="silu", save_z=True, **BF16),
    gemm("Gemm", m=128, n=768, k=768, bias=True, residual="norm", dtype="float16"),
    gemm("Gemm", m=4096, n=768, k=768, bias=True, residual="norm", moments=4, **BF16),
    gemm("LayerNormGemm", m=4096, n=2304, k=768, bias=True, folded=True, parts=4, **BF16),
    gemm("Gemm", m=50176, n=512, k=128, trans_b=True, column_moments=True, **BF16),
    gemm("Gemm", m=4096, n=50257, k=768, trans_b=True, ldy=50304, exp=True, **BF16),
    gemm("Gemm", m=4096, n=50257, k=768, ldb=50304, ldy=50304, exp=True, bias=True, **BF16),
    gemm("Gemm", m=4096, n=768, k=50257, lda=50304, row_scale=True, **BF16),
    CONV,
    *(MergedMoments(m, 128) for m in (12544, 50176, 200704)),
    gemm("Gemm", m=512, n=768, k=768, dact=True, act="gelu_tanh", **BF16),
    gemm("Gemm", m=256, n=784, k=64, row_bias=True, beta=1.0, act="relu", batch=(8,),
         a_strides=(0,), dtype="float16"),
    gemm("Gemm", m=256, n=784, k=64, row_bias=True, residual=True, math="bf16x3"),
    gemm("Gemm", m=4096, n=384, k=1536, bias=True, layer_scale=True, residual=True, **BF16),
    gemm("Gemm", m=64, n=384, k=1536, bias=True, layer_scale=True, trans_b=True, **BF16),
    gemm("Gemm", m=100, n=77, k=33, batch=(2, 3), beta=1.0, c_rows=0),
    gemm("Gemm", m=256, n=512, k=512, trans_b=True, bias=True, act="gelu", save_z=True),
    gemm("Gemm", m=512, n=784, k=256, trans_a=True),
    gemm("Gemm", m=100, n=76, k=32, trans_a=True, trans_b=True, dtype="float64"),
    gemm("Gemm", m=100, n=77, k=33, dtype="int32"),
    gemm("Gemm", m=512, n=768, k=768, math="tf32"),
    TF32.replace(bias=True, act="gelu", save_z=True),
    TF32.replace(bias=True, beta=1.0, act="relu"),
    TF32.replace(dact=True, act="gelu"),
    TF32.replace(m=200, k=4096, residual=True, act="silu"),  # split k
    dataclasses.replace(CONV, dtype="float32", math="tf32", act="relu", column_moments=False),
    FIRST,
    dataclasses.replace(FIRST, column_moments=False),
    gemm("Gemm", m=512, n=768, k=768, math="bf16x6"),
    gemm("Gemm", m=512, n=768, k=768, trans_b=True, b_dtype=E4M3, **FLOAT8),
    gemm("Gemm", m=768, n=3072, k=8192, trans_b=True, b_dtype=E5M2, **FLOAT8),  # split k
    gemm("Gemm", m=8192, n=3072, k=768, trans_b=True, b_dtype=E4M3, **FLOAT8).replace(
        bias=True, act="gelu_tanh", save_z=True
    ),
    gemm("Gemm", m=512, n=784, k=784, trans_b=True, b_dtype=E4M3, **FLOAT8).replace(
        dtype=E5M2, dact=True, act="gelu"
    ),
    Float8(512, 768, "bfloat16", E5M2, 16),
    Float8(768, 3072, "float32", E4M3, 16),
    gemm("LayerNormGemm", m=8192, n=768, k=768, folded=True, bias=True, **BF16),
    gemm("LayerNormGemm", m=512, n=3072, k=768, folded=True, static_b=True, **BF16),  # a tile
    gemm("LayerNormGemm", m=512, n=768, k=768, folded=True, rms=True, **BF16),
    gemm("LayerNormGemm", m=16, n=768, k=768, bias=True, act="gelu", **BF16),
    gemm("LayerNormGemm", m=512, n=768, k=768, trans_b=True, **BF16),  # folds rows
    gemm("LayerNormGemm", m=8, n=768, k=768, trans_b=True, folded=True, **BF16),
    gemm("LayerNormGemm", m=128, n=768, k=768, folded=True, static_b=True, **BF16),
    gemm("LayerNormGemm", m=9, n=384, k=512, folded=True, rms=True, dtype="float16"),
    gemm("LayerNormGemm", m=32, n=768, k=768, folded=True, out_dtype="float32", **BF16),
    gemm("LayerNormGemm", m=512, n=768, k=768, math="bf16x3", bias=True),
    gemm("LayerNormGemm", m=256, n=512, k=512, bias=True),
    gemm("LayerNormLeafGrad", m=512, n=784, k=256, trans_a=True),
    gemm("LayerNormLeafGrad", m=77, n=50, k=33, trans_a=True, turned=True),
    gemm("LayerNormGemmGrad", m=512, n=768, k=768, act="gelu", **BF16),
    gemm("LayerNormGemmGrad", m=16, n=3072, k=768, dtype="float16", folded=True),
    gemm("LayerNormGemmGrad", m=8192, n=3072, k=768, folded=True, **BF16),  # rows of tiles
    gemm("LayerNormGemmGrad", m=8192, n=4096, k=4096, folded=True, add="here", **BF16),
    gemm("LayerNormGemmGrad", m=4096, n=4096, k=4096, act="silu", add="here", **BF16),
    gemm("LayerNormGemmGrad", m=8192, n=4096, k=4096, rms=True, folded=True, **BF16),
    gemm("LayerNormGemmGrad", m=8192, n=4096, k=1024, math="bf16x3", act="gelu"),
    gemm("LayerNormGemmGrad", m=512, n=3072, k=768, math="bf16x6", add="here"),
    gemm("LayerNormGemmGrad", m=8192, n=3072, k=768, trans_b=True, **BF16),  # column sums
    gemm("LayerNormGemmGrad", m=8192, n=3072, k=768, frozen=True, **BF16),  # dx alone
    gemm("LayerNormGemmGrad", m=100, n=77, k=33, act="gelu", **BF16),  # ragged
    gemm("LayerNormGemmGrad", m=100, n=77, k=33, act="gelu", add="here"),
    gemm("LayerNormGemmGrad", m=512, n=3072, k=768, act="gelu"),
    gemm("LayerNormGemmGrad", m=8192, n=3072, k=768, math="tf32", rms=True),
    gemm("Gemm", m=768, n=3072, k=8192, trans_a=True, dw=True),
    gemm("Gemm", m=768, n=3072, k=8192, trans_a=True, dw=True, math="tf32"),
    gemm("Gemm", m=768, n=3072, k=8192, trans_a=True, accumulate=True, **BF16),
    gemm("Gemm", m=4096, n=5632, k=1024, bias=True, act="silu", gate=True, **BF16),
    gemm("Gemm", m=8, n=768, k=768, act="gelu", gate=True, dtype="float16"),
    gemm("Gemm", m=512, n=768, k=4096, act="gelu", gate=True, math="bf16x3"),
    gemm("Gemm", m=256, n=512, k=512, bias=True, act="gelu_tanh", gate=True),
    gemm("LayerNormGemm", m=128, n=4096, k=768, folded=True, act="silu", gate=True, **BF16),
    gemm("LayerNormGemm", m=4096, n=4096, k=768, folded=True, act="gelu", gate=True, **BF16),
    gemm("LayerNormGemm", m=40, n=768, k=768, rms=True, act="silu", gate=True, **BF16),
    gemm("LayerNormGemm", m=1, n=2304, k=768, folded=True, static_b=True, dtype="float16"),
    gemm("Gemm", m=1, n=768, k=3072, bias=True, residual=True, trans_b=True, **BF16),
    Attention(1, 512, 128, (1, 8), "float16", 128, mask=(0, 0, 0, 1),
              q_strides=(1024, 128, 1024), k_strides=(2**19, 2**16, 128),
              v_strides=(2**19, 2**16, 128)),
    *(
        kind(512, 512, d, (2, 4), "bfloat16", d, window=(100, 9), mask=mask)
        for kind in (Attention, AttentionGrad)
        for d in (64, 128)
        for mask in ((), (0, 0, 512, 1), (0, 0, 0, 1))
    ),
    *(
        Attention(200, 512, d, (2, 4), "float16", d, group=2, lengths=True, guard=1, **how)
        for d in (64, 128)
        for how in ({}, {"softcap": 5.0, "window": (99, 0)})
    ),
    *(problem for append in APPENDS for problem in (append, attended(append))),
)  # fmt: skip
LIKELIEST = 2
"""Configurations of a kernel, the first by cost, that every problem compiles for an H200 where
there is a GPU. Elsewhere CI has little time: each problem compiles one for an H200, and of the
three chips only the A100 compiles every configuration."""
NUMBERS = {"CLUSTER", "GROUPS", "SHARE", "SPLIT", "STAGES"}
"""Macros that count stages of a ring, blocks of a cluster or parts of a sum. Variants that differ
only in these need the same registers within 3 (20 groups on sm_90a), so that one is compiled here;
`pytest -m gpu` compiles all."""


def launches(hw: Hardware, likeliest: int, whole: bool = True) -> dict[tuple[str, Defines], str]:
    """(source, defines) -> who asked for it: the likeliest configurations of each of PROBLEMS, and
    each configuration of each kernel once, by the problem that gives it the most macros.

    Unless `whole`, of each kernel for an operator its best configuration for such a problem alone.
    """
    found: dict[tuple[str, Defines], str] = {}
    once: dict[tuple[object, object], tuple[int, list[Launch], str]] = {}
    for problem in PROBLEMS:
        for kernel in candidates(problem.op):
            if kernel.supports(problem, hw):
                continue
            ranked = sorted(
                kernel.configs(problem, hw), key=lambda how: kernel.cost(problem, how, hw)
            )
            for place, how in enumerate(ranked[: None if whole else 1]):
                # cuBLASLt's are no sources of ours
                calls = [c for c in kernel.launch(problem, how, hw) if c.product is None]
                assert [c.waits for c in calls] == [waits(c.source) for c in calls]
                who = f"{kernel.name} {how} {problem}"
                if place < likeliest:
                    found |= {(call.source, call.defines): who for call in calls}
                macros = sum(len(call.defines) for call in calls)
                key = (kernel.name, how if whole else problem.op)
                if macros > once.get(key, (0,))[0]:
                    once[key] = macros, calls, who
    for _, calls, who in once.values():
        found = {(call.source, call.defines): who for call in calls} | found
    return found


def _dirty(item: tuple[tuple[str, Defines], str], arch: str) -> list[str]:
    variant, who = item
    parked = max((size for tile, size in PARKED.items() if tile in who), default=0)
    return [f"{who}: {found}" for found in unclean([variant], arch, parked=parked)]


def spills(variants: Mapping[tuple[str, Defines], str], hw: Hardware, threads: int) -> list[str]:
    """What is wrong with any of these variants, compiled for this chip."""
    with ThreadPoolExecutor(max_workers=threads) as pool:
        reports = pool.map(lambda item: _dirty(item, hw.arch), variants.items())
        return [line for report in reports for line in report]


@pytest.mark.parametrize("hw", [A100, H200, B200, *OTHERS], ids=lambda hw: hw.arch)
def test_every_kernel_compiles_without_spills(hw: Hardware) -> None:
    found = launches(hw, int(hw is H200), whole=hw is A100)
    unlike: dict[tuple[str, Defines], tuple[str, Defines]] = {}
    for source, defines in found:
        shape = source, tuple(macro for macro in defines if macro[0] not in NUMBERS)
        unlike.setdefault(shape, (source, defines))
    assert spills({variant: found[variant] for variant in unlike.values()}, hw, 2) == []


@pytest.mark.parametrize("hw", [A100, H200, B200], ids=lambda hw: hw.arch)
def test_the_simt_tile_at_its_worst_parks_no_more_than_its_exception_says(hw: Hardware) -> None:
    simt = next(kernel for kernel in candidates("Gemm") if kernel.name == "simt")
    problem = gemm("Gemm", m=512, n=768, k=768, bias=True, act="gelu", save_z=True)
    (call,) = simt.launch(problem, KernelConfig.of(tile=128), hw)
    assert _dirty(((call.source, call.defines), "simt tile=128"), hw.arch) == []


@pytest.mark.parametrize("name", TILES)
def test_every_tile_for_few_rows_compiles_without_spills(name: str) -> None:
    hw = H200 if TILES[name].wg else A100
    problem = gemm("LayerNormGemmGrad", m=TILES[name].am, n=3072, k=768, **BF16)
    how = next(c for c in FewRowsGrad().configs(problem, hw) if c.text("tiles") == name)
    assert unclean(FewRowsGrad().launch(problem, how, hw)[:1], hw.arch) == []


@pytest.mark.parametrize("hw", [A100, H200, B200], ids=lambda hw: hw.arch)
def test_a_kernel_of_several_calls_has_the_registers_it_needs(hw: Hardware) -> None:
    """Without a bound of one block ptxas parked some to fit more blocks on a multiprocessor."""
    model = text_model("""agraph (float16[1000,96] a, float16[1000,96] b)
        => (float16[96] y, float16[96] z) <int64[1] axes = {0}>
        { y = ReduceSum <keepdims = 0> (a, axes) z = ReduceSum <keepdims = 0> (b, axes) }""")
    rows = ((1000, 96), "float16")
    launches = [x for c in lower(model, {"a": rows, "b": rows}, hw).calls for x in c.launches]
    assert [x.entry for x in launches] == ["batched", "batched"]
    assert unclean(launches, hw.arch) == []


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("hw", [A100, H200], ids=lambda hw: hw.arch)
def test_folds_of_a_program_compile_without_spills(hw: Hardware, master: bool) -> None:
    for k, n, align in ((768, 3072, 16), (4096, 4096, 16), (768, 77, 2)):
        call = fold_columns([(k, n)] * 3, "bfloat16", hw, align=align, master=master)
        assert unclean([call], hw.arch) == []


def test_every_source_is_reached() -> None:
    reached = {source for source, _ in launches(H200, 1)}
    own = ("gemm", "norm", "layernorm_gemm")
    files = {
        f"{folder}/{path.name}" for folder in own for path in (source_root() / folder).glob("*.cu")
    }
    assert files == {source for source in reached if source.split("/")[0] in own}


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA Something New"])
def test_the_gpu_is_described_by_its_driver(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind = driver.CUdevice_attribute
    known = {
        kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
        kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
        kind.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 66,
        kind.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232448,
        kind.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: 30 << 20,
        kind.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: 2_000_000,
        kind.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: 4096,
    }
    fakes = {
        "cuInit": lambda flags: (0,),
        "cuDeviceGetAttribute": lambda attribute, device: (0, known[attribute]),
        "cuDeviceGetName": lambda length, device: (0, name.encode().ljust(length, b"\0")),
        "cuDriverGetVersion": lambda: (0, 13000),
    }
    for function, fake in fakes.items():
        monkeypatch.setattr(driver, function, fake)
    hw = Hardware.detect()
    assert (hw.name, hw.arch, hw.sm_count, hw.driver) == (name, "sm_90a", 66, 13000)
    assert (hw.smem_per_block, hw.l2_bytes) == (232448, 30 << 20)
    # half of an H200's multiprocessors; the memory's share is of known chips or of any
    assert hw.rate("bfloat16") == H200.rate("bfloat16") / 2
    share = 0.85 if "New" in name else 0.9
    assert hw.bandwidth == pytest.approx(share * 2e6 * 4096 * 250)


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((1, 28672, 4096), "cluster"), ((128, 4096, 768), "cluster"), ((4096, 5632, 1024), "wgmma")],
)
def test_a_gate_is_in_the_epilogue_of_the_kernel_for_the_product(
    shape: tuple[int, int, int], kernel: str
) -> None:
    m, n, k = shape
    problem = gemm("Gemm", m=m, n=n, k=k, act="silu", bias=True, gate=True, **BF16)
    for hw, name in ((H200, kernel), (A100, "mma")):
        choice = select("Gemm", problem.replace(static_b=True), hw)
        assert choice.kernel.name == name
    # TMA stores 64 columns of y, so tiles are 128 columns of the product or 256
    assert {how.integers("tile")[1] for how in Wgmma().configs(problem, H200)} == {128, 256}
    apart = problem.replace(gate=False)
    assert problem.bytes == apart.bytes - m * n  # half of the columns, of two bytes each


@pytest.mark.parametrize(
    "wrong",
    [{"n": 520}, {"trans_b": True}, {"save_z": True}, {"residual": True}, {"act": ""},
     {"batch": (2,)}, {"accumulate": True}, {"dact": True}],
    ids=str,
)  # fmt: skip
def test_no_kernel_serves_a_gate_with_what_its_epilogue_has_no_room_for(wrong: dict) -> None:
    problem = gemm("Gemm", m=64, n=512, k=256, act="silu", gate=True, **BF16)
    for hw in (A100, H200, B200):
        assert select("Gemm", problem, hw) is not None
        assert select("Gemm", problem.replace(**wrong), hw) is None


def test_there_is_always_a_last_legal_gemm() -> None:
    odd = gemm("Gemm", m=7, n=3, k=5, batch=(2, 3), dtype="int16", trans_a=True, align=2)
    for hw in CHIPS.values():
        choice = select("Gemm", odd, hw)
        assert choice.kernel.name == "simt"
        assert set(refusals("Gemm", odd, hw)) >= {"wgmma", "mma", "skinny"}


def test_select_prefers_force_then_record_then_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "none")
    problem = gemm("Gemm", m=8192, n=4096, k=4096, trans_b=True, **BF16)
    by_cost = select("Gemm", problem, H200)
    assert (by_cost.kernel.name, by_cost.why) == ("wgmma", "cost model")

    mma: Kernel = next(kernel for kernel in candidates("Gemm") if kernel.name == "mma")
    how = mma.configs(problem, H200)[-1]
    entry = tuning.record(problem, mma, how, 12.5, H200)
    tuning.save([("Gemm", problem, entry)], H200, tmp_path / "tuning", candidates)
    recorded = select("Gemm", problem, H200)
    assert (recorded.kernel.name, recorded.config, recorded.why) == ("mma", how, "tuning record")
    assert recorded.seconds == pytest.approx(12.5e-6)
    stale = entry | {"version": mma.version + 1}
    tuning.save([("Gemm", problem, stale)], H200, tmp_path / "tuning", candidates)
    assert getattr(select("Gemm", problem, H200), "why", "") == "cost model"

    monkeypatch.setenv(config.KERNEL.name, "Gemm=simt")
    assert getattr(select("Gemm", problem, H200), "why", "") == "forced"
    with pytest.raises(UsageError, match="needs sm_90a"):
        select("Gemm", problem, A100, {"Gemm": "wgmma"})
    with pytest.raises(UsageError, match="no kernel 'nothing'"):
        select("Gemm", problem, H200, {"Gemm": "nothing"})
    monkeypatch.setenv(config.KERNEL.name, "Gem=simt")
    with pytest.raises(UsageError, match="is called Gem; there are Gemm, LayerNormGemm"):
        select("Gemm", problem, H200)


def test_cublaslt_is_chosen_where_it_is_installed_and_cheaper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))
    problem = gemm("Gemm", m=4096, n=4096, k=4096, trans_b=True, math="tf32")
    norm = gemm("LayerNormGemm", m=4096, n=4096, k=4096, bias=True, math="tf32")
    monkeypatch.setattr(cublaslt, "find_spec", lambda name: None)
    cublaslt.version.cache_clear()
    assert 'pip install ".[cublaslt]"' in refusals("Gemm", problem, H200)["cublaslt"]
    assert getattr(select("Gemm", problem, H200), "kernel", None) is not None

    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    for of in (problem, norm, problem.replace(beta=2.0), problem.replace(batch=(8,))):
        choice = select(of.op, of, H200)
        assert choice.kernel.name.endswith("cublaslt")
        call = choice.launch(of, H200)[-1]
        assert call.product.op == "Gemm"
        assert choice.workspace(of, H200) >= 32 << 20
    # forced, it still takes only the epilogues that it has
    text = "agraph (float[8,4] x, float[4,6] w) => (float[8,6] y) { p = MatMul(x, w) y = Relu(p) }"
    shapes = {"x": ((8, 4), "float32"), "w": ((4, 6), "float32")}
    assert len(lower(text_model(text), shapes, H200, prefs={"Gemm": "cublaslt"}).calls) == 2
    kernel = cublaslt.CublasLt()
    assert kernel.version == 130100  # records are of one version
    bf16 = problem.replace(dtype="bfloat16", m=8192)
    assert getattr(select("Gemm", bf16, H200), "kernel", None).name == "wgmma"


@pytest.mark.parametrize(
    ("attrs", "reason"),
    [
        ({"act": "gelu"}, "epilogue has no act"),  # theirs is the tanh form
        ({"act": "relu"}, "epilogue has no act"),  # some of theirs give 0 for NaN
        ({"save_z": True}, "epilogue has no save_z"),
        ({"dtype": "float64", "bias": True}, "bias of float64"),
        ({"dtype": "float16", "out_dtype": "float32", "bias": True}, "bias of float16"),
        ({"dtype": "float64", "out_dtype": "float32"}, "float64 -> float32"),
        ({"dtype": "int32"}, "int32 -> int32"),
        ({"beta": 1.0, "c_rows": 0}, "broadcast"),
        ({"batch": (2, 3)}, "2 batch dims"),
    ],
)
def test_cublaslt_refuses_what_it_would_do_otherwise(
    monkeypatch: pytest.MonkeyPatch, attrs: dict[str, object], reason: str
) -> None:
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    problem = gemm("Gemm", m=64, n=64, k=64).replace(**attrs)  # type: ignore[arg-type]
    assert re.search(reason, cublaslt.CublasLt().supports(problem, H200) or "")


def test_a_torn_record_file_reads_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))
    problem = gemm("Gemm", m=64, n=64, k=64)
    path = tuning.save([], H200, tmp_path / "tuning", candidates)
    path.write_text('{"Gemm |')
    assert getattr(select("Gemm", problem, H200), "why", "") == "cost model"


SOURCE = 'extern "C" __global__ void f(T* x) { x[threadIdx.x] *= 2; }\n'


@pytest.mark.parametrize("damage", [b"", b"torn", b"\0" * 64], ids=["empty", "short", "zeros"])
def test_a_corrupted_cubin_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))
    cubin = nvrtc.compile(SOURCE, (("T", "int"),), "sm_80")
    assert cubin[:4] == b"\x7fELF"
    [entry] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert cubin in entry.read_bytes()
    entry.write_bytes(damage)
    assert nvrtc.compile(SOURCE, (("T", "int"),), "sm_80") == cubin
    assert cubin in entry.read_bytes()


def test_a_kernel_in_the_cache_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))
    cubin = nvrtc.compile(SOURCE, (("T", "int"),), "sm_80")
    code = (
        "import sys\n"
        "from onnx_fuse.cuda import nvrtc\n"
        f"cubin = nvrtc.compile({SOURCE!r}, (('T', 'int'),), 'sm_80')\n"
        "print(len(cubin), *({'cuda.core', 'cuda.bindings.nvrtc'} & set(sys.modules)))\n"
    )
    assert python(code).split() == [str(len(cubin))]


def test_a_cache_that_cannot_be_written_is_said_once_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="compiled kernels are not cached"):
        assert nvrtc.compile(SOURCE, (("T", "int"),), "sm_80")[:4] == b"\x7fELF"


def test_every_kernel_waits_for_the_launch_before() -> None:
    sources = [p.relative_to(source_root()).as_posix() for p in source_root().rglob("*.cu")]
    assert len(sources) > 30
    assert [s for s in sources if not waits(s)] == []
    # loads through such a pointer go ahead of the wait
    texts = [path.read_text() for path in source_root().rglob("*.cu*")]
    assert not any("* __restrict__" in text for text in texts)
    step = ("gemm/fma_sm80.cu", "gemm/simt.cu", "layernorm/row.cu", "layernorm/grad.cu",
            "reduce/reduce.cu", "loss/cross_entropy.cu")  # fmt: skip
    assert {waits(source) for source in step} == {"first"}
    assert waits("gemm/cluster_sm90.cu") == "later"  # it reads weights ahead
    kernel = '#include "common.cuh"\nextern "C" __global__ void set(int* x) { *x = 1; y(); WAIT }\n'
    assert waits(kernel) == ""  # to be launched when all before it is done
    late = kernel.replace("WAIT", "after_previous_launch();")
    assert (waits(late), waits(late.replace("*x = 1; y();", ""))) == ("later", "first")


@pytest.mark.parametrize("level", [0, 2])
def test_the_step_of_a_perceptron_is_few_launches_without_spills(level: int) -> None:
    """LayerNorm, Gemm and GELU forward: two launches a layer; three backward, dW besides.

    The first layer's x needs no gradient: one product makes all of its weights'.
    """
    perceptron = mlp.build(mlp.Config((64, 64, 64, 10)))
    model, spec = training_model(
        perceptron, loss="cross_entropy", optimizer=optim.AdamW(), level=level, fused=True
    )
    state = {s.next: s.name for s in spec.states if s.next}
    calls = lowered(model, size=32, state=state).calls
    names = [call.kernel for call in calls]
    assert sum(name == "LayerNormalization" for name in names) == 2
    assert "LayerNormalization+Gemm" in names or "LayerNormalization+MatMul" in names
    assert not any(name.startswith("Gelu") for name in names)
    assert sum("LayerNormGrad+" in name for name in names) == 2  # times gelu'
    assert "LayerNormGrad x2" in names  # the sums of all, in one launch
    assert sum(name.startswith("LayerNormLeafGrad") for name in names) == 1
    # y and dx of the last have no launch
    assert sum(isinstance(call.problem, GemmProblem) for call in calls) == 6
    assert len(names) <= 30
    assert unclean(x for call in calls for x in call.launches) == []


def test_a_compile_error_names_the_arch_and_the_line() -> None:
    with pytest.raises(DeviceError, match=r"(?s)sm_90a -DN=2.*undefined"):
        nvrtc.resources('extern "C" __global__ void bad() { undefined(N); }\n', (("N", "2"),))


DISASSEMBLER = '#!/bin/sh\nfor last; do :; done\necho "SASS of $(basename "$last")"\n'


@pytest.mark.parametrize("tool", ["nvdisasm", "cuobjdump", ""])
def test_dump_writes_source_cubin_and_sass_of_what_is_compiled_or_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(
        nvrtc.shutil, "which", lambda name: str(tmp_path / name) if name == tool else None
    )
    if tool:
        (tmp_path / tool).write_text(DISASSEMBLER)
        (tmp_path / tool).chmod(0o755)
    nvrtc.disassembler.cache_clear()
    cubins = set()
    for folder in ("compiled", "loaded"):
        monkeypatch.setenv(config.DUMP.name, str(tmp_path / folder))
        cubins.add(nvrtc.compile(SOURCE, (("T", "int"),), "sm_80"))
        found = {path.suffix: path for path in (tmp_path / folder / "kernels").iterdir()}
        assert set(found) == {".cu", ".cubin"} | ({".sass"} if tool else set())
        assert found[".cu"].read_text() == "#define T int\n" + SOURCE
        assert {found[".cubin"].read_bytes()} == cubins
        if tool:
            assert found[".sass"].read_text() == f"SASS of {found['.cubin'].name}\n"
    told = capsys.readouterr().err
    assert told.count("no SASS: neither nvdisasm nor cuobjdump") == (0 if tool else 1)
    nvrtc.disassembler.cache_clear()


def test_dump_writes_model_and_program_of_each_shape(tmp_path: Path) -> None:
    model = text_model("agraph (float[N] x) => (float[N] y) { y = Relu(x) }")
    for n in (4, 8):
        program = lower(model, {"x": ((n,), "float32")}, H200)
        instance.dump(tmp_path, model, str(program))
    programs = sorted(tmp_path.glob("*.program.txt"))
    for n, path in zip((4, 8), programs, strict=True):
        assert f"float32[{n}]" in path.read_text()
    assert all(read(path) is not None for path in tmp_path.glob("*.model.onnx"))
    assert len(list(tmp_path.iterdir())) == 4


def test_records_are_frozen_and_picklable() -> None:
    problem = PROBLEMS[1]
    kernel = candidates("Gemm")[1]
    how = kernel.configs(problem, H200)[0]
    for value in (problem, how, H200, *kernel.launch(problem, how, H200)):
        assert pickle.loads(pickle.dumps(value)) == value
        assert hash(value) == hash(pickle.loads(pickle.dumps(value)))
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.name = "other"  # type: ignore[union-attr,misc]


@pytest.mark.parametrize("hw", [H200, CHIPS["L4"]], ids=lambda hw: hw.arch)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_launches_stay_within_the_block_limits(problem: GemmProblem, hw: Hardware) -> None:
    for kernel in candidates(problem.op):
        if kernel.supports(problem, hw):
            continue
        for how in kernel.configs(problem, hw):
            assert kernel.cost(problem, how, hw) > 0
            assert isinstance(how, KernelConfig)
            for call in kernel.launch(problem, how, hw):
                assert isinstance(call, Launch)
                assert call.smem <= hw.smem_per_block
                assert call.block[0] <= 1024
                assert all(0 < size < 2**31 for size in call.grid)
                assert all(size < 65536 for size in call.grid[1:])
                assert call.grid[0] % call.cluster == 0
