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

import json
import math
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnx_fuse import autodiff, files
from onnx_fuse.arrays import Array
from onnx_fuse.autodiff.emit import expand
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import DataError, ModelError, UsageError
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import Builder, add_initializer, required
from onnx_fuse.ir.constants import FUSE, Model
from onnx_fuse.ir.names import Names
from onnx_fuse.ops.rules import cast_to, is_float, typed
from onnx_fuse.rewrite.constants import set_parameter
from onnx_fuse.training import peft

if TYPE_CHECKING:
    from onnx_fuse.lower.low_rank import LowRank

__all__ = ["Adapter", "Lora", "merge"]
__dir__ = __all__.copy

_METADATA = "onnx_fuse.adapters"


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


@dataclass(frozen=True)
class Adapter:
    """The low-rank adapter of one weight."""

    weight: str
    """The name of the weight W in the model."""
    a: str
    """The name of A [K, rank]."""
    b: str
    """The name of B [rank, N]."""
    scale: float
    """alpha / rank."""
    transposed: bool
    """Whether W is stored as [N, K]."""
    module: str = ""
    """The name of the PyTorch module whose weight W is, where the exporter left one."""

    def merged(self, w: Array, a: Array, b: Array) -> Array:
        """The sum of `w` and scale · `a`·`b` in the type of `w`, worked out in float64."""
        change = self.scale * (a.astype(np.float64) @ b.astype(np.float64))
        wide = w.astype(np.float64) + (change.T if self.transposed else change)
        return np.ascontiguousarray(wide.astype(w.dtype))


def sizes(attached: ir.Model, adapters: Sequence[Adapter]) -> Iterator[LowRank]:
    """The sizes of the low-rank products in the model from `attach`, one a weight."""
    from onnx_fuse.lower.low_rank import LowRank

    for each in adapters:
        a, b = (attached.graph.initializers[name] for name in (each.a, each.b))
        (k, rank), n = required(a.shape).numpy(), required(b.shape).numpy()[1]
        rows: list[int | None] = []
        normed = False
        for node, _ in _products(attached.graph.initializers[each.weight]):
            x = node.inputs[0]
            maker = None if x is None else x.producer()
            normed |= maker is not None and maker.op_type.endswith("Normalization")
            lead = [] if x is None or x.shape is None else list(x.shape)[:-1]
            static = [d for d in lead if isinstance(d, int)]
            rows.append(math.prod(static) if lead and len(static) == len(lead) else None)
        yield LowRank(k, n, rank, tuple(rows), normed)


def attach(model: ir.Model, lora: Lora, seed: int) -> tuple[ir.Model, list[Adapter]]:
    """The model with adapters beside the weights that `lora` names.

    Fused operators that read such a weight are written out; the passes fuse them again. A is drawn
    from U(-1/√K, 1/√K) by `seed` and the weight's name. Raises UsageError where no weight can have
    an adapter, with the first reason.
    """
    model = load(model)
    graph = model.graph
    names_of = {v: (str(v.name), _module_name(v)) for v in graph.initializers.values()}
    chosen: dict[ir.Value, None] = {}
    for glob in lora.weights:
        matched = [v for v, names in names_of.items() if any(fnmatchcase(n, glob) for n in names)]
        if not matched:
            raise UsageError(f"'{glob}' matches no weight of the model that LoRA could adapt")
        chosen |= dict.fromkeys(matched)
    named = [v for v in names_of if v in chosen]
    op = autodiff.Emitter(model)
    for node in {n for v in named for n, _ in v.uses() if n.domain == FUSE}:
        expand(op, node)
    adapters, reasons = [], []
    for value in named:
        if not is_float(value) or value.shape is None or len(value.shape) != 2:
            continue
        try:
            products = _products(value)
        except ModelError as error:
            reasons.append(str(error))
            continue
        adapters.append(_adapt(graph, value, products, lora, seed, names_of[value][1]))
    if not adapters:
        reason = reasons[0] if reasons else f"{', '.join(lora.weights)} name no matrix"
        raise UsageError(f"no weight can have an adapter: {reason}")
    return model, adapters


def _products(weight: ir.Value) -> list[tuple[ir.Node, bool]]:
    """The products that read a weight, each with whether it reads the transpose.

    Raises ModelError for another reader.
    """
    products: list[tuple[ir.Node, bool]] = []
    todo = [(weight, False)]
    while todo:
        value, transposed = todo.pop()
        for node, index in value.uses():
            plain = not node.domain
            turned = plain and node.op_type == "Gemm" and bool(_int(node, "transB"))
            if plain and node.op_type in ("Identity", "Transpose"):
                todo.append((node.outputs[0], transposed ^ (node.op_type == "Transpose")))
            elif plain and index == 1 and node.op_type == "MatMul":
                products.append((node, transposed))
            elif plain and index == 1 and node.op_type == "Gemm" and not _int(node, "transA"):
                products.append((node, transposed ^ turned))
            else:
                raise ModelError(
                    f"'{weight.name}' is read by the {node.op_type} node '{node.name}', which is "
                    "no matrix multiplication of rows and this weight"
                )
    if len({turned for _, turned in products}) != 1:
        raise ModelError(f"'{weight.name}' is read as it is and transposed, or by no node")
    return products


def _module_name(weight: ir.Value) -> str:
    try:
        return peft.module_of(str(weight.name), _products(weight)[0][0])
    except ModelError:
        return ""


def _int(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return 0 if attribute is None else attribute.as_int()


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
    for number, (node, _) in enumerate(products):
        op = Builder()
        x, (y,) = node.inputs[0], node.outputs
        alpha = node.attributes.get("alpha")
        factor = scale if alpha is None else scale * alpha.as_float()
        scaled = a if factor == 1 else typed(op.Mul(a, factor), a, a.shape)
        mine, other = (cast_to(op, v, weight) for v in (scaled, b))
        low = typed(op.MatMul(x, mine), weight)
        low = typed(op.MatMul(low, other), weight, y.shape)
        y = _biased_output(y)
        last, uses = required(y.producer()), list(y.uses())
        total = typed(op.Add(y, low), weight, y.shape)
        for user, index in uses:
            user.replace_input_with(index, total)
        for i, value in enumerate(graph.outputs):
            if value is y:
                graph.outputs[i] = total
        total.name, y.name = y.name, Names.of(graph).fresh(f"{y.name}.frozen")
        for i, new_node in enumerate(op.nodes):
            new_node.name = f"{weight.name}.lora.{number}.{i}"
        graph.insert_after(last, op.nodes)
    return Adapter(str(weight.name), str(a.name), str(b.name), scale, transposed, module)


def _biased_output(y: ir.Value) -> ir.Value:
    """`y`, or its sum with the bias and the residual that nothing but they are added to."""
    uses = list(y.uses())
    if len(uses) != 1 or y.is_graph_output() or y.shape is None:
        return y
    ((node, index),) = uses
    if node.op_type != "Add" or node.domain:
        return y
    other, total = required(node.inputs[1 - index]), node.outputs[0]
    row = other.is_initializer() and other.shape is not None and len(other.shape) <= 1
    alike = total.shape == y.shape and (row or other.shape == y.shape)
    return _biased_output(total) if alike else y


# ---- files -------------------------------------------------------------------------------------


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Array],
    adapters: Sequence[Adapter],
    graph: ir.Graph,
) -> None:
    """Write trained tensors of a graph with what their adapters are.

    A path that ends in ".safetensors" becomes one file, another a folder in PEFT's form. Raises
    UsageError for a folder where a weight has no name of a PyTorch module.
    """
    from safetensors.numpy import save as pack

    if Path(path).suffix == ".safetensors":
        about = {_METADATA: json.dumps([asdict(adapter) for adapter in adapters])}
        data = pack({k: np.ascontiguousarray(a) for k, a in tensors.items()}, about)
        with files.written(Path(path)) as draft:
            draft.write_bytes(data)
        return
    rest, held = dict(tensors), peft.Peft(scale=adapters[0].scale)
    for module, each in by_module(adapters).items():
        held.pairs[module] = (rest.pop(each.a), rest.pop(each.b))
    for name in rest:  # PEFT stores modules whole
        for value in graph.initializers.values():
            if str(value.name).rpartition(".")[0] == name.rpartition(".")[0] and value.const_value:
                held.whole[str(value.name)] = value.const_value.numpy()
    held.whole |= rest
    peft.write(path, held, transposed=adapters[0].transposed)


def by_module(adapters: Sequence[Adapter]) -> dict[str, Adapter]:
    """The adapters by the names of their PyTorch modules. Raises UsageError where one has none."""
    adapter_of: dict[str, Adapter] = {}
    for each in adapters:
        if not each.module or each.module in adapter_of:
            raise UsageError(
                f"'{each.weight}' has no PyTorch module name, which PEFT's format "
                "needs: end the path with .safetensors for a file of this package"
            )
        adapter_of[each.module] = each
    return adapter_of


def read_file(
    path: str | os.PathLike[str], adapters: Sequence[Adapter] = (), names: Collection[str] = ()
) -> tuple[dict[str, Array], list[Adapter]]:
    """The tensors and adapters that `write` wrote, or PEFT.

    Args:
        path: A file, or a folder in PEFT's form.
        adapters: The adapters of the model; those of a folder are put under their names.
        names: The names of the model's weights, which what trained whole in a folder has.

    Raises:
        DataError: There are no adapters, or a folder has others than these.
    """
    if not Path(path).is_dir():
        return _read_own(path)
    held, of_module = peft.read(path), {each.module: each for each in adapters}
    tensors: dict[str, Array] = {}
    restored = []
    for name, (a, b) in held.pairs.items():
        each = of_module[peft.find(path, name, of_module)]
        tensors |= {each.a: a, each.b: b}
        restored.append(replace(each, scale=held.scale))
    return tensors | {peft.find(path, k, names): w for k, w in held.whole.items()}, restored


def _read_own(path: str | os.PathLike[str]) -> tuple[dict[str, Array], list[Adapter]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), "np") as file:
            about = json.loads((file.metadata() or {})[_METADATA])
            return {k: file.get_tensor(k) for k in file.keys()}, [Adapter(**a) for a in about]  # noqa: SIM118
    except OSError as error:
        raise DataError(f"{os.fspath(path)}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise DataError(f"{os.fspath(path)}: the file holds no adapters of this package") from error


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
    attached = attach(base, Lora(1), 0)[1] if Path(adapters).is_dir() else []
    tensors, trained = read_file(adapters, attached, weights)
    for adapter in trained:
        tensor = weights.get(adapter.weight)
        if tensor is None:
            raise DataError(f"{os.fspath(adapters)}: the model has no weight '{adapter.weight}'")
        a, b = tensors.pop(adapter.a), tensors.pop(adapter.b)
        shape = (a.shape[0], b.shape[1])[:: -1 if adapter.transposed else 1]
        _check_shape(adapters, adapter.weight, tensor, shape)
        tensors[adapter.weight] = adapter.merged(tensor.numpy(), a, b)
    for name, array in tensors.items():
        if name not in weights:
            raise DataError(f"{os.fspath(adapters)}: the model has no weight '{name}'")
        _check_shape(adapters, name, weights[name], array.shape)
        set_parameter(base, name, array)
    save(base, output)


def _check_shape(path: Any, name: str, tensor: Any, shape: Sequence[int]) -> None:
    actual = list(tensor.shape.numpy())
    if actual != list(shape):
        raise DataError(
            f"{os.fspath(path)}: '{name}' is {actual} in the model, {list(shape)} in the adapters"
        )
