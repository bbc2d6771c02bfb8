"""What workers notice of it when a server or a worker is killed, and how long who joins takes.

Settings: `recovery_repeats`, `recovery_servers`, `recovery_workers`, `recovery_replication`, `recovery_elements` (of
the one table, float32), `recovery_task_ms` (that a task computes), `recovery_log` (`none`; `kept`: updates and actions
are logged, as in runs; `durable`: and are on the disk before they are acknowledged). The job is under BSP, where nobody
goes on without the tasks of who is gone. A stall is the longest time between two tasks of a worker after the kill, of
all workers that are left, with the task itself in it; `usual_s` is that time while nothing happens. A server has joined
once it has its share of the shards, and a worker once its first task is done; both from the start of the process, so
most of it is the loading of PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paceline.bench import options as given
from paceline.bench.server.recovery_job import Logs, recovery_job
from paceline.bench.statistics import spread

_WATCHED_S: Final = 2.0
"""For how long workers are watched after a kill."""

_NAMES: Final = {
    "server_kill_stall_s": "stall after SIGKILL of a server",
    "worker_kill_stall_s": "stall after SIGKILL of a worker",
    "join_s": "a server joins",
    "worker_join_s": "a worker joins",
    "usual_s": "between tasks, while nothing happens",
}


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    recovery_repeats: int = 10
    recovery_servers: int = 3
    recovery_workers: int = 3
    recovery_replication: int = 2
    recovery_elements: int = 1 << 18
    recovery_task_ms: int = 20
    recovery_log: Logs = Logs.NONE


READERS: Final[dict[str, given.Reader]] = {
    "recovery_repeats": partial(given.whole_number, least=1),
    "recovery_servers": partial(given.whole_number, least=2),
    "recovery_workers": partial(given.whole_number, least=2),
    "recovery_replication": partial(given.whole_number, least=2),
    "recovery_elements": partial(given.whole_number, least=1),
    "recovery_task_ms": partial(given.whole_number, least=0),
    "recovery_log": partial(given.name, known=tuple(Logs)),
}
KEYS: Final = tuple(READERS)


def run(options: dict[str, str]) -> dict[str, Any]:
    """Measure; return `recovery`: median, worst and all values of each, in seconds.

    Raises:
        RankFailed: the job does not go on.
    """
    settings = given.settings_with(Settings(), options, READERS)
    found: dict[str, list[float]] = {name: [] for name in _NAMES}
    sizes = (settings.recovery_servers, settings.recovery_workers, settings.recovery_elements)
    with (
        recovery_job(
            *sizes, settings.recovery_task_ms / 1000, settings.recovery_replication, settings.recovery_log
        ) as job,
        Progress(console=Console(stderr=True)) as progress,
    ):
        for _ in progress.track(range(settings.recovery_repeats), description="kills and joins"):
            found["usual_s"] += job.usual_s()
            found["server_kill_stall_s"].append(job.kill_server(_WATCHED_S))
            found["join_s"].append(job.join_server())
            found["worker_kill_stall_s"].append(job.kill_worker(_WATCHED_S))
            found["worker_join_s"].append(job.join_worker())
    return {"recovery": {name: _summary(values) for name, values in found.items()}}


def _summary(values: list[float]) -> dict[str, Any]:
    middle = spread(values)
    return {"median": middle.median, "worst": max(values), "low": middle.low, "high": middle.high, "count": len(values)}


def show(console: Console, result: dict[str, Any]) -> None:
    """Print what `run` returned."""
    found = result["recovery"]
    table = Table(title="kills and joins, seconds", title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("", "median", "quartiles", "worst", "of"):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for name, title in _NAMES.items():
        one = found[name]
        quartiles = f"{one['low']:.3f} to {one['high']:.3f}"
        table.add_row(title, f"{one['median']:.3f}", quartiles, f"{one['worst']:.3f}", str(one["count"]))
    console.print(table)
