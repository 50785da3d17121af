"""The commands train and gradient: what they write, their exit codes, their one-line errors."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx
import pytest
from support import answers, run, stock

from onnx_fuse import cli
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import text_model
from onnx_fuse.options import options_of
from onnx_fuse.training import images
from onnx_fuse.training.data import load_examples
from onnx_fuse.training.fit_options import FitOptions
from onnx_fuse.training.options import TrainingOptions

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mlp.onnx, train.npz, test.npz: scikit-learn's digits, a fifth held out."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("digits")
    save(mlp.build(mlp.SIZES["digits"]), folder / "mlp.onnx")
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int64)
    np.savez(folder / "train.npz", x=x[360:], labels=y[360:])
    np.savez(folder / "test.npz", x=x[:360], labels=y[:360])
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with a linear classifier of 4 classes and 20 examples."""
    rng = np.random.default_rng(0)
    text = """net (float[batch, 3] x) => (float[batch, 4] y) <float[3, 4] w = {WEIGHTS}>
        { y = MatMul (x, w) }""".replace("WEIGHTS", ", ".join(map(str, range(12))))
    save(text_model(text), tmp_path / "model.onnx")
    x = rng.normal(size=(20, 3)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, labels=rng.integers(0, 4, 20))
    return tmp_path


def command(folder: Path, *arguments: str) -> int:
    """Run with the names of files in `folder` for their paths."""
    return cli.run_command(
        [str(folder / a) if "." in a and not a[0].isdigit() else a for a in arguments]
    )


def test_digits_reach_97_percent(digits: Path) -> None:
    """The accuracy is that of the written file on held-out digits, under stock onnxruntime."""
    options = ["--epochs", "15", "--lr", "2e-3", "--schedule", "cosine", "--val", "test.npz"]
    files = ["-o", "tuned.onnx", "--json", "history.json", "--curve", "curve.html"]
    train = ["train", "mlp.onnx", "--data", "train.npz", "--loss", "cross_entropy"]
    assert command(digits, *train, *options, *files) == 0
    with np.load(digits / "test.npz") as test:
        (logits,) = run(digits / "tuned.onnx", test, optimized=True)
        accuracy = float((logits.argmax(1) == test["labels"]).mean())
    assert accuracy >= 0.97
    history = json.loads((digits / "history.json").read_text())
    assert len(history["losses"]) == len(history["lr"]) == 15 * 45
    assert history["epochs"][-1]["accuracy"] == pytest.approx(accuracy)
    page = (digits / "curve.html").read_text()
    assert '"title":"loss"' in page
    assert all(f'"name":"{name}"' in page for name in ("loss", "smoothed", "validation"))
    assert "default-src 'none'" in page  # nothing is loaded


def test_resume_after_more_epochs(small: Path) -> None:
    """Two epochs and then two more are four, bit for bit."""
    train = ["train", "model.onnx", "--data", "data.npz", "--loss", "cross_entropy"]
    train += ["--batch-size", "8", "--checkpoint", str(small / "run")]
    assert command(small, *train, "--epochs", "2") == 0
    assert command(small, *train, "--epochs", "4") == 2  # the folder holds a run
    assert command(small, *train, "--epochs", "4", "--resume", "-o", "resumed.onnx") == 0
    train[-1] = str(small / "other")
    assert command(small, *train, "--epochs", "4", "-o", "whole.onnx") == 0
    assert (small / "resumed.onnx").read_bytes() == (small / "whole.onnx").read_bytes()


def test_folder_of_npy(small: Path) -> None:
    (small / "arrays").mkdir()
    with np.load(small / "data.npz") as arrays:
        for name, array in arrays.items():
            np.save(small / "arrays" / f"{name}.npy", array)
    train = ["train", "model.onnx", "--loss", "cross_entropy", "--epochs", "2", "--data"]
    assert command(small, *train, str(small / "arrays"), "-o", "a.onnx") == 0
    assert command(small, *train, "data.npz", "-o", "b.onnx") == 0
    assert (small / "a.onnx").read_bytes() == (small / "b.onnx").read_bytes()


CONFIG = """
data = "{folder}/data.npz"
val = "{folder}/data.npz"
loss = "cross_entropy"
epochs = 30
batch-size = 8
evaluate_every = 2
metric = ["accuracy", "top2", "f1"]
group = ["w:scale=2,weight_decay=0"]
ema = 0.9
patience = 2
keep-best = true
csv = "{folder}/log.csv"
"""


def test_a_config_file_gives_options(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the command line count more; the table has every metric of each evaluation."""
    (small / "run.toml").write_text(CONFIG.format(folder=small))
    arguments = ["--config", "run.toml", "--epochs", "2", "--json", "history.json"]
    assert command(small, "train", "model.onnx", *arguments, "-o", "a.onnx") == 0
    out = capsys.readouterr().out
    assert "validation loss" in out
    history = json.loads((small / "history.json").read_text())
    assert len(history["epochs"]) == 2
    assert [r["step"] for r in history["metrics"]] == [2, 3, 4, 6]
    assert {"validation_loss", "accuracy", "top2", "f1"} < set(history["metrics"][0])
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert len(rows) == 4
    assert len((small / "log.csv").read_text().splitlines()) == 1 + 6 + 4
    given = ["--data", "data.npz", "--val", "data.npz", "--loss", "cross_entropy", "--epochs", "2"]
    given += ["--batch-size", "8", "--evaluate-every", "2", "--group", "w:scale=2,weight_decay=0"]
    assert command(small, "train", "model.onnx", *given, "--ema", "0.9", "-o", "b.onnx") == 0
    assert (small / "a.onnx").read_bytes() == (small / "b.onnx").read_bytes()


def test_a_config_file_may_be_yaml(small: Path) -> None:
    """The same options in both forms give the same file; YAML reads 1e-3 as a text."""
    pytest.importorskip("yaml")
    toml = CONFIG.format(folder=small) + "lr = 1e-3\n"
    (small / "run.toml").write_text(toml)
    (small / "run.yaml").write_text(toml.replace(" = ", ": "))
    for kind in ("toml", "yaml"):
        given = ["--config", f"run.{kind}", "--epochs", "2", "-o", f"{kind}.onnx"]
        assert command(small, "train", "model.onnx", *given) == 0
    assert (small / "toml.onnx").read_bytes() == (small / "yaml.onnx").read_bytes()


def test_training_stops_early_and_keeps_the_best(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On labels that nothing predicts: the file has the loss of the best evaluation."""
    with np.load(small / "data.npz") as arrays:
        np.savez(small / "val.npz", x=arrays["x"], labels=(arrays["labels"] + 1) % 4)
    train = ["train", "model.onnx", "--data", "data.npz", "--val", "val.npz", "--lr", "0.1"]
    train += ["--loss", "cross_entropy", "--epochs", "50", "--json", "history.json"]
    train += ["--patience", "2", "--keep-best", "--checkpoint", str(small / "run")]
    assert command(small, *train, "-o", "tuned.onnx") == 0
    assert "stopped: validation_loss has not improved in 2 evaluations" in capsys.readouterr().out
    losses = [
        r["validation_loss"] for r in json.loads((small / "history.json").read_text())["metrics"]
    ]
    assert len(losses) == int(np.argmin(losses)) + 3 < 50
    with np.load(small / "val.npz") as arrays:
        z = run(small / "tuned.onnx", arrays, optimized=True)[0].astype(np.float64)
        labels = arrays["labels"]
    found = (np.log(np.exp(z).sum(1)) - z[np.arange(20), labels]).mean()
    assert found == pytest.approx(min(losses), rel=1e-5)


def test_a_cosine_schedule_is_extended_on_resume(small: Path) -> None:
    train = ["train", "model.onnx", "--data", "data.npz", "--loss", "cross_entropy"]
    train += ["--schedule", "cosine", "--checkpoint", str(small / "run"), "--json", "history.json"]
    assert command(small, *train, "--epochs", "2") == 0
    assert command(small, *train, "--epochs", "4", "--resume") == 0
    rates = json.loads((small / "history.json").read_text())["lr"]
    assert len(rates) == 4
    assert rates[2] == pytest.approx(1e-3 / 2)  # half way through the longer schedule


def test_adapters_and_several_losses(small: Path) -> None:
    """A loss in a file, one more by name, adapters beside the weight and in a file."""
    text = """loss (float[n, 4] y, float[n, 4] t) => (float z) {
        d = Sub (y, t) s = Abs (d) z = ReduceMean <keepdims = 0> (s) }"""
    save(text_model(text), small / "own.onnx")
    replaced(small, t=np.zeros((20, 4), np.float32))
    train = ["train", "model.onnx", "--data", "data.npz", "--loss", "own.onnx"]
    train += ["--add-loss", "cross_entropy,weight=2", "--lora-rank", "2", "--lora", "w"]
    assert command(small, *train, "--adapters", "a.safetensors", "-o", "tuned.onnx") == 0
    assert (small / "a.safetensors").exists()


def replaced(folder: Path, **arrays: Array) -> None:
    with np.load(folder / "data.npz") as stored:
        found = {**stored, **arrays}
    np.savez(folder / "data.npz", **{k: v for k, v in found.items() if v.size})


X = np.ones((20, 3), np.float32)
REFUSED: dict[str, tuple[dict[str, Array], list[str], int, str]] = {
    "width": ({"x": X[:, :2]}, [], 1, "'x' has shape [20, 2], the model reads [batch, 3]"),
    "dtype": ({"x": X.astype(float) + 0.1}, [], 1, "'x' holds float64, the model reads float32"),
    "label": ({"labels": np.full(20, 4)}, [], 1, "'labels' holds 4 at [0]"),
    "labels": ({"labels": np.zeros(0)}, [], 1, "no array for the input 'labels'"),
    "length": ({"x": X[:7]}, [], 1, "differ in their number of examples: 'x' 7, 'labels' 20"),
    "objects": (
        {"x": np.array([None])},
        [],
        1,
        "not an .npz file or a folder of .npy files: it is",
    ),
    "loss": ({}, ["--loss", "hing"], 2, "unknown loss 'hing' (did you mean 'hinge'"),
    "optimizer": ({}, ["--optimizer", "lbfgs"], 2, "unknown optimizer 'lbfgs'"),
    "momentum": ({}, ["--momentum", "0.9"], 2, "adamw has no momentum"),
    "option": ({}, ["--optimizer-option", "beta=0.9"], 2, "beta: it has lr, weight_decay,"),
    "option's form": ({}, ["--optimizer-option", "betas"], 2, "write it as NAME=VALUE"),
    "option's type": ({}, ["--optimizer-option", "betas=[1]"], 2, "betas is (1,): it takes 2 num"),
    "option's value": ({}, ["--optimizer-option", "eps=small"], 2, "eps is 'small': it takes a nu"),
    "loss's option": (
        {},
        ["--loss-option", "gamma=3"],
        2,
        "option of cross_entropy 'gamma': choose",
    ),
    "schedule": ({}, ["--schedule", "saw"], 2, "unknown schedule 'saw'"),
    "schedule of Python": ({}, ["--schedule", "custom"], 2, "unknown schedule 'custom': choose"),
    "frozen": ({}, ["--freeze", "w"], 2, "every weight of the model is frozen"),
    "glob": ({}, ["--trainable", "head"], 2, "'head' matches no weight of the model: it has w"),
    "precision": ({}, ["--precision", "bf16"], 2, "precision 'bf16' needs a GPU"),
    "resume": ({}, ["--resume"], 2, "--resume needs the folder"),
    "config": ({}, ["--config", "none.toml"], 2, "none.toml: No such file"),
    "group": ({}, ["--group", "w"], 2, "--group w: write it as GLOB:lr=1e-4"),
    "group's rate": ({}, ["--group", "w:lr=high"], 2, "--group w:lr=high: 'high' is no number"),
    "group's field": ({}, ["--group", "w:speed=1"], 2, "'speed' is none of lr, scale,"),
    "metric": ({}, ["--metric", "auc", "--val", "data.npz"], 2, "unknown metric 'auc'"),
    "mistyped metric": ({}, ["--metric", "acuracy", "--val", "data.npz"], 2, "mean 'accuracy'"),
    "mistyped optimizer": ({}, ["--optimizer", "adamv"], 2, "unknown optimizer 'adamv' (did you"),
    "patience": ({}, ["--patience", "2"], 2, "'validation_loss' is monitored: give validation"),
    "adapters": ({}, ["--adapters", "a.safetensors"], 2, "adapters need a rank: add --lora-rank"),
    "PEFT": ({}, ["--lora-rank", "1", "--adapters", "lora"], 2, "'w' has no PyTorch module name"),
    "term": ({}, ["--add-loss", "mse,size=3"], 2, "'size' is none of output, weight, labels"),
    "input": ({}, ["-o", "model.onnx"], 2, "the output is the input"),
    "nan": ({"x": X * np.nan}, [], 3, "step 1: the loss is nan; 'x' holds a value that is not"),
    "overflow": ({"x": X * 1e38}, [], 3, "'y', the result of the MatMul node"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_line(case: str, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is written, in the order of cost: arguments, arrays, steps."""
    arrays, options, code, words = REFUSED[case]
    replaced(small, **arrays)
    before = sorted(p.name for p in small.iterdir())
    arguments = ["--data", "data.npz", "--loss", "cross_entropy", *options]
    assert command(small, "train", "model.onnx", *arguments) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert sorted(p.name for p in small.iterdir()) == before


CONFIGS = {
    "syntax": ("run.toml", "epochs =", "run.toml: Invalid value"),
    "name": ("run.toml", "epoch = 3", "'epoch' is not an option"),
    "list": ("run.toml", "epochs = [3]", "'epochs' is a list of values, but the option takes one"),
    "table": ("run.toml", "[group]\nlr = 3", "'group' is a table"),
    "type": ("run.toml", 'epochs = "three"', "Invalid value for '--epochs'"),
    "YAML's syntax": ("run.yaml", "epochs: [3", "run.yaml: while parsing a flow sequence"),
    "YAML's name": ("run.yaml", "epoch: 3", "'epoch' is not an option"),
    "YAML of one word": ("run.yml", "epochs", "run.yml: expected lines such as 'epochs: 3'"),
    "YAML without a value": ("run.yaml", "epochs:", "'epochs' has no value"),
    "YAML with an object": ("run.yaml", "epochs: !!python/object:os.x {}", "run.yaml: could not"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_refuses_a_config(case: str, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, text, words = CONFIGS[case]
    if not name.endswith("toml"):
        pytest.importorskip("yaml")
    (small / name).write_text(text)
    train = ["train", "model.onnx", "--data", "data.npz", "--loss", "cross_entropy"]
    assert command(small, *train, "--config", name) == 2
    error = capsys.readouterr().err
    assert words in error


def test_yaml_without_its_package_is_one_line(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (small / "run.yaml").write_text("epochs: 3")
    train = ["train", "model.onnx", "--data", "data.npz", "--loss", "cross_entropy"]
    assert command(small, *train, "--config", "run.yaml") == 2
    assert 'YAML needs PyYAML: pip install ".[yaml]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    "data", ["missing.npz", "model.onnx", "x.npy", "damaged.npz", "encrypted.npz"]
)
def test_data_that_is_none(data: str, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(small / "x.npy", X)
    np.savez_compressed(small / "damaged.npz", x=X)
    stored = bytearray((small / "damaged.npz").read_bytes())
    stored[45:60] = b"\xff" * 15  # within the compressed bytes
    (small / "damaged.npz").write_bytes(stored)
    np.savez(small / "encrypted.npz", x=X)
    stored = bytearray((small / "encrypted.npz").read_bytes())
    stored[6] |= 1  # the flag, in both of the entry's headers
    stored[stored.index(b"PK\x01\x02") + 8] |= 1
    (small / "encrypted.npz").write_bytes(stored)
    train = ["train", "model.onnx", "--loss", "cross_entropy", "--data", data]
    assert command(small, *train) == 1
    assert data in capsys.readouterr().err


def test_diverging_run_keeps_its_last_checkpoint(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate explodes the weights; the folder holds the states before the step that failed."""
    train = ["train", "model.onnx", "--data", "data.npz", "--loss", "mse", "--optimizer", "sgd"]
    train += ["--lr", "1e9", "--epochs", "9", "--batch-size", "20"]
    replaced(small, labels=np.zeros((20, 4), np.float32))
    assert command(small, *train, "--checkpoint", str(small / "run")) == 3
    assert "step " in capsys.readouterr().err
    assert len(list((small / "run").glob("step-*"))) == 2
    assert not (small / "model.tuned.onnx").exists()


def test_gradient_runs_on_onnxruntime(small: Path) -> None:
    assert command(small, "gradient", "model.onnx", "--loss", "cross_entropy", "-o", "g.onnx") == 0
    with np.load(small / "data.npz") as arrays:
        feeds = dict(arrays)
    found = answers(stock(small / "g.onnx", optimized=True), feeds)
    loss, gradient = found["loss"], found["w.grad"]
    w = onnx.numpy_helper.to_array(onnx.load(small / "model.onnx").graph.initializer[0])
    z = feeds["x"] @ w
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    hit = np.arange(20), feeds["labels"]
    assert loss == pytest.approx(-np.log(p[hit]).mean(), rel=1e-5)
    p[hit] -= 1
    np.testing.assert_allclose(gradient, feeds["x"].T @ p / 20, rtol=1e-4, atol=1e-5)


def test_gradient_refuses(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(small, "gradient", "model.onnx", "--wrt", "nothing") == 2
    assert "no initializer or input 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("cls", [TrainingOptions, FitOptions])
def test_every_option_of_training_has_its_text(cls: type) -> None:
    """One that the pattern of a text does not read would be missing."""
    options = options_of(cls)
    assert sorted(options) == sorted(field.name for field in dataclasses.fields(cls))
    assert all(option.help.endswith((".", ")")) for option in options.values())


def test_data_is_a_table_too(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = np.load(small / "data.npz")
    rows = [
        {"x": x.tolist(), "label": int(y), "text": "a"} for x, y in zip(*data.values(), strict=True)
    ]
    (small / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cells = [[*row["x"], row["label"]] for row in rows]
    lines = ["x.0,x.1,x.2,labels", *(",".join(map(str, row)) for row in cells)]
    (small / "data.csv").write_text("\n".join(lines))
    tuned = {}
    for kind in ("npz", "csv", "jsonl"):
        line = ["train", "model.onnx", "--data", f"data.{kind}", "--loss", "cross_entropy"]
        assert command(small, *line, "--split", "0.25", "-o", f"{kind}.onnx") == 0
        assert "validation loss" in capsys.readouterr().out
        tuned[kind] = (small / f"{kind}.onnx").read_bytes()
    assert tuned["npz"] == tuned["csv"] == tuned["jsonl"]
    assert command(small, *line, "--split", "0.25", "--val", "data.csv") == 2
    assert command(small, *line, "--split", "0.01") == 2
    (small / "data.jsonl").write_text('{"x": [1, 2, 3], "labels": 0}\n{"x": [1, 2, 3]}')
    assert command(small, *line) == 1
    assert "data.jsonl: example 2: it has other names than the first" in capsys.readouterr().err


IMAGES = {
    "first": """agraph (float[N, 3, 4, 6] x) => (float[N, 2] y) <float[3, 2] w = {0, 0, 0, 0, 0, 0}>
        { p = GlobalAveragePool(x) f = Flatten(p) y = MatMul(f, w) }""",
    "last": """agraph (float[N, 4, 6, 1] x) => (float[N, 2] y) <float[1, 2] w = {0, 0}>
        { t = Transpose <perm = [0, 3, 1, 2]> (x) p = GlobalAveragePool(t)
          f = Flatten(p) y = MatMul(f, w) }""",
}


@pytest.mark.parametrize("layout", IMAGES)
def test_folders_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str) -> None:
    """Dark and bright pictures, of sizes of their own: what is read is theirs, and learned."""
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "test"):
        for name, level in (("bright", 220), ("dark", 30)):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(6):
                pixels = np.full((8 + i, 12, 3), level + i, np.uint8)
                image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
    channels = 3 if layout == "first" else 1
    model = text_model(IMAGES[layout])
    save(model, tmp_path / "m.onnx")
    arrays = images.for_inputs(
        load_examples(tmp_path / "train"), model.graph.inputs, [0.5], [0.25] * channels
    )
    np.testing.assert_allclose(arrays["x"][:1], (220 / 255 - 0.5) / 0.25, rtol=1e-6)
    assert arrays["x"].shape == (12, *(int(d) for d in model.graph.inputs[0].shape[1:]))
    assert arrays["labels"].tolist() == [0] * 6 + [1] * 6
    options = ["--loss", "cross_entropy", "--epochs", "20", "--lr", "0.05", "--image-mean", "0.5"]
    line = ["train", "m.onnx", "--data", str(tmp_path / "train"), *options]
    line += ["--val", str(tmp_path / "test")]
    assert command(tmp_path, *line, "--json", "run.json") == 0
    assert "classes: 0 bright, 1 dark" in capsys.readouterr().out
    assert json.loads((tmp_path / "run.json").read_text())["metrics"][-1]["accuracy"] == 1
    (tmp_path / "train" / "dark" / "x.png").write_text("no image")
    assert command(tmp_path, *line) == 1
    assert "x.png: no image that Pillow reads" in capsys.readouterr().err
    assert command(tmp_path, *line, "--image-std", "0") == 2
    (tmp_path / "train" / "grey").mkdir()
    assert command(tmp_path, *line) == 1
    assert "it holds no .npy file, and its folder 'grey' no image" in capsys.readouterr().err
