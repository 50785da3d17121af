"""tools/performance_page.py: from the benchmarks' JSON to the page and its plots."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

TOOL = Path(__file__).parents[1] / "tools" / "performance_page.py"
ROW = {
    "shape": [512, 768, 3072],
    "forward": {"cublas": 10.0, "gemm": 9.0, "fused": 11.2},
    "training": {"cublas": 30.0, "fused": 39.0},
}
BERT = {"shape": [1, 128], "us": {"onnx_fuse": 423.4}, "launches": 91,
        "kernels": {"Gemm m=128": [12, 50.0], "Gemm m=1": [12, 20.5]}}  # fmt: skip


ARM = {"step": 0.03, "bytes": 2**33, "first": 3.0}
TRAIN = {"model": "gpt2", "torch": {**ARM, "step": 0.04}, "cold": {**ARM, "graph": 0.029},
         "warm": {"error": "out of memory"}}  # fmt: skip


def page(docs: Path, **found: object) -> str:
    (docs / "performance").mkdir(parents=True, exist_ok=True)
    for name, row in found.items():
        head = {"gpu": "NVIDIA H200", "date": "2026-11-21", "torch": "2.11", "rows": [row]}
        (docs / "performance" / f"{name}.json").write_text(json.dumps(head))
    subprocess.run([sys.executable, TOOL, "--docs", docs], check=True)
    return (docs / "performance.md").read_text()


def test_page_and_plots_show_what_was_measured(tmp_path: Path) -> None:
    text = page(tmp_path, fused=ROW, bert=BERT)
    assert "| 512, 768, 3072 | 10.0 | 0.90 | 1.12 | 1.30 |" in text
    assert "| 1, 128 | 423 | 91 |" in text
    assert "| Gemm | 24 | 70.5 |" in text
    ratios, roofline = (
        ElementTree.parse(tmp_path / "performance" / f"{name}.svg").getroot()
        for name in ("ratios", "roofline")
    )
    colours = [r.get("fill") for r in ratios.iter("{http://www.w3.org/2000/svg}rect")]
    assert colours.count("#1f5fa8") == 2  # the legend's and the bar's
    assert len(list(roofline.iter("{http://www.w3.org/2000/svg}circle"))) == 2


def test_either_benchmark_may_be_absent(tmp_path: Path) -> None:
    assert "BERT" not in page(tmp_path, fused=ROW)
    assert "LayerNorm" not in page(tmp_path / "other", bert=BERT)


def test_training_steps_stand_beside_torch(tmp_path: Path) -> None:
    text = page(tmp_path, train=TRAIN)
    assert "| gpt2 | 30.00 | 40.00 | 0.75 | 8.0 | 8.0 | 3.0 | 3.0 |" in text
    alone = {"model": "mlp", "cold": ARM}
    assert "| mlp | 30.00 | 8.0 | 3.0 |" in page(tmp_path, train=alone)
