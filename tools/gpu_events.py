"""Times of work on a GPU, by events of PyTorch."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

Work = Callable[[], object]


def microseconds(work: Work, repeats: int = 1) -> float:
    """Microseconds of one call of `work`, of so many in the current stream."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / repeats


def captured(work: Work, warm: int = 3) -> Any:
    """What a call enqueues, as a CUDA graph, after some calls in the stream that captures it."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            work()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            work()
    return graph


def in_turns(arms: Mapping[str, Callable[[], float]], rounds: int = 9) -> dict[str, float]:
    """Arm -> the median of its answers. A clock depends on what ran before: each round is begun by
    the next.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(arms[name]())
    return {name: median(values) for name, values in times.items()}


def rotating(
    arms: Mapping[str, Callable[[int], object]],
    sets: int,
    launches: int,
    rounds: int = 9,
    rest: float = 0.0,
) -> dict[str, float]:
    """Arm -> median us a call: a graph an arm, `launches` calls over `sets` operands.

    The arms take turns after 50 ms of replays; with `rest`, after as many idle seconds instead:
    what a cool chip takes.
    """
    import torch

    def calls(run: Callable[[int], object]) -> None:
        for i in range(launches):
            run(i % sets)

    graphs = {name: captured(lambda run=run: calls(run), 1) for name, run in arms.items()}
    torch.cuda.synchronize()
    time.sleep(rest)
    until = time.monotonic() + (0 if rest else 0.05)
    while time.monotonic() < until:
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    replays = {
        name: lambda graph=graph: microseconds(graph.replay) / launches
        for name, graph in graphs.items()
    }
    return in_turns(replays, rounds)
