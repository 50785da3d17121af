"""The two backends that run a training step and hold its states: onnxruntime, and a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.adapters.files import Adapter
from onnx_fuse.arrays import Array
from onnx_fuse.errors import UsageError
from onnx_fuse.ir.names import FusedName
from onnx_fuse.program.problem import TRAINING_PRECISIONS
from onnx_fuse.runtime import budget, calibration, ort
from onnx_fuse.runtime.cpu_forms import take_faster_forms
from onnx_fuse.training import adapters, float8
from onnx_fuse.training.adapters import Lora
from onnx_fuse.training.merged import Merging
from onnx_fuse.training.options import TrainingOptions
from onnx_fuse.training.ort_collectives import Staged
from onnx_fuse.training.spec import Spec
from onnx_fuse.training.state import State

if TYPE_CHECKING:
    from onnx_fuse.distributed.world import World


class Compiling:
    """The graphs of a run that is compiled for a GPU elsewhere, and does not run."""

    in_flight = 0

    def __init__(self, states: Sequence[State]) -> None:
        from onnx_fuse.runtime.states import StepGraphs

        self._graphs = StepGraphs({s.name for s in states})
        self.add = self._graphs.add

    def graph(self, key: str, spec: Spec) -> tuple[ir.Model, dict[str, str]]:
        """The graph of a mode as a GPU runs it, and the outputs that replace states."""
        return self._graphs.of(key, spec.successors, spec.guards)

    def copies(self) -> dict[str, tuple[ir.Model, dict[str, str]]]:
        """The graph of the 16-bit copies of states, by its name, where there are any."""
        from onnx_fuse.runtime.states import COPIES

        return {COPIES: self._graphs.of_copies()} if self._graphs.copies else {}

    def _refuse(self, *arguments: object) -> Any:
        raise UsageError("a Trainer with hardware= compiles its steps: it does not run them")

    array = write = start = commit = resume_updates = recompute = _refuse
    adopt = communication = _refuse


class Portable:
    """The states of a run and the graphs that read and write them, on stock onnxruntime.

    Each state has two buffers: a step reads one and writes the other, so nothing is copied, and a
    step that turns out bad is dropped by not changing over.
    """

    def __init__(self, states: Sequence[State], threads: int = 0) -> None:
        import onnxruntime

        self._threads = threads
        # Own memory, which onnxruntime reads and writes in place.
        self._arrays = {s.name: [np.array(s.initial, order="C") for _ in range(2)] for s in states}
        self._wrap = onnxruntime.OrtValue.ortvalue_from_numpy
        self._values = {k: [self._wrap(a) for a in pair] for k, pair in self._arrays.items()}
        self._now = dict.fromkeys(self._arrays, 0)
        self._bindings: dict[tuple[Any, ...], Any] = {}
        self._sessions: dict[str, Any] = {}
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = ort.FATAL

    def add(self, key: str, model: ir.Model) -> None:
        """Make a session for the graph of a mode."""
        take_faster_forms(model)
        with ort.faults("training graph"):
            self._sessions[key] = ort.session(model, ort.quiet_options(threads=self._threads))

    def array(self, name: str) -> Array:
        """The current content of a state, in place."""
        return self._arrays[name][self._now[name]]

    def write(self, name: str, array: Array) -> None:
        """Replace the value of a state."""
        self.array(name)[...] = array

    in_flight = 0
    """Steps that may be under way when the next one is asked for."""

    def start(
        self, key: str, spec: Spec, feeds: Mapping[str, Array]
    ) -> Callable[[], dict[str, Array]]:
        """Run the step and return its outputs but the states' next values, which `commit` takes."""
        outputs = self._run(key, spec, feeds)
        return lambda: outputs

    def adopt(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """The feeds unchanged, since onnxruntime reads arrays."""
        return feeds

    def resume_updates(self) -> None:
        """Nothing was changed by a bad step."""

    def _run(self, key: str, spec: Spec, feeds: Mapping[str, Array]) -> dict[str, Array]:
        scalars = spec.scalars
        pattern = (key, *(self._now[s.name] for s in spec.states))
        binding = self._bindings.get(pattern)
        if binding is None:
            binding = self._bindings[pattern] = self._sessions[key].io_binding()
            for name in scalars:
                binding.bind_output(name)
            for s in spec.states:
                now = self._now[s.name]
                binding.bind_ortvalue_input(s.name, self._values[s.name][now])
                if s.next:
                    binding.bind_ortvalue_output(s.next, self._values[s.name][1 - now])
        for name in spec.outputs:
            binding.bind_output(name)  # anew: its shape may be another
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, self._wrap(array))
        with ort.faults("training step"):
            self._sessions[key].run_with_iobinding(binding, self._options)
        values = binding.get_outputs()
        outputs = [*values[: len(scalars)], *values[len(values) - len(spec.outputs) :]]
        return {
            name: value.numpy()
            for name, value in zip((*scalars, *spec.outputs), outputs, strict=True)
        }

    def recompute(self, key: str) -> None:
        """Nothing: onnxruntime plans its memory itself."""

    communication = recompute

    def commit(self, spec: Spec) -> None:
        """Make what the last step wrote the current states."""
        for s in spec.states:
            if s.next:
                self._now[s.name] = 1 - self._now[s.name]


class PortableRanks(Portable):
    """The same for a rank of several, whose graphs are run in stages."""

    def __init__(self, states: Sequence[State], world: World, threads: int = 0) -> None:
        super().__init__(states, threads)
        self._world = world
        self._staged: dict[str, Staged] = {}

    def add(self, key: str, model: ir.Model) -> None:
        """Make the sessions for the graph of a mode."""
        with ort.faults("training graph"):
            self._staged[key] = Staged(model, self._world, self._threads)

    def _run(self, key: str, spec: Spec, feeds: Mapping[str, Array]) -> dict[str, Array]:
        names = [*spec.scalars, *spec.outputs, *(s.next for s in spec.states if s.next)]
        states = {s.name: self.array(s.name) for s in spec.states}
        with ort.faults("training step"):
            outputs = self._staged[key].run({**feeds, **states}, names)
        for s in spec.states:
            if s.next:
                self._arrays[s.name][1 - self._now[s.name]][...] = outputs.pop(s.next)
        return outputs


class Cuda:
    """The same on a GPU: one graph launch a step, states replaced in place unless it was bad."""

    in_flight = 4

    def __init__(self, states: Sequence[State], options: TrainingOptions) -> None:
        from onnx_fuse.runtime.states import CudaStates

        self._states = CudaStates(
            {s.name: np.asarray(s.initial) for s in states},
            math=TRAINING_PRECISIONS[options.precision][1],
            memory=None if options.memory is None else budget.parse(options.memory),
            device_id=options.device_id or 0,
            compiled=options.compiled,
        )
        self.add = self._states.add
        self.array = self._states.read
        self.write = self._states.write
        self.resume_updates = self._states.resume_updates
        self.recompute = self._states.recompute
        self.adopt = self._states.adopt
        self.communication = self._states.communication

    def start(
        self, key: str, spec: Spec, feeds: Mapping[str, Array]
    ) -> Callable[[], dict[str, Array]]:
        """Begin a step; the result waits for it and gives its outputs."""
        ends = spec.scalars, spec.outputs
        return self._states.start(key, spec.successors, *ends, feeds, spec.guards)

    def commit(self, spec: Spec) -> None:
        """Nothing is left to do."""


class CombinedGradients:
    """Whether a fused node's gradients are best made by one call, on `hw` or the GPU here."""

    def __init__(self, options: TrainingOptions) -> None:
        self.math = TRAINING_PRECISIONS[options.precision][1]
        self.hw, self.gpu = options.hardware, options.device_id or 0
        self.in_parts: list[str] = []
        """Each size of a norm and a product that are two operators, with the predicted times."""

    def __call__(self, node: ir.Node) -> bool:
        from onnx_fuse.lower.linear import gradient_costs

        costs = gradient_costs(node, self.math, self.hw or calibration.of(self.gpu).hw)
        if costs is None or costs.whole < costs.apart:
            return costs is not None
        size, norm = " x ".join(map(str, costs.shape)), FusedName.of(node.op_type).norm
        fused = (
            f"{costs.whole * 1e6:.1f} fused" if costs.whole < inf else "no kernel has them fused"
        )
        line = f"{norm} and Gemm of {size}: {costs.apart * 1e6:.1f} µs as two operators, {fused}"
        self.in_parts += [line] if line not in self.in_parts else []
        return False


def merging(
    attached: ir.Model, sized: ir.Model, adapter_list: Sequence[Adapter], options: TrainingOptions
) -> Merging | None:
    """What adds low-rank products to their weights, or None where they stay beside them.

    Args:
        attached: The model that `adapters.attach` returned.
        sized: The same with the sizes of a run.
        adapter_list: Its adapters.
        options: Of the run. `lora.merged` says whether they are to be added; None: where it pays.

    Raises:
        UsageError: It is wanted, in float8, whose products are found by their weights.
    """
    from onnx_fuse.lower import low_rank

    precision, device = options.precision, options.device
    wanted = options.lora.merged if isinstance(options.lora, Lora) else False
    if precision == "fp8" and wanted:
        raise UsageError("precision 'fp8' keeps adapters beside their weights: leave out merged")
    if wanted is False or precision == "fp8" or (wanted is None and device == "cpu"):
        return None
    if device == "cpu":
        return Merging.of(attached, adapter_list)
    dtype, math = TRAINING_PRECISIONS[precision]
    costs = low_rank.LoraCosts(
        dtype, math, options.hardware or calibration.of(options.device_id or 0).hw
    )
    products = adapters.sizes(sized, adapter_list)
    if not wanted and not costs.merging_pays(products):
        return None
    return Merging.of(attached, adapter_list, costs.rows_pay)


def backend(
    states: Sequence[State], options: TrainingOptions, world: World | None
) -> Portable | Cuda | Compiling:
    """What runs the steps on the device of `options`, of all ranks of `world` together.

    Raises UsageError for `hardware` or `compiled` with what they are not for.
    """
    if options.hardware is not None or options.compiled is not None:
        if options.device == "cpu" or options.memory is not None:
            raise UsageError("compiled steps are for a GPU (device='cuda') without memory=")
        if options.hardware is not None:
            return Compiling(states)
    if options.device == "cpu":
        if world is None:
            return Portable(states, options.threads)
        return PortableRanks(states, world, options.threads)
    if world is not None:
        from onnx_fuse.distributed import nccl
        from onnx_fuse.runtime.device import start
        from onnx_fuse.runtime.timeline import reached

        start(options.device_id or 0)
        nccl.connect(world)
        world.watch.reached = reached
    return Cuda(states, options)


def gpu_of(device: str, device_id: int | None, local_rank: int | None) -> tuple[str, int]:
    """The kind of `device`, "cpu" or "cuda", and the number of the GPU.

    "cuda:1" names one; `device_id` does, too; else it is the rank's on its machine, or 0. Raises
    UsageError where two are named.
    """
    kind, _, number = device.partition(":")
    named = [int(n) for n in (number or None, device_id) if n is not None]
    if len(set(named)) > 1 or (device_id is not None and (kind == "cpu" or device_id < 0)):
        raise UsageError(f"device '{device}' and device_id {device_id} contradict each other")
    return kind, named[0] if named else local_rank or 0


def placed(options: TrainingOptions, world: World | None) -> TrainingOptions:
    """The options with the device ("cpu" or "cuda"), the number of the GPU, and the level of a run.

    The GPU begins to start. Raises UsageError for options that contradict each other.
    """
    check_device(options.precision, options.device)
    local = None if world is None else world.local_rank
    kind, gpu = gpu_of(options.device, options.device_id, local)
    memory = options.memory
    if memory is not None and kind != "cuda":
        raise UsageError("memory limits a step on a GPU: leave it out on the CPU")
    memory = None if memory is None else budget.parse(memory)
    if options.threads and kind != "cpu":
        raise UsageError("threads are those of a step on the CPU: leave them out on a GPU")
    if kind == "cuda" and options.hardware is None:
        from onnx_fuse.runtime.device import begin

        begin(gpu)
    float8.check(options.precision, options.hardware, gpu, ranks=bool(options.distributed))
    if options.pack and (kind != "cuda" or options.distributed or options.teacher is not None):
        raise UsageError("pack is for steps on one GPU, and without a teacher")
    if options.pack and (options.compiled is not None or options.hardware is not None):
        raise UsageError("pack is for steps that are compiled here: leave out compiled")
    if isinstance(options.lora, Mapping):
        if not all(isinstance(lora, Lora) for lora in options.lora.values()):
            raise UsageError("several adapters: give a Lora for each name")
        if options.trainable or options.distributed or options.pack:
            raise UsageError(
                "several adapters train alone and on one device: leave out trainable, distributed "
                "and pack"
            )
        if any(lora.merged for lora in options.lora.values()):
            raise UsageError("several adapters stand beside the weights: leave out merged")
    level = options.level
    if level is None:
        short = TRAINING_PRECISIONS[options.precision][0] != "float32"
        level = 2 if kind == "cuda" and (short or options.pack) else 0
    return dataclasses.replace(options, device=kind, device_id=gpu, memory=memory, level=level)


def check_device(precision: str, device: str) -> None:
    """Raise UsageError where training has no such device, or it lacks the precision."""
    kind, colon, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and number.isdecimal())):
        raise UsageError(f"training runs on device 'cpu', 'cuda' or 'cuda:1', not on '{device}'")
    if precision not in TRAINING_PRECISIONS:
        raise UsageError(f"precision '{precision}' is not one of {', '.join(TRAINING_PRECISIONS)}")
    if device == "cpu" and precision not in ("fp32", "fp16"):
        raise UsageError(
            f"precision '{precision}' needs a GPU: on the CPU onnxruntime has no {precision} "
            "matrix multiplication; use precision 'fp32'"
        )
