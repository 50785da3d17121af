"""Names that several test files share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ENCODER = Path(__file__).parent.parent / "models" / "encoder.onnx"


@dataclass(frozen=True)
class Result:
    """What one call of the command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]
