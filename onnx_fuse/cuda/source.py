"""Source texts under cuda_src/ with their includes expanded, and code compiled elsewhere."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

KEPT = 4096
"""Kernels, and texts of kernels, that a process keeps; the least recently used go first."""
Defines = tuple[tuple[str, str], ...]
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


GIVEN: dict[tuple[str, Defines, str], bytes | memoryview] = {}
"""Code compiled elsewhere, by source, macros and architecture."""
_GIVERS: Counter[tuple[str, Defines, str]] = Counter()  # of each key above


def give(source: str, defines: Defines, arch: str, cubin: bytes | memoryview) -> None:
    """Register `cubin` as what `source` compiles to.

    `source` is then a name alone, which must tell the text apart from any other.
    """
    GIVEN[source, defines, arch] = cubin
    _GIVERS[source, defines, arch] += 1


def take_back(keys: Iterable[tuple[str, Defines, str]]) -> None:
    """Let go of code that was given so often as it is named here, unless others have given it."""
    for key in keys:
        _GIVERS[key] -= 1
        if _GIVERS[key] <= 0:
            GIVEN.pop(key, None)
            del _GIVERS[key]


@lru_cache(KEPT)
def source_hash(source: str) -> str:
    """12 hex digits over the expanded text."""
    return hashlib.sha256(source_text(source).encode()).hexdigest()[:12]
