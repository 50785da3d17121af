"""Optimizers of eager tensors: the update rules of `onnx_fuse.optim`, with PyTorch's interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import DataError, UsageError
from onnx_fuse.nn.dispatch import MODE, no_grad, operation
from onnx_fuse.nn.module import Module, forget
from onnx_fuse.nn.tensor import Tensor
from onnx_fuse.ops.shape_ops import Writer
from onnx_fuse.training import optim as rules

__all__ = [
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "RMSprop",
]
__dir__ = __all__.copy


class Optimizer:
    """Updates parameters in place by a rule of `onnx_fuse.optim`.

    Args:
        parameters: The parameters, as of `Module.parameters`, pairs of name and parameter as of
            `Module.named_parameters`, or a Module. Names matter to the rule's `no_decay`.
        rule: The rule with its numbers; its learning rate may be a Schedule.
    """

    def __init__(self, parameters: Module | Iterable[Any], rule: rules.Optimizer) -> None:
        named = parameters.named_parameters() if isinstance(parameters, Module) else parameters
        pairs = [p if isinstance(p, tuple) else ("", p) for p in named]
        if not pairs:
            raise UsageError("there are no parameters to optimize")
        self.rule = rule
        self.steps = 0
        """The number of updates so far."""
        self.parameters: list[Tensor] = [p for _, p in pairs]
        self._names = [name for name, _ in pairs]
        first = [
            rule.initial(name, p._data.shape, p.dtype)
            for name, p in zip(self._names, self.parameters, strict=True)
        ]
        self._slots = [
            {k: Tensor(np.array(v), device=p.device) for k, v in slots.items()}
            for p, slots in zip(self.parameters, first, strict=True)
        ]
        self._update = _updater(rule)

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.rule.rate(self.steps)

    def step(self) -> None:
        """Update each parameter that has a gradient."""
        count, rate = Tensor(self._counted()), Tensor(self._rate())
        if MODE.recorder is not None:
            MODE.recorder.renewed(count, self._counted)
            MODE.recorder.renewed(rate, self._rate)
        with no_grad():
            for name, w, slots in zip(self._names, self.parameters, self._slots, strict=True):
                if w.grad is None:
                    continue
                if w.grad._data.shape != w._data.shape:
                    raise UsageError(f"the gradient of {name} is not of its shape")
                states = (*slots.values(),)
                results = self._update(w, w.grad, *states, rate, count, name=name)
                news = results if isinstance(results, tuple) else (results,)
                for old, new in zip((w, *states), news, strict=True):
                    old.copy_(new)

    def _counted(self) -> np.ndarray[Any, Any]:
        self.steps += 1
        return np.array(self.steps, np.int64)

    def _rate(self) -> np.ndarray[Any, Any]:
        return np.array(self.rule.rate(self.steps - 1), np.float32)

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        forget(self.parameters)

    def state_dict(self) -> dict[str, Tensor]:
        """The state tensors as "0.exp_avg" and so on, by the parameters' order, and "steps"."""
        tensors = {"steps": Tensor(np.array(self.steps))}
        for i, slots in enumerate(self._slots):
            tensors |= {f"{i}.{k}": s.detach() for k, s in slots.items()}
        return tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave. Raises DataError for the `state` of another."""
        current = self.state_dict()
        if set(current) != set(state) or any(
            np.shape(state[k]) != current[k]._data.shape for k in current if k in state
        ):
            raise DataError(
                "the optimizer's state belongs to other parameters or another optimizer"
            )
        self.steps = int(state["steps"])
        for i, slots in enumerate(self._slots):
            for key, slot in slots.items():
                slot.copy_(state[f"{i}.{key}"])


def _updater(rule: rules.Optimizer) -> Callable[..., Any]:
    """The update of one parameter as a function of Tensors: (w, g, slots, rate, step)."""

    def update(op: Writer, w: ir.Value, g: ir.Value, *more: ir.Value, name: str) -> Any:
        slots, rate, count = more[:-2], more[-2], more[-1]
        results: Sequence[Any] = rule.update(op, name, w, g, slots, rate, count)
        return tuple(results) if len(results) > 1 else results[0]

    return operation(update)


class _Named(Optimizer):
    """An optimizer whose rule is made of its numbers."""

    kind: ClassVar[str]

    def __init__(self, parameters: Module | Iterable[Any], **numbers: object) -> None:
        super().__init__(parameters, rules.make(self.kind, **numbers))


def _named(rule: type[rules.Optimizer]) -> type[_Named]:
    text = f"""{(rule.__doc__ or "").strip()}

    Args:
        parameters: As of `Optimizer`.
        **numbers: The fields of `onnx_fuse.optim.{rule.__name__}`, such as lr.
    """
    names = {"kind": rule.__name__.lower(), "__doc__": text, "__module__": __name__}
    return type(rule.__name__, (_Named,), names)


SGD = _named(rules.SGD)
Adam = _named(rules.Adam)
AdamW = _named(rules.AdamW)
AdamW8bit = _named(rules.AdamW8bit)
NAdam = _named(rules.NAdam)
RMSprop = _named(rules.RMSprop)
Adagrad = _named(rules.Adagrad)
Adafactor = _named(rules.Adafactor)
Lion = _named(rules.Lion)
Muon = _named(rules.Muon)
