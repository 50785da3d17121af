"""What a check is asked for: made once where a user asks, and passed on as it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.importer.shapes import fix_shapes, infer_shapes
from onnx_fuse.ir.constants import Model
from onnx_fuse.options import CheckOptions
from onnx_fuse.runtime import ort
from onnx_fuse.runtime.graphs import DualGraph
from onnx_fuse.session import InferenceSession, load, of_providers, provider
from onnx_fuse.validation.compare import Tolerance, tolerance_of
from onnx_fuse.validation.inputs import Feeds, Run, extremes, generate

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Request(CheckOptions):
    """The inputs of a check, where and how the checked model runs, and what is wanted of it."""

    feeds: Sequence[Feeds] | None = None
    """Arrays by input name, for each run; None has them generated."""
    along: bool = False
    """Whether the values inside of both graphs are compared, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feeds is not None and not len(self.feeds):
            raise UsageError("feeds is empty: it takes a list of arrays by input name, or None")
        if self.providers:
            kind, gpu, rest = of_providers(self.providers)
            object.__setattr__(self, "device", f"{kind}:{gpu}" if gpu else kind)
            stock = kind != "cpu" or provider(rest[0])[0] == ort.CPU_ONLY[0]
            object.__setattr__(self, "providers", None if stock else rest)

    @property
    def place(self) -> str:
        """Where the checked model runs: its device, or onnxruntime's provider there."""
        return provider(self.providers[0])[0] if self.providers else self.device

    def loaded(self, model: Model) -> ir.Model:
        """The model with its inputs at the request's sizes, and the shapes that follow."""
        model = load(model)
        fix_shapes(model, self.shapes or {}, self.dims)
        infer_shapes(model)
        return model

    def tolerance(self, model: ir.Model) -> Tolerance:
        """What an output may differ by: as given, or as the types and the precision make it."""
        of_types = tolerance_of(model, self.precision)
        if self.rtol is None and self.atol is None:
            return of_types
        rtol, atol = (of_types.rtol if self.rtol is None else self.rtol), self.atol
        return Tolerance(rtol, of_types.atol if atol is None else atol, "as given")

    def pairs(
        self,
        model: ir.Model,
        run: Run,
        notes: list[str],
        cases: dict[int, str] | None = None,
        *,
        empty: bool = True,
    ) -> list[tuple[Feeds, list[Any]]]:
        """Pairs of feeds, given or generated, and what `run` answers.

        With `cases`, feeds of extreme values follow, whose numbers and descriptions it receives,
        and on a CPU feeds of small sizes, those of no elements unless `empty` is false. Raises
        ModelError where the original does not run on feeds given.
        """
        if self.feeds is not None:
            with ort.faults("the original"):
                return [(dict(feed), run(dict(feed))) for feed in self.feeds]
        small: list[tuple[str, Feeds]] = []
        pairs = generate(model, run, seed=self.seed, notes=notes, small=small)
        if cases is None:
            return pairs

        def add(case: str, feed: Feeds) -> str | None:
            try:
                outputs = run(feed)
            except Exception as error:
                if isinstance(error, ModelError) or not ort.is_fault(error):
                    raise
                return ort.plain(error)
            pairs.append((feed, outputs))
            cases[len(pairs)] = case
            return None

        on_cpu = self.place == "cpu"
        # of a NaN, onnxruntime's CPU makes a number in some operators (docs/kernel-notes.md)
        for case, feed in extremes(model, pairs[0][0], nan=on_cpu):
            refusal = add(case, feed)
            where = f"the original does not run where {case} ({refusal})"
            notes.append(where if refusal else f"inputs {len(pairs)}: {case}")
        if not on_cpu:
            return pairs
        first, refused = len(pairs) + 1, []
        for case, feed in small:
            if (empty or all(a.size for a in feed.values())) and add(case, feed):
                refused.append(case)
        if len(pairs) >= first:
            sizes = ", ".join(cases[i] for i in range(first, len(pairs) + 1))
            notes.append(f"inputs from {first} to {len(pairs)}: {sizes}")
        if refused:
            notes.append(f"the original does not run where {' or '.join(refused)}")
        return pairs

    def session(
        self, model: Model, *, as_written: bool = False, fallback: bool = True, threads: int = 0
    ) -> Any:
        """A session of the checked model, for `ort.run`: on onnxruntime, or on this GPU."""
        if self.providers:
            return ort.session(runnable(model), providers=self.providers)
        if self.device != "cpu":
            return InferenceSession(
                model, device=self.device, optimize=False, precision=self.precision
            )
        return ort.session(
            runnable(model), as_written=as_written, fallback=fallback, threads=threads,
            spins="never",
        )  # fmt: skip


def runnable(model: Model) -> Any:
    """The model as `ort.session` takes it: one in memory keeps its weights where they are."""
    return DualGraph.of_model(model) if isinstance(model, ir.Model) else unread(model)


def unread(model: Model) -> Any:
    """The model as onnxruntime itself reads it."""
    return model.SerializeToString() if isinstance(model, onnx.ModelProto) else model


def guarded(work: Callable[[], T], model: Model, device: str) -> T:
    """`work()` in a child where `device` is the CPU: onnxruntime dies of some models' runs."""
    name = str(model) if isinstance(model, str | os.PathLike) else "model"
    return work() if device != "cpu" else ort.guarded(work, name)
