"""The settings of a run as JSON values, and whether a checkpoint is of the same run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from math import inf
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.training import losses, optim
from onnx_fuse.training.adapters import Lora
from onnx_fuse.training.options import TrainingOptions
from onnx_fuse.training.spec import Spec
from onnx_fuse.training.weights import model_names


def as_json(options: TrainingOptions, optimizer: optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint stores of the options; a loss that is a model is known by its digest."""
    record = options.of_step() | {"seed": options.seed, "optimizer": optim.to_json(optimizer)}
    record |= {name: True for name in ("tie", "untie") if getattr(options, name)}
    record |= {k: list(record[k]) for k in ("trainable", "frozen") if record[k] is not None}
    record["loss_options"] = dict(options.loss_options or {})
    lora = options.lora
    record["lora"] = dataclasses.asdict(lora) if isinstance(lora, Lora) else None
    if isinstance(lora, Mapping):
        record["lora"] = {name: dataclasses.asdict(each) for name, each in lora.items()}
    if not isinstance(options.loss, str) or options.loss.endswith(".onnx"):
        terms = losses.terms(options.loss, options.loss_options, options.output)
        record |= {"loss": [term.to_json() for term in terms], "loss_options": {}, "output": None}
    return json.loads(json.dumps(record, default=np.ndarray.tolist))


def stored_loss(folder: str | os.PathLike[str], stored: str | list[Any]) -> str | list[losses.Term]:
    """The loss that a checkpoint's settings hold. Raises UsageError where they hold a digest."""
    if isinstance(stored, str):
        return stored
    if any(term["loss"].startswith("sha256 ") for term in stored):
        raise UsageError(f"{folder}: the run has a loss that is a model: give it as loss=")
    return [losses.Term(**term) for term in stored]


def stored_lora(stored: dict[str, Any] | None) -> Lora | dict[str, Lora] | None:
    """The adapters of a run, of which a checkpoint's settings hold one or several by name."""
    if stored is None or not all(isinstance(each, dict) for each in stored.values()):
        return None if stored is None else Lora(**{"merged": False} | stored)
    return {name: Lora(**each) for name, each in stored.items()}


def weight_names(spec: Spec) -> list[str]:
    """The model's names of what a run changes in it."""
    kinds = ("parameter", "statistic")
    return [name for s in spec.states if s.kind in kinds for name in model_names(s.value)]


def check(
    folder: str | os.PathLike[str], current: Mapping[str, Any], stored: Mapping[str, Any]
) -> None:
    """Raise UsageError for the first setting that differs from the one stored in `folder`.

    Three settings may differ: the number of steps of a schedule, a bound on the norm that clips
    nothing, and whether adapters are merged, which depends on the GPU.
    """
    for key, (value, old) in _differences(current, stored).items():
        if key in ("optimizer.lr.steps", "lora.merged"):
            continue
        if key == "clip_norm" and {value, old} == {None, inf}:
            continue
        advice = "give the same, or another folder"
        if key.startswith("optimizer.lr."):
            advice += "; Trainer.resume takes another schedule"
        raise UsageError(f"{folder}: the run was started with {key} {old}, not {value}: {advice}")


def _differences(new: object, old: object, name: str = "") -> dict[str, tuple[Any, Any]]:
    """{field: (new, old)} of nested mappings, where the new value is another one."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return {} if new == old else {name: (new, old)}
    differences: dict[str, tuple[Any, Any]] = {}
    for key in new:
        differences |= _differences(new[key], old.get(key), f"{name}.{key}" if name else key)
    return differences


def fingerprint(model: ir.Model, trained: Collection[str]) -> str:
    """A digest that is equal for models that differ at most in the content of `trained` weights."""
    graph = model.graph
    digest = hashlib.sha256(repr(sorted(graph.opset_imports.items())).encode())
    for node in graph:
        digest.update(ir.serde.serialize_node(node).SerializeToString(deterministic=True))
    for name, value in sorted(graph.initializers.items()):
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        if name not in trained and value.const_value is not None:
            digest.update(value.const_value.tobytes())
    return digest.hexdigest()
