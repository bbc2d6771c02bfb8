"""Where a run with servers keeps what it needs, within its run directory (`train.rundir`).

    exchange/                 see `exchange.directory`; with groups that of the global servers, else the only one
    groups/N/                 the same for the servers of a group, its meetings with the global ones (`groups.ledger`),
                              and cuts to go on from (`groups.cuts`)
    work/worker-N.jsonl       within an exchange's: what its worker N did (`records`)
    logs/server-N.log         of member N of the job, as in `events.jsonl`, and so `worker-N.log`; of group G
                              `server-G-N.log`. Until it has joined its log is `server-start-K.log`; that of a worker
                              of several ranks stays `worker-start-K.log`, with those of the ranks beside it
    logs/*.log                of supervisor, coordinators and bridges
    buffers.safetensors       buffers of the module, from whoever looked at what was learnt last

What is in the directory of an exchange is moved aside with it when a run is resumed.
"""

from __future__ import annotations

from pathlib import Path

from paceline.exchange.directory import Directory
from paceline.train.rundir import RunDirectory


def exchange_of(run: RunDirectory, group: int | None = None) -> Directory:
    """Return the directory of the exchange, or of that of a group."""
    return Directory(run.root / "exchange" if group is None else run.root / "groups" / str(group))


def work_of(run: RunDirectory, worker: int, group: int | None = None) -> Path:
    """Return the file of what a worker did."""
    return exchange_of(run, group).root / "work" / f"worker-{worker}.jsonl"


def work_before(run: RunDirectory, group: int | None = None) -> list[Path]:
    """Return the folders of what workers did before the run was resumed, the latest first."""
    root = exchange_of(run, group).root
    before = [path for path in root.parent.glob(f"{root.name}-before-*") if path.name.rpartition("-")[2].isdigit()]
    return [path / "work" for path in sorted(before, key=lambda path: -int(path.name.rpartition("-")[2]))]


def buffers_of(run: RunDirectory) -> Path:
    """Return the file of the module's buffers."""
    return run.root / "buffers.safetensors"


def log_of(run: RunDirectory, name: str) -> Path:
    """Return the log of a process, such as `worker-3`."""
    return run.root / "logs" / f"{name}.log"
