"""The adapters that a session holds by name, and the feeds by which its runs have them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from onnx_fuse import config
from onnx_fuse.adapters.columns import AdaptedWeight, AdapterColumns, Ends, rows_for
from onnx_fuse.adapters.files import Adapter, check_shape, read_file
from onnx_fuse.arrays import Array
from onnx_fuse.errors import DataError, UsageError, did_you_mean, listed
from onnx_fuse.program.call import dtype_of
from onnx_fuse.runtime import device
from onnx_fuse.runtime.deployed import RECOMPILE, Deployed
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.tensor import DeviceTensor

if TYPE_CHECKING:
    from onnx_fuse.adapters.inputs import AdaptedModel

Pairs: TypeAlias = dict[str, tuple[Array, Array]]
"""Aᵀ [rank, K] and B [rank, N] by weight; the scale is in B."""
Rows: TypeAlias = str | Sequence[str | None]
"""The adapter of all sequences of a batch, or that of each."""


class AdaptedFile:
    """A compiled file whose programs have inputs for adapters, of some ranks together."""

    def __init__(self, compiled: Deployed, opened: Callable[[Deployed], Any]) -> None:
        """`opened` gives a session of a file. Raises UsageError and ModelError for another file."""
        held = compiled.adapters
        if held is None:
            raise UsageError(
                f"{compiled.container.path}: its programs have no inputs for adapters: compile it "
                f"with --adapter-rank 16, or {RECOMPILE}"
            )
        self._compiled, self._opened = compiled, opened
        try:
            self.ranks, self.dtype = int(held["ranks"]), dtype_of(held["dtype"])
            self._ends = Ends(**held["ends"])
            self.weights = {
                str(about["weight"]): AdaptedWeight(
                    Adapter(**about), tuple(map(int, shape)), dtype_of(dtype)
                )
                for about, shape, dtype in held["weights"]
            }
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise compiled.container.fault("damaged: it has no list of adapters") from error

    @staticmethod
    def manifest(
        ends: Ends, weights: Sequence[AdaptedWeight], ranks: int, layout: AdapterColumns
    ) -> dict[str, Any]:
        """What a file says of its inputs for adapters, as JSON."""
        return {
            "ranks": ranks,
            "dtype": layout.dtype.name,
            "ends": asdict(ends),
            "weights": [[asdict(w.adapter), list(w.shape), w.dtype.name] for w in weights],
        }

    def session(self, _: Collection[str]) -> tuple[Any, Ends, AdapterColumns]:
        """The session with adapters, its inputs for them, and their layout."""
        layout = AdapterColumns.of(self.weights.values(), self.dtype)
        return self._opened(self._compiled.with_inputs(self._compiled.adapters)), self._ends, layout


class HeldAdapters:
    """Adapters by name: all of them on the host, and those that ran last on the GPU.

    The graph that reads them is made for the weights that any of them has. The ranks of a run's
    adapters are filled up with zeros to a power of two, so that others seldom make another shape.
    """

    def __init__(self, model: AdaptedModel | AdaptedFile, *, batch_invariant: bool = False) -> None:
        self._model, self._invariant = model, batch_invariant
        self._lock = threading.RLock()
        self._pairs: dict[str, Pairs] = {}
        self._matrices: dict[str, Array] = {}
        self._locked: dict[str, device.Pinned] = {}
        self._made: tuple[Any, Ends, AdapterColumns] | None = None
        self._stacks: OrderedDict[tuple[str, ...], Any] = OrderedDict()

    @property
    def names(self) -> list[str]:
        """The names of all adapters."""
        return list(self._pairs)

    def add(self, name: str, path: str | os.PathLike[str]) -> None:
        """Hold the adapter of a file under a name, which another may have had.

        Raises UsageError for no name, and DataError for a file that is no adapter of the model.
        """
        if not isinstance(name, str) or not name:
            raise UsageError(f"an adapter's name is a text that is not empty, not {name!r}")
        pairs, most = self._of_file(path), self._model.ranks
        if 0 < most < (rank := max(len(a) for a, _ in pairs.values())):
            raise DataError(f"{os.fspath(path)}: rank {rank}, {_room(most, rank)}")
        with self._lock:
            self._forget_stacks(name)
            if self._made is not None and pairs.keys() <= self._made[2].places.keys():
                session, _, layout = self._made
                pairs = self._packed(name, pairs, layout, session._executable)
            else:
                self._made = None
                self._stacks.clear()
            self._pairs[name] = pairs

    def remove(self, name: str) -> None:
        """Let go of an adapter. Raises UsageError where there is none of that name."""
        with self._lock:
            self._check(name)
            self._forget_stacks(name)
            del self._pairs[name]
            self._matrices.pop(name, None)
            self._locked.pop(name, None)

    def _check(self, name: object) -> None:
        if not isinstance(name, str) or name not in self._pairs:
            near = did_you_mean(str(name), self._pairs)
            raise UsageError(f"the session has no adapter {name!r}{near}: add_adapter gives it one")

    def _forget_stacks(self, name: str) -> None:
        for key in [key for key in self._stacks if name in key]:
            del self._stacks[key]

    def _of_file(self, path: str | os.PathLike[str]) -> Pairs:
        known, where = self._model.weights, os.fspath(path)
        try:
            tensors, adapters = read_file(path, [each.adapter for each in known.values()], known)
        except ModuleNotFoundError as error:  # onnx-fuse-runtime installs neither of the two
            raise UsageError(f"{where}: {error.name} reads it: pip install {error.name}") from error
        pairs: Pairs = {}
        for each in adapters:
            if each.weight not in known or each.weight in pairs:
                again = "twice" if each.weight in pairs else "and the model no such linear layer"
                raise DataError(f"{where}: it has an adapter of '{each.weight}', {again}")
            a, b = tensors.pop(each.a), tensors.pop(each.b)
            if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or not a.shape[1]:
                raise DataError(
                    f"{where}: '{each.weight}' has A {list(a.shape)} and B {list(b.shape)}: A must "
                    "be [K, rank] and B [rank, N], of one rank that is 1 or more"
                )
            mine = known[each.weight]
            kind = self._model.dtype or mine.dtype
            shape = (a.shape[0], b.shape[1])[:: -1 if mine.adapter.transposed else 1]
            check_shape(path, each.weight, mine.shape, shape)
            with np.errstate(over="ignore"):
                pair = a.T.astype(kind), (b.astype(np.float64) * each.scale).astype(kind)
            if not all(np.isfinite(part.astype(np.float64)).all() for part in pair):
                raise DataError(f"{where}: '{each.weight}' has values that {kind} does not hold")
            pairs[each.weight] = pair
        if tensors:
            raise DataError(
                f"{where}: '{next(iter(tensors))}' was trained in full, and a run only "
                "exchanges low-rank adapters: write a model with training.adapters.merge"
            )
        if not pairs:
            raise DataError(f"{where}: there is no adapter in it")
        return pairs

    def _packed(
        self, name: str, pairs: Pairs, layout: AdapterColumns, owner: Executable | None
    ) -> Pairs:
        """The pairs as parts of the adapter's matrix, which is kept."""
        matrix = layout.matrix(pairs)
        if owner is not None:  # page-locked memory is copied to the GPU at four times the rate
            device.start(owner.device_id)
            locked = self._locked[name] = device.Pinned(matrix.nbytes)
            room = locked.array[: matrix.nbytes].view(matrix.dtype).reshape(matrix.shape)
            room[...] = matrix
            matrix = room
        self._matrices[name] = matrix
        parts: Pairs = {}
        for weight, (a, _) in pairs.items():
            of_a, of_b = layout.places[weight].parts
            parts[weight] = matrix[: len(a), of_a], matrix[: len(a), of_b]
        return parts

    def _ready(self) -> tuple[Any, Ends, AdapterColumns]:
        """The session of the graph that reads adapters, its inputs for them, and their layout."""
        if self._made is None:
            wanted = {weight for pairs in self._pairs.values() for weight in pairs}
            session, ends, layout = self._model.session(wanted)
            for name, pairs in self._pairs.items():
                self._pairs[name] = self._packed(name, pairs, layout, session._executable)
            self._made = session, ends, layout
        return self._made

    def feeds(
        self, adapter: Rows, batch_of: Callable[[str], int | None]
    ) -> tuple[Any, dict[str, Any]]:
        """The session that runs with these adapters, and what it is fed besides; None for none.

        `batch_of` an input is the batch, None where that input is not fed. Raises UsageError for
        unknown names, and for rows that the graph cannot tell apart.
        """
        one = isinstance(adapter, str)
        rows: list[str | None] = listed("adapter", adapter)
        with self._lock:
            for name in rows:
                if name is not None:
                    self._check(name)
            names = {name for name in rows if name is not None}
            if not self._pairs:
                return None, {}
            session, ends, _ = self._ready()
            batch = batch_of(ends.batch)
            if one:
                rows *= batch or 0
            elif batch is not None and len(rows) != batch:
                raise UsageError(
                    f"adapter has {len(rows)} names, and '{ends.batch}' has {batch} rows: give one "
                    "name, or one for each row"
                )
            # all that are held in their order: a row has its sums whatever other rows have
            every = self._invariant and not ends.refusal
            if not names and not every:
                return None, {}
            if ends.refusal and len(set(rows)) > 1:
                raise UsageError(f"rows cannot have different adapters: {ends.refusal}")
            ordered = tuple(self._pairs if every else sorted(names))
            stack = self._stack(ordered)
            ranks = [len(self._matrices[name]) for name in ordered]
        more = {ends.matrices: stack}
        if not ends.refusal:
            slots = np.array([-1 if name is None else ordered.index(name) for name in rows], int)
            owners = np.full(stack.shape[0], -2)  # rows that fill the stack up are nobody's
            owners[: sum(ranks)] = np.repeat(np.arange(len(ranks)), ranks)
            more[ends.mask] = slots[:, None] == owners
        return session, more

    def _stack(self, names: tuple[str, ...]) -> Any:
        """The matrices of some adapters, [ranks, columns], where the session runs."""
        if names in self._stacks:
            self._stacks.move_to_end(names)
            return self._stacks[names]
        session, _, layout = self._ready()
        parts = [self._matrices[name] for name in names]
        ranks = sum(map(len, parts))
        most = self._model.ranks
        if 0 < most < ranks:
            raise UsageError(f"the adapters of this batch have {ranks} ranks, {_room(most, ranks)}")
        shape = rows_for(ranks), layout.columns
        executable: Executable | None = session._executable
        stack: Array | DeviceTensor
        if executable is None:
            stack = np.zeros(shape, layout.dtype)
            np.concatenate(parts, out=stack[:ranks])
        else:
            there = [self._stack((name,)) for name in names] if len(names) > 1 else parts
            stack = self._on_gpu(executable, there, [part.nbytes for part in parts], shape)
        self._stacks[names] = stack
        held = sum(each.nbytes for each in self._stacks.values())
        while held > config.ADAPTER_MB.value << 20 and len(self._stacks) > 1:
            held -= self._stacks.popitem(last=False)[1].nbytes
        return stack

    def _on_gpu(
        self, owner: Executable, parts: Sequence[Any], sizes: Sequence[int], shape: tuple[int, int]
    ) -> DeviceTensor:
        """A new tensor of `shape`: the first bytes of arrays or of tensors, then zeros."""
        device.start(owner.device_id)
        dtype, stream = parts[0].dtype, owner.stream
        tensor = DeviceTensor(0, shape, dtype, owner.device_id, None)
        tensor.own(owner.shared.pool.allocate(tensor.nbytes, "adapters"))
        at = tensor.address
        for part, size in zip(parts, sizes, strict=True):
            if isinstance(part, DeviceTensor):
                stream.move(at, part.address, size)
            elif size:
                stream.upload(at, part.ctypes.data, size)
            at += size
        if any(isinstance(part, np.ndarray) for part in parts):
            stream.wait("uploading an adapter")  # whose memory may then be given back
        if rest := tensor.address + tensor.nbytes - at:
            stream.fill(at, 0, rest)
        return tensor


def _room(most: int, ranks: int) -> str:
    return (
        f"and the file was compiled for {most} in a batch: compile it with --adapter-rank {ranks}"
    )
