"""What a candidate is: a kernel that serves problems of one operator by its configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from onnx_fuse.program.problem import Hardware, KernelConfig, Launches


class Kernel(Protocol):
    """What select, the tuner, the lab, the tests and the runtime need of a candidate.

    A candidate names the type of its operator's problems where this says Any. It derives from this
    class, whose other members are right for most.
    """

    name: str

    @property
    def version(self) -> int:
        """A number that is raised once its compiled code is another: records are of one version."""
        return 1

    def supports(self, problem: Any, hw: Hardware) -> str | None:
        """The reason why this kernel can't serve `problem`, or None: no other place states it."""

    def configs(self, problem: Any, hw: Hardware) -> Sequence[KernelConfig]:
        """The legal configurations, the default first."""

    def fits(self, problem: Any, config: KernelConfig) -> bool:
        """Whether `config`, legal for the largest sizes of the class, is so for `problem`.

        Each comparison with an open size is a guard. True unless a kernel says otherwise.
        """
        return True

    def cost(self, problem: Any, config: KernelConfig, hw: Hardware) -> float:
        """Predicted seconds."""

    def launch(self, problem: Any, config: KernelConfig, hw: Hardware) -> Launches:
        """The kernel calls, in order."""

    def workspace(self, problem: Any, config: KernelConfig, hw: Hardware) -> int:
        """Bytes of scratch bound under "workspace", none by default, which may hold anything."""
        return 0
