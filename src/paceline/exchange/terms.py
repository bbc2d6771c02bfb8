"""The terms of a job: what the coordinator goes by, and what all processes of a job read at their start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from paceline.exchange.job import Job
from paceline.exchange.view import Address


@dataclass(frozen=True)
class Terms:
    """How a job goes.

    Attributes:
        tasks: of the whole job, a multiple of its pieces.
        first_task: where it goes on, after a restart from a snapshot.
        servers: with how many it begins.
        workers: below how many it waits, and says so.
        ahead: tasks that a worker may be dealt before it has done those it has; under BSP and SSP 2: one that it
            computes, and the next.
        evaluate_every: clocks between evaluations; 0: at the end only.
        snapshot_every: clocks between snapshots; 0: at the end only.
        kept_snapshots: how many of the last ones stay.
        lease_s: after how many seconds without a word a member is out.
        restored: number of the snapshot that servers begin with; 0 is what the job was made with.
        outlived: whether what servers hold is there without them (hogwild's memory): when the last one is gone, the
            job waits for another.
    """

    tasks: int
    first_task: int = 0
    servers: int = 1
    workers: int = 1
    ahead: int = 1
    evaluate_every: int = 0
    snapshot_every: int = 0
    kept_snapshots: int = 2
    lease_s: float = 2.0
    restored: int = 0
    outlived: bool = False


@dataclass(frozen=True)
class Charter:
    """What every process of a job is started with; `directory.Directory.charter` is its file.

    Attributes:
        coordinator: where it listens.
        store: where the coordinator keeps what must outlive it: `embedded`, `etcd://host:port/prefix` or
            `redis://host:port/db`.
        transport: `auto` (the best that both ends have), `shared`, `unix` or `tcp`.
        streams: TCP connections for each pair.
        bind: the interface that servers listen on for TCP.
        log: whether applied updates and workers' actions are logged, for a replay.
        durable: whether what is acknowledged is in these logs, and in the coordinator's journal, also after a loss of
            power; else what the last seconds wrote may be missing there.
    """

    job: Job
    terms: Terms
    coordinator: Address
    store: str = "embedded"
    transport: str = "auto"
    streams: int = 1
    bind: str = "127.0.0.1"
    log: bool = True
    durable: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "job": self.job.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        made = {
            "job": Job.from_dict(values["job"]),
            "terms": Terms(**values["terms"]),
            "coordinator": Address(**values["coordinator"]),
        }
        return cls(**{**values, **made})
