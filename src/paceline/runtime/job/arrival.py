"""The roll call before a job begins: every rank signs in at a store, and who is missing or there twice is named.

Without it, a wrong world size, a rank that never starts or a rank number given out twice are all the same silent hang.
Knows a key-value store and numbers; nothing of process groups.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from torch._C._distributed_c10d import Store

from paceline.errors import LaunchError
from paceline.runtime.job.world import Launcher, World

_POLL_S = 0.02
_BEGIN = b"begin"


def roll_call(
    store: Store,
    world: World,
    timeout_s: float,
    log_directory: Path | None = None,
    *,
    backend: str = "auto",
    notes: Mapping[str, str] | None = None,
) -> int:
    """Wait until all ranks have signed in, and return how often this job has met at this store before.

    A fault that one rank finds is told to all that still wait, so that all end with the same message.

    Args:
        store: where the ranks meet.
        world: this rank.
        timeout_s: how long to wait for the others, in seconds.
        log_directory: where logs of ranks are, for the message.
        backend: what this rank was told to choose.
        notes: what all ranks are to know of this one, see `noted`.

    Raises:
        LaunchError: a rank did not come, came twice, or was started with another world size, device or backend.
    """
    deadline = time.monotonic() + timeout_s
    myself = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "machine": uuid.getnode()})
    meeting = store.add(f"signed/{world.rank}", 1) - 1
    if meeting == 0:
        store.set(f"who/{world.rank}", myself)
    else:
        first = _wait(store, f"who/{world.rank}", deadline)
        # A process that comes again has left the first time, and begins another job at the same store.
        if first is not None and first.decode() != myself:
            _refuse(store, meeting - 1, _claimed_twice(world, json.loads(first), json.loads(myself)))
    store.set(f"{meeting}/here/{world.rank}", "1")
    for what, mine, todo in (
        ("number of ranks", str(world.size), "torchrun: --nnodes and --nproc-per-node, on every node"),
        ("kind of device", world.device.type, "'auto' takes what each host has; name one"),
        ("backend", backend, "--backend or the recipe, on every node"),
    ):
        common = store.compare_set(f"{meeting}/{what}", "", mine).decode()
        if common != mine:
            fault = f"rank {world.rank} was started with '{mine}' as the {what}, others with '{common}'."
            _refuse(store, meeting, f"{fault} Give the same everywhere ({todo}).")
    for name, text in (notes or {}).items():
        store.compare_set(_note(meeting, name), "", text)
    if store.add(f"{meeting}/arrived", 1) == world.size:
        store.compare_set(f"{meeting}/verdict", "", _BEGIN.decode())
    verdict = _wait(store, f"{meeting}/verdict", deadline)
    if verdict is None:
        _refuse(store, meeting, _missing(store, world, meeting, timeout_s, log_directory))
    elif verdict != _BEGIN:
        raise LaunchError(verdict.decode())
    return meeting


def noted(store: Store, meeting: int, name: str) -> str | None:
    """Return what the first rank with a note of that name wrote, or None without one: the same on all ranks.

    To be called after the roll call.
    """
    key = _note(meeting, name)
    return store.get(key).decode() if store.check([key]) else None


def sign_out(store: Store, world: World, meeting: int, timeout_s: float) -> None:
    """Tell the others that this rank needs the store no more, and wait for theirs: who keeps it may then go."""
    name = f"{meeting}/left"
    if store.add(name, 1) == world.size:
        store.set(f"{name}/all", "1")
    if world.rank == 0:
        _wait(store, f"{name}/all", time.monotonic() + timeout_s)


def _note(meeting: int, name: str) -> str:
    return f"{meeting}/note/{name}"


def _wait(store: Store, key: str, deadline: float) -> bytes | None:
    """Return the value of `key`, or None when it was not there by the deadline.

    `Store.wait` would hold back signals and write warnings of its own.
    """
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return store.get(key)


def _refuse(store: Store, meeting: int, fault: str) -> NoReturn:
    """End the roll call with `fault`, for all; the first verdict stands."""
    verdict = store.compare_set(f"{meeting}/verdict", "", fault)
    raise LaunchError(fault if verdict == _BEGIN else verdict.decode())


def _claimed_twice(world: World, first: dict[str, object], second: dict[str, object]) -> str:
    where = " and ".join(f"process {who['process']} on {who['host']}" for who in (first, second))
    todo = {
        Launcher.TORCHRUN: "Give every node its own --node-rank, from 0.",
        Launcher.PACELINE: "Give every job its own rendezvous file.",
    }.get(world.launcher, "Give every process its own rank, and every job its own MASTER_PORT.")
    return f"two processes claim to be rank {world.rank} of {world.size}: {where}. {todo}"


def _missing(store: Store, world: World, meeting: int, timeout_s: float, log_directory: Path | None) -> str:
    there = [rank for rank in range(world.size) if store.check([f"{meeting}/here/{rank}"])]
    gone = [rank for rank in range(world.size) if rank not in there]
    if not gone:  # the last one signed in just now
        return f"not all of {world.size} ranks arrived within {timeout_s:g} s; some came late. Start again."
    todo = {
        Launcher.SLURM: "Is the program started with srun, on all nodes? Look at that rank's output.",
        Launcher.TORCHRUN: "Is torchrun started on all nodes, with the same --nnodes? Look at that rank's output.",
    }.get(world.launcher, "Look at the missing rank's output, and whether it was started at all.")
    if log_directory is not None:
        todo = f"Look at its log {log_directory / f'rank-{gone[0]}.log'}."
    return (
        f"{'rank' if len(gone) == 1 else 'ranks'} {_listed(gone)} of {world.size} never arrived within {timeout_s:g} s "
        f"(arrived: {_listed(there)}). {todo}"
    )


def _listed(ranks: list[int], most: int = 16) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more
