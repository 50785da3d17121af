"""What tools/fuzz.py draws: every operator that is lowered."""

import sys
from pathlib import Path

from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.table import lowerings
from onnx_fuse.ops import OPS

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from fuzz_operators import OPERATORS, UNDRAWN


def test_every_operator_that_is_lowered_is_drawn() -> None:
    """All but those of fused operators, which rewriting makes of the others."""
    lowered = {name for domain, name in {*OPS, *lowerings()} if domain != FUSE}
    assert lowered - OPERATORS.keys() == UNDRAWN.keys()
