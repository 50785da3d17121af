"""Modules, their state and files, optimizers and seeds."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import parsed, python, step_of

import onnx_fuse as of
from onnx_fuse import DataError, UsageError, nn
from onnx_fuse.ir.build import text_model
from onnx_fuse.nn import functional as F
from onnx_fuse.runtime import ort
from onnx_fuse.training import optim as rules

DATA = Path(__file__).parent / "data"


class Net(nn.Module):
    """Every layer once."""

    def __init__(self) -> None:
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.inner = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 1, bias=False)})
        self.drop = nn.Dropout(0.25)

    def forward(self, x: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor]:
        x = self.pool(self.norm(self.conv(x)).relu()).flatten(2)
        x = self.drop(self.attention(self.inner(x)))
        return self.heads["a"](x), self.heads["b"](x)


IMAGES = np.random.default_rng(0).standard_normal((2, 1, 8, 8)).astype(np.float32)


def test_a_module_names_its_parts() -> None:
    net = Net()
    names = [name for name, _ in net.named_parameters()]
    assert names[:4] == ["conv.weight", "conv.bias", "norm.weight", "norm.bias"]
    assert "inner.0.weight" in names
    assert "attention.out_proj.bias" in names
    assert "heads.b.weight" in names
    assert [n for n, _ in net.named_buffers()] == ["norm.running_mean", "norm.running_var"]
    shared = nn.Sequential(net.inner[0], net.inner[0])
    assert len(list(shared.parameters())) == 2
    assert "(0): Linear(weight=[8, 16], bias=[8])" in repr(net)


def test_every_parameter_gets_a_gradient() -> None:
    net = Net()
    a, b = net(nn.tensor(IMAGES))
    (a.sum() + (b * b).sum()).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_state_goes_into_a_file_and_comes_back(tmp_path: Path) -> None:
    net, other = Net(), Net()
    net(nn.tensor(IMAGES))  # moves the running statistics
    nn.save(net.state_dict(), tmp_path / "net.safetensors")
    other.load_state_dict(nn.load(tmp_path / "net.safetensors"))
    x = nn.tensor(IMAGES)
    for y, z in zip(net.eval()(x), other.eval()(x), strict=True):
        np.testing.assert_array_equal(y.numpy(), z.numpy())
    state = {k: v.numpy().copy() for k, v in net.state_dict().items()}
    net.load_state_dict(state)
    for array in state.values():
        array[...] = 7  # it is no part of the module
    assert (net.conv.weight.numpy() != 7).all()
    with pytest.raises(DataError, match=r"lacks conv.bias and has more"):
        net.load_state_dict({**{k: v for k, v in state.items() if k != "conv.bias"}, "more": 1})
    with pytest.raises(DataError, match=r"'conv.bias' has shape \[5\]"):
        net.load_state_dict({**state, "conv.bias": np.zeros(5)})
    (tmp_path / "bad").write_bytes(b"nothing")
    with pytest.raises(DataError, match="bad"):
        nn.load(tmp_path / "bad")


def test_training_mode_changes_batch_norm_and_dropout() -> None:
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5))
    x = nn.tensor(IMAGES * 3 + 1)
    y = net(x)
    assert 0.2 < (y.numpy() == 0).mean() < 0.8
    mean = net[0].running_mean
    np.testing.assert_allclose(mean.numpy(), [0.1 * (IMAGES * 3 + 1).mean()], rtol=1e-5)
    before = mean.numpy()
    z = net.eval()(x)
    np.testing.assert_array_equal(mean.numpy(), before)
    assert (z.numpy() != 0).all()


def test_a_seed_makes_the_same_numbers_and_masks_again() -> None:
    def drawn(seed: int) -> list[Any]:
        nn.manual_seed(seed)
        layer = nn.Linear(4, 4)
        masks = [F.dropout(nn.tensor(np.ones(50, np.float32)), 0.5).numpy() for _ in range(2)]
        return [layer.weight.numpy(), *masks, nn.randn(3).numpy()]

    first, again, other = drawn(1), drawn(1), drawn(2)
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()
    assert (first[1] != first[2]).any()
    assert set(np.unique(first[1])) == {0, 2}


@pytest.mark.parametrize(
    ("eager", "rule"),
    [
        (nn.optim.SGD, {"lr": 0.1}),
        (nn.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (nn.optim.Adam, {"lr": 0.1}),
        (nn.optim.AdamW, {"lr": of.optim.linear(0.1, 10), "weight_decay": 0.1}),
        (nn.optim.Adagrad, {"lr": 0.1}),
        (nn.optim.Lion, {"lr": 0.01, "weight_decay": 0.1}),
        (nn.optim.RMSprop, {"lr": 0.1, "centered": True}),
        (nn.optim.NAdam, {"lr": 0.1}),
        (nn.optim.Adafactor, {"lr": 0.1}),
        (nn.optim.Muon, {"lr": 0.1}),
        (nn.optim.AdamW8bit, {"lr": 0.1}),
    ],
)
def test_an_optimizer_does_what_the_trainers_does(eager: Any, rule: dict[str, Any]) -> None:
    w = np.linspace(-1, 1, 6).reshape(2, 3).astype(np.float32)
    text = "agraph (float[N,3] x) => (float[N,2] y) { y = MatMul(x, w) }"
    model = parsed(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w.T.copy(), "w"))
    x, t = np.eye(3, dtype=np.float32), np.ones((3, 2), np.float32)
    trainer = of.Trainer(model, loss="mse", optimizer=rules.make(eager.__name__.lower(), **rule))
    parameter = nn.Parameter(w.T.copy())
    optimizer = eager([("w", parameter)], **rule)
    for _ in range(5):
        wanted = trainer.step({"x": x, "labels": t})
        loss = F.mse_loss(nn.tensor(x) @ parameter, nn.tensor(t))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(float(wanted), rel=1e-6)
    saved = optimizer.state_dict()
    fresh = eager([("w", nn.Parameter(parameter))], **rule)
    fresh.load_state_dict(saved)
    assert fresh.steps == 5
    assert fresh.lr == optimizer.lr
    if len(saved) > 1:
        with pytest.raises(DataError, match="another optimizer"):
            fresh.load_state_dict({"steps": 1})


def test_an_optimizer_wants_parameters() -> None:
    with pytest.raises(UsageError, match="no parameters"):
        nn.optim.SGD([])
    with pytest.raises(UsageError, match="has no beta"):
        nn.optim.SGD(Net(), beta=1)


def test_losses_by_module() -> None:
    x, t = nn.tensor([[0.5, -1.0]]), nn.tensor([[1.0, 0.0]])
    assert nn.MSELoss()(x, t).item() == pytest.approx(0.625)
    wanted = np.mean([np.log1p(np.exp(-0.5)), np.log1p(np.exp(-1.0))])
    assert nn.BCEWithLogitsLoss()(x, t).item() == pytest.approx(wanted, rel=1e-6)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    log_p = x.log_softmax().numpy()[0]
    assert loss(x, nn.tensor([1])).item() == pytest.approx(-0.9 * log_p[1] - 0.05 * log_p.sum())
    np.testing.assert_allclose(F.mse_loss(x, t, "none").numpy(), [[0.25, 1]])
    with pytest.raises(UsageError, match="unknown reduction 'all'"):
        F.mse_loss(x, t, "all")


def test_attention_masks_and_cross_attention() -> None:
    q, k, v = (nn.randn(2, 3, n, 4) for n in (5, 6, 6))
    mask = np.tril(np.ones((5, 6), bool))
    scores = q.numpy() @ k.numpy().swapaxes(-1, -2) / 2
    weights = np.where(mask, np.exp(scores), 0)
    wanted = weights / weights.sum(-1, keepdims=True) @ v.numpy()
    for found in (
        F.scaled_dot_product_attention(q, k, v, is_causal=True),
        F.scaled_dot_product_attention(q, k, v, nn.tensor(mask)),
        F.scaled_dot_product_attention(q * 4, k, v, nn.tensor(mask), scale=0.125),
    ):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)
    attention = nn.MultiheadAttention(8, 2)
    x = nn.randn(2, 3, 8)
    np.testing.assert_allclose(attention(x).numpy(), attention(x, x, x).numpy(), atol=1e-6)
    with pytest.raises(UsageError, match="do not divide"):
        nn.MultiheadAttention(8, 3)


def test_a_module_becomes_an_onnx_file_that_stock_onnxruntime_runs(tmp_path: Path) -> None:
    net = Net()
    path = tmp_path / "net.onnx"
    net.export(path, [IMAGES])
    assert net.training
    proto = onnx.load(path)
    onnx.checker.check_model(proto)
    assert {i.name for i in proto.graph.initializer} >= {n for n, _ in net.named_parameters()}
    assert [v.name for v in proto.graph.output] == ["output_0", "output_1"]
    session = ort.session(path)
    more = np.concatenate([IMAGES, IMAGES])  # the batch is open
    for found, wanted in zip(
        session.run(None, {"x": more}), net.eval()(nn.tensor(more)), strict=True
    ):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)
    fused = of.optimize(path)
    assert any(n.op_type.startswith("LayerNorm") or n.domain for n in fused.graph.node)


def test_an_imported_file_trains_like_the_module_it_came_from(tmp_path: Path) -> None:
    nn.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    net.export(tmp_path / "net.onnx", [np.zeros((1, 4), np.float32)])
    copy = nn.from_onnx(tmp_path / "net.onnx")
    assert [n for n, _ in copy.named_parameters()] == [n for n, _ in net.named_parameters()]
    x = nn.randn(3, 4, requires_grad=True)
    z = nn.tensor(x.numpy(), requires_grad=True)
    ((net(x)) ** 2).sum().backward()
    ((copy(z)) ** 2).sum().backward()
    np.testing.assert_allclose(z.grad.numpy(), x.grad.numpy(), rtol=1e-4, atol=1e-5)
    for p, q in zip(net.parameters(), copy.parameters(), strict=True):
        np.testing.assert_allclose(q.grad.numpy(), p.grad.numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="inputs x: 2 were given"):
        copy(x, x)
    frozen = nn.from_onnx(tmp_path / "net.onnx", trainable=False)
    assert not frozen(x.detach()).requires_grad


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_gradients_of_what_an_if_captures(sign: float) -> None:
    model = nn.from_onnx(
        text_model("""agraph (float[N] x, float[N] w) => (float[N] y) <float zero = {0}>
        { e = Exp(x) f = Sin(w) s = ReduceSum <keepdims = 0> (x) c = Greater(s, zero)
        q = If <then_branch = g () => (float[N] a) { a = Mul(e, f) },
        else_branch = h () => (float[N] b) { b = Sub(e, f) }> (c) y = Tanh(q) }""")
    )
    x, w = (nn.tensor([sign * v for v in values]) for values in ([0.5, 1.0], [0.25, 2.0]))
    for each in (x, w):
        each.requires_grad_()
    model(x, w).sum().backward()
    e, f = np.exp(x.numpy()), np.sin(w.numpy())
    q, (de, df) = (e * f, (f, e)) if sign > 0 else (e - f, (1, -1))
    dq = 1 - np.tanh(q) ** 2
    assert x.grad is not None
    assert w.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), dq * de * e, rtol=1e-5)
    np.testing.assert_allclose(w.grad.numpy(), dq * df * np.cos(w.numpy()), rtol=1e-5)


def test_importing_the_package_does_not_import_it() -> None:
    code = "import sys, onnx_fuse; print('onnx_fuse.nn' in sys.modules)"
    assert python(code).strip() == "False"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("captured", [False, True])
def test_training_in_16_bits(dtype: str, captured: bool) -> None:
    """onnxruntime's CPU lacks some kernels for these types: they run in float32."""
    nn.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).to(dtype)
    optimizer = nn.optim.SGD(model, lr=0.5)
    x, y = nn.randn(2, 3, 8).to(dtype), nn.tensor([[0, 1, 2], [3, 0, 1]])

    step = step_of(model, optimizer)
    run = of.capture(step) if captured else step
    losses = [run(x, y).item() for _ in range(12)]
    assert model[0].weight.dtype.name == dtype
    assert losses[-1] < 0.7 * losses[0]


def test_a_type_without_kernels_is_named() -> None:
    with pytest.raises(UsageError, match=r"Gelu: onnxruntime: .*Erf"):
        F.gelu(nn.tensor([1.0], "float64"))


@pytest.mark.parametrize("name", ["mlp_ln__ts17", "resnet_train__ts17", "llama__dynamo23"])
def test_an_export_of_pytorchs_has_pytorchs_gradients(name: str) -> None:
    """The loss is the mean of the output times the cotangent."""
    data = np.load(DATA / f"{name}.npz")
    model = nn.from_onnx(DATA / f"{name}.onnx")
    y = model(*[data[f"in_{n}"] for n in model.inputs])
    cotangent = data["cotangent"]
    np.testing.assert_allclose(y.numpy(), data[f"out_{model.outputs[0]}"], rtol=1e-3, atol=1e-5)
    y.backward(nn.tensor((cotangent / cotangent.size).astype(np.float32)))
    parameters = dict(model.named_parameters())
    compared = [n for n in parameters if f"grads_{n}" in data]
    assert len(compared) > 10
    for n in compared:
        grad, wanted = parameters[n].grad, data[f"grads_{n}"]
        np.testing.assert_allclose(
            grad.numpy(), wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max()
        )
