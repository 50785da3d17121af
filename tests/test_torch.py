"""Fused functions of torch tensors, beside torch's own: values, gradients, transforms."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_turn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import onnx_fuse.torch as oft  # noqa: E402
from onnx_fuse.errors import UsageError  # noqa: E402
from onnx_fuse.torch import library  # noqa: E402
from onnx_fuse.torch.functional import ACTIVATIONS  # noqa: E402

ACTS: dict[str | None, Callable[..., Any]] = {
    None: lambda z: z,
    "relu": F.relu,
    "clipped_relu": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "silu": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": lambda z: (0.2 * z + 0.5).clamp(0, 1),
    "hard_swish": F.hardswish,
    "tanh": torch.tanh,
    "softplus": F.softplus,
}


BY_TORCH = library.by_torch


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Functions run as graphs, as CUDA tensors let them, where a test has no other `way`."""
    torch.manual_seed(0)
    monkeypatch.setattr(library, "by_torch", lambda x: False)
    with warnings.catch_warnings():  # float64 runs in NumPy, and says so
        warnings.filterwarnings("ignore", message="runs slowly")
        yield


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, seeded: None) -> str:
    """ "graph", or "torch": torch's own operators, as CPU tensors have them."""
    if request.param == "torch":
        monkeypatch.setattr(library, "by_torch", BY_TORCH)
    return str(request.param)


both_ways = pytest.mark.parametrize("way", ["graph", "torch"], indirect=True)

Case = tuple[Any, Any, tuple[tuple[int, ...], ...]]


def layer_norm_case(act: str | None) -> Case:
    return (
        lambda x, w, c, s, b: oft.fused_layernorm_linear(x, w, c, s, b, 1e-3, act),
        lambda x, w, c, s, b: ACTS[act](F.linear(F.layer_norm(x, x.shape[-1:], s, b, 1e-3), w, c)),
        ((2, 3, 6), (5, 6), (5,), (6,), (6,)),
    )


def rms_case(act: str | None) -> Case:
    return (
        lambda x, w, c, s: oft.rms_norm_linear(x, w, c, s, 1e-3, act),
        lambda x, w, c, s: ACTS[act](F.linear(F.rms_norm(x, x.shape[-1:], s, 1e-3), w, c)),
        ((2, 3, 6), (5, 6), (5,), (6,)),
    )


def linear_case(act: str | None) -> Case:
    return (
        lambda x, w, c: oft.linear_activation(x, w, c, act),
        lambda x, w, c: ACTS[act](F.linear(x, w, c)),
        ((2, 3, 6), (5, 6), (5,)),
    )


def attention_case(groups: int, masked: str) -> Case:
    masks = {
        "keys": torch.tensor([[True, True, False, True, False]]),
        "rows": torch.arange(20).reshape(4, 5) % 3 > 0,
        "whole rows": (torch.arange(4) > 1)[:, None].expand(4, 5),
        "added": torch.linspace(-2, 2, 20).reshape(4, 5),
    }
    mask, causal = masks.get(masked), masked == "causal"

    def cast(q: Any) -> Any:
        return mask.to(q.dtype) if mask is not None and mask.is_floating_point() else mask

    def ours(q: Any, k: Any, v: Any) -> Any:
        return oft.attention(q, k, v, cast(q), causal=causal)

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(
            q, k, v, cast(q), is_causal=causal, enable_gqa=groups != 4
        )

    return ours, theirs, ((2, 4, 4, 6), (2, groups, 5, 6), (2, groups, 5, 6))


def loss_case(reduction: str, smoothing: float, bias: bool) -> Case:
    target = torch.tensor([[1, 2, -100], [0, 4, 3]])
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}

    def ours(x: Any, w: Any, *c: Any) -> Any:
        return oft.linear_cross_entropy(x, w, target, bias=c[0] if c else None, **options)

    def theirs(x: Any, w: Any, *c: Any) -> Any:
        logits = F.linear(x, w, *c).reshape(-1, 5)
        wide = logits if x.dtype == torch.float64 else logits.float()
        found = F.cross_entropy(wide, target.reshape(-1), **options).to(x.dtype)
        return found.reshape(target.shape) if reduction == "none" else found

    return ours, theirs, ((2, 3, 6), (5, 6), *(((5,),) if bias else ()))


CASES: dict[str, Case] = {
    **{f"layer norm {act}": layer_norm_case(act) for act in ACTS},
    **{f"rms norm {act}": rms_case(act) for act in (None, "silu", "gelu")},
    **{f"linear {act}": linear_case(act) for act in (None, "relu", "gelu_tanh", "mish")},
    **{f"attention {m}": attention_case(4, m) for m in ("", "causal", "keys", "rows", "added")},
    "attention whole rows": attention_case(4, "whole rows"),
    "attention of groups": attention_case(2, "causal"),
    "attention of one head": attention_case(1, "rows"),
    **{
        f"loss {reduction} {smoothing} {bias}": loss_case(reduction, smoothing, bias)
        for reduction, smoothing, bias in (
            ("mean", 0.0, True), ("mean", 0.1, False), ("sum", 0.0, False), ("sum", 0.1, True),
            ("none", 0.0, True),
        )
    },
}  # fmt: skip
# Two orders of summing six to ten products; the 16-bit ones are compared after one rounding of each
TOLERANCES = {
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (6e-2, 6e-2),
    torch.float16: (8e-3, 8e-3),
}


def drawn(shapes: tuple[tuple[int, ...], ...], dtype: Any) -> list[Any]:
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


def close(found: Any, wanted: Any, dtype: Any) -> None:
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(found, wanted, atol=atol, rtol=rtol, equal_nan=True)


def compare(ours: Any, theirs: Any, given: list[Any]) -> None:
    """Values and all gradients."""
    dtype = given[0].dtype
    y, expected = ours(*given), theirs(*given)
    close(y, expected, dtype)
    dy = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy), strict=True
    )
    for found, wanted in pairs:
        close(found, wanted, dtype)


@both_ways
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torch_s(way: str, name: str) -> None:
    ours, theirs, shapes = CASES[name]
    compare(ours, theirs, drawn(shapes, torch.float32))


@both_ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    ["layer norm gelu", "rms norm silu", "linear relu", "attention rows", "loss mean 0.1 False"],
)
def test_sixteen_bits(way: str, name: str, dtype: Any) -> None:
    ours, theirs, shapes = CASES[name]
    compare(ours, theirs, drawn(shapes, dtype))


def test_every_activation_has_a_row() -> None:
    assert set(ACTS) == {None, *ACTIVATIONS}


@both_ways
@pytest.mark.parametrize(
    "name",
    ["layer norm gelu", "layer norm None", "rms norm silu", "linear gelu_tanh", "attention causal",
     "loss mean 0.1 False"],
)  # fmt: skip
def test_gradcheck(way: str, name: str) -> None:
    ours, _, shapes = CASES[name]
    # the statistics of a LayerNormalization are float32 numbers
    assert gradcheck(ours, drawn(shapes, torch.float64), atol=1e-5)


@both_ways
def test_gradients_of_gradients(way: str) -> None:
    ours, _, _ = CASES["layer norm tanh"]
    given = drawn(((2, 3), (2, 3), (2,), (3,), (3,)), torch.float64)
    assert gradgradcheck(ours, given, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["layer norm gelu", "layer norm None", "rms norm None", "linear mish", "linear None",
     "attention rows", "loss mean 0.1 False", "loss sum 0.1 True"],
)  # fmt: skip
def test_eager_calls_without_the_dispatcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA tensors take it, tried with tensors of the CPU."""
    host_turn.use(monkeypatch)
    ours, theirs, shapes = CASES[name]
    given = drawn(shapes, torch.float32)
    compare(ours, theirs, given)
    assert "CompiledFunction" in ours(*given).grad_fn.name()
    for i, fixed in enumerate(given):  # one that asks for no gradient
        fixed.requires_grad_(False)
        rest = [t for k, t in enumerate(given) if k != i]
        pairs = (torch.autograd.grad(f(*given).sum(), rest) for f in (ours, theirs))
        for found, wanted in zip(*pairs, strict=True):
            close(found, wanted, torch.float32)
        fixed.requires_grad_()
    with torch.no_grad():
        close(ours(*given), theirs(*given), torch.float32)
    double = [t.detach().double().requires_grad_() for t in given]
    (first,) = torch.autograd.grad(ours(*double).square().sum(), double[:1], create_graph=True)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        loss = theirs(*double).square().sum()
    (wanted,) = torch.autograd.grad(loss, double[:1], create_graph=True)
    pairs = (torch.autograd.grad(g.square().sum(), double[1]) for g in (first, wanted))
    for found, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    if name == "layer norm gelu":
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*given), ours(*given))


# ---- odd tensors -----------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 0, 3), (2, 1, 3)])
def test_any_leading_axes(way: str, lead: tuple[int, ...]) -> None:
    ours, theirs, (_, *others) = CASES["layer norm gelu"]
    compare(ours, theirs, drawn(((*lead, 6), *others), torch.float32))


@both_ways
def test_tensors_that_are_not_contiguous(way: str) -> None:
    ours, theirs, _ = CASES["layer norm silu"]
    x = torch.randn(6, 7).t().requires_grad_()
    w = torch.randn(6, 5).t().requires_grad_()
    c, b = (torch.randn(1).expand(n).requires_grad_() for n in (5, 6))
    s = torch.randn(12)[::2].requires_grad_()
    compare(ours, theirs, [x, w, c, s, b])


@both_ways
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e15, 1e-30, -0.0])
def test_rows_of_odd_values_stay_by_themselves(way: str, value: float) -> None:
    ours, theirs, shapes = CASES["layer norm relu"]
    given = drawn(shapes, torch.float32)
    with torch.no_grad():
        given[0][1, 2] = value
    y, expected = ours(*given), theirs(*given)
    close(y[0], expected[0], torch.float32)
    assert torch.equal(y.isnan(), expected.isnan())
    if abs(value) < 1:
        close(y, expected, torch.float32)


@both_ways
def test_what_does_not_fit_is_refused(way: str) -> None:
    x, w = torch.randn(2, 4), torch.randn(3, 5)
    with pytest.raises(ValueError, match="weight has size 5 at axis 1, not 4"):
        oft.linear_activation(x, w, None, "gelu")
    with pytest.raises(ValueError, match=r"weight is torch\.float64"):
        oft.linear_activation(x, w.double(), None, "gelu")
    with pytest.raises(UsageError, match="unknown activation 'swish'"):
        oft.linear_activation(x, w, None, "swish")
    with pytest.raises(UsageError, match=r"no fused function of torch\.int64"):
        oft.linear_activation(x.long(), w.long(), None, "gelu")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("attention")])
@pytest.mark.parametrize("way", ["torch"], indirect=True)
def test_a_row_of_nan_is_not_hidden(way: str, name: str) -> None:
    """torch's flash kernel for the CPU makes zeros of it; its formula does not."""
    ours, theirs, shapes = CASES[name]
    given = drawn(shapes, torch.float32)
    with torch.no_grad():
        given[0][1, -1, 2, 3] = torch.nan
    with sdpa_kernel(SDPBackend.MATH):
        expected = theirs(*given)
    assert expected[1, -1, 2].isnan().all()
    torch.testing.assert_close(ours(*given), expected, equal_nan=True)


@pytest.mark.parametrize("sizes", [(0, 3, 2), (2, 0, 2), (2, 3, 0), (1, 1, 1)])
@both_ways
def test_attention_of_any_size(way: str, sizes: tuple[int, int, int]) -> None:
    batch, rows, keys = sizes
    ours, theirs, _ = CASES["attention causal"]
    compare(ours, theirs, drawn(((batch, 4, rows, 6), *[(batch, 4, keys, 6)] * 2), torch.float32))


@both_ways
def test_a_mask_and_causal_at_once(way: str) -> None:
    given = drawn(CASES["attention "][2], torch.float32)
    earlier = torch.ones(4, 5, dtype=torch.bool).tril()
    masks = (torch.arange(20).reshape(4, 5) % 3 > 0, torch.linspace(-2, 2, 20).reshape(4, 5))
    for mask in masks:
        joint = mask & earlier if mask.dtype == torch.bool else mask.masked_fill(~earlier, -1e9)
        compare(
            lambda *args, mask=mask: oft.attention(*args, mask, causal=True),
            lambda *args, joint=joint: F.scaled_dot_product_attention(*args, joint),
            given,
        )


# ---- torch.compile, torch.func, autocast, export ---------------------------------------------


@pytest.mark.parametrize("save", [True, False])
def test_opcheck(save: bool) -> None:
    _, _, shapes = CASES["layer norm gelu"]
    part = "/forward:11111" if save else ""
    x, *rest = drawn(shapes, torch.float32)
    key = f"layernorm_linear(FLOAT,{(1e-5).hex()},gelu,1,0){part}"
    given = key, [x.flatten(0, -2), *rest]
    torch.library.opcheck(torch.ops.onnx_fuse.layernorm_linear.default, given)


@both_ways
@pytest.mark.parametrize("name", ["layer norm gelu", "attention causal", "loss mean 0.0 True"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(way: str, name: str, dynamic: bool) -> None:
    ours, _, shapes = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    given = drawn(shapes, torch.float32)
    y, expected = compiled(*given), ours(*given)
    assert torch.equal(y, expected)
    pairs = zip(
        torch.autograd.grad(y.sum(), given), torch.autograd.grad(expected.sum(), given), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)


@both_ways
def test_transforms(way: str) -> None:
    ours, theirs, shapes = CASES["layer norm gelu"]
    x, *rest = (t.detach() for t in drawn(shapes, torch.float32))

    def loss(f: Any) -> Any:
        return lambda x, w: f(x, w, *rest[1:]).square().sum()

    def samples(f: Any) -> Any:
        return torch.vmap(torch.func.grad(loss(f), argnums=1), (0, None))(x, rest[0])

    close(samples(ours), samples(theirs), torch.float32)

    def tangents(f: Any) -> Any:
        return torch.func.jvp(lambda x: f(x, *rest), (x,), (torch.ones_like(x),))[1]

    close(tangents(ours), tangents(theirs), torch.float32)

    def hessian(f: Any) -> Any:
        return torch.func.hessian(lambda x: loss(f)(x, rest[0]))(x[0])

    close(hessian(ours), hessian(theirs), torch.float32)


@both_ways
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap(way: str, axis: int) -> None:
    ours, theirs, _ = CASES["layer norm gelu"]
    x, w, *rest = (torch.randn(*s) for s in ((4, 4, 6), (4, 5, 6), (5,), (6,), (6,)))
    for dims in ((axis, None), (axis, 0), (None, 0)):
        every = (*dims, None, None, None)
        found, wanted = (torch.vmap(f, every)(x, w[0] if dims[1] is None else w, *rest)
                         for f in (ours, theirs))  # fmt: skip
        close(found, wanted, torch.float32)


@both_ways
def test_autocast(way: str) -> None:
    ours, _, shapes = CASES["layer norm gelu"]
    given = drawn(shapes, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours(*given)
        loss = oft.linear_cross_entropy(given[0], given[1], torch.zeros(2, 3, dtype=torch.int64))
    assert (y.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    narrow = [t.detach().to(torch.bfloat16) for t in given]
    assert torch.equal(y, ours(*narrow))
    found = torch.autograd.grad(y.float().sum() + loss, given)
    assert all(g.dtype == torch.float32 for g in found)


def test_an_exported_program_has_the_operator() -> None:
    module = oft.FusedLayerNormLinear(6, 5, activation="gelu").eval()
    x = torch.randn(3, 6)
    program = torch.export.export(module, (x,))
    assert "onnx_fuse.layernorm_linear" in str(program.graph)
    assert torch.equal(program.module()(x), module(x))
