"""Adapters in the form of Hugging Face's PEFT: a folder of a configuration and its tensors.

PEFT names an adapter by the module that it is beside, such as "encoder.layer.0.query", and stores
A as [rank, K] and B as [N, rank]: `lora_A.weight` and `lora_B.weight` of that module. What trains
whole has the module's own names (`modules_to_save`).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse import files
from onnx_fuse.arrays import Array
from onnx_fuse.errors import DataError, UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.weight")


@dataclass
class Peft:
    """What a folder holds."""

    pairs: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    """A [K, rank] and B [rank, N], float32, by the name of the module."""
    scale: float = 1.0
    """What the product of each pair is multiplied by: alpha / rank."""
    scales: dict[str, float] = field(default_factory=dict)
    """The same of modules that have a rank or an alpha of their own."""
    whole: dict[str, Array] = field(default_factory=dict)
    """The weights that were trained as a whole, by their names in the PyTorch model."""

    def scale_of(self, module: str) -> float:
        """What the product of this module's pair is multiplied by."""
        return self.scales.get(module, self.scale)


def module_of(weight: str, node: ir.Node) -> str:
    """The name of the module whose weight a product reads, or "" where no exporter wrote it.

    Exporters keep a parameter's name ("head.weight") unless they store its transpose. Then the
    product tells the module: by its name ("/encoder/query/MatMul"), or by its metadata.
    """
    if weight.endswith(".weight"):
        return weight.removesuffix(".weight")
    name = node.name or ""
    scopes = name.strip("/").split("/")
    if name.startswith("/") and len(scopes) > 1 and scopes[-1].split("_")[0] in ("MatMul", "Gemm"):
        return ".".join(scopes[:-1])
    # ['', 'encoder', 'encoder.query', 'linear']: the modules, and the operator of PyTorch
    within = re.findall(r"'([^']*)'", node.metadata_props.get("pkg.torch.onnx.name_scopes", ""))
    return within[-2] if len(within) > 1 and within[-1].startswith("linear") else ""


def write(folder: str | os.PathLike[str], held: Peft, *, transposed: bool) -> None:
    """Write a folder that `PeftModel.from_pretrained` reads.

    Args:
        folder: It is made where it is missing.
        held: Adapters of one rank, in float32.
        transposed: Whether the model stores its weights as [N, K], as torch.nn.Linear does.

    Raises:
        ModelError: The folder cannot be written.
        UsageError: A weight that trained whole has no name of a module.
    """
    from safetensors.numpy import save as pack

    tensors: dict[str, Array] = {}
    for module, (a, b) in held.pairs.items():
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(a.T)
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(b.T)
    for name, array in held.whole.items():
        if not name.endswith((".weight", ".bias")):
            raise UsageError(
                f"'{name}' trained in full, and has no PyTorch module name, which PEFT's format "
                "needs: end the path with .safetensors for a file of this package"
            )
        tensors[_PREFIX + name] = np.ascontiguousarray(array)
    rank = next(iter(held.pairs.values()))[0].shape[1]
    alpha = held.scale * rank
    about = {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": None,
        "r": rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted(held.pairs), "fan_in_fan_out": not transposed,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in held.whole}) or None,
        "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
    }  # fmt: skip
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror or error}") from error
    with files.written(folder / TENSORS) as draft:
        draft.write_bytes(pack(tensors, {"format": "pt"}))
    with files.written(folder / CONFIG) as draft:
        draft.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


_OTHERS = (
    "use_dora", "bias", "lora_bias", "layer_replication",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "use_qalora",
    "use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config",
)  # fmt: skip
"""Settings of PEFT with which an adapter is more than a product of two matrices."""
_BASE_STAYS = (None, True, False, "gaussian", "eva", "orthogonal")
"""The ways in which PEFT draws an adapter that leave the weight beside it as it was."""


def read(folder: str | os.PathLike[str]) -> Peft:
    """What PEFT, or `write`, wrote to a folder. Raises DataError for what is not plain LoRA."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = Path(folder)
    try:
        about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = {k: a.astype(np.float32) for k, a in load_file(folder / TENSORS).items()}
        if about["peft_type"] != "LORA":
            raise DataError(f"{folder}: adapters of PEFT's kind {about['peft_type']} are not LoRA")
        rank, alpha = int(about["r"]), float(about["lora_alpha"])
        ranks, alphas = (_pattern(about.get(f"{key}_pattern") or {}) for key in ("rank", "alpha"))
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror or error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, re.error, SafetensorError) as error:
        raise DataError(f"{folder}: no adapters in PEFT's form: {error}") from error
    for name in _OTHERS:
        if about.get(name) not in (None, False, "none", {}, []):
            raise DataError(f"{folder}: adapters with {name} = {about[name]} are not read")
    if (drawn := about.get("init_lora_weights")) not in _BASE_STAYS:
        raise DataError(
            f"{folder}: init_lora_weights = '{drawn}' changes the model's own weights, too: let "
            "PEFT merge these adapters"
        )
    root = bool(about.get("use_rslora"))
    if rank < 1:
        raise DataError(f"{folder}: r is {rank}: a rank is 1 or more")
    adapters = Peft(scale=_scale(alpha, rank, root))
    parts: dict[str, dict[str, Array]] = {}
    for key, array in tensors.items():
        name = key.removeprefix(_PREFIX)
        part = _PART.fullmatch(name)
        if part is not None and array.ndim == 2:
            parts.setdefault(part["module"], {})[part["which"]] = array
        elif ".lora_" in name:
            raise DataError(f"{folder}: '{name}' is of no matrix, or of another kind than LoRA's")
        else:
            adapters.whole[name] = array
    for module, pair in parts.items():
        own, weight = _own(ranks, module, rank), _own(alphas, module, alpha)
        ranked = pair.keys() == {"A", "B"} and {pair["A"].shape[0], pair["B"].shape[1]} == {own}
        if not ranked or own < 1:
            raise DataError(f"{folder}: '{module}' has no A and B of rank {own:g}")
        if (own, weight) != (rank, alpha):
            adapters.scales[module] = _scale(weight, own, root)
        adapters.pairs[module] = (pair["A"].T, pair["B"].T)
    return adapters


def _scale(alpha: float, rank: float, root: bool) -> float:
    return alpha / (math.sqrt(rank) if root else rank)


def _pattern(pattern: Mapping[str, Any]) -> list[tuple[re.Pattern[str], float]]:
    """The numbers of modules whose names, or the ends of them, an expression matches."""
    return [(re.compile(rf"(.*\.)?({k})"), float(n)) for k, n in pattern.items()]


def _own(pattern: list[tuple[re.Pattern[str], float]], module: str, usual: float) -> float:
    return next((number for names, number in pattern if names.fullmatch(module)), usual)


def find(folder: str | os.PathLike[str], name: str, names: Collection[str]) -> str:
    """The one of `names` that a folder calls `name`, where one of both may be in a wrapper.

    Raises DataError where there is none, or where there are several.
    """
    fits = [m for m in names if m == name] or [
        m for m in names if name.endswith(f".{m}") or m.endswith(f".{name}")
    ]
    if len(fits) != 1:
        fault = f"fits {', '.join(fits[:3])}" if fits else "is none of the model's"
        examples = ", ".join(sorted(filter(None, names))[:3])
        raise DataError(
            f"{os.fspath(folder)}: '{name}' {fault}, which has {examples or 'no names of PyTorch'}"
        )
    return fits[0]
