"""Modules: named parameters and buffers, their files, and containers of modules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from onnx_fuse import files
from onnx_fuse.errors import DataError, UsageError
from onnx_fuse.nn.arrays import DType
from onnx_fuse.nn.dispatch import MODE
from onnx_fuse.nn.tensor import Tensor

__all__ = ["Module", "ModuleDict", "ModuleList", "Parameter", "Sequential", "load", "save"]
__dir__ = __all__.copy

M = TypeVar("M", bound="Module")


class Parameter(Tensor):
    """A Tensor that a module trains: it requires a gradient and is in the module's state.

    Args:
        data: As of `Tensor`.
        requires_grad: False for a parameter that is frozen.
    """

    __slots__ = ()

    def __init__(self, data: object, requires_grad: bool = True) -> None:
        super().__init__(data, requires_grad=requires_grad)


class Module:
    """The base of all modules: a subclass assigns its parts in __init__ and defines `forward`.

    Parameters, modules and Tensors (buffers, such as running statistics) that are assigned to
    attributes belong to the module, under these names. A call of the module calls `forward`.
    """

    training: bool = True
    """Whether it is in training mode, which `train` and `eval` change."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's result from `x`, or from `args` and `kwargs` of its own.

        A subclass defines it. Raises UsageError where it does not.
        """
        raise UsageError(f"{type(self).__name__} has no forward")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if MODE.recorder is not None:
            MODE.recorder.entered(self)
        return self.forward(*args, **kwargs)

    # ---- parts ----

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The modules that are parts of this one, with their names."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def children(self) -> Iterator[Module]:
        """The modules that are parts of this one."""
        for _, module in self.named_children():
            yield module

    def register_buffer(self, name: str, tensor: Tensor) -> None:
        """Make `tensor` part of the module's state under `name`, as an assignment does."""
        setattr(self, name, tensor)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all within it, with their full names, which begin with `prefix`."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Module]:
        """This module and all within it."""
        for _, module in self.named_modules():
            yield module

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for prefix, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield (f"{prefix}.{name}" if prefix else name), value

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The parameters with their full names; one that is shared has its first name."""
        for name, value in self._named():
            if isinstance(value, Parameter):
                yield name, value

    def parameters(self) -> Iterator[Parameter]:
        """The parameters, each once."""
        for _, value in self.named_parameters():
            yield value

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The Tensors of the module that are no parameters, with their full names."""
        for name, value in self._named():
            if not isinstance(value, Parameter):
                yield name, value

    # ---- modes ----

    def train(self: M, mode: bool = True) -> M:
        """Put this module and all within it in training mode, or out of it; returns itself."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self: M) -> M:
        """Take this module and all within it out of training mode; returns itself."""
        return self.train(False)

    def requires_grad_(self: M, on: bool = True) -> M:
        """Train all parameters (`on`), or freeze them; returns itself."""
        for parameter in self.parameters():
            parameter.requires_grad_(on)
        return self

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        forget(self.parameters())

    def to(self: M, to: DType) -> M:
        """Move parameters and buffers to a device, or cast those of floats to a dtype; itself."""
        for _, value in self._named():
            place = isinstance(to, str) and to.partition(":")[0] in ("cpu", "cuda")
            if place or value.dtype.kind == "f" or "float" in value.dtype.name:
                value._data = value.detach().to(to)._data
        return self

    def cuda(self: M) -> M:
        """Move parameters and buffers to the first GPU; returns itself."""
        return self.to("cuda")

    # ---- state ----

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters and buffers by their full names, sharing their memory."""
        return {name: value.detach() for name, value in self._named()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Give parameters and buffers the values of `state`, by name, cast to their dtypes.

        Args:
            state: Arrays or Tensors by full name.
            strict: Whether every name must be in both.

        Raises:
            DataError: A name is in only one of the two, or a shape differs; nothing is changed.
        """
        named = dict(self._named())
        missing, extra = [n for n in named if n not in state], [n for n in state if n not in named]
        if strict and (missing or extra):
            raise DataError(
                f"the state lacks {', '.join(missing) or 'nothing'} and has "
                f"{', '.join(extra) or 'nothing'} besides"
            )
        arrays = {n: np.array(state[n]) for n in named if n in state}  # whose owner may change them
        for name, array in arrays.items():
            if array.shape != named[name]._data.shape:
                raise DataError(
                    f"'{name}' has shape {list(array.shape)} in the state, and "
                    f"{list(named[name]._data.shape)} here"
                )
        for name, array in arrays.items():
            named[name].copy_(array)

    def export(self, path: str | os.PathLike[str], args: Sequence[Any]) -> None:
        """Write the module as an ONNX file, with its parameters as initializers under their names.

        The inputs are named after the arguments of `forward`, the outputs "output" or "output_0",
        "output_1" and so on. Sizes that `forward` does not read stay open.

        Args:
            path: The file to write.
            args: Tensors that `forward` is run with once, in inference mode.

        Raises:
            UsageError: `forward` returns something else than Tensors.
        """
        from onnx_fuse.nn.export import export

        export(self, path, args)

    def __repr__(self) -> str:
        tensors = ", ".join(f"{n}={list(v._data.shape)}" for n, v in vars(self).items()
                        if isinstance(v, Tensor))  # fmt: skip
        lines = [f"  ({n}): {c!r}".replace("\n", "\n  ") for n, c in self.named_children()]
        inner = "\n" + "\n".join(lines) + "\n" if lines else tensors
        return f"{type(self).__name__}({inner})"


def forget(parameters: Iterable[Tensor]) -> None:
    """Set the gradients of parameters to None."""
    for parameter in parameters:
        parameter.grad = None
        if MODE.recorder is not None:
            MODE.recorder.cleared_gradient(parameter)


# ---- containers --------------------------------------------------------------------------------


class ModuleList(Module):
    """Modules in a list, under the names "0", "1" and so on.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        """Add a module to the end."""
        vars(self)[str(len(self))] = module

    def __len__(self) -> int:
        return len(list(self.children()))

    def __iter__(self) -> Iterator[Any]:
        return self.children()

    def __getitem__(self, index: int) -> Any:
        return list(self)[index]


class Sequential(ModuleList):
    """Modules that are called one after the other.

    Args:
        *modules: The modules in order; any function of one Tensor will do.
    """

    def __init__(self, *modules: Callable[..., Any]) -> None:
        super().__init__(m if isinstance(m, Module) else Function(m) for m in modules)

    def forward(self, x: object) -> Any:
        for module in self:
            x = module(x)
        return x


class Function(Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.function(*args, **kwargs)


class ModuleDict(Module):
    """Modules by name.

    Args:
        modules: The modules by their names.
    """

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        for name, module in (modules or {}).items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        if hasattr(Module, name):
            raise UsageError(f"a module cannot be called '{name}'")
        vars(self)[name] = module

    def __getitem__(self, name: str) -> Any:
        return dict(self.named_children())[name]

    def __len__(self) -> int:
        return len(list(self.children()))

    def keys(self) -> list[str]:
        """The names of the modules."""
        return [name for name, _ in self.named_children()]

    def values(self) -> list[Any]:
        """The modules in their order."""
        return list(self.children())

    def items(self) -> list[tuple[str, Any]]:
        """The modules with their names."""
        return list(self.named_children())


# ---- files -------------------------------------------------------------------------------------


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write Tensors by name as a safetensors file, whole or not at all.

    `state` is what `Module.state_dict` gives.
    """
    from safetensors.numpy import save as serialize

    arrays = {name: np.ascontiguousarray(np.asarray(value)) for name, value in state.items()}
    arrays = {name: a.reshape(np.asarray(state[name]).shape) for name, a in arrays.items()}
    with files.written(Path(path)) as draft:
        draft.write_bytes(serialize(arrays))


def load(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The Tensors of a safetensors file by name. Raises DataError for one that is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(os.fspath(path))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: {error}") from error
    return {name: Tensor(array) for name, array in arrays.items()}
