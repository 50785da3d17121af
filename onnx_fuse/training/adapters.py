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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onnx_fuse.adapters.files import Adapter, check_shape, read_file
from onnx_fuse.adapters.inputs import BatchRows, masked
from onnx_fuse.adapters.products import (
    Products,
    adaptable,
    add_beside,
    matched,
    module_name,
    products_of,
    write_out,
)
from onnx_fuse.arrays import Array
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import DataError, ModelError, UsageError, did_you_mean
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import Builder, add_initializer, add_input, required
from onnx_fuse.ir.constants import Model
from onnx_fuse.ir.names import Names
from onnx_fuse.ops.rules import cast_to, is_float, typed
from onnx_fuse.rewrite.constants import set_parameter

if TYPE_CHECKING:
    from onnx_fuse.lower.low_rank import LowRank

__all__ = ["Adapter", "Lora", "merge"]
__dir__ = __all__.copy


NAMES = "onnx_fuse.adapters"
"""In the `meta` of the input of the rows' adapters, their names."""


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


def attach(
    model: ir.Model, lora: Lora | Mapping[str, Lora] | None, seed: int
) -> tuple[ir.Model, list[Adapter], AdapterSet | None]:
    """The model with adapters beside the weights that `lora` names, one or several by name.

    Of several, an input says for each row of a batch which one it has. A is drawn from
    U(-1/√K, 1/√K) by `seed` and the weight's name. Raises UsageError where no weight can have an
    adapter, with the first reason, and where rows cannot have different ones.
    """
    if lora is None:
        return model, [], None
    if isinstance(lora, Lora):
        model, chosen = _chosen(model, {"": lora})
        return model, [pair for each in chosen for pair in _adapt(model.graph, each, seed)], None
    if not lora or not all(isinstance(name, str) and name for name in lora):
        raise UsageError("several adapters have names, which are texts that are not empty")
    names = sorted(lora)
    model, chosen = _chosen(model, {name: lora[name] for name in names})
    graph, op = model.graph, Builder()
    rows = BatchRows.of(model, {each.weight: each.products for each in chosen})
    if rows.refusal:
        raise UsageError(f"rows cannot have different adapters: {rows.refusal}")
    number = add_input(graph, Names.of(graph).fresh("adapter"), ir.DataType.INT64, [rows.size])
    number.meta[NAMES] = tuple(names)
    of_row = op.Unsqueeze(number, [1])
    masks: dict[tuple[int, ...], ir.Value] = {}
    found: dict[str, list[Adapter]] = {name: [] for name in names}
    for each in chosen:
        owners = tuple(names.index(n) for n, own in each.loras.items() for _ in range(own.rank))
        if owners not in masks:
            mask = masks[owners] = op.Equal(of_row, op.constant(np.array(owners)))
            mask.dtype, mask.shape = ir.DataType.BOOL, ir.Shape([rows.size, len(owners)])
        choice = masks[owners], rows.in_one
        for name, adapter in zip(each.loras, _adapt(graph, each, seed, choice), strict=True):
            found[name].append(adapter)
    graph.insert_before(next(iter(graph)), op.nodes)
    every = [each for its in found.values() for each in its]
    return model, every, AdapterSet(str(number.name), found)


@dataclass(frozen=True)
class _Chosen:
    """A weight, and those whose adapters it has."""

    weight: ir.Value
    module: str
    products: Products
    loras: Mapping[str, Lora]


def _chosen(model: ir.Model, loras: Mapping[str, Lora]) -> tuple[ir.Model, list[_Chosen]]:
    """A copy of the model, and its weights that adapters are to stand beside."""
    model = load(model)
    graph = model.graph
    names_of = {v: (str(v.name), module_name(v)) for v in graph.initializers.values()}
    named: dict[ir.Value, dict[str, Lora]] = {value: {} for value in names_of}
    for label, lora in loras.items():
        for value in matched(names_of, lora.weights):
            named[value][label] = lora
    write_out(model, [value for value, its in named.items() if its])
    chosen, reasons = [], []
    for value, its in named.items():
        if not its or not is_float(value) or value.shape is None or len(value.shape) != 2:
            continue
        try:
            chosen.append(_Chosen(value, names_of[value][1], products_of(value), its))
        except ModelError as error:
            reasons.append(str(error))
    for label, lora in loras.items():
        if not any(label in each.loras for each in chosen):
            reason = reasons[0] if reasons else f"{', '.join(lora.weights)} name no matrix"
            raise UsageError(f"no weight can have an adapter: {reason}")
    return model, chosen


def _adapt(
    graph: ir.Graph,
    chosen: _Chosen,
    seed: int,
    choice: tuple[ir.Value, Mapping[ir.Value, bool]] | None = None,
) -> list[Adapter]:
    """Put adapters beside a weight's products, each for all rows or for those that it is chosen in.

    `choice` is the mask over all their ranks, and whether batch and sequence are in one axis.
    """
    weight, transposed = chosen.weight, chosen.products[0][1]
    k, n = required(weight.shape).numpy()[:: -1 if transposed else 1]
    wide = np.float64 if weight.dtype == ir.DataType.DOUBLE else np.float32
    bound, names = 1 / math.sqrt(max(k, 1)), Names.of(graph)
    pairs: list[tuple[ir.Value, ir.Value, float]] = []
    for label, lora in chosen.loras.items():
        rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(str(weight.name).encode())]))
        first = rng.uniform(-bound, bound, (k, lora.rank)), np.zeros((lora.rank, n))
        stem = f"{weight.name}.{label}" if label else str(weight.name)
        a, b = (
            add_initializer(graph, names.fresh(f"{stem}.lora_{key}"), x.astype(wide))
            for key, x in zip("ab", first, strict=True)
        )
        pairs.append((a, b, lora.alpha / lora.rank))
    ranks = sum(lora.rank for lora in chosen.loras.values())

    def joined(op: Builder, parts: list[ir.Value], axis: int) -> ir.Value:
        shape = [k, ranks] if axis else [ranks, n]
        one = parts[0] if len(parts) == 1 else typed(op.Concat(*parts, axis=axis), parts[0], shape)
        return cast_to(op, one, weight)

    def low_rank(op: Builder, x: ir.Value, factor: float) -> ir.Value:
        scaled = [
            a if scale * factor == 1 else typed(op.Mul(a, scale * factor), a, a.shape)
            for a, _, scale in pairs
        ]
        shape = None if x.shape is None else [*list(x.shape)[:-1], ranks]
        low = typed(op.MatMul(x, joined(op, scaled, 1)), weight, shape)
        if choice is not None:
            low = masked(op, low, choice[0], choice[1][x])
        result: ir.Value = op.MatMul(low, joined(op, [b for _, b, _ in pairs], 0))
        return result

    add_beside(graph, weight, chosen.products, low_rank)
    about = str(weight.name), transposed, chosen.module
    return [Adapter(about[0], str(a.name), str(b.name), scale, *about[1:]) for a, b, scale in pairs]


@dataclass(frozen=True)
class AdapterSet:
    """Adapters that train together over one model, each of them on its rows of a batch."""

    rows: str
    """The input of numbers: the place among the names of each row's adapter, -1 for none."""
    by_name: Mapping[str, list[Adapter]]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters."""
        return tuple(self.by_name)

    def owner(self, parameter: str) -> int:
        """The place among the names of the adapter that has this matrix."""
        owners = (
            i for i, held in enumerate(self.by_name.values())
            if any(parameter in (each.a, each.b) for each in held)
        )  # fmt: skip
        return next(owners)

    def of(self, name: str | None) -> list[Adapter]:
        """An adapter's matrices. Raises UsageError for no name of one."""
        if name not in self.by_name:
            near = "" if name is None else did_you_mean(name, self.by_name)
            raise UsageError(
                f"there is no adapter {name!r}{near}: adapter= names one of {', '.join(self.names)}"
            )
        return self.by_name[str(name)]

    def alone(
        self, name: str | None, tensors: Mapping[str, Array]
    ) -> tuple[dict[str, Array], list[Adapter]]:
        """One adapter's tensors and matrices, by the names that these have in a file."""
        renamed: dict[str, Array] = {}
        held: list[Adapter] = []
        for each in self.of(name):
            held.append(replace(each, a=f"{each.weight}.lora_a", b=f"{each.weight}.lora_b"))
            renamed |= {held[-1].a: tensors[each.a], held[-1].b: tensors[each.b]}
        return renamed, held

    def within(self, name: str | None, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The tensors of a file by the names that they have beside other adapters."""
        return {
            mine: tensors[f"{each.weight}.lora_{key}"]
            for each in self.of(name)
            for key, mine in (("a", each.a), ("b", each.b))
        }


def choosable(several: AdapterSet | None, name: str | None) -> AdapterSet | None:
    """`several`. Raises UsageError where there are none, and yet a name."""
    if several is None and name is not None:
        raise UsageError("adapter= names one of several, which the Trainer does not have")
    return several


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
