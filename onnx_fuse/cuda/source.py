"""Source texts under cuda_src/ with their includes expanded, and facts read from them."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

KEPT = 4096
"""Kernels, and texts of kernels, that a process keeps; the least recently used go first."""
Defines = tuple[tuple[str, str], ...]
_WAIT = re.compile(r"\b(after_previous_launch|grid_dependency_wait)\(\)")
_INCLUDE = re.compile(r'^[ \t]*#include[ \t]+"([^"]+)".*$', re.MULTILINE)


def source_root() -> Path:
    """cuda_src/: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "cuda_src"
    return inside if inside.is_dir() else package.parent / "cuda_src"


@lru_cache(KEPT)
def source_text(source: str) -> str:
    """The text of a path under cuda_src/ (or of a text), each own #include expanded once."""
    seen: set[str] = set()

    def expand(text: str) -> str:
        def include(match: re.Match[str]) -> str:
            name = match.group(1)
            if name in seen:
                return ""
            seen.add(name)
            return expand((source_root() / name).read_text())

        return _INCLUDE.sub(include, text)

    return expand(source if "\n" in source else (source_root() / source).read_text())


def without_bounds(text: str) -> str:
    """The text without its __launch_bounds__(...), which only a __global__ function may have."""
    head, *rest = text.split("__launch_bounds__")
    for part in rest:
        depth, end = 0, 0
        while depth or "(" not in part[:end]:
            depth += {"(": 1, ")": -1}.get(part[end], 0)
            end += 1
        head += part[end:]
    return head


GIVEN: dict[tuple[str, Defines, str], bytes | memoryview] = {}
"""Code compiled elsewhere, by source, macros and architecture."""
_GIVEN_WAITS: dict[str, tuple[bool, bool]] = {}
_GIVERS: Counter[Any] = Counter()  # of each key above


def give(
    source: str, defines: Defines, arch: str, cubin: bytes | memoryview, waits: tuple[bool, bool]
) -> None:
    """Register `cubin` as what `source` compiles to; `waits` are those of `waiting`.

    `source` is then a name alone, which must tell the text apart from any other.
    """
    GIVEN[source, defines, arch], _GIVEN_WAITS[source] = cubin, waits
    _GIVERS.update(((source, defines, arch), source))


def take_back(keys: Iterable[tuple[str, Defines, str]]) -> None:
    """Let go of code that was given so often as it is named here, unless others have given it."""
    for key in keys:
        _GIVERS.subtract((key, key[0]))
        if _GIVERS[key] <= 0:
            GIVEN.pop(key, None)
            del _GIVERS[key]
        if _GIVERS[key[0]] <= 0:
            _GIVEN_WAITS.pop(key[0], None)
            del _GIVERS[key[0]]


@lru_cache(KEPT)
def waiting(source: str) -> tuple[bool, bool]:
    """Whether its kernels wait for the launch before by themselves, so may start while it runs.

    And whether they do nothing ahead of that, so may follow any launches early.
    """
    if source in _GIVEN_WAITS:
        return _GIVEN_WAITS[source]
    kernels = source_text(source).split("__global__")[1:]
    heads = [";".join(kernel.partition("{")[2].split(";")[:2]) for kernel in kernels]
    return all(map(_WAIT.search, kernels)), all(map(_WAIT.search, heads))


@lru_cache(KEPT)
def source_hash(source: str) -> str:
    """12 hex digits over the expanded text."""
    return hashlib.sha256(source_text(source).encode()).hexdigest()[:12]
