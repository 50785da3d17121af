"""Eager tensors on a GPU, which host memory stands for: the same numbers, without copies."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGpu

import onnx_fuse as of
from onnx_fuse import UsageError, nn
from onnx_fuse.cuda.pointwise import Code
from onnx_fuse.ir.build import text_model
from onnx_fuse.nn import functional as F
from onnx_fuse.nn import graphs, runner
from onnx_fuse.plugins import Kernel, unregister
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime import direct
from onnx_fuse.runtime.specialize import Specializer
from onnx_fuse.session import load


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    runner.home.cache_clear()
    yield FakeGpu().use(monkeypatch)
    runner.home.cache_clear()


X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)


def pointwise(x: nn.Tensor, w: nn.Tensor) -> nn.Tensor:
    return F.silu(x.tanh() * 2 + w)


def test_operators_and_gradients(gpu: FakeGpu) -> None:
    found = []
    for device in ("cpu", "cuda"):
        x = nn.tensor(X, device=device, requires_grad=True)
        w = nn.tensor(X[::-1].copy(), device=device, requires_grad=True)
        y = pointwise(x, w)
        y.backward(nn.tensor(X * X, device=device))
        assert x.grad is not None
        assert w.grad is not None
        assert {t.device.partition(":")[0] for t in (y, x.grad, w.grad)} == {device}
        found.append([t.numpy() for t in (y, x.grad, w.grad)])
    for wanted, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)


def test_a_view_has_the_same_memory_and_nothing_is_launched(gpu: FakeGpu) -> None:
    x = nn.tensor(X, device="cuda")
    before = gpu.counts.copy()
    y = x.reshape(2, -1).unsqueeze(0).flatten(1)
    assert y._data.address == x._data.address
    assert y.shape == (1, 64)
    assert gpu.counts == before


def test_a_captured_step_changes_its_parameter_there(gpu: FakeGpu) -> None:
    found = []
    for device in ("cpu", "cuda"):
        w = nn.Parameter(nn.tensor(X[::-1].copy(), device=device))

        @of.capture
        def step(x: nn.Tensor, dy: nn.Tensor, w: nn.Parameter = w) -> nn.Tensor:
            y = pointwise(x, w)
            y.backward(dy)
            w.copy_(w - w.grad * 0.1)
            w.grad = None
            return y

        x, dy = nn.tensor(X, device=device), nn.tensor(X * X, device=device)
        results = [step(x, dy).numpy() for _ in range(3)]
        assert len(step.graphs) == 1
        assert w.device.startswith(device)
        found.append([*results, w.numpy()])
    for wanted, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)


def test_a_captured_step_writes_its_states_where_they_are(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "MANY", 1)
    found = []
    for device in ("cpu", "cuda"):
        w, v = (nn.Parameter(nn.tensor(a, device=device)) for a in (X[::-1].copy(), X * 2))
        optimizer = nn.optim.AdamW([w, v], lr=1e-2)

        @of.capture
        def step(x: nn.Tensor, dy: nn.Tensor, w: Any = w, v: Any = v, of_: Any = optimizer) -> Any:
            y = pointwise(x * v, w)
            y.backward(dy)
            of_.step()
            of_.zero_grad()
            return y

        x, dy = nn.tensor(X, device=device), nn.tensor(X * X, device=device)
        results = [step(x, dy).numpy() for _ in range(3)]
        before, stays = w.detach(), v._data
        kept = before.numpy()
        results += [step(x, dy).numpy() for _ in range(5)]
        assert np.array_equal(before.numpy(), kept)  # who has it too keeps what it was
        assert not np.array_equal(w.numpy(), kept)
        if device == "cuda":
            assert v._data is not stays  # the test has it
            del stays, before
            results += [step(x, dy).numpy() for _ in range(8)]
            stays = id(v._data)
            gpu.counts.clear()
            with monkeypatch.context() as patch:
                patch.setattr(graphs, "sole", None)  # which a steady replay does not ask
                results.append(step(x, dy).numpy())
            assert id(v._data) == stays
            assert not gpu.counts["cuMemcpyDtoDAsync"]
        else:
            results += [step(x, dy).numpy() for _ in range(8)]
            results.append(step(x, dy).numpy())
        w.copy_(nn.tensor(X[::-1].copy(), device=device))  # now it stands elsewhere
        results += [step(x, dy).numpy() for _ in range(3)]
        found.append([*results, w.numpy(), v.numpy()])
    for wanted, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


def test_a_result_that_stands_elsewhere_at_each_run_keeps_the_graph(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    @of.capture
    def chain(x: nn.Tensor) -> nn.Tensor:
        for _ in range(direct.MANY + 4):
            x = F.softmax(x * 2, -1)
        return x

    x = nn.tensor(X, device="cuda")
    with monkeypatch.context() as patch:
        patch.setenv("ONNX_FUSE_GRAPH", "0")
        held = [chain(x) for _ in range(4)]
    assert not gpu.counts["capture"]
    held += [chain(x) for _ in range(6)]  # so that each result has memory of its own
    assert len({y._data.address for y in held}) == len(held)
    assert gpu.counts["capture"] == 1
    assert gpu.counts["cuGraphLaunch"] >= 3
    assert all(np.array_equal(y.numpy(), held[0].numpy()) for y in held)


def test_what_is_on_two_devices_is_moved_by_hand(gpu: FakeGpu) -> None:
    x = nn.tensor(X, device="cuda", requires_grad=True)
    assert x.device == "cuda:0"
    np.testing.assert_array_equal(x.detach().cpu().numpy(), X)
    with pytest.raises(UsageError, match="from one device to another"):
        (x * 2).cpu()


def test_a_number_of_64_bits_without_a_sign_is_passed_as_its_bits() -> None:
    code = Code()
    code.scalar(np.uint64(0xBF58476D1CE4E5B9), "uint64")  # of dropout's hash
    code.scalar(np.uint64(30), "uint64")
    assert code.scalars == [("i64", 0xBF58476D1CE4E5B9 - (1 << 64)), ("i64", 30)]


def test_a_kernel_that_is_registered_later_is_used_at_once(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was lowered before is lowered anew, also where launches are replayed."""
    lowered: list[Any] = []
    lower = Specializer._lower

    def counted(specializer: Specializer, *given: Any) -> Any:
        lowered.append(specializer)
        return lower(specializer, *given)

    monkeypatch.setattr(Specializer, "_lower", counted)
    captured = of.capture(lambda x: x.tanh() * 2)
    x = nn.tensor(X, device="cuda")
    for _ in range(4):
        x.tanh(), captured(x)
    for change in (lambda: of.register_kernel("Softmax", Mine()), lambda: unregister("Softmax")):
        lowered.clear()
        x.tanh(), captured(x)
        assert not lowered
        change()
        np.testing.assert_allclose(captured(x).numpy(), 2 * x.tanh().numpy(), rtol=1e-6)
        assert len(lowered) == 2


class Mine(Kernel):
    name = "mine"

    def supports(self, problem: Any, hw: Any) -> str:
        return "it is for no problem"


def test_a_graph_that_draws_is_not_launched_again(gpu: FakeGpu) -> None:
    """Its numbers are drawn for each run: launches that are kept have nobody to do so."""
    model = text_model("agraph (float[4,16] x) => (float[4,16] y) { y = RandomUniformLike (x) }")
    program = Specializer(load(model), CHIPS["H200"]).of({"x": ((4, 16), "float32")}).program
    assert not direct.is_direct(program)
    run = runner.runner(load(model), 0, "a draw")
    assert runner.turn_of(run, [nn.tensor(X, device="cuda")._data]) is None
