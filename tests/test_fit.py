"""`Trainer.fit`: the forms of data, metrics, callbacks, and runs that go on in the middle."""

import copy
import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_fuse.errors import CheckFailed, DataError, OnnxFuseError, UsageError
from onnx_fuse.ir.build import text_model
from onnx_fuse.training import callbacks, metrics, optim
from onnx_fuse.training import fit as fitting
from onnx_fuse.training.history import History
from onnx_fuse.training.trainer import Trainer

Array = np.ndarray[Any, Any]
MODEL = """net (float[batch, 3] x) => (float[batch, 4] y)
    <float[3, 4] w = {WEIGHTS}, float[4] b = {0, 0, 0, 0}>
    { p = MatMul (x, w)
    y = Add (p, b) }""".replace("WEIGHTS", ", ".join(str(i / 12) for i in range(12)))
ROWS, BATCH = 20, 8


def arrays(seed: int = 0, rows: int = ROWS) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "labels": (x @ rng.normal(size=(3, 4))).argmax(1)}


def trainer(**options: Any) -> Trainer:
    given = {"loss": "cross_entropy", "optimizer": optim.Adam(lr=0.05), "clip_norm": np.inf}
    return Trainer(text_model(MODEL), **(given | options))


def in_order() -> list[dict[str, Array]]:
    """The batches of an epoch without shuffling."""
    return [{k: a[i : i + BATCH] for k, a in arrays().items()} for i in range(0, ROWS, BATCH)]


def test_a_step_takes_what_a_batch_of_fit_is() -> None:
    named, ordered = trainer(), trainer(optimizer=optim.Adam(lr=0.05))
    for batch in in_order():
        assert named.step(batch) == ordered.step((batch["x"], batch["labels"]))
    for wrong in (3, "x", (1, 2, 3), {"x": batch["x"]}):
        with pytest.raises(DataError, match="the model reads 'x', 'labels'"):
            named.step(wrong)
    with pytest.raises(UsageError, match="metrics need data to evaluate"):
        named.fit(arrays(), metrics=["accuracy"])


def test_predict_needs_no_labels() -> None:
    run, batch = trainer(ema=0.5), arrays()
    run.step(batch)
    for ema in (False, True):
        expected = run.evaluate(batch, ema=ema).outputs["y"]
        for feeds in (batch["x"], (batch["x"],), {"x": batch["x"]}, batch):
            np.testing.assert_array_equal(run.predict(feeds, ema=ema)["y"], expected)


def test_an_optimizer_has_a_name() -> None:
    run = trainer(optimizer="adam")
    assert run.optimizer == optim.Adam()
    history = run.fit(arrays(), validation=arrays())
    assert repr(run) == "Trainer(Adam, 16 weights in 2 tensors, 1 steps, device='cpu')"
    assert repr(history).startswith("History(1 steps, 1 epochs, last loss ")
    table = history._repr_html_()
    assert table.count("<tr>") == 2
    assert "<th>validation_loss</th>" in table
    assert f"<td>{history.epochs[0]['loss']:.6g}</td>" in table
    with pytest.raises(UsageError, match="a Trainer cannot be copied: checkpoint"):
        copy.deepcopy(run)
    for wrong, words in (("adm", "did you mean 'adam'"), (3, "an optimizer of type int")):
        with pytest.raises(UsageError, match=words):
            trainer(optimizer=wrong)


# ---- the forms of data -------------------------------------------------------------------------


class Columns:
    """A data set as Hugging Face's: rows by a list of numbers, as lists by column."""

    column_names = ("x", "label", "text")

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, rows: list[int]) -> dict[str, list[Any]]:
        assert all(type(i) is int for i in rows)
        found = {k: a[rows].tolist() for k, a in arrays().items()}
        return {"x": found["x"], "label": found["labels"], "text": ["…"] * len(rows)}


class Examples:
    """A data set as PyTorch's: an example by its number, a mapping or a tuple."""

    def __init__(self, kind: Callable[[Array, int], Any]) -> None:
        self._kind = kind

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        return self._kind(arrays()["x"][i], int(arrays()["labels"][i]))


class Streamed:
    """A data set that streams, as Hugging Face's: batches by `iter`, told the epoch."""

    column_names = ("x", "labels")
    epochs: list[int]

    def __init__(self) -> None:
        self.epochs = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        for i in range(0, ROWS, batch_size):
            yield {k: a[i : i + batch_size].tolist() for k, a in arrays().items()}


class Tensor:
    """A tensor as PyTorch's, which is on another device and has a gradient."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.shape = array.shape

    def detach(self) -> "Tensor":
        return self

    cpu = detach

    def numpy(self) -> Array:
        return self._array


class Loader:
    """Batches as PyTorch's DataLoader gives them, without a length."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        return ([Tensor(feeds["x"]), Tensor(feeds["labels"])] for feeds in in_order())


def made(epoch: int) -> Iterator[Any]:
    yield from ((feeds["x"], feeds["labels"].tolist()) for feeds in in_order())


FORMS: dict[str, tuple[Callable[[], Any], int, int]] = {  # with examples, batch size
    "arrays": (arrays, ROWS, BATCH),
    "columns": (Columns, ROWS, BATCH),
    "streamed columns": (Streamed, 0, BATCH),
    "examples": (lambda: Examples(lambda x, y: (Tensor(x), y)), ROWS, BATCH),
    "named examples": (lambda: Examples(lambda x, y: {"x": x, "label": y}), ROWS, BATCH),
    "a list of mappings": (in_order, 0, 0),
    "a loader of tensors": (Loader, 0, 0),
    "a function": (lambda: made, 0, 0),
    "tuples in tuples": (lambda: [((f["x"],), f["labels"]) for f in in_order()], 0, 0),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_is_the_same_run(form: str) -> None:
    make, examples, size = FORMS[form]
    expected = trainer().fit(arrays(), epochs=2, batch_size=BATCH, shuffle=False)
    found = trainer().fit(make(), epochs=2, batch_size=BATCH, shuffle=False)
    assert (found.examples, found.batch_size) == (examples, size)
    assert (found.losses, found.epochs) == (expected.losses, expected.epochs)
    assert [e["step"] for e in found.epochs] == [3, 6]
    assert len(found.lr) == len(found.gradient_norms) == len(found.examples_per_second) == 6
    assert all(found.gradient_norms)


def test_a_generator_is_read_once() -> None:
    expected = trainer().fit(arrays(), epochs=1, batch_size=BATCH, shuffle=False)
    assert trainer().fit(made(0), epochs=1).losses == expected.losses
    with pytest.raises(UsageError, match="generator can be read only once"):
        trainer().fit(made(0), epochs=2)
    endless = (feeds for _ in range(99) for feeds in in_order())
    run = trainer()
    history = run.fit(endless, epochs=2, steps_per_epoch=3)
    whole = trainer().fit(arrays(), epochs=2, batch_size=BATCH, shuffle=False)
    assert (history.losses, history.epochs) == (whole.losses, whole.epochs)


def test_a_stream_is_told_the_epoch() -> None:
    data = Streamed()
    trainer().fit(data, epochs=2, batch_size=BATCH)
    assert data.epochs == [0, 1]


WRONG: dict[str, tuple[Any, type[OnnxFuseError], str]] = {
    "number": (7, UsageError, "training data of type int"),
    "too many": ([(1, 2, 3)], DataError, "'x', 'labels': 2 arrays, and the batch has 3"),
    "ragged": ([{"x": [[1.0], [1.0, 2.0]], "labels": [0]}], DataError, "'x' holds lists of diff"),
    "text": ([{"x": ["a"], "labels": [0]}], DataError, "'x' holds no numbers"),
    "float labels": ([{"x": [[1.0, 2, 3]], "labels": [0.5]}], DataError, "'labels' holds float64"),
    "class": ([{"x": [[1.0, 2, 3]], "labels": [4]}], DataError, r"'labels' holds 4 at \[0\]"),
    "nothing": ([], DataError, "gave no batch in epoch 1"),
    "missing": ([{"x": [[1.0, 2, 3]]}], DataError, "no array for the input 'labels'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses_data(case: str) -> None:
    data, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        trainer().fit(data)


def test_a_loader_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    x, labels = (torch.from_numpy(a) for a in arrays().values())
    dataset = torch.utils.data.TensorDataset(x, labels)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH)
    expected = trainer().fit(arrays(), epochs=2, batch_size=BATCH, shuffle=False)
    assert trainer().fit(loader, epochs=2).losses == expected.losses


def test_a_data_set_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    columns = {k: a.tolist() for k, a in arrays().items()}
    data = datasets.Dataset.from_dict(columns)
    for shuffle in (True, False):
        expected = trainer().fit(arrays(), epochs=2, batch_size=BATCH, shuffle=shuffle)
        found = trainer().fit(data, epochs=2, batch_size=BATCH, shuffle=shuffle)
        assert found.losses == expected.losses
    streamed = trainer().fit(data.to_iterable_dataset(), epochs=2, batch_size=BATCH)
    assert streamed.losses == expected.losses


# ---- metrics -----------------------------------------------------------------------------------


def logits_of(run: Trainer, data: dict[str, Array]) -> Array:
    found: Array = run.evaluate(data).outputs["y"].astype(np.float64)
    return found


def test_metrics_are_their_formulas() -> None:
    """Over batches of different sizes, with labels that do not count."""
    from sklearn.metrics import f1_score, top_k_accuracy_score

    data = arrays(rows=50)
    counted = np.arange(50) % 7 > 0
    data["labels"] = np.where(counted, data["labels"], -100)
    run = trainer(loss_options={"label_smoothing": 0.1})  # perplexity is of the labels all the same
    asked = ["accuracy", "top2", "perplexity", "f1", metrics.Mean(spread)]
    found = fitting.evaluate(run, data, batch_size=16, metrics=asked)
    y, labels = logits_of(run, data)[counted], data["labels"][counted]
    log_p = y - np.log(np.exp(y).sum(1, keepdims=True))
    micro = metrics.F1("micro")
    again = fitting.evaluate(run, data, metrics=[micro])["f1"]
    assert found["accuracy"] == pytest.approx((y.argmax(1) == labels).mean())
    assert again == pytest.approx(found["accuracy"])  # equal where each example has one class
    assert found["top2"] == pytest.approx(top_k_accuracy_score(labels, y, k=2, labels=range(4)))
    assert found["f1"] == pytest.approx(f1_score(labels, y.argmax(1), average="macro"))
    perplexity = np.exp(-log_p[np.arange(len(labels)), labels].mean())
    assert found["perplexity"] == pytest.approx(perplexity, rel=1e-6)
    assert found["spread"] == pytest.approx(np.ptp(logits_of(run, data), axis=1).mean(), rel=1e-6)


def spread(outputs: Any, feeds: Any) -> float:
    return float(np.ptp(outputs["y"], axis=1).mean())


def test_nothing_is_predicted_by_nan() -> None:
    spec = trainer().spec("evaluate")
    counted = metrics.begin(["top2", "accuracy"], spec)
    outputs = {"y": np.full((1, 4), np.nan, np.float32)}
    for metric in counted:
        metric.update(metrics.Evaluation(0.0, outputs, 1, 0), {"labels": np.array([1])})
        assert metric.result() == 0


NO_METRICS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "unknown": ({}, ["auc"], "unknown metric 'auc'"),
    "twice": ({}, ["f1", metrics.F1("micro")], "the metric 'f1' comes twice"),
    "no classes": ({"loss": "mse"}, ["accuracy"], "accuracy needs labels that are class numbers"),
    "type": ({}, [3], "a metric of type int"),
}


@pytest.mark.parametrize("case", NO_METRICS)
def test_refuses_metrics(case: str) -> None:
    options, given, words = NO_METRICS[case]
    data = arrays()
    if options:
        data["labels"] = np.zeros((ROWS, 4), np.float32)
    with pytest.raises(UsageError, match=words):
        trainer(**options).fit(data, validation=data, metrics=given)


# ---- evaluations and callbacks -----------------------------------------------------------------


def test_evaluations_within_an_epoch() -> None:
    """Every 2 steps and after each epoch of 3; the end of the second epoch is step 6 once."""
    history = trainer().fit(
        arrays(), epochs=2, batch_size=BATCH, validation=arrays(1), evaluate_every=2
    )
    assert [(r["step"], r["epoch"]) for r in history.metrics] == [(2, 1), (3, 1), (4, 2), (6, 2)]
    last = {k: history.metrics[-1][k] for k in ("validation_loss", "accuracy")}
    assert last.items() <= history.epochs[-1].items()


class Recorded(callbacks.Callback):
    """The events of a run, with the step at which they came."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []


for event in ("on_start", "on_step", "on_evaluation", "on_epoch", "on_end"):

    def noted(self: Recorded, fit: callbacks.Fit, event: str = event) -> None:
        self.seen.append((event, len(fit.history.losses)))

    setattr(Recorded, event, noted)


def test_the_order_of_events() -> None:
    recorded = Recorded()
    trainer().fit(arrays(), batch_size=16, validation=arrays(), callbacks=[recorded])
    ends = [("on_evaluation", 2), ("on_epoch", 2), ("on_end", 2)]
    assert recorded.seen == [("on_start", 0), ("on_step", 1), ("on_step", 2), *ends]
    recorded = Recorded()
    broken = {**arrays(), "x": np.full((ROWS, 3), np.nan, np.float32)}
    with pytest.raises(CheckFailed):
        trainer().fit(broken, callbacks=[recorded])
    assert recorded.seen == [("on_start", 0), ("on_end", 0)]


def scored(*values: float) -> History:
    records = [{"step": float(i), "validation_loss": v} for i, v in enumerate(values)]
    return History(1, 1, metrics=records)


BEST: dict[str, tuple[dict[str, Any], list[float], int]] = {
    "the smallest": ({}, [3, 1, 2], 1),
    "the first of equals": ({}, [3, 1, 1], 1),
    "by more than min_delta": ({"min_delta": 0.5}, [3, 2.6, 2.4], 2),
    "the largest": ({"mode": "max"}, [1, 3, 2], 1),
    "NaN is never best": ({}, [float("nan"), 2, float("nan")], 1),
    "none": ({}, [], -1),
}


@pytest.mark.parametrize("case", BEST)
def test_best(case: str) -> None:
    options, values, expected = BEST[case]
    assert callbacks.BestWeights(**options).best(scored(*values)) == expected


def worse_and_worse() -> dict[str, Array]:
    """Validation data whose labels are what the model does not learn."""
    data = arrays(1)
    return {**data, "labels": (data["labels"] + 1) % 4}


def test_early_stopping_with_the_best_weights(tmp_path: Path) -> None:
    """The run ends 2 evaluations after its best one, and has its weights, in memory or a folder."""
    for folder in (None, tmp_path / "best"):
        run = trainer()
        best = callbacks.BestWeights(folder=folder)
        called = [callbacks.EarlyStopping(patience=2), best]
        data = {"batch_size": BATCH, "validation": worse_and_worse()}
        history = run.fit(arrays(), epochs=30, callbacks=called, **data)
        values = [r["validation_loss"] for r in history.metrics]
        assert len(values) == int(np.argmin(values)) + 3 < 30
        kept = fitting.evaluate(run, worse_and_worse())["validation_loss"]
        assert kept == pytest.approx(min(values), rel=1e-6)
        assert run.calls == len(history.losses)


def test_the_best_weights_of_another_run_are_not_taken(tmp_path: Path) -> None:
    best = callbacks.BestWeights(folder=tmp_path)
    trainer().fit(arrays(), validation=arrays(), callbacks=[best])
    with pytest.raises(UsageError, match="holds the best weights of another run"):
        trainer().fit(arrays(), validation=arrays(), callbacks=[best])


def test_a_stopped_run_stays_stopped_when_it_is_resumed(tmp_path: Path) -> None:
    def stopping() -> list[callbacks.Callback]:
        return [callbacks.EarlyStopping(patience=2)]

    run = trainer()
    data = {"validation": worse_and_worse(), "batch_size": BATCH, "folder": tmp_path}
    history = run.fit(arrays(), epochs=30, callbacks=stopping(), **data)
    resumed = Trainer.resume(tmp_path, text_model(MODEL))
    assert resumed.fit(arrays(), epochs=30, callbacks=stopping(), **data) == history


def test_the_rate_falls_after_evaluations_without_progress(tmp_path: Path) -> None:
    """By PyTorch's rule: more than `patience` evaluations in a row, and then counted anew."""

    def rates(epochs: int, folder: str) -> list[float]:
        kept = tmp_path / folder
        run = Trainer.resume(kept, text_model(MODEL)) if kept.exists() else trainer()
        plateau = callbacks.ReduceLROnPlateau(factor=0.5, patience=1, min_lr=0.02)
        data = {"validation": worse_and_worse(), "batch_size": ROWS, "folder": kept}
        history = run.fit(arrays(), epochs=epochs, callbacks=[plateau], **data)
        values = [r["validation_loss"] for r in history.metrics]
        assert values[1:] == sorted(values[1:])
        return history.lr

    whole = [0.05] * 4 + [0.025] * 2 + [0.02] * 2
    assert rates(8, "whole") == whole
    for epochs in (2, 4, 5, 8):
        assert rates(epochs, "resumed") == whole[:epochs]


def test_a_terminal_shows_a_bar_without_callbacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal, shown in ((True, "examples/s"), (False, "")):
        monkeypatch.setattr(fitting.sys.stderr, "isatty", lambda terminal=terminal: terminal)
        trainer().fit(arrays())
        assert shown in capsys.readouterr().err
        trainer().fit(arrays(), callbacks=[])
        assert capsys.readouterr().err == ""


MONITORS: dict[str, tuple[callbacks.Callback, dict[str, Any], str]] = {
    "no validation": (callbacks.EarlyStopping(), {}, "'validation_loss' is monitored: give valid"),
    "unknown": (
        callbacks.BestWeights("f1"),
        {"validation": arrays()},
        "no metric 'f1' to monitor: the evaluations give validation_loss, accuracy",
    ),
    "patience": (callbacks.EarlyStopping(patience=0), {"validation": arrays()}, "patience is 0"),
    "factor": (callbacks.ReduceLROnPlateau(factor=1), {"validation": arrays()}, "below 1"),
    "every": (callbacks.Callback(), {"evaluate_every": 2}, "evaluate_every and metrics need data"),
}


@pytest.mark.parametrize("case", MONITORS)
def test_refuses_callbacks(case: str) -> None:
    callback, options, words = MONITORS[case]
    with pytest.raises(UsageError, match=words):
        trainer().fit(arrays(), callbacks=[callback], **options)


def test_a_stream_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Killed after step 4 of 6, of batches that a function makes: the CSV file is whole, too."""

    class Killed(callbacks.Callback):
        def on_step(self, fit: callbacks.Fit) -> None:
            if len(fit.history.losses) == 5:
                raise KeyboardInterrupt

    options = {"epochs": 2, "validation": arrays(1), "evaluate_every": 2}
    whole = trainer().fit(made, callbacks=[callbacks.CsvLog(tmp_path / "whole.csv")], **options)
    kept = {"folder": tmp_path / "run", "every": 2}
    with pytest.raises(KeyboardInterrupt):
        trainer().fit(made, callbacks=[Killed()], **options, **kept)
    resumed = Trainer.resume(tmp_path / "run", text_model(MODEL))
    assert resumed.calls == 4
    log = callbacks.CsvLog(tmp_path / "resumed.csv")
    assert resumed.fit(made, callbacks=[log], **options, **kept) == whole
    tables = []
    for name in ("whole.csv", "resumed.csv"):
        with (tmp_path / name).open() as file:
            tables.append(list(csv.DictReader(file)))
    for row in (*tables[0], *tables[1]):
        row.pop("examples_per_second")
    assert tables[0] == tables[1]
    assert [row["step"] for row in tables[0] if row["loss"]] == list("123456")
    assert [row["accuracy"] != "" for row in tables[0]].count(True) == 4


def test_tensorboard_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event  # what its files hold

    log = callbacks.TensorBoard(tmp_path / "logs")
    history = trainer().fit(arrays(), batch_size=BATCH, validation=arrays(1), callbacks=[log])
    [path] = (tmp_path / "logs").iterdir()
    data, found = path.read_bytes(), {}
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
        data = data[size + 16 :]
    assert {tag for tag, _ in found} == {
        *("train/loss", "train/lr", "train/gradient_norm", "train/examples_per_second"),
        *("validation/loss", "validation/accuracy"),
    }
    for i, loss in enumerate(history.losses):
        assert found["train/loss", i + 1] == pytest.approx(loss)


class _Recorder:
    """What wandb and mlflow are to the callbacks, and what is sent to them."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, float], int]] = []
        self.ended: Any = None

    def init(self, **options: Any) -> Any:
        self.options = options
        return self

    start_run = init

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.sent.append((numbers, step))

    log_metrics = log

    def finish(self, exit_code: int) -> None:
        self.ended = exit_code == 0

    def end_run(self, status: str) -> None:
        self.ended = status == "FINISHED"

    def set_experiment(self, name: str) -> None:
        self.experiment = name


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_gets_each_step_and_evaluation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = _Recorder()
    monkeypatch.setitem(sys.modules, name, recorder)
    log = callbacks.Wandb(project="p") if name == "wandb" else callbacks.MLflow("p", run_name="r")
    history = trainer().fit(arrays(), batch_size=BATCH, validation=arrays(1), callbacks=[log])
    steps = [numbers["train/loss"] for numbers, _ in recorder.sent if "train/loss" in numbers]
    assert steps == history.losses
    assert recorder.sent[-1] == (
        {"validation/loss": history.metrics[-1]["validation_loss"],
         "validation/accuracy": history.metrics[-1]["accuracy"]}, len(history.losses),
    )  # fmt: skip
    assert recorder.ended is True
    bad = [arrays(), {"x": arrays()["x"]}]
    with pytest.raises(DataError):
        trainer().fit(bad, callbacks=[log])
    assert recorder.ended is False
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"{name} is not installed: pip install {name}"):
        trainer().fit(arrays(), callbacks=[log])


def test_progress_prints_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed on no terminal: a line for each epoch and each evaluation within one."""
    run = trainer()
    run.fit(
        arrays(),
        epochs=2,
        batch_size=BATCH,
        validation=arrays(1),
        evaluate_every=2,
        callbacks=[callbacks.Progress()],
    )
    heads = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert heads == ["step 2", "epoch 1 of 2", "step 4", "step 6", "epoch 2 of 2"]
