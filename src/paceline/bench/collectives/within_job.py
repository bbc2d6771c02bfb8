"""`paceline bench collectives` among the ranks of a job that is running: is this bandwidth normal for my cluster?

    torchrun --nnodes 2 --nproc-per-node 8 ... -m paceline.cli.main bench collectives --set cluster=dgx-h100

Each rank calls every collective on its own device, over NCCL or what carries tensors between CPUs. Beside the measured
bandwidth stands what the cluster expects of so many neighbouring ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench.collectives.exchanges import DTYPE, Exchange, Kind
from paceline.bench.collectives.expected import expected_seconds
from paceline.bench.collectives.jobs import repetitions
from paceline.bench.machine import table_console
from paceline.cluster.cluster import Cluster
from paceline.runtime.job.world import World

LOW = 0.5
"""Below this share of what is expected, something is wrong rather than noisy."""


@dataclass(frozen=True)
class Asked:
    """Which collectives, how large, and how often each has a turn."""

    kinds: tuple[Kind, ...]
    sizes: tuple[int, ...]
    rounds: int


@dataclass(frozen=True)
class Found:
    """One collective of one size.

    Attributes:
        us: the median over the turns of what the slowest rank took, in microseconds.
        bus_gb_s: bus bandwidth as NCCL's tests define it, in 10^9 bytes a second.
        expected_us, expected_bus_gb_s: what the cluster says; None without one.
    """

    us: float
    bus_gb_s: float
    expected_us: float | None = None
    expected_bus_gb_s: float | None = None

    @property
    def reached(self) -> float | None:
        """Which share of the expected bandwidth was reached."""
        return None if self.expected_us is None else self.expected_us / self.us


def measure(world: World, asked: Asked, cluster: Cluster | None) -> dict[str, Any]:
    """Measure on all ranks, print on rank 0, and return the object of `--json` there, nothing elsewhere. A collective.

    Raises:
        ClusterError: the cluster has fewer devices than the job has ranks.
    """
    found: dict[str, dict[int, Found]] = {str(kind): {} for kind in asked.kinds}
    for kind, size in product(asked.kinds, asked.sizes):
        exchange = Exchange(kind, divisible(size, world.size), world.size)
        seconds = _seconds(exchange, world, asked.rounds)
        found[str(kind)][exchange.size] = _found(exchange, seconds, cluster)
    if world.rank:
        return {}
    _show(table_console(), found, world, cluster)
    figures = {kind: {str(size): asdict(each) for size, each in sizes.items()} for kind, sizes in found.items()}
    settings = {"rounds": asked.rounds, "cluster": None if cluster is None else cluster.name}
    job = {"ranks": world.size, "backend": dist.get_backend(), "device": world.device.type}
    return {"collectives": {str(world.size): figures}, "settings": settings, "job": job}


def divisible(size: int, ranks: int) -> int:
    """Return the next size that all ranks can share in whole numbers."""
    unit = ranks * DTYPE.itemsize
    return -(-size // unit) * unit


def bus_bytes(exchange: Exchange) -> float:
    """Return bytes that pass through each link of a ring: what bus bandwidth counts."""
    if exchange.kind is Kind.BROADCAST:
        return float(exchange.size)
    passes = 2 if exchange.kind is Kind.ALL_REDUCE else 1
    return passes * exchange.size * (exchange.ranks - 1) / exchange.ranks


def _found(exchange: Exchange, seconds: float, cluster: Cluster | None) -> Found:
    bus = bus_bytes(exchange)
    if cluster is None:
        return Found(seconds * 1e6, bus / seconds * 1e-9)
    expected = expected_seconds(cluster, exchange)
    return Found(seconds * 1e6, bus / seconds * 1e-9, expected * 1e6, bus / expected * 1e-9)


def _seconds(exchange: Exchange, world: World, rounds: int) -> float:
    """Return the median over the turns of what one call took on the slowest rank."""
    group = dist.group.WORLD
    assert group is not None
    given = torch.zeros(exchange.given, dtype=DTYPE, device=world.device)
    taken = torch.zeros(exchange.taken, dtype=DTYPE, device=world.device)
    call = exchange.call(group, given, taken)
    turns = torch.tensor([_turn(call, repetitions(exchange.size), world.device) for _ in range(rounds)])
    turns = turns.to(world.device)
    dist.all_reduce(turns, op=dist.ReduceOp.MAX)
    slowest: list[float] = turns.tolist()
    return median(slowest)


def _turn(call: Callable[[], object], count: int, device: torch.device) -> float:
    call()
    _wait(device)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        call()
    _wait(device)
    return (time.perf_counter() - began) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _show(console: Console, found: dict[str, dict[int, Found]], world: World, cluster: Cluster | None) -> None:
    where = "" if cluster is None else f"; expected: what the cluster '{cluster.name}' says"
    console.print(f"{world.size} ranks on {dist.get_backend()}, {world.device.type}{where}", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("collective", "bytes", "µs", "bus GB/s", "expected", "reached", ""):
        table.add_column(head, justify="left" if head in ("collective", "") else "right")
    for kind, sizes in found.items():
        for size, each in sizes.items():
            expected = "" if each.expected_bus_gb_s is None else f"{each.expected_bus_gb_s:.3g}"
            reached = "" if each.reached is None else f"{each.reached:.0%}"
            verdict = "low" if each.reached is not None and each.reached < LOW else ""
            table.add_row(kind, f"{size:,}", f"{each.us:.1f}", f"{each.bus_gb_s:.3g}", expected, reached, verdict)
    console.print(table)
