"""A head's product and its cross-entropy as one operator: recognized, differentiated, in chunks."""

import numpy as np
import onnx_ir as ir
import pytest
from compiled import unclean
from head_rows import (
    CLASSES,
    HEAD,
    HEADS,
    LOSS,
    NAMES,
    WIDTH,
    assert_near,
    feeds_of,
    gradient_of,
    head_feeds,
    head_model,
    truth,
)
from lowering import program_of
from support import assert_same, normal, says, step_results, with_weights

from onnx_fuse import autodiff, optim, rewrite
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import candidates
from onnx_fuse.kernels.gemm_sm90 import Wgmma
from onnx_fuse.kernels.loss import Chunk, Exp, Label
from onnx_fuse.lower import linear_cross_entropy, walk
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.losses import CrossEntropyChunk, ExpRows, LabelScore
from onnx_fuse.program.problem import CHIPS, GemmProblem, KernelConfig
from onnx_fuse.runtime.specialize import Specializer
from onnx_fuse.training.step import training_model


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("head", HEADS)
def test_chunks_of_rows_make_the_loss_and_its_gradients(
    head: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 256 * 2176 * 4)
    model, feeds, weight = head_model(head, kind), head_feeds(head, kind), HEADS[head][0]
    program = program_of(model, feeds)
    problems = [c.problem for c in program.calls if isinstance(c.problem, CrossEntropyChunk)]
    assert len(problems) == (3 if kind == "float" else 2)
    assert {p.stride for p in problems} == {2112}
    assert not program.fallbacks
    assert_near(interpret(program, feeds, {}), truth(feeds, weight), kind)


@pytest.mark.parametrize("head", HEADS)
def test_products_take_exponentials_in_place_of_a_pass(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are not rounded before their exp: half the error of the other way."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 256 * 2176 * 4)
    errors = []
    for pays in (False, True):
        monkeypatch.setattr(linear_cross_entropy, "pays", lambda *_, pays=pays: pays)
        model, feeds = head_model(head, "bfloat16"), head_feeds(head, "bfloat16")
        program = program_of(model, feeds)
        kinds = [type(call.problem) for call in program.calls]
        assert (kinds.count(ExpRows), kinds.count(LabelScore)) == ((2, 1) if pays else (0, 0))
        assert kinds.count(CrossEntropyChunk) == (0 if pays else 2)
        assert not program.fallbacks
        got, want = interpret(program, feeds, {}), truth(feeds, HEADS[head][0])
        assert_near(got, want, "bfloat16")
        errors.append(
            {name: np.linalg.norm(a.astype(np.float64) - want[name]) for name, a in got.items()}
        )
    for name in ("x.grad", "w.grad"):
        assert errors[1][name] < 0.7 * errors[0][name], name


GPT2 = GemmProblem.of("Gemm", m=4096, n=50257, k=768, trans_b=True, dtype="bfloat16", ldy=50304)


def big_head(dtype: str, biased: bool) -> tuple[ir.Model, dict]:
    """The loss of a head of GPT-2's size and its gradients, and the types of its weights."""
    product = "l = Gemm <transB = 1> (x, w, c)" if biased else HEAD
    bias = f", {dtype}[50257] c" if biased else ""
    model = gradient_of(
        f"({dtype}[M, 768] x, {dtype}[50257, 768] w{bias}, int64[M] labels) => (float loss) "
        f"{{ {product} z = Cast <to = 1> (l) {LOSS} }}",
        ["x", "w", *(["c"] if biased else [])],
    )
    types = {"w": ((50257, 768), dtype), "loss.grad": ((), "float32")}
    return model, types | ({"c": ((50257,), dtype)} if biased else {})


@pytest.mark.parametrize(
    ("chip", "dtype", "biased", "prefs", "chosen"),
    [
        ("H200", "bfloat16", False, {}, ExpRows),
        ("H200", "bfloat16", False, {"CrossEntropyChunk": "block"}, CrossEntropyChunk),
        ("H200", "bfloat16", True, {}, ExpRows),
        ("H200", "float16", False, {}, CrossEntropyChunk),  # exponentials need bfloat16's exponents
        ("A100", "bfloat16", False, {}, CrossEntropyChunk),
        ("B200", "bfloat16", False, {}, CrossEntropyChunk),
    ],
)
def test_where_products_take_exponentials(
    chip: str, dtype: str, biased: bool, prefs: dict[str, str], chosen: type
) -> None:
    model, types = big_head(dtype, biased)
    shapes = types | {"x": ((4096, 768), dtype), "labels": ((4096,), "int64")}
    program = walk.lower(model, shapes, CHIPS[chip], prefs=prefs)
    kinds = {type(call.problem) for call in program.calls} & {ExpRows, CrossEntropyChunk}
    assert kinds == {chosen}


@pytest.mark.parametrize("biased", [False, True])
def test_another_number_of_rows_keeps_the_program(biased: bool) -> None:
    model, types = big_head("bfloat16", biased)
    shapes = [types | {"x": ((m, 768), "bfloat16"), "labels": ((m,), "int64")}
              for m in (5000, 5011, 4999)]  # fmt: skip
    specializer = Specializer(model, CHIPS["H200"])
    made = [specializer.of(each) for each in shapes]
    assert specializer.traced == 1
    assert ExpRows in {type(call.problem) for call in made[-1].program.calls}
    again = Specializer(model, CHIPS["H200"]).of(shapes[-1])
    assert repr(again.program) == repr(made[-1].program)


REFUSED_EXP = [
    {"n": 50257, "ldy": 0}, {"dtype": "float16"}, {"dtype": "float32"}, {"out_dtype": "float32"},
    {"batch": (2,)}, {"accumulate": True}, {"save_z": True}, {"act": "gelu"}, {"alpha": 2.0},
    {"row_scale": True}, {"residual": True}, {"row_bias": True},
]  # fmt: skip


def test_one_candidate_takes_exponentials() -> None:
    hw = CHIPS["H200"]
    full = GPT2.replace(exp=True, bias=True)
    assert [k.name for k in candidates("Gemm") if k.supports(full, hw) is None] == ["wgmma"]
    assert {how.integers("tile")[1] for how in Wgmma().configs(full, hw)} == {192}
    assert {how.integer("splits") for how in Wgmma().configs(full, hw)} == {1}
    for changes in REFUSED_EXP:
        assert all(kernel.supports(full.replace(**changes), hw) for kernel in candidates("Gemm"))
    scaled = GPT2.replace(row_scale=True)
    assert [k.name for k in candidates("Gemm") if k.supports(scaled, hw) is None] == ["wgmma"]
    for changes in ({"row_bias": True}, {"layernorm": True}, {"residual": "norm"}, {"dx": True}):
        assert all(kernel.supports(scaled.replace(**changes), hw) for kernel in candidates("Gemm"))


@pytest.mark.parametrize("weighted", [False, True])
def test_smoothing_and_weights_of_classes(weighted: bool) -> None:
    """The attributes that no rule sets: of a node in a file."""
    feeds = feeds_of("float", "VK", **({"each": (CLASSES,)} if weighted else {}))
    each = "each = Constant <value = float {1}> ()"
    if weighted:
        feeds["each"] = np.abs(feeds["each"])
        each = ""
    model = text_model(
        f"""agraph (float[M, {WIDTH}] x, float[{CLASSES}, {WIDTH}] w, int64[M] labels
        {f", float[{CLASSES}] each" if weighted else ""}) => (float loss)
        {{ none = Constant <value = float {{-0.0}}> () {each}
           sum, total = onnx_fuse.LinearCrossEntropy <ignore_index = -100, label_smoothing = 0.2>
             (x, w, none, labels, each)
           loss = Div (sum, total) }}"""
    )
    model = autodiff.gradient(model, wrt=["x", "w"])
    feeds["loss.grad"] = np.array(1, np.float32)
    got = interpret(program_of(model, feeds), feeds, {})
    assert_near(got, truth(feeds, "VK", 0.2), "float")


REFUSED = {
    "the scores are an output": (HEAD, "(float loss, float[M, V] l)", "other-readers: the scores"),
    "the scores have another reader": (
        f"{HEAD} top = ReduceMax <keepdims = 0> (l)",
        "(float loss, float top)",
        "other-readers: the scores",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_product_whose_scores_are_wanted_stays(case: str) -> None:
    nodes, outputs, reason = REFUSED[case]
    model = text_model(
        f"agraph (float[M, {WIDTH}] x, float[{CLASSES}, {WIDTH}] w, int64[M] labels) => {outputs} "
        f"{{ {nodes} {LOSS.replace('z', 'l')} }}"
    )
    report = rewrite.optimize(model)
    assert "LinearCrossEntropy" not in report.fusions
    assert says(report, reason)


LM = f"""agraph (int64[B, T] ids, float[{CLASSES}, {WIDTH}] table, float[{WIDTH}] g,
  float[{WIDTH}] b) => (float[B, T, {CLASSES}] logits)
{{ x = Gather (table, ids) n = LayerNormalization (x, g, b)
   t = Transpose <perm = [1, 0]> (table) logits = MatMul (n, t) }}"""


def language_model() -> ir.Model:
    rng = np.random.default_rng(0)
    return with_weights(
        text_model(LM), lambda v: rng.standard_normal(v.shape.numpy()).astype(np.float32)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_training_step_on_a_gpu_has_it_and_an_evaluation_gives_scores(precision: str) -> None:
    options = {"loss": "cross_entropy", "optimizer": optim.AdamW(), "level": 2, "fused": True}
    counts = {}
    for mode in ("update", "evaluate"):
        model, _ = training_model(language_model(), mode=mode, precision=precision, **options)
        counts[mode] = [n.op_type for n in model.graph if "Entropy" in n.op_type]
    assert counts == {
        "update": ["LinearCrossEntropy_gx_gw_gb"],
        "evaluate": ["SoftmaxCrossEntropyLoss"],
    }


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("classes", [CLASSES, 7])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("labels", [[0, 3, -1, 6, 2, -1], [-1] * 6], ids=["some", "no row counts"])
def test_a_smoothed_loss_takes_over_many_scores(
    labels: list[int], weighted: bool, classes: int, reduction: str
) -> None:
    """The step with our operators gives the losses and weights of the one without them."""
    text = f"""agraph (float[M, 4] x, float[4, {classes}] w) => (float[M, {classes}] scores)
        {{ scores = MatMul (x, w) }}"""
    rng = np.random.default_rng(3)
    options = {"ignore_index": -1, "label_smoothing": 0.2, "reduction": reduction}
    if weighted:
        options["weight"] = rng.random(classes).astype(np.float32)
    feeds = normal({"x": (6, 4), "w": (4, classes)}) | {"labels": np.array(labels)}
    found = []
    for fused in (False, True):
        model = with_weights(text_model(text), {"w": feeds["w"]})
        step, spec = training_model(
            model, loss="cross_entropy", loss_options=options, optimizer=optim.SGD(lr=0.5),
            level=2, fused=fused,
        )  # fmt: skip
        kinds = {n.op_type for n in step.graph}
        assert ("LinearCrossEntropy_gx_gw_gb" in kinds) == (fused and classes == CLASSES)
        found.append(step_results(step, spec, feeds))
    assert_same(*found, rtol=2e-5, atol=1e-6)
    if max(labels) < 0:
        np.testing.assert_array_equal(found[0][1], feeds["w"])


@pytest.mark.parametrize("kind", ["float", "bfloat16"])
def test_where_no_row_counts_the_loss_is_nan_and_its_gradients_are_zero(kind: str) -> None:
    """As PyTorch has it: the count of 0 that the loss is divided by reaches no gradient."""
    feeds = head_feeds("a Gemm with a bias", kind)
    feeds["labels"] = np.full_like(feeds["labels"], -100)
    program = program_of(head_model("a Gemm with a bias", kind), feeds)
    assert not program.fallbacks
    got = interpret(program, feeds, {})
    assert np.isnan(got.pop("loss"))
    assert all(not array.any() for array in got.values())


@pytest.mark.parametrize("chip", ["H200", "A100", "B200"])
def test_every_chip_has_kernels_for_it(chip: str) -> None:
    model = gradient_of(
        f"(float16[M, {WIDTH}] x, float16[{CLASSES}, {WIDTH}] w, int64[M] labels) => (float loss) "
        f"{{ {HEAD} z = Cast <to = 1> (l) {LOSS} }}",
        ["x", "w"],
    )
    feeds = feeds_of("float16", "VK") | {"loss.grad": np.array(1, np.float32)}
    program = program_of(model, feeds, CHIPS[chip])
    products = [c.problem for c in program.calls if isinstance(c.problem, GemmProblem)]
    assert [p.n for p in products] == [CLASSES if chip == "H200" else 2112, WIDTH, WIDTH]
    assert not program.fallbacks


@pytest.mark.parametrize("chip", ["H200", "A100", "B200"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_its_kernel_compiles_without_spills(chip: str, dtype: str) -> None:
    hw = CHIPS[chip]
    for smoothing, gradient in ((0.0, True), (0.1, True), (0.1, False)):
        problem = CrossEntropyChunk(
            4096, 50257, 50304, dtype, "int64", smoothing=smoothing, gradient=gradient
        )
        assert unclean(Chunk().launch(problem, KernelConfig.of(), hw), hw.arch) == []


@pytest.mark.parametrize("chip", ["H200", "A100", "B200"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("k", [768, 33])
def test_rows_of_exponentials_compile_without_spills(chip: str, turned: bool, k: int) -> None:
    hw, types = CHIPS[chip], ("bfloat16", "int64")
    ldw = 50304 if turned else k
    label = LabelScore(16384, k, 50257, k, ldw, *types, turned=turned)
    rows = ExpRows(4096, k, 50257, 50304, 262, k, ldw, *types, turned=turned, scaled=k > 33)
    for kernel, problem in ((Label(), label), (Exp(), rows)):
        assert unclean(kernel.launch(problem, KernelConfig.of(), hw), hw.arch) == []
