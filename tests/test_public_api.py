"""The public API: what it holds, and that every name of it says what it is."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import python

import onnx_fuse as of
from onnx_fuse import rewrite
from onnx_fuse.ir.build import text_model

PUBLIC = (
    "onnx_fuse",
    *(f"onnx_fuse.{name}" for name in ("api", "backend", "deploy", "errors", "session")),
    *(f"onnx_fuse.training.{name}" for name in ("adapters", "callbacks", "data", "fit")),
    *(f"onnx_fuse.training.{name}" for name in ("history", "learner", "metrics", "optim")),
    *(f"onnx_fuse.training.{name}" for name in ("checkpoint", "sources", "step", "trainer")),
    *(f"onnx_fuse.generation.{name}" for name in ("batcher", "generator")),
    "onnx_fuse.quantization.quantizer",
    "onnx_fuse.nn",
    *(
        f"onnx_fuse.nn.{name}"
        for name in ("creation", "functional", "graphs", "layers", "module", "optim", "plans")
    ),
    "onnx_fuse.validation",
)
"""Modules whose names users may rely on; all others are the package's own."""
TORCH = ("onnx_fuse.torch",) if find_spec("torch") else ()
"""Those that need a package which is no part of the tests."""
MODEL = text_model("agraph (float[N] x) => (float[N] y) { y = Relu(x) }")


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class of this package defines itself."""
    for name, value in vars(cls).items():
        if not name.startswith("_") and isinstance(
            value, property | classmethod | staticmethod | type(members)
        ):
            yield f"{cls.__module__}.{cls.__qualname__}.{name}", value


def named() -> dict[str, Any]:
    """Every public function, class, method and property, by its full name."""
    found: dict[str, Any] = {}
    for module in map(importlib.import_module, (*PUBLIC, *TORCH)):
        for name in module.__all__:
            value = getattr(module, name)
            if not getattr(value, "__module__", "").startswith("onnx_fuse"):
                continue  # a table, or a type of another library
            found[f"{value.__module__}.{getattr(value, '__qualname__', name)}"] = value
            if inspect.isclass(value):
                found |= dict(members(value))
    return found


@pytest.mark.parametrize("name", [*PUBLIC, *TORCH])
def test_a_public_module_shows_what_is_public_and_nothing_else(name: str) -> None:
    module = importlib.import_module(name)
    assert list(module.__all__) == list(dict.fromkeys(module.__all__)), "a name comes twice"
    assert dir(module) == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None
    assert len((module.__doc__ or "").split()) >= 5


def test_every_public_name_has_a_docstring() -> None:
    found = {name: inspect.getdoc(value) or "" for name, value in named().items()}
    assert len(found) > 80
    assert not [name for name, text in found.items() if len(text.split()) < 4]
    assert not [name for name, text in found.items() if not text.rstrip().endswith((".", ")"))]


OBVIOUS = {"self", "cls", "model", "path", "feeds", "input_feed", "step", "device"}
OBVIOUS |= {"trainer", "learner", "fit", "spec"}
"""Arguments that mean the same wherever they stand."""


def test_every_argument_of_a_public_function_is_described() -> None:
    functions = {
        name: getattr(value, "__func__", value)
        for name, value in named().items()
        if not isinstance(value, property) and not (inspect.isclass(value) and is_plain(value))
    }
    assert len(functions) > 60
    missing = []
    for name, function in functions.items():
        text = inspect.getdoc(function) or ""
        text += str(inspect.isclass(function) and function.__init__.__doc__)
        arguments = [a for a in inspect.signature(function).parameters if a not in OBVIOUS]
        missing += [f"{name}({a})" for a in arguments if a not in text]
    assert not missing


SCRIPT = '''
"""What a type checker knows of a user's script."""

import numpy as np
import onnx

import onnx_fuse as of
from onnx_fuse import nn
from onnx_fuse.training.history import History

proto: onnx.ModelProto = of.optimize("m.onnx", level=1, skip=["Conv"], precision="fp16")
data: bytes = of.optimize(b"")
fused, report = of.optimize("m.onnx", report=True)
count: dict[str, int] = report.fusions
backward: onnx.ModelProto = of.gradient(proto, wrt=["w"], loss="mse")
session = of.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
ys = session.run(None, {"x": np.ones((2, 3), np.float32)})
check = of.validate("m.onnx", rtol=1e-4, seed=3)
if not check.ok and check.worst is not None:
    print(check.worst.max_abs)
trainer = of.Trainer("m.onnx", loss="cross_entropy", optimizer="adam", clip_norm=1.0)
loss: float = float(trainer.step((ys[0], np.zeros(2, np.int64))))
stop = of.callbacks.EarlyStopping(patience=2)
history: History = trainer.fit({"x": ys[0]}, epochs=2, metrics=["accuracy"], callbacks=[stop])
x = nn.tensor([[1.0, 2.0]], requires_grad=True)
for y in (x * 2, 1 - x, -x, x @ x, x[0], x.sum(), nn.functional.relu(x), x**2, x / x):
    z: nn.Tensor = y
optimizer: nn.optim.Optimizer = nn.optim.AdamW(nn.Linear(2, 3).parameters(), lr=1e-3)
'''
MISTAKES = """
trainer.fit({}, epoch=2)
trainer.fit({}, epochs="2")
bad: int = x * 2
text: str = of.optimize(b"")
of.validate("m.onnx", tol=3)
"""


def test_a_type_checker_reads_a_users_script(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + MISTAKES)
    found, _, _ = api.run(["--strict", "--follow-imports=silent", "--no-color", str(script)])
    lines = [int(line.split(":")[1]) for line in found.splitlines() if ": error:" in line]
    first = SCRIPT.count("\n") + 2
    assert lines == [*range(first, first + 5)], found


ARRAYS = {"x": np.ones((4, 3), np.float32), "labels": np.zeros((4, 2), np.float32)}
LINEAR = """agraph (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}>
    { y = MatMul(x, w) }"""
WRONG: dict[str, tuple[Callable[[Any, of.Trainer], Any], str]] = {
    "epochs": (lambda m, t: t.fit(ARRAYS, epochs="3"), "epochs is '3': it takes a whole number"),
    "no epochs": (lambda m, t: t.fit(ARRAYS, epochs=0), "epochs is 0: it must be at least 1"),
    "batch": (lambda m, t: t.fit(ARRAYS, batch_size=2.5), "batch_size is 2.5: it takes a whole"),
    "bool": (lambda m, t: t.fit(ARRAYS, epochs=True), "epochs is True: it takes a whole number"),
    "callback": (lambda m, t: t.fit(ARRAYS, callbacks=[5]), "5 is no callback"),
    "callbacks": (lambda m, t: t.fit(ARRAYS, callbacks=5), "callbacks is 5: it takes a list or"),
    "weights": (lambda m, t: t.set_weights({"a": 5}), "no array for the weight 'w'"),
    "lr": (lambda m, t: setattr(t, "lr", "x"), "lr is 'x': it takes a number"),
    "optimizer": (
        lambda m, t: of.Trainer(m, loss="mse", optimizer=of.optim.AdamW), "such as AdamW(lr=1e-3)"
    ),
    "rtol": (lambda m, t: of.validate(m, rtol="a"), "rtol is 'a': it takes a number or None"),
    "low": (lambda m, t: of.validate(m, rtol=-1), "rtol is -1: it must be at least 0.0"),
    "feeds": (lambda m, t: of.validate(m, feeds=ARRAYS), "it takes a list or None"),
    "no feeds": (lambda m, t: of.validate(m, feeds=[]), "feeds is empty"),
    "shape": (lambda m, t: of.validate(m, shapes={"x": 5}), "'x' is 5: it takes whole numbers"),
    "size": (lambda m, t: of.validate(m, dims={"N": "a"}), "'N' is 'a': it takes a whole number"),
    "wrt": (lambda m, t: of.gradient(m, wrt=5), "wrt is 5: it takes a list"),
    "loss": (lambda m, t: of.gradient(m, loss=5), "loss is 5: it takes the name of a loss"),
    "fuse": (lambda m, t: of.optimize(m, fuse="Conw"), "unknown fusion 'Conw' (did you mean 'Con"),
    "device": (lambda m, t: of.InferenceSession(m, device=5), "unknown device '5'"),
    "providers": (lambda m, t: of.InferenceSession(m, providers=5), "providers is 5: it takes a"),
    "run": (lambda m, t: of.InferenceSession(m).run(None, 5), "type int: give arrays by input"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_is_refused_in_a_sentence(name: str) -> None:
    call, words = WRONG[name]
    model = text_model(LINEAR)
    with pytest.raises(of.OnnxFuseError, match=re.escape(words)) as caught:
        call(model, of.Trainer(model, loss="mse"))
    assert "\n" not in str(caught.value)


def test_one_name_is_a_list_of_one() -> None:
    session = of.InferenceSession(text_model(LINEAR), providers="CPUExecutionProvider")
    (y,) = session.run("y", {"x": ARRAYS["x"]})
    assert y.shape == (4, 2)
    assert "<th>shape</th>" in session._repr_html_()
    trainer = of.Trainer(text_model(LINEAR), loss="mse")
    assert "<td>w</td>" in trainer._repr_html_()
    assert of.gradient(text_model(LINEAR), wrt="x").graph.outputs[-1].name == "x.grad"


def is_plain(cls: type) -> bool:
    """Whether a class is an exception, a protocol, or a record whose fields have docstrings."""
    record = dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")
    return record or issubclass(cls, Exception) or getattr(cls, "_is_protocol", False)


PLAIN = ("onnx_fuse.program.hardware", "onnx_fuse.program.problem")
"""Modules whose dataclasses are described as a whole."""


def test_every_field_of_a_public_dataclass_has_a_docstring() -> None:
    missing = []
    for name, cls in named().items():
        is_record = inspect.isclass(cls) and (
            dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")
        )
        if not is_record or cls.__module__ in PLAIN:
            continue
        [body] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(body, ast.ClassDef)
        inherited = {f for base in cls.__mro__[1:] for f in getattr(base, "__annotations__", {})}
        for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.dump(
                statement.annotation
            ):
                continue
            field = getattr(statement.target, "id", "")
            documented = isinstance(following, ast.Expr) and isinstance(
                following.value, ast.Constant
            )
            if not documented and not field.startswith("_") and field not in inherited:
                missing.append(f"{name}.{field}")
    assert not missing


def test_validate_is_a_function_whatever_is_imported() -> None:
    code = (
        "import onnx_fuse as of, onnx_fuse.validation, onnx_fuse.validation.check, inspect\n"
        "from onnx_fuse import cli\n"
        "cli.run_command(['validate', '--help'])\n"
        "print('function:', inspect.isfunction(of.validate), of.validate.__module__)\n"
    )
    assert python(code).splitlines()[-1] == "function: True onnx_fuse.validation.check"


def test_validate_compares_a_model_with_its_fusion_or_with_another() -> None:
    check = of.validate(MODEL)
    assert check.ok
    assert check.worst.output == "y"
    other = text_model("agraph (float[N] x) => (float[N] y) { y = Abs(x) }")
    feeds = [{"x": np.array([-1, 2], np.float32)}]
    check = of.validate(other, MODEL, feeds=feeds)
    assert not check.ok
    assert (check.worst.max_abs, check.worst.where) == (1.0, "y[0]")
    assert of.validate(other, MODEL, feeds=[{"x": np.ones(2, np.float32)}]).ok


def test_check_gradients_is_public() -> None:
    head = "agraph (float[2,3] x) => (float[2,2] y)"
    text = head + " <float[3,2] w = {1,2,3,4,5,6}> { y = MatMul(x, w) }"
    check = of.check_gradients(text_model(text))
    assert check.ok
    assert [e.tensor for e in check.errors] == ["w"]


@pytest.mark.parametrize("bug", [AttributeError, KeyError, TypeError])
@pytest.mark.parametrize("place", ["rule", "folding"])
def test_a_fault_of_our_own_code_is_not_called_one_of_the_model(
    bug: type[Exception], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise bug("ours")

    if place == "rule":
        rules = [dataclasses.replace(rule, apply=broken) for rule in rewrite.RULES]
        monkeypatch.setattr(rewrite, "RULES", rules)
    else:
        monkeypatch.setattr("onnx_fuse.ir.evaluate._run", broken)
    model = text_model(
        "g (float[N,4] x) => (float[N,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}, float[2] b = {1,2}>"
        "{ c = Sin (b)  h = MatMul (x, w)  z = Add (h, c)  y = Relu (z) }"
    )
    with pytest.raises(bug, match="ours"):
        of.optimize(model)


def test_gradient_loads_what_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = text_model("g (bool[2] x) => (bool y) { y = ReduceSum <keepdims = 0> (x) }")
    monkeypatch.setattr("onnx_fuse.autodiff.gradient", lambda *_: bad)
    with pytest.raises(of.ModelError, match="the gradient graph: onnxruntime: ") as error:
        of.gradient(bad)
    assert "\n" not in str(error.value)
