"""What a process of tests/test_distributed.py does: `python rank_worker.py TASK FOLDER`.

With RANK in the environment it is one of several ranks, else it accumulates as many batches. CASES
and DEVICE name what it trains, and on what; RANKS is the number of ranks. COMPILED names the cases
whose steps they compile first, BUDGET those of the least possible memory.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import convnet
import mlp

import onnx_fuse as of
from onnx_fuse import deploy
from onnx_fuse.errors import DeviceError
from onnx_fuse.program.problem import Hardware
from onnx_fuse.training.fit import start_or_resume

RANKS = int(os.environ.get("RANKS", "2"))
STEPS, ROWS = 50, 4
WIDTHS = (16, 256, 5)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip_norm": 0.5},
    "accumulate": {"accumulate": 2},
    "masked": {},
    "weights": {"loss_options": {"weight": [1.0, 2.0, 0.5, 1.0, 3.0]}},
    "sum": {"loss_options": {"reduction": "sum"}, "optimizer": of.optim.AdamW(lr=1e-4)},
    "fp16": {"precision": "fp16", "loss_scale": 1024.0},
    "overflow": {"precision": "fp16", "loss_scale": 2.0**21},
    "low": {"reduce_dtype": "bf16", "optimizer": of.optim.SGD(lr=0.1)},
    "batchnorm": {"sync_batchnorm": True},
    "sharded": {"shard": "optimizer", "clip_norm": 0.5},
    "spread": {"shard": "all", "clip_norm": 0.5, "accumulate": 2},
    "adapters": {"lora": of.Lora(4, merged=True), "trainable": ["*.bias"], "shard": "all"},
}


WIDE = {"fp16": 3e-2, "overflow": 3e-2, "low": 4e-3}
"""What curves may differ by from those of one process, of cases that round to fewer digits.

In float16 each batch's own products are rounded to three digits. bfloat16 rounds each rank's
gradient by 2^-9, and 50 steps of SGD at 0.1 add up to 1e-3 of it. With AdamW in place of SGD, 17
of 4,096 weights were off by 0.011, half a step, on two CPUs and on two GPUs alike: where the
gradients of two ranks nearly cancel, their rounding decides the sign of the step.
"""

OF_RANKS = ("shard", "sync_batchnorm", "reduce_dtype")
"""What one process is not given."""


def batches(case: str) -> list[dict[str, np.ndarray]]:
    """The batches of all ranks together; in "masked" all labels of a rank may be ignored."""
    rng = np.random.default_rng(1)
    found = []
    for step in range(STEPS):
        shape = (3, 8, 8) if case == "batchnorm" else (WIDTHS[0],)
        x = rng.normal(size=(RANKS * ROWS, *shape)).astype(np.float32)
        if case == "overflow":  # in float16 the first rank's gradients are beyond its range first
            x[:ROWS] *= 8
        labels = rng.integers(0, WIDTHS[-1], RANKS * ROWS)
        if case == "masked":
            labels[: step % (ROWS + 1)] = -100
        found.append({"x": x, "labels": labels})
    return found


def trainer(case: str, **more: Any) -> of.Trainer:
    given = {"optimizer": of.optim.AdamW(lr=1e-2), **CASES[case], **more}
    given["device"] = os.environ.get("DEVICE", "cpu")
    model = mlp.build(mlp.Config(WIDTHS))
    if case == "batchnorm":
        model = convnet.build(convnet.Config(classes=WIDTHS[-1], width=4, training=True))
    if "distributed" in more and case == os.environ.get("BUDGET"):
        given["memory"] = "min"
    if "distributed" in more and case in os.environ.get("COMPILED", "").split(","):
        hardware = Hardware.detect(int(os.environ["RANK"]))
        alone = {**given, "hardware": hardware, "distributed": RANKS}
        given["compiled"] = folder = tempfile.mkdtemp()
        shapes = [{"x": (ROWS, WIDTHS[0]), "labels": (ROWS,)}]
        made = of.Trainer(model, loss="cross_entropy", **alone)
        deploy.compile_training(made, folder, shapes=shapes)
    return of.Trainer(model, loss="cross_entropy", **given)


def curves(folder: Path) -> None:
    """The losses and weights of every case: of all ranks, and of one process."""
    ranked = "RANK" in os.environ
    result: dict[str, np.ndarray] = {}
    for case in os.environ.get("CASES", ",".join(CASES)).split(","):
        given = CASES[case]
        own = {k: v for k, v in given.items() if k not in OF_RANKS}
        # counts differ, or statistics are of all rows: all rows are one batch then
        whole = case in ("masked", "weights", "sum", "batchnorm")
        parts = 1 if whole else RANKS
        if ranked:
            t = trainer(case, distributed=True)
        else:
            again = parts * own.get("accumulate", 1)
            alone = {"shard": "", "sync_batchnorm": False, "reduce_dtype": "fp32"}
            t = trainer(case, accumulate=again, **alone)
        losses = []
        for batch in batches(case):
            if ranked:
                own_rows = slice(ROWS * t.world.rank, ROWS * (t.world.rank + 1))
                losses.append(float(t.step({k: a[own_rows] for k, a in batch.items()})))
                continue
            pieces = (
                [slice(None)] if whole else [slice(ROWS * i, ROWS * i + ROWS) for i in range(RANKS)]
            )
            each = [float(t.step({k: a[p] for k, a in batch.items()})) for p in pieces]
            losses.append(float(np.mean(each)))
        result |= {f"{case} {name}": array for name, array in t.weights().items()}
        result[f"{case} losses"] = np.array(losses)
        if case == "overflow":
            result[f"{case} scale"] = np.array(t._device.array("loss_scale"))
        if case in ("sharded", "spread"):
            states = [s for s in t.spec().states if s.kind in ("slot", "parameter")]
            result[f"{case} bytes"] = np.array(sum(s.initial.nbytes for s in states))
    np.savez(folder / f"{os.environ.get('RANK', 'one')}.npz", **result)


def never_ends(t: of.Trainer) -> None:
    """Give the GPU work that never ends, ahead of the next step."""
    from onnx_fuse.runtime import device

    stream, flag = t._device._states._home.stream, device.Pinned(4)
    flag.array[...] = 0
    equal = device.bindings().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    waits = device.bindings().cuStreamWaitValue32(stream.raw, flag.address, 1, int(equal))
    device.check(waits, "a wait for ever")
    t.kept = flag  # type: ignore[attr-defined]


def fault(folder: Path, kind: str) -> None:
    """Rank 1 ends in the middle of a run in some way; the others would wait for ever."""
    t = trainer("plain", distributed=True)
    assert t.world is not None
    for i, batch in enumerate(batches("plain")):
        if i == 3 and t.world.rank == 1:
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if kind == "stands":
                time.sleep(600)
            if kind == "raises":
                raise ValueError("the data of this rank is torn")
            if kind == "memory":
                raise DeviceError("the GPU has 1.50 of 80.00 GiB left, 2.00 are needed")
            if kind == "nan":
                batch["x"][...] = np.nan
            if kind == "inside" and os.environ.get("DEVICE") == "cuda":
                never_ends(t)
        if i == 3 and kind == "inside" and "DEVICE" not in os.environ:
            # both ranks wait for their step, as on GPUs, and the second has come less far
            t.world.watch.reached = lambda: (3, 2 - t.world.rank)
            t._device.start = lambda *_: lambda: time.sleep(600)
        t.step(batch)
    (folder / "finished").touch()


PLACES: dict[str, tuple[int, str, str, int]] = {
    "before a step": (1, "trainer.start", "before", 7),
    "with its batch": (1, "device.start", "before", 7),
    "behind its launch": (1, "device.start", "behind", 7),
    "in a collective": (1, "", "", 1),
    "behind the collectives": (1, "", "", 0),
    "before a checkpoint": (1, "trainer.checkpoint", "before", 2),
    "with all states": (1, "module.whole_states", "behind", 2),
    "in a checkpoint": (0, "checkpoint._put", "before", 2),
    "with its files": (0, "checkpoint.write", "behind", 2),
    "behind a checkpoint": (1, "trainer.checkpoint", "behind", 2),
}
"""Where a rank is killed: which one, and before or behind which call of what; or else while its GPU
waits in the first collective of a step, or once it has ended a few."""


def kill(place: str, t: of.Trainer) -> None:
    """Have this rank killed at a place, if it is the one."""
    from onnx_fuse.runtime.timeline import reached
    from onnx_fuse.training import checkpoint
    from onnx_fuse.training import trainer as module

    who, path, when, number = PLACES[place]
    owners = {"trainer": t, "device": t._device, "module": module, "checkpoint": checkpoint}

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def on_call(owner: Any, name: str, when: str, number: int, act: Any) -> None:
        called, calls = getattr(owner, name), iter(range(1, 1000))

        def wrapped(*args: Any, **more: Any) -> Any:
            now = next(calls) == number
            if now and when == "before":
                act()
            result = called(*args, **more)
            if now and when == "behind":
                act()
            return result

        setattr(owner, name, wrapped)

    def watch() -> None:
        while not (t.calls >= 7 and reached()[1] if number else reached()[0] >= 4):
            time.sleep(1e-4)
        die()

    if t.world.rank != who:
        if place == "in a collective":
            on_call(t._device, "start", "before", 7, lambda: time.sleep(5))
    elif path:
        owner, _, name = path.partition(".")
        on_call(owners[owner], name, when, number, die)
    else:
        threading.Thread(target=watch, daemon=True).start()


def run(folder: Path) -> None:
    """Train 12 steps, with what a folder has of them, and keep their losses; PLACE: be killed."""
    ranked, place = "RANK" in os.environ, os.environ.get("PLACE")
    t = trainer("sharded", **({"distributed": True} if ranked else {"shard": ""}))
    if place:
        kill(place, t)
    each = batches("plain")[:12]
    data = {name: np.concatenate([batch[name] for batch in each]) for name in each[0]}
    start_or_resume(t, folder / "run", resume=True)
    history = t.fit(data, batch_size=RANKS * ROWS, folder=folder / "run", every=4, callbacks=[])
    if not ranked or t.world.rank == 0:
        np.save(folder / "losses.npy", history.losses)


class Ends(of.callbacks.Callback):
    """Ends the run of the rank that has it, at its fifth step."""

    def on_step(self, fit: Any) -> None:
        if len(fit.history.losses) == 5:
            fit.stop("enough")


def stops(folder: Path) -> None:
    """A callback of rank 1 alone ends the run of all; each says after how many steps."""
    t = trainer("plain", distributed=True)
    rank, data = t.world.rank, batches("plain")[0]
    history = t.fit(data, batch_size=2, epochs=4, callbacks=[Ends()] if rank else [])
    (folder / f"{rank}.json").write_text(json.dumps({"steps": len(history.losses)}))


if __name__ == "__main__":
    task, where = sys.argv[1], Path(sys.argv[2])
    named = {"curves": curves, "stops": stops, "run": run}
    named[task](where) if task in named else fault(where, task)
