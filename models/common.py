"""What the builders share: a graph that grows by `net.Add(a, b)`, three layers, a command line."""

import argparse
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
# numbers become constants: int64 (lists too) or float32
Operand = ir.Value | float | Sequence[int] | None
Shape = Sequence[int | str]
Attribute = int | float | str | Sequence[int]


class Net:
    """One ONNX graph under construction, opset 21; random weights of `dtype` come from `seed`.

    Parameters are named by their scope ("blocks.0.attn.qkv.weight"), nodes and values by scope and
    op type ("blocks.0.attn.Softmax").
    """

    def __init__(self, name: str, seed: int, dtype: type = np.float32) -> None:
        self.dtype = dtype
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name=name)
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.prefix = ""
        self.uses: Counter[str] = Counter()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        outer, self.prefix = self.prefix, f"{self.prefix}{name}."
        yield
        self.prefix = outer

    def input(self, name: str, dtype: ir.DataType, shape: Shape) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, shape: Shape) -> None:
        value.name, value.shape = name, ir.Shape(shape)
        value.type = ir.TensorType(ir.DataType.FLOAT)
        self.graph.outputs.append(value)

    def model(self) -> ir.Model:
        return ir.Model(self.graph, ir_version=10, producer_name="onnx-fuse")

    def normal(self, name: str, shape: Sequence[int], std: float) -> ir.Value:
        # Drawn in float64: the float32 sampler calls log1pf, whose last bit is the C library's.
        array = (self.rng.standard_normal(shape) * std).astype(self.dtype)
        return self.initializer(name, array)

    def full(self, name: str, shape: Sequence[int], value: float) -> ir.Value:
        return self.initializer(name, np.full(shape, value, self.dtype))

    def initializer(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        return self._initializer(self.prefix + name, array)

    def op(
        self,
        op_type: str,
        *inputs: Operand,
        outputs: int = 1,
        domain: str = "",
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Append a node: `a, b = net.op("Split", x, outputs=2, axis=-1, num_outputs=2)`."""
        self.graph.opset_imports.setdefault(domain, 1)
        name = self.prefix + op_type
        self.uses[name] += 1
        if self.uses[name] > 1:
            name += f"_{self.uses[name] - 1}"
        values = [ir.Value(name=name if i == 0 else f"{name}.{i}") for i in range(outputs)]
        operands = [
            x if x is None or isinstance(x, ir.Value) else self._constant(x) for x in inputs
        ]
        self.graph.append(
            ir.node(op_type, operands, attributes, domain=domain, outputs=values, name=name)
        )
        return values

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        """`net.Add(a, b)` is the first output of `net.op("Add", a, b)`."""
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.op(op_type, *inputs, **attributes)[0]

    def linear(self, name: str, x: ir.Value, n_in: int, n_out: int, std: float) -> ir.Value:
        """x [..., n_in] @ weight [n_in, n_out] + bias [n_out]: a linear layer on 3-D input."""
        with self.scope(name):
            weight, bias = self.normal("weight", (n_in, n_out), std), self.full("bias", (n_out,), 0)
            return self.Add(self.MatMul(x, weight), bias)

    def gemm(self, name: str, x: ir.Value, n_in: int, n_out: int, std: float) -> ir.Value:
        """x [batch, n_in] @ weight [n_out, n_in]^T + bias [n_out]: a linear layer on 2-D input."""
        with self.scope(name):
            weight, bias = self.normal("weight", (n_out, n_in), std), self.full("bias", (n_out,), 0)
            return self.Gemm(x, weight, bias, transB=1)

    def layer_norm(self, name: str, x: ir.Value, width: int, epsilon: float = 1e-5) -> ir.Value:
        """(x - mean) / sqrt(var + epsilon) * weight + bias over the last axis, of size `width`."""
        with self.scope(name):
            weight, bias = self.full("weight", (width,), 1), self.full("bias", (width,), 0)
            return self.LayerNormalization(x, weight, bias, axis=-1, epsilon=epsilon)

    def _constant(self, x: float | Sequence[int]) -> ir.Value:
        array = np.array(x, np.float32 if isinstance(x, float) else np.int64)
        name = f"const.{array.dtype}.{'_'.join(map(str, array.ravel().tolist()))}.{array.ndim}d"
        return self.graph.initializers.get(name) or self._initializer(name, array)

    def _initializer(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        tensor = ir.Tensor(array, name=name)
        value = ir.Value(
            name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        self.graph.register_initializer(value)
        return value


def write(
    build: Callable[[Config, int], ir.Model],
    sizes: Mapping[str, Config],
    argv: Sequence[str] | None = None,
) -> None:
    """The command line of a model: `-o FILE --seed N --size NAME`, one option a Config field.

    Fields are int, bool (`--x`, `--no-x`) or tuple of int; they override those of the size.
    """
    first = next(iter(sizes))
    parser = argparse.ArgumentParser(
        description=sys.modules[build.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", required=True, help="ONNX file to write")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes")
    parser.add_argument("--size", choices=list(sizes), default=first, help="named shape")
    fields = dataclasses.fields(sizes[first])
    for field in fields:
        value = getattr(sizes[first], field.name)
        option: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{value} in {first}"}
        if isinstance(value, bool):
            option["action"] = argparse.BooleanOptionalAction
        else:
            option |= {"type": int, "nargs": "+" if isinstance(value, tuple) else None}
        parser.add_argument(f"--{field.name}", **option)
    args = parser.parse_args(argv)
    given = {f.name: getattr(args, f.name) for f in fields if hasattr(args, f.name)}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    try:
        model = build(dataclasses.replace(sizes[args.size], **given), args.seed)
        ir.save(model, args.output)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    arrays = (v.const_value for k, v in model.graph.initializers.items() if k[:6] != "const.")
    count = sum(array.size for array in arrays if array is not None)
    print(f"{args.output}: {count:,} parameters, {os.path.getsize(args.output):,} bytes")
