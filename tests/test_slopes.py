"""Slopes along directions of many tensors: a wrong gradient among right ones is found alone."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from onnx_fuse import progress
from onnx_fuse.ir.build import text_model
from onnx_fuse.validation.reference import Reference
from onnx_fuse.validation.slopes import Slopes

RNG = np.random.default_rng(0)
# Parameters of many sizes, whose gradients differ by ten orders of magnitude.
SCALES = {f"w{i}": 10.0 ** (-i / 2) for i in range(20)} | {"zero": 0.0}
PARAMETERS = {name: RNG.standard_normal((3, 4)) for name in SCALES}


def loss(changed: Mapping[str, Any]) -> float:
    values = PARAMETERS | dict(changed)
    return math.fsum(scale * float(np.sin(values[n]).sum()) for n, scale in SCALES.items())


def slopes(wrong: Mapping[str, float]) -> tuple[Slopes, list[int]]:
    """Slopes with the gradients of some tensors scaled, and a list that counts the losses."""
    gradients = {
        n: scale * np.cos(PARAMETERS[n]) * wrong.get(n, 1.0) for n, scale in SCALES.items()
    }
    calls = [0]

    def counted(changed: Mapping[str, Any]) -> float:
        calls[0] += 1
        return loss(changed)

    return Slopes(counted, PARAMETERS, gradients, 1e-5, 1e-10, np.random.default_rng(1)), calls


@pytest.mark.parametrize("method", ["each", "sampled"])
@pytest.mark.parametrize("factor", [0.0, 0.9, 1.05, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["w0", "w7", "w13"])
def test_a_wrong_gradient_is_found_and_no_other(method: str, factor: float, name: str) -> None:
    found = getattr(slopes({name: factor})[0], method)(list(SCALES))
    assert set(found) == set(SCALES)
    assert [n for n, slope in found.items() if not slope.ok] == [name]


def test_several_wrong_gradients_are_found() -> None:
    wrong = {"w1": 1.1, "w2": 0.8, "w9": -1.0}
    found = slopes(wrong)[0].sampled(list(SCALES))
    assert {n for n, slope in found.items() if not slope.ok} == set(wrong)


def test_right_gradients_take_few_runs_together_and_four_each_alone() -> None:
    together, few = slopes({})
    assert all(slope.ok for slope in together.sampled(list(SCALES)).values())
    alone, many = slopes({})
    assert all(slope.ok for slope in alone.each(list(SCALES)).values())
    assert many[0] >= 4 * len(SCALES)
    assert few[0] <= many[0] / 3


def test_no_tensor_and_an_empty_one() -> None:
    empty = {"e": np.zeros((0, 3))}
    found = Slopes(lambda changed: 0.0, empty, empty, 1e-5, 0.0, RNG)
    assert found.sampled([]) == {}
    assert found.sampled(["e"])["e"].ok


@pytest.mark.parametrize("method", ["each", "sampled"])
def test_each_run_of_the_model_is_a_step_of_the_progress(method: str) -> None:
    told: list[tuple[str, int, int]] = []
    found, calls = slopes({"w3": 2.0})
    with progress.watched(lambda *step: told.append(step)):
        getattr(found, method)(list(SCALES))
    assert len(told) == calls[0]
    assert all(0 <= done < total for _, done, total in told)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert {what for what, *_ in told} == {f"comparing the gradients of {len(SCALES)} tensors"}


def test_a_run_of_the_slow_evaluator_is_a_step() -> None:
    model = text_model("agraph (double[N] x) => (double[N] y) { a = Softmax (x) y = Softmax (a) }")
    told: list[tuple[str, int, int]] = []
    with progress.watched(lambda *step: told.append(step)):
        [y] = Reference(model).run(None, {"x": np.array([-1.5])})
    assert y.tolist() == [1]
    assert told == [("running a graph in NumPy", 0, 0)]
