"""tools/bench_gpus.py and tools/scale_model.py: figures, failures, and the table that they make."""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_gpus
import pytest
import scale_model
from rank_program import step_program

from onnx_fuse.distributed import buckets
from onnx_fuse.program.passes.recompute import Lifetimes
from onnx_fuse.program.problem import Collective

FOUND: dict[str, dict[str, Any]] = {
    "one": {"ms": 23.4, "backward": 14.5, "states": 1000 * 2**20},
    "ranks": {"ms": 23.9, "exposed": 0.412, "states": 1000 * 2**20},
    "optimizer": {"ms": 24.2, "exposed": 0.5, "states": 251 * 2**20, "memory": 3000 * 2**20},
    "all": {"failed": "ended after 60 s"},
    "ddp-one": {"ms": 33.28},
    "ddp": {"ms": 37.76},
}


def test_the_table_has_each_part_and_what_follows_from_several() -> None:
    lines = bench_gpus.table(FOUND, "gpt2", 4)
    rows = [" ".join(line.split()) for line in lines]
    assert rows[1:7] == [
        "onnx-fuse 1 23.400 684 1,000",
        "onnx-fuse 4 23.900 0.979 2,678 0.412 1,000",
        'onnx-fuse, shard="optimizer" 4 24.200 0.967 2,645 0.500 251 3,000',
        'onnx-fuse, shard="all" ended after 60 s',
        "DDP, torch.compile 1 33.280 481",
        "DDP, torch.compile 4 37.760 0.881 1,695 4.480",
    ]
    assert "0.2510 of one GPU's (1 / 4 is 0.2500)" in lines[8]
    assert "ms on 4 GPUs, " in lines[9]
    assert len(lines[3]) == len(lines[0])  # the columns stand below their heads


def test_a_table_of_nothing_says_so() -> None:
    late = {"failed": "ended after 9 s"}
    lines = bench_gpus.table({"ranks": {}, "all": late}, "bert", 2)
    assert [line.split()[1:] for line in lines[1:2]] == [["not", "measured"]]
    assert lines[2].endswith("ended after 9 s")


HANGS = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(600)"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("script", "seconds", "words"),
    [(HANGS, 2.0, "ended after 2 s"), ("raise SystemExit(3)", 60.0, "code 3"), ("", 60.0, "")],
)
def test_a_part_that_hangs_is_ended_with_all_its_ranks(
    script: str, seconds: float, words: str, ranks: int, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    found = bench_gpus.started([sys.executable, "-c", script, str(pids)], ranks, seconds)
    assert words in found if words else not found
    if script == HANGS:
        for pid in pids.read_text().split():
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)


PART = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--folder") + 1])
name = sys.argv[sys.argv.index("--parts") + 1]
(folder / f"{name}.json").write_text(json.dumps({"ms": 2.0}))
raise SystemExit(int(name == "one"))
"""


def test_what_a_part_found_before_it_failed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "part.py").write_text(PART)
    monkeypatch.setattr(bench_gpus, "__file__", str(tmp_path / "part.py"))
    args = argparse.Namespace(
        gpus=1, model="gpt2", reduce="bf16", memory="", minutes=1.0,
        only=["one", "ranks", "ddp"], json=tmp_path / "found.json",
    )  # fmt: skip
    assert bench_gpus.run(args) == 1
    found = json.loads(args.json.read_text())
    failed = {"failed": "ended with exit code 1"}
    assert found == {"one": {"ms": 2.0}, "ranks": failed, "ddp": {"ms": 2.0}}
    assert "8,000" in capsys.readouterr().out  # rows/s


def test_parts_for_which_no_time_is_left_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(
        gpus=2, model="gpt2", reduce="bf16", memory="", minutes=0.0,
        only=list(bench_gpus.PARTS), json=None,
    )  # fmt: skip
    assert bench_gpus.run(args) == 1
    assert "ddp: failed left out: the time is over" in capsys.readouterr().out


def test_the_backward_is_what_stands_between_the_loss_and_the_update() -> None:
    """A step of calls that take 1 s each; those of the forward, and the update, are no part."""
    program = step_program(widths=(64, 128, 128, 128, 8))
    kernels = [c for c in program.calls if c.launches and not isinstance(c.problem, Collective)]
    instance = SimpleNamespace(program=program, profile=lambda: [(c, 1.0) for c in kernels])
    update = max(range(len(kernels)), key=lambda i: len(kernels[i].writes))
    turn = program.calls[Lifetimes(program).turn]
    forward = sum(program.calls.index(c) <= program.calls.index(turn) for c in kernels)
    assert 0 < forward < update
    found = bench_gpus.backward_share(instance)
    assert found == pytest.approx((update - forward) / len(kernels))


# ---- the model on paper ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "gpus", "seconds"),
    [
        (10**9, 1, 0.0),
        (0, 8, 12e-6),
        (370e9, 2, 1.0 + 12e-6),
        (370e9, 4, 1.5 + 12e-6),
        # eight machines: a ring within each, then an eighth of the bytes over each GPU's card
        (8 * 45e9, 64, 2 * 7 / 8 * 8 * 45 / 370 + 2 * 7 / 8 + 12e-6 + 3 * 3e-6),
    ],
)
def test_an_all_reduce_takes_the_time_of_its_links(
    nbytes: float, gpus: int, seconds: float
) -> None:
    assert scale_model.Links().all_reduce(nbytes, gpus) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("model", "numbers"), [("gpt2", 124_439_808), ("bert", 109_483_778), ("resnet50", 25_557_032)]
)
def test_the_model_has_the_gradients_of_each_network(model: str, numbers: int) -> None:
    sizes = [n for n, _ in scale_model.MODELS[model]()]
    assert sum(sizes) == numbers
    assert buckets.plan([2 * n for n in sizes])[-1] == {"resnet50": 2}.get(model, 9)


@pytest.mark.parametrize(
    ("model", "alone", "backward", "gpus", "measured"),
    [  # H200 of one machine, November 2026 (docs/distributed.md)
        ("gpt2", 28.73, 17, 1, 28.73),
        ("gpt2", 28.73, 17, 2, 29.75),
        ("bert", 5.568, 3.99, 2, 6.135),
        ("bert", 5.357, 3.98, 2, 5.888),
        ("resnet50", 9.189, 6.23, 2, 9.482),
    ],
)
def test_the_model_is_within_three_percent_of_what_was_measured(
    model: str, alone: float, backward: float, gpus: int, measured: float
) -> None:
    found, exposed = scale_model.step(model, alone, backward, gpus)
    assert found == pytest.approx(measured, rel=0.03)
    assert 0 <= exposed <= found - alone + 1e-9


def test_more_gpus_take_no_less_and_a_thousand_are_predicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["scale_model", "--step", "28.73", "--backward", "17", "--measured", "2:29.75"]
    monkeypatch.setattr(sys, "argv", given)
    scale_model.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16, 64, 256, 1024]
    times = [float(row[1]) for row in rows]
    assert times == sorted(times)
    assert rows[1][5:] == ["29.75", "ms,", "-1.7%"]
