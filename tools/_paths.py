"""Imported first by a tool, for its imports from models/, tests/ and the checkout's package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "models", "tests", "tools")]
