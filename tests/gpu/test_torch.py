"""Fused functions on torch's CUDA tensors: values, streams, CUDA graphs, threads, training."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)


import encoder  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch_models import Gpt, losses  # noqa: E402

import onnx_fuse.torch as oft  # noqa: E402
from onnx_fuse.cuda import launch  # noqa: E402

# One rounding of a result of 16 bits; sums of 512 products in float32
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def drawn(dtype: Any, rows: int = 256, k: int = 512, n: int = 384) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((rows, k), (n, k), (n,), (k,), (k,))
    made = [torch.randn(*s, generator=generator, device="cuda") for s in shapes]
    made[1] /= k**0.5
    return [t.to(dtype).requires_grad_() for t in made]


def plain(x: Any, w: Any, c: Any, s: Any, b: Any) -> Any:
    return F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], s, b, 1e-5), w, c))


def ours(x: Any, w: Any, c: Any, s: Any, b: Any) -> Any:
    return oft.fused_layernorm_linear(x, w, c, s, b, 1e-5, "gelu")


def near(found: Any, exact: Any, tolerance: float) -> None:
    scale = exact.abs().max().clamp_min(1e-6)
    assert float((found.double() - exact).abs().max() / scale) < tolerance


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [1, 7, 256, 1000])
def test_values_and_gradients_are_those_of_float64(dtype: Any, rows: int) -> None:
    given = drawn(dtype, rows)
    exact = [t.detach().double().requires_grad_() for t in given]
    y, wanted = ours(*given), plain(*exact)
    near(y, wanted, TOLERANCES[dtype])
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, given, dy)
    for g, e in zip(found, torch.autograd.grad(wanted, exact, dy.double()), strict=True):
        near(g, e, 2 * TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["rms", "linear", "attention", "loss"])
def test_the_other_functions(name: str) -> None:
    x, w, c, s, _ = drawn(torch.bfloat16)
    target = torch.arange(256, device="cuda") % 384
    q = x.view(1, 256, 8, 64).transpose(1, 2)
    pairs: dict[str, tuple[Any, Any]] = {
        "rms": (
            lambda: oft.rms_norm_linear(x, w, c, s, 1e-5, "silu"),
            lambda: F.silu(F.linear(F.rms_norm(x, (512,), s, 1e-5), w, c)),
        ),
        "linear": (
            lambda: oft.linear_activation(x, w, c, "gelu_tanh"),
            lambda: F.gelu(F.linear(x, w, c), approximate="tanh"),
        ),
        "attention": (
            lambda: oft.attention(q, q, q, causal=True),
            lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        ),
        "loss": (
            lambda: oft.linear_cross_entropy(x, w, target, bias=c),
            lambda: F.cross_entropy(F.linear(x, w, c), target),
        ),
    }
    found, wanted = (f() for f in pairs[name])
    near(found, wanted.double(), 3e-2)
    dy = torch.randn_like(found)
    near(*(torch.autograd.grad(y, x, dy)[0].double() for y in (found, wanted)), 5e-2)


def test_other_leading_axes_strides_and_no_bias() -> None:
    x, w, _, s, b = (t.detach() for t in drawn(torch.bfloat16))
    x = x.view(4, 64, 512).transpose(0, 1).requires_grad_()
    given = [x, w.requires_grad_(), s.requires_grad_(), b]
    found = oft.fused_layernorm_linear(x, w, None, s, b)
    wanted = F.linear(F.layer_norm(x.double(), (512,), s.double(), b.double()), w.double())
    near(found, wanted, TOLERANCES[torch.bfloat16])
    dy = torch.randn_like(found).transpose(0, 1).contiguous().transpose(0, 1)
    grads = (torch.autograd.grad(y, given[:3], dy.to(y.dtype)) for y in (found, wanted))
    for g, e in zip(*grads, strict=True):
        assert g.shape == e.shape
        near(g, e.double(), 2 * TOLERANCES[torch.bfloat16])


def test_any_stream_and_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn(torch.bfloat16)
    expected = ours(*given).detach()  # no node of autograd is left, which would keep this stream
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            y = ours(*given)
            grads = torch.autograd.grad(y.sum(), given)
    y = y.detach()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(y, expected)
    graph = torch.cuda.CUDAGraph()
    monkeypatch.setattr(launch, "_FLAGS", {})  # so that launches need new memory of their own
    with torch.cuda.graph(graph):
        y = ours(*given)
        found = torch.autograd.grad(y.sum(), given)
    with torch.no_grad():
        given[0].mul_(2.0)
        given[0].mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))


def test_no_run_waits_for_the_gpu() -> None:
    given = drawn(torch.bfloat16)
    torch.autograd.grad(ours(*given).sum(), given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)
        done = torch.cuda.Event()
        for _ in range(3):
            torch.autograd.grad(ours(*given).sum(), given)
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_threads() -> None:
    given = drawn(torch.bfloat16)
    expected = ours(*given)
    torch.cuda.synchronize()  # streams of torch's do not wait for what made the operands
    found: list[Any] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.extend(ours(*given) for _ in range(20))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(torch.equal(y, expected) for y in found)


def test_compiled_with_inductor() -> None:
    given = drawn(torch.bfloat16)
    compiled = torch.compile(lambda *a: ours(*a).square().mean(), fullgraph=True)
    found = torch.autograd.grad(compiled(*given), given)
    wanted = torch.autograd.grad(ours(*given).square().mean(), given)
    for g, e in zip(found, wanted, strict=True):
        near(g, e.double(), 2e-2)


def test_a_fused_transformer_trains_as_torch_s() -> None:
    torch.manual_seed(0)
    model = Gpt().eval().cuda()
    plain_model = copy.deepcopy(model)
    oft.fuse(model)
    # float32 sums in other orders, over 50 steps
    pairs = zip(losses(model), losses(plain_model), strict=True)
    assert all(abs(a - b) < 1e-4 for a, b in pairs)


def test_an_imported_step_as_a_graph_gives_the_bits_of_single_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = encoder.build(encoder.Config(2, 4, 64, 97, 32, classes=3))
    batches = [torch.randint(0, 97, (4, 32), device="cuda") for _ in range(3)]
    ones, labels = torch.ones_like(batches[0]), torch.tensor([0, 1, 2, 0], device="cuda")

    def run(graph: str) -> list[Any]:
        monkeypatch.setenv("ONNX_FUSE_GRAPH", graph)
        module = oft.from_onnx(file, precision="bf16").cuda()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        found = []
        for i in range(15):
            ids = batches[i % 3 if i > 8 else 0]
            loss = F.cross_entropy(module(ids, ones, ones - 1), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        root = module._graph
        turns = [t for g in root._made.values() for t in g.gpu[0]._turns.values()]
        variants = [each for turn in turns for each in turn.launcher._variants.values()]
        assert any(part.captured for each in variants for part in each.parts) == (graph == "1")
        return [*found, *module.parameters()]

    for single, whole in zip(run("0"), run("1"), strict=True):
        assert torch.equal(single, whole)
