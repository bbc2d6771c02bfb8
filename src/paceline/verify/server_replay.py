"""Replay of a run with parameter servers: its workers compute again, and its updates are applied in the order in which
servers applied them; what comes out must be the last snapshot, bit for bit. Of a run that was resumed each part must
come to what the next one began with.

There is no serial run that an asynchronous one equals: its workers read old parameters. But what they read is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ExchangeError
from paceline.exchange.client.outgoing import Compressor
from paceline.exchange.interface import Dealer, Exchange
from paceline.exchange.replay.replay import Work
from paceline.exchange.replay.whole import Outcome, has_snapshot, replay
from paceline.train.recipe import Recipe, load_recipe
from paceline.train.rundir import RunDirectory
from paceline.train.servers.groups.ledger import Ledger
from paceline.train.servers.groups.replayed import Exchanges, replay_groups
from paceline.train.servers.recipe.groups import trained
from paceline.train.servers.rundir import Part, part_of, parts_before
from paceline.train.servers.worker.compressing import NONE, compressor_of, settled
from paceline.train.servers.worker.parts import build_parts
from paceline.train.servers.worker.reading import ReadAhead
from paceline.train.servers.worker.records import threads_of
from paceline.train.servers.worker.worker import Worker


@dataclass(frozen=True)
class PartReport:
    """What came of a part of a run: from its start or a resume up to the next resume, or to the end.

    Attributes:
        part: its directory.
        outcome: of its replay; None: there is nothing to prove, as no snapshot of it was gone on from, or is there.
        is_last: whether nothing came after.
    """

    part: Path
    outcome: Outcome | None
    is_last: bool

    @property
    def text(self) -> str:
        """For people."""
        found = self.outcome
        if found is None:
            return "it has no snapshot yet" if self.is_last else "nothing that it did was gone on from"
        what = f"{found.updates:,} updates of {found.workers} workers, replayed in {found.seconds:.1f} s"
        gives = f"snapshot {found.snapshot}" if self.is_last else f"what was gone on from, snapshot {found.snapshot},"
        if found.difference is None:
            return f"equal: {what}, give {gives} bit for bit"
        return f"DIFFERENT: {what}, do not give {gives}: {found.difference}".replace(",:", ":")

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        found = self.outcome
        if found is None:
            return {"part": self.part.name, "equal": None}
        return {
            "part": self.part.name,
            "equal": found.difference is None,
            "snapshot": found.snapshot,
            "updates": found.updates,
            "workers": found.workers,
            "seconds": found.seconds,
            "difference": None if found.difference is None else str(found.difference),
        }


@dataclass(frozen=True)
class ReplayReport:
    """What came of a replay.

    Attributes:
        run: its directory.
        parts: in order; each began with what the one before was left with.
        begins_at: the snapshot that the first of them began with; 0: the run's start.
    """

    run: Path
    parts: Sequence[PartReport]
    begins_at: int

    @property
    def equal(self) -> bool:
        """Whether all of it is the same, bit for bit."""
        return all(part.outcome is None or part.outcome.difference is None for part in self.parts)

    @property
    def text(self) -> str:
        """For people."""
        if len(self.parts) == 1 and not self.begins_at:
            return self.parts[0].text
        lines = [f"{part.part.name}: {part.text}" for part in self.parts]
        if self.begins_at:
            lines.append(f"NOT PROVED: what was done before snapshot {self.begins_at}; that is not here any more")
        elif self.equal:
            lines.append("equal: each part began with what the one before was left with, the first one at the start")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        parts = [part.to_json() for part in self.parts]
        return {"equal": self.equal, "run": str(self.run), "begins_at": self.begins_at, "parts": parts}


def verify_replay(root: Path) -> ReplayReport:
    """Do a run again from its logs, part by part, and compare each with what the next one began with, and the last one
    with its last snapshot.

    Args:
        root: the run's directory.

    Raises:
        ExchangeError: it is no run with servers, was not logged, or has no snapshot to compare with.
    """
    run = RunDirectory(root)
    if not run.config.exists() or not part_of(run).root.is_dir():
        raise ExchangeError(
            f"{root} is no run with parameter servers, or a resume of it was cut off (resume it again then); name the "
            "directory of one, such as runs/ctr-1."
        )
    parts = [*parts_before(run), part_of(run)]
    reports = [
        PartReport(part.root, _outcome(part, follows, run, is_only=len(parts) == 1), is_last=follows is None)
        for part, follows in zip(parts, [*parts[1:], None], strict=True)
    ]
    return ReplayReport(root, reports, parts[0].exchange().read().terms.restored)


def _outcome(part: Part, follows: Part | None, run: RunDirectory, *, is_only: bool) -> Outcome | None:
    """Return what came of one part; None: nothing of it is there to compare with."""
    config = part.recipe if part.recipe.exists() else run.config
    recipe = load_recipe(config)
    if recipe.server is None:
        raise ExchangeError(f"{config} has no section `server`.")
    if recipe.server.is_hogwild:
        raise ExchangeError(
            f"{part.root} cannot be replayed: workers of hogwild write to one memory without locks, in no order that "
            "anybody sees."
        )
    if follows is None and not is_only and not has_snapshot(part.exchange()):
        return None
    if follows is not None and _begins(follows) == _begins(part):
        return None
    return _replayed(recipe, part, follows)


def _begins(part: Part) -> list[int]:
    """Return what a part began with: snapshots of its exchanges, and meetings of groups."""
    snapshots = [part.exchange(group).read().terms.restored for group in (None, *part.groups())]
    return snapshots + [Ledger(part.exchange(group).root).last().base for group in part.groups()]


def _go_on() -> None:
    """What was waited for is there when it is the worker's turn again."""


def _replayed(recipe: Recipe, part: Part, follows: Part | None) -> Outcome:
    if recipe.mesh.size > 1:  # of each worker, whose ranks are all here now
        recipe = recipe.model_copy(update={"launch": "inprocess"})
    assert recipe.server is not None
    if part.groups():
        after = None if follows is None else _exchanges(follows)
        return replay_groups(_exchanges(part), after, partial(_work, recipe, part), partial(_compression, recipe, part))
    after_it = None if follows is None else follows.exchange()
    compression = _compression(recipe, part, None)
    return replay(part.exchange(), _work(recipe, part, None), follows=after_it, compression=compression)


def _exchanges(part: Part) -> Exchanges:
    return Exchanges(part.exchange(), [part.exchange(group) for group in part.groups()])


def _work(recipe: Recipe, part: Part, group: int | None) -> Work:
    """Return the loop of a worker, of the run or of a group."""
    charter = part.exchange(group).read()
    assert recipe.server is not None
    ahead = recipe.server.ahead

    def work(worker: int, exchange: Exchange, dealer: Dealer) -> None:
        torch.set_num_threads(threads_of(part.work(worker, group)))
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


def _compression(recipe: Recipe, part: Part, group: int | None) -> Callable[[], Compressor] | None:
    """Return what makes for a worker what its gradients went through."""
    directory = part.exchange(group)
    assert recipe.server is not None
    codec, job = settled(recipe.server.compression, directory), directory.read().job
    if codec == NONE:
        return None

    def compressor() -> Compressor:
        made = compressor_of(codec, job)
        assert made is not None
        return made

    return compressor
