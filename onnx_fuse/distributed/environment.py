"""What a launcher tells a process about its run: torchrun's, Open MPI's and Slurm's variables."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from onnx_fuse.errors import UsageError

PORT = 29500
"""The port of rank 0 where nothing names one, which is torchrun's."""


@dataclass(frozen=True)
class Place:
    """The place of a process in its run."""

    rank: int
    """The number of the process among all, from 0."""
    size: int
    """The number of processes."""
    local_rank: int
    """The number of the process on its machine, which is that of its GPU."""
    host: str
    """The name or address of the machine of rank 0."""
    port: int
    """The port on which rank 0 listens."""


def place(environ: Mapping[str, str]) -> Place | None:
    """The place that the launcher's variables give, or None where there is no launcher.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT come first, then OMPI_COMM_WORLD_*,
    then SLURM_*. Under torchrun the port after MASTER_PORT is taken, since its agent listens on
    that one itself. ONNX_FUSE_PORT names another.

    Raises UsageError for variables that contradict each other.
    """
    here = _place(environ)
    if here is not None and not 0 <= here.rank < here.size:
        raise UsageError(f"the launcher's variables name rank {here.rank} of {here.size}")
    return here


def _place(environ: Mapping[str, str]) -> Place | None:
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank = _number(environ, "RANK")
        port = _number(environ, "MASTER_PORT", PORT)
        port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Place(
            rank,
            _number(environ, "WORLD_SIZE"),
            _number(environ, "LOCAL_RANK", rank),
            environ.get("MASTER_ADDR", "127.0.0.1"),
            _number(environ, "ONNX_FUSE_PORT", port),
        )
    if "OMPI_COMM_WORLD_RANK" in environ:
        rank, size = (_number(environ, f"OMPI_COMM_WORLD_{x}") for x in ("RANK", "SIZE"))
        local = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
        host = environ.get("MASTER_ADDR", "127.0.0.1" if local == size else "")
        if not host:
            raise UsageError("mpirun over several machines: set MASTER_ADDR to that of rank 0")
        job = environ.get("PMIX_NAMESPACE", "")
        port = _number(environ, "MASTER_PORT", _port_of(job) if job else PORT)
        here = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", rank)
        return Place(rank, size, here, host, _number(environ, "ONNX_FUSE_PORT", port))
    if "SLURM_PROCID" in environ and _number(environ, "SLURM_NTASKS", 1) > 1:
        rank = _number(environ, "SLURM_PROCID")
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        port = _number(environ, "MASTER_PORT", _port_of(environ.get("SLURM_JOB_ID", "")))
        return Place(
            rank,
            _number(environ, "SLURM_NTASKS"),
            _number(environ, "SLURM_LOCALID", 0),
            environ.get("MASTER_ADDR") or _first_host(nodes) or "127.0.0.1",
            _number(environ, "ONNX_FUSE_PORT", port),
        )
    return None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        raise UsageError(f"{name}={text!r}: expected a number")
    return int(text)


def _port_of(job: str) -> int:
    """A port of a job's own, so that two jobs may share a machine."""
    return 20000 + zlib.crc32(job.encode()) % 20000


def _first_host(nodes: str) -> str:
    """The first machine of a list as Slurm writes it: "gpu[03-05,9],login" gives "gpu03"."""
    match = re.match(r"([^,\[\]]*)(?:\[(\d+)[^\]]*\]([^,\[\]]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""
