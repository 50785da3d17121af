"""Tuning records: measured winners as JSON, a file a GPU, shipped and the user's own."""

from __future__ import annotations

import ast
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from onnx_fuse import config
from onnx_fuse.kernels.kernel import Candidate
from onnx_fuse.program import call, contractions, data_movement, expression, problems
from onnx_fuse.program.epilogue import Epilogue
from onnx_fuse.program.problem import AnyProblem, Contraction, GemmProblem, Hardware, KernelConfig

SHIPPED = Path(__file__).parent / "records"


# what a launch's time does not depend on
IGNORED = {"epsilon", "act_alpha", "align", "bias_dtype", "c_rows", "c_cols", "static_b"}


def canonical(problem: AnyProblem) -> AnyProblem:
    """The problem without what does not matter to its time or is the default."""
    same: dict[str, Any]
    if not isinstance(problem, Contraction):
        same = dict.fromkeys(IGNORED & problem.fields().keys(), 0.0)
        return replace(problem, **same)  # type: ignore[type-var]
    same = {f.name: f.default for f in fields(problem) if f.name in IGNORED}
    if isinstance(problem, GemmProblem):
        lda, ldb = replace(problem, lda=None, ldb=None).ld
        same |= {
            "lda": None if problem.lda == lda else problem.lda,
            "ldb": None if problem.ldb == ldb else problem.ldb,
            "align": 2 if problem.align % 16 else 16,
        }
    values = problem.epilogue.given
    epilogue: dict[str, Any] = {k: v for k, v in values.items() if k not in IGNORED}
    epilogue |= {name: number for name, number in (("alpha", 2), ("beta", 1)) if name in values}
    return replace(problem, **same, epilogue=Epilogue(**epilogue))


def key(op: str, problem: AnyProblem) -> str:
    """The key of the record of `problem`."""
    return f"{op} | {_written(canonical(problem))}".replace("=True", "=1")


def _written(problem: AnyProblem) -> str:
    """The problem in full: for people, `str` names no more of a tail than its steps.

    Operators whose problems have a text of their own are known by that, such as products.
    """
    if type(problem).__str__ is not AnyProblem.__str__:
        return str(problem)
    values = problem.concrete().fields_given
    return " ".join(
        (problem.op, *(f"{k}={v if isinstance(v, str) else repr(v)}" for k, v in values.items()))
    )


def _file_name(hw: Hardware) -> str:
    return re.sub(r"\W+", "_", hw.name) + ".json"


def read(name: str) -> AnyProblem:
    """The problem that a record's key describes. Raises ValueError for a key of other parts."""
    op, _, text = name.partition(" | ")
    words = [word.partition("=") for word in _words(text)]
    values = {k: _value(v) for k, equals, v in words if equals}
    rest = [word for word, equals, _ in words if not equals]
    try:
        if op in _KINDS and rest == [op]:
            return _made(_KINDS[op], values)
        kind, types, layout, *math = rest
        if kind != op or not set(layout) <= {"N", "T"}:
            raise ValueError(text)
        dtype, _, out = types.partition("->")
        turned = {"trans_a": layout[0] == "T", "trans_b": layout[1] == "T"}
        values |= {"dtype": dtype, "out_dtype": out, "math": (*math, "ieee")[0], **turned}
        cls = _KINDS.get(kind, GemmProblem)
        product: type[Contraction] = cls if issubclass(cls, Contraction) else GemmProblem
        return product.of(kind, **values)
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{name!r} is no problem of numbers and names") from error


_PARTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for module in (call, expression, data_movement, problems, contractions)
    for kind in vars(module).values()
    if is_dataclass(kind) and isinstance(kind, type)
}
"""The classes of problems, and of what their fields hold, by the names in their `repr`."""
_KINDS: dict[str, type[AnyProblem]] = {
    kind.op: kind
    for kind in _PARTS.values()
    if issubclass(kind, AnyProblem) and isinstance(vars(kind).get("op"), str)
}


def _words(text: str) -> list[str]:
    """The text split at spaces, except at those within brackets."""
    words, depth = [""], 0
    for c in text:
        depth += (c in "([") - (c in ")]")
        if c == " " and not depth:
            words.append("")
        else:
            words[-1] += c
    return words


def _value(text: str) -> Any:
    """A number, a tuple, or the object of one of `_PARTS`; any other text is a name."""
    try:
        return _built(ast.parse(text, mode="eval").body)
    except (KeyError, SyntaxError, TypeError, ValueError):
        return text


def _built(node: ast.expr) -> Any:
    match node:
        case ast.Call(ast.Name(name), [], arguments):
            return _made(_PARTS[name], {str(a.arg): _built(a.value) for a in arguments})
        case ast.Tuple(parts):
            return tuple(map(_built, parts))
        case ast.UnaryOp(ast.USub(), ast.Name("inf")):
            return -inf
        case ast.Name("inf" | "nan" as name):
            return float(name)
    return ast.literal_eval(node)


def _made(kind: type[Any], values: dict[str, Any]) -> Any:
    """An object of `kind`. Raises TypeError where a name is given to a field that holds none."""
    types = {f.name: str(f.type) for f in fields(kind)}
    for name, value in values.items():
        if isinstance(value, str) and "str" not in types.get(name, "str"):
            raise TypeError(f"{kind.__name__}.{name} is no {value}")
    flags = {k: bool(v) for k, v in values.items() if types.get(k) == "bool"}
    return kind(**values | flags)


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


def load(hw: Hardware) -> Mapping[str, Any]:
    """Key -> record for this GPU: the shipped ones, overridden by the user's own."""
    return _merged(_files(hw))


@cache
def _merged(files: tuple[tuple[Path, int], ...]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for path, stamp in files:
        merged |= {k: v for k, v in _read(path, stamp).items() if isinstance(v, dict)}
    return merged


def has(op: str, hw: Hardware) -> bool:
    """Whether there is a record of this operator for this GPU."""
    return op in _operators(_files(hw))


@cache
def _operators(files: tuple[tuple[Path, int], ...]) -> frozenset[str]:
    return frozenset(key.partition(" | ")[0] for file in files for key in _read(*file))


def stamp(hw: Hardware) -> tuple[tuple[str, int], ...]:
    """A value that changes whenever one of the files that `load` reads changes."""
    return tuple((path.name, written) for path, written in _files(hw))


def lookup(
    op: str, problem: AnyProblem, hw: Hardware, legal: Sequence[Candidate]
) -> tuple[Candidate, KernelConfig, float] | None:
    """The record for (op, problem, GPU) by one of `legal` of the same version."""
    record = load(hw).get(key(op, problem))
    if record is None:
        return None
    for kernel in legal:
        if (record.get("kernel"), record.get("version")) == (kernel.name, kernel.version):
            how = _config(record)
            if how not in kernel.configs(problem, hw):
                return None
            return kernel, how, float(record["us"]) * 1e-6
    return None


def _config(record: Mapping[str, Any]) -> KernelConfig:
    values = record.get("config", {})
    return KernelConfig.of(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def record(
    problem: AnyProblem, kernel: Candidate, how: KernelConfig, us: float, hw: Hardware
) -> dict[str, Any]:
    """One record: which kernel and config won, its time, and which version was measured."""
    return {
        "kernel": kernel.name,
        "config": dict(how.attrs),
        "us": round(us, 2),
        "driver": hw.driver,
        "version": kernel.version,
    }


def is_current(
    name: str, entry: Mapping[str, Any], hw: Hardware, kernels: Sequence[Candidate]
) -> bool:
    """Whether one of `kernels` is the record's, of its version, and has its configuration.

    Where the key cannot be read, `lookup` is left to see that.
    """
    kernel = next((kernel for kernel in kernels if kernel.name == entry.get("kernel")), None)
    if kernel is None or entry.get("version") != kernel.version:
        return False
    try:
        problem = read(name)
    except ValueError:
        return True
    how = _config(entry)
    return kernel.supports(problem, hw) is None and how in kernel.configs(problem, hw)


def save(
    records: Iterable[tuple[str, AnyProblem, dict[str, Any]]],
    hw: Hardware,
    folder: Path,
    candidates: Callable[[str], Sequence[Candidate]],
) -> Path:
    """Merge `records` into this GPU's file in `folder`, without those of other versions.

    `candidates` gives those of an operator. The file is written beside and renamed.
    """
    path = folder / _file_name(hw)
    folder.mkdir(parents=True, exist_ok=True)
    before = _read(path, path.stat().st_mtime_ns) if path.exists() else {}
    merged = {
        name: entry
        for name, entry in before.items()
        if is_current(name, entry, hw, candidates(name.partition(" | ")[0]))
    }
    merged |= {key(op, problem): entry for op, problem, entry in records}
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
        lines = [f"{json.dumps(name)}: {json.dumps(merged[name])}" for name in sorted(merged)]
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(file.name, path)
    return path
