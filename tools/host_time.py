"""What the host does for shapes and runs, in milliseconds of CPU time by phase; needs no GPU.

    python tools/host_time.py [bert] [decode] [train] [--layers N] [--top K] [--json FILE]

The driver is replaced by one whose calls do nothing, so what is timed is Python: BERT-base at
lengths never seen and its program read from the cache, GPT-2 with a cache that grows by a token
each run, GPT-2's training step. "A class" is a length whose class is new, and lowered; "a shape" is
one of a known class. Each phase counts without those inside it. Compiling kernels and all waiting
is left out: `bench_session.py` has the times that a user waits for on a GPU. --top K adds the K
functions that took the longest.
"""

import argparse
import cProfile
import gc
import json
import os
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import _paths  # noqa: F401
import bench_session
import encoder
import gpt
import gpt_cache
import numpy as np
from fake_gpu import IdleDriver

from onnx_fuse import InferenceSession, Trainer, optim
from onnx_fuse.runtime.program_cache import ProgramCache
from onnx_fuse.runtime.specialize import Specializer

VOCAB = 1009
"""Tokens of each model, no size of a batch; their number costs the host nothing but memory."""
PHASES = (
    ("load", "onnx_fuse.autodiff.load", "load"),
    ("passes", "onnx_fuse.rewrite", "optimize"),
    ("passes", "onnx_fuse.rewrite.precision", "in_precision"),
    ("autodiff", "onnx_fuse.training.step", "training_model"),
    ("lower", "onnx_fuse.lower.walk", "Lowerer.run"),
    ("lower: bodies", "onnx_fuse.lower.walk", "Lowerer._body"),
    ("lower: inference", "onnx_fuse.lower.context", "Context._inferred"),
    ("program passes", "onnx_fuse.program.passes", "run"),
    ("select", "onnx_fuse.program.passes.select", "select_kernels"),
    ("open program", "onnx_fuse.runtime.specialize", "opened_program"),
    ("evaluate", "onnx_fuse.program.open", "SymbolicProgram.at"),
    ("evaluate", "onnx_fuse.program.open", "SymbolicProgram.part"),
    ("guards", "onnx_fuse.program.open", "SymbolicProgram.holds"),
    ("plan", "onnx_fuse.runtime.plan", "plan"),
    ("specialize", "onnx_fuse.runtime.specialize", "Specializer.of"),
    ("instance", "onnx_fuse.runtime.instance", "Instance.__init__"),
    ("update", "onnx_fuse.runtime.instance", "Instance.update"),
    ("rewrite launches", "onnx_fuse.runtime.instance", "Instance._renew"),
    ("place", "onnx_fuse.runtime.instance", "Instance.placement"),
    ("place", "onnx_fuse.runtime.instance", "Instance.place"),
    ("place", "onnx_fuse.runtime.instance", "Instance.turn"),
    ("feed", "onnx_fuse.runtime.instance", "Instance.feed"),
    ("launch", "onnx_fuse.runtime.instance", "Instance.launch"),
    ("fetch", "onnx_fuse.runtime.instance", "Instance.send"),
    ("fetch", "onnx_fuse.runtime.instance", "Instance.arrays"),
)
"""(phase, module, function or method) in the order of the table."""


def without_a_gpu() -> None:
    """Put the driver that does nothing, and a description of an H200, under the runtime."""
    os.environ["ONNX_FUSE_AHEAD"] = os.environ["ONNX_FUSE_CACHE_MB"] = "0"
    for holder, name, value in IdleDriver().stand_ins():
        setattr(holder, name, value)


class Clock:
    """CPU seconds of this thread by phase, each without the phases inside it, and calls."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        now = time.thread_time()
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside for the phase."""
        self._turn()
        self._inside.append(name)
        try:
            yield
        finally:
            self._turn()
            self._inside.pop()

    def watch(self) -> None:
        """Count every phase of PHASES, wherever its function was imported to."""
        for phase, module_name, path in PHASES:
            module: Any = import_module(module_name)
            *outer, name = path.split(".")
            holder = getattr(module, outer[0]) if outer else module
            self._replace(holder, name, self._timed(phase, getattr(holder, name)), not outer)

    def _timed(self, phase: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*given: Any, **named: Any) -> Any:
            with self.phase(phase):
                return inner(*given, **named)

        return outer

    @staticmethod
    def _replace(holder: Any, name: str, new: Any, everywhere: bool) -> None:
        old = getattr(holder, name)
        setattr(holder, name, new)
        for module in list(sys.modules.values()) if everywhere else ():
            if getattr(module, "__name__", "").startswith("onnx_fuse"):
                for other, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, other, new)


class Rows:
    """The measurements: of each kind of run, the milliseconds of every one by phase."""

    def __init__(self, clock: Clock, profile: cProfile.Profile | None) -> None:
        self.clock, self.profile = clock, profile
        self.found: dict[str, list[dict[str, float]]] = {}

    def time(self, kind: str, work: Callable[[], Any]) -> Any:
        """Run, and note what it took as one of its kind."""
        self.clock.seconds.clear()
        if self.profile is not None:
            self.profile.enable()
        with self.clock.phase("other"):
            result = work()
        if self.profile is not None:
            self.profile.disable()
        row = {name: 1e3 * took for name, took in self.clock.seconds.items()}
        self.found.setdefault(kind, []).append({**row, "total": sum(row.values())})
        return result

    def table(self) -> dict[str, dict[str, float]]:
        """Kind -> phase -> the median of its milliseconds."""
        order = [*dict.fromkeys(phase for phase, *_ in PHASES), "other", "total"]
        return {
            kind: {
                phase: median(row.get(phase, 0.0) for row in rows)
                for phase in order
                if any(phase in row for row in rows)
            }
            for kind, rows in self.found.items()
        }


def bert(rows: Rows, layers: int) -> None:
    """BERT-base in float16, batch 1."""
    model = encoder.build(encoder.Config(layers, 12, 768, VOCAB, 512))
    session = rows.time(
        "bert: session", lambda: InferenceSession(model, device="cuda", precision="fp16")
    )

    def run(length: int) -> None:
        ids = np.zeros((1, length), np.int64)
        session.run(None, {"input_ids": ids, "attention_mask": ids, "token_type_ids": ids})

    rows.time("bert: first run", lambda: run(128))
    for length in (40, 24, 250, 330, 400):
        rows.time("bert: a class", lambda length=length: run(length))
    for length in (120, 90, 100, 77, 110, 41, 25, 255, 331, 402, 37, 30, 201, 335, 410):
        rows.time("bert: a shape", lambda length=length: run(length))
    for _ in range(15):
        rows.time("bert: a known shape", lambda: run(110))

    read_from_cache(rows, session, 128)


def read_from_cache(rows: Rows, session: Any, length: int) -> None:
    """What a process spends on a program of `session` that an earlier one wrote."""
    specializer: Specializer = session._executable.specializer
    names = ("input_ids", "attention_mask", "token_type_ids")
    shapes = dict.fromkeys(names, ((1, length), "int64"))
    with tempfile.TemporaryDirectory() as folder:
        programs = ProgramCache(Path(folder), specializer.made)
        lowered = Specializer(specializer.model, specializer.hw, math=specializer.math)
        lowered.cache_in(programs)
        lowered.of(shapes)
        lowered.written()
        key, numbers = lowered.key(shapes, {}), lowered.numbers(shapes)
        gc.disable()
        for _ in range(30):
            fresh = ProgramCache(Path(folder), specializer.made)
            assert rows.time("bert: from the cache", lambda c=fresh: c.find(key, numbers))
        gc.enable()


def decode(rows: Rows, layers: int) -> None:
    """GPT-2 124M in float16, batch 1, its cache on the GPU and one token longer each run."""
    config = gpt_cache.Config(layers, 12, 768, VOCAB, 1024)
    model = gpt_cache.build(config)
    session = rows.time(
        "decode: session", lambda: InferenceSession(model, device="cuda", precision="fp16")
    )
    tokens = bench_session.growing(session, config)
    rows.time("decode: first run", lambda: next(tokens))
    for position in range(2, 200):
        kind = "decode: a class" if position in (65,) else "decode: a token"
        rows.time(kind if position > 3 else "decode: warm-up", lambda: next(tokens))


def train(rows: Rows, layers: int) -> None:
    """A step of GPT-2 124M in bfloat16 with AdamW, batch 4."""
    model = gpt.build(gpt.Config(layers, 12, 768, VOCAB, 1024))
    trainer = rows.time(
        "train: trainer",
        lambda: Trainer(
            model, loss="cross_entropy", optimizer=optim.AdamW(), precision="bf16", device="cuda"
        ),
    )

    def step(length: int) -> None:
        ids = np.zeros((4, length), np.int64)
        float(trainer.step({"input_ids": ids, "labels": ids}))

    rows.time("train: first step", lambda: step(128))
    for length in (40, 250):
        rows.time("train: a class", lambda length=length: step(length))
    for length in (120, 90, 100, 77, 110, 41, 255, 201):
        rows.time("train: a shape", lambda length=length: step(length))
    for _ in range(8):
        rows.time("train: a known shape", lambda: step(110))


MODELS = {"bert": bert, "decode": decode, "train": train}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--top", type=int, default=0, help="Functions of the profile to print.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    without_a_gpu()
    clock = Clock()
    clock.watch()
    rows = Rows(clock, cProfile.Profile() if args.top else None)
    for name in args.models or MODELS:
        MODELS[name](rows, args.layers)
    table = rows.table()
    for kind, phases in table.items():
        parts = ", ".join(
            f"{phase} {took:.2f}" for phase, took in phases.items() if phase != "total"
        )
        worst = max(row["total"] for row in rows.found[kind])
        print(f"{kind}: {phases['total']:.2f} ms, at most {worst:.2f} ({parts})")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))
    if rows.profile is not None:
        pstats.Stats(rows.profile).sort_stats("tottime").print_stats(args.top)


if __name__ == "__main__":
    main()
