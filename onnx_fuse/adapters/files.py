"""Files of low-rank adapters: what they hold, and how it is written and read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnx_fuse import files
from onnx_fuse.adapters import peft
from onnx_fuse.arrays import Array
from onnx_fuse.errors import DataError, UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

_METADATA = "onnx_fuse.adapters"


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

    adapters = _there(adapters, tensors)  # without those of weights that no loss depends on
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
    """The tensors and adapters that `write` wrote, or PEFT, or onnxruntime's `AdapterFormat`.

    Args:
        path: A file of this package (.safetensors) or of onnxruntime (.onnx_adapter), or a folder
            in PEFT's form.
        adapters: The adapters of the model; those of others are put under their names.
        names: The names of the model's weights, which what trained whole in a folder has.

    Raises:
        DataError: There are no adapters, or a folder has others than these.
    """
    if Path(path).suffix == ".onnx_adapter":
        return _read_onnxruntime(path, adapters)
    if not Path(path).is_dir():
        return _read_own(path)
    held, of_module = peft.read(path), {each.module: each for each in adapters}
    tensors: dict[str, Array] = {}
    restored = []
    for name, (a, b) in held.pairs.items():
        each = of_module[peft.find(path, name, of_module)]
        tensors |= {each.a: a, each.b: b}
        restored.append(replace(each, scale=held.scale_of(name)))
    return tensors | {peft.find(path, k, names): w for k, w in held.whole.items()}, restored


_PARAMETER = re.compile(r"(?P<front>.+)\.lora_(?P<which>[AB])(?P<back>\..+)?")


def _read_onnxruntime(
    path: str | os.PathLike[str], adapters: Sequence[Adapter]
) -> tuple[dict[str, Array], list[Adapter]]:
    """Those of a file that onnxruntime's `AdapterFormat` wrote, with the scale in B.

    A parameter has the name of its weight, or of the weight's module, with "lora_A" or "lora_B" in
    it, as Olive writes them: "layers.0.q_proj.lora_A.MatMul.weight" for
    "layers.0.q_proj.MatMul.weight".
    """
    from onnxruntime import AdapterFormat

    where = os.fspath(path)
    try:
        held = AdapterFormat.read_adapter(where).get_parameters()
    except Exception as error:  # its exceptions have no class of their own
        raise DataError(f"{where}: onnxruntime reads no adapter there: {error}") from error
    of_weight = {each.weight: each for each in adapters}
    of_module = {each.module: each for each in adapters}
    tensors: dict[str, Array] = {}
    restored: dict[str, Adapter] = {}
    for name, value in held.items():
        part = _PARAMETER.fullmatch(name)
        if part is None:
            raise DataError(f"{where}: '{name}' is no lora_A or lora_B of a weight")
        weight = part["front"] + (part["back"] or "")
        each = (
            of_weight.get(weight)
            or of_module[peft.find(path, weight.removesuffix(".weight"), of_module)]
        )
        tensors[each.a if part["which"] == "A" else each.b] = value.numpy()
        restored[each.weight] = each
    _check_whole(path, restored.values(), tensors)
    return tensors, list(restored.values())


def _read_own(path: str | os.PathLike[str]) -> tuple[dict[str, Array], list[Adapter]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), "np") as file:
            about = json.loads((file.metadata() or {})[_METADATA])
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
            adapters = [Adapter(**{**a, "scale": float(a["scale"])}) for a in about]
            _check_whole(path, adapters, tensors)
            return tensors, _there(adapters, tensors)
    except OSError as error:
        raise DataError(f"{os.fspath(path)}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise DataError(f"{os.fspath(path)}: the file holds no adapters of this package") from error


def _check_whole(
    path: str | os.PathLike[str], adapters: Iterable[Adapter], tensors: Mapping[str, Array]
) -> None:
    for each in adapters:
        if len({each.a, each.b} & tensors.keys()) == 1:
            raise DataError(f"{os.fspath(path)}: '{each.weight}' has no A and B")


def _there(adapters: Sequence[Adapter], tensors: Mapping[str, Array]) -> list[Adapter]:
    return [each for each in adapters if {each.a, each.b} <= tensors.keys()]


def check_shape(
    path: str | os.PathLike[str], name: str, actual: Sequence[int], shape: Sequence[int]
) -> None:
    """Raise DataError unless a weight of a model has the shape that its adapter is for."""
    if list(actual) != list(shape):
        raise DataError(
            f"{os.fspath(path)}: '{name}' is {list(actual)} in the model, {list(shape)} in the "
            "adapters"
        )
