"""Compiled training steps without a GPU: what a folder holds, and what a Trainer takes from it."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGpu
from support import Cli, normal
from test_deploy import H200, told

from onnx_fuse import Trainer, deploy, optim
from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import text_model
from onnx_fuse.lower.walk import Lowerer
from onnx_fuse.program.call import Program
from onnx_fuse.program.problem import Collective
from onnx_fuse.runtime.deployed import Deployed

NUMBERS = ", ".join(map(str, np.linspace(-1, 1, 30)))
TEXT = (
    f"agraph (float[N,6] x) => (float[N,5] y) <float[6,5] w = {{{NUMBERS}}}> "
    "{ p = MatMul(x, w) y = Tanh(p) }"
)


def trainer(text: str = TEXT, **more: Any) -> Trainer:
    options = {"loss": "mse", "optimizer": optim.AdamW(lr=0.05), "clip_norm": 1.0, **more}
    return Trainer(text_model(text), **options)


def batch(rows: int) -> dict[str, np.ndarray]:
    return normal({"x": (rows, 6), "labels": (rows, 5)}, rows)


def compiled(folder: Path, **more: Any) -> dict[str, deploy.Compiled]:
    made = trainer(device="cuda", hardware=H200, **more)
    shapes = [{"x": (-1, 6), "labels": (-1, 5)}]
    # labels have the batch of x by its name
    return deploy.compile_training(made, folder, shapes=shapes, ranges={"N": (2, 12)})


@pytest.mark.usefixtures("no_compiler")
def test_a_trainer_launches_compiled_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mode in any size of the range, in place of a lowering; `tests/gpu` has the numbers."""
    made = compiled(tmp_path / "steps", accumulate=2, ema=0.5)
    assert sorted(made) == ["accumulate", "average", "evaluate", "update"]
    files = {mode: Deployed(tmp_path / "steps" / f"{mode}.fused") for mode in made}

    def original(shapes: Any) -> Program:
        given = {n: (tuple(s), d) for n, (s, d) in shapes.items()}
        for mode, file in files.items():
            for i, entry in enumerate(file.entries):
                if entry.numbers(given) is not None:
                    program = made[mode].programs[H200.name][i]
                    wanted.append((mode, sum(len(c.launches) for c in program.calls)))
                    return program
        raise AssertionError(shapes)

    wanted: list[tuple[str, int]] = []
    gpu, launched = FakeGpu().use(monkeypatch), list[int]()
    monkeypatch.setattr(gpu, "_run", lambda kernel, operands: launched.append(kernel))
    told(gpu, monkeypatch, original)
    monkeypatch.setattr(Lowerer, "run", None)
    run = trainer(device="cuda", compiled=tmp_path / "steps", accumulate=2, ema=0.5)
    ends = [("accumulate", 3), ("update", 7), ("accumulate", 12), ("update", 2), ("evaluate", 5)]
    for mode, rows in [*ends, ("average", 4)]:
        del launched[:], wanted[:]
        if mode in ("evaluate", "average"):
            run.evaluate(batch(rows), ema=mode == "average")
        else:
            run.start(batch(rows))
        ((found, count),) = set(wanted)
        assert (found, count) == (mode, len(launched))
    with pytest.raises(UsageError, match="with N from 2 to 12"):
        run.evaluate(batch(13))


OTHERS: dict[str, dict[str, Any]] = {
    "another optimizer": {"optimizer": optim.SGD(lr=0.05)},
    "another loss": {"loss": "l1"},
    "another model": {"text": TEXT.replace("Tanh", "Sigmoid")},
    "no clipping": {"clip_norm": None},
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.usefixtures("no_compiler")
def test_steps_of_another_run_are_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(tmp_path)
    FakeGpu().use(monkeypatch)
    with pytest.raises(UsageError, match="from another model or with other settings"):
        trainer(device="cuda", compiled=tmp_path, **OTHERS[case]).step(batch(3))


@pytest.mark.usefixtures("no_compiler")
def test_steps_of_ranks_are_compiled_with_their_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's Trainer takes them, whichever rank it is, and makes NCCL's calls."""
    of_two = trainer(device="cuda", hardware=H200, distributed=2, reduce_dtype="bf16")
    built = deploy.compile_training(of_two, tmp_path, shapes=[{"x": (4, 6), "labels": (4, 5)}])
    loaded = Deployed(tmp_path / "update.fused")
    program = loaded.made(loaded.entries[0].shapes, H200).program
    written, read = (
        [c.problem for c in p.calls if isinstance(c.problem, Collective)]
        for p in (built["update"].programs[H200.name][0], program)
    )
    assert read == written
    assert [(p.kind, p.ranks, p.dtypes) for p in read] == [
        ("AllReduce", 2, dtypes) for dtypes in [("float64",), ("float32",), ("bfloat16",)]
    ]
    made: list[str] = []
    ranks = SimpleNamespace(size=2, enqueue=lambda kind, parts, stream: made.append(kind))
    watch = SimpleNamespace(step=lambda key, begin: begin())
    world = SimpleNamespace(rank=1, size=2, local_rank=0, watch=watch, agree=lambda *_: None)
    monkeypatch.setattr(FakeGpu().use(monkeypatch), "_run", lambda *_: None)
    for owner, name, value in (
        ("training.trainer", "world", world),
        ("distributed.nccl", "connect", None),
        ("distributed.nccl", "current", ranks),
    ):
        monkeypatch.setattr(f"onnx_fuse.{owner}.{name}", lambda *_, value=value: value)
    monkeypatch.setattr(Lowerer, "run", None)
    more = {"device": "cuda", "compiled": tmp_path, "reduce_dtype": "bf16"}
    with pytest.raises(UsageError, match="distributed is 3, but 2 ranks have come"):
        trainer(distributed=3, **more)
    run = trainer(distributed=True, **more)
    run.start(batch(4))
    assert made == ["AllReduce"] * 3
    del run
    gc.collect()  # while there is a GPU


def test_what_cannot_be_compiled_or_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="give it hardware="):
        deploy.compile_training(trainer(), tmp_path)
    with pytest.raises(UsageError, match="for a GPU"):
        trainer(compiled=tmp_path)
    for ranks in (True, 1):
        with pytest.raises(UsageError, match="for a number of them"):
            trainer(device="cuda", hardware=H200, distributed=ranks)
    with pytest.raises(UsageError, match="does not run them"):
        trainer(device="cuda", hardware=H200).step(batch(3))
    FakeGpu().use(monkeypatch)
    with pytest.raises(UsageError, match=r"has no update\.fused"):
        trainer(device="cuda", compiled=tmp_path).step(batch(3))


@pytest.mark.usefixtures("no_compiler")
def test_the_command_compiles_training(
    cli: Cli, saved: Callable[..., Path], tmp_path: Path
) -> None:
    model, config = saved(TEXT), tmp_path / "step.toml"
    settings = 'loss = "mse"\noptimizer = "sgd"\nclip-norm = 1.0\nepochs = 3\n'
    config.write_text(settings + 'precision = "bf16"\n')
    folder, report = tmp_path / "steps", tmp_path / "r.json"
    arguments = ("compile", model, "--train", config, "--target", "h200", "--dim", "N=2..9")
    cli.done(*arguments, "-o", folder, "--json", report)
    files = ["copies.fused", "evaluate.fused", "update.fused"]
    assert sorted(p.name for p in folder.iterdir()) == files
    assert json.loads(report.read_text())["kernels"]["update"] > 3
    # the same settings: the graph that a run of them has
    run = Trainer(
        model, loss="mse", optimizer=optim.SGD(), clip_norm=1.0, device="cuda", hardware=H200,
        loss_options={}, precision="bf16",
    )  # fmt: skip
    graph, _ = run.graphs()["update"]
    manifest = Deployed(folder / "update.fused").container.manifest
    assert manifest["graph"] == deploy.graph_digest(graph)
    config.write_text(config.read_text() + "gpus = 2\n")
    cli.done(*arguments, "-o", folder)
    manifest = Deployed(folder / "update.fused").container.manifest
    assert "ranks.counts" in {name for name, *_ in manifest["inputs"]}
    for given, message in (
        ((*arguments, "--target", "a100"), "--train compiles for one GPU"),
        (arguments[:-2], "axis 0 is dynamic"),
    ):
        done = cli(*given, "-o", folder)
        assert done.code == 2
        assert message in done.err
