"""The examples run, and the notebooks print what is stored in them."""

import importlib.util
import json
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
# script -> what it prints, where `...` stands for anything
SCRIPTS = {
    "digits_data.py": "wrote digits_train.npz: 1437 images, digits_test.npz: 360 images",
    "finetune_digits.py": "epoch 6: loss ..., held-out loss 0.0..., 9...%",
    "gradient_descent.py": "learned y = 3.00 a -2.00 b +1.00",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_what_it_should(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    pattern = re.escape(SCRIPTS[name]).replace(r"\.\.\.", ".*")
    assert re.search(pattern, capsys.readouterr().out)


def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(outputs: list[dict[str, object]]) -> list[str]:
    """What was printed, without digits after a decimal point, which differ between machines."""
    lines = [line for o in outputs for line in o.get("text", [])]  # type: ignore[attr-defined]
    return [re.sub(r"\d+\.\d+", "#", line) for line in lines]


@pytest.mark.parametrize("name", ["fuse_and_check.ipynb", "finetune_digits.ipynb"])
def test_a_notebook_prints_what_is_stored_in_it(name: str) -> None:
    path = ROOT / "examples" / name
    assert path.stat().st_size < 300_000
    notebook = json.loads(path.read_text(encoding="utf-8"))
    tool = runner()
    with tool.in_new_folder():
        for cell, outputs in tool.run(notebook):
            assert texts(outputs) == texts(cell["outputs"])
            assert len(outputs) == len(cell["outputs"])
