"""Distillation: the loss of a step that holds a teacher's graph, against NumPy's."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from lowering import interpreted
from support import Cli, answers, assert_near, stock

from onnx_fuse import Trainer, optim
from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import add_initializer, text_model

STUDENT = """g ({kind}[N,4] x) => (float[N,3] y, float[N,4] h) {{
  h = Tanh (x) y = MatMul (h, w) }}"""
TEACHER = """g ({kind}[N,4] x, float[N,4] more) => (float[N,2] z, float[N,3] y, float[N,4] h) {{
  a = Cast <to = 1> (x) n = BatchNormalization (a, gamma, beta, mean, var) h = Add (n, more)
  t = MatMul (h, w) y = Mul (t, t) z = MatMul (h, u) }}"""
NARROW = "g ({kind}[N,4] x) => (float[N,2] y) {{ y, z = Split <axis = 1, num_outputs = 2> (x) }}"
RNG = np.random.default_rng(0)
X, MORE = (RNG.standard_normal((6, 4)).astype(np.float32) for _ in range(2))
LABELS = RNG.standard_normal((6, 3)).astype(np.float32)
FEEDS = {"x": X, "more": MORE, "labels": LABELS}


def net(text: str, kind: str = "float") -> ir.Model:
    shapes = {"w": (4, 3), "u": (4, 2), **dict.fromkeys(("gamma", "beta", "mean", "var"), (4,))}
    model, rng = text_model(text.format(kind=kind)), np.random.default_rng(len(text))
    for name, shape in shapes.items():
        array = np.float32(rng.uniform(0.5, 1, shape) if name == "var" else rng.normal(size=shape))
        for node in model.graph:
            for i, value in enumerate(node.inputs):
                if value is not None and value.name == name and value.producer() is None:
                    weight = model.graph.initializers.get(f"{name}.")
                    weight = weight or add_initializer(model.graph, f"{name}.", array)
                    node.replace_input_with(i, weight)
        if f"{name}." in model.graph.initializers:
            model.graph.initializers[f"{name}."].name = name
    return model


def divergence(y: np.ndarray, teacher: np.ndarray, temperature: float) -> float:
    def logs(scores: np.ndarray) -> np.ndarray:
        scores = np.float64(scores) / temperature
        return scores - np.log(np.exp(scores).sum(-1, keepdims=True))

    p = np.exp(logs(teacher))
    return float((p * (logs(teacher) - logs(y))).sum(-1).mean() * temperature**2)


def outputs(text: str, kind: str = "float") -> dict[str, np.ndarray]:
    feeds = {"x": X.astype(np.float16 if kind == "float16" else np.float32), "more": MORE}
    session = stock(net(text, kind))
    return answers(session, {v.name: feeds[v.name] for v in session.get_inputs()})


@pytest.mark.parametrize("temperature", [0.5, 2.0, None])
@pytest.mark.parametrize("distill", [None, {"y": 0.7}, {"y": 0.5, "h": 2.0}])
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_the_loss_is_that_of_both(distill, temperature, kind: str) -> None:
    trainer = Trainer(
        net(STUDENT), loss="mse", teacher=net(TEACHER, kind), distill=distill,
        temperature=temperature, optimizer=optim.SGD(lr=0.1),
    )  # fmt: skip
    ours, theirs = outputs(STUDENT), outputs(TEACHER, kind)
    expected = np.square(np.float64(ours["y"]) - LABELS).mean()
    for name, weight in (distill or {"y": 1.0}).items():
        a, b = np.float64(ours[name]), np.float64(theirs[name])
        apart = np.square(a - b).mean() if temperature is None else divergence(a, b, temperature)
        expected += weight * apart
    step, feeds = trainer.step_graph(FEEDS)
    assert trainer.step(FEEDS) == pytest.approx(expected, rel=2e-3 if kind == "float16" else 1e-5)
    assert list(trainer.weights()) == ["w"]  # the teacher's, of the same name too, stay
    assert_near(interpreted(step, feeds), answers(stock(step), feeds), rtol=1e-3, atol=1e-4)


def test_a_student_learns_what_the_teacher_knows(tmp_path: Path) -> None:
    """The labels are zeros, and the weight of their loss is lost in that of the teacher's."""
    trainer = Trainer(
        net(STUDENT), loss="mse", teacher=net(TEACHER), distill={"y": 1e3}, temperature=1.0,
        optimizer=optim.AdamW(lr=0.05),
    )  # fmt: skip
    feeds = FEEDS | {"labels": 0 * LABELS}
    before = divergence(outputs(STUDENT)["y"], outputs(TEACHER)["y"], 1.0)
    for _ in range(40):
        trainer.step(feeds)
    trainer.checkpoint(tmp_path / "run")
    trainer.save(tmp_path / "tuned.onnx")
    saved = stock(str(tmp_path / "tuned.onnx"))
    assert [v.name for v in saved.get_inputs()] == ["x"]
    after = divergence(answers(saved, {"x": X})["y"], outputs(TEACHER)["y"], 1.0)
    assert after < before / 2
    resumed = Trainer.resume(
        tmp_path / "run", net(STUDENT), loss="mse", teacher=net(TEACHER), distill={"y": 1e3},
        temperature=1.0,
    )  # fmt: skip
    assert resumed.step(feeds) == trainer.step(feeds)


def test_what_does_not_fit_is_refused() -> None:
    for options, message in (
        ({"temperature": 0.0}, "must be above 0"),
        ({"temperature": "2"}, "temperature is '2': it takes a number or None"),
        ({"distill": {}}, "distill names no output"),
        ({"distill": ["y"]}, r"distill is \['y'\]: it takes a dictionary or None"),
        ({"distill": {"y": np.nan}}, "distill gives 'y' the weight nan: it must be a number"),
        ({"distill": {"y": "a"}}, "distill gives 'y' the weight 'a': it must be a number"),
        (
            {"teacher": net(NARROW)},
            r"'y' has the shape \[N,2\] in the teacher and \[N,3\] in the model",
        ),
        ({"distill": {"z": 1.0}}, "no output of floats 'z' in common: they have y, h"),
        ({"teacher": text_model("g (float[4] x) => (float[4] k) { k = Exp (x) }")}, "no output of"),
    ):
        with pytest.raises(UsageError, match=message):
            Trainer(net(STUDENT), loss="mse", **{"teacher": net(TEACHER), **options})


def test_the_command(tmp_path: Path, cli: Cli) -> None:
    save(net(STUDENT), tmp_path / "student.onnx")
    save(net(TEACHER), tmp_path / "teacher.onnx")
    np.savez(tmp_path / "data.npz", **FEEDS)
    train = ["train", tmp_path / "student.onnx", "--data", tmp_path / "data.npz", "--loss", "mse"]
    out = tmp_path / "out.onnx"
    cli.done(*train, "--teacher", tmp_path / "teacher.onnx", "--temperature", "3", "-o", out)
    assert stock(str(out)).get_inputs()[0].name == "x"
    teacher = tmp_path / "teacher.onnx"
    said = cli.fails(2, *train, "--teacher", teacher, "-o", teacher)
    assert "-o would overwrite --teacher" in said
