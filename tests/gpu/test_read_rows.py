"""Steps that compute only the rows that are read, beside steps that compute all of them."""

import pytest
import test_read_rows


@pytest.mark.parametrize(("precision", "rtol"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_the_same_gradients(precision: str, rtol: float) -> None:
    test_read_rows.steps_with_and_without("cuda", precision, rtol)
