"""A model for many: a session on each GPU and one queue for all; requests run as batches."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from onnx_fuse.distributed.world import pieces
from onnx_fuse.errors import UsageError
from onnx_fuse.session import InferenceSession

__all__ = ["Replicas", "run_together"]
__dir__ = __all__.copy

Feeds = Mapping[str, Any]
_Job = tuple["Sequence[str] | None", Feeds, "Future[list[Any]]"]


class Runs(Protocol):
    """What runs a batch."""

    def run(self, output_names: Sequence[str] | None, feeds: Feeds, /) -> list[Any]:
        """The outputs for arrays by input name."""


class Replicas:
    """Sessions of one model, which take batches from one queue: a free one takes the next.

    Args:
        model: What an InferenceSession takes.
        devices: The devices, one for each session, such as "cuda:0" and "cuda:1".
        **options: The other arguments of InferenceSession.

    Raises what InferenceSession does. `close`, or the end of a with block, ends its threads.
    """

    def __init__(self, model: Any, devices: Sequence[str], **options: Any) -> None:
        if not devices:
            raise UsageError("replicas need a device")
        with ThreadPoolExecutor(len(devices)) as pool:
            sessions = pool.map(lambda d: InferenceSession(model, device=d, **options), devices)
            self.sessions = list(sessions)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(session,), daemon=True)
            for session in self.sessions
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, session: InferenceSession) -> None:
        while (job := self._jobs.get()) is not None:
            names, feeds, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(session.run(names, feeds))
            except BaseException as error:  # noqa: BLE001  it is raised where the result is read
                future.set_exception(error)

    def get_inputs(self) -> list[Any]:
        """The inputs, as `InferenceSession.get_inputs`."""
        return self.sessions[0].get_inputs()

    def get_outputs(self) -> list[Any]:
        """The outputs, as `InferenceSession.get_outputs`."""
        return self.sessions[0].get_outputs()

    def submit(self, output_names: Sequence[str] | None, feeds: Feeds) -> Future[list[Any]]:
        """Have the next free session run a batch.

        Args:
            output_names: The outputs wanted; None asks for all.
            feeds: Arrays by input name.

        Returns:
            A Future of the outputs, or of the error that InferenceSession.run raises.
        """
        future: Future[list[Any]] = Future()
        self._jobs.put((output_names, feeds, future))
        return future

    def run(self, output_names: Sequence[str] | None, feeds: Feeds) -> list[Any]:
        """Run one batch, a part of its rows on each device, and return the outputs of all rows.

        The batch is the first axis of the first input whose first axis is dynamic. Inputs and
        outputs of the same dimension are split and joined; each device gets all of other inputs.

        Args:
            output_names: The outputs wanted; None asks for all.
            feeds: Arrays by input name.

        Raises:
            UsageError: No input has such an axis, an output has another, or the sizes differ.
        """
        chosen = output_names or [str(y.name) for y in self.get_outputs()]
        first = {str(x.name): (x.shape[0] if x.shape else None) for x in self.get_inputs()}
        symbol = next((size for size in first.values() if isinstance(size, str)), None)
        ends = {str(y.name): (y.shape[0] if y.shape else None) for y in self.get_outputs()}
        other = [name for name in chosen if ends.get(name) != symbol]
        if symbol is None or other:
            raise UsageError(
                "a batch is split over devices by a dynamic first axis of the inputs, which "
                + (f"output '{other[0]}' lacks" if symbol is not None else "none of them has")
            )
        split = [name for name, size in first.items() if size == symbol and name in feeds]
        sizes = {len(feeds[name]) for name in split}
        if len(sizes) != 1:
            raise UsageError(
                f"'{symbol}' is {', '.join(map(str, sorted(sizes)))} in the inputs: give all of "
                "them one size"
            )
        (rows,) = sizes
        count = max(1, min(rows, len(self.sessions)))
        parts = [pieces(rows, count, i) for i in range(count)]
        running = [
            self.submit(chosen, {**feeds, **{name: feeds[name][part] for name in split}})
            for part in parts
        ]
        results = [each.result() for each in running]
        return [np.concatenate(column) for column in zip(*results, strict=True)]

    def close(self) -> None:
        """End the threads once what was submitted is done."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def run_together(session: Runs, requests: Sequence[Feeds]) -> list[list[Any]]:
    """Run many requests in as few batches as their shapes allow, as a server does.

    Those with equal dtypes and sizes behind the first axis become one batch, in their order.

    Args:
        session: An InferenceSession, Replicas, or what else has their `run`.
        requests: Arrays by input name; the first axis of each counts the request's rows.

    Returns:
        The outputs of each request, as `run` gives them.

    Raises:
        UsageError: An input has no axes, the inputs of a request have different numbers of rows,
            or an output has not as many rows as its batch.
    """
    groups: dict[Any, list[int]] = {}
    rows = []
    for i, feeds in enumerate(requests):
        arrays = {name: np.asarray(array) for name, array in feeds.items()}
        sizes = {array.shape[:1] for array in arrays.values()}
        if len(sizes) != 1 or () in sizes:
            raise UsageError(f"request {i} has no common number of rows: {sorted(sizes)}")
        rows.append(sizes.pop()[0])
        key = tuple((name, a.dtype, a.shape[1:]) for name, a in sorted(arrays.items()))
        groups.setdefault(key, []).append(i)
    results: list[list[Any]] = [[] for _ in requests]
    for key, members in groups.items():
        feeds = {name: np.concatenate([requests[i][name] for i in members]) for name, *_ in key}
        ends = np.cumsum([rows[i] for i in members])
        for output in session.run(None, feeds):
            if output.ndim == 0 or len(output) != ends[-1]:
                raise UsageError(
                    f"an output {list(output.shape)} of a batch of {ends[-1]} rows has another "
                    "first axis: run the requests of this model one by one"
                )
            for i, part in zip(members, np.split(output, ends[:-1]), strict=True):
                results[i].append(part)
    return results
