"""Programs over open sizes, at sizes of 0, 1 and more: equal to closed ones and to onnxruntime.

`python tools/open_sizes.py` does the same for all models and many shapes.
"""

import pytest
from every_size import Subject, prove
from every_size_models import GRAPHS, subjects

MODELS = dict(subjects())
SOME = [name for name in MODELS if name not in GRAPHS][::23]


@pytest.mark.parametrize("name", GRAPHS)
def test_small_graphs(name: str) -> None:
    report = prove(Subject(name, *MODELS[name]()), 24)
    assert not report.faults
    assert report.counts["shapes"] >= 5
    assert report.counts["results"]


@pytest.mark.parametrize("name", SOME)
def test_some_models(name: str) -> None:
    report = prove(Subject(name, *MODELS[name]()), 5, seed=len(name))
    assert not report.faults
    if not name.startswith("contrib"):  # it asks for sizes by attributes
        assert report.counts["shapes"]
    assert report.counts["results"] or not report.counts["shapes"]
