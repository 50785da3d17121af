"""Tuning records: measured winners as JSON, a file a GPU, shipped and the user's own."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_fuse import config
from onnx_fuse.cuda import jit
from onnx_fuse.program.problem import AnyProblem, Config, Hardware, Problem

if TYPE_CHECKING:
    from onnx_fuse.kernels import Kernel

SHIPPED = Path(__file__).parent / "records"


# what a launch's time does not depend on
IGNORED = {"epsilon", "act_alpha", "align", "bias_dtype", "c_rows", "c_cols", "static_b"}


def key(op: str, problem: AnyProblem) -> str:
    """The record's key: the problem without what does not matter to its time or is the default."""
    if not isinstance(problem, Problem):
        same = dict.fromkeys(IGNORED & problem.fields().keys(), 0.0)
        return f"{op} | {replace(problem, **same)}"  # type: ignore[type-var]
    dense = {
        "lda": problem.m if problem.trans_a else problem.k,
        "ldb": problem.k if problem.trans_b else problem.n,
        "a_strides": (), "b_strides": (), "c_strides": (),
    }  # fmt: skip
    kept = tuple(
        (name, bool(value) if name in ("alpha", "beta") else value)
        for name, value in problem.attrs
        if name not in IGNORED and value is not False and dense.get(name) != value
    )
    if problem.integer("align", 16) % 16:
        kept += (("unaligned", True),)
    flags = tuple((name, 1 if value is True else value) for name, value in kept)
    return f"{op} | {replace(problem, attrs=flags)}"


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


def _files(hw: Hardware) -> tuple[tuple[Path, int], ...]:
    """The files of this GPU's records, and when each was written."""
    folders = (SHIPPED, config.CACHE_DIR.value / "tuning")
    paths = (folder / _file_name(hw) for folder in folders)
    return tuple((path, path.stat().st_mtime_ns) for path in paths if path.exists())


def load(hw: Hardware) -> dict[str, Any]:
    """Key -> record for this GPU: the shipped ones, overridden by the user's own."""
    merged: dict[str, Any] = {}
    for path, stamp in _files(hw):
        merged |= _read(path, stamp)
    return merged


def has(op: str, hw: Hardware) -> bool:
    """Whether there is a record of this operator for this GPU."""
    return op in _operators(_files(hw))


@cache
def _operators(files: tuple[tuple[Path, int], ...]) -> frozenset[str]:
    return frozenset(key.partition(" | ")[0] for file in files for key in _read(*file))


def lookup(
    op: str, problem: AnyProblem, hw: Hardware, legal: Sequence[Kernel]
) -> tuple[Kernel, Config, float] | None:
    """The record for (op, problem, GPU) by one of `legal` whose code has not changed since."""
    record = load(hw).get(key(op, problem))
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


def live(name: str, entry: dict[str, Any]) -> bool:
    """Whether the record's kernel is a candidate of its key's op still, its code unchanged."""
    from onnx_fuse.kernels import candidates

    return any(
        kernel.name == entry.get("kernel") and kernel_hash(kernel) == entry.get("hash")
        for kernel in candidates(name.split(" | ")[0])
    )


def save(
    records: Iterable[tuple[str, AnyProblem, dict[str, Any]]], hw: Hardware, folder: Path
) -> Path:
    """Merge `records` into this GPU's file in `folder`, without those that no source has any more.

    The file is written beside and renamed.
    """
    path = folder / _file_name(hw)
    folder.mkdir(parents=True, exist_ok=True)
    before = _read(path, path.stat().st_mtime_ns) if path.exists() else {}
    merged = {name: entry for name, entry in before.items() if live(name, entry)}
    merged |= {key(op, problem): entry for op, problem, entry in records}
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
        lines = [f"{json.dumps(name)}: {json.dumps(merged[name])}" for name in sorted(merged)]
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(file.name, path)
    return path
