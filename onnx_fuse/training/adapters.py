"""Low-rank adapters: pairs of small matrices that train beside frozen weights.

This is LoRA (Hu et al., 2021, arXiv:2106.09685). A product x·W becomes x·W + (x·A · alpha/rank)·B
with A [K, rank] and B [rank, N]. B begins as zeros, so the model begins as it was. A and B are
initializers of a graph that is still ONNX; W does not train, and has no gradient.

The low-rank product stands in one of two places, as `Lora.merged` says:

- `attach` puts it beside the product, behind its bias and residual. W has no gradient then, but
  each result is read and written once more.
- `training.merged` adds it to the weight, once a step. Each product stays as it was, and A and B
  take their gradients from the weight's, which is made for them and not kept.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onnx_fuse.adapters.files import Adapter, check_shape, read_file
from onnx_fuse.adapters.products import adaptable, add_beside, module_name, products_of, write_out
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import DataError, ModelError, UsageError
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import Builder, add_initializer, required
from onnx_fuse.ir.constants import Model
from onnx_fuse.ir.names import Names
from onnx_fuse.ops.rules import cast_to, is_float, typed
from onnx_fuse.rewrite.constants import set_parameter

if TYPE_CHECKING:
    from onnx_fuse.lower.low_rank import LowRank

__all__ = ["Adapter", "Lora", "merge"]
__dir__ = __all__.copy


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters for weights of linear layers. Raises UsageError for impossible values."""

    rank: int = 8
    """The inner size of the two matrices."""
    alpha: float = 16.0
    """The adapter is scaled by alpha / rank."""
    weights: tuple[str, ...] = ("*",)
    """Globs over the names of weights, or of their PyTorch modules where the exporter left them
    ("*.query"); of those only matrices that MatMul and Gemm read count."""
    merged: bool | None = None
    """Whether a step adds the adapters to the weights, once, rather than to the results of the
    linear layers. None: on a GPU what is predicted to take less time, and on a CPU not. Both
    compute the same, and round differently."""

    def __post_init__(self) -> None:
        globs = (self.weights,) if isinstance(self.weights, str) else tuple(self.weights)
        object.__setattr__(self, "weights", globs)
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise UsageError("the rank of LoRA must be at least 1, and its alpha above 0")


def sizes(attached: ir.Model, adapters: Sequence[Adapter]) -> Iterator[LowRank]:
    """The sizes of the low-rank products in the model from `attach`, one a weight."""
    from onnx_fuse.lower.low_rank import LowRank

    for each in adapters:
        a, b = (attached.graph.initializers[name] for name in (each.a, each.b))
        (k, rank), n = required(a.shape).numpy(), required(b.shape).numpy()[1]
        rows: list[int | None] = []
        normed = False
        for node, _ in products_of(attached.graph.initializers[each.weight]):
            x = node.inputs[0]
            maker = None if x is None else x.producer()
            normed |= maker is not None and maker.op_type.endswith("Normalization")
            lead = [] if x is None or x.shape is None else list(x.shape)[:-1]
            static = [d for d in lead if isinstance(d, int)]
            rows.append(math.prod(static) if lead and len(static) == len(lead) else None)
        yield LowRank(k, n, rank, tuple(rows), normed)


def attach(model: ir.Model, lora: Lora, seed: int) -> tuple[ir.Model, list[Adapter]]:
    """The model with adapters beside the weights that `lora` names.

    A is drawn from U(-1/√K, 1/√K) by `seed` and the weight's name. Raises UsageError where no
    weight can have an adapter, with the first reason.
    """
    model = load(model)
    graph = model.graph
    names_of = {v: (str(v.name), module_name(v)) for v in graph.initializers.values()}
    chosen: dict[ir.Value, None] = {}
    for glob in lora.weights:
        matched = [v for v, names in names_of.items() if any(fnmatchcase(n, glob) for n in names)]
        if not matched:
            raise UsageError(f"'{glob}' matches no weight of the model that LoRA could adapt")
        chosen |= dict.fromkeys(matched)
    named = [v for v in names_of if v in chosen]
    write_out(model, named)
    adapters, reasons = [], []
    for value in named:
        if not is_float(value) or value.shape is None or len(value.shape) != 2:
            continue
        try:
            products = products_of(value)
        except ModelError as error:
            reasons.append(str(error))
            continue
        adapters.append(_adapt(graph, value, products, lora, seed, names_of[value][1]))
    if not adapters:
        reason = reasons[0] if reasons else f"{', '.join(lora.weights)} name no matrix"
        raise UsageError(f"no weight can have an adapter: {reason}")
    return model, adapters


def _adapt(
    graph: ir.Graph,
    weight: ir.Value,
    products: list[tuple[ir.Node, bool]],
    lora: Lora,
    seed: int,
    module: str,
) -> Adapter:
    transposed = products[0][1]
    k, n = required(weight.shape).numpy()[:: -1 if transposed else 1]
    wide = np.float64 if weight.dtype == ir.DataType.DOUBLE else np.float32
    rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(str(weight.name).encode())]))
    bound = 1 / math.sqrt(max(k, 1))
    first = rng.uniform(-bound, bound, (k, lora.rank)), np.zeros((lora.rank, n))
    a, b = (
        add_initializer(graph, Names.of(graph).fresh(f"{weight.name}.lora_{key}"), x.astype(wide))
        for key, x in zip("ab", first, strict=True)
    )
    scale = lora.alpha / lora.rank

    def low_rank(op: Builder, x: ir.Value, factor: float) -> ir.Value:
        scaled = a if scale * factor == 1 else typed(op.Mul(a, scale * factor), a, a.shape)
        mine, other = (cast_to(op, v, weight) for v in (scaled, b))
        low: ir.Value = op.MatMul(typed(op.MatMul(x, mine), weight), other)
        return low

    add_beside(graph, weight, products, low_rank)
    return Adapter(str(weight.name), str(a.name), str(b.name), scale, transposed, module)


def merge(model: Model, adapters: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Write a model with adapters merged into its weights: the same graph, no slower than it was.

    Args:
        model: The model that the adapters were trained for, as `Trainer` takes it.
        adapters: What `Trainer.save_adapters` wrote, or a folder that PEFT wrote for the PyTorch
            model that was exported.
        output: The path of the new file.

    Raises:
        DataError: The file holds no adapters, or those of another model.
        ModelError: The model is malformed.
        UsageError: No weight of the model can have an adapter.
    """
    base = read(model)
    weights = {str(v.name): v.const_value for v in base.graph.initializers.values()}
    weights |= {str(v.name): v.const_value for n in base.graph for v in n.outputs if v.const_value}
    tensors, trained = read_file(adapters, list(adaptable(load(base)).values()), weights)
    for adapter in trained:
        tensor = weights.get(adapter.weight)
        if tensor is None:
            raise DataError(f"{os.fspath(adapters)}: the model has no weight '{adapter.weight}'")
        a, b = tensors.pop(adapter.a), tensors.pop(adapter.b)
        shape = (a.shape[0], b.shape[1])[:: -1 if adapter.transposed else 1]
        check_shape(adapters, adapter.weight, tensor.shape.numpy(), shape)
        tensors[adapter.weight] = adapter.merged(tensor.numpy(), a, b)
    for name, array in tensors.items():
        if name not in weights:
            raise DataError(f"{os.fspath(adapters)}: the model has no weight '{name}'")
        check_shape(adapters, name, required(weights[name]).shape.numpy(), array.shape)
        set_parameter(base, name, array)
    save(base, output)
