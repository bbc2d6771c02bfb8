"""Contestants in turn: step times of all of them in one process per rank, peak memory of each in a process of its own.

Who they are is the caller's: a contestant is a name, and something that sets it up.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from paceline.bench.contestants import Contender, mean_over_ranks
from paceline.bench.groups import Groups
from paceline.runtime.job.rendezvous import join
from paceline.runtime.job.world import STORE_FILE, World
from paceline.runtime.process_memory import forget_peak, give_back, memory_bytes, peak_bytes, private_bytes

SERIAL = "serial"
"""The name of who trains on rank 0 alone, while the others wait."""

SetUp = Callable[[str, World, Groups], Contender]
"""Makes a contestant ready to train; a collective."""

_MEMORY_STEPS = 2


def take_step_times(
    names: Sequence[str],
    set_up: SetUp,
    world: World,
    *,
    may_fail: Callable[[str], bool],
    rounds: int,
    steps: int,
    title: str,
) -> dict[str, Any]:
    """All contestants in one process per rank, turn by turn, so that a noisy machine is equally noisy for all.

    Args:
        names: of the contestants, in the order in which they are set up.
        set_up: makes one of them ready to train.
        world: this rank.
        may_fail: whether the benchmark goes on without a contestant that cannot run on this machine.
        rounds: how often everybody has a turn.
        steps: steps of a turn.
        title: of the progress bar.

    Returns:
        By name: `step_s` and `optimizer_s` (seconds of each round on this rank), `loss` and `next_loss` (of the first
        two steps), `start` (what ours took to plan), and `left_out` (what those who cannot run had to say).
    """
    groups = Groups()
    with Progress(console=Console(stderr=True), disable=world.rank > 0) as progress:
        task = progress.add_task(title, total=len(names) * (rounds + 1))
        contenders: dict[str, Contender] = {}
        losses: dict[str, list[float]] = {}
        left_out: dict[str, str] = {}
        for who in names:
            try:
                contender = set_up(who, world, groups)
                losses[who] = [mean_over_ranks(contender.step()[0]) for _ in range(2)]
                contenders[who] = contender
            except Exception as error:
                if not may_fail(who):
                    raise
                left_out[who] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            progress.advance(task)
        seconds: dict[str, list[float]] = {who: [] for who in contenders}
        optimizer: dict[str, list[float]] = {who: [] for who in contenders}
        order = list(contenders)
        for turn in range(rounds):
            first = turn % len(order)
            for who in order[first:] + order[:first]:
                whole, of_optimizer = _turn(contenders[who], who, world, steps)
                seconds[who].append(whole)
                optimizer[who].append(of_optimizer)
                progress.advance(task)
            progress.advance(task, len(left_out))
    starts = {who: asdict(contender.startup) for who, contender in contenders.items() if contender.startup}
    return {
        "step_s": seconds,
        "optimizer_s": optimizer,
        "loss": {who: first for who, (first, _) in losses.items()},
        "next_loss": {who: following for who, (_, following) in losses.items()},
        "left_out": left_out,
        "start": starts,
    }


def take_memory(
    names: Sequence[str], set_up: SetUp, set_up_toy: SetUp, *, backend: Callable[[str], str], folder: str, title: str
) -> dict[str, dict[str, int]]:
    """Each contestant in a process of its own, forked from one that has loaded all libraries.

    Args:
        names: of the contestants.
        set_up: makes one of them ready to train.
        set_up_toy: makes it ready to train a toy model of the same kind, before memory is taken.
        backend: which backend each meets on: no other than its own, whose memory would be there too.
        folder: where ranks meet.
        title: of the progress bar.

    Returns:
        By name, in bytes over what the process held before: `step_bytes` (peak of a step), `start_bytes` (peak until
        ready to train), `held_bytes` (between two steps: parameters, optimizer state, what ranks exchange through) and
        `held_private_bytes` (of them, what is not shared).
    """
    fork = multiprocessing.get_context("fork")
    taken: dict[str, dict[str, int]] = {}
    with Progress(console=Console(stderr=True), disable=int(os.environ["RANK"]) > 0) as progress:
        for who in progress.track(names, description=title):
            receiver, sender = fork.Pipe(duplex=False)
            meet = str(Path(folder) / f"meet-{who}")
            process = fork.Process(
                target=_memory_of, args=(who, set_up, set_up_toy, backend(who), meet, sender), daemon=True
            )
            process.start()
            sender.close()
            try:
                taken[who] = receiver.recv()
            except EOFError:
                raise RuntimeError(f"{who} ended without a word; see the log") from None
            finally:
                process.join()
    return taken


def _memory_of(who: str, set_up: SetUp, set_up_toy: SetUp, backend: str, meet: str, sender: Connection) -> None:
    os.environ[STORE_FILE] = meet
    with join(backend=backend) as world:
        torch.set_num_threads(1)
        groups = Groups()
        # Libraries that load with the first step, and what they keep, are no memory of this model.
        if _takes_part(who, world):
            set_up_toy(who, world, groups).step()
        give_back()
        _meet(world)  # a share of what all have depends on how many have it already
        before, private_before = memory_bytes(), private_bytes()
        forget_peak()
        _meet(world)
        contender = set_up(who, world, groups) if _takes_part(who, world) else None
        at_start = peak_bytes()
        if contender is not None:
            contender.step()
            give_back()
        _meet(world)
        held, private = memory_bytes(), private_bytes()
        forget_peak()
        for _ in range(_MEMORY_STEPS):
            if contender is not None:
                contender.step()
        _meet(world)
        found = {"step_bytes": peak_bytes(), "start_bytes": at_start, "held_bytes": held}
        _meet(world)
    taken = {name: count - before for name, count in found.items()}
    sender.send({**taken, "held_private_bytes": private - private_before})


def _meet(world: World) -> None:
    if world.size > 1:
        dist.barrier()


def _takes_part(who: str, world: World) -> bool:
    return world.rank == 0 or who != SERIAL


def _turn(contender: Contender, who: str, world: World, steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and how many of them the optimizer took, on this rank."""
    gc.collect()
    gc.disable()  # a collection of everybody's garbage in one's turn
    dist.barrier()
    began = time.perf_counter()
    of_optimizer = 0.0
    if _takes_part(who, world):
        for _ in range(steps):
            _, seconds = contender.step()
            of_optimizer += seconds
    whole = time.perf_counter() - began
    dist.barrier()
    gc.enable()
    return whole / steps, of_optimizer / steps
