"""The eager programs in examples/ do what they say, in fewer steps than they take there."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from onnx_fuse import nn

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"nn_{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_eager_example_has_a_test() -> None:
    names = {path.stem for path in EXAMPLES.glob("nn_*.py")}
    assert names == {"nn_char_gpt", "nn_custom_loss", "nn_digits", "nn_newton"}


def test_digits_learn_alike_eagerly_and_captured() -> None:
    digits = example("digits")
    (_, eager, share), (_, captured, same) = digits.train(False, 40), digits.train(True, 40)
    # the captured graph is fused, which rounds differently; 40 updates enlarge that
    np.testing.assert_allclose(captured, eager, rtol=1e-4)
    assert eager[-1] < 0.4 * eager[0]
    assert share == same > 0.75


def test_a_character_gpt_learns_and_writes() -> None:
    gpt = example("char_gpt")
    model, losses = gpt.train(steps=60, batch=8)
    assert losses[-1] < 0.75 * losses[0]
    text = gpt.write(model, "3+4=", 6)
    assert text.startswith("3+4=")
    assert len(text) == 10


def test_an_imported_file_is_tuned_by_a_loss_of_ones_own(tmp_path: Path) -> None:
    custom = example("custom_loss")
    model, losses = custom.tune(custom.made_file(tmp_path / "network.onnx"), steps=25)
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    model.export(tmp_path / "tuned.onnx", [nn.tensor(np.zeros((2, 64), np.float32))])
    again = nn.from_onnx(tmp_path / "tuned.onnx")
    x = nn.randn(3, 64)
    np.testing.assert_array_equal(again(x).numpy(), model(x).numpy())


@pytest.mark.parametrize(("number", "least"), [(2.0, 4), (1000.0, 8)])
def test_newtons_loop_takes_the_steps_it_needs(number: float, least: int) -> None:
    a = nn.tensor(number, requires_grad=True)
    root, steps = example("newton").cube_root(a)
    root.backward()
    assert steps >= least
    assert root.item() == pytest.approx(number ** (1 / 3), rel=1e-5)
    assert a.grad.item() == pytest.approx(number ** (-2 / 3) / 3, rel=1e-3)
