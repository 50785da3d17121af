"""The step of one rank of several as a Program, and a fake communicator that joins the ranks."""

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from lowering import lowered

from onnx_fuse.program.call import Program
from onnx_fuse.program.problem import Collective
from onnx_fuse.training import optim
from onnx_fuse.training.ranks import Ranks
from onnx_fuse.training.step import training_model

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import mlp

Array = np.ndarray[Any, Any]


def step_program(
    shard: str = "",
    bucket: int = 1 << 14,
    widths: tuple[int, ...] = (64, 128, 128, 128, 8),
    rows: int = 32,
    model: Any = None,
    precision: str = "bf16",
) -> Program:
    """The calls of a step of one of two ranks, for an H200; of a perceptron, or of another model,
    whose open sizes are all `rows`.
    """
    graph, spec = training_model(
        model or mlp.build(mlp.Config(widths)),
        loss="cross_entropy",
        optimizer=optim.AdamW(),
        precision=precision,
        level=2,
        clip_norm=1.0,
        fused=True,
        whole=lambda node: True,
        ranks=Ranks(1, 2, "bf16", shard, bucket=bucket),
    )
    states = {s.next: s.name for s in spec.states if s.next}
    return lowered(graph, size=rows, state=states)


class Exchange:
    """What takes the place of NCCL: the ranks are threads, and meet at each collective."""

    def __init__(self, ranks: int) -> None:
        self._meet = threading.Barrier(ranks, timeout=60)
        self._given: list[tuple[Collective, list[Array]]] = [None] * ranks  # type: ignore[list-item]

    def of(self, rank: int, problem: Collective, tensors: list[Array]) -> list[Array]:
        """The results of one rank. All must have come to the same collective."""
        self._given[rank] = problem, tensors
        self._meet.wait()
        assert all(other == problem for other, _ in self._given), "the ranks are out of order"
        every = list(zip(*(given for _, given in self._given), strict=True))
        self._meet.wait()
        if problem.kind == "AllGather":
            return [np.concatenate(parts) for parts in every]
        sums = [np.sum(parts, axis=0, dtype=parts[0].dtype) for parts in every]
        if problem.kind == "ReduceScatter":
            size = [len(each) // problem.ranks for each in sums]
            return [a[rank * n : (rank + 1) * n] for a, n in zip(sums, size, strict=True)]
        return sums
