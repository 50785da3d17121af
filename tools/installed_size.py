"""Size of a fresh installation, by package: files, and the byte code that pip makes of them.

    python tools/installed_size.py            # ".[cuda13]"
    python tools/installed_size.py cublaslt   # of another extra
    python tools/installed_size.py --runtime  # of onnx-fuse-runtime

MB are 10^6 bytes; pip itself is left out.
"""

import argparse
import subprocess
import tempfile
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(package: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "install", "-q", package]
        subprocess.run(pip, check=True)
        rows = {}
        for site in Path(folder).glob("lib*/python*/site-packages"):
            for package in metadata.distributions(path=[str(site)]):
                sizes = [0, 0]
                for file in package.files or ():
                    sizes[file.suffix == ".pyc"] += Path(str(file.locate())).stat().st_size
                rows[f"{package.metadata['Name']} {package.version}"] = sizes
        rows = {k: v for k, v in rows.items() if k.split()[0] not in ("pip", "setuptools")}
        rows["in all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
        print(f"{'MB':36}{'files':>8}{'byte code':>12}")
        for name, (files, code) in sorted(rows.items(), key=lambda row: -sum(row[1])):
            print(f"{name:36}{files / 1e6:8.1f}{code / 1e6:12.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("extra", nargs="?", default="cuda13")
    parser.add_argument("--runtime", action="store_true", help="what runs compiled files alone")
    args = parser.parse_args()
    main(str(ROOT / "runtime_dist") if args.runtime else f"{ROOT}[{args.extra}]")
