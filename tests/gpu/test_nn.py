"""Eager tensors on the GPU: the numbers of the host, zero copies, captured steps, own kernels."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import step_of

import onnx_fuse as of
from onnx_fuse import nn, plugins
from onnx_fuse.nn import functional as F

X = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)


def both(function: Callable[[str], Any], rtol: float = 2e-4) -> None:
    """The same numbers on the host and on the GPU, but for the order of sums."""
    for wanted, found in zip(function("cpu"), function("cuda"), strict=True):
        scale = max(np.abs(wanted).max(), 1e-4)  # a bias before a BatchNorm has no gradient
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol * scale)


def test_operators_views_and_gradients() -> None:
    def run(device: str) -> list[Any]:
        x = nn.tensor(X, device=device, requires_grad=True)
        w = nn.tensor(X[:, :16].copy(), device=device, requires_grad=True)
        y = F.gelu((x.T @ w).reshape(32, 32)[1:, ::2]) * x[:31, :16].softmax()
        loss = (y * y).mean() + x.amax(1).sum() + x[nn.tensor([3, 1]).to(device)].sum()
        loss.backward()
        return [t.numpy() for t in (y, loss, x.grad, w.grad) if t is not None]

    both(run)


def test_every_layer() -> None:
    images = np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype(np.float32)

    def run(device: str) -> list[Any]:
        nn.manual_seed(0)
        net = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(2), nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.RMSNorm(32)),
            *(nn.MultiheadAttention(32, 4), nn.Dropout(0.2), nn.Linear(32, 5)),
        ).to(device)
        loss = (net(nn.tensor(images, device=device)) ** 2).mean()
        loss.backward()
        return [loss.numpy(), *(p.grad.numpy() for p in net.parameters() if p.grad is not None)]

    both(run, 2e-3)


@pytest.mark.parametrize("captured", [False, True])
def test_training_steps(captured: bool) -> None:
    def run(device: str) -> list[Any]:
        nn.manual_seed(0)
        model = nn.Sequential(
            *(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)),
            nn.Linear(64, 10),
        ).to(device)
        optimizer = nn.optim.AdamW(model, lr=of.optim.cosine(1e-2, 20))

        step = step_of(model, optimizer)
        go = of.capture(step) if captured else step
        labels = np.arange(32) % 10
        sizes = (32, 32, 20, 32, 7)
        return [
            go(nn.tensor(X[:n], device=device), nn.tensor(labels[:n], device=device)).numpy()
            for n in sizes
        ]

    both(run, 1e-3)


def test_memory_of_other_libraries_is_shared() -> None:
    torch = pytest.importorskip("torch")
    source = torch.ones(4, 4, device="cuda", dtype=torch.bfloat16)
    x = nn.Tensor(source)
    assert x._data.address == source.data_ptr()
    back = torch.from_dlpack(x * 2)
    assert back.dtype == torch.bfloat16
    assert bool((back == 2).all())


SOURCE = r"""
extern "C" __global__ void cube(const float* x, float* y, long long n) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * x[i] * x[i] + 1000.0f;
}
"""


class Cube(plugins.Kernel):
    """A kernel that adds what the body does not, so that a test sees which of them has run."""

    name = "cube"

    def launch(self, problem: Any, config: Any, hw: Any) -> Any:
        n = 1
        for d in problem.shape("x"):
            n = n * d
        given = (plugins.Ptr("x"), plugins.Ptr("y"), plugins.Num("i64", n))
        return (plugins.Launch(SOURCE, "cube", (-(-n // 256), 1, 1), (256, 1, 1), given),)


@pytest.fixture
def cube() -> Iterator[None]:
    body = "Cube (x) => (y) {\n s = Mul (x, x)\n y = Mul (s, x)\n}"
    of.register_op(of.OpDef("Cube", "test.ops", body))
    of.register_kernel("test.ops::Cube", Cube())
    yield
    plugins.unregister("test.ops::Cube")


@pytest.mark.usefixtures("cube")
def test_a_kernel_of_ones_own_runs() -> None:
    y = nn.op_call("Cube", [nn.tensor(X, device="cuda")], domain="test.ops")
    np.testing.assert_allclose(y.numpy(), X**3 + 1000, rtol=1e-6)


def test_a_graph_of_launches_gives_the_bits_of_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(graph: str) -> list[Any]:
        monkeypatch.setenv("ONNX_FUSE_GRAPH", graph)
        nn.manual_seed(0)
        model = nn.Sequential(
            *(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
        ).to("cuda")
        optimizer = nn.optim.AdamW(model, lr=1e-2)

        step = of.capture(step_of(model, optimizer))
        found, held = [], []
        for i in range(14):
            x = nn.tensor(X + i, device="cuda")
            if i > 6:
                held.append(x)  # so that each comes from another address
            found.append(step(x, nn.tensor(np.arange(32) % 10, device="cuda")).numpy())
        (((captured, _),),) = step._captured.values()
        variants = captured._again._turn._turn.launcher._variants.values()
        assert any(part.captured for each in variants for part in each.parts) == (graph == "1")
        return [*found, *(p.numpy() for p in model.parameters())]

    for single, whole in zip(run("0"), run("1"), strict=True):
        assert np.array_equal(single, whole)
