"""docs/performance.md and its plots, from what the benchmarks measured.

    python tools/bench_fused.py --json docs/performance/fused.json
    python tools/bench_bert.py --json docs/performance/bert.json
    python tools/bench_train.py --json docs/performance/train.json
    python tools/performance_page.py [--docs FOLDER]

Writes performance.md and performance/{ratios,roofline}.svg in FOLDER; each JSON may be absent.
"""

import argparse
import json
import math
import subprocess
from datetime import date
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from _paths import ROOT

from onnx_fuse.program.problem import CHIPS, Hardware

Row = dict[str, Any]
# (part of a row, arm) -> what the page calls it, its colour
ARMS = {
    ("forward", "compile"): ("torch.compile", "#9aa0a6"),
    ("forward", "gemm"): ("Linear, no norm", "#80b1d3"),
    ("forward", "fused"): ("LayerNorm+Linear", "#1f5fa8"),
    ("training", "fused"): ("forward + backward", "#d9822b"),
    ("gelu", "fused"): ("Linear+GELU", "#4d9a5b"),
    ("gelu training", "fused"): ("its forward + backward", "#a6c97c"),
}
# LayerNormalization and Gemm 8192,4096,4096 in fp16 on onnxruntime's CUDA provider: us on a rested
# H200 (2026-11). A chip that runs hot is slower.
ORT_FP16 = 600.0


def save(path: Path, gpu: str, torch: str, rows: list[Row]) -> None:
    """Write what a benchmark measured, with the commit where this is a checkout."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    asked = subprocess.run(git, capture_output=True, text=True, check=False)
    commit = {"commit": asked.stdout.strip()} if asked.returncode == 0 else {}
    found = {"gpu": gpu, "date": f"{date.today():%Y-%m-%d}", "torch": torch, **commit, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def ratio(row: Row, part: str, arm: str) -> float | None:
    """The arm's time over bare cuBLAS's, None where it was not measured."""
    us = row.get(part) or {}
    return us[arm] / us["cublas"] if arm in us else None


def verdict(rows: list[Row], part: str, arm: str) -> list[str]:
    """The arm's geometric mean and worst; nothing where it was not measured."""
    values = [v for row in rows if (v := ratio(row, part, arm))]
    if not values:
        return []
    name = ARMS[part, arm][0] if (part, arm) in ARMS else f"{part} as {arm}"
    return [f"{name}: geometric mean {geometric_mean(values):.3f}, worst {max(values):.2f}"]


def fp16_verdict(row: Row) -> list[str]:
    """LayerNorm+Linear in fp16, on a warm chip and on a rested one, beside onnxruntime's time."""
    us, lines = row.get("fp16") or {}, []
    bare = {"fused": row["forward"]["cublas"], "rested fused": us.get("rested cublas bf16")}
    for arm, cublas in bare.items():
        if arm in us:
            lines.append(
                f"LayerNorm+Linear in fp16 on a {'rested' if 'rested' in arm else 'warm'} chip: "
                f"{us[arm]:.0f} us, where cuBLAS's Gemm takes {cublas:.0f} in bf16"
            )
    if lines:
        lines.append(f"the two operators in fp16 on onnxruntime, rested chip: {ORT_FP16:.0f} us")
    return lines


def svg(width: int, height: int, parts: list[str]) -> str:
    """A drawing on white."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" fill="#222">'
    )
    back = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return "\n".join([head, back, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = "#ccc", dash: str = "") -> str:
    style = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}"{style}/>'


def legend(names: list[tuple[str, str]]) -> list[str]:
    """Rows of three at the top."""
    parts = []
    for i, (name, colour) in enumerate(names):
        x, y = 130 + i % 3 * 220, 16 + i // 3 * 16
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(text(x + 14, y, name))
    return parts


def ratio_plot(rows: list[Row]) -> str:
    """Bars of time over cuBLAS's, a group a shape; the dashed line is cuBLAS."""
    shown = [key for key in ARMS if any(ratio(r, *key) for r in rows)]
    left, right, bar = 130, 800, 9
    most = max(r for row in rows for key in shown if (r := ratio(row, *key)))
    top = max(1.5, math.ceil(most * 4) / 4)

    def at(value: float) -> float:
        return left + (right - left) * value / top

    parts = legend([ARMS[key] for key in shown])
    y = 50.0
    for row in rows:
        parts.append(
            text(left - 8, y + bar * len(shown) / 2 + 4, ", ".join(map(str, row["shape"])), "end")
        )
        for key in shown:
            value = ratio(row, *key)
            if value is not None:
                size = f'width="{at(value) - left:.1f}" height="{bar - 1}"'
                parts.append(f'<rect x="{left}" y="{y:.1f}" {size} fill="{ARMS[key][1]}"/>')
            y += bar
        y += 10
    for k in range(int(top * 4) + 1):
        if k % 2 == 0:
            parts.append(text(at(k / 4), y + 14, f"{k / 4:g}", "middle"))
    parts += [line(at(1), 42, at(1), y, "#c00", "5,3"), line(left, y, right, y, "#888")]
    parts.append(
        text((left + right) / 2, y + 30, "time / cuBLAS's bare Gemm (shorter is faster)", "middle")
    )
    return svg(830, int(y + 40), parts)


def roofline_plot(rows: list[Row], hw: Hardware) -> str:
    """TFLOP/s over FLOP/byte, both logarithmic, under what the memory and the tensor cores give."""
    left, right, high, low = 60, 800, 40, 420
    peak, band = hw.rate("bfloat16") / 1e12, hw.bandwidth / 1e12
    span_x, span_y = (0.5, 4000.0), (0.5, 1000.0)

    def x_at(v: float) -> float:
        return left + (right - left) * math.log(v / span_x[0]) / math.log(span_x[1] / span_x[0])

    def y_at(v: float) -> float:
        return low - (low - high) * math.log(v / span_y[0]) / math.log(span_y[1] / span_y[0])

    parts = []
    for value in (1.0, 10.0, 100.0, 1000.0):
        x, y = x_at(value), y_at(value)
        parts += [line(x, high, x, low), text(x, low + 16, f"{value:g}", "middle")]
        parts += [line(left, y, right, y), text(left - 6, y + 4, f"{value:g}", "end")]
    knee = peak / band
    parts.append(line(x_at(span_x[0]), y_at(band * span_x[0]), x_at(knee), y_at(peak), "#222"))
    parts.append(line(x_at(knee), y_at(peak), right, y_at(peak), "#222"))
    parts.append(text(right, y_at(peak) - 6, f"{peak:g} TFLOP/s", "end"))
    parts.append(text(x_at(1.2), y_at(band * 1.2) - 10, f"{band:g} TB/s"))
    points = [
        ("forward", "cublas", "cuBLAS, bare", "#c00"),
        ("forward", "fused", *ARMS["forward", "fused"]),
    ]
    for part, arm, _, colour in points:
        for row in rows:
            if arm not in row.get(part, {}):
                continue
            m, k, n = row["shape"]
            flops, moved = 2 * m * n * k, 2 * (m * k + k * n + m * n)
            spot = f'cx="{x_at(flops / moved):.1f}" cy="{y_at(flops / row[part][arm] / 1e6):.1f}"'
            filled = "none" if arm == "cublas" else colour
            parts.append(
                f'<circle {spot} r="5" fill="{filled}" stroke="{colour}" stroke-width="1.5"/>'
            )
    parts += legend([(name, colour) for _, _, name, colour in points])
    parts.append(
        text((left + right) / 2, low + 34, "FLOP per byte of operands and result", "middle")
    )
    parts.append(text(left - 30, high - 12, "TFLOP/s"))
    return svg(830, 470, parts)


def fused_page(found: Row, hw: Hardware) -> list[str]:
    rows = found["rows"]
    shown = [key for key in ARMS if any(ratio(r, *key) for r in rows)]
    lines = [
        "## LayerNorm + Linear, Linear + GELU", "",
        "bf16; each number is a time over that of cuBLAS's bare Gemm (three bare Gemms for "
        "forward + backward) in the same run.", "",
        "![times over cuBLAS's](performance/ratios.svg)", "",
        "| M, K, N | cuBLAS us | " + " | ".join(ARMS[key][0] for key in shown) + " |",
        "|---" * (len(shown) + 2) + "|",
    ]  # fmt: skip
    for row in rows:
        each = [ratio(row, *key) for key in shown]
        cells = [f"{v:.2f}" if v else "" for v in each]
        base = f"{row['forward']['cublas']:.1f}"
        lines.append(f"| {', '.join(map(str, row['shape']))} | {base} | {' | '.join(cells)} |")
    means = []
    for key in shown:
        values = [v for r in rows if (v := ratio(r, *key))]
        means.append(f"{geometric_mean(values):.2f}")
    lines += [f"| geometric mean | | {' | '.join(means)} |", ""]
    for row in rows:
        if "fp32" in row:
            us, shape = row["fp32"], ", ".join(map(str, row["shape"]))
            three, six = us["bf16x3"] / us["cublas"], us["bf16x6"] / us["cublas"]
            lines.append(
                f"- fp32 {shape}: cuBLAS IEEE {us['cublas']:.0f} us; as three Gemms in bf16 (error "
                f"4e-6) {three:.2f} of that, as six (as accurate as fp32) {six:.2f}."
            )
    lines += [f"- {line}." for row in rows for line in fp16_verdict(row)]
    lines += ["", "How far from the machine's limits (fused, statistics included):", "",
              "![roofline](performance/roofline.svg)", ""]  # fmt: skip
    return lines


def bert_page(found: Row) -> list[str]:
    peer = all("compile" in row["us"] for row in found["rows"])
    lines = [
        "## BERT-base, fp16", "",
        "One CUDA graph launch a run"
        + ('; torch.compile, mode "reduce-overhead", in the same run.' if peer else "."), "",
        "| batch, tokens | us | launches |" + " torch.compile us |" * peer,
        "|---|---|---|" + "---|" * peer,
    ]  # fmt: skip
    for row in found["rows"]:
        us, shape = row["us"], ", ".join(map(str, row["shape"]))
        line = f"| {shape} | {us['onnx_fuse']:.0f} | {row['launches']} |"
        lines.append(line + (f" {us['compile']:.0f} |" if peer else ""))
    for row in found["rows"]:
        lines += ["", f"Kernels by themselves, batch {row['shape'][0]}:", "",
                  "| kernel | calls | us |", "|---|---|---|"]  # fmt: skip
        kinds: dict[str, list[float]] = {}
        for name, (calls, us) in row["kernels"].items():
            kind = kinds.setdefault(name.split()[0], [0, 0.0])
            kind[0], kind[1] = kind[0] + calls, kind[1] + us
        for name, (calls, us) in sorted(kinds.items(), key=lambda item: -item[1][1]):
            lines.append(f"| {name} | {calls:.0f} | {us:.1f} |")
    return [*lines, ""]


def train_page(found: Row) -> list[str]:
    def column(arm: str, key: str, scale: float, digits: int) -> list[str]:
        arms = [row.get(arm) or {} for row in rows]
        return [f"{one[key] * scale:.{digits}f}" if key in one else "" for one in arms]

    rows = [row for row in found["rows"] if "step" in (row.get("cold") or {})]
    ratios = [
        f"{row['cold']['step'] / row['torch']['step']:.2f}"
        if "step" in (row.get("torch") or {}) else "" for row in rows
    ]  # fmt: skip
    columns = {
        "model": [row["model"] for row in rows],
        "ms": column("cold", "step", 1e3, 2),
        "torch.compile ms": column("torch", "step", 1e3, 2),
        "ratio": ratios,
        "GiB": column("cold", "bytes", 2**-30, 1),
        "torch.compile GiB": column("torch", "bytes", 2**-30, 1),
        "first step s, cold": column("cold", "first", 1, 1),
        "warm": column("warm", "first", 1, 1),
        "torch.compile": column("torch", "first", 1, 1),
    }
    commit = f", commit `{found['commit']}`" if "commit" in found else ""
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    return [
        "## Training steps", "",
        f"`Trainer.step` with AdamW ({found['date']}{commit}), and torch.compile of the same "
        "network with autocast and fused AdamW in the same run, each in a process of its own. "
        "Memory, where it was measured, is what the GPU has in use; the first step is from the "
        "model in memory to the first loss, with an empty cache and with a filled one.", "",
        f"| {' | '.join(columns)} |", "|---" * len(columns) + "|",
        *(f"| {' | '.join(cells)} |" for cells in zip(*columns.values(), strict=True)), "",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    docs = parser.parse_args().docs
    folder = docs / "performance"
    found = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}
    if not found:
        parser.error(f"no benchmark's JSON in {folder}")
    any_run = next(iter(found.values()))
    hw = next((chip for key, chip in CHIPS.items() if key in any_run["gpu"]), CHIPS["H200"])
    lines = [
        "# Performance", "",
        "This page has measured times, as tables and plots. These commands measure them on your "
        "GPU, and write the page anew:", "",
        "<!-- not run: needs a GPU -->", "```sh",
        *(f"python tools/bench_{name}.py --json docs/performance/{name}.json" for name in found),
        "python tools/performance_page.py", "```", "",
        f"Measured on one {any_run['gpu']}, {any_run['date']}, torch {any_run['torch']}"
        f"{', commit `' + any_run['commit'] + '`' if 'commit' in any_run else ''}; medians "
        "of CUDA-graph replays over operands larger than L2, in turns with the peer.",
        "",
    ]  # fmt: skip
    if "fused" in found:
        rows = found["fused"]["rows"]
        (folder / "ratios.svg").write_text(ratio_plot(rows))
        (folder / "roofline.svg").write_text(roofline_plot(rows, hw))
        lines += fused_page(found["fused"], hw)
    if "bert" in found:
        lines += bert_page(found["bert"])
    if "train" in found:
        lines += train_page(found["train"])
    (docs / "performance.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
