"""Problems of every operator: passes rewrite them, kernels are chosen last and may be forced."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cuda.bindings import driver
from support import waits

from onnx_fuse import config, kernels
from onnx_fuse.cuda.source import source_text
from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import MODULES, candidates, select, site, tuning
from onnx_fuse.kernels.costs import pays, seconds, total
from onnx_fuse.kernels.gemm_sm90 import STREAM
from onnx_fuse.kernels.rule_based import HeuristicKernel
from onnx_fuse.lower import walk
from onnx_fuse.program import passes
from onnx_fuse.program.call import Call, Program, Tensor
from onnx_fuse.program.data_movement import PointwiseMany
from onnx_fuse.program.expression import Expression, Operation
from onnx_fuse.program.problem import CHIPS, GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.problems import Conv, Norm, NormGrad, Softmax, Window
from onnx_fuse.runtime.specialize import Specializer

H200 = CHIPS["H200"]


def lowered(text: str, dtype: str = "float32", **options: Any) -> Program:
    """The program of a graph in ONNX text, whose inputs have sizes."""
    model = text_model(text)
    shapes = {v.name or "": (tuple(v.shape or ()), dtype) for v in model.graph.inputs}
    return walk.lower(model, shapes, H200, **options)


def test_nothing_is_launched_before_the_last_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until `select_kernels` passes have problems to rewrite, and no launches to read."""
    before: list[Call] = []

    def look(calls: list[Call], *rest: object) -> list[Call]:
        before.extend(calls)
        return calls_of(calls, *rest)

    calls_of = passes.select_kernels
    monkeypatch.setattr(passes, "select_kernels", look)
    lowered(
        "agraph (float[64,256] x, float[256] g, float[256] b, float[256,512] w) "
        "=> (float[64,512] y) { n = LayerNormalization(x, g, b) t = Tanh(n) "
        "p = MatMul(t, w) y = Softmax(p) }"
    )
    assert [c.problem.op for c in before[:3] if c.problem] == ["Norm", "Gemm", "Softmax"]
    assert not any(call.launches for call in before[:3])


TAIL = "agraph (float[9,64] x, float[64] g, float[64] b) => (float[9,64] y) "
CONV = "agraph (float16[2,16,12,12] x, float16[32,16,3,3] w) => (float16[2,32,10,10] y) "
FORCED = [
    # graph, type, operator, kernel that is forced, the kernel that is chosen without
    ("agraph (float[9,64] x) => (float[9,64] y) { y = Softmax(x) }", "float32",
     "Softmax", "column", "row"),
    (CONV + "{ y = Conv(x, w) }", "float16", "Conv", "implicit", "wgmma"),
    ("agraph (float[64,96] x) => (float[96,64] y) { y = Transpose(x) }", "float32",
     "Pointwise", "generated", "tiles"),
    ("agraph (float[9,64,5] x) => (float[9,5,64] y) { y = Transpose <perm = [0,2,1]> (x) }",
     "float32", "Pointwise", "generated", "runs"),
    ("agraph (float[4,3000] x) => (float[4,5] y, int64[4,5] i) <int64[1] k = {5}> "
     "{ y, i = TopK(x, k) }", "float32", "TopK", "sort", "block"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "dtype", "op", "kernel", "usual"), FORCED)
def test_a_kernel_is_forced_and_explained(
    text: str, dtype: str, op: str, kernel: str, usual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sites() -> list[str]:
        program = lowered(text, dtype)
        return [site(c, H200).kernel for c in program.calls if c.problem and c.problem.op == op]

    assert sites() == [usual]
    monkeypatch.setenv(config.KERNEL.name, f"{op}={kernel}")
    assert sites() == [kernel]


def test_a_forced_kernel_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.KERNEL.name, "Norm=column")
    with pytest.raises(UsageError, match="Norm has no kernel 'column'; it has parts, row"):
        lowered(TAIL + "{ y = LayerNormalization(x, g, b) }")


@pytest.mark.parametrize("op", sorted(MODULES))
def test_each_operator_has_candidates(op: str) -> None:
    """Where a rule chooses, the last one's default configuration is the rule's own."""
    kernels = candidates(op)
    assert kernels
    rules = [isinstance(kernel, HeuristicKernel) for kernel in kernels]
    assert all(rules) or not any(rules)
    assert len({kernel.name for kernel in kernels}) == len(kernels)


WINDOW = Window((1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1), (0, 1, 1))
CHOICES = [
    (Softmax(4096, 768, 1, "float16"), {"team": 64}, "TEAM", "64"),
    (Norm(4096, 768, "float16", "float16"), {"team": 64}, "TEAM", "64"),
    (NormGrad(4096, 768, "float16", "float16", "float32", 64), {"team": 128}, "TEAM", "128"),
    (Conv(8, 1, 64, 64, (1, 28, 28), (1, 28, 28), WINDOW, "float16"), {"bm": 128, "split": 4},
     "BM", "128"),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "how", "macro", "value"), CHOICES)
def test_a_tuning_record_sets_the_configuration(
    problem: Any, how: Mapping[str, Any], macro: str, value: str, tmp_path: Any, monkeypatch: Any
) -> None:
    """The record's configuration is one of the candidate's, and the launch has it."""
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))
    before = select(problem.op, problem, H200)
    assert before.why == "its rule"
    record = tuning.record(problem, before.kernel, KernelConfig.of(**how), 5.0, H200)
    tuning.save([(problem.op, problem, record)], H200, tmp_path / "tuning", candidates)
    after = select(problem.op, problem, H200)
    assert after.why == "tuning record"
    main = next(x for x in after.launch(problem, H200) if macro in dict(x.defines))
    assert dict(main.defines)[macro] == value


def test_a_timing_is_not_compared_with_a_guess(tmp_path: Any, monkeypatch: Any) -> None:
    """A record of one of two ways, ten times its prediction, does not decide for both."""
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))
    plain = GemmProblem.of("Gemm", m=640, n=320, k=192, dtype="float16")
    ways = (plain, plain.replace(bias=True))
    before = [total((way,), H200) for way in ways]
    choice = select("Gemm", plain, H200)
    record = tuning.record(plain, choice.kernel, choice.config, 1e7 * choice.seconds, H200)
    tuning.save([("Gemm", plain, record)], H200, tmp_path / "tuning", candidates)
    assert seconds(plain, H200) == pytest.approx(10 * choice.seconds, rel=1e-2)
    assert [total((way,), H200) for way in ways] == before


def test_an_epsilon_does_not_part_tuning_records() -> None:
    keys = {tuning.key("Norm", Norm(8, 64, "float16", "float16", epsilon=e)) for e in (0.1, 1e-5)}
    assert len(keys) == 1


def test_numbers_that_all_elements_share_are_not_counted_as_moved() -> None:
    one, x = Tensor(0, "float32", (256, 64), (0, 0)), Tensor(1, "float32", (256, 64), (64, 1))
    scaled = Expression(2, (), (Operation("Mul", "float32", (0, 1)),), (2,))
    many = PointwiseMany(scaled, (one, None), (((one, x), (x,)),) * 3)
    assert many.bytes == 3 * 2 * 4 * 256 * 64


@pytest.mark.parametrize(
    ("problem", "shared"),
    [
        (GemmProblem.of("Gemm", m=3072, n=768, k=12608, trans_a=True, dtype="bfloat16"), True),
        (GemmProblem.of("Gemm", m=768, n=768, k=16384, trans_a=True, dtype="bfloat16"), False),
        (GemmProblem.of("Gemm", m=3072, n=768, k=12608, dtype="bfloat16"), False),
    ],
    ids=["96 tiles", "24 tiles", "no gradient of a weight"],
)
def test_tiles_that_leave_multiprocessors_idle_share_their_steps(
    problem: GemmProblem, shared: bool
) -> None:
    choice = select("Gemm", problem, H200)
    assert (choice.config.integer("splits") == STREAM) == shared
    launch = choice.launch(problem, H200)[0]
    assert bool(launch.sync) == shared
    assert launch.grid[0] <= H200.sm_count


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("chip", ["H200", "A100"])
def test_a_kernel_that_supports_a_product_has_a_configuration(dtype: str, chip: str) -> None:
    """Its sizes may be odd, small, or fit no tile: what is refused is refused by `supports`."""
    empty = []
    for m, n, k in itertools.product((1, 3, 64, 513), (1, 2, 7, 8, 1000), (1, 8, 24, 768)):
        for trans_b, act in itertools.product((False, True), ("", "sigmoid")):
            problem = GemmProblem.of(
                "Gemm", m=m, n=n, k=k, dtype=dtype, trans_b=trans_b, lda=k,
                ldb=k if trans_b else -(-n // 8) * 8, align=16, **({"act": act} if act else {}),
            )  # fmt: skip
            for kernel in candidates("Gemm"):
                refused = kernel.supports(problem, CHIPS[chip])
                if refused is None and not kernel.configs(problem, CHIPS[chip]):
                    empty.append(f"{kernel.name}: {problem}")
    assert not empty


def test_what_costs_less_pays() -> None:
    gemm = GemmProblem.of("Gemm", m=64, n=10, k=64, dtype="float32")
    norm = Norm(64, 64, "float32", "float32")
    both = Norm(64, 64, "float32", "float32", columns=10)
    assert pays((norm, gemm), (both,), H200)  # a launch less
    assert not pays((norm,), (norm, gemm), H200)
    large = GemmProblem.of("Gemm", m=8192, n=16, k=768, dtype="float32")
    rows = Norm(8192, 768, "float32", "float32")
    again = Norm(8192, 768, "float32", "float32", columns=16)
    assert not pays((rows, large), (again,), H200)  # each row reads the weights
    assert seconds(Norm(1, 40000, "float32", "float32", columns=16), H200) == float("inf")


def test_a_rule_keeps_no_class_of_an_open_size() -> None:
    """Kernels by rule look at sizes themselves: one program for batches of many classes."""
    model = text_model(
        "agraph (float[B,768] x, float[768] g, float[768] b) => (float[B,768] y) "
        "{ n = LayerNormalization(x, g, b) y = Softmax(n) }"
    )
    model.graph.inputs[0].shape = ir.Shape(["B", 768])
    specializer = Specializer(model, H200)
    grids = []
    for rows in (1100, 2000, 4001):
        shapes = {"x": ((rows, 768), "float32"), "g": ((768,), "float32"), "b": ((768,), "float32")}
        program = specializer.of(shapes).program
        grids.append([call.launches[0].grid[0] for call in program.calls])
    assert specializer.traced == 1
    assert all(np.diff([g[0] for g in grids]) > 0)


def test_what_candidates_declare_of_their_kernels_is_so() -> None:
    common, checked = source_text("common.cuh"), 0
    for kernel in (kernel for op in MODULES for kernel in candidates(op)):
        text = (
            source_text(kernel.source).replace(common, "")
            if "source" in vars(kernel) or vars(type(kernel)).get("source")
            else ""
        )
        for axis in getattr(kernel, "free_axes", "") if text else "":
            entries = text.partition("__global__")[2]  # behind what its headers say of others
            assert "__grid_constant__" not in entries, kernel.source
            assert f"blockIdx.{axis}" not in text, kernel.source
            assert f"gridDim.{axis}" not in text, kernel.source
            checked += 1
        if text and kernel.source.endswith(".cu"):
            assert kernel.waits == waits(kernel.source), kernel.source
            assert bool(kernel.early) == ("if (NEXT_ALONE)" in text), kernel.source
    assert checked > 40


def test_a_lowering_chooses_once_for_what_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one shape ask once, forced kernels are other questions, and nothing outlives it."""
    asked: list[object] = []
    choose = kernels._select

    def chosen(op: str, *rest: Any) -> Any:
        asked.append((op, *rest))
        return choose(op, *rest)

    monkeypatch.setattr(kernels, "_select", chosen)
    problem = GemmProblem.of("Gemm", m=64, n=64, k=64, lda=64, ldb=64, align=16)
    for rounds in (1, 2):
        with kernels.same_choices():
            first = select("Gemm", problem, H200)
            assert select("Gemm", problem, H200) is first
            forced = select("Gemm", problem, H200, {"Gemm": "simt"})
            assert forced.kernel.name == "simt"
        assert len(asked) == 2 * rounds
    select("Gemm", problem, H200)
    select("Gemm", problem, H200)
    assert len(asked) == 6


@pytest.mark.parametrize(
    ("shape", "kind", "kernels", "apart"),
    [
        ((8, 12, 512, 64), "float", "", True),
        ((8, 12, 512, 64), "float", "Sdpa=simt", False),
        ((2, 3, 40, 64), "float", "", False),
        ((64, 32, 2048, 64), "float", "", False),
        ((8, 12, 512, 64), "float16", "", False),
    ],
    ids=["float32", "asked for", "small", "32 GiB of scores", "float16"],
)
def test_float32_attention_is_one_call_where_that_is_faster(
    shape: tuple[int, ...], kind: str, kernels: str, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.KERNEL.name, kernels)
    program = lowered(
        f"agraph ({kind}{list(shape)} q, {kind}{list(shape)} k, {kind}{list(shape)} v)"
        f" => ({kind}{list(shape)} y) {{ y = onnx_fuse.Sdpa <scale = 0.125> (q, k, v) }}",
        dtype="float32" if kind == "float" else kind,
    )
    names = [call.kernel for call in program.calls]
    assert ("Sdpa" in names, "MatMul" in names) == (not apart, apart)


@pytest.mark.parametrize(
    ("name", "cc", "sms", "clock", "bus", "l2", "bandwidth", "bf16"),
    [
        ("NVIDIA H200", 90, 132, 3201, 6144, 60, 4.3, 790),
        ("NVIDIA H100 80GB HBM3", 90, 132, 2619, 5120, 50, 3.0, 760),
        ("NVIDIA H100 PCIe", 90, 114, 1593, 5120, 50, 1.835, 656),  # fewer SMs, slower memory
        ("NVIDIA A100-SXM4-40GB", 80, 108, 1215, 5120, 40, 1.4, 260),
        ("NVIDIA H200 MIG 1g.18gb", 90, 16, 0, 0, 8, 4.3, 96),  # the driver gives no clock
        ("NVIDIA H20", 90, 78, 2619, 6144, 60, 3.42, 467),  # in no table: a part of the H200
    ],
)
def test_a_card_has_no_more_than_its_own(
    name: str, cc: int, sms: int, clock: int, bus: int, l2: int, bandwidth: float, bf16: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    known = {
        "COMPUTE_CAPABILITY_MAJOR": cc // 10, "COMPUTE_CAPABILITY_MINOR": cc % 10,
        "MULTIPROCESSOR_COUNT": sms, "MEMORY_CLOCK_RATE": 1000 * clock,
        "GLOBAL_MEMORY_BUS_WIDTH": bus, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
        "L2_CACHE_SIZE": l2 << 20,
    }  # fmt: skip

    def attribute(kind: driver.CUdevice_attribute, device: int) -> tuple[int, int]:
        return 0, known[kind.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    monkeypatch.setattr(driver, "cuInit", lambda flags: (0,))
    monkeypatch.setattr(driver, "cuDeviceGetName", lambda n, i: (0, name.encode() + bytes(9)))
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", attribute)
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 13000))
    hw = Hardware.detect(0)
    assert (hw.name, hw.arch, hw.sm_count) == (name, "sm_90a" if cc == 90 else f"sm_{cc}", sms)
    assert hw.l2_bytes == l2 << 20
    assert hw.bandwidth == pytest.approx(bandwidth * 1e12, rel=0.01)
    assert hw.rate("bfloat16") == pytest.approx(bf16 * 1e12, rel=0.01)
