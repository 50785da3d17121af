"""Write a report's files: strict JSON, and text that appears whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_fuse import files


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """`data` as strict JSON: infinities and NaN become strings."""
    write_whole(path, json.dumps(strict(data), indent=2, allow_nan=False) + "\n")


def strict(value: object) -> Any:
    """`value` with strings in place of infinities and NaN, which JSON has no numbers for."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return value


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all. Raises ModelError if it cannot be written."""
    with files.written(path) as draft:
        draft.write_text(text, encoding="utf-8")
