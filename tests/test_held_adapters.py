"""Adapters that a session holds by name: each row as the file with its adapter merged."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import pytest
import safetensors.numpy
from decoders import growing, slotted, whole
from fake_gpu import FakeGpu
from support import run, write_adapter
from test_adapters import BLOCK, FORMS, MERGED, NUMBERS, Array, adapted, arrays, batch, write_peft

from onnx_fuse import InferenceSession, Lora, Trainer, deploy, generate, rewrite
from onnx_fuse.adapters.held import HeldAdapters
from onnx_fuse.adapters.inputs import AdaptedModel
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import DataError, UsageError
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.specialize import Specializer
from onnx_fuse.training.adapters import merge

FLAT = """net (float[batch, 2, 6] x) => (float[batch, 2, 4] y)
    <float[6, 4] w = {NUMBERS}, int64[2] rows = {-1, 6}, int64[3] back = {-1, 2, 4}> {
        f = Reshape (x, rows) p = MatMul (f, w) r = Relu (p) y = Reshape (r, back) }"""
FUSED = ("behind a norm", "one product")
SERVED = FORMS | {"rows in one axis": FLAT.replace("NUMBERS", NUMBERS), "one product": MERGED}


@pytest.mark.parametrize(
    ("form", "written"),
    [
        *((form, "as it is") for form in SERVED),
        ("behind a norm", "fused"),
        ("one product", "fused"),
    ],
)
def test_each_row_runs_with_its_adapter(form: str, written: str, tmp_path: Path) -> None:
    """As the file with that adapter in its weights; a row without one has the bits of the file."""
    model = text_model(SERVED[form])
    if written == "fused":
        model = load(model)
        rewrite.optimize(model, level=2)
    path = tmp_path / "model.onnx"
    save(model, path)
    session = InferenceSession(path)
    lead = (4, 2) if "batch, 2" in SERVED[form] else (4,)
    feeds = {"x": np.random.default_rng(1).normal(size=(*lead, 6)).astype(np.float32)}
    expected = {None: session.run(None, feeds)[0]}
    ranks = {"one": 1, "five": 5, "wide": 17}
    for seed, (name, rank) in enumerate(ranks.items()):
        file = write_adapter(tmp_path / f"{name}.safetensors", path, rank, seed)
        merge(path, file, tmp_path / f"{name}.onnx")
        expected[name] = run(tmp_path / f"{name}.onnx", feeds, optimized=True)[0]
        session.add_adapter(name, file)
        # float32 sums in another order
        found = session.run(None, feeds, adapter=name)[0]
        np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=1e-5)
    assert session.get_adapters() == list(ranks)
    rows = ["wide", None, "one", "five"]
    found = session.run(["y"], feeds, adapter=rows)[0]
    for row, name in enumerate(rows):
        np.testing.assert_allclose(found[row], expected[name][row], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found[1], expected[None][1])
    for count in (0, 1):
        few = {"x": feeds["x"][:count]}
        found = session.run(None, few, adapter=["five"] * count)[0]
        np.testing.assert_allclose(found, expected["five"][:count], rtol=1e-4, atol=1e-5)
    none = session.run(None, feeds, adapter=[None] * 4)[0]
    np.testing.assert_array_equal(none, expected[None])
    session.remove_adapter("one")
    with pytest.raises(UsageError, match="the session has no adapter 'one'"):
        session.run(None, feeds, adapter=rows)


def test_an_adapter_reaches_no_row_of_another() -> None:
    """Products that overflow in the columns of one adapter stay out of all other rows."""
    session = InferenceSession(text_model(FORMS["MatMul"]))
    feeds = {"x": np.random.default_rng(2).normal(size=(3, 6)).astype(np.float32)}
    feeds["x"][0] = [np.inf, np.nan, 1, 2, 3, 4]
    plain = session.run(None, feeds)[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "huge.safetensors"
        trainer = Trainer(text_model(FORMS["MatMul"]), loss="mse", lora=Lora(2, 2.0))
        trainer.set_weights({k: np.full_like(a, 3e38) for k, a in trainer.state().items()})
        trainer.save_adapters(path)
        session.add_adapter("huge", path)
    found = session.run(None, feeds, adapter=[None, "huge", None])[0]
    assert not np.isfinite(found[1]).any()
    np.testing.assert_array_equal(found[[0, 2]], plain[[0, 2]])


def test_adapters_of_other_weights_and_of_one_name(tmp_path: Path) -> None:
    """The graph grows by weights that a later adapter has; a name's last file counts."""
    model = text_model(MERGED)
    session, feeds = InferenceSession(model), batch("")
    feeds.pop("labels")
    for number, weights in enumerate(("q", "v", "q")):
        file = write_adapter(tmp_path / "a.safetensors", model, 2 + number, number, weights)
        merge(model, file, tmp_path / "merged.onnx")
        session.add_adapter("v" if weights == "v" else "q", file)
        expected = run(tmp_path / "merged.onnx", feeds, optimized=True)[0]
        found = session.run(None, feeds, adapter=weights)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert session.get_adapters() == ["q", "v"]


def write_onnxruntime(path: Path, **arrays: Array) -> Path:
    adapter = onnxruntime.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    values = {k: onnxruntime.OrtValue.ortvalue_from_numpy(a) for k, a in arrays.items()}
    adapter.set_parameters(values)
    adapter.export_adapter(str(path))
    return path


def test_one_adapter_in_the_files_of_others(tmp_path: Path) -> None:
    """PEFT's, with a rank and an alpha of its own for a module, and onnxruntime's by two names."""
    rng = np.random.default_rng(3)
    a, b = (rng.normal(size=size).astype(np.float32) for size in ((3, 6), (5, 3)))
    own = {"rank_pattern": {"query": 3}, "alpha_pattern": {r"layer\.\d+\.query": 1.5}}
    scaled = np.ascontiguousarray(0.5 * b.T)
    pair = np.ascontiguousarray(a.T), scaled
    files = {
        "peft": write_peft(tmp_path / "peft", a, b, **own),
        "weight": write_onnxruntime(
            tmp_path / "w.onnx_adapter", **dict(zip(("q.lora_A", "q.lora_B"), pair, strict=True))
        ),
        "module": write_onnxruntime(
            tmp_path / "m.onnx_adapter",
            **{f"layer.0.query.lora_{k}.weight": x for k, x in zip("AB", pair, strict=True)},
        ),
    }
    session, feeds = InferenceSession(text_model(BLOCK)), {"x": batch("MatMul")["x"]}
    held = arrays(onnx_ir.to_proto(text_model(BLOCK)))
    hidden = feeds["x"].astype(np.float64) @ (held["q"] + 0.5 * (b.astype(np.float64) @ a).T)
    expected = hidden @ held["head.weight"].T + held["head.bias"]
    for name, file in files.items():
        session.add_adapter(name, file)
        found = session.run(None, feeds, adapter=name)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def without_b(path: Path) -> Path:
    write_adapter(path, text_model(BLOCK), 2, 0, "q")
    with safetensors.safe_open(path, "np") as file:
        kept, about = {"q.lora_a": file.get_tensor("q.lora_a")}, file.metadata()
    safetensors.numpy.save_file(kept, path, about)
    return path


def of_onnxruntime(**shapes: tuple[int, ...]) -> Callable[[Path], Path]:
    ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    return lambda p: write_onnxruntime(
        p / "x.onnx_adapter", **{name.replace("_lora", ".lora"): x for name, x in ones.items()}
    )


def of_peft(rank: int = 4, value: float = 1.0, **more: Any) -> Callable[[Path], Path]:
    a, b = (np.full(shape, value, np.float32) for shape in ((rank, 6), (5, rank)))
    return lambda p: write_peft(p / "x", a, b, r=rank, **more)


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "rank 0": (
        of_onnxruntime(q_lora_A=(6, 0), q_lora_B=(0, 5)),
        r"'q' has A \[6, 0\] and B \[0, 5\]: A must be \[K, rank\]",
    ),
    "ranks": (
        of_onnxruntime(q_lora_A=(6, 2), q_lora_B=(3, 5)), r"'q' has A \[6, 2\] and B \[3, 5\]",
    ),
    "shape": (
        of_onnxruntime(q_lora_A=(6, 2), q_lora_B=(2, 4)),
        r"'q' is \[6, 5\] in the model, \[6, 4\] in the adapters",
    ),
    "one of two": (of_onnxruntime(q_lora_A=(6, 2)), "'q' has no A and B"),
    "no parameter": (of_onnxruntime(q=(6, 2)), "'q' is no lora_A or lora_B of a weight"),
    "no finite numbers": (of_peft(value=np.inf), "'q' has values that float32 does not hold"),
    "no adapter": (of_onnxruntime(), "there is no adapter in it"),
    "no rank": (of_peft(0), "r is 0: a rank is 1 or more"),
    "no number": (
        of_peft(alpha_pattern={"query": "x"}),
        "no adapters in PEFT's form: could not convert string to float: 'x'",
    ),
    "one of two of ours": (lambda p: without_b(p / "a.safetensors"), "'q' has no A and B"),
    "no file": (lambda p: p / "x.onnx_adapter", "onnxruntime reads no adapter there"),
    "another module": (of_onnxruntime(k_lora_A=(6, 2)), "'k' is none of the model's"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_does_not_fit_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    make, words = WRONG[case]
    session = InferenceSession(text_model(BLOCK))
    with pytest.raises(DataError, match=words):
        session.add_adapter("x", make(tmp_path))
    assert session.get_adapters() == []


def test_what_a_run_cannot_have_is_refused_in_a_sentence(tmp_path: Path) -> None:
    trainer = adapted(trainable=["head.weight"])
    trainer.save_adapters(tmp_path / "whole.safetensors")
    session = InferenceSession(text_model(BLOCK))
    with pytest.raises(DataError, match=r"'head\.weight' was trained in full"):
        session.add_adapter("whole", tmp_path / "whole.safetensors")
    with pytest.raises(UsageError, match="a text that is not empty, not ''"):
        session.add_adapter("", tmp_path / "whole.safetensors")
    feeds = {"x": batch("MatMul", rows=2)["x"]}
    numbers = "int64[1] zero = {0}, int64[1] two = {2}, int64[6] lengths = {2, 2, 2, 2, 2, 2}"
    moved = FORMS["MatMul"].replace("MatMul (x", "MatMul (z").replace("<", f"<{numbers}, ", 1)
    order = "the rows that 'w' multiplies are not in the order of the batch"
    for text, words in (
        (FORMS["MatMul"], "adapter has 1 names, and 'x' has 2 rows"),
        (FORMS["MatMul"].replace("batch", "2"), "the first input has no batch dimension"),
        (moved.replace("{ y", "{ s = Slice (x, zero, two, zero) z = Concat <axis = 0> (s, s) y"),
         order),
        (moved.replace("{ y", "{ s = ReverseSequence <batch_axis = 1> (x, lengths) z = Abs (s) y"),
         order),
    ):  # fmt: skip
        session = InferenceSession(text_model(text))
        file = write_adapter(tmp_path / "a.safetensors", text_model(text), 2, 0)
        session.add_adapter("a", file)
        assert session.run(None, feeds, adapter="a")[0].shape[1] == 4
        for wrong, refusal in (
            (5, "adapter is 5: it takes a list"),
            ([None] * 5, "adapter has 5 names, and 'x' has 2 rows"),
            ([["a"], None], r"no adapter \['a"),
        ):
            with pytest.raises(UsageError, match=refusal):
                session.run(None, feeds, adapter=wrong)
        with pytest.raises(UsageError, match=words):
            session.run(None, feeds, adapter=["a"] if "1 names" in words else ["a", None])


@pytest.mark.parametrize("form", [growing, slotted, whole])
def test_each_prompt_goes_on_with_its_adapter(form: Any, tmp_path: Path) -> None:
    model = form()
    file = write_adapter(tmp_path / "a.safetensors", model, 3, 0)
    merge(model, file, tmp_path / "merged.onnx")
    session, prompts = InferenceSession(model), [[1, 2, 3], [4, 5, 6]]
    session.add_adapter("a", file)
    texts = {name: generate(m, prompts, max_new_tokens=5)
             for name, m in ((None, model), ("a", tmp_path / "merged.onnx"))}  # fmt: skip
    assert texts[None] != texts["a"]
    for names in ("a", ["a", None], [None, "a"], [None, None]):
        found = generate(session, prompts, max_new_tokens=5, adapter=names)
        rows = [names] * 2 if isinstance(names, str) else names
        assert found == [texts[name][row] for row, name in enumerate(rows)]
    with pytest.raises(UsageError, match="adapter needs an InferenceSession that holds it"):
        generate(model, prompts, adapter="a")


def test_a_row_sums_over_all_adapters_where_those_of_others_may_not_matter(tmp_path: Path) -> None:
    model = text_model(FORMS["MatMul"])
    adapted = AdaptedModel(lambda: load(model), InferenceSession, None)
    held = HeldAdapters(adapted, batch_invariant=True)
    assert held.feeds([None], lambda _: 1) == (None, {})
    for seed, (name, rank) in enumerate({"b": 20, "a": 2}.items()):
        held.add(name, write_adapter(tmp_path / f"{name}.safetensors", model, rank, seed))
    stack, mask = held.feeds(["a", None, "b"], lambda _: 3)[1].values()
    for row, name in enumerate(["a", None, "b"]):
        again, alone = held.feeds([name], lambda _: 1)[1].values()
        assert again is stack
        np.testing.assert_array_equal(alone[0], mask[row])
    assert mask.sum(axis=1).tolist() == [2, 0, 20]


@pytest.mark.parametrize("form", ["twice", "rows in one axis", "one product"])
@pytest.mark.usefixtures("no_compiler")
def test_a_compiled_file_has_room_for_adapters(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs by NumPy, on what its session feeds: each row as its merged file."""
    model, path = tmp_path / "model.onnx", tmp_path / "model.fused"
    save(text_model(SERVED[form]), model)
    lead = (2,) if "batch, 2" in SERVED[form] else ()
    sizes = [{"x": (rows, *lead, 6)} for rows in (0, 1, 4)]
    h200 = {"h": CHIPS["H200"]}
    lowered: list[Specializer] = []

    def kept(*given: Any, **more: Any) -> Specializer:
        lowered.append(Specializer(*given, **more))
        return lowered[-1]

    monkeypatch.setattr(deploy, "Specializer", kept)
    deploy.compile(model, tmp_path / "plain.fused", targets=h200, shapes=sizes)
    made = deploy.compile(model, path, targets=h200, shapes=sizes, adapter_rank=20)
    FakeGpu().use(monkeypatch)
    assert made.shapes == sizes

    ran: list[int] = []

    def run_by_numpy(executable: Executable, names: Any, feeds: Any) -> list[Array]:
        arrays = {name: executable.host_value(value) for name, value in feeds.items()}
        shapes = {name: (a.shape, a.dtype.name) for name, a in arrays.items()}
        ran.append(len(arrays.get("adapters", ())))
        read = executable.program(shapes)
        program = lowered[-1 if ran[-1] else -2].of(shapes).program
        assert read.buffers == program.buffers
        weights = {b.name: executable.model.weight(b.name)
                   for b in read.buffers if b.kind == "weight"}  # fmt: skip
        found = interpret(program, arrays, weights, lambda *_: None)
        return [found[name] for name in names]

    monkeypatch.setattr(Executable, "run", run_by_numpy)
    session = InferenceSession(path, device="cuda")
    feeds = {"x": np.random.default_rng(1).normal(size=(4, *lead, 6)).astype(np.float32)}
    expected = {None: run(model, feeds, optimized=True)[0]}
    for seed, (name, rank) in enumerate({"one": 1, "five": 5, "wide": 17, "full": 32}.items()):
        file = write_adapter(tmp_path / f"{name}.safetensors", model, rank, seed)
        merge(model, file, tmp_path / "merged.onnx")
        expected[name] = run(tmp_path / "merged.onnx", feeds, optimized=True)[0]
        session.add_adapter(name, file)
    for names in ("five", "full", ["wide", None, "one", "five"], [None] * 4):
        rows = [names] * 4 if isinstance(names, str) else names
        for count in (4, 1, 0):
            some = names if isinstance(names, str) else rows[:count]
            (found,) = session.run(None, {"x": feeds["x"][:count]}, adapter=some)
            want = [expected[name][row] for row, name in enumerate(rows[:count])]
            # float32 sums in another order
            np.testing.assert_allclose(found, np.reshape(want, found.shape), rtol=1e-4, atol=1e-5)
    # only the ranks that a batch has are computed
    assert ran == [16, 16, 16, 32, 32, 32, 32, 32, 0, 0, 0, 0]
    with pytest.raises(UsageError, match="the adapters of this batch have 33 ranks, and the file"):
        session.run(None, feeds, adapter=["full", "one", "one", None])
    large = write_adapter(tmp_path / "a.safetensors", model, 33, 0)
    with pytest.raises(DataError, match="rank 33, and the file was compiled for 32 in a batch"):
        session.add_adapter("a", large)
    with pytest.raises(UsageError, match="no inputs for adapters: compile it with --adapter-rank"):
        InferenceSession(tmp_path / "plain.fused", device="cuda").add_adapter("a", large)
