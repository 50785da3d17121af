"""Faults of the driver, what is given back, forks, captures: a GPU whose n-th call fails."""

import gc
import itertools
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from fake_gpu import FaultyGpu
from test_runtime import BIAS, CHAIN, aligned, place, same, x_of

import onnx_fuse.nn as nn
from onnx_fuse import Trainer
from onnx_fuse.cuda import launch as launching
from onnx_fuse.errors import DeviceError
from onnx_fuse.ir.build import text_model
from onnx_fuse.nn import runner
from onnx_fuse.program.launch import Launch
from onnx_fuse.runtime import device
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.specialize import Specializer

STATE = """agraph (float[N,8] x) => (float[N,8] y, float[8] w_next)
<float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = Add(x, w) one = Constant<value = float {1}>()
  w_next = Add(w, one) }"""
W = np.arange(1, 9, dtype=np.float32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyGpu]:
    monkeypatch.setenv("ONNX_FUSE_CAPTURE", "2")
    runner.home.cache_clear()
    found = FaultyGpu()
    found.use(monkeypatch)
    gc.collect()
    gc.freeze()  # so that to look for what is left takes no time
    yield found
    gc.unfreeze()
    runner.home.cache_clear()
    gc.collect()
    gc.freeze()  # as before: see conftest.py


Work = Callable[[], None]
"""Makes runs, of which each is right or raises."""


def runs() -> Work:
    """Runs of two shapes, into arrays and memory of the GPU, before and after the capture."""
    executable = Executable(text_model(CHAIN))
    executable.specializer = SPECIALIZERS.setdefault(CHAIN, executable.specializer)

    def work() -> None:
        for rows, times in ((4, 3), (7, 1)):
            for i in range(times):
                same(executable.run(None, {"x": x_of(rows, i), "b": BIAS}), x_of(rows, i))
        x = x_of(4, 5)
        for kept in executable.run(None, {"x": x, "b": BIAS}, on_device=True)[:1]:
            same([kept.numpy(), kept.numpy().T * -1], x)
        sent = executable.send(["y", "z"], {"x": x, "b": BIAS})
        same(sent.result(), x)

    return work


def bound() -> Work:
    """Runs on what is bound, in another stream too; places come and go."""
    executable = Executable(text_model(CHAIN))
    executable.specializer = SPECIALIZERS.setdefault(CHAIN, executable.specializer)

    def work() -> None:
        binding = executable.io_binding()
        for i, stream in enumerate((None, 7, None)):
            x, y, z = aligned((4, 8)), aligned((4, 8)), aligned((8, 4))
            x[...] = x_of(4, i)
            binding.bind_input("x", *place(x))
            binding.bind_cpu_input("b", BIAS)
            binding.bind_output("y", *place(y))
            binding.bind_output("z", *place(z))
            for _ in range(2):
                y[...] = z[...] = 0
                executable.run_with_iobinding(binding, stream=stream)
                same([y, z], x)

    return work


def steps() -> Work:
    """Steps that change a state: one that raises has changed it or has not."""
    executable = Executable(text_model(STATE), state={"w_next": "w"})
    executable.specializer = SPECIALIZERS.setdefault(STATE, executable.specializer)
    done = [0.0]

    def work() -> None:
        for i in range(4):
            x, had = x_of(4, i), done[0]
            done[0] = np.nan
            try:
                (y,) = executable.run(["y"], {"x": x})
                done[0] = had + 1
            finally:
                if done[0] != had + 1:
                    gpu_now.fails_at, now = 0, had
                    if "w" in executable.weights.resident:
                        now = float(executable.weights.read("w")[0]) - 1
                    assert now in (had, had + 1)
                    done[0] = now
            np.testing.assert_allclose(y, x + W + had, rtol=1e-6)

    return work


def eager() -> Work:
    """Operators and their gradients, by arrays of this package's own."""

    def work() -> None:
        for i in range(3):
            w = nn.tensor(x_of(4, 7), device="cuda", requires_grad=True)
            x, slope = nn.tensor(x_of(4, i), device="cuda"), nn.tensor(x_of(4, 9), device="cuda")
            y = (x * w).tanh()
            y.backward(slope)
            wanted = np.tanh(x_of(4, i) * x_of(4, 7))
            np.testing.assert_allclose(y.numpy(), wanted, atol=1e-6)

    return work


KERNEL = launching._kernel  # before a test replaces it
SPECIALIZERS: dict[str, Specializer] = {}
SCENES: dict[str, Callable[[], Work]] = {
    "runs": runs, "bound": bound, "steps": steps, "eager": eager
}  # fmt: skip
gpu_now: FaultyGpu


@pytest.mark.parametrize("name", SCENES)
def test_whatever_call_fails_the_next_run_is_right(
    name: str, gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    global gpu_now
    gpu_now = gpu
    scene = SCENES[name]

    def left() -> dict[str, int]:
        gc.collect()
        return {kind: n for kind, n in gpu.live.items() if n}

    def run(fails_at: int) -> str:
        """What was said; the same object runs again after that."""
        work, said = None, ""
        gpu.called, gpu.fails_at, gpu.failed = 0, fails_at, ""
        try:
            work = scene()
            work()
        except DeviceError as error:
            said = str(error)
        gpu.fails_at = 0
        (work or scene())()
        return said

    run(0)
    clean = left()
    run(0)
    assert left() == clean, "a run without a fault gives everything back"
    for n in itertools.count(1):
        said = run(n)
        if not gpu.failed:
            break  # there are no more calls
        assert left() == clean, (n, gpu.failed, said)
        if not said:  # memory that is short is asked for twice, and then with less in use
            assert "Alloc" in gpu.failed or not gpu.told, f"{gpu.failed}, the call {n}, is not told"
            continue
        assert re.search(r"OUT_OF_MEMORY|UNKNOWN", said), said
        assert "\n" not in said
    assert n > 20


def test_whatever_call_fails_a_trainer_goes_on(
    gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernels compute is left out: the step's numbers are those of `tests/gpu`."""
    monkeypatch.setattr(gpu, "_run", lambda kernel, operands: None)
    text = f"""agraph (float[N,8] x) => (float[N,2] y) <float[8,2] w = {{{", ".join("1" * 16)}}}>
    {{ y = MatMul(x, w) }}"""
    trainer = Trainer(text_model(text), loss="mse", device="cuda")
    batch = {"x": x_of(4), "labels": np.zeros((4, 2), np.float32)}

    def left() -> dict[str, int]:
        for _ in range(12):  # until every run has memory of its own
            float(trainer.step(batch))
        gc.collect()
        return {kind: n for kind, n in gpu.live.items() if n}

    clean, told = left(), list[str]()
    for n in itertools.count(1):
        gpu.called, gpu.fails_at, gpu.failed = 0, n, ""
        try:
            float(trainer.step(batch))
        except DeviceError as error:
            told.append(str(error))
        gpu.fails_at = 0
        if not gpu.failed:
            break
        # a few places of outputs have launches of their own, and how many depends on what was run
        assert all(number <= clean[kind] + 6 for kind, number in left().items()), (n, gpu.failed)
    assert len(told) >= n // 2
    assert not any("\n" in text for text in told)


def test_a_fork_of_a_process_with_a_gpu_is_told(gpu: FaultyGpu) -> None:
    """It could wait for ever, or read what is not there."""
    device._CONTEXTS[0] = 1
    try:
        read, write = os.pipe()
        child = os.fork()
        if not child:  # the new process says what it was told
            try:
                runs()()
                said = "nothing"
            except DeviceError as error:
                said = str(error)
            finally:
                os.write(write, said.encode())
                os._exit(0)
        os.waitpid(child, 0)
        said = os.read(read, 1000).decode()
    finally:
        device._CONTEXTS.pop(0)
        for end in (read, write):
            os.close(end)
    assert said == (
        f"the GPU was started in process {os.getpid()}; CUDA cannot be used after fork: start the "
        "worker with 'spawn'"
    )


def test_what_is_loaded_goes_when_nobody_uses_it(
    gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is used stays, however many came after it."""
    monkeypatch.setattr(launching, "KEPT", 2)
    monkeypatch.setattr(launching, "_KERNELS", OrderedDict())
    monkeypatch.setattr(launching, "_UNUSED", deque())
    monkeypatch.setattr(launching, "compile", lambda *_: b"code")
    launches = [Launch(f"{i}.cu", "kernel", (1, 1, 1), (1, 1, 1), ()) for i in range(6)]
    used = KERNEL(launches[0], "sm_90a")
    for launch in launches[1:]:
        KERNEL(launch, "sm_90a")
    KERNEL(launches[5], "sm_90a")
    assert gpu.counts["cuLibraryLoadData"] == 6
    assert gpu.counts["cuLibraryUnload"] == 3
    assert KERNEL(launches[5], "sm_90a") is not used
    del used
    KERNEL(launches[4], "sm_90a")
    assert gpu.counts["cuLibraryUnload"] == 4


def test_what_another_executable_runs_is_no_part_of_a_graph(
    gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may share the stream, and come from another thread, while a graph is captured."""
    monkeypatch.setenv("ONNX_FUSE_CAPTURE", "2")
    first = Executable(text_model(CHAIN))
    second = Executable(text_model(CHAIN), home=first.shared)
    feeds = [{"x": x_of(4, i), "b": BIAS} for i in range(4)]
    enqueue, between = launching.BoundLaunch.enqueue, []

    def enqueued(bound: launching.BoundLaunch, stream: int) -> None:
        if gpu._capturing is not None and not between:
            between.append(None)
            thread = threading.Thread(target=lambda: between.append(second.run(None, feeds[3])))
            thread.start()
            thread.join()
        enqueue(bound, stream)

    with monkeypatch.context() as patched:  # which is over before what it holds is collected
        patched.setattr(launching.BoundLaunch, "enqueue", enqueued)
        for given in feeds:
            same(first.run(None, given), given["x"])
    assert gpu.counts["capture"] == 1
    same(between[1], feeds[3]["x"])
    assert gpu.counts["cuLaunchKernelEx"] == 4, "of the first run, and of the one between"
