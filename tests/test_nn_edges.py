"""Every method and function of `onnx_fuse.nn` at the edges: no elements, integers, no axes,
negative steps, booleans, arguments out of range. Values and errors are NumPy's or PyTorch's (2.13).
"""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import onnx_fuse as of
from onnx_fuse import UsageError, nn
from onnx_fuse.errors import OnnxFuseError
from onnx_fuse.nn import creation, dispatch, layers, random
from onnx_fuse.nn import functional as F
from onnx_fuse.nn.tensor import Tensor

A = np.linspace(-1.25, 1.5, 12, dtype=np.float32).reshape(3, 4)
V = A[0]
INTS = np.array([[3, -1, 2], [0, 5, -7]])
NONE = np.zeros((0, 3), np.float32)
HOLLOW = np.zeros((2, 0, 3), np.float32)
DOT = np.float32(1.5)
BOOL = np.array([[True, False], [True, True]])
INF = np.array([-np.inf, np.nan, np.inf], np.float32)
NAN = np.float32(np.nan)
LEAST = -(2**63)
WIDE = np.array([[2**53 + 1, 3, 1], [2**40, 2**22 + 1, 7]])
ERRORS = (OnnxFuseError, IndexError, TypeError, ValueError, ZeroDivisionError)
BAD = "an error"
LOSSES = ("mse_loss", "l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div",
          "focal_loss", "hinge_loss", "poisson_nll_loss", "dice_loss")  # fmt: skip


def t(array: Any) -> Tensor:
    return Tensor(np.asarray(array))


# names that a row is about, the call, what it gives: an array, a tuple of them, or BAD
ROWS: list[tuple[str, Callable[[], Any], Any]] = [
    # ---- reductions
    ("any", lambda: t(NONE).any(), False),
    ("any", lambda: t(HOLLOW > 0).any(), False),
    ("any", lambda: t(DOT).any(), True),
    ("any", lambda: t([np.nan]).any(), True),
    ("any", lambda: t(INTS * 0).any(), False),
    ("all", lambda: t(NONE).all(), True),
    ("all", lambda: t(BOOL).all(), False),
    ("all", lambda: t(INTS[:1]).all(), True),
    *((name, lambda name=name: getattr(t(INF), name)(), NAN)
      for name in ("amax", "amin", "max", "min")),
    *((name, lambda name=name: getattr(t(INF[None]), name)(1), (INF[1:2], np.array([1])))
      for name in ("max", "min")),
    *((name, lambda name=name, x=x: getattr(t(x), name)(0), np.int64(place))
      for name in ("argmax", "argmin") for x, place in ((INF, 1), (DOT, 0))),
    ("max", lambda: t(DOT).max(-1), (DOT, np.int64(0))),
    ("max", lambda: t(A).max(0, keepdim=True), (A[2:], np.full((1, 4), 2))),
    ("sum", lambda: t(NONE).sum(), np.float32(0)),
    ("sum", lambda: t(NONE).sum(0), np.zeros(3, np.float32)),
    ("sum", lambda: t(BOOL).sum(1), np.array([1, 2])),
    ("sum", lambda: t(np.array([2**31 - 1, 1], np.int32)).sum(), np.int64(2**31)),
    ("sum", lambda: t(DOT).sum(0), DOT),
    ("sum", lambda: t(A).sum(()), A.sum()),
    ("sum", lambda: t(A).sum(2), BAD),
    ("sum", lambda: t(A).sum((0, -2)), BAD),
    ("sum", lambda: t(NONE).sum(-3), BAD),
    ("mean", lambda: t(NONE).mean(), NAN),
    ("mean", lambda: t(NONE).mean(0), np.full(3, NAN)),
    ("mean", lambda: t(NONE).mean(1), np.zeros(0, np.float32)),
    ("mean", lambda: t(INTS).mean(), BAD),
    ("mean", lambda: t(BOOL).mean(0), BAD),
    ("mean", lambda: t(DOT).mean(), DOT),
    ("prod", lambda: t(NONE).prod(), np.float32(1)),
    ("prod", lambda: t(INTS).prod(0), np.array([0, -5, -14])),
    ("prod", lambda: t(np.full(5, 100, np.int32)).prod(), np.int64(10**10)),
    ("amax", lambda: t(NONE).amax(), BAD),
    ("amax", lambda: t(NONE).amax(1), np.zeros(0, np.float32)),
    ("amax", lambda: t(HOLLOW).amax(1), BAD),
    ("amax", lambda: t(INTS).amax(1), np.array([3, 5])),
    ("amin", lambda: t(NONE).amin(0), BAD),
    ("max", lambda: t(NONE).max(), BAD),
    ("max", lambda: t(INTS).max(1), (np.array([3, 5]), np.array([0, 1]))),
    ("max", lambda: t(INTS).max(2), BAD),
    ("min", lambda: t(HOLLOW).min(1), BAD),
    ("min", lambda: t(INTS).min(0), (np.array([0, -1, -7]), np.array([1, 0, 1]))),
    ("argmax", lambda: t(NONE).argmax(), BAD),
    ("argmax", lambda: t(INTS).argmax(), np.int64(4)),
    ("argmax", lambda: t(A).argmax(-3), BAD),
    ("argmin", lambda: t(HOLLOW).argmin(1), BAD),
    ("argmin", lambda: t(INTS).argmin(1, keepdim=True), np.array([[1], [2]])),
    ("var", lambda: t(NONE).var(), NAN),
    ("var", lambda: t(V[:1]).var(), NAN),
    ("var", lambda: t(V).var(correction=9), np.float32(np.inf)),
    ("var", lambda: t(INTS).var(), BAD),
    ("std", lambda: t(NONE).std(0), np.full(3, NAN)),
    ("std", lambda: t(INTS).std(), BAD),
    ("norm", lambda: t(NONE).norm(), np.float32(0)),
    ("norm", lambda: t(INTS).norm(), BAD),
    ("logsumexp", lambda: t(INTS).logsumexp(0), BAD),
    ("logsumexp", lambda: t(A).logsumexp(5), BAD),
    ("prod", lambda: t(WIDE).prod(1, True), WIDE.prod(1, keepdims=True)),
    ("prod", lambda: t(WIDE[None]).prod(), WIDE.prod()),
    ("sum", lambda: t(WIDE).sum(), WIDE.sum()),
    ("sum", lambda: t(WIDE[..., None]).sum((0, 2)), WIDE.sum(0)),
    ("sum", lambda: t(INTS[:0]).sum(0), INTS[:0].sum(0)),
    ("pow", lambda: t(WIDE) ** 39, WIDE**39),
    ("pow", lambda: t(WIDE) ** t([[40], [3]]), WIDE ** np.array([[40], [3]])),
    ("pow", lambda: t(np.array([3, -1], np.int8)) ** 5, np.array([-13, -1], np.int8)),
    ("pow", lambda: t(INTS) ** 0, INTS**0),
    *((name, lambda name=name: getattr(t(DOT), name)(0), wanted) for name, wanted in (
        ("softmax", np.float32(1)), ("log_softmax", np.float32(0)), ("cumsum", DOT),
        ("sort", (DOT, np.int64(0))))),
    ("topk", lambda: t(DOT).topk(1), (DOT, np.int64(0))),
    ("cumsum", lambda: t(NONE).cumsum(5), BAD),
    ("cumsum", lambda: t(np.array([2**31 - 1, 1], np.int32)).cumsum(0),
     np.array([2**31 - 1, 2**31])),
    ("softmax", lambda: t(NONE).softmax(0), NONE),
    ("softmax", lambda: t(A).softmax(2), BAD),
    ("softmax", lambda: t(INTS).softmax(), BAD),
    ("log_softmax", lambda: t(NONE).log_softmax(), NONE),
    ("log_softmax", lambda: t(A).log_softmax(-3), BAD),
    ("sort", lambda: t(INTS).sort(descending=True)[0], -np.sort(-INTS)),
    ("sort", lambda: t(A).sort(2), BAD),
    ("topk", lambda: t(INTS).topk(0), (np.zeros((2, 0), np.int64),) * 2),
    ("topk", lambda: t(INTS).topk(4), BAD),
    ("topk", lambda: t(INTS).topk(-1), BAD),
    # ---- arithmetic
    ("__rmul__", lambda: np.float32(2) * t(A), 2 * A),
    ("__radd__", lambda: np.ones(4, np.float32) + t(A), 1 + A),
    ("__rmatmul__", lambda: np.eye(3, dtype=np.float32) @ t(A), A),
    ("__rsub__", lambda: np.float32(1) - t(A), 1 - A),
    ("__rtruediv__", lambda: np.float32(1) / t(DOT), 1 / DOT),
    ("__rpow__", lambda: np.float32(2) ** t(V), 2**V),
    ("__rmod__", lambda: 7 % t(INTS[0]), np.array([1, 0, 1])),
    ("__rfloordiv__", lambda: 7 // t(INTS[0]), np.array([2, -7, 3])),
    ("__gt__", lambda: np.float32(0) < t(A), A > 0),
    ("__mod__", lambda: t(np.array([1.0, -1.0, 7.5, 0.3, 1e8], np.float32)) % 0.1,
     np.array([1, -1, 7.5, 0.3, 1e8], np.float32) % np.float32(0.1)),
    ("__mod__", lambda: t(V) % float("inf"), np.array([np.inf] * 4, np.float32)),
    ("__mod__", lambda: t(V) % 0.0, np.full(4, NAN)),
    ("__mod__", lambda: t(INTS) % -4, INTS % -4),
    ("__floordiv__", lambda: t(np.array([1.0, -1.0, 0.6], np.float32)) // 0.1,
     np.array([1.0, -1.0, 0.6], np.float32) // np.float32(0.1)),
    ("__floordiv__", lambda: t(np.float64([6, -6, 0.7, 3e17])) // 0.1,
     np.float64([6, -6, 0.7, 3e17]) // 0.1),
    ("__floordiv__", lambda: t(V) // 0.0, np.array([-np.inf] * 4, np.float32)),
    ("__floordiv__", lambda: t(INTS) // -2, INTS // -2),
    ("__floordiv__", lambda: t([LEAST] * 3) // np.array([-1, 3, -3]),
     np.array([LEAST, LEAST // 3, LEAST // -3])),
    *(("__floordiv__", lambda a=a, b=b: t(a) // b, a // b)
      for a, b in ((np.int8([-128, 127]), np.int8([3, -3])),
                   (np.uint8([255, 9]), np.uint8([255, 2])),
                   (np.array([2**64 - 1], np.uint64), np.array([7], np.uint64)))),
    ("__truediv__", lambda: t(INTS) / 2, (INTS / 2).astype(np.float32)),
    ("__truediv__", lambda: t(V) / 0, np.array([-np.inf] * 4, np.float32)),
    ("__add__", lambda: t(BOOL) + 1, BOOL + 1),
    ("__add__", lambda: t(A) + t(np.zeros(3, np.float32)), BAD),
    ("__sub__", lambda: t(NONE) - 1, NONE),
    ("__mul__", lambda: t(HOLLOW) * t(A[0, :3]), HOLLOW),
    ("__pow__", lambda: t(INTS) ** 2, INTS**2),
    ("__pow__", lambda: t(INTS) ** -1, BAD),
    ("__matmul__", lambda: t(A[:, :0]) @ t(A[:0]), np.zeros((3, 4), np.float32)),
    ("__matmul__", lambda: t(A) @ t(A), BAD),
    ("__and__", lambda: t(INTS) & 1, INTS & 1),
    ("__or__", lambda: t(BOOL) | False, BOOL),
    ("__xor__", lambda: t(INTS) ^ 3, INTS ^ 3),
    ("__invert__", lambda: ~t(INTS), ~INTS),
    ("__invert__", lambda: ~t(A), BAD),
    ("__lt__", lambda: t(INF) < 0, np.array([True, False, False])),
    ("__le__", lambda: t(INTS) <= 0.5, INTS <= 0.5),
    ("__ge__", lambda: t(NONE) >= 0, NONE >= 0),
    ("__eq__", lambda: t(INF) == t(INF), np.array([True, False, True])),
    ("__ne__", lambda: t(INF) != t(INF), np.array([False, True, False])),
    ("maximum", lambda: t(INF).maximum(0), np.array([0, np.nan, np.inf], np.float32)),
    ("minimum", lambda: t(INTS).minimum(1), np.minimum(INTS, 1)),
    ("clamp", lambda: t(INF).clamp(min=0), np.array([0, np.nan, np.inf], np.float32)),
    ("clamp", lambda: t(INF).clamp(max=0), np.array([-np.inf, np.nan, 0], np.float32)),
    ("clamp", lambda: t(INTS).clamp(0.5), np.maximum(INTS, 0.5).astype(np.float32)),
    ("clamp", lambda: t(V).clamp(float("nan")), np.full(4, NAN)),
    ("clip", lambda: t(INTS).clip(0, 2), INTS.clip(0, 2)),
    ("masked_fill", lambda: t(INTS).masked_fill(t(INTS > 0), 0.5), BAD),
    ("masked_fill", lambda: t(INTS).masked_fill(t(INTS > 0), 9), np.where(INTS > 0, 9, INTS)),
    *((name, lambda name=name: getattr(t(INTS[:1]), name)(),
       getattr(np, name)(INTS[:1].astype(np.float32)))
      for name in ("exp", "sin", "cos", "tanh", "reciprocal", "isnan")),
    *((name, lambda name=name: getattr(t(INTS), name)(), INTS)
      for name in ("floor", "ceil", "round", "clone", "contiguous", "long", "detach", "cpu")),
    ("log", lambda: t(INTS[:1, 2:]).log(), np.log(INTS[:1, 2:].astype(np.float32))),
    ("sqrt", lambda: t(V).sqrt(), np.full(4, NAN)),
    ("rsqrt", lambda: t([4]).rsqrt(), np.float32([0.5])),
    ("erf", lambda: t([0]).erf(), np.float32([0])),
    ("sigmoid", lambda: t([0]).sigmoid(), np.float32([0.5])),
    ("relu", lambda: t(INF).relu(), np.array([0, np.nan, np.inf], np.float32)),
    ("relu", lambda: t(NONE).relu(), NONE),
    ("neg", lambda: t(INTS).neg(), -INTS),
    ("abs", lambda: t(INTS).abs(), abs(INTS)),
    ("sign", lambda: t(INTS).sign(), np.sign(INTS)),
    *((name, lambda name=name: getattr(t(A), name)(2), getattr(A, f"__{full}__")(np.float32(2)))
      for name, full in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("div", "truediv"),
                         ("pow", "pow"))),
    ("matmul", lambda: t(V).matmul(t(V)), V @ V),
    # ---- shapes
    ("reshape", lambda: t(NONE).reshape(3, 0), NONE.reshape(3, 0)),
    ("reshape", lambda: t(A).reshape(5), BAD),
    ("reshape", lambda: t(A).reshape(-1, -1), BAD),
    ("reshape", lambda: t(A).reshape(-2, 6), BAD),
    ("reshape", lambda: t(A).reshape(2.9, 6), BAD),
    ("view", lambda: t(DOT).view(1, 1), DOT.reshape(1, 1)),
    ("flatten", lambda: t(DOT).flatten(), DOT.reshape(1)),
    ("flatten", lambda: t(HOLLOW).flatten(1), HOLLOW.reshape(2, 0)),
    ("flatten", lambda: t(A).flatten(2), BAD),
    ("flatten", lambda: t(A).flatten(0, -3), BAD),
    ("flatten", lambda: t(A).flatten(1, 0), BAD),
    ("permute", lambda: t(A).permute(-1, 0), A.T),
    ("permute", lambda: t(A).permute(3, 0), BAD),
    ("permute", lambda: t(A).permute(0, 0), BAD),
    ("permute", lambda: t(A).permute(0), BAD),
    ("transpose", lambda: t(A).transpose(0, 2), BAD),
    ("transpose", lambda: t(A).transpose(-3, 0), BAD),
    ("transpose", lambda: t(A).transpose(-1, 0), A.T),
    ("squeeze", lambda: t(A[:1]).squeeze(-3), BAD),
    ("squeeze", lambda: t(A[:1]).squeeze(), A[0]),
    ("squeeze", lambda: t(A[:1]).squeeze((0, 1)), A[0]),
    ("squeeze", lambda: t(NONE).squeeze(0), NONE),
    ("unsqueeze", lambda: t(A).unsqueeze(-3), A[None]),
    ("unsqueeze", lambda: t(A).unsqueeze(3), BAD),
    ("unsqueeze", lambda: t(A).unsqueeze(-4), BAD),
    ("expand", lambda: t(A).expand(1, 4), BAD),
    ("expand", lambda: t(A).expand(3, 8), BAD),
    ("expand", lambda: t(A).expand(4), BAD),
    ("expand", lambda: t(A).expand(-1, 3, 4), BAD),
    ("expand", lambda: t(A[:1]).expand(0, -1), A[:0]),
    ("repeat", lambda: t(A).repeat(2), BAD),
    ("repeat", lambda: t(A).repeat(-1, 1), BAD),
    ("repeat", lambda: t(A).repeat(0, 1), A[:0]),
    ("split", lambda: t(A).split(0), BAD),
    ("split", lambda: t(A).split(2, 5), BAD),
    ("split", lambda: t(A).split([1, 1]), BAD),
    ("split", lambda: t(A).split(2, -1), (A[:, :2], A[:, 2:])),
    ("split", lambda: t(NONE).split(2), (NONE,)),
    ("chunk", lambda: t(A).chunk(3, 1), (A[:, :2], A[:, 2:])),
    ("chunk", lambda: t(A).chunk(0), BAD),
    ("chunk", lambda: t(A).chunk(2, -3), BAD),
    ("tril", lambda: t(A).tril(-9), A * 0),
    ("triu", lambda: t(NONE).triu(), NONE),
    ("gather", lambda: t(A).gather(1, t([[-1]])), BAD),
    ("gather", lambda: t(A).gather(1, t([[4]])), BAD),
    ("gather", lambda: t(A).gather(2, t([[0]])), BAD),
    ("index_select", lambda: t(A).index_select(0, t([-1])), BAD),
    ("index_select", lambda: t(A).index_select(0, t([3])), BAD),
    ("index_select", lambda: t(A).index_select(1, t(np.zeros(0, np.int64))), A[:, :0]),
    # ---- indices
    *(("__getitem__", lambda key=key: t(A)[key], A[key]) for key in (
        slice(None, None, -1), slice(-7, None, -2), slice(-6, -6, -1), slice(3, 0, -2),
        slice(None, -9, -1), slice(9, None, -1),
        slice(-(10**30), 10**30), slice(10**30, None, -1),
        slice(2, 0), slice(-9, 2), [], [0, 2], [[0], [1]],
        [-1], [True, False, True], (slice(None), -1), (..., 0, None), (0, [1, 0]), ([0, 1], [1, 0]),
        np.int64(1), np.array([1, 0], np.uint8), (None, 0, ...), np.zeros(0, np.int64), A > 0)),
    *(("__getitem__", lambda key=key: t(A)[key], BAD) for key in (
        True, False, (0, True), np.True_, np.array(True), 3, -4, [3], (0, 1, 2), 1.5, "a",
        slice(0, 3, 0), slice(1.5, None), np.array([1.0]), [True, False], (..., ...))),
    ("__setitem__", lambda: t(A).__setitem__(0, 1), BAD),
    ("__len__", lambda: len(t(DOT)), BAD),
    ("__iter__", lambda: list(t(A)), (*A,)),
    ("__bool__", lambda: bool(t(A)), BAD),
    ("__bool__", lambda: bool(t(DOT)), True),
    ("__int__", lambda: int(t(DOT)), 1),
    ("__float__", lambda: float(t(NONE)), BAD),
    ("__index__", lambda: [1, 2][t(1)], 2),
    ("__index__", lambda: [1, 2][t(DOT)], BAD),
    ("__abs__", lambda: abs(t(INTS)), abs(INTS)),
    ("__neg__", lambda: -t(NONE), NONE),
    ("item", lambda: t(A).item(), BAD),
    ("tolist", lambda: t(NONE).tolist(), np.zeros(0)),
    ("numel", lambda: t(HOLLOW).numel(), 0),
    ("dim", lambda: t(DOT).dim(), 0),
    ("size", lambda: t(A).size(2), BAD),
    ("numpy", lambda: t(DOT).numpy(), DOT),
    ("to", lambda: t(INF).to("float64"), INF.astype(np.float64)),
    ("astype", lambda: t(NONE).astype("int64"), NONE.astype(np.int64)),
    ("float", lambda: t(BOOL).float(), BOOL.astype(np.float32)),
    ("double", lambda: t(INTS).double(), INTS.astype(np.float64)),
    ("half", lambda: t(NONE).half(), NONE.astype(np.float16)),
    ("bfloat16", lambda: t(INTS).bfloat16().float(), INTS.astype(np.float32)),
    ("requires_grad_", lambda: t(INTS).requires_grad_(), BAD),
    ("backward", lambda: t(A).backward(), BAD),
    ("copy_", lambda: t(A).copy_(t(INTS)), BAD),
    # ---- functional
    ("where", lambda: F.where(t(BOOL), t(INTS[:, :2]), 0.5),
     np.where(BOOL, INTS[:, :2], 0.5).astype(np.float32)),
    ("embedding", lambda: F.embedding(t([-1]), t(A)), BAD),
    ("embedding", lambda: F.embedding(t([3]), t(A)), BAD),
    ("embedding", lambda: F.embedding(t(np.zeros((2, 0), np.int64)), t(A)), np.zeros((2, 0, 4))),
    ("one_hot", lambda: F.one_hot(t([0, 2]), 3), np.eye(3, dtype=np.int64)[[0, 2]]),
    ("one_hot", lambda: F.one_hot(t([-1]), 3), BAD),
    ("one_hot", lambda: F.one_hot(t([3]), 3), BAD),
    ("pad", lambda: F.pad(t(A), (1,)), BAD),
    ("pad", lambda: F.pad(t(A), (1, 1) * 3), BAD),
    ("pad", lambda: F.pad(t(INTS), (1, 0), 0.5), BAD),
    ("pad", lambda: F.pad(t(NONE), (0, 0, 1, 0), 2.0), np.full((1, 3), 2, np.float32)),
    ("pad", lambda: F.pad(t(A), (-1, 0)), A[:, 1:]),
    ("cat", lambda: F.cat([t(NONE), t(A[:, :3])]), A[:, :3]),
    ("cat", lambda: F.cat([t(A), t(A)], 2), BAD),
    ("cat", lambda: F.cat([t(NONE), t(A)], 1), BAD),
    ("cat", lambda: F.cat([]), BAD),
    ("stack", lambda: F.stack([t(V), t(V)], -1), np.stack([V, V], -1)),
    ("stack", lambda: F.stack([t(V), t(V)], 2), BAD),
    ("einsum", lambda: F.einsum("ij,jk->ik", t(A), t(A)), BAD),
    ("linear", lambda: F.linear(t(A[:0]), t(A)), np.zeros((0, 3), np.float32)),
    ("linear", lambda: F.linear(t(A), t(A.T.copy())), BAD),
    ("layer_norm", lambda: F.layer_norm(t(A), 3), BAD),
    ("layer_norm", lambda: F.layer_norm(t(A[:0]), 4), A[:0]),
    ("layer_norm", lambda: F.layer_norm(t(A), 4, t(V[:1])), BAD),
    ("layer_norm", lambda: F.layer_norm(t(A), 4, t(V), t(A)), BAD),
    ("rms_norm", lambda: F.rms_norm(t(A[:0]), t(V)), A[:0]),
    ("dropout", lambda: F.dropout(t(A), 1.5), BAD),
    ("dropout", lambda: F.dropout(t(A), 1.0), A * 0),
    ("dropout", lambda: F.dropout(t(INTS), 0.3), BAD),
    ("leaky_relu", lambda: F.leaky_relu(t(INF), 0.5), np.array([-np.inf, np.nan, np.inf])),
    ("elu", lambda: F.elu(t(INF)), np.array([-1, np.nan, np.inf])),
    ("softplus", lambda: F.softplus(t(NONE)), NONE),
    *((name, lambda name=name: getattr(F, name)(t(NONE)), NONE)
      for name in ("gelu", "silu", "relu", "sigmoid", "tanh", "softmax", "log_softmax")),
    *((name, lambda name=name: getattr(F, name)(t(NONE), t(NONE)), NAN) for name in LOSSES),
    *((name, lambda name=name: getattr(F, name)(t(INTS), t(INTS)), BAD) for name in LOSSES),
    *((name, lambda name=name: getattr(F, name)(t(A), t(A[:2])), BAD)
      for name in (*LOSSES, "contrastive_loss")),
    ("contrastive_loss", lambda: F.contrastive_loss(t(A[:0]), t(A[:0])), NAN),
    ("cosine_embedding_loss", lambda: F.cosine_embedding_loss(t(0 * A), t(A), t(np.ones(3, "f"))),
     np.float32(1)),
    ("cosine_embedding_loss", lambda: F.cosine_embedding_loss(t(A), t(A[:2]), t(np.ones(3, "f"))),
     BAD),
    ("triplet_margin_loss", lambda: F.triplet_margin_loss(t(A), t(A), t(A)), np.float32(1)),
    ("triplet_margin_loss", lambda: F.triplet_margin_loss(t(A), t(A), t(A[:2])), BAD),
    *(("ctc_loss", lambda steps=steps, size=size, zero=zero: F.ctc_loss(
        t(np.zeros((steps, 1, 3), "f")), t([[1, 2]]), t([steps]), t([size]), zero_infinity=zero
    ), np.float32(wanted)) for steps, size, zero, wanted in (
        (1, 2, False, np.inf), (1, 2, True, 0), (0, 1, False, np.inf), (0, 0, False, 0))),
    *((name, lambda name=name, at=at: getattr(F, name)(t(A), t(at)), BAD)
      for name in ("cross_entropy", "nll_loss", "multi_margin_loss")
      for at in ([0, 1, -1], [0, 1, 4])),
    *((name, lambda name=name: getattr(F, name)(t(A), t([-100] * 3)), NAN)
      for name in ("cross_entropy", "nll_loss")),
    ("nll_loss", lambda: F.nll_loss(t(A), t([0, 1, -1]), ignore_index=-1),
     -(A[0, 0] + A[1, 1]) / 2),
    *((name, lambda name=name: getattr(F, name)(t(A), t([0, 1])), BAD)
      for name in ("cross_entropy", "nll_loss")),
    *((name, lambda name=name, how=how, wanted=wanted:
       getattr(F, name)(t(A[:0]), t(np.zeros(0, np.int64)), reduction=how), wanted)
      for name in ("cross_entropy", "nll_loss")
      for how, wanted in (("mean", NAN), ("sum", np.float32(0)))),
    *(("cross_entropy", lambda s=s: F.cross_entropy(t(A), t([0, 1, 2]), label_smoothing=s), BAD)
      for s in (-0.5, 1.5)),
    *(("huber_loss", lambda d=d: F.huber_loss(t(A), t(A), d), BAD) for d in (0.0, -1.0)),
    ("binary_cross_entropy_with_logits",
     lambda: F.binary_cross_entropy_with_logits(t(A), t(A[:1])), BAD),
    ("conv2d", lambda: F.conv2d(t(A[None, None]), t(A[None, None, :, :3]), stride=0), BAD),
    ("conv2d", lambda: F.conv2d(t(A[None, None]), t(A[None, None, :, :3]), stride=-1), BAD),
    ("conv2d", lambda: F.conv2d(t(A[None, None]), t(A[None, None]), dilation=2), BAD),
    ("conv2d", lambda: F.conv2d(t(A[None, None]), t(A[None, None, :, :0])), BAD),
    ("max_pool2d", lambda: F.max_pool2d(t(A[None, None]), 0), BAD),
    ("max_pool2d", lambda: F.max_pool2d(t(A[None, None]), 2, 1), A[None, None, 1:, 1:]),
    ("batch_norm", lambda: F.batch_norm(t(A), *(t(V * 0 + k) for k in (0, 1, 1)), t(V), eps=0),
     A + V),
    ("split_heads", lambda: F.split_heads(t(A[None]), 3), BAD),
    ("merge_heads", lambda: F.merge_heads(F.split_heads(t(A[None]), 2)), A[None]),
    ("scaled_dot_product_attention",
     lambda: F.scaled_dot_product_attention(t(A), t(A), t(A), dropout_p=0.1), BAD),
    # ---- tensors of given numbers
    ("arange", lambda: nn.arange(5, 0, -2), np.arange(5, 0, -2)),
    ("arange", lambda: nn.arange(3, 0), np.zeros(0, np.int64)),
    ("arange", lambda: nn.arange(0, 3, 0), BAD),
    ("arange", lambda: nn.arange(1.5), BAD),  # type: ignore[arg-type]
    ("zeros", lambda: nn.zeros(-1), BAD),
    ("zeros", lambda: nn.zeros(), np.float32(0)),
    ("ones", lambda: nn.ones(0, 2), np.ones((0, 2), np.float32)),
    ("full", lambda: nn.full((), 2), np.float32(2)),
    ("full_like", lambda: nn.full_like(t(NONE), 1), NONE),
    ("zeros_like", lambda: nn.zeros_like(t(DOT)), np.float32(0)),
    ("ones_like", lambda: nn.ones_like(t(BOOL)), BOOL | True),
    ("eye", lambda: nn.eye(0), np.zeros((0, 0), np.float32)),
    ("rand", lambda: nn.rand(0, 2), np.zeros((0, 2), np.float32)),
    ("randn", lambda: nn.randn(2, -1), BAD),
    ("randint", lambda: nn.randint(3, 3, (1,)), BAD),
    # ---- layers
    ("Linear", lambda: nn.Linear(0, 2, bias=False)(t(A[:, :0])), np.zeros((3, 2), np.float32)),
    ("Linear", lambda: nn.Linear(3, 2)(t(A)), BAD),
    ("LayerNorm", lambda: nn.LayerNorm(3)(t(A)), BAD),
    ("RMSNorm", lambda: nn.RMSNorm(4)(t(A[:0])), A[:0]),
    ("Embedding", lambda: nn.Embedding(3, 2)(t([-1])), BAD),
    ("Conv2d", lambda: nn.Conv2d(2, 1, 1)(t(A[None, None])), BAD),
    ("BatchNorm2d", lambda: nn.BatchNorm2d(3)(t(A[None, None])), BAD),
    ("MultiheadAttention", lambda: nn.MultiheadAttention(4, 3), BAD),
    ("Dropout", lambda: nn.Dropout(-0.5)(t(A)), BAD),
    ("Identity", lambda: nn.Identity()(t(DOT)), DOT),
    ("Flatten", lambda: nn.Flatten()(t(HOLLOW)), HOLLOW.reshape(2, 0)),
    ("Flatten", lambda: nn.Flatten(3)(t(HOLLOW)), BAD),
    ("MaxPool2d", lambda: nn.MaxPool2d(5)(t(A[None, None])), BAD),
    *((name, lambda name=name: getattr(nn, name)()(t(NONE)), NONE)
      for name in ("ReLU", "GELU", "SiLU", "Sigmoid", "Tanh")),
    ("Softmax", lambda: nn.Softmax(2)(t(A)), BAD),
    ("CrossEntropyLoss", lambda: nn.CrossEntropyLoss()(t(A), t([0, 1, -1])), BAD),
    ("MSELoss", lambda: nn.MSELoss()(t(NONE), t(NONE)), NAN),
    ("BCEWithLogitsLoss", lambda: nn.BCEWithLogitsLoss()(t(INTS), t(INTS)), BAD),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("row", ROWS, ids=[f"{i}-{r[0]}" for i, r in enumerate(ROWS)])
def test_an_edge(row: tuple[str, Callable[[], Any], Any]) -> None:
    _, call, wanted = row
    if isinstance(wanted, str):
        with pytest.raises(ERRORS):
            call()
        return
    got = call()
    pairs = zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]
    for found, expected in pairs:
        array, exact = np.asarray(found), np.asarray(expected)
        assert array.shape == exact.shape
        assert array.dtype == exact.dtype or exact.dtype == np.float64
        np.testing.assert_allclose(array, exact, rtol=1e-5, atol=1e-6)


# what has no edge: memory of others, the first GPU, generators, text
WITHOUT = {"__array__", "__dlpack__", "__dlpack_device__", "cuda", "generator", "manual_seed"}


def test_every_name_has_a_row() -> None:
    methods = {n for n, value in vars(Tensor).items() if callable(value) and n[0] != "_"}
    methods |= {n for n in vars(Tensor) if n[:2] == "__" and callable(getattr(Tensor, n))}
    methods -= set(vars(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
    modules = (F, creation, random, layers)
    names = methods | {name for module in modules for name in module.__all__}
    assert names - {row[0] for row in ROWS} == WITHOUT


@pytest.mark.parametrize("data", [None, {}, "a", [None], np.datetime64(1, "D"), np.longdouble(1)])
def test_a_tensor_is_made_of_numbers(data: Any) -> None:
    with pytest.raises(UsageError, match="holds numbers, not "):
        nn.tensor(data)


def test_a_tensor_has_the_byte_order_of_the_machine() -> None:
    swapped = np.array([1, -2, 3], np.dtype(np.float32).newbyteorder())
    np.testing.assert_array_equal((nn.tensor(swapped) + swapped).numpy(), [2, -4, 6])


def test_a_type_without_the_operator_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="ONNX has no Neg of uint8: convert the Tensor"):
        -t(np.array([1], np.uint8))


@pytest.mark.parametrize("mask", [[[False, False], [True, False]], [[-np.inf] * 2, [0, -np.inf]]])
def test_attention_of_a_row_that_sees_nothing_is_zero(mask: Any) -> None:
    q = nn.tensor(A[:2], requires_grad=True)
    hidden = t(mask) if isinstance(mask[0][0], bool) else t(np.float32(mask))
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=hidden)
    np.testing.assert_array_equal(y.numpy(), [A[0] * 0, A[0]])
    y.sum().backward()
    np.testing.assert_array_equal(q.grad.numpy(), [A[0] * 0 + 1, A[0] * 0])


def test_a_captured_power_takes_larger_exponents_later() -> None:
    power = of.capture(lambda x, y: x**y)
    for exponent in (1, 2, 3, 39):
        assert power(t([3]), t([exponent])).item() == 3**exponent


def test_an_array_on_the_left_keeps_the_gradient() -> None:
    w = nn.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    y = np.float32(2) * w + np.ones(2, np.float32) @ w
    y.sum().backward()
    assert w.grad.tolist() == [[4, 4], [4, 4]]
    with pytest.raises(TypeError, match="ufunc"):
        np.sqrt(w)  # which would leave the tape


def test_a_remainder_has_the_gradient_of_both_operands() -> None:
    x, y = (nn.tensor(np.float64(v), requires_grad=True) for v in ([-7.5, 7.5], [2.0, -2.0]))
    (x % y).sum().backward()
    assert x.grad.tolist() == [1, 1]
    assert y.grad.tolist() == [4, 4]  # -floor(x / y)


def test_a_captured_function_checks_labels_and_empty_batches_again() -> None:
    loss = of.capture(lambda x, y: F.cross_entropy(x, y))
    mean = of.capture(lambda x: x.mean())
    for _ in range(3):
        assert np.isfinite(loss(t(A), t([0, 1, 2])).item())
        assert mean(t(A)).item() == pytest.approx(A.mean())
    with pytest.raises(UsageError, match="out of range"):
        loss(t(A), t([0, 1, -1]))
    with pytest.raises(UsageError, match=r"of shape \[3\], as x says"):
        loss(t(A), t([1]))
    assert np.isfinite(loss(t(A[:2]), t([0, 1])).item())
    assert len(loss.graphs) == 1
    w = nn.Parameter(A[:2])
    w.grad = t(A[:1])
    with pytest.raises(UsageError, match="is not of its shape"):
        nn.optim.SGD([w], lr=0.1).step()
    assert np.isnan(mean(t(A[:0])).item())


def test_a_detached_argument_of_a_captured_function_has_no_gradient() -> None:
    step = of.capture(lambda x, y: (x * 2 + (y * 3).detach()).mean())
    for _ in range(3):
        x, y = (nn.tensor(np.ones((2, 2), np.float32), requires_grad=True) for _ in range(2))
        step(x, y).backward()
        assert x.grad.tolist() == [[0.5, 0.5]] * 2
        assert y.grad is None


def test_sessions_of_attribute_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    few: dispatch.Recent[Any] = dispatch.Recent(8)
    monkeypatch.setattr(dispatch, "_KINDS", few)
    for k in range(20):
        wanted = np.where(A > 0, A, np.float32(k / 16) * A)
        np.testing.assert_allclose(F.leaky_relu(t(A), k / 16).numpy(), wanted, rtol=1e-6)
        F.dropout(t(A), (k + 1) / 32)
        t(A).softmax(0)
        assert len(few) <= 8
    kept = few.get(("Softmax", "", 1, dispatch.frozen({"axis": 0})))
    assert kept is not None  # what is used all the time stays


@pytest.mark.parametrize("target", [np.array([0, 2]), [0, 2], nn.tensor([0, 2])], ids=type)
def test_functions_take_arrays_and_lists(target: Any) -> None:
    scores = np.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]], np.float32)
    expected = nn.functional.cross_entropy(nn.tensor(scores), nn.tensor([0, 2]))
    assert float(nn.functional.cross_entropy(scores, target=target)) == float(expected)
    with pytest.raises(UsageError, match="target is of type str: it takes a Tensor"):
        nn.functional.cross_entropy(nn.tensor(scores), "0 2")
    for wrong in (3, [], np.ones((2, 2), np.float32)):
        with pytest.raises(UsageError, match="tensors takes a list of Tensors"):
            F.cat(wrong)
    with pytest.raises(UsageError, match="an entry of tensors is of type str: it takes a Tensor"):
        F.stack([[1.0], "x"])
    with pytest.raises(UsageError, match="tensors is of type str: it takes a Tensor"):
        F.einsum("i,i->i", [1.0], "x")
    both = F.stack([np.ones(2, np.float32), [2.0, 3.0]])
    np.testing.assert_array_equal(both.numpy(), [[1, 1], [2, 3]])
    with pytest.raises(UsageError, match="x is of type NoneType: it takes a Tensor"):
        nn.functional.relu(None)


@pytest.mark.parametrize("name", ["float", "half", "__rsub__", "__matmul__", "relu", "sum"])
def test_a_method_is_pickled_by_its_own_name(name: str) -> None:
    method = getattr(Tensor, name)
    assert method.__name__ == name
    assert pickle.loads(pickle.dumps(method)) is method
