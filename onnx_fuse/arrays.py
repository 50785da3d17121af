"""The type of an array, for modules that run without the ONNX libraries as for all others."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
"""An array of any shape and type."""
