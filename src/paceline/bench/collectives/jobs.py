"""What the ranks of `paceline bench collectives` do: each collective in each way, turn by turn.

The job is started by `runtime.job.launch` and leaves the time of every repetition in a file of its rank.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import product
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from paceline.bench.collectives.exchanges import DTYPE, Exchange, Kind
from paceline.bench.groups import GLOO, SHM, Groups
from paceline.bench.results import leave
from paceline.runtime.job.rendezvous import join
from paceline.shm import describe

Times: TypeAlias = dict[str, list[list[float]]]
"""Of each way, for each round, the seconds of each repetition."""

_CPU = torch.device("cpu")
_BYTES_OF_A_TURN = 32 << 20
_LEAST, _MOST = 3, 40  # repetitions of a turn


class Way(StrEnum):
    """Where a collective's tensors lie and who moves their bytes."""

    SHM = "shm"
    SHM_IN_PLACE = "shm_in_place"
    GLOO = "gloo"
    BOUND = "bound"


@dataclass(frozen=True)
class Job:
    """What a rank is asked.

    Attributes:
        folder: where it leaves what it found.
        kinds: which collectives.
        sizes: of each, in bytes.
        rounds: how often each way has a turn.
        title: of the progress bar.
    """

    folder: str
    kinds: tuple[Kind, ...]
    sizes: tuple[int, ...]
    rounds: int
    title: str

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """Read what `to_json` wrote."""
        kinds = tuple(Kind(name) for name in values["kinds"])
        return cls(**{**values, "kinds": kinds, "sizes": tuple(values["sizes"])})


def take_times(arguments: dict[str, Any]) -> None:
    """Run every collective of every size in every way, and leave how long each repetition took on this rank."""
    job = Job.from_json(arguments)
    with join() as world:
        torch.set_num_threads(1)
        groups = Groups()
        times: dict[str, dict[int, Times]] = {kind: {} for kind in job.kinds}
        with Progress(console=Console(stderr=True), disable=world.rank > 0) as progress:
            task = progress.add_task(job.title, total=len(job.kinds) * len(job.sizes))
            for kind, size in product(job.kinds, job.sizes):
                progress.update(task, description=f"{job.title}: {kind}, {size} bytes")
                times[kind][size] = _measure(Exchange(kind, size, world.size), world.rank, groups, job.rounds)
                progress.advance(task)
        leave(job.folder, world.rank, {"times": times, "shm": describe(groups.on(SHM))})


def repetitions(size: int) -> int:
    """Return how often a collective of a size, in bytes, is repeated in a turn."""
    return max(_LEAST, min(_MOST, _BYTES_OF_A_TURN // size))


def _measure(exchange: Exchange, rank: int, groups: Groups, rounds: int) -> Times:
    ways = _ways(exchange, rank, groups)
    names, count = list(ways), repetitions(exchange.size)
    times: Times = {way: [] for way in names}
    gc.collect()
    gc.disable()
    for turn in range(rounds):
        first = turn % len(names)
        for way in names[first:] + names[:first]:
            dist.barrier()
            times[way].append(_repeat(ways[way], count))
    gc.enable()
    return times


def _repeat(call: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of each of some calls, after one that meets ranks late from the barrier and cold caches."""
    call()
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def _ways(exchange: Exchange, rank: int, groups: Groups) -> dict[Way, Callable[[], object]]:
    """Return the collective in each way, each seen to be right. Ordinary tensors are the same for `shm` and Gloo."""
    shm, gloo = groups.on(SHM), groups.on(GLOO)
    counts = exchange.given, exchange.taken
    ordinary = [torch.empty(count, dtype=DTYPE) for count in counts]
    ways = {
        Way.SHM: _checked(exchange, rank, shm, *ordinary),
        Way.GLOO: _checked(exchange, rank, gloo, *ordinary),
        Way.BOUND: _copy(exchange.bound),
    }
    allocate = _allocator(shm)
    if allocate is not None:
        ways[Way.SHM_IN_PLACE] = _checked(exchange, rank, shm, *(allocate(count) for count in counts))
    return ways


def _allocator(group: dist.ProcessGroup) -> Callable[[int], Tensor] | None:
    """Return what allocates elements in memory that the ranks of a group share; None where its backend has no such."""
    try:
        backend = group._get_backend(_CPU)
    except RuntimeError:  # a group written in Python has none
        return None
    if not backend.supports_tensor_alloc(_CPU):
        return None
    return lambda count: backend.allocate_tensor(max(count, 1), dtype=DTYPE, device=_CPU)[:count]


def _checked(
    exchange: Exchange, rank: int, group: dist.ProcessGroup, given: Tensor, taken: Tensor
) -> Callable[[], object]:
    call = exchange.call(group, given, taken)
    given.copy_(exchange.example(rank))
    call()
    expected = exchange.result(rank, (exchange.example(peer) for peer in range(exchange.ranks)))
    if not torch.equal(taken if exchange.taken else given, expected):
        raise RuntimeError(
            f"{exchange.kind} of {exchange.size} bytes on {dist.get_backend(group)} gave a wrong result."
        )
    given.zero_()  # sums of sums would grow until they are infinite
    return call


def _copy(count: int) -> Callable[[], object]:
    """Return what copies some bytes, by the C library, whose copy is the fastest there is here."""
    source, target = torch.ones(count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8)
    to, of = target.data_ptr(), source.data_ptr()

    def copy() -> None:
        ctypes.memmove(to, of, source.numel())
        _ = target  # both live as long as this

    return copy
