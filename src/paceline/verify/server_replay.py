"""Replay of a run with parameter servers: its workers compute again, and its updates are applied in the order in which
servers applied them; what comes out must be the last snapshot, bit for bit.

There is no serial run that an asynchronous one equals: its workers read old parameters. But what they read is logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ExchangeError
from paceline.exchange.client.outgoing import Compressor
from paceline.exchange.interface import Dealer, Exchange
from paceline.exchange.replay.whole import Outcome, replay
from paceline.train.recipe import Recipe, load_recipe
from paceline.train.rundir import RunDirectory
from paceline.train.servers.compressing import compressor_of
from paceline.train.servers.parts import build_parts
from paceline.train.servers.records import threads_of
from paceline.train.servers.rundir import exchange_of, work_of
from paceline.train.servers.worker import Worker


@dataclass(frozen=True)
class ReplayReport:
    """What came of a replay, of each exchange of the run; see `exchange.replay.whole.Outcome`."""

    run: Path
    outcomes: dict[str, Outcome]

    @property
    def equal(self) -> bool:
        """Whether all of it is the same, bit for bit."""
        return all(outcome.difference is None for outcome in self.outcomes.values())

    @property
    def text(self) -> str:
        """For people."""
        lines = []
        for name, found in self.outcomes.items():
            what = f"{found.updates:,} updates of {found.workers} workers, replayed in {found.seconds:.1f} s"
            where = f"snapshot {found.snapshot}{name and f' of group {name}'}"
            if found.difference is None:
                lines.append(f"equal: {what}, give {where} bit for bit")
            else:
                lines.append(f"DIFFERENT: {what}, do not give {where}: {found.difference}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        found = [
            {
                "group": name or None,
                "snapshot": outcome.snapshot,
                "updates": outcome.updates,
                "workers": outcome.workers,
                "seconds": outcome.seconds,
                "difference": None if outcome.difference is None else str(outcome.difference),
            }
            for name, outcome in self.outcomes.items()
        ]
        return {"equal": self.equal, "run": str(self.run), "replays": found}


def verify_replay(root: Path) -> ReplayReport:
    """Do a run again from its logs and compare it with its last snapshot.

    Args:
        root: the run's directory.

    Raises:
        ExchangeError: it is no run with servers, was not logged, or has no snapshot to compare with.
    """
    run = RunDirectory(root)
    if not run.config.exists() or not (root / "exchange").is_dir():
        raise ExchangeError(f"{root} is no run with parameter servers; name the directory of one, such as runs/ctr-1.")
    recipe = load_recipe(run.config)
    if recipe.server is None:
        raise ExchangeError(f"{run.config} has no section `server`.")
    if recipe.server.is_hogwild:
        raise ExchangeError(
            f"{root} cannot be replayed: workers of hogwild write to one memory without locks, in no order that "
            "anybody sees."
        )
    groups: list[int | None] = [None]
    if recipe.server.deployment == "groups":
        groups = list(range(recipe.server.groups))
    return ReplayReport(root, {"" if group is None else str(group): _replayed(recipe, run, group) for group in groups})


def _replayed(recipe: Recipe, run: RunDirectory, group: int | None) -> Outcome:
    directory = exchange_of(run, group)
    charter = directory.read()
    assert recipe.server is not None
    compression = recipe.server.compression

    def work(worker: int, exchange: Exchange, dealer: Dealer) -> None:
        torch.set_num_threads(threads_of(work_of(run, worker, group)))
        parts = build_parts(recipe, charter.job, torch.device("cpu"), group or 0)
        Worker(
            exchange,
            dealer,
            parts.computer,
            parts.portions,
            validation=parts.validation,
            ahead=charter.terms.ahead,
        ).run()

    def compressor() -> Compressor:
        made = compressor_of(compression, charter.job)
        assert made is not None
        return made

    return replay(directory, work, compression=None if compression == "none" else compressor)
