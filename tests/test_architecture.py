"""The layers: a module imports only what stands above it, and the command line starts light."""

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Formatter

import pytest
from support import python

from onnx_fuse.reasons import WORDINGS

PACKAGE = Path(__file__).parent.parent / "onnx_fuse"
# Top to bottom; what shares a line may import each other. `__init__` only names things.
LAYERS = (
    ("arrays", "errors", "reasons"),
    ("config", "progress"),
    ("files", "container", "guard", "options", "textwrap"),
    ("distributed",),
    ("ir",),
    ("program",),
    ("ops",),
    ("importer",),
    ("program.interpret",),
    ("rewrite",),
    ("autodiff",),
    ("cuda",),
    ("kernels",),
    ("program.passes",),
    ("lower",),
    ("runtime",),
    ("plugins",),
    ("cache",),
    ("feeds",),
    ("adapters",),
    ("session",),
    ("replicas",),
    ("api",),
    ("backend",),
    ("training",),
    ("generation",),
    ("nn",),
    ("validation",),
    ("quantization",),
    ("torch",),
    ("bench", "deploy", "profile", "report", "single_op_models", "tune"),
    ("lab",),
    ("cli",),
    ("__main__",),
)
# Lines of each folder, as ruff formats them; "" are the files beside the folders. A budget may only
# go down, except by a commit that adds a capability and says so; that of `tests` also with a fault.
BUDGETS = {
    "": 5397, "autodiff": 1798, "cli": 3637, "cuda": 1979, "cuda_src": 15424, "distributed": 899,
    "importer": 5840, "ir": 2459, "kernels": 9698, "lower": 9452, "nn": 5161, "ops": 12565,
    "program": 10878, "report": 2378, "rewrite": 4417, "runtime": 9691, "torch": 3760,
    "training": 7841, "validation": 4825,
    "generation": 1752,
    "adapters": 1160, "quantization": 1257,
    "tests": 56445, "tools": 10855,
}  # fmt: skip
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
SOURCES = sorted(PACKAGE.rglob("*.py"))
TOOLS = PACKAGE.parent / "tools"


def module_of(path: Path) -> str:
    return layer_of(path.relative_to(PACKAGE).with_suffix("").parts)


def layer_of(parts: Sequence[str]) -> str:
    """The layer of a module, given by the parts of its name: a folder, or a folder's own folder."""
    nested = ".".join(parts[:2])
    return nested if nested in RANK else parts[0]


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All that a file is made of."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, layer of what it names) of every import statement or string, wherever it stands."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "onnx_fuse":
            names = [f"onnx_fuse.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "onnx_fuse" and len(parts) > 1 and parts[1] != "__version__":
                yield node.lineno, layer_of(parts[1:])


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


def modules() -> dict[str, Path]:
    found = {".".join(("onnx_fuse", *p.relative_to(PACKAGE).with_suffix("").parts)): p
             for p in SOURCES}  # fmt: skip
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def imported(path: Path, known: Collection[str]) -> set[str]:
    """The modules that a file imports, wherever the statement stands, and for types alone too."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (whole & set(known)) | ({node.module} if whole - set(known) else set())
    return names & set(known)


def circle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Some circle of a graph; empty where there is none."""
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := walk(other, (*above, name)):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := walk(name, ()))), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside of functions and for types count; what `__init__` names for users does not."""
    known = modules()
    graph = {name: imported(path, known) - {name} for name, path in known.items()}
    graph["onnx_fuse"] = set()  # its names are imported when they are asked for
    assert circle(graph) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_no_folders_import_each_other_in_a_circle() -> None:
    """Of the files and folders in each folder; a folder with a layer of its own counts as one."""
    known = modules()
    read = {name: imported(path, known) for name, path in known.items() if name != "onnx_fuse"}
    parts = {name: place_of(name) for name in read}
    for folder in {place[:n] for place in parts.values() for n in range(len(place))}:
        graph: dict[str, set[str]] = {}
        for name, place in parts.items():
            for other in {name, *read[name] & read.keys()}:
                inside = [p[: len(folder) + 1] for p in (place, parts[other])]
                if all(p[:-1] == folder for p in inside):
                    own, its = (p[-1] for p in inside)
                    graph.setdefault(own, set()).update({its} - {own})
                    graph.setdefault(its, set())
        assert circle(graph) == [], ".".join(folder)


def place_of(module: str) -> tuple[str, ...]:
    """The folders that a module is in, and its own name."""
    parts = module.removeprefix("onnx_fuse.").split(".")
    layer = layer_of(parts)
    return (layer, *parts[layer.count(".") + 1 :])


def test_a_reason_is_in_the_table_and_has_the_values_of_its_wording() -> None:
    calls = [c for path in SOURCES for c in nodes(path) if isinstance(c, ast.Call) and c.args]
    made = {
        (c.args[0].value, *sorted(str(k.arg) for k in c.keywords))
        for c in calls
        if isinstance(c.func, ast.Name) and c.func.id in ("Reason", "Unserved")
        if isinstance(c.args[0], ast.Constant)
    }
    fields = {code: {f for _, f, *_ in Formatter().parse(WORDINGS[code])} for code in WORDINGS}
    assert made == {(code, *sorted(filter(None, names))) for code, names in fields.items()}


def test_no_file_is_longer_than_a_reader_keeps_in_mind() -> None:
    root = PACKAGE.parent
    files = [p for name in ("onnx_fuse", "tests", "tools") for p in (root / name).rglob("*.py")]
    long = {p.name: n for p in files if (n := len(p.read_text().splitlines())) > 700}
    assert not long


def test_no_folder_is_larger_than_its_budget() -> None:
    lines = dict.fromkeys(BUDGETS, 0)
    for path in SOURCES:
        folder, *inside = path.relative_to(PACKAGE).parts
        lines[folder if inside else ""] += len(path.read_text().splitlines())
    for path in (PACKAGE.parent / "cuda_src").rglob("*.cu*"):
        lines["cuda_src"] += len(path.read_text().splitlines())
    for folder in ("tests", "tools"):
        for path in (PACKAGE.parent / folder).rglob("*.py"):
            lines[folder] += len(path.read_text().splitlines())
    over = {name: count for name, count in lines.items() if count > BUDGETS[name]}
    assert not over, f"more lines than BUDGETS allows: {over}"


def test_a_tool_has_what_others_import_of_it() -> None:
    tools = {path.stem: ast.parse(path.read_text()) for path in TOOLS.glob("*.py")}
    names = {
        tool: {getattr(node, "name", getattr(node, "id", None)) for node in ast.walk(tree)}
        for tool, tree in tools.items()
    }
    wanted = [
        (node.module, alias.name)
        for node in (node for tree in tools.values() for node in ast.walk(tree))
        if isinstance(node, ast.ImportFrom) and node.module in tools
        for alias in node.names
    ]
    assert wanted
    assert [(tool, name) for tool, name in wanted if name not in names[str(tool)]] == []


def test_the_rule_notices_an_import_from_below(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "def f():\n    from onnx_fuse import cli\n    import onnx_fuse.validation\n"
        "    importlib.import_module('onnx_fuse.training.fit')\n"
    )
    assert list(imports(path)) == [(2, "cli"), (3, "validation"), (4, "training")]


FIRST_RUN = """
from onnx_fuse import InferenceSession
from onnx_fuse.autodiff.load import load
from onnx_fuse import rewrite
from onnx_fuse.lower.walk import lower
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime import executable
m = load(text_model('''agraph (float[N,8] x) => (float[N,4] y) <float[8] s = {1,1,1,1,1,1,1,1},
  float[8] b = {0,0,0,0,0,0,0,0}, float[8,4] w = {%s1}, float[4] c = {1,2,3,4}>
  { n = LayerNormalization(x, s, b) y = Gemm(n, w, c) }''' % ('1,' * 31)))
rewrite.optimize(m)
assert len(lower(m, {'x': ((2, 8), 'float32')}, CHIPS['H200']).calls) == 1
"""
"""What `InferenceSession(device="cuda")` and a first run import, but for the driver's calls."""
LOADED = {
    "the package and its help": (
        "import onnx_fuse\nfrom onnx_fuse import cli\nassert cli.run_command(['--help']) == 0",
        "numpy onnx onnx_ir onnxruntime onnxscript cuda",
    ),
    "onnxruntime's sessions": ("import onnx_fuse.runtime.ort", "sympy.core"),
    "what commands time with": ("import onnx_fuse.bench", "sympy.core"),
    "a first run on a GPU": (
        FIRST_RUN,
        "sympy.core onnxscript onnxruntime onnx.reference rich typer cuda.core "
        "cuda.bindings.nvrtc safetensors",
    ),
    "programs of the cache": (
        "from onnx_fuse import cache\n"
        "from onnx_fuse.runtime import precompile, executable, specialize",
        "onnx_fuse.lower",
    ),
    "optimize": ("import onnx_fuse.rewrite", "sympy.core onnx_fuse.program.problems"),
    "the trainer": ("import onnx_fuse.training.trainer", "sympy.core"),
    **{
        f"onnx_fuse.{name}": (f"import onnx_fuse\nonnx_fuse.{name}", "sympy.core")
        for name in ("deploy", "generate", "optim", "plugins", "quantize", "validate")
    },
}
"""Code, and what it does not import."""


@pytest.mark.parametrize("what", LOADED)
def test_what_is_imported_first_loads_nothing_heavy(what: str) -> None:
    code, heavy = LOADED[what]
    names = python(f"{code}\nimport sys\nprint(*sys.modules)").splitlines()[-1].split()
    assert not [n for n in names for h in heavy.split() if f"{n}.".startswith(f"{h}.")]


def test_sympy_comes_when_it_is_used_and_only_for_onnx_ir() -> None:
    code = (
        "import sys, onnx_fuse\n"
        "before = set(sys.modules)\n"
        "from onnx_fuse.importer import load\n"
        "import onnx_ir\n"
        "early = 'sympy' in sys.modules\n"
        "d = onnx_ir.SymbolicDim('max(N, 3) + M') * 2\n"
        "import sympy\n"
        "from sympy.core import Expr\n"
        "k = onnx_ir.SymbolicDim(sympy.Symbol('k'))\n"
        "ok = sympy.__file__ and isinstance(k._expr, Expr)\n"
        "print(early, d.evaluate({'N': 5, 'M': 1}), bool(ok), 'sympy' in before)\n"
    )
    assert python(code).split() == ["False", "12", "True", "False"]


def test_every_public_name_can_be_imported() -> None:
    import onnx_fuse

    for name in onnx_fuse.__all__:
        assert getattr(onnx_fuse, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = onnx_fuse.nothing
