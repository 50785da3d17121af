"""Work on a GPU in memory of PyTorch's, and its times by PyTorch's events or the host's clock."""

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

import numpy as np

from onnx_fuse.cuda.launch import bind
from onnx_fuse.program.call import Program
from onnx_fuse.program.problem import Hardware

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


def host_seconds(work: Work, calls: int, rounds: int = 1, wait: Work = lambda: None) -> list[float]:
    """Seconds of a call by the host's clock, in each round of so many that ends with `wait`."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        times.append((time.perf_counter() - begun) / calls)
    return times


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


def launches(program: Program, given: Mapping[str, Any], hw: Hardware) -> Work:
    """What enqueues a program's launches into torch's stream; inputs and weights are `given`."""
    import torch

    def bytes_of(nbytes: int) -> Any:
        return torch.empty(max(16, nbytes), dtype=torch.uint8, device="cuda")

    memory = {b.id: bytes_of(b.nbytes) for b in program.buffers}
    for b in program.buffers:
        if b.name in given:
            source = given[b.name].contiguous().reshape(-1).view(torch.uint8)
            memory[b.id][: source.numel()] = source
    for i, array in program.constants.items():
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        memory[i][: raw.size] = torch.from_numpy(raw.copy()).cuda()
    calls = (*program.setup, *program.calls)
    work = bytes_of(max((call.workspace for call in calls), default=0))

    def bound(call: Any) -> list[Any]:
        pointers = {n: memory[t.buffer].data_ptr() + t.offset * t.nbytes // max(1, t.size)
                    for n, t in (*call.reads, *call.writes)}  # fmt: skip
        return [bind(x, pointers | {"workspace": work.data_ptr()}, hw) for x in call.launches]

    def enqueue(steps: Iterable[Any], held: object = (memory, work)) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for step in steps:
            step.enqueue(stream)

    enqueue(step for call in program.setup for step in bound(call))
    steps = [step for call in program.calls for step in bound(call)]
    return lambda: enqueue(steps)
