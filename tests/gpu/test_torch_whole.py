"""Modules fused whole on torch's CUDA tensors: training, modes, streams, memory, buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

from torch import nn  # noqa: E402
from torch_models import Block, Gpt, Unbound, losses  # noqa: E402

import onnx_fuse.torch as oft  # noqa: E402


def pair(module: Any) -> tuple[Any, Any]:
    """The module in GPU memory, fused whole, and a copy that is not."""
    torch.manual_seed(0)
    plain = module.cuda()
    return oft.fuse(copy.deepcopy(plain), whole=True), plain


def gradients(module: Any, y: Any, dy: Any) -> list[Any]:
    return list(torch.autograd.grad(y, [*module.parameters()], dy))


def near(found: Any, exact: Any, tolerance: float, least: float = 1e-6) -> None:
    """Differences are less than this share of the largest number, or of `least` if that is more."""
    found, exact = found.detach().double(), exact.detach().double()
    scale = exact.abs().max().clamp_min(least)
    assert float((found - exact).abs().max() / scale) < tolerance


def test_a_transformer_trains_as_torch_s() -> None:
    fused, plain = pair(Gpt().eval())
    # float32 sums in other orders, over 50 steps
    pairs = zip(losses(fused), losses(plain), strict=True)
    assert all(abs(a - b) < 1e-4 for a, b in pairs)
    turns = [t for p in fused._programs._known.values() for g in p._graph._made.values()
             for t in g.gpu[0]._turns.values()]  # fmt: skip
    variants = [each for turn in turns for each in turn.launcher._variants.values()]
    assert any(part.captured for each in variants for part in each.parts)


@pytest.mark.parametrize("lengths", [(128, 96, 33, 256, 7, 1, 96)])
def test_lengths_that_change(lengths: tuple[int, ...]) -> None:
    fused, plain = pair(Block(64, 4).eval())
    for length in lengths:
        x = torch.randn(2, length, 64, device="cuda")
        dy = torch.randn_like(x)
        y, exact = fused(x), plain(x)
        near(y, exact, 2e-5)  # float32 sums in other orders
        pairs = zip(gradients(fused, y, dy), gradients(plain, exact, dy), strict=True)
        for a, b in pairs:
            # Sums over all tokens. That of a key's bias, and of one token's query and key, is of
            # numbers near 1 that cancel: what is left of it are roundings.
            near(a, b, 1e-4, least=0.1)
    (kind,) = fused._programs._kinds.values()
    assert [program.sizes.open for program in kind.programs] == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["block", "unbound"])
def test_autocast(kind: str, dtype: Any) -> None:
    fused, plain = pair({"block": Block(64, 4), "unbound": Unbound(64)}[kind].eval())
    x = torch.randn(4, 32, 64, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        y = fused(x)
    exact = copy.deepcopy(plain).double()
    wanted = exact(x.double())
    near(y, wanted, 3e-2)  # a few roundings to 8 bits each
    dy = torch.randn_like(wanted)
    pairs = zip(gradients(fused, y, dy.to(y.dtype)), gradients(exact, wanted, dy), strict=True)
    for (name, _), (g, e) in zip(plain.named_parameters(), pairs, strict=True):
        if name == "attn.k.bias":  # whose gradient is 0 but for roundings
            continue
        near(g, e, 6e-2)


def test_results_stay_and_forwards_keep_values_of_their_own() -> None:
    fused, plain = pair(Block(64, 4).eval())
    xs = [torch.randn(4, 32, 64, device="cuda", requires_grad=True) for _ in range(4)]
    with torch.no_grad():
        wanted = [plain(x) for x in xs]
        for _ in range(4):  # until it runs as a CUDA graph
            found = [fused(x) for x in xs]
    for y, e in zip(found, wanted, strict=True):
        near(y, e, 1e-4)
    for _ in range(4):
        found = [fused(x) for x in xs]
        made = [gradients(fused, y, y.detach()) for y in reversed(found)][::-1]
    for x, grads in zip(xs, made, strict=True):
        y = plain(x)
        for g, e in zip(grads, gradients(plain, y, y.detach()), strict=True):
            near(g, e, 1e-3) if e.abs().max() > 1e-4 else None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = fused(xs[0])
        (g,) = torch.autograd.grad(y, xs[0], torch.ones_like(y))
    torch.cuda.current_stream().wait_stream(side)
    (e,) = torch.autograd.grad(plain(xs[0]), xs[0], torch.ones_like(y))
    near(g, e, 1e-4)


class Images(nn.Module):
    """A convolution, a BatchNorm and a Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.norm(self.conv(x)))
        return self.head(self.drop(y.mean((2, 3)))), y


def test_statistics_and_masks() -> None:
    fused, plain = pair(Images())
    for rows in (4, 4, 4, 4, 7):
        x = torch.randn(rows, 3, 9, 9, device="cuda")
        (_, y), (_, wanted) = fused(x), plain(x)
        near(y, wanted, 1e-4)
        for a, b in zip(fused.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a, b)
        for module, result in ((fused, y), (plain, wanted)):
            module.zero_grad()
            result.square().sum().backward()
        near(fused.conv.weight.grad, plain.conv.weight.grad, 1e-3)
    drops = oft.fuse(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)).cuda(), whole=True)
    for _ in range(4):  # until they run as CUDA graphs
        drops.zero_grad()
        first, second = (drops(torch.ones(32, 8, device="cuda")) for _ in range(2))
        (first + 3 * second).sum().backward()  # each by the mask of its own forward
        kept = [2 * (y != 0).sum(0) for y in (first, second)]
        torch.testing.assert_close(drops[0].bias.grad, (kept[0] + 3 * kept[1]).float())
    drawn = [(fused(x)[0], plain(x))[0] for _ in range(3)]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    fused.eval()
    plain.eval()
    near(fused(x)[0], plain(x)[0], 1e-4)


def test_weights_that_an_optimizer_or_a_user_moves_are_seen() -> None:
    fused, plain = pair(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)))
    x = torch.randn(16, 8, device="cuda")
    for step in range(6):
        for module in (fused, plain):
            with torch.no_grad():
                if step % 2:
                    module[0].weight.mul_(1.1)
                else:
                    module[0].weight = nn.Parameter(module[0].weight * 0.9)
        near(fused(x), plain(x), 1e-4)
    for module in (fused, plain):
        module.requires_grad_(False)[2].requires_grad_(True)
        module.zero_grad()
        module(x).sum().backward()
    assert [p.grad is None for p in fused.parameters()] == [True] * 4 + [False] * 2
    fused.bfloat16()
    near(fused(x.bfloat16()), plain(x), 3e-2)
