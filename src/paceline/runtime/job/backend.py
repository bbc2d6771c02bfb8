"""Which backend of `torch.distributed` carries the tensors of a job: the same on all of its ranks, and why.

On CPUs shared memory where ranks share a host, else Gloo; on GPUs NCCL, and one of these for tensors on the CPU. What a
host lacks is noted at the roll call, so that all ranks choose alike.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from enum import Enum

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from paceline import shm
from paceline.errors import LaunchError, nearest
from paceline.runtime.job.world import Backend, World

GLOO = "gloo"

# How long ranks wait for one that opens the group: it may have to build the native part of `shm` first.
_OPEN = timedelta(minutes=20)
_SHARED_HOST = "shared host"
_OBSTACLE = "obstacle"


class Choice(Enum):
    """What a user may ask for."""

    AUTO = "auto"
    SHM = shm.BACKEND
    GLOO = GLOO

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Return the choice of that name.

        Raises:
            LaunchError: there is none.
        """
        known = [choice.value for choice in cls]
        if text not in known:
            raise LaunchError(f"unknown backend '{text}'; it is one of: {', '.join(known)}.{nearest(text, known)}")
        return cls(text)


def notes(choice: Choice, world: World) -> dict[str, str]:
    """Return what the other ranks must know of this one before they choose."""
    if choice is Choice.GLOO:
        return {}
    found = {_SHARED_HOST: "yes"} if world.local_size > 1 else {}
    obstacle = shm.unavailable()
    if obstacle is not None:
        found[_OBSTACLE] = f"{obstacle.rstrip('.')} (host {socket.gethostname()})"
    return found


def for_cpus(choice: Choice, noted: Callable[[str], str | None]) -> Backend:
    """Return what carries tensors on CPUs.

    Args:
        choice: what was asked for.
        noted: gives the first note of that name which a rank left.

    Raises:
        LaunchError: shared memory was asked for, and some host cannot.
    """
    if choice is Choice.GLOO:
        return Backend(GLOO, GLOO)
    obstacle = noted(_OBSTACLE)
    if obstacle is not None:
        if choice is Choice.SHM:
            raise LaunchError(
                f"the backend '{shm.BACKEND}' cannot be used: {obstacle}. Choose '{GLOO}', or '{Choice.AUTO.value}' "
                "for whichever works."
            )
        return Backend(GLOO, f"{GLOO}: {obstacle}")
    if choice is Choice.AUTO and noted(_SHARED_HOST) is None:
        return Backend(GLOO, f"{GLOO}: no two ranks share a host")
    return Backend(shm.BACKEND, shm.BACKEND)


def open_group(carrier: Backend, store: Store, world: World) -> Backend:
    """Make the default process group; a collective. Return what it turned out to use.

    Args:
        carrier: of tensors on CPUs, from `for_cpus`.
        store: of this group only.
        world: this rank.
    """
    store.set_timeout(_OPEN)
    cuda = world.device.type == "cuda"
    dist.init_process_group(
        f"cpu:{carrier.name},cuda:nccl" if cuda else carrier.name,
        store=store,
        rank=world.rank,
        world_size=world.size,
        device_id=world.device if cuda else None,
    )
    group = dist.group.WORLD
    if carrier.name == shm.BACKEND and group is not None:
        words = shm.describe(group)
        carrier = Backend(GLOO if words.startswith(GLOO) else shm.BACKEND, words)
    return Backend("nccl", f"nccl, and on CPUs {carrier.words}") if cuda else carrier
