"""Tuning records: measured winners as JSON, a file a GPU, shipped and the user's own."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_fuse import config
from onnx_fuse.kernels import jit
from onnx_fuse.problem import Config, Hardware, Problem

if TYPE_CHECKING:
    from onnx_fuse.kernels import Kernel

SHIPPED = Path(__file__).parent / "records"


def _file_name(hw: Hardware) -> str:
    return re.sub(r"\W+", "_", hw.name) + ".json"


def kernel_hash(kernel: Kernel) -> str:
    """Digest of all the kernel's sources: a record made with other code is not used."""
    return "-".join(jit.source_hash(source)[:8] for source in kernel.sources())


@cache
def _read(path: Path, stamp: int) -> dict[str, Any]:
    """The records of one file; a torn or foreign file counts as none (they are only a speed-up)."""
    try:
        records = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return records if isinstance(records, dict) else {}


def load(hw: Hardware) -> dict[str, Any]:
    """Key -> record for this GPU: the shipped ones, overridden by the user's own."""
    merged: dict[str, Any] = {}
    for folder in (SHIPPED, config.CACHE_DIR.value / "tuning"):
        path = folder / _file_name(hw)
        if path.exists():
            merged |= _read(path, path.stat().st_mtime_ns)
    return merged


def lookup(
    op: str, problem: Problem, hw: Hardware, legal: Sequence[Kernel]
) -> tuple[Kernel, Config, float] | None:
    """The record for (op, problem, GPU) by one of `legal` whose code has not changed since."""
    record = load(hw).get(f"{op} | {problem}")
    if not isinstance(record, dict):
        return None
    for kernel in legal:
        if record.get("kernel") == kernel.name and record.get("hash") == kernel_hash(kernel):
            values = record.get("config", {})
            how = Config.of(
                **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            )
            if how in kernel.configs(problem, hw):
                return kernel, how, float(record["us"]) * 1e-6
    return None


def record(kernel: Kernel, how: Config, us: float, hw: Hardware) -> dict[str, Any]:
    """One record: which kernel and config won, its time, and what it was measured with."""
    return {
        "kernel": kernel.name,
        "config": dict(how.attrs),
        "us": round(us, 2),
        "driver": hw.driver,
        "hash": kernel_hash(kernel),
    }


def save(
    records: Iterable[tuple[str, Problem, dict[str, Any]]], hw: Hardware, folder: Path
) -> Path:
    """Merge `records` into this GPU's file in `folder`, written beside and renamed."""
    path = folder / _file_name(hw)
    folder.mkdir(parents=True, exist_ok=True)
    merged = dict(_read(path, path.stat().st_mtime_ns)) if path.exists() else {}
    merged |= {f"{op} | {problem}": entry for op, problem, entry in records}
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
        lines = [f"{json.dumps(key)}: {json.dumps(merged[key])}" for key in sorted(merged)]
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(file.name, path)
    return path
