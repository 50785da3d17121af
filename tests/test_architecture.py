"""The layers: a module imports only what stands above it, and the command line starts light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "onnx_fuse"
# Top to bottom; what shares a line may import each other. `__init__` only names things.
LAYERS = (
    ("errors",),
    ("config",),
    ("ir",),
    ("problem",),
    ("ops",),
    ("passes",),
    ("autodiff",),
    ("kernels", "llir"),
    ("context", "lower"),
    ("runtime",),
    ("session",),
    ("backend",),
    ("optim", "checkpoint", "data"),
    ("train",),
    ("fit",),
    ("nn",),
    ("validate",),
    ("bench", "report"),
    ("cli",),
)
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, first-level module of this package) of every import statement, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "onnx_fuse":
            names = [f"onnx_fuse.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "onnx_fuse" and len(parts) > 1 and parts[1] != "__version__":
                yield node.lineno, parts[1]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_layers_above(path: Path) -> None:
    own = module_of(path)
    if own == "__init__":
        return
    assert own in RANK, f"{own} has no place among the layers"
    wrong = [
        f"line {line}: {name}"
        for line, name in imports(path)
        if name != own and RANK[name] > RANK[own]
    ]
    assert not wrong, f"{own} imports from below itself: {wrong}"


def test_the_rule_notices_an_import_from_below(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from onnx_fuse import cli\n    import onnx_fuse.validate\n")
    assert list(imports(path)) == [(2, "cli"), (3, "validate")]


def test_the_package_and_its_help_import_nothing_heavy() -> None:
    code = (
        "import sys, onnx_fuse\n"
        "from onnx_fuse import cli\n"
        "assert cli.run_command(['--help']) == 0\n"
        "heavy = {'numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'onnxscript', 'cuda'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_every_public_name_can_be_imported() -> None:
    import onnx_fuse

    for name in onnx_fuse.__all__:
        assert getattr(onnx_fuse, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = onnx_fuse.nothing
