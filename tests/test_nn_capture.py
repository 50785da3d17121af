"""Captured functions do what they do eagerly, in one fused graph."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import step_of

import onnx_fuse as of
from onnx_fuse import UsageError, nn
from onnx_fuse.nn.graphs import CaptureWarning
from onnx_fuse.runtime import ort


def network(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    nn.manual_seed(seed)
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout)),
        nn.Linear(8, 3),
    )


def batch(rows: int, seed: int = 0) -> tuple[nn.Tensor, nn.Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 6)).astype(np.float32)
    return nn.tensor(x), nn.tensor(rng.integers(0, 3, rows))


def operators(model: Any) -> set[str]:
    return {node.op_type for node in model.graph}


def test_a_whole_training_step_is_one_graph_for_every_batch_size() -> None:
    losses = []
    for captured in (False, True):
        model = network(dropout=0.2)
        step = step_of(model, nn.optim.AdamW(model, lr=of.optim.cosine(0.01, 12)))
        run: Any = of.capture(step) if captured else step
        losses.append([run(*batch(n, n)).item() for n in (8, 8, 5, 1, 8, 3)])
    # the captured graph is fused, and so rounds differently
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert len(run.graphs) == 1
    assert {"LayerNormGemmGeluGrad", "AdamWUpdate"} <= operators(run.graphs[0])


def test_a_captured_step_is_the_trainers(tmp_path: Path) -> None:
    model = network()
    model.export(tmp_path / "net.onnx", [batch(1)[0]])
    trainer = of.Trainer(
        tmp_path / "net.onnx", loss="cross_entropy", optimizer=of.optim.AdamW(lr=0.01)
    )
    step = of.capture(step_of(model, nn.optim.AdamW(model, lr=0.01)))
    for i in range(6):
        x, y = batch(7, i)
        wanted = trainer.step({"x": x.numpy(), "labels": y.numpy()})
        assert step(x, y).item() == pytest.approx(float(wanted), rel=2e-6)


def test_statistics_and_gradients_that_stay_are_assigned() -> None:
    image = nn.randn(2, 1, 4, 4)
    norm, same = nn.BatchNorm2d(1), nn.BatchNorm2d(1)

    def forward(x: nn.Tensor, norm: nn.Module = norm) -> nn.Tensor:
        norm.zero_grad()
        y = (norm(x) ** 2).sum()
        y.backward()
        return y

    captured = of.capture(forward)
    for i in range(3):
        captured(image + i)
        forward(image + i, same)
        np.testing.assert_allclose(norm.running_mean.numpy(), same.running_mean.numpy(), rtol=1e-6)
        np.testing.assert_allclose(
            norm.weight.grad.numpy(), same.weight.grad.numpy(), rtol=1e-4, atol=1e-5
        )


def test_a_captured_forward_is_an_operator_with_a_gradient() -> None:
    model = network()
    captured, x = of.capture(lambda x: model(x)), batch(4)[0]
    captured(x)
    y, z = captured(x), model(x)
    np.testing.assert_allclose(y.numpy(), z.numpy(), rtol=1e-5, atol=1e-6)
    (y * y).sum().backward()
    found = [p.grad.numpy() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    (z * z).sum().backward()
    for p, g in zip(model.parameters(), found, strict=True):
        np.testing.assert_allclose(g, p.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_sizes_that_python_reads_make_another_graph() -> None:
    def by_size(x: nn.Tensor) -> nn.Tensor:
        return x * x.shape[0] if x.shape[0] > 2 else x - 1

    open_sizes, captured = of.capture(lambda x: x * 2), of.capture(by_size)
    for rows in (4, 4, 2, 3, 2):
        x = nn.randn(rows, 6)
        np.testing.assert_array_equal(captured(x).numpy(), by_size(x).numpy())
        np.testing.assert_array_equal(open_sizes(x).numpy(), x.numpy() * 2)
    assert (len(captured.graphs), len(open_sizes.graphs)) == (3, 1)


def test_types_ranks_python_values_and_modes_make_another_graph() -> None:
    drop = nn.Dropout(0.5)
    captured = of.capture(lambda x, factor=1.0: drop(x) * factor)
    x = nn.tensor(np.ones((4, 4), np.float32))
    captured(x)
    captured(x, 2.0)
    captured(x.to("float64"))
    captured(x[0])
    drop.eval()
    np.testing.assert_array_equal(captured(x).numpy(), 1)
    np.testing.assert_array_equal(captured(x, factor=2.0).numpy(), 2)
    drop.train()
    assert (captured(x).numpy() == 0).any()
    assert len(captured.graphs) == 6
    assert (captured(x).numpy() != captured(x).numpy()).any()  # each replay draws anew


def test_what_a_function_reads_from_outside_is_read_anew() -> None:
    factor = nn.tensor(2.0)
    captured = of.capture(lambda x: {"y": [x * factor], "name": "twice"})
    x = nn.tensor([1.0, 2.0])
    assert captured(x)["y"][0].tolist() == [2, 4]
    factor.copy_(3.0)
    found = captured(x)
    assert found["y"][0].tolist() == [3, 6]
    assert found["name"] == "twice"


def test_captures_nest_and_methods_can_be_captured() -> None:
    inner = of.capture(lambda x: x.relu() * 2)

    class Layer(nn.Module):
        @of.capture
        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return inner(x) + 1

    layer, x = Layer(), nn.tensor([-1.0, 2.0])
    assert layer(x).tolist() == layer(x).tolist() == [1, 5]


def test_a_value_that_python_reads_is_warned_of() -> None:
    @of.capture
    def branch(x: nn.Tensor) -> nn.Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    with pytest.warns(CaptureWarning, match="every replay"):
        branch(nn.tensor([1.0]))


def test_gradients_from_before_are_refused() -> None:
    w = nn.Parameter([1.0])

    @of.capture
    def backward(x: nn.Tensor) -> None:
        (w * x).sum().backward()

    x = nn.tensor([2.0])
    backward(x)
    with pytest.raises(UsageError, match=r"call zero_grad\(\) in it"):
        backward(x)
    w.grad = None
    backward(x)
    assert w.grad.tolist() == [2]
    with pytest.raises(UsageError, match=r"call zero_grad\(\) in it"):
        of.capture(lambda x: (w * x * x).sum().backward())(x)


def test_two_backwards_in_one_step_add_up() -> None:
    w = nn.Parameter([[1.0, 2.0]])

    def step(x: nn.Tensor) -> nn.Tensor:
        w.grad = None
        h = x @ w
        h.tanh().sum().backward()
        (h * h).sum().backward()
        assert w.grad is not None
        w.copy_(w - w.grad * 0.1)
        w.grad = None
        return h

    eager = [step(nn.tensor([[float(i)], [1.0]])).numpy() for i in range(4)]
    w.copy_([[1.0, 2.0]])
    captured = of.capture(step)
    for i, wanted in enumerate(eager):
        found = captured(nn.tensor([[float(i)], [1.0]])).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_block_is_captured_replayed_and_saved(tmp_path: Path) -> None:
    x, w = nn.tensor([[1.0, -2.0]]), nn.Parameter(np.eye(2, dtype=np.float32))
    with of.capture() as graph:
        hidden = x @ w
        y = hidden.relu()
    assert y.tolist() == [[1, 0]]
    x.copy_([[-3.0, 4.0]])
    graph.replay()
    assert (hidden.tolist(), y.tolist()) == ([[-3, 4]], [[0, 4]])
    graph.save(tmp_path / "block.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "block.onnx"))
    np.testing.assert_array_equal(ort.session(tmp_path / "block.onnx").run(None, {})[1], [[0, 4]])
    with pytest.raises(UsageError, match="within another"), of.capture(), of.capture():
        pass


def test_a_captured_step_is_saved_as_onnx(tmp_path: Path) -> None:
    model = network()
    step = of.capture(step_of(model, nn.optim.SGD(model, lr=0.1)))
    with pytest.raises(UsageError, match="call the function first"):
        step.save(tmp_path / "step.onnx")
    x, y = batch(4)
    step(x, y)
    step.save(tmp_path / "step.onnx")
    proto = onnx.load(tmp_path / "step.onnx")
    assert [v.name for v in proto.graph.input] == ["x", "y"]
    assert "0.weight" in {i.name for i in proto.graph.initializer}
    found = ort.session(tmp_path / "step.onnx").run(None, {"x": x.numpy(), "y": y.numpy()})
    assert step(x, y).item() == pytest.approx(float(found[0]), rel=1e-6)


def test_arguments_that_are_assigned_or_get_gradients_are_those_of_the_call() -> None:
    @of.capture
    def step(x: nn.Tensor, state: nn.Tensor) -> None:
        (x * x).sum().backward()
        state.copy_(state + x.detach())

    state = nn.tensor([0.0])
    for i in range(3):
        x = nn.tensor([float(i + 1)], requires_grad=True)
        step(x, state)
        assert x.grad.tolist() == [2 * (i + 1)]
        if i == 1:
            state = nn.tensor([10.0])
    assert state.tolist() == [13]
    assert len(step.graphs) == 1


def test_a_number_that_changes_at_each_call_is_warned_of() -> None:
    captured, x = of.capture(lambda x, factor: x * factor), nn.tensor([1.0])
    for i in range(31):
        captured(x, float(i))
    with pytest.warns(CaptureWarning, match="captured 32 times"):
        captured(x, 31.0)


def test_one_tensor_for_two_arguments_is_another_graph() -> None:
    captured, x, y = of.capture(lambda a, b: a - b), nn.tensor([3.0]), nn.tensor([1.0])
    assert [captured(x, x).item() for _ in range(2)] == [0, 0]
    assert [captured(x, y).item() for _ in range(2)] == [2, 2]


def test_what_is_detached_or_made_without_a_tape_is_a_constant_for_gradients() -> None:
    w, x = nn.Parameter([2.0, 3.0]), nn.tensor([5.0, 7.0])

    def loss_of(x: nn.Tensor) -> nn.Tensor:
        with nn.no_grad():
            scale = w * x
        same = w * x  # the same product, which has a gradient
        return (w * w.detach() + w * scale + nn.Tensor(w) * w * w + same * same).sum()

    def step(x: nn.Tensor) -> None:
        loss_of(x).backward()

    step(x)
    wanted = w.grad.tolist()
    captured, forward = of.capture(step), of.capture(loss_of)
    for _ in range(2):
        w.grad = None
        captured(x)
        assert w.grad.tolist() == wanted
    for _ in range(2):
        w.grad = None
        forward(x).backward()
        assert w.grad.tolist() == wanted


def test_a_gradient_that_leaves_the_graph_is_refused() -> None:
    w, x = nn.Parameter([2.0]), nn.tensor([5.0])

    def assigns(x: nn.Tensor) -> None:
        loss = (w * x).sum()
        w.copy_(w + 1)
        loss.backward()

    with pytest.raises(UsageError, match="assign after backward"):
        of.capture(assigns)(x)
    w.grad = None
    before = w * 2
    with pytest.raises(UsageError, match="computed before it"):
        of.capture(lambda x: (before * x).sum().backward())(x)
    with pytest.raises(UsageError, match="computed before it"):
        of.capture(lambda h: h.sum().backward())(w * 2)


def test_two_steps_in_one_graph() -> None:
    def two(x: nn.Tensor, w: nn.Parameter) -> nn.Tensor:
        for _ in range(2):
            loss = ((w * x) ** 2).sum()
            loss.backward()
            w.copy_(w - w.grad * 0.01)
            w.grad = None
        return loss

    w, v, x = nn.Parameter([2.0]), nn.Parameter([2.0]), nn.tensor([1.5])
    captured = of.capture(lambda x: two(x, v))
    for _ in range(3):
        assert captured(x).item() == pytest.approx(two(x, w).item(), rel=1e-6)
    assert v.item() == pytest.approx(w.item(), rel=1e-6)
