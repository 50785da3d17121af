"""Which kernels compile to other code than at an earlier commit, so that their version is raised.

    python tools/kernel_versions.py [COMMIT]

A tuning record is of one `version` of its kernel. `tests/kernel_versions.json` holds each kernel's
version and a digest of each source's text, its includes expanded, without comments and spaces; a
test fails where a text is another. This compiles what has changed since COMMIT (HEAD) as it was and
as it is, for an H200, with the macros that each kernel has for the problems of
tests/test_kernels_compile.py. It names the kernels whose code differs while their version does not,
and exits with 1; where there are none it stores the digests and versions. It needs no GPU.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from io import BytesIO
from pathlib import Path

from _paths import ROOT
from test_kernels_compile import PROBLEMS

from onnx_fuse.cuda import nvrtc, source
from onnx_fuse.kernels import MODULES, candidates
from onnx_fuse.program.problem import CHIPS

STORED = ROOT / "tests" / "kernel_versions.json"
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


def digests() -> dict[str, str]:
    """12 hex digits of each source under cuda_src/: what is compiled, but for the macros."""
    root = source.source_root()
    texts = {str(path.relative_to(root)): path for path in sorted(root.rglob("*.cu"))}
    return {name: _digest(source.source_text(name)) for name in texts}


def _digest(text: str) -> str:
    tokens = _COMMENT.sub(lambda match: match[1] or " ", text).split()
    return hashlib.sha256(" ".join(tokens).encode()).hexdigest()[:12]


def versions() -> dict[str, int]:
    """The version of each candidate of ours, by operator and name."""
    found = {f"{op} {k.name}": k.version for op in MODULES for k in candidates(op)}
    return {name: version for name, version in found.items() if "cublaslt" not in name}


def _variants() -> dict[tuple[str, source.Defines], set[str]]:
    """(source, macros) -> the kernels that compile it, each at its best for every problem."""
    hw, kernels = CHIPS["H200"], defaultdict[tuple[str, source.Defines], set[str]](set)
    for problem in PROBLEMS:
        for kernel in candidates(problem.op):
            configs = [] if kernel.supports(problem, hw) else kernel.configs(problem, hw)
            for config in sorted(configs, key=lambda c: kernel.cost(problem, c, hw))[:1]:
                for launch in kernel.launch(problem, config, hw):
                    if not launch.of_library:
                        name = f"{problem.op} {kernel.name}"
                        kernels[launch.source, launch.defines].add(name)
    return kernels


def changed(before: Path) -> set[str]:
    """The kernels whose code is another than that of the sources in the folder `before`."""
    now = digests()
    texts = {name: source.source_text(name) for name in now}
    here, source.source_root = source.source_root, lambda: before
    source.source_text.cache_clear()
    old = {name: source.source_text(name) for name in now if (before / name).exists()}
    source.source_root = here
    source.source_text.cache_clear()
    names: set[str] = set()
    for (name, defines), kernels in _variants().items():
        if name not in old or _digest(old[name]) == now[name] or kernels <= names:
            continue  # new, untouched, or known to differ
        print(f"{name}: {', '.join(sorted(kernels))}", file=sys.stderr)
        pair = [
            nvrtc.compile(text, defines, CHIPS["H200"].arch) for text in (old[name], texts[name])
        ]
        if pair[0] != pair[1]:
            names |= kernels
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("commit", nargs="?", default="HEAD")
    commit = parser.parse_args().commit
    archive = subprocess.run(
        ["git", "archive", commit, "cuda_src"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        differ = changed(Path(folder) / "cuda_src")
    stored = json.loads(STORED.read_text())["versions"] if STORED.exists() else {}
    same = sorted(name for name in differ if versions()[name] == stored.get(name))
    for name in same:
        print(f"{name}: its code is another than at {commit}: raise its version")
    if not same:
        lines = {"sources": digests(), "versions": versions()}
        STORED.write_text(json.dumps(lines, indent=0) + "\n")
    return int(bool(same))


if __name__ == "__main__":
    sys.exit(main())
