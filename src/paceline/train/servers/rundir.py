"""Where a run with servers keeps what it needs, within its run directory (`train.rundir`).

    exchange/                 see `exchange.directory`; with groups that of the global servers, else the only one
    exchange/groups/N/        the same for the servers of a group, its meetings with the global ones (`groups.ledger`),
                              and cuts to go on from (`groups.cuts`)
    exchange/recipe.yaml      what this part of the run was trained by
    exchange-before-N/        parts of the run before it was resumed, from 1 (`parts_before`)
    work/worker-N.jsonl       within an exchange's: what its worker N did (`records`)
    logs/server-N.log         of member N of the job, as in `events.jsonl`, and so `worker-N.log`; of group G
                              `server-G-N.log`. Until it has joined its log is `server-start-K.log`; that of a worker
                              of several ranks stays `worker-start-K.log`, with those of the ranks beside it
    logs/*.log                of supervisor, coordinators and bridges
    buffers.safetensors       buffers of the module, from whoever looked at what was learnt last

Parts stand by themselves: logs, and the snapshot that they began with, whose files are also in the part before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.exchange.directory import Directory
from paceline.train.rundir import RunDirectory

NAME: Final = "exchange"
"""Of the part that a run is in."""


@dataclass(frozen=True)
class Part:
    """A part of a run: from its start, or from where it was resumed, up to its end, or to where it was resumed again.

    Attributes:
        root: its directory, which nothing outside belongs to.
    """

    root: Path

    @property
    def recipe(self) -> Path:
        """What it was trained by."""
        return self.root / "recipe.yaml"

    def exchange(self, group: int | None = None) -> Directory:
        """Return the directory of the exchange, or of that of a group."""
        return Directory(self.root if group is None else self.root / "groups" / str(group))

    def groups(self) -> list[int]:
        """Return the numbers of its groups; none where it has no groups."""
        return sorted(int(path.name) for path in self.root.glob("groups/*") if path.name.isdigit())

    def work(self, worker: int, group: int | None = None) -> Path:
        """Return the file of what a worker did."""
        return self.exchange(group).root / "work" / f"worker-{worker}.jsonl"


def part_of(run: RunDirectory) -> Part:
    """Return the part that a run is in."""
    return Part(run.root / NAME)


def parts_before(run: RunDirectory) -> list[Part]:
    """Return what a run did before it was resumed, in order."""
    found = {path.name.removeprefix(f"{NAME}-before-"): path for path in run.root.glob(f"{NAME}-before-*")}
    return [Part(found[number]) for number in sorted(filter(str.isdigit, found), key=int)]


def exchange_of(run: RunDirectory, group: int | None = None) -> Directory:
    """Return the directory of the exchange, or of that of a group."""
    return part_of(run).exchange(group)


def work_of(run: RunDirectory, worker: int, group: int | None = None) -> Path:
    """Return the file of what a worker did."""
    return part_of(run).work(worker, group)


def work_before(run: RunDirectory, group: int | None = None) -> list[Path]:
    """Return the folders of what workers did before the run was resumed, the latest first."""
    return [part.work(0, group).parent for part in reversed(parts_before(run))]


def buffers_of(run: RunDirectory) -> Path:
    """Return the file of the module's buffers."""
    return run.root / "buffers.safetensors"


def log_of(run: RunDirectory, name: str) -> Path:
    """Return the log of a process, such as `worker-3`."""
    return run.root / "logs" / f"{name}.log"
