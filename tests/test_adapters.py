"""LoRA: the low-rank product in every form of a product, what trains, what is saved."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import safetensors.numpy
from cases import real_cases
from fake_gpu import FakeGpu
from support import answers, assert_near, assert_same, normal, run, stock

from onnx_fuse import InferenceSession, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import CheckFailed, DataError, UsageError
from onnx_fuse.importer.save import inline, save
from onnx_fuse.ir.build import text_model
from onnx_fuse.lower.low_rank import LoraCosts, LowRank
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime.tensor import DeviceTensor
from onnx_fuse.training import optim
from onnx_fuse.training.adapters import Lora, attach, merge
from onnx_fuse.training.data import fit
from onnx_fuse.training.losses import Term
from onnx_fuse.training.merged import Merging
from onnx_fuse.training.step import training_model
from onnx_fuse.training.trainer import Trainer

Array = np.ndarray[Any, Any]
NUMBERS = ", ".join(str(round(i / 24 - 0.5, 3)) for i in range(24))


def graph(body: str, shape: str = "6, 4", rank3: bool = False) -> str:
    lead = "batch, 2" if rank3 else "batch"
    return f"""net (float[{lead}, 6] x) => (float[{lead}, 4] y)
        <float[{shape}] w = {{{NUMBERS}}}, float[4] c = {{0.1, 0.2, 0.3, 0.4}},
         float[6] g = {{1, 2, 1, 2, 1, 2}}, float[6] b = {{0, 0, 1, 0, 0, 0}}> {{ {body} }}"""


FORMS = {
    "MatMul": graph("y = MatMul (x, w)"),
    "three axes and a bias": graph("p = MatMul (x, w) y = Add (p, c)", rank3=True),
    "Gemm": graph("y = Gemm <alpha = 0.5, beta = 2.0> (x, w, c)"),
    "Gemm, transposed": graph("y = Gemm <transB = 1> (x, w, c)", "4, 6"),
    "Transpose": graph("t = Transpose <perm = [1, 0]> (w) p = MatMul (x, t) y = Tanh (p)", "4, 6"),
    "twice": graph("p = MatMul (x, w) q = Relu (x) r = MatMul (q, w) y = Add (p, r)"),
    "behind a norm": graph("n = LayerNormalization (x, g, b) p = MatMul (n, w) y = Add (p, c)"),
}


def batch(form: str, seed: int = 0, rows: int = 8) -> dict[str, Array]:
    lead = (rows, 2) if "three" in form else (rows,)
    return normal({"x": (*lead, 6), "labels": (*lead, 4)}, seed)


@pytest.mark.parametrize("written", ["as it is", "fused"])
@pytest.mark.parametrize("form", FORMS)
def test_adapters_train_beside_every_form_of_a_product(
    form: str, written: str, tmp_path: Path
) -> None:
    """In files of fused operators, too: what is saved is the given graph, with merged weights."""
    model = text_model(FORMS[form])
    if written == "fused":
        model = load(model)
        rewrite.optimize(model, level=2)
    save(model, tmp_path / "model.onnx")
    trainer = Trainer(
        tmp_path / "model.onnx", loss="mse", optimizer=optim.Adam(lr=0.05), lora=Lora(2, 4.0)
    )
    first = trainer.evaluate(batch(form)).outputs["y"]
    assert_same(run(tmp_path / "model.onnx", batch(form), optimized=True)[:1], [first], rtol=1e-5)
    losses = [float(trainer.step(batch(form))) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    assert {a.shape for k, a in trainer.state().items() if "exp" not in k} == {(6, 2), (2, 4)}
    assert len(trainer.weights()) == 1
    trainer.save(tmp_path / "tuned.onnx")
    kinds = [
        [n.op_type for n in onnx.load(tmp_path / f).graph.node]
        for f in ("model.onnx", "tuned.onnx")
    ]
    assert kinds[0] == kinds[1]
    found = run(tmp_path / "tuned.onnx", batch(form, 1), optimized=True)[0]
    expected = trainer.evaluate(batch(form, 1)).outputs["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_step_is_the_formula() -> None:
    """SGD on A and B, of which B is zero at first: A moves from the second step on."""
    trainer = Trainer(
        text_model(FORMS["MatMul"]), loss="mse", optimizer=optim.SGD(lr=0.3), lora=Lora(2, 3.0)
    )
    state = {k: a.astype(np.float64) for k, a in trainer.state().items()}
    w, a, b = (np.array([float(x) for x in NUMBERS.split(",")]).reshape(6, 4), *state.values())
    assert a.any()
    assert np.abs(a).max() <= 6**-0.5
    assert not b.any()
    for i in range(3):
        feeds = batch("MatMul", i)
        trainer.step(feeds)
        x, t = (feeds[k].astype(np.float64) for k in ("x", "labels"))
        d = 2 * (x @ (w + 1.5 * a @ b) - t) / t.size
        a, b = a - 0.3 * 1.5 * x.T @ d @ b.T, b - 0.3 * 1.5 * (x @ a).T @ d
    np.testing.assert_allclose(trainer.weights()["w"], w + 1.5 * a @ b, rtol=1e-5, atol=1e-6)
    other = Trainer(text_model(FORMS["MatMul"]), loss="mse", lora=Lora(2), seed=1)
    assert not np.array_equal(next(iter(other.state().values())), state["w.lora_a"])


def test_the_low_rank_product_comes_behind_the_bias_and_the_residual() -> None:
    """So that the frozen product's kernel adds these, and stands behind its norm."""
    body = """n = LayerNormalization (x, g, b) p = MatMul (n, w) q = Add (p, c) z = Gelu (q)
        r = MatMul (z, v) s = Add (r, d) y = Add (x, s)"""
    text = graph(body).replace(
        "float[4] c", f"float[4, 6] v = {{{NUMBERS}}}, float[6] d, float[4] c"
    )
    text = text.replace("float[6] d", "float[6] d = {1, 2, 3, 4, 5, 6}")
    model, *_ = attach(load(text_model(text.replace("4] y)", "6] y)"))), Lora(2), 0)
    rewrite.optimize(model, level=1, training=True)
    read = {n.op_type: [v.name for v in n.inputs if v is not None] for n in model.graph}
    made = {v.name: n for n in model.graph for v in n.outputs}
    for end, weight, low in (("q", "w", "w.lora_b"), ("y", "v", "v.lora_b")):
        large, small = (made[v.name] for v in made[end].inputs if v is not None)
        large = made[large.inputs[1].name] if large.op_type == "Add" else large  # the residual
        assert weight in [v.name for v in large.inputs if v is not None]
        assert large.op_type in ("LayerNormGemm", "Gemm"), "with its bias"
        assert low in [v.name for v in small.inputs if v is not None]
    assert read["Gelu"] == ["q"]


MERGED = f"""net (float[batch, 6] x) => (float[batch, 4] y)
    <float[6, 4] q = {{{NUMBERS}}}, float[6, 4] k = {{{NUMBERS}}}, float[4, 6] v = {{{NUMBERS}}},
     float[4] c = {{0.1, 0.2, 0.3, 0.4}}, float[6] g = {{1, 2, 1, 2, 1, 2}},
     float[6] b = {{0, 0, 1, 0, 0, 0}}> {{
    n = LayerNormalization (x, g, b) e = MatMul (n, q) r = Add (e, c) f = MatMul (n, k)
    s = Add (f, c) t = Transpose <perm = [1, 0]> (v) h = MatMul (n, t) u = Add (h, c)
    i = Tanh (r) j = Tanh (s) m = Mul (i, j) y = Add (m, u) }}"""
"""Three products of one norm, which level 2 makes one; a weight of them is transposed."""


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize(
    ("text", "weights"),
    [*((text, ("*",)) for text in FORMS.values()), (MERGED, ("*",)), (MERGED, ("q", "v")),
     (MERGED, ("k",)), (MERGED, ("v",))],
    ids=[*FORMS, "one product", "one product, q and v", "one product, k", "one product, v"],
)  # fmt: skip
def test_products_within_the_weights_train_as_those_beside_them(
    text: str, weights: tuple[str, ...], level: int
) -> None:
    """W + A·B is worked out once a step, in whatever form fusion left W; nothing else differs."""
    found = []
    for merged in (False, True):
        options = {"lora": Lora(2, 3.0, weights, merged), "ema": 0.5, "clip_norm": 1.0}
        sgd = optim.SGD(lr=0.3)
        trainer = Trainer(text_model(text), loss="mse", optimizer=sgd, level=level, **options)
        feeds = [batch("three" if "batch, 2" in text else "", i) for i in range(4)]
        losses = [float(trainer.step(each)) for each in feeds]
        kept = [trainer.weights(ema=ema) for ema in (False, True)]
        outputs = [trainer.evaluate(feeds[0], ema=ema).outputs["y"] for ema in (False, True)]
        found.append((losses, kept, outputs))
    (losses, kept, outputs), (others, again, results) = found
    # float32 sums in another order, of a few steps
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    np.testing.assert_allclose(results, outputs, rtol=1e-4, atol=1e-5)
    for one, other in zip(kept, again, strict=True):
        assert one.keys() == other.keys()
        assert_near(other, one, rtol=1e-4, atol=1e-6)


ROOT = graph(
    "e = Mul (x, x) f = ReduceMean (e, last) h = Add (f, s) i = Sqrt (h) j = Div (x, i) "
    "k = Mul (j, g) y = MatMul (k, w)"
).replace("float[6] g", "int64[1] last = {-1}, float s = {0.00001}, float[6] g")


@pytest.mark.parametrize("by_rows", [False, True], ids=["by the weight", "by rows"])
@pytest.mark.parametrize(
    "text", [*FORMS.values(), MERGED, ROOT], ids=[*FORMS, "one product", "RMSNorm"]
)
def test_the_graph_of_a_gpu_has_the_same_gradients(text: str, by_rows: bool) -> None:
    """Fused operators and their gradients, as onnxruntime runs their bodies."""
    plain = load(text_model(text))
    attached, found, _ = attach(plain, Lora(2, 3.0), 0)
    rng, form = np.random.default_rng(3), "three" if "batch, 2" in text else ""
    states = {}
    results = []
    within = Merging.of(attached, found, lambda *_: by_rows)
    for source, given in ((attached, None), (plain, within)):
        graph, spec = training_model(
            source,
            loss="mse",
            optimizer=optim.SGD(lr=0.3),
            trainable=[name for each in found for name in (each.a, each.b)],
            level=2,
            fused=True,
            whole=lambda _: True,
            merging=given,
        )
        if given is not None:
            products = [n for n in graph.graph if n.op_type == "Gemm" and len(n.inputs) == 3]
            assert len(products) >= len(found)
        names = sorted(state.name for state in spec.states)
        states = states or {
            state.name: rng.normal(size=state.initial.shape).astype(np.float32)
            for state in spec.states
        }
        rate = {spec.lr: np.array(0.3, np.float32)}
        feeds = {name: states[name] for name in names} | batch(form) | rate
        made = answers(stock(inline(graph), optimized=True), feeds)
        results.append({s.name: made[s.next] for s in spec.states} | {"loss": made[spec.loss]})
    beside, other = results
    assert beside.keys() == other.keys()
    assert_near(other, beside, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", [0, 2])
def test_an_exported_model_adapts(level: int, tmp_path: Path) -> None:
    """GPT-2 as its exporter wrote it: the loss falls, the adapters are small and come back."""
    (case,) = (case for case in real_cases() if case.name == "gpt2__ts17")
    (feeds, outputs), path = case.feeds[0], case.path
    labels = next(iter(outputs.values())) + 1
    trainer = Trainer(
        path, loss="mse", optimizer=optim.Adam(lr=1e-2), lora=Lora(4), level=level, ema=0.5
    )
    losses = [float(trainer.step({**feeds, "labels": labels})) for _ in range(4)]
    assert losses[-1] < losses[0]
    trainer.save_adapters(tmp_path / "adapters.safetensors")
    trainer.save(tmp_path / "merged.onnx")
    small = (tmp_path / "adapters.safetensors").stat().st_size
    assert small < 0.5 * path.stat().st_size
    merge(path, tmp_path / "adapters.safetensors", tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "merged.onnx").read_bytes()
    fresh = Trainer(path, loss="mse", lora=Lora(4), level=level, ema=0.5)
    fresh.load_adapters(tmp_path / "adapters.safetensors")
    for ema in (False, True):
        for name, array in fresh.weights(ema=ema).items():
            np.testing.assert_array_equal(array, trainer.weights()[name])


def test_a_weight_that_no_loss_depends_on_has_no_adapter_in_the_file(tmp_path: Path) -> None:
    text = graph("y = MatMul (x, w) z = MatMul (x, w2)").replace("] y)", "] y, float[batch, 4] z)")
    text = text.replace("float[4] c", f"float[6, 4] w2 = {{{NUMBERS}}}, float[4] c")
    trainer = Trainer(text_model(text), loss="mse", lora=Lora(2))
    trainer.save_adapters(tmp_path / "a.safetensors")
    merge(text_model(text), tmp_path / "a.safetensors", tmp_path / "merged.onnx")
    assert_same(*(run(m, batch("")) for m in (text_model(text), tmp_path / "merged.onnx")))


@pytest.mark.parametrize("merged", [False, True], ids=["beside", "within"])
def test_adapters_stay_where_a_run_had_them(merged: bool, tmp_path: Path) -> None:
    """`resume` takes that over; `restore` goes on where the states are the same, as on a CPU."""
    adam = optim.Adam(lr=0.05)
    settings: dict[str, Any] = {"loss": "mse", "optimizer": adam, "trainable": ["c"]}
    model = text_model(FORMS["three axes and a bias"])
    first = Trainer(model, lora=Lora(2, 3.0, "*", merged), **settings)
    first.step(batch("three"))
    first.checkpoint(tmp_path)
    resumed = Trainer.resume(tmp_path, model)
    elsewhere = Trainer(model, lora=Lora(2, 3.0, "*", not merged), **settings)
    elsewhere.restore(tmp_path)
    for trainer in (first, resumed, elsewhere):
        trainer.step(batch("three", 1))
    for name, array in first.state().items():
        assert resumed.state()[name].tobytes() == array.tobytes(), name
        np.testing.assert_allclose(elsewhere.state()[name], array, rtol=1e-4, atol=1e-6)
    assert set(first.weights()) == {"w", "c"}
    for lora, words in ((Lora(3), r"lora\.rank 2, not 3"), (None, "lora .*'rank': 2.*, not None")):
        with pytest.raises(UsageError, match=f"was started with {words}"):
            Trainer(model, lora=lora, **settings).restore(tmp_path)


def test_where_adapters_pay() -> None:
    """Products of many rows gain from W + A·B, which a few rows would not pay for."""
    costs = {chip: LoraCosts("bfloat16", "tf32", CHIPS[chip]) for chip in ("H200", "A100")}
    for chip, each in costs.items():
        wide = [LowRank(4096, 4096, 8, (rows,)) for rows in (64, 16384)]
        assert [each.merging_pays([size]) for size in wide] == [False, True], chip
        assert each.rows_pay(16384, 4096, 4096, 8), "dW is larger than x and dy"
        assert not each.rows_pay(16384, 512, 512, 256), "and here it is smaller"
    model = text_model(FORMS["MatMul"])
    found = Trainer(model, loss="mse", lora=Lora(2), device="cuda", hardware=CHIPS["H200"])
    chosen = (LoraCosts("float32", "ieee", CHIPS["H200"])).merging_pays([LowRank(6, 4, 2, (None,))])
    assert found._settings()["lora"]["merged"] == chosen


def test_frozen_weights_are_rounded_before_the_run() -> None:
    """A step in 16 bits casts what trains, and nothing else."""
    trainer = Trainer(
        text_model(FORMS["behind a norm"]), loss="mse", lora=Lora(2, merged=False),
        precision="bf16", device="cuda", hardware=CHIPS["H200"],
    )  # fmt: skip
    graph, _ = trainer.graphs()["update"]
    casts = [n.inputs[0] for n in graph.graph if n.op_type == "Cast" and not n.domain]
    assert not [v.name for v in casts if v is not None and v.is_initializer()]
    narrow = [v for v in graph.graph.initializers.values() if v.dtype == onnx_ir.DataType.BFLOAT16]
    assert {"w.bfloat16", "g.bfloat16", "b.bfloat16", "c.bfloat16"} <= {v.name for v in narrow}


EMBEDDING = """net (int64[batch, T] ids) => (float[batch, T, 3] y) <float[4, 3] w = {NUMBERS}>
    { y = Gather (w, ids) }""".replace("NUMBERS", ", ".join(["1"] * 12))
REFUSED: dict[str, tuple[str, Any, str]] = {
    "glob": (FORMS["MatMul"], lambda: Lora(weights=("q*",)), r"'q\*' matches no weight"),
    "no matrix": (FORMS["MatMul"], lambda: Lora(weights="c"), "c name no matrix"),
    "embedding": (EMBEDDING, lambda: Lora(), "'w' is read by the Gather node"),
    "left": (
        graph("t = MatMul (w, x) y = MatMul (x, t)").replace("batch", "4"),
        lambda: Lora(),
        "which is no matrix multiplication of rows",
    ),
    "rank": (FORMS["MatMul"], lambda: Lora(0), "the rank of LoRA must be at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    text, make, words = REFUSED[case]
    with pytest.raises(UsageError, match=words):
        Trainer(text_model(text), loss="mse", lora=make())


def test_refuses_files(tmp_path: Path) -> None:
    trainer = Trainer(text_model(FORMS["MatMul"]), loss="mse", lora=Lora(2))
    safetensors.numpy.save_file({"x": np.ones(3)}, tmp_path / "other.safetensors")
    (tmp_path / "none.safetensors").write_bytes(b"nothing")
    for name, words in (
        ("other.safetensors", "holds no adapters of this package"),
        ("none.safetensors", "holds no adapters of this package"),
        ("missing.safetensors", "missing.safetensors"),
    ):
        with pytest.raises(DataError, match=words):
            trainer.load_adapters(tmp_path / name)
    three = tmp_path / "three.safetensors"
    Trainer(text_model(FORMS["MatMul"]), loss="mse", lora=Lora(3)).save_adapters(three)
    with pytest.raises(DataError, match="other names or shapes than the Trainer"):
        trainer.load_adapters(three)
    with pytest.raises(DataError, match=r"'w' is \[4, 6\] in the model, \[6, 4\] in the adapters"):
        merge(text_model(FORMS["Transpose"]), three, tmp_path / "merged.onnx")
    plain = Trainer(text_model(FORMS["MatMul"]), loss="mse")
    with pytest.raises(UsageError, match="the Trainer has no adapters"):
        plain.save_adapters(tmp_path / "plain")
    for refused in (
        lambda: plain.weights(adapter="zz"),
        lambda: trainer.weights(adapter="zz"),
        lambda: trainer.save_adapters(tmp_path / "zz", adapter="zz"),
    ):
        with pytest.raises(UsageError, match="adapter= names one of several, which the Trainer"):
            refused()


# ---- PEFT's form -----------------------------------------------------------------------------

BLOCK = """net (float[batch, 6] x) => (float[batch, 4] y)
    <float[6, 5] q = {Q}, float[4, 5] "head.weight" = {H}, float[4] "head.bias" = {0, 0, 1, 0}> {
        ["/layer.0/query/MatMul_1"] h = MatMul (x, q)
        ["/head/Gemm"] y = Gemm <transB = 1> (h, "head.weight", "head.bias")
    }"""
for _name, _count in (("Q", 30), ("H", 20)):
    BLOCK = BLOCK.replace(_name + "}", ", ".join(str(i / 30 - 0.5) for i in range(_count)) + "}")
"""Two torch.nn.Linear as an exporter writes them: of one it has kept the transpose alone."""
KEY = "base_model.model.layer.0.query.lora_"


def adapted(**options: Any) -> Trainer:
    options = {"lora": Lora(2, 6.0, "*query"), "trainable": ["head.weight"]} | options
    return Trainer(text_model(BLOCK), loss="mse", optimizer=optim.Adam(lr=0.05), **options)


def write_peft(folder: Path, a: Array, b: Array, key: str = KEY, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    pair = {f"{key}A.weight": a, f"{key}B.weight": b}
    safetensors.numpy.save_file(pair, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 6} | more
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def arrays(model: onnx.ModelProto) -> dict[str, Array]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def test_a_folder_in_the_form_of_peft(tmp_path: Path) -> None:
    """The names and shapes that PEFT reads, modules that trained whole; and back to the same."""
    trainer, folder = adapted(), tmp_path / "adapters"
    feeds = batch("MatMul")
    for _ in range(3):
        trainer.step(feeds)
    trainer.save_adapters(folder)
    about = json.loads((folder / "adapter_config.json").read_text())
    assert about["peft_type"] == "LORA"
    assert (about["r"], about["lora_alpha"]) == (2, 6)
    assert about["target_modules"] == ["layer.0.query"]
    assert about["modules_to_save"] == ["head"]
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    a, b = tensors.pop(f"{KEY}A.weight"), tensors.pop(f"{KEY}B.weight")
    assert (a.shape, b.shape) == ((2, 6), (5, 2))
    assert tensors.keys() == {"base_model.model.head.weight", "base_model.model.head.bias"}
    merge(text_model(BLOCK), folder, tmp_path / "merged.onnx")
    trainer.save(tmp_path / "tuned.onnx")
    merged, tuned = (arrays(onnx.load(tmp_path / f)) for f in ("merged.onnx", "tuned.onnx"))
    assert {k: w.tobytes() for k, w in merged.items()} == {k: w.tobytes() for k, w in tuned.items()}
    other = adapted(trainable=["head.*"])
    other.load_adapters(folder)
    expected = trainer.evaluate(feeds).outputs["y"]
    np.testing.assert_array_equal(other.evaluate(feeds).outputs["y"], expected)


def test_what_peft_wrote_for_a_wrapped_model_is_merged(tmp_path: Path) -> None:
    """Its modules have a prefix, its tensors 16 bits; rsLoRA divides by the root of the rank."""
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(4, 6)).astype(np.float16), rng.normal(size=(5, 4)).astype(np.float16)
    key = KEY.replace("layer", "encoder.layer")
    write_peft(tmp_path, a, b, key, use_rslora=True, bias="none")
    merge(text_model(BLOCK), tmp_path, tmp_path / "merged.onnx")
    before = arrays(onnx_ir.to_proto(text_model(BLOCK)))
    after = arrays(onnx.load(tmp_path / "merged.onnx"))
    expected = before["q"] + 3 * (b.astype(np.float64) @ a.astype(np.float64)).T
    np.testing.assert_allclose(after["q"], expected, rtol=1e-6)
    np.testing.assert_array_equal(after["head.weight"], before["head.weight"])


def test_metadata_names_the_module_too() -> None:
    """torch.onnx's newer exporter writes no modules into names."""
    model = text_model(BLOCK.replace("/layer.0/query/MatMul_1", "node_MatMul_3"))
    scopes = "['', 'layer.0', 'layer.0.query', 'linear_2']"
    model.graph[0].metadata_props["pkg.torch.onnx.name_scopes"] = scopes
    assert attach(model, Lora(2, 1.0, "layer.*"), 0)[1][0].module == "layer.0.query"


PEFT_REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "kind": ({"peft_type": "IA3"}, KEY, "adapters of PEFT's kind IA3 are not LoRA"),
    "DoRA": ({"use_dora": True}, KEY, "adapters with use_dora = True are not read"),
    "ranks": ({"rank_pattern": {"query": 3}}, KEY, "'layer.0.query' has no A and B of rank 3"),
    "PiSSA": ({"init_lora_weights": "pissa"}, KEY, "changes the model's own weights, too"),
    "rank": ({"r": 3}, KEY, r"'layer\.0\.query' has no A and B of rank 3"),
    "no rank": ({"r": None}, KEY, "no adapters in PEFT's form"),
    "module": ({}, KEY.replace("query", "key"), "key' is none of the model's, which has"),
    "embedding": ({}, KEY.replace("lora_", "lora_embedding_"), "is of no matrix, or of another"),
    "scale": ({"lora_alpha": 5}, KEY, "another alpha / rank than the Trainer's"),
}


@pytest.mark.parametrize("case", PEFT_REFUSED)
def test_refuses_folders(case: str, tmp_path: Path) -> None:
    more, key, words = PEFT_REFUSED[case]
    write_peft(tmp_path, np.ones((2, 6), "f4"), np.ones((5, 2), "f4"), key, **{"r": 2} | more)
    with pytest.raises(DataError, match=words):
        adapted(trainable=None).load_adapters(tmp_path)


def test_weights_without_the_names_of_modules_go_into_no_folder(tmp_path: Path) -> None:
    for trainer, words in (
        (Trainer(text_model(FORMS["MatMul"]), loss="mse", lora=Lora(2)), "'w' has no PyTorch"),
        (adapted(lora=Lora(2, 6.0, "*query"), trainable=["head.weight", "q"]), "'q' trained in"),
    ):
        with pytest.raises(UsageError, match=words):
            trainer.save_adapters(tmp_path / "adapters")
    with pytest.raises(DataError, match=r"adapter_config\.json: No such file"):
        adapted().load_adapters(tmp_path)


# ---- several at once ----------------------------------------------------------------------------

SEVERAL = {"one": Lora(2, 3.0), "two": Lora(5, 10.0)}
ROWS = (
    ["one", "two", "one", None, "two", "two", "one", None],
    ["one"] * 3 + [None] * 5,
    ["two", "one"] * 4,
)
ADAM = optim.AdamW(lr=0.05)


def classes(i: int) -> dict[str, Array]:
    labels = np.random.default_rng(i).integers(0, 4, (8, 2))
    labels[[0, 5], 1] = -100
    return {"x": batch("three", i)["x"], "labels": labels}


TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "no bias": ("MatMul", {"optimizer": ADAM, "ema": 0.5}),
    "one product": ("one product", {"optimizer": ADAM, "level": 2, "clip_norm": 0.05}),
    "other weights": (
        "one product",
        {"lora": {"one": Lora(2, 3.0, ("q", "v")), "two": Lora(5, 1.0, ("k", "v"))}},
    ),
    "rows in one axis": ("twice", {"optimizer": optim.SGD(lr=0.1, momentum=0.9)}),
    "a shared slot": ("MatMul", {"optimizer": optim.NAdam(lr=0.05)}),
    "a late group": (
        "MatMul",
        {"optimizer": optim.AdamW(groups=(optim.Group(("*.lora_b",), scale=3.0, start=2),))},
    ),
    "a sum": ("MatMul", {"loss_options": {"reduction": "sum"}, "optimizer": optim.SGD(lr=0.05)}),
    "a scaled loss": ("MatMul", {"precision": "fp16", "optimizer": ADAM, "clip_norm": 1.0}),
    "ignored labels": (
        "three axes and a bias",
        {
            "loss": "cross_entropy",
            "loss_options": {"class_axis": 2, "weight": [1.0, 2.0, 0.5, 3.0]},
            "optimizer": optim.SGD(lr=0.5),
        },
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_several_adapters_train_as_each_would_alone(case: str) -> None:
    """On its rows alone, which some steps have none of; every matrix of it has the same values."""
    form, options = TOGETHER[case]
    text = FORMS.get(form, MERGED)
    given = {"loss": "mse", "lora": SEVERAL} | options
    loras = given.pop("lora")
    together = Trainer(text_model(text), lora=loras, **given)
    alone = {name: Trainer(text_model(text), lora=lora, **given) for name, lora in loras.items()}
    for i in range(6):
        feeds = classes(i) if given["loss"] == "cross_entropy" else batch(form, i)
        rows = np.array(ROWS[i % 3], object)
        together.step({**feeds, "adapter": rows})
        for name, one in alone.items():
            if (rows == name).any():
                one.step({key: array[rows == name] for key, array in feeds.items()})
    for name, one in alone.items():
        for ema in (False, True)[: 1 + ("ema" in options)]:
            # float32 sums in another order, of a few steps
            found = together.weights(adapter=name, ema=ema)
            assert_near(found, one.weights(ema=ema), rtol=1e-4, atol=1e-5)
        outputs = together.predict({"x": feeds["x"], "adapter": [name] * 8})["y"]
        np.testing.assert_allclose(outputs, one.predict(feeds["x"])["y"], rtol=1e-3, atol=1e-4)


def test_a_step_of_several_adapters_is_the_formula() -> None:
    """SGD in float64 by hand, of the mean over each one's rows, accumulated over two batches."""
    trainer = Trainer(
        text_model(FORMS["MatMul"]),
        **{"loss": "mse", "optimizer": optim.SGD(lr=0.3), "lora": SEVERAL, "accumulate": 2},
    )
    w = np.array([float(x) for x in NUMBERS.split(",")]).reshape(6, 4)
    rng, state = np.random.default_rng(0), trainer.state()
    for name, array in state.items():
        if name.endswith(("lora_a", "lora_b")):
            state[name] = rng.normal(size=array.shape).astype(np.float32)
    trainer.set_weights(state)
    feeds = [batch("MatMul", i) for i in range(4)]
    for i in range(4):
        trainer.step({**feeds[i], "adapter": ROWS[i % 3]})
    for name, lora in SEVERAL.items():
        a, b = (state[f"w.{name}.lora_{key}"].astype(np.float64) for key in "ab")
        scale = lora.alpha / lora.rank
        for pair in ((0, 1), (2, 3)):
            da, db = np.zeros_like(a), np.zeros_like(b)
            for i in pair:
                mine = np.array(ROWS[i % 3], object) == name
                x, t = (feeds[i][key][mine].astype(np.float64) for key in ("x", "labels"))
                d = (x @ (w + scale * a @ b) - t) / max(t.size, 1)  # half of 2 (y - t) / n
                da, db = da + scale * x.T @ d @ b.T, db + scale * (x @ a).T @ d
            a, b = a - 0.3 * da, b - 0.3 * db
        found = trainer.weights(adapter=name)["w"]
        np.testing.assert_allclose(found, w + scale * a @ b, rtol=1e-5, atol=1e-5)


def test_each_of_several_adapters_goes_into_its_file(tmp_path: Path) -> None:
    """A folder of PEFT's, and files that sessions, merging and other Trainers read; and resumes."""
    model, lora = text_model(BLOCK), {"x": Lora(2, 6.0, "*query"), "y": Lora(3, 6.0, "*query")}
    trainer = adapted(lora=lora, trainable=None)
    data = {**batch("MatMul"), "adapter": np.array(["x", "y", None, "y"] * 2)}
    trainer.fit(data, epochs=3, batch_size=4)
    assert trainer.calls == 6
    session, feeds = InferenceSession(model), {"x": data["x"]}
    for name in lora:
        trainer.save_adapters(tmp_path / name, adapter=name)
        trainer.save_adapters(tmp_path / f"{name}.safetensors", adapter=name)
        trainer.save(tmp_path / f"{name}.onnx", adapter=name)
        session.add_adapter(name, tmp_path / name)
        merge(model, tmp_path / f"{name}.safetensors", tmp_path / "again.onnx")
        assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / f"{name}.onnx").read_bytes()
        alone = adapted(lora=lora[name], trainable=None)
        alone.load_adapters(tmp_path / name)
        expected = trainer.predict({**feeds, "adapter": [name] * 8})["y"]
        for found in (session.run(None, feeds, adapter=name)[0], alone.predict(feeds)["y"]):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    trainer.checkpoint(tmp_path / "run")
    resumed = Trainer.resume(tmp_path / "run", model)
    again = adapted(lora=dict(reversed(lora.items())), trainable=None)
    for name in lora:
        again.load_adapters(tmp_path / name, adapter=name)
    for each in (trainer, resumed):
        each.step(data)
    for name, array in trainer.state().items():
        assert resumed.state()[name].tobytes() == array.tobytes(), name
    merged = arrays(onnx.load(tmp_path / "x.onnx"))["q"]
    assert_near(again.weights(adapter="x"), {"q": merged}, rtol=1e-6, atol=1e-6)


def test_several_adapters_that_cannot_be_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = text_model(FORMS["MatMul"])
    fixed = text_model(FORMS["MatMul"].replace("batch", "4"))
    pair = [Term("mse"), Term("cross_entropy", labels="classes")]
    for source, options, words in (
        (model, {"lora": {}}, "several adapters have names"),
        (model, {"lora": {"a": 3}}, "give a Lora for each name"),
        (model, {"lora": {"a": {"rank": 2}}}, "give a Lora for each name"),
        (model, {"lora": {"a": Lora(merged=True)}}, "stand beside the weights: leave out merged"),
        (model, {"trainable": ["c"]}, "leave out trainable, distributed and pack"),
        (model, {"loss": pair}, "a loss in which each row counts by itself"),
        (fixed, {}, "rows cannot have different adapters: the first input has no batch"),
    ):
        with pytest.raises(UsageError, match=words):
            Trainer(source, **({"loss": "mse", "lora": SEVERAL} | options))
    trainer = Trainer(model, loss="mse", lora=SEVERAL)
    feeds, before = batch("MatMul"), trainer.state()
    for rows, words in (
        (["onee"] * 8, "'adapter' holds 'onee': it has one of one, two, or None, for each row"),
        ("one", "'adapter' holds 'one': it has"),
        ([["one"], ["two", "one"]] * 4, r"'adapter' holds \['one'\]: it has"),
        ([0, True] * 4, "'adapter' holds True: it has"),
        ([0, -2] * 4, "'adapter' holds -2: it has"),
        (["one"] * 7, r"'adapter' has shape \[7\]"),
    ):
        with pytest.raises(DataError, match=words):
            trainer.step({**feeds, "adapter": rows})
    with pytest.raises(UsageError, match="no adapter None: adapter= names one of one, two"):
        trainer.weights()
    with pytest.raises(UsageError, match="'adapter' names the adapter of each row: give it, too"):
        trainer.predict({"x": feeds["x"]})
    with pytest.raises(DataError, match="no array for the input 'adapter'"):
        trainer.step(feeds)
    feeds["x"][0, 0] = np.nan  # of a row of the one: no adapter is changed
    with pytest.raises(CheckFailed, match="step 1: "):
        trainer.step({**feeds, "adapter": ["one", "two"] * 4})
    outputs = trainer.predict({"x": feeds["x"], "adapter": ["one", "two"] * 4})["y"]
    assert np.isfinite(outputs[1:]).all()
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(array, before[name])
    numbers, feeds = np.array([0, 1] * 4), batch("MatMul")
    trainer.step({**feeds, "adapter": numbers})
    with pytest.raises(DataError, match="'adapter' holds 9: it has"):  # after a step of its shape
        trainer.step({**feeds, "adapter": numbers * 9})
    expected = trainer.predict({"x": feeds["x"], "adapter": ["one", "two"] * 4})["y"]
    for given in (numbers, numbers.astype(np.uint8), numbers.tolist(), list(numbers)):
        found = trainer.predict({"x": feeds["x"], "adapter": given})["y"]
        np.testing.assert_array_equal(found, expected)
    FakeGpu().use(monkeypatch)
    inputs = trainer.spec("update").feeds
    for here, words in ((numbers.astype(np.int32), ""), (numbers * 9, "'adapter' holds 9: it has")):
        there = DeviceTensor(here.ctypes.data, here.shape, here.dtype, 0, here)
        with pytest.raises(DataError, match=words) if words else nullcontext():
            found = fit({**feeds, "adapter": there}, inputs)["adapter"]
            np.testing.assert_array_equal(found, numbers, strict=True)
    trainer.fit([(feeds["x"], numbers, feeds["labels"])], epochs=1)
    trainer.fit({**feeds, "adapter": ["one", None] * 4}, epochs=1)
    for count in (1, 2):
        some = {key: array[2 : 2 + count] for key, array in feeds.items()}
        assert np.isfinite(float(trainer.step({**some, "adapter": ["two", None][:count]})))
