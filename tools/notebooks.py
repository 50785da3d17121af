"""Run the notebooks of examples/ and store what they print: `python tools/notebooks.py`.

A notebook is a JSON file, and its cells are run one after another in this process: the packages of
Jupyter are not needed. Figures of matplotlib that a cell leaves open become its pictures.
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def run(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Run all cells of code in the current folder: (cell, outputs as a notebook stores them)."""
    import matplotlib

    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield cell, _run_cell("".join(cell["source"]), names)


def _run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one cell; the value of a last line that is an expression is shown."""
    from matplotlib import pyplot

    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if value is not None:
                print(repr(value))
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        lines = text.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    for number in pyplot.get_fignums():
        data = io.BytesIO()
        pyplot.figure(number).savefig(data, format="png", dpi=80, bbox_inches="tight")
        picture = {"image/png": base64.b64encode(data.getvalue()).decode()}
        outputs.append({"data": picture, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return outputs


@contextlib.contextmanager
def in_new_folder() -> Iterator[None]:
    """Work in a folder that goes afterwards, with the checkout's models and examples in it."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("models", "examples"):
            os.symlink(ROOT / name, Path(folder) / name)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS)
    for path in (p.resolve() for p in parser.parse_args().notebooks):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with in_new_folder():
            for count, (cell, outputs) in enumerate(run(notebook), 1):
                cell |= {"execution_count": count, "outputs": outputs}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"ran {path.name}")


if __name__ == "__main__":
    main()
