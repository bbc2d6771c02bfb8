"""Which rank this process is: what ours, torchrun, SLURM or Open MPI left in the environment.

Reads variables and compares numbers; imports no PyTorch, opens no socket.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from paceline.errors import LaunchError, PlanError
from paceline.plan import Mesh

if TYPE_CHECKING:
    import torch

JOB_DIRECTORY = "PACELINE_JOB"  # set by our launcher: a directory of its own for this job
STORE_FILE = "PACELINE_RENDEZVOUS"  # set by our launcher when ranks meet through a file instead of a port
LOG_DIRECTORY = "PACELINE_LOGS"  # set by our launcher: where it writes a log per rank


class Launcher(Enum):
    """Who started this process."""

    NONE = "nobody"
    PACELINE = "paceline"
    TORCHRUN = "torchrun"
    SLURM = "srun"
    OPEN_MPI = "mpirun"
    VARIABLES = "the variables RANK and WORLD_SIZE"


@dataclass(frozen=True)
class Backend:
    """What carries tensors between the ranks of a job.

    Attributes:
        name: `shm`, `gloo`, or `nccl` on GPUs; `none` where there is one process.
        words: the same for people, with the reason where another was to be expected.
    """

    name: str
    words: str


ONE_PROCESS = Backend("none", "none: one process")


@dataclass(frozen=True)
class World:
    """This process among the ranks of a job.

    Attributes:
        rank: from 0 to `size` - 1.
        size: number of ranks of the job.
        local_rank: the same, among the ranks on this host.
        local_size: number of ranks on this host.
        launcher: who started the ranks.
        device_name: where this rank computes: `cpu` or `cuda:<index>`.
        backend: what carries tensors to the other ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = Launcher.NONE
    device_name: str = field(default="cpu", compare=False)
    backend: Backend = field(default=ONE_PROCESS, compare=False)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        import torch  # only who computes has it loaded anyway

        return torch.device(self.device_name)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> World | None:
        """Return what a launcher left in `environment`, or None where none is at work.

        RANK, which torchrun and ours set, goes before the variables of a scheduler around them. One task of a
        scheduler is no job of ranks: it may start ranks of its own.

        Raises:
            LaunchError: variables are missing, unreadable, or contradict each other.
        """
        if "RANK" in environment or "WORLD_SIZE" in environment:
            return _from_variables(environment)
        if "SLURM_PROCID" in environment:
            world = _from_slurm(environment)
        elif "OMPI_COMM_WORLD_RANK" in environment:
            world = _from_open_mpi(environment)
        else:
            return None
        return world if world.size > 1 else None


def check_world(mesh: Mesh, world: World) -> None:
    """Refuse a world that `mesh` does not fit.

    Raises:
        PlanError: the mesh has another number of ranks than were started.
    """
    if mesh.size == world.size:
        return
    start = {
        Launcher.SLURM: f"srun --ntasks {mesh.size}",
        Launcher.OPEN_MPI: f"mpirun -n {mesh.size}",
    }.get(world.launcher, f"torchrun --nproc-per-node {mesh.size}")
    fitting = ", ".join(f"'{axis}={world.size}'" for axis in mesh.names or ("dp", "fsdp"))
    several = world.launcher in (Launcher.TORCHRUN, Launcher.VARIABLES)
    raise PlanError(
        f"mesh '{mesh}' has {mesh.size} ranks, but {world.size} {'was' if world.size == 1 else 'were'} started by "
        f"{world.launcher.value}. Start {mesh.size} with `{start} ...`"
        + (f" (on several nodes, nodes times processes per node is {mesh.size})" if several else "")
        + f", or choose a mesh of {world.size}, such as {'serial' if world.size == 1 else fitting}."
    )


def _from_variables(environment: Mapping[str, str]) -> World:
    if JOB_DIRECTORY in environment or STORE_FILE in environment:
        launcher = Launcher.PACELINE
    elif "TORCHELASTIC_RUN_ID" in environment:
        launcher = Launcher.TORCHRUN
    else:
        launcher = Launcher.VARIABLES
    for name, partner in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in environment:
            raise LaunchError(
                f"the environment has {partner}={environment[partner]} but no {name}. A launcher sets both: start with "
                f"torchrun, or `unset {partner}` to run without one."
            )
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    return _checked(
        rank,
        size,
        _number(environment, "LOCAL_RANK", default=rank),
        _number(environment, "LOCAL_WORLD_SIZE", default=size),
        launcher,
    )


def _from_slurm(environment: Mapping[str, str]) -> World:
    # The step's own number of tasks, where srun was told one, is not that of the allocation.
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    size = _number(environment, name)
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    node = _number(environment, "SLURM_NODEID", default=0)
    per_node = _tasks_per_node(tasks)
    return _checked(
        _number(environment, "SLURM_PROCID"),
        size,
        _number(environment, "SLURM_LOCALID"),
        per_node[node] if node < len(per_node) else size,
        Launcher.SLURM,
    )


def _tasks_per_node(text: str) -> list[int]:
    """Read SLURM's `4(x2),1` as [4, 4, 1]; anything else is empty."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _from_open_mpi(environment: Mapping[str, str]) -> World:
    return _checked(
        _number(environment, "OMPI_COMM_WORLD_RANK"),
        _number(environment, "OMPI_COMM_WORLD_SIZE"),
        _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        Launcher.OPEN_MPI,
    )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        state = "is not set" if text is None else f"is '{text}'"
        raise LaunchError(f"{name} {state} in the environment; the launcher sets it to a whole number from 0.")
    return int(text)


def _checked(rank: int, size: int, local_rank: int, local_size: int, launcher: Launcher) -> World:
    for what, number, count in (("rank", rank, size), ("local rank", local_rank, local_size)):
        if number >= count:
            raise LaunchError(
                f"{launcher.value} says that this is {what} {number} of {count}; ranks are numbered from 0 to the "
                "size less 1. Look at how the job was started."
            )
    return World(rank, size, local_rank, local_size, launcher)
