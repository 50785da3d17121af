"""What a candidate is: a kernel that serves problems of one operator by its configurations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from onnx_fuse.cuda.arguments import MAP_BYTES
from onnx_fuse.cuda.macros import Defines, defines
from onnx_fuse.program.launch import Arg, Launch, Launches, Ptr, Table, TensorMap, Waits
from onnx_fuse.program.problem import AnyProblem, Hardware, KernelConfig

Blocks = int | tuple[int, int, int]
P = TypeVar("P", bound=AnyProblem, contravariant=True)


def launch(
    source: str, entry: str, blocks: Blocks, threads: int, *args: Arg, smem: Any = 0,
    cluster: Any = 1, sync: Any = 0, cooperative: Any = False, waits: Any = "first",
    early: Any = (), **macros: object,
) -> Launch:  # fmt: skip
    """The launch of an entry of a source, of so many blocks and threads of each, by its macros."""
    grid = blocks if isinstance(blocks, tuple) else (blocks, 1, 1)
    return Launch(
        source, entry, grid, (threads, 1, 1), args, defines(**macros), smem, cluster, sync,
        cooperative, waits=waits, early=early,
    )  # fmt: skip


def matrices(
    name: str, dtype: str, line: int, lines: int, step: int, box: tuple[int, int], *,
    count: int = 1, apart: int = 0,
) -> TensorMap:  # fmt: skip
    """The descriptor of boxes of `count` matrices, of `lines` that lie `step` elements apart.

    The matrices lie `apart`, one behind another by default.
    """
    size = MAP_BYTES[dtype]
    steps = (step * size, (apart or step * lines) * size)
    return TensorMap(Ptr(name), dtype, (line, lines, count), steps, (*box, 1))


@dataclass
class WorkspaceArena:
    """Hands out places inside the workspace, in order."""

    size: int = 0
    aligned: int = 256

    def allocate(self, nbytes: int) -> Ptr:
        """A place of so many bytes; the next one is aligned as well."""
        place = Ptr("workspace", self.size)
        self.size += -(-nbytes // self.aligned) * self.aligned
        return place


def roofline(
    hw: Hardware, costs: Mapping[str, float], moved: float, work: float = 0.0, launches: int = 1
) -> float:
    """Seconds of `moved` bytes or of `work`, seconds at a full rate, whichever take longer.

    Of the numbers of a cost, "memory" and "math" are the shares of both rates that it reaches.
    """
    took = max(moved / (costs.get("memory", 1.0) * hw.bandwidth), work / costs.get("math", 1.0))
    return took + launches * hw.launch_seconds


def apart(blocks: int, hw: Hardware) -> int:
    """Shared memory by which no two of so many blocks stand on one SM, or no more than must.

    The loads of one would hold up the other's. Half of it stays for what is launched beside them.
    How many must is a guard, up to four.
    """
    return hw.smem_per_block // (2 * next((n for n in (1, 2, 3) if blocks <= n * hw.sm_count), 4))


def rename(launch: Launch, names: Mapping[str, Ptr]) -> Launch:
    """`launch` with the pointers called `names` replaced: how launches are composed."""

    def change(ptr: Ptr) -> Ptr:
        new = names.get(ptr.name)
        return ptr if new is None else Ptr(new.name, new.offset + ptr.offset)

    def changed(arg: Arg) -> Arg:
        if isinstance(arg, Ptr):
            return change(arg)
        if isinstance(arg, Table):
            return Table(tuple(change(x) if isinstance(x, Ptr) else x for x in arg.words))
        return replace(arg, ptr=change(arg.ptr)) if isinstance(arg, TensorMap) else arg

    return replace(launch, args=tuple(changed(arg) for arg in launch.args))


def renamed(launches: Iterable[Launch], names: Mapping[str, Ptr]) -> Launches:
    """Each of the launches as `rename` has it."""
    return tuple(rename(each, names) for each in launches)


class Kernel(Protocol[P]):
    """What select, the tuner, the lab, the tests and the runtime need of a candidate.

    P is the type of its operator's problems. A candidate derives from this class, whose other
    members are right for most.
    """

    name: str
    source: str = ""
    waits: Waits = "first"
    """When its source waits for what was launched before it (see `Launch`)."""
    early: Defines = ()
    """The macros by which its source lets the next launch start at once."""

    @property
    def version(self) -> int:
        """A number that is raised once its compiled code is another: records are of one version."""
        return 1

    def supports(self, problem: P, hw: Hardware) -> str | None:
        """The reason why this kernel can't serve `problem`, or None: no other place states it."""

    def configs(self, problem: P, hw: Hardware) -> Sequence[KernelConfig]:
        """The legal configurations, the default first."""

    def fits(self, problem: P, config: KernelConfig) -> bool:
        """Whether `config`, legal for the largest sizes of the class, is so for `problem`.

        Each comparison with an open size is a guard. True unless a kernel says otherwise.
        """
        return True

    def cost(self, problem: P, config: KernelConfig, hw: Hardware) -> float:
        """Predicted seconds."""

    def numbers(self, hw: Hardware) -> Mapping[str, float]:
        """The numbers of its cost on this GPU, by name."""
        return hw.costs(self.source)

    def launch(self, problem: P, config: KernelConfig, hw: Hardware) -> Launches:
        """The kernel calls, in order."""

    def one(self, entry: str, blocks: Blocks, threads: int, *args: Arg, **how: Any) -> Launches:
        """One launch of an entry of its source; `how`: macros, and what `launch` names."""
        facts: dict[str, Any] = {"waits": self.waits, "early": self.early}
        return (launch(self.source, entry, blocks, threads, *args, **facts, **how),)

    def workspace(self, problem: P, config: KernelConfig, hw: Hardware) -> int:
        """Bytes of scratch bound under "workspace", none by default, which may hold anything."""
        return 0


Candidate: TypeAlias = Kernel[Any]
"""One of an operator whose problems' type is known to its candidates alone."""
Kernels: TypeAlias = Mapping[str, Sequence[Candidate]]
"""Operator -> its candidates: what each module of kernels has as KERNELS."""
