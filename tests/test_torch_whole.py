"""Modules fused whole: one graph for each kind of call, trained as torch trains them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_turn  # noqa: E402
import onnx_ir as ir  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch_models import Block, Gpt, Unbound, losses  # noqa: E402

import onnx_fuse.torch as oft  # noqa: E402
from onnx_fuse.errors import CheckFailed, ModelError, UsageError  # noqa: E402
from onnx_fuse.program.problem import CHIPS  # noqa: E402
from onnx_fuse.runtime.specialize import Specializer  # noqa: E402
from onnx_fuse.torch import exports  # noqa: E402
from onnx_fuse.torch.graph import OnnxGraph  # noqa: E402

CURVE = 1e-4
"""Between two float32 trainings of 50 steps that sum in other orders."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["dispatcher", "direct"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How calls go: `direct` as on CUDA tensors, tried with tensors of the CPU."""
    if request.param == "direct":
        host_turn.use(monkeypatch)
    found: str = request.param
    return found


def programs(module: Any) -> list[Any]:
    return list(module._programs._known.values())


def test_a_transformer_trains_alike_in_every_mode_and_copy(way: str) -> None:
    plain, ids = Gpt().eval(), torch.randint(0, 17, (4, 5))
    model = copy.deepcopy(plain)
    assert oft.fuse(model, (ids,), whole=True) is model
    assert isinstance(model, Gpt)
    assert list(model.state_dict()) == list(plain.state_dict())
    for a, b in zip(losses(model), losses(plain), strict=True):
        assert abs(a - b) < CURVE
    assert len(programs(model)) == 1
    torch.testing.assert_close(model(ids[:2]), plain(ids[:2]), atol=1e-5, rtol=1e-4)
    assert len(programs(model)) == 2
    with torch.no_grad():
        assert not model(ids).requires_grad
    copied = copy.deepcopy(model)
    copied.load_state_dict({k: torch.zeros_like(v) for k, v in plain.state_dict().items()})
    assert not torch.equal(copied(ids), model(ids))
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids), model(ids))
    compiled = torch.compile(model, backend="eager")  # its own forward
    torch.testing.assert_close(compiled(ids), plain(ids), atol=1e-5, rtol=1e-4)
    model.train()
    assert not torch.equal(model(ids), model(ids))
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(model(ids))
    assert torch.equal(*drawn)
    assert len(programs(model)) == 3


class Shaped(nn.Module):
    """A forward that looks at the shape of its input, or does not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.norm, self.kind = nn.Linear(8, 8), nn.BatchNorm1d(8), kind

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        if self.kind == "long" and x.shape[0] > 5:
            return y.tanh()
        if self.kind == "even" and x.shape[0] % 2:
            return y.sigmoid()
        if self.kind == "halves" and x.shape[0] == 2 * x.shape[1]:
            return y.relu()
        if self.kind == "counted":
            return y, x.shape[0]
        return self.norm(y) if self.kind == "norm" else y


# kind: rows of one call after another, and the exports of all
SHAPED: dict[str, tuple[tuple[int, ...], int]] = {
    "any": ((3, 4, 7, 4, 1, 3, 9), 3),  # 1 has one of its own: torch makes a constant of it
    "long": ((3, 4, 5, 7, 8, 2), 3),
    "even": ((2, 3, 4, 5, 6, 7), 3),
    "halves": ((4, 16, 5, 6, 16), 3),
    "norm": ((4, 6, 5, 6), 3),  # the statistics of a batch depend on the count
    "counted": ((4, 6, 5, 6), 3),
}


@pytest.mark.parametrize("kind", SHAPED)
def test_sizes_that_change_are_open_from_then_on(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, most = SHAPED[kind]
    plain, counts = Shaped(kind), []
    model = oft.fuse(copy.deepcopy(plain), whole=True)
    exported = exports.export
    monkeypatch.setattr(exports, "export", lambda *a: (counts.append(a[3]), exported(*a))[1])
    each = kind in ("norm", "counted")
    with pytest.warns(UserWarning, match="for each shape") if each else nullcontext():
        for n in rows:
            x = torch.randn(n, 8)
            given = [x.clone().requires_grad_() for _ in range(2)]
            (y, *rest), (z, *wanted) = [
                found if isinstance(found, tuple) else (found,)
                for found in (m(g) for m, g in zip((model, plain), given, strict=True))
            ]
            assert rest == wanted
            torch.testing.assert_close(y, z, atol=1e-5, rtol=1e-4)
            dy = torch.randn_like(y)
            pairs = ((y, given[0], model), (z, given[1], plain))
            made, exact = (
                torch.autograd.grad(y, [g, *m.linear.parameters()], dy) for y, g, m in pairs
            )
            for a, b in zip(made, exact, strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert len(counts) <= most + each  # one that fails counts


def test_a_gradient_that_needs_known_sizes_is_of_each_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    derived = OnnxGraph.derived

    def refused(graph: OnnxGraph, part: str) -> OnnxGraph:
        if any(isinstance(size, str) for size in graph.inputs[0].sizes or ()):
            raise ModelError("its gradient needs known sizes")
        return derived(graph, part)

    monkeypatch.setattr(OnnxGraph, "derived", refused)
    plain = Shaped("any")
    model = oft.fuse(copy.deepcopy(plain), whole=True)
    model(torch.randn(3, 8))
    with pytest.warns(UserWarning, match="for each shape: its gradient needs known sizes"):
        y = model(torch.randn(4, 8))
    y.sum().backward()
    (kind,) = model._programs._kinds.values()
    assert [program.sizes.open for program in kind.programs] == [False, False]


def kernels(program: Any, **shapes: tuple[int, ...]) -> list[list[str]]:
    """Those of forward and backward on an H200, for arguments of these shapes."""
    found, mask = [], program._graph.floats
    for part in ("forward", "backward"):
        half, ends = program._graph.derived(f"{part}:{mask}"), {}
        for e in half.inputs:
            sizes = shapes.get(e.name.removesuffix(".grad"), e.sizes)
            ends[e.name] = (sizes, str(e.dtype).removeprefix("torch."))
        made = Specializer(half.model.clone(), CHIPS["H200"]).of(ends).program
        assert not made.stages
        assert not any(call.host for call in made.calls)
        shapes |= {name: tuple(map(int, t.shape)) for name, t in made.outputs}
        found.append([call.kernel for call in made.calls])
    return found


def test_a_transformer_of_any_length_is_two_exports() -> None:
    plain = Unbound(64).eval()
    model = oft.fuse(copy.deepcopy(plain), whole=True)
    for length in (6, 9, 16, 5):
        x = torch.randn(2, length, 64)
        torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-4)
    (kind,) = model._programs._kinds.values()
    assert [program.sizes.open for program in kind.programs] == [False, True]


def test_open_lengths_have_the_kernels_of_known_ones() -> None:
    """Dropout's masks are of sizes that the backward knows without asking the GPU."""
    model, other = (oft.fuse(Block(64, 4), whole=True) for _ in range(2))
    for module, lengths in ((model, (8, 128)), (other, (128,))):
        for length in lengths:
            module(torch.randn(2, length, 64))
    ((_, opened), (known,)) = (next(iter(m._programs._kinds.values())).programs
                               for m in (model, other))  # fmt: skip
    assert opened.sizes.open
    shape = (2, 128, 64)
    assert kernels(opened, tensors_0=shape) == kernels(known, tensors_0=shape)


def test_parts_of_one_product_are_neither_copied_nor_added_up() -> None:
    model = oft.fuse(Unbound(256), whole=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(2, 128, 256))
    (program,) = programs(model)
    forward, backward = kernels(program)
    assert "SdpaCausal_lse" in forward
    assert not [k for k in forward if k.startswith("Copy")]
    assert "SdpaCausalGrad" in backward
    assert not [k for k in backward if "Add" in k or "Pad" in k]


class Images(nn.Module):
    """A BatchNorm, a number, a constant of its own, and results of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.factor, self.unused = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.arange(4.0).view(4, 1, 1))
        self.register_buffer("shown", torch.tensor([0, 2]))

    def forward(self, x: Any, wide: bool = True, *, scale: Any = None) -> Any:
        y = self.norm(self.conv(x)) * self.factor + self.offset
        if scale is not None:
            y = y * scale
        return {"all": y, "some": (y[:, self.shown] if wide else y, None, 3)}


def test_statistics_numbers_arguments_and_results(way: str) -> None:
    plain = Images()
    model = oft.fuse(copy.deepcopy(plain), whole=True)

    def compare(*args: Any, **named: Any) -> None:
        given = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in args]
        x = given[0]
        found, wanted = model(*given, **named), plain(*given, **named)
        assert found["some"][1:] == (None, 3)
        made = []
        for each, module in ((found, model), (wanted, plain)):
            loss = each["all"].pow(3).sum() + each["some"][0].square().sum()
            module.zero_grad()
            made.append(torch.autograd.grad(loss, x, retain_graph=True)[0])
            loss.backward()
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(made[0], made[1], atol=1e-3, rtol=1e-3)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, atol=1e-3, rtol=1e-3)
        for p, q in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(p, q)

    x = torch.randn(2, 3, 7, 7)
    for _ in range(3):
        compare(x)
    compare(x, False, scale=torch.tensor(0.5))
    for module in (model, plain):
        module.norm.eval()
    compare(x)
    for module in (model, plain):
        module.offset.mul_(3)
        module.shown.sub_(1).abs_()
        module.factor.data = torch.tensor(-1.0)
        module.conv = nn.Conv2d(3, 4, 3)
        nn.init.constant_(module.conv.weight, 0.1)
        nn.init.constant_(module.conv.bias, 0.2)
    compare(x)


def test_forwards_keep_values_of_their_own(way: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model = oft.fuse(copy.deepcopy(plain), whole=True)
    xs = [torch.randn(5, 4) for _ in range(3)]
    ys = [model(x) for x in xs]
    kept = [y.detach().clone() for y in ys]
    sum(y.square().sum() for y in ys).backward()
    sum(plain(x).square().sum() for x in xs).backward()
    assert all(torch.equal(a, b) for a, b in zip(ys, kept, strict=True))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-4, rtol=1e-4)
    drops = oft.fuse(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)), whole=True)
    first, second = drops(xs[0]), drops(xs[0])
    (first + 3 * second).sum().backward()  # each by the mask of its own forward
    kept = [2 * (y != 0).sum(0) for y in (first, second)]
    torch.testing.assert_close(drops[0].bias.grad, (kept[0] + 3 * kept[1]).float())
    ids = torch.tensor([[1, 3], [0, 2]])
    table = oft.fuse(nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 2)), whole=True)
    wide = table(ids)
    narrow = table.bfloat16()(ids)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, atol=3e-2, rtol=3e-2)
    table[1].weight, table[1].bias = nn.Parameter(table[1].weight[:1]), None
    assert table(ids).shape == (2, 2, 1)
    loss = model(xs[0]).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(xs[0])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, model(xs[0]), atol=3e-2, rtol=3e-2)
    types = {v.dtype for p in programs(model) for n in p._graph.model.graph for v in n.outputs}
    assert ir.DataType.BFLOAT16 in types


class Straight(torch.autograd.Function):
    """A gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return dy


class Of(nn.Module):
    """A forward that is given."""

    def __init__(self, work: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear, self._work = nn.Linear(3, 3), work
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Any) -> Any:
        return self._work(self, x)


def without_gradients(module: Any, x: Any) -> Any:
    with torch.no_grad():
        mean = module.linear(x).mean()
    return x - mean


# what a forward does: the reason why it is no graph
REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "detach": (lambda m, x: m.linear(x) * m.linear(x).detach(), "detaches a value"),
    "no_grad": (without_gradients, "nested region|detaches"),
    "Function": (lambda m, x: Straight.apply(m.linear(x)), "autograd.Function 'Straight'"),
    "buffer": (lambda m, x: m.linear(x) + m.count.add_(1), "changes the buffer 'count'"),
    "argument": (lambda m, x: m.linear(x.mul_(2)), "changes an argument in place"),
    "random": (lambda m, x: m.linear(x) + torch.rand_like(x), "draws random numbers"),
    "branch": (lambda m, x: m.linear(x) if x.sum() > 0 else x, "torch cannot export it"),
    "object": (lambda m, x: (m.linear(x), object()), "returns an object of class object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_graph_is_refused_with_a_reason(name: str) -> None:
    work, reason = REFUSED[name]
    model = oft.fuse(Of(work), whole=True)
    with pytest.raises(UsageError, match=reason) as found:
        model(torch.randn(2, 3))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("masked", ["", "bool", "added", "causal", "groups"])
def test_attention_with_dropout_is_torch_s(masked: str) -> None:
    q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (5, 6, 6))
    options: dict[str, Any] = {"scale": 0.3}
    if masked == "bool":  # its first row sees no key
        options["attn_mask"] = torch.rand(5, 6) > 0.4
        options["attn_mask"][0] = False
    elif masked == "added":
        options["attn_mask"] = torch.randn(2, 1, 5, 6)
    elif masked == "causal":
        options["is_causal"] = True
    elif masked == "groups":
        k, v = k[:, :2], v[:, :2]
        options["enable_gqa"] = True
    found = exports._attention(q, k, v, dropout_p=1e-9, **options)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(found, wanted)
    pairs = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, wanted))
    for g, e in zip(*pairs, strict=True):
        torch.testing.assert_close(g, e)
    drops = exports._attention(q.detach()[:, :1] * 0, k[:, :1], torch.ones(2, 1, 6, 8), None, 0.5)
    assert 0.5 < float(drops.detach().mean()) < 1.5
    assert not torch.equal(drops, torch.ones_like(drops))


def test_what_cannot_be_fused_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="'1' has hooks"):
        oft.fuse(model, whole=True)
    assert type(model) is nn.Sequential
    model = Of(REFUSED["detach"][0])
    with pytest.raises(UsageError, match="detaches"):
        oft.fuse(model, (torch.randn(2, 3),), whole=True)
    assert type(model) is Of
    model(torch.randn(2, 3))

    calls: list[int] = []
    changing = Of(lambda m, x: m.linear(x) * (calls.append(0) or len(calls)))
    with pytest.raises(CheckFailed, match="computes something else"):
        oft.fuse(changing, (torch.randn(2, 3),), whole=True)
    assert type(changing) is Of
    with pytest.raises(UsageError, match="an argument is of class object"):
        oft.fuse(Of(lambda m, x: x), whole=True)([object(), torch.ones(2)])
    with pytest.raises(UsageError, match="none of the arguments is a tensor"):
        oft.fuse(Of(lambda m, x: m.count), whole=True)(3)
