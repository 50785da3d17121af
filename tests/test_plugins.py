"""Operators and kernels that a user registers: fused, checked, differentiated, saved, launched."""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from support import Cli

import onnx_fuse as of
from onnx_fuse import UsageError, nn, plugins
from onnx_fuse.autodiff.load import load
from onnx_fuse.cli import app
from onnx_fuse.cuda import nvrtc
from onnx_fuse.ir.build import text_model
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime import ort

BODY = """Squash <limit: float = 2.0> (x, scale) => (y)
  { a = Mul (x, scale)  t = Tanh (a)  l_f = Constant <value_float: float = @limit> ()
  l = CastLike (l_f, x)  y = Mul (t, l) }"""
SWISH = """Swish (x) => (y) { s = Tanh (x)  y = Mul (x, s) }"""
NAMES = ("my.ops::Squash", "my.ops::Swish", "my.ops::Leaky", "Softmax")
X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    for name in NAMES:
        plugins.unregister(name)


def squash(**more: Any) -> of.OpDef:
    return of.OpDef("Squash", "my.ops", BODY, **more)


def model_of(body: str, imports: str = '"my.ops" : 1') -> ir.Model:
    return text_model(
        f'<ir_version: 10, opset_import: ["" : 21, {imports}]>\n'
        "agraph (float[N,4] x) => (float[N,4] y) <float[4] w = {1,-2,3,0.5}> {" + body + "}"
    )


def test_a_registered_operator_runs_is_differentiated_and_is_saved(tmp_path: Path) -> None:
    of.register_op(squash())
    x = nn.tensor(X, requires_grad=True)
    y = nn.op_call("Squash", [x, np.array(0.5, np.float32)], {"limit": 3.0}, domain="my.ops")
    np.testing.assert_allclose(y.numpy(), 3 * np.tanh(0.5 * X), rtol=1e-5)
    y.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 1.5 / np.cosh(0.5 * X) ** 2, rtol=1e-5)
    model = model_of("y = my.ops.Squash <limit = 3.0> (x, w)")
    fused = of.optimize(ir.serde.serialize_model(model))
    path = tmp_path / "squash.onnx"
    onnx.save(fused, path)
    assert [f.name for f in onnx.load(path).functions] == ["Squash"]
    w = np.array([1, -2, 3, 0.5], np.float32)
    found = ort.session(path).run(None, {"x": X})[0]
    np.testing.assert_allclose(found, 3 * np.tanh(X * w), rtol=1e-5)
    assert of.validate(path, path).ok
    check = of.check_gradients(model)
    assert check.ok
    assert {e.tensor for e in check.errors} >= {"w"}


def test_its_own_gradient_rule_is_used() -> None:
    asked = []

    def grad(op: Any, node: ir.Node, dys: Any) -> list[Any]:
        asked.append(node.op_type)
        s = op.Tanh(node.inputs[0])
        slope = op.Mul(node.inputs[0], op.Sub(1.0, op.Mul(s, s)))
        return [op.Mul(dys[0], op.Add(s, slope))]

    of.register_op(of.OpDef("Swish", "my.ops", SWISH, grad=grad))
    x = nn.tensor(X, requires_grad=True)
    nn.op_call("Swish", [x], domain="my.ops").sum().backward()
    s = np.tanh(X)
    np.testing.assert_allclose(x.grad.numpy(), s + X * (1 - s * s), rtol=1e-4, atol=1e-6)
    assert asked == ["Swish"]


GRAPHS: list[tuple[str, str, dict[str, int]]] = [
    ("as_written", "s = Tanh(x) y = Mul(x, s)", {"Swish": 1}),
    ("other_order", "s = Tanh(x) y = Mul(s, x)", {"Swish": 1}),
    ("twice", "s = Tanh(x) a = Mul(x, s) t = Tanh(a) y = Mul(t, a)", {"Swish": 2}),
    ("of_another_value", "s = Tanh(x) n = Neg(x) y = Mul(n, s)", {}),
    ("read_elsewhere", "s = Tanh(x) a = Mul(x, s) y = Add(a, s)", {}),
]


@pytest.mark.parametrize(("graph", "wanted"), [r[1:] for r in GRAPHS], ids=[r[0] for r in GRAPHS])
def test_a_body_is_recognized_where_a_graph_computes_it(
    graph: str, wanted: dict[str, int], saved: Callable[..., Path], cli: Cli
) -> None:
    of.register_op(of.OpDef("Swish", "my.ops", SWISH), fuse=True, level=1)
    path = saved(model_of(graph))
    cli.done("optimize", path)
    out = onnx.load(path.with_suffix(".fused.onnx"))
    found = [n.op_type for n in out.graph.node if n.domain == "my.ops"]
    assert {name: found.count(name) for name in set(found)} == wanted


def test_a_refusal_is_explained(saved: Callable[..., Path], cli: Cli) -> None:
    of.register_op(of.OpDef("Swish", "my.ops", SWISH), fuse=True)
    path = saved(model_of("s = Tanh(x) a = Mul(x, s) y = Add(a, s)"))
    reasons = [(row["code"], row["reason"]) for row in cli.report("optimize", path)["not_fused"]]
    assert any(code == "other-readers" and "'s'" in text for code, text in reasons), reasons
    result = cli("optimize", saved(model_of("s = Tanh(x) y = Mul(x, s)")), "--skip", "Swish")
    assert result.code == 0
    fused = onnx.load(path.with_suffix(".fused.onnx"))
    assert all(n.domain != "my.ops" for n in fused.graph.node)


def test_attributes_and_constants_of_a_body_are_read_from_the_graph() -> None:
    body = """Leaky <slope: float = 0.1> (x) => (y)
        { two = Constant <value = float {2.0}> ()  d = Mul (x, two)
        y = ThresholdedRelu <alpha: float = @slope> (d) }"""
    of.register_op(of.OpDef("Leaky", "my.ops", body), fuse=True)
    for number, fused in (("2.0", True), ("2.5", False)):
        graph = f"two = Constant <value = float {{{number}}}> () d = Mul(two, x) "
        model = load(model_of(graph + "y = ThresholdedRelu <alpha = 0.25> (d)"))
        before = ort.session(model).run(None, {"x": X})[0]
        out = of.optimize(model)
        nodes = [n for n in out.graph if n.domain == "my.ops"]
        assert bool(nodes) == fused
        if fused:
            assert nodes[0].attributes["slope"].value == pytest.approx(0.25)
        np.testing.assert_array_equal(ort.session(out).run(None, {"x": X})[0], before)


CUDA = r"""
extern "C" __global__ void squash(const float* x, const float* scale, float* y, long long n,
                                  long long width, float limit) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = limit * tanhf(x[i] * scale[i % width]);
}
"""


class Squash(plugins.Kernel):
    """One thread an element."""

    name = "mine"

    def supports(self, problem: Any, hw: Any) -> str | None:
        if problem.dtype("x") != "float32":
            return "it is float32's alone"
        return None

    def launch(self, problem: Any, config: Any, hw: Any) -> Any:
        rows, width = problem.shape("x")
        n, limit = rows * width, problem.attribute("limit")
        given = [plugins.Ptr(k) for k in ("x", "scale", "y")]
        numbers = plugins.Num("i64", n), plugins.Num("i64", width), plugins.Num("f32", limit)
        grid = (-(-n // 256), 1, 1)
        return (plugins.Launch(CUDA, "squash", grid, (256, 1, 1), (*given, *numbers)),)


def program(dtype: str = "float") -> Any:
    text = model_of("y = my.ops.Squash <limit = 3.0> (x, w)")
    model = load(text)
    if dtype != "float":
        for value in (*model.graph.inputs, *model.graph.outputs):
            value.dtype = ir.DataType.DOUBLE
        w = model.graph.initializers["w"]
        w.const_value = ir.tensor(w.const_value.numpy().astype(np.float64), name="w")
        w.dtype = ir.DataType.DOUBLE
    kind = {"float": "float32", "double": "float64"}[dtype]
    return lower(model, {"x": ((3, 4), kind)}, CHIPS["H200"])


def test_a_registered_kernel_serves_its_operator_and_compiles() -> None:
    of.register_op(squash())
    assert all("squash" not in x.entry for c in program().calls for x in c.launches)
    of.register_kernel("my.ops::Squash", Squash())
    (call,) = program().calls
    (launch,) = call.launches
    assert (call.kernel, launch.entry, launch.grid) == ("Squash", "squash", (1, 1, 1))
    assert {name for name, _ in (*call.reads, *call.writes)} == {"x", "scale", "y"}
    assert launch.args[-1] == plugins.Num("f32", 3.0)
    # it does not wait by itself, so it starts when all before it is done
    assert launch.waits == Squash().one("squash", 1, 1)[0].waits == ""
    assert nvrtc.compile(launch.source, launch.defines, "sm_90a")
    # what it does not serve runs as its body
    assert all("squash" not in x.entry for c in program("double").calls for x in c.launches)


def test_a_kernel_of_ones_own_is_preferred_to_ours() -> None:
    from onnx_fuse import kernels

    class Mine(plugins.Kernel):
        name = "mine"

    ours = [k.name for k in kernels.candidates("Softmax")]
    of.register_kernel("Softmax", Mine())
    assert [k.name for k in kernels.candidates("Softmax")] == ["mine", *ours]
    with pytest.raises(UsageError, match="has a kernel 'mine' already"):
        of.register_kernel("Softmax", Mine())
    with pytest.raises(UsageError, match="unknown operator 'Nonsense': choose"):
        of.register_kernel("Nonsense", Mine())
    with pytest.raises(UsageError, match="register it first"):
        of.register_kernel("a::B", Mine())


BAD: list[tuple[of.OpDef, str]] = [
    (of.OpDef("Squash", "", BODY), "needs another domain"),
    (of.OpDef("Squash", "onnx_fuse", BODY), "needs another domain"),
    (of.OpDef("Squash", "my.ops"), "needs a body"),
    (of.OpDef("Other", "my.ops", BODY), "another name"),
    (of.OpDef("Squash", "my.ops", "Squash (x) => (y) {"), "the body of 'my.ops::Squash'"),
    (of.OpDef("Squash", "my.ops", "Squash (x) => (y) { y = Nonsense (x) }"), "the body of"),
]


@pytest.mark.parametrize(("definition", "reason"), BAD, ids=[r for _, r in BAD])
def test_what_is_no_operator_is_refused(definition: of.OpDef, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        of.register_op(definition)


def test_a_name_is_taken_once() -> None:
    of.register_op(squash())
    with pytest.raises(UsageError, match="already"):
        of.register_op(squash())


def test_installed_plugins_are_loaded_for_the_command_line(
    monkeypatch: pytest.MonkeyPatch, saved: Callable[..., Path], cli: Cli
) -> None:
    entry = EntryPoint("mine", f"{__name__}:install", plugins.GROUP)
    broken = EntryPoint("broken", "no_such_module_at_all", plugins.GROUP)
    path = saved("agraph (float[N,4] x) => (float[N,4] y) { y = Relu(x) }")
    monkeypatch.setattr(plugins, "_loaded", set())
    for module in (plugins, app):
        monkeypatch.setattr(module, "entry_points", lambda group: [broken])
    result = cli("validate", path)
    assert result.code == 2
    assert "the plugin 'broken' (no_such_module_at_all) cannot be loaded" in result.err
    for module in (plugins, app):
        monkeypatch.setattr(module, "entry_points", lambda group: [entry])
    monkeypatch.setattr(EntryPoint, "load", lambda self: install)
    result = cli.done("validate", "--op", "my.ops::Squash", "--input-shapes", "x:3,4", "scale:4")
    assert "check ok" in result
    cli.done("validate", "--op", "LayerNormGemm", "--grad", "--input-shapes", "x:4,8",
                 "scale:8", "bias:8", "w:8,16", "c:16")  # fmt: skip
    assert "no input q" in cli("validate", "--op", "Silu", "--input-shapes", "q:1").err
    assert cli("validate", "--op", "my.ops::Other").code == 2
    said = cli("validate", "--op", "LayerNormGemm", "--input-shapes", "x:4,8")
    assert said.code == 2
    assert "as each of scale, bias, w, c: give their shapes" in said.err


def install() -> None:
    of.register_op(squash())
