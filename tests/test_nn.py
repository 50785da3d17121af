"""Eager tensors: every method against NumPy, every gradient against central differences."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnx_fuse import UsageError, nn
from onnx_fuse.nn import functional as F
from onnx_fuse.nn.tensor import Tensor

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 4)) + 0.1
Y = RNG.standard_normal((3, 4))
ROW = RNG.standard_normal(4)
IDS = np.array([[0, 2], [1, 1]])


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# name, the function of Tensors, the same by NumPy, its arguments; all are differentiated
ROWS: list[tuple[str, Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = [
    ("add", lambda x, y: x + y, lambda x, y: x + y, (X, Y)),
    ("add_row", lambda x, y: x + y, lambda x, y: x + y, (X, ROW)),
    ("add_column", lambda x, y: x + y, lambda x, y: x + y, (X, Y[:, :1])),
    ("sub_number", lambda x: 2 - x, lambda x: 2 - x, (X,)),
    ("mul_self", lambda x: x * x, lambda x: x * x, (X,)),
    ("div", lambda x, y: x / y, lambda x, y: x / y, (X, np.abs(Y) + 1)),
    ("rdiv", lambda x: 3.0 / x, lambda x: 3.0 / x, (np.abs(X) + 1,)),
    ("floor_divide", lambda x: x // 0.7 + x, lambda x: x // 0.7 + x, (X,)),
    ("remainder", lambda x: x % 0.7, lambda x: x % 0.7, (X,)),
    ("pow", lambda x: x**3, lambda x: x**3, (X,)),
    ("matmul", lambda x, y: x @ y, lambda x, y: x @ y, (X, Y.T.copy())),
    ("vector", lambda x, y: x @ y, lambda x, y: x @ y, (X, ROW)),
    ("neg", lambda x: -x, lambda x: -x, (X,)),
    ("abs", abs, abs, (X,)),
    ("exp", lambda x: x.exp(), np.exp, (X,)),
    ("log", lambda x: x.log(), np.log, (np.abs(X) + 1,)),
    ("sqrt", lambda x: x.sqrt(), np.sqrt, (np.abs(X) + 1,)),
    ("tanh", lambda x: x.tanh(), np.tanh, (X,)),
    ("sigmoid", lambda x: x.sigmoid(), lambda x: 1 / (1 + np.exp(-x)), (X,)),
    ("relu", lambda x: x.relu(), lambda x: np.maximum(x, 0), (X,)),
    ("silu", F.silu, lambda x: x / (1 + np.exp(-x)), (X,)),
    ("clamp", lambda x: x.clamp(-0.5, 0.5), lambda x: np.clip(x, -0.5, 0.5), (X,)),
    ("clamp_below", lambda x: x.clamp(min=0.0), lambda x: np.maximum(x, 0), (X,)),
    ("maximum", lambda x, y: x.maximum(y), np.maximum, (X, Y)),
    ("where", lambda x, y: F.where(x > y, x, y * 2), lambda x, y: np.where(x > y, x, y * 2),
     (X, Y)),
    ("masked_fill", lambda x: x.masked_fill(x > 0, -1.0), lambda x: np.where(x > 0, -1, x), (X,)),
    ("softmax", lambda x: x.softmax(), softmax, (X,)),
    ("log_softmax", lambda x: x.log_softmax(), lambda x: np.log(softmax(x)), (X,)),
    ("sum", lambda x: x.sum(), np.sum, (X,)),
    ("sum_axis", lambda x: x.sum(0), lambda x: x.sum(0), (X,)),
    ("sum_kept", lambda x: x.sum((0, 1), keepdim=True), lambda x: x.sum((0, 1), keepdims=True),
     (X,)),
    ("mean", lambda x: x.mean(-1), lambda x: x.mean(-1), (X,)),
    ("prod", lambda x: x.prod(1), lambda x: x.prod(1), (X,)),
    ("amax", lambda x: x.amax(1), lambda x: x.max(1), (X,)),
    ("min", lambda x: x.min(), np.min, (X,)),
    ("max_values", lambda x: x.max(1)[0], lambda x: x.max(1), (X,)),
    ("var", lambda x: x.var(1), lambda x: x.var(1, ddof=1), (X,)),
    ("std", lambda x: x.std(correction=0), lambda x: x.std(), (X,)),
    ("norm", lambda x: x.norm(1), lambda x: np.sqrt((x * x).sum(1)), (X,)),
    ("logsumexp", lambda x: x.logsumexp(0), lambda x: np.log(np.exp(x).sum(0)), (X,)),
    ("rsqrt", lambda x: x.rsqrt(), lambda x: 1 / np.sqrt(x), (np.abs(X) + 1,)),
    ("sort", lambda x: x.sort()[0], lambda x: np.sort(x, 1), (X,)),
    ("einsum", lambda x, y: F.einsum("ij,kj->ik", x, y), lambda x, y: x @ y.T, (X, Y)),
    ("cumsum", lambda x: x.cumsum(1), lambda x: x.cumsum(1), (X,)),
    ("topk", lambda x: x.topk(2)[0], lambda x: -np.sort(-x)[:, :2], (X,)),
    ("reshape", lambda x: x.reshape(2, -1), lambda x: x.reshape(2, -1), (X,)),
    ("flatten", lambda x: x.flatten(), np.ravel, (X,)),
    ("flatten_inner", lambda x: x[None, :, :, None].flatten(1, 2),
     lambda x: x.reshape(1, 12, 1), (X,)),
    ("permute", lambda x: x.permute(1, 0) * 2, lambda x: x.T * 2, (X,)),
    ("T", lambda x: x.T @ x, lambda x: x.T @ x, (X,)),
    ("squeeze", lambda x: x[:, None].squeeze(1), lambda x: x, (X,)),
    ("expand", lambda x: x.expand(5, -1) * 2, lambda x: np.broadcast_to(x, (5, 4)) * 2, (ROW,)),
    ("repeat", lambda x: x.repeat(2, 3), lambda x: np.tile(x, (2, 3)), (X,)),
    ("split", lambda x: x.split(3, 1)[1], lambda x: x[:, 3:], (X,)),
    ("chunk", lambda x: x.chunk(2, 1)[0], lambda x: x[:, :2], (X,)),
    ("tril", lambda x: x.tril(), np.tril, (X,)),
    ("triu", lambda x: x.triu(1), lambda x: np.triu(x, 1), (X,)),
    ("gather", lambda x: x.gather(1, Tensor(IDS)), lambda x: np.take_along_axis(x[:2], IDS, 1),
     (X,)),
    ("index_select", lambda x: x.index_select(0, Tensor([2, 0])), lambda x: x[[2, 0]], (X,)),
    ("cat", lambda x, y: F.cat([x, y], 1), lambda x, y: np.concatenate([x, y], 1), (X, Y)),
    ("stack", lambda x, y: F.stack([x, y]), lambda x, y: np.stack([x, y]), (X, Y)),
    ("pad", lambda x: F.pad(x, (1, 2), 5.0),
     lambda x: np.pad(x, ((0, 0), (1, 2)), constant_values=5.0), (X,)),
    ("item_row", lambda x: x[1], lambda x: x[1], (X,)),
    ("last", lambda x: x[-1, -1], lambda x: x[-1, -1], (X,)),
    ("slice", lambda x: x[:, 1:3], lambda x: x[:, 1:3], (X,)),
    ("slice_back", lambda x: x[::-1, ::2], lambda x: x[::-1, ::2], (X,)),
    ("slice_from_back", lambda x: x[-2:, :-1], lambda x: x[-2:, :-1], (X,)),
    ("ellipsis", lambda x: x[..., None, 0], lambda x: x[..., None, 0], (X,)),
    ("rows", lambda x: x[IDS], lambda x: x[IDS], (X,)),
    ("columns", lambda x: x[:, [3, 0]], lambda x: x[:, [3, 0]], (X,)),
    ("pairs", lambda x: x[[0, 2], [1, 1]], lambda x: x[[0, 2], [1, 1]], (X,)),
    ("mask", lambda x: x[Tensor(X > 0)], lambda x: x[X > 0], (X,)),
    ("linear", F.linear, lambda x, w, b: x @ w.T + b, (X, RNG.standard_normal((2, 4)), ROW[:2])),
    ("linear_3d", F.linear, lambda x, w, b: x @ w.T + b,
     (RNG.standard_normal((2, 3, 4)), RNG.standard_normal((5, 4)), RNG.standard_normal(5))),
    ("embedding", lambda w: F.embedding(Tensor(IDS), w), lambda w: w[IDS], (X,)),
    ("mse", F.mse_loss, lambda x, y: ((x - y) ** 2).mean(), (X, Y)),
    ("l1", lambda x, y: F.l1_loss(x, y, "sum"), lambda x, y: np.abs(x - y).sum(), (X, Y)),
    ("cross_entropy", lambda x: F.cross_entropy(x, Tensor([1, 0, 3])),
     lambda x: -np.log(softmax(x))[[0, 1, 2], [1, 0, 3]].mean(), (X,)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "wanted", "arrays"), [r[1:] for r in ROWS],
                         ids=[r[0] for r in ROWS])  # fmt: skip
def test_a_function_and_its_gradient(
    function: Callable[..., Any], wanted: Callable[..., Any], arrays: tuple[Any, ...]
) -> None:
    tensors = [Tensor(np.asarray(a, np.float64), requires_grad=True) for a in arrays]
    y = function(*tensors)
    exact = np.asarray(wanted(*arrays))
    assert y.shape == exact.shape
    np.testing.assert_allclose(y.numpy(), exact, rtol=1e-6, atol=1e-7)  # some constants are float32
    weights = np.cos(np.arange(exact.size)).reshape(exact.shape)
    y.backward(Tensor(weights))
    for i, tensor in enumerate(tensors):
        assert tensor.grad.shape == tensor.shape
        slope = numeric(lambda a, i=i: (wanted(*replaced(arrays, i, a)) * weights).sum(), arrays[i])
        np.testing.assert_allclose(tensor.grad.numpy(), slope, rtol=2e-5, atol=1e-6)


def replaced(arrays: tuple[Any, ...], index: int, array: Any) -> list[Any]:
    return [array if i == index else a for i, a in enumerate(arrays)]


def numeric(f: Callable[[Any], Any], x: Any, step: float = 1e-6) -> Any:
    slope = np.zeros(x.shape)
    for i in np.ndindex(*x.shape):
        high, low = x.copy(), x.copy()
        high[i] += step
        low[i] -= step
        slope[i] = (f(high) - f(low)) / (2 * step)
    return slope


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int64", "int32", "bool"])
def test_dtypes_keep_their_names_and_pass_through_operators(dtype: str) -> None:
    x = Tensor([0, 1, 2], dtype=dtype)
    assert x.dtype.name == dtype
    assert (x | x if dtype == "bool" else x + x).dtype.name == dtype
    assert x.to("float32").tolist() == [0, 1, min(2, 1 if dtype == "bool" else 2)]


def test_mixed_types_meet_where_pytorch_has_them() -> None:
    half, single, whole = (Tensor([1], t) for t in ("float16", "float32", "int64"))
    assert (half + single).dtype == np.float32
    assert (half + whole).dtype == np.float16
    assert (whole * 0.5).dtype == np.float32
    assert (whole / 2).tolist() == [0.5]
    assert (whole == 1).dtype == np.bool_
    assert (Tensor([-7]) // 2).tolist() == [-4]
    assert (Tensor([-7]) % 3).tolist() == [2]
    assert (Tensor([7], "bfloat16") * 2).dtype == ml_dtypes.bfloat16


def test_negative_zero_and_nan_are_not_lost() -> None:
    x = Tensor([1.0, np.nan])
    assert np.signbit((x * -0.0).numpy()[0])
    assert not np.signbit((x * 0.0).numpy()[0])
    assert np.isnan(x.relu().numpy()[1])
    leaky = [F.leaky_relu(Tensor([-1.0]), s).numpy() for s in (0.0, -0.0)]
    assert np.signbit(leaky[0][0]) != np.signbit(leaky[1][0])


def test_no_elements_and_no_axes() -> None:
    x = Tensor(np.zeros((0, 4), np.float32), requires_grad=True)
    y = (x * 2).sum()
    y.backward()
    assert y.item() == 0
    assert x.grad.shape == (0, 4)
    s = Tensor(3.0, requires_grad=True)
    (s * s).backward()
    assert s.grad.item() == 6


def test_views_share_memory_and_arrays_come_and_go_without_copies() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = Tensor(array)
    for view in (x, x.T, x[1:], x.reshape(4, 3), x[:, ::-1], x.unsqueeze(0), x.expand(2, 3, 4)):
        assert np.shares_memory(view.numpy(), array)
    assert np.shares_memory(np.from_dlpack(x), array)
    assert np.shares_memory(Tensor(_Foreign(array)).numpy(), array)


def test_bfloat16_is_shared_with_other_libraries() -> None:
    x = nn.arange(12).reshape(3, 4).bfloat16().T[1:]
    again = Tensor(_Bfloat16(x))
    assert again.dtype == ml_dtypes.bfloat16
    assert np.shares_memory(again.numpy(), x.numpy())
    assert again.tolist() == x.tolist()
    assert Tensor(_Bfloat16(x[:0])).shape == (0, 3)
    kept = Tensor(_Bfloat16(x * 2))
    assert kept.tolist() == (x * 2).tolist()


class _Bfloat16:
    """A bfloat16 tensor of another library, as far as DLPack shows it."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.dtype = x, "torch.bfloat16"

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


class _Foreign:
    """A tensor of another library."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.dtype = array, array.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_gradients_add_up_and_stop_where_they_should() -> None:
    x = Tensor([2.0], requires_grad=True)
    (x * 3).sum().backward()
    (x * x).sum().backward()
    assert x.grad.tolist() == [7]
    assert not x.detach().requires_grad
    with nn.no_grad():
        assert not (x * 2).requires_grad
    assert (x > 1).requires_grad is False
    with pytest.raises(UsageError, match="requires a gradient"):
        (x.detach() * 2).sum().backward()
    for gradient in (None, nn.tensor([[1.0, 1.0]]), nn.tensor(1.0), np.ones(2, np.float32), 1.0):
        with pytest.raises(UsageError, match=r"a Tensor \[2\] needs one of its shape"):
            F.cat([x, x]).backward(gradient)


def test_a_leaf_has_its_gradient() -> None:
    x = Tensor([1.0, 2.0], requires_grad=True)
    for _ in range(2):
        x.backward(nn.tensor([3.0, 4.0]))
    assert x.grad.tolist() == [6, 8]
    with pytest.raises(UsageError, match=r"a Tensor \[2\] needs one of its shape"):
        x.backward()


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: F.leaky_relu(x, 0.25), [0.25, 0.25, 1]),
        (lambda x: F.elu(x, 0.5), [0.5, 0.5, 1]),
        (lambda x: nn.op_call("Selu", [x]), [1.7580993, 1.7580993, 1.050701]),
        (lambda x: nn.op_call("PRelu", [x, np.float32([0.5])]), [0.5, 0.5, 1]),
        (lambda x: x.max(0)[0] * 4, [0, 0, 4]),
        (lambda x: x.masked_fill(x > 0, 0).max(0)[0], [1, 0, 0]),
        (lambda x: -x.abs().min(-1, keepdim=True)[0] + x.relu() * 2, [0, 0, 2]),
        (lambda x: (x * 0).amax(0), [0, 0, 0]),
    ],
)
def test_a_slope_at_zero_and_among_equals_is_pytorchs(function: Any, wanted: list[float]) -> None:
    x = Tensor([0.0, -0.0, 2.0], requires_grad=True)
    function(x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), wanted, rtol=1e-6)


def test_a_gradient_that_does_not_exist_is_refused_by_name() -> None:
    x = Tensor([1.0, 2.0], requires_grad=True)
    y = nn.op_call("Bernoulli", [x.sigmoid()])
    with pytest.raises(UsageError, match="drawn at random"):
        y.sum().backward()
    (y + x).sum().backward()  # the other path has one
    assert x.grad.tolist() == [1, 1]
    z = Tensor([1.0], requires_grad=True)
    with pytest.raises(UsageError, match="piecewise constant"):
        (z.floor() * 2 + x.sum()).sum().backward()


def test_an_inner_value_that_a_fused_operator_returns_has_a_gradient() -> None:
    rows, row = X.astype(np.float32), ROW.astype(np.float32)  # doubles are differentiated by parts
    x, scale, bias = Tensor(rows, requires_grad=True), Tensor(row), Tensor(row)
    w, c = Tensor(rows.T.copy()), Tensor(row[:3].copy())
    given = [x, scale, bias, w, c]
    y, _ = nn.op_call("LayerNormGemm_mean", given, domain="onnx_fuse", outputs=2)
    (y * y).sum().backward()
    z = Tensor(rows, requires_grad=True)
    ((F.layer_norm(z, 4, scale, bias) @ w + c) ** 2).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), z.grad.numpy(), rtol=1e-4, atol=1e-4)
    inner = Tensor(rows, requires_grad=True)
    _, mean = nn.op_call("LayerNormGemm_mean", [inner, *given[1:]], domain="onnx_fuse", outputs=2)
    mean.sum().backward()
    np.testing.assert_allclose(inner.grad.numpy(), np.full_like(rows, 1 / rows.shape[-1]))


def test_loops_branches_and_changing_shapes() -> None:
    x, total = Tensor([1.5], requires_grad=True), Tensor([0.0])
    steps = 0
    while total.item() < 10:  # depends on the data
        total = total + x * (2 if steps % 2 else 1)
        steps += 1
    assert steps == 5
    parts = F.cat([total[:1], *[x for _ in range(3)]])
    parts[: steps - 2].sum().backward()
    assert x.grad.tolist() == [7 + 2]


def test_any_operator_by_its_name() -> None:
    x = Tensor([[1.0, -2.0]], requires_grad=True)
    y = nn.op_call("Elu", [x], {"alpha": 0.5})
    np.testing.assert_allclose(y.numpy(), [[1, 0.5 * np.expm1(-2)]], rtol=1e-6)
    y.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [[1, 0.5 * np.exp(-2)]], rtol=1e-6)
    z = nn.op_call("QuickGelu", [x], {"alpha": 1.0}, domain="com.microsoft")
    np.testing.assert_allclose(z.numpy(), x.numpy() / (1 + np.exp(-x.numpy())), rtol=1e-5)
    w, b = Tensor(np.eye(2, dtype=np.float32)), Tensor([1.0, 1.0])
    fused = nn.op_call("GemmRelu", [x, w, b], domain="onnx_fuse")
    assert fused.tolist() == [[2, 0]]
    with pytest.raises(UsageError, match=r"no operator 'Matmull' \(did you mean 'MatMul'\?\)"):
        nn.op_call("Matmull", [x])
    with pytest.raises(UsageError, match=r"float32\[1, 2\], float32\[3\]"):
        x + Tensor([1.0, 2.0, 3.0])


def test_what_cannot_be_is_said() -> None:
    x = Tensor([[1.0, 2.0]])
    with pytest.raises(IndexError, match="out of range"):
        x[5]
    with pytest.raises(IndexError, match="too many"):
        x[0, 0, 0]
    with pytest.raises(UsageError, match="do not change"):
        x[0] = 1
    with pytest.raises(UsageError, match="no gradient"):
        Tensor([1], requires_grad=True)
    with pytest.raises(UsageError, match="unknown device"):
        Tensor([1], device="tpu")


def test_tensors_of_given_numbers() -> None:
    x = nn.full((2, 3), 7, "bfloat16")
    for made, value in ((nn.zeros_like(x), 0), (nn.ones_like(x), 1), (nn.full_like(x, 2), 2)):
        assert (made.shape, made.dtype) == ((2, 3), ml_dtypes.bfloat16)
        assert (made.numpy() == value).all()
    assert nn.zeros(2).tolist() == nn.zeros((2,)).tolist() == [0, 0]
    assert nn.ones(1, 2, dtype="int32").dtype == np.int32
    assert nn.eye(2).tolist() == [[1, 0], [0, 1]]
    assert (nn.arange(3).tolist(), nn.arange(1, 6, 2).tolist()) == ([0, 1, 2], [1, 3, 5])
