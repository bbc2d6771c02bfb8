"""Replay of a run with parameter servers: its workers compute again, and its updates are applied in the order in which
servers applied them; what comes out must be the last snapshot, bit for bit.

There is no serial run that an asynchronous one equals: its workers read old parameters. But what they read is logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ExchangeError
from paceline.exchange.client.outgoing import Compressor
from paceline.exchange.interface import Dealer, Exchange
from paceline.exchange.replay.replay import Work
from paceline.exchange.replay.whole import Outcome, replay
from paceline.train.recipe import Recipe, load_recipe
from paceline.train.rundir import RunDirectory
from paceline.train.servers.groups.replayed import replay_groups
from paceline.train.servers.recipe.groups import trained
from paceline.train.servers.rundir import exchange_of, work_of
from paceline.train.servers.worker.compressing import NONE, compressor_of, settled
from paceline.train.servers.worker.parts import build_parts
from paceline.train.servers.worker.reading import ReadAhead
from paceline.train.servers.worker.records import threads_of
from paceline.train.servers.worker.worker import Worker


@dataclass(frozen=True)
class ReplayReport:
    """What came of a replay; see `exchange.replay.whole.Outcome`."""

    run: Path
    outcome: Outcome

    @property
    def equal(self) -> bool:
        """Whether all of it is the same, bit for bit."""
        return self.outcome.difference is None

    @property
    def text(self) -> str:
        """For people."""
        found = self.outcome
        what = f"{found.updates:,} updates of {found.workers} workers, replayed in {found.seconds:.1f} s"
        if found.difference is None:
            return f"equal: {what}, give snapshot {found.snapshot} bit for bit"
        return f"DIFFERENT: {what}, do not give snapshot {found.snapshot}: {found.difference}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        found = self.outcome
        return {
            "equal": self.equal,
            "run": str(self.run),
            "snapshot": found.snapshot,
            "updates": found.updates,
            "workers": found.workers,
            "seconds": found.seconds,
            "difference": None if found.difference is None else str(found.difference),
        }


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
    return ReplayReport(root, _replayed(recipe, run))


def _go_on() -> None:
    """What was waited for is there when it is the worker's turn again."""


def _replayed(recipe: Recipe, run: RunDirectory) -> Outcome:
    if recipe.mesh.size > 1:  # of each worker, whose ranks are all here now
        recipe = recipe.model_copy(update={"launch": "inprocess"})
    assert recipe.server is not None
    if recipe.server.deployment == "groups":
        groups = range(recipe.server.groups)
        return replay_groups(
            exchange_of(run),
            [exchange_of(run, group) for group in groups],
            lambda group: _work(recipe, run, group),
            lambda group: _compression(recipe, run, group),
        )
    return replay(exchange_of(run), _work(recipe, run, None), compression=_compression(recipe, run, None))


def _work(recipe: Recipe, run: RunDirectory, group: int | None) -> Work:
    """Return the loop of a worker, of the run or of a group."""
    charter = exchange_of(run, group).read()
    assert recipe.server is not None
    ahead = recipe.server.ahead

    def work(worker: int, exchange: Exchange, dealer: Dealer) -> None:
        torch.set_num_threads(threads_of(work_of(run, worker, group)))
        parts = build_parts(recipe, trained(charter.job), torch.device("cpu"), group or 0)
        Worker(
            exchange,
            dealer,
            parts.computer,
            parts.portions,
            validation=parts.validation,
            ahead=charter.terms.ahead,
            read_ahead=ReadAhead(ahead),
            idle=_go_on,
        ).run()

    return work


def _compression(recipe: Recipe, run: RunDirectory, group: int | None) -> Callable[[], Compressor] | None:
    """Return what makes for a worker what its gradients went through."""
    directory = exchange_of(run, group)
    assert recipe.server is not None
    codec, job = settled(recipe.server.compression, directory), directory.read().job
    if codec == NONE:
        return None

    def compressor() -> Compressor:
        made = compressor_of(codec, job)
        assert made is not None
        return made

    return compressor
