"""Modules of PyTorch: the fused ones, what `fuse` proves, imported files, exported modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import host_turn  # noqa: E402
import onnx  # noqa: E402
import onnx_ir as ir  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_models import Block, Gpt, losses  # noqa: E402

import onnx_fuse as of  # noqa: E402
import onnx_fuse.torch as oft  # noqa: E402
from onnx_fuse.errors import CheckFailed, UsageError  # noqa: E402
from onnx_fuse.ir.build import text_model  # noqa: E402
from onnx_fuse.torch import eager, formulas  # noqa: E402

CURVE = 1e-4
"""Between two float32 trainings of 50 steps that sum in other orders."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- modules of their own --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "norm"), [(oft.FusedLayerNormLinear, nn.LayerNorm), (oft.RMSNormLinear, nn.RMSNorm)]
)
def test_a_norm_and_a_linear_layer_load_from_two_modules(ours: Any, norm: Any) -> None:
    pair = nn.Sequential(norm(6, 1e-3), nn.Linear(6, 5))
    for parameter in pair.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, 6)
    module = ours(6, 5, eps=1e-3, activation="gelu")
    module.load_state_dict(pair.state_dict())
    torch.testing.assert_close(module(x), F.gelu(pair(x)), atol=1e-5, rtol=1e-5)
    again = ours(6, 5, eps=1e-3, activation="gelu")
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), module(x))
    shared = ours.of(pair[0], pair[1])
    assert {id(p) for p in shared.parameters()} == {id(p) for p in pair.parameters()}
    with pytest.raises(UsageError, match="the same last axis"):
        ours.of(norm(5), pair[1])


def test_linear_modules_are_linear_layers() -> None:
    linear, x = nn.Linear(6, 5), torch.randn(4, 6)
    module = oft.LinearActivation(6, 5, activation="relu")
    module.load_state_dict(linear.state_dict())
    torch.testing.assert_close(module(x), F.relu(linear(x)))
    loss, target = oft.LinearCrossEntropy(6, 5, label_smoothing=0.1), torch.tensor([0, 1, 2, -100])
    loss.load_state_dict(linear.state_dict())
    expected = F.cross_entropy(linear(x), target, label_smoothing=0.1)
    torch.testing.assert_close(loss(x, target), expected)


# ---- fuse ------------------------------------------------------------------------------------


def test_a_transformer_fuses_trains_alike_and_keeps_its_state_dict() -> None:
    model = Gpt().eval()
    plain = copy.deepcopy(model)
    ids = torch.randint(0, 17, (2, 5))
    assert oft.fuse(model, (ids,)) is model
    assert list(model.state_dict()) == list(plain.state_dict())
    fused = [c.names for c in oft.explain(plain) if not c.reason]
    assert ("blocks.0.ln1", "blocks.0.attn.q", "blocks.0.attn.k", "blocks.0.attn.v") in fused
    assert ("blocks.1.ln2", "blocks.1.mlp.0") in fused
    assert ("norm", "head") in fused
    assert "PassedLayerNorm" in str(model)
    assert oft.explain(model) == []
    torch.testing.assert_close(model(ids), plain(ids), atol=1e-5, rtol=1e-5)
    other = copy.deepcopy(model)
    other.load_state_dict(plain.state_dict())
    compiled = torch.compile(other.blocks[0], fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 32)
    assert torch.equal(compiled(x), model.blocks[0](x))
    np.testing.assert_allclose(losses(model), losses(plain), atol=CURVE)


def test_checkpointing_runs_the_forward_again() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
    imported = oft.from_onnx(of.optimize(model, torch.randn(4, 6)))
    plain, x = copy.deepcopy(model), torch.randn(4, 6, requires_grad=True)
    oft.fuse(model)
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    for each in (model, imported):
        y = checkpoint(each, x, use_reentrant=False)
        (found,) = torch.autograd.grad(y.square().sum(), x)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    parameters = {k: v.detach() * 2 for k, v in model.named_parameters()}
    pair = (torch.func.functional_call(each, parameters, (x,)) for each in (model, plain))
    torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)


def test_a_file_with_trained_weights_has_tangents() -> None:
    plain, x = nn.Sequential(nn.Linear(6, 5), nn.GELU()), torch.randn(4, 6)
    imported = oft.from_onnx(of.optimize(plain, x))
    ours, theirs = (torch.func.jvp(each, (x,), (x,))[1] for each in (imported, plain))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


class OwnNorm(nn.Module):
    """An RMSNorm as libraries of transformers write it."""

    def __init__(self, width: int, shift: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.shift = nn.Parameter(torch.randn(width)), 1e-3, shift

    def forward(self, x: Any) -> Any:
        kind = x.dtype
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight + self.shift if self.shift else self.weight) * wide.to(kind)


class SquaredNorm(OwnNorm):
    def forward(self, x: Any) -> Any:
        wide = x.float()
        return (wide * (wide * wide).mean(dim=-1, keepdim=True).add(self.eps).rsqrt()).type_as(
            x
        ) * self.weight


class OtherAxis(OwnNorm):
    def forward(self, x: Any) -> Any:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + self.eps))


@pytest.mark.parametrize(
    ("norm", "fused"),
    [
        (OwnNorm(6), True), (SquaredNorm(6), True),
        (OwnNorm(6, 1.0), False), (OtherAxis(6), False),
    ],
    ids=["cast", "squared", "shifted weight", "other axis"],
)  # fmt: skip
def test_an_rms_norm_of_another_library_is_known_by_its_formula(norm: Any, fused: bool) -> None:
    model, x = nn.Sequential(norm, nn.Linear(6, 5), nn.SiLU()), torch.randn(2, 3, 6)
    names, expected = list(model.state_dict()), model(x)
    oft.fuse(model, (x,))
    assert list(model.state_dict()) == names
    assert (type(model[0]).__name__ == "Passed") == fused
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


class Conv1D(nn.Module):
    """A linear layer with a weight [in, out], as a library of transformers writes it."""

    def __init__(self, wide: int, width: int) -> None:
        super().__init__()
        self.wide = wide
        self.weight = nn.Parameter(torch.randn(width, wide) / width**0.5)
        self.bias = nn.Parameter(torch.randn(wide))

    def forward(self, x: Any) -> Any:
        size_out = x.size()[:-1] + (self.wide,)  # noqa: RUF005 - as it is written there
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class NewGelu(nn.Module):
    def forward(self, x: Any) -> Any:
        inner = (2.0 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Written(nn.Module):
    """An activation as a formula of its input."""

    def __init__(self, formula: Any) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Any) -> Any:
        return self.formula(x)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.ReLU(inplace=True), "relu"), (nn.ReLU6(), "clipped_relu"), (nn.SELU(), "selu"),
        (nn.Hardswish(), "hard_swish"), (nn.LeakyReLU(), "leaky_relu"), (nn.LeakyReLU(0.2), None),
        (nn.ELU(2.0), None), (nn.Dropout(0.5), None), (nn.Identity(), None),
        (Written(lambda x: x * torch.sigmoid(1.702 * x)), "quick_gelu"),
        (Written(lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.41421))), None),
        (Written(lambda x: F.silu(x.float())), None), (Written(lambda x: F.relu(x) + 1), None),
    ],
)  # fmt: skip
def test_an_activation_is_known_by_its_formula(module: Any, name: str | None) -> None:
    assert formulas.activation(module) == name


class Gpt2Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.width, self.head = width, width // heads

    def forward(self, x: Any, mask: Any = None, **more: Any) -> Any:
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        q, k, v = (t.view((*t.shape[:-1], -1, self.head)).transpose(1, 2) for t in (q, k, v))
        causal = q.shape[2] > 1 and mask is None
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=bool(causal))
        y = y.transpose(1, 2)
        return self.c_proj(y.reshape(*y.shape[:-2], -1).contiguous()), None


class Gpt2Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Gpt2Attention(width, heads)
        self.ln_2, self.c_fc = nn.LayerNorm(width), Conv1D(4 * width, width)
        self.act, self.c_proj = NewGelu(), Conv1D(width, 4 * width)

    def forward(self, x: Any, mask: Any = None, states: Any = None, **more: Any) -> Any:
        if states is not None:
            raise ValueError("there is no cross attention")
        y, _ = self.attn(self.ln_1(x), mask=mask, **more)
        x = x + y
        return x + self.c_proj(self.act(self.c_fc(self.ln_2(x))))


def test_a_block_of_gpt2_fuses_through_its_branches() -> None:
    """Conv1D, its GELU, and attention that asks for sizes and hands on its `**kwargs`."""
    model, x = Gpt2Block(), torch.randn(2, 5, 16, requires_grad=True)
    plain = copy.deepcopy(model)
    groups = {c.names: c.reason for c in oft.explain(model)}
    norms = {("ln_1", "attn.c_attn"): "", ("ln_2", "c_fc"): ""}
    assert groups == {**norms, ("act", "c_fc"): ""}
    oft.fuse(model, (x.detach(),))
    assert list(model.state_dict()) == list(plain.state_dict())
    found, wanted = (
        torch.autograd.grad(each(x).square().sum(), [x, *each.parameters()])
        for each in (model, plain)
    )
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.act = nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Any) -> Any:
        n = self.norm(x)
        return self.act(self.a(n)) + n


class Sometimes(Twice):
    def forward(self, x: Any, whole: bool = False) -> Any:
        n = self.norm(x)
        return n if whole else self.act(self.a(n))


class InTraining(Twice):
    def forward(self, x: Any) -> Any:
        n = self.norm(x)
        return self.a(n) + n if self.training else self.a(n)


class ByData(Twice):
    def forward(self, x: Any) -> Any:
        n = self.norm(x)
        return self.a(n) if x.sum() > 0 else n


class Long(Twice):
    def forward(self, x: Any) -> Any:
        return self.a(self.norm(x)) if len(x) > 2 else x


class Further(Twice):
    def forward(self, x: Any, **more: Any) -> Any:
        n = self.norm(x)
        return n if more.get("early") else self.a(n)


class Called(Twice):
    def forward(self, x: Any) -> Any:
        return self.act(self.a(self.norm(x))) + self.act(self.a(self.norm(-x)))


class Loss(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(4, 3), nn.CrossEntropyLoss(**options)

    def forward(self, x: Any, y: Any) -> Any:
        return self.loss(self.head(x), y)


class Logits(Loss):
    def forward(self, x: Any, y: Any) -> Any:
        z = self.head(x)
        return self.loss(z, y), z


def hooked() -> nn.Module:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda *_: None)
    return model


def shared() -> nn.Module:
    norm = nn.LayerNorm(4)
    return nn.Sequential(norm, nn.Linear(4, 4), norm, nn.Linear(4, 4))


# model: the reasons, by what a linear layer would be fused with
REFUSED: dict[str, tuple[Any, dict[str, str]]] = {
    "another reader": (Twice, {"norm": "'norm' is read by .*add.* too", "activation": ""}),
    "another reader for some arguments": (
        Sometimes, {"norm": "'norm' is read by the forward's result too", "activation": ""},
    ),
    "another reader in training": (InTraining, {"norm": "'norm' is read by .*add.* too"}),
    "another reader for some data": (ByData, {"norm": "is read by the forward's result too"}),
    "a forward that asks for a length": (Long, {"norm": "cannot be traced"}),
    "a forward that looks for arguments": (Further, {"norm": r"reads its \*\*more"}),
    "two calls": (
        Called, {"norm": "'norm' is called more than once", "activation": "called more than once"},
    ),
    "hooks": (hooked, {"norm": "'0' has hooks"}),
    "one norm in two places": (shared, {"norm": "'0' (is used in several|is called more)"}),
    "two axes": (
        lambda: nn.Sequential(nn.LayerNorm((3, 4)), nn.Linear(4, 4)),
        {"norm": "other axes than the last"},
    ),
    "logits that are a result": (Logits, {"cross_entropy": "has other readers than 'loss'"}),
    "weights of classes": (
        lambda: Loss(weight=torch.ones(3)), {"cross_entropy": "weighs the classes"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_proved_stays_apart_with_a_reason(name: str) -> None:
    import re

    make, reasons = REFUSED[name]
    model = make()
    found = {c.kind: c.reason for c in oft.explain(model)}
    assert set(found) == set(reasons)
    for kind, reason in reasons.items():
        assert re.search(reason, found[kind]), found[kind]
        assert bool(reason) == bool(found[kind])
    norms = [type(m) for m in oft.fuse(model).modules() if isinstance(m, nn.LayerNorm)]
    assert all(kind is nn.LayerNorm for kind in norms)


@pytest.mark.parametrize(
    "act", [nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.ELU(), nn.LeakyReLU(), nn.Tanh()]
)
def test_an_activation_is_fused_into_the_layer_before_it(act: nn.Module) -> None:
    model = nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 5), act, nn.Linear(5, 2), nn.LeakyReLU(0.3))
    plain, x = copy.deepcopy(model), torch.randn(3, 6)
    oft.fuse(model)
    assert [type(m).__name__ for m in model[:3]] == [
        "PassedRMSNorm", "FusedLinear", "Passed",
    ]  # fmt: skip
    assert type(model[4]) is nn.LeakyReLU  # a slope that is not ours
    torch.testing.assert_close(model(x), plain(x), atol=1e-5, rtol=1e-5)


def test_a_loss_is_fused_with_the_linear_layer_before_it() -> None:
    model, x = Loss(label_smoothing=0.1), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    oft.fuse(model)
    assert type(model.head).__name__ == "PassedLinear"
    for y in (torch.tensor([0, 2, 1]), torch.softmax(torch.randn(3, 3), 1)):
        torch.testing.assert_close(model(x, y), plain(x, y))


def test_a_norm_that_somebody_else_calls_shows_in_a_run() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Any) -> Any:
            norm = dict(self.inner.named_children())["ln1"]
            return nn.Sequential(norm)(x) if x.numpy().sum() > 0 else self.inner(x)

    model, x = Outside().eval(), torch.ones(1, 3, 32) + torch.rand(1, 3, 32)
    keys = list(model.state_dict())
    with pytest.raises(CheckFailed, match="computes something else"):
        oft.fuse(model, (x,))
    assert type(model.inner.ln1) is nn.LayerNorm
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(x), F.layer_norm(x, (32,)))


# ---- from_onnx -------------------------------------------------------------------------------


def exported(model: nn.Module, ids: Any) -> bytes:
    shapes = ({0: "B", 1: "T"},)
    program = torch.onnx.export(model, (ids,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    data: bytes = program.model_proto.SerializeToString()
    return data


@pytest.fixture(params=["dispatcher", "direct"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By torch's dispatcher, or around it as on CUDA tensors."""
    if request.param == "direct":
        host_turn.use(monkeypatch)
        monkeypatch.setattr(eager, "MANY", 3)
    found: str = request.param
    return found


def test_an_imported_file_trains_as_the_module_it_came_from(tmp_path: Path, way: str) -> None:
    model, ids = Gpt().eval(), torch.randint(0, 17, (2, 5))
    module = oft.from_onnx(exported(model, ids), untie=True)
    assert dict(module.named_parameters())["blocks.1.mlp.3.bias"].shape == (32,)
    torch.testing.assert_close(module(ids), model(ids), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(losses(module), losses(model), atol=CURVE)
    module.save(tmp_path / "tuned.onnx")
    onnx.checker.check_model(tmp_path / "tuned.onnx")
    again = oft.from_onnx(tmp_path / "tuned.onnx")
    assert list(again.state_dict()) == list(module.state_dict())
    assert torch.equal(again(ids), module(ids))
    copied = copy.deepcopy(module)
    copied.load_state_dict({k: torch.zeros_like(v) for k, v in again.state_dict().items()})
    assert not torch.equal(copied(ids), module(ids))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    loss = compiled(ids).square().mean()
    assert torch.equal(loss, module(ids).square().mean())
    loss.backward()
    if way == "direct":
        assert "CompiledFunction" in module(ids).grad_fn.name()
        module.zero_grad()
        made = torch.autograd.grad(module(ids).sum(), [*module.parameters()])
        assert len({g.untyped_storage().data_ptr() for g in made}) == 1
        module(ids).sum().backward()  # no gradient is copied on its way into its parameter
        given = [p.grad for p in module.parameters()]
        assert len({g.untyped_storage().data_ptr() for g in given}) == 1
        assert all(torch.equal(a, b) for a, b in zip(made, given, strict=True))


def test_only_the_weights_that_train_have_gradients(way: str) -> None:
    model, ids = Gpt().eval(), torch.randint(0, 17, (2, 5))
    data = exported(model, ids)
    module = oft.from_onnx(data, ["head.*"], precision="bf16")
    module(ids).sum().backward()
    trained = [n for n, p in module.named_parameters() if p.grad is not None]
    assert trained == ["head.bias"] or set(trained) <= {"head.weight", "head.bias"}
    assert trained
    fixed = oft.from_onnx(data, False)
    assert not fixed(ids).requires_grad
    with pytest.raises(TypeError, match="the inputs are"):
        module(ids, ids)
    with pytest.raises(UsageError, match="no precision 'int8'"):
        oft.from_onnx(data, precision="int8")


def test_names_that_are_no_attributes_and_several_outputs(way: str) -> None:
    text = """agraph (float[N,2] x, int64[1] k) => (float[N,2] y, int64[N] i)
    <float[2] forward = {1, 2}, float[2] "a..b" = {3, 4}, float[2] a = {5, 6},
     float[2] "a.c" = {7, 8}>
    { p = Mul(x, forward) q = Add(p, "a..b") r = Mul(q, a) s = Add(r, "a.c") y = Identity(s)
      i = ArgMax <axis = 1, keepdims = 0> (y) }""".replace('"', "")
    names = {"a..b": "adoubledotb", "a.c": "adotc"}
    for name, plain in names.items():
        text = text.replace(name, plain)
    model = text_model(text)
    for name, plain in names.items():
        value = model.graph.initializers.pop(plain)
        value.name = name
        value.const_value.name = name
        model.graph.register_initializer(value)
    module = oft.from_onnx(model)
    assert len(module.state_dict()) == 4
    x = torch.tensor([[1.0, -2.0]], requires_grad=True)
    y, i = module(x, k=torch.tensor([0]))
    torch.testing.assert_close(y, (x * torch.tensor([1.0, 2]) + torch.tensor([3.0, 4]))
                               * torch.tensor([5.0, 6]) + torch.tensor([7.0, 8]))  # fmt: skip
    assert i.tolist() == [int(y.argmax())]
    y.sum().backward()
    assert torch.equal(x.grad, torch.tensor([[5.0, 12.0]]))
    (hessian,) = torch.autograd.grad(
        torch.autograd.grad(module(x, torch.tensor([0]))[0].square().sum(), x, create_graph=True)[0]
        .sum(), x)  # fmt: skip
    assert torch.equal(hessian, torch.tensor([[50.0, 288.0]]))


def test_an_output_whose_size_depends_on_data_may_have_no_gradient() -> None:
    text = """agraph (float[N,2] x) => (float[N,2] y, float[K] z)
    <float[2] w = {2, 3}, int64[1] flat = {-1}, int64[1] first = {0}>
    { y = Mul(x, w) f = Reshape(y, flat) n = NonZero(f) i = Squeeze(n, first) z = Gather(f, i) }"""
    module = oft.from_onnx(text_model(text))
    y, z = module(torch.tensor([[1.0, 0.0], [0.0, 4.0]]))
    assert z.tolist() == [2, 12]
    (gradient,) = torch.autograd.grad(y.sum(), [module.w], retain_graph=True)
    assert gradient.tolist() == [1, 4]
    (gradient,) = torch.autograd.grad(z.square().sum(), [module.w])
    assert gradient.tolist() == [4, 96]


def test_rows_of_a_table_are_cast_and_their_gradients_summed_wide() -> None:
    """One that is multiplied by, too, is cast as a whole anyway."""
    numbers = ", ".join(map(str, range(1, 21)))
    text = f"""agraph (int64[N] i) => (float[N,4] y, float[N,5] z)
    <float[5,4] table = {{{numbers}}}, float[5,4] tied = {{{numbers}}}>
    {{ r = Gather(table, i) t = Gather(tied, i) y = Add(r, t) u = Transpose(tied)
       z = MatMul(y, u) }}"""
    module = oft.from_onnx(text_model(text), precision="bf16")
    graph = module._graph.model.graph
    cast = {n.inputs[0].name for n in graph if n.op_type == "Cast"}
    assert "tied" in cast
    assert "table" not in cast
    backward = module._graph.derived("backward:011").model.graph
    kinds = {n.outputs[0].dtype for n in backward if n.op_type == "ScatterND"}
    assert kinds == {ir.DataType.FLOAT, ir.DataType.BFLOAT16}
    y, _ = module(torch.tensor([3, 1, 3]))
    y.sum().backward()
    assert module.table.grad.tolist() == [[n] * 4 for n in (0, 1, 0, 2, 0)]
    assert torch.equal(module.table.grad, module.tied.grad)


# ---- nn.Module and ONNXProgram where a path goes ---------------------------------------------


def test_a_module_is_optimized_and_trained_where_a_path_goes() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    x = torch.randn(4, 8)
    fused = of.optimize(model, (x,))
    assert isinstance(fused, onnx.ModelProto)
    assert [n.op_type for n in fused.graph.node] == ["LayerNormGemmGelu", "Gemm"]
    assert fused.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert model.training
    program = torch.onnx.export(model.eval(), (x,), dynamo=True, verbose=False)
    assert [n.op_type for n in of.optimize(program).graph.node] == ["LayerNormGemmGelu", "Gemm"]
    trainer = of.Trainer(model, {"input": x}, loss="cross_entropy", optimizer=of.optim.SGD(lr=0.1))
    feeds = {"input": x.numpy(), "labels": np.array([0, 1, 2, 0])}
    first = float(trainer.step(feeds))
    expected = F.cross_entropy(model(x), torch.tensor([0, 1, 2, 0]))
    np.testing.assert_allclose(first, expected.item(), rtol=1e-5)
    expected.backward()
    with torch.no_grad():
        weight = model[3].weight - 0.1 * model[3].weight.grad
    np.testing.assert_allclose(trainer.weights()["3.weight"], weight.numpy(), atol=1e-6)


def test_what_a_module_needs_to_be_exported() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), torch.randn(2, 2)
    with pytest.raises(UsageError, match="needs `args`"):
        of.optimize(model)
    with pytest.raises(UsageError, match="the model is none"):
        of.optimize(text_model("agraph (float[N] x) => (float[N] y) { y = Relu(x) }"), (x,))
    with pytest.warns(UserWarning, match="its Dropout is not in the graph"):
        of.optimize(model, x)
    assert model.training


def test_a_constant_that_has_no_gradient_is_no_parameter() -> None:
    text = """agraph (float[N,3] x) => (float[N,3] y)
    <float[3] w = {1, 2, 3}, float[3] marks = {4, 5, 6}>
    { same = Equal(x, marks) other = Mul(x, w) y = Where(same, x, other) }"""
    module = oft.from_onnx(text_model(text))
    assert [name for name, _ in module.named_parameters()] == ["w"]
    module(torch.tensor([[4.0, 1.0, 6.0]])).sum().backward()
    assert module.w.grad.tolist() == [0.0, 1.0, 0.0]
