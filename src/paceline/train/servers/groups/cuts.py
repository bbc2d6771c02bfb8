"""From which snapshots of all exchanges together a run with groups can go on.

They go together where the global servers have just the meetings that each group has had. Where a snapshot lacks the
last of them, it is carried in (`offline`), as it is written down whole before any of it is pushed. Every so many
meetings each group keeps one of its snapshots, and its ledger as it was then:

    cuts/N/last.safetensors    its N-th meeting
    cuts/N/S                   its snapshot S, with N meetings or one less

and no group meets again before there is a snapshot of the global servers with the N-th meetings of all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from paceline.durable import settle
from paceline.errors import ExchangeError, RecipeError
from paceline.exchange.directory import Directory
from paceline.exchange.job import Job
from paceline.exchange.shard.clocks import Clocks
from paceline.exchange.shard.manifest import Manifest, read_json, whole_snapshots
from paceline.exchange.shard.sequences import Sequences
from paceline.train.servers.groups.bridge import bridge_id, task_of
from paceline.train.servers.groups.ledger import Ledger
from paceline.train.servers.groups.meeting import Kind, Meeting
from paceline.train.servers.groups.offline import linked, restored, to_group

_KEPT: Final = 2
_AHEAD: Final = 2
"""Meetings that a group may have had more than another, by the bound of the global job."""


class Cut(NamedTuple):
    """A snapshot of a group, and the last of its meetings.

    Attributes:
        snapshot: its directory.
        meeting: which the snapshot may lack.
    """

    snapshot: Path
    meeting: Meeting


def end_of(directory: Directory, job: Job, group: int) -> Path:
    """Return the snapshot of what a group held at its end, with all of its meetings before the last.

    Args:
        directory: of the group's exchange, whose job has ended.
        job: of the group.
        group: its number.
    """
    last, number = Ledger(directory.root).last(), whole_snapshots(directory.snapshots)[-1]
    place = _folder(directory) / "end" / str(number)
    if last.kind in (Kind.BEGAN, Kind.MET):  # else it is there
        changes = [to_group(last, group)] if last.kind is Kind.MET else []
        restored(directory.snapshot(number), job, changes, place)
    return place


def keep(directory: Directory, snapshot: Path) -> None:
    """Keep a snapshot of a group, with its ledger as it is.

    Args:
        directory: of the group's exchange.
        snapshot: directory of the snapshot.
    """
    ledger = Ledger(directory.root)
    number = ledger.last().number
    folder = _folder(directory)
    draft, place = folder / f".{number}", folder / str(number)
    _remove(place)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    linked(snapshot, draft / snapshot.name)
    os.link(ledger.path, draft / ledger.path.name)
    for path in (ledger.path, draft / snapshot.name, draft):  # servers have done so with their files
        settle(path)
    draft.rename(place)
    settle(folder)
    for old in sorted(kept(directory))[:-_KEPT]:
        _remove(folder / str(old))


def _remove(cut: Path) -> None:
    """Remove a cut, if it is there; whoever dies in the midst of it leaves none that is half there."""
    gone = cut.with_name(f".{cut.name}")
    shutil.rmtree(gone, ignore_errors=True)
    if cut.exists():
        cut.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def kept(directory: Directory) -> list[int]:
    """Return the meetings of the cuts that a group has kept."""
    folder = _folder(directory)
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []


def choose(above: Directory, groups: Sequence[Directory]) -> tuple[Path, list[Cut]]:
    """Return the newest snapshot of the global servers to go on from, and what goes with it of each group.

    Raises:
        RecipeError: no snapshots go together.
    """
    job = above.read().job
    if job.pieces != len(groups):
        raise RecipeError(f"the run has {job.pieces} groups; go on with as many (server.groups), not {len(groups)}.")
    offered = [list(_offered(directory, group)) for group, directory in enumerate(groups)]
    for number in reversed(whole_snapshots(above.snapshots)):
        snapshot = above.snapshot(number)
        have = [Clocks.of(job, meta["clocks"]) for meta in _metas(snapshot)]
        fitting = [
            [cut for cut in cuts if _fits(have, cut.meeting.number, group, len(groups))]
            for group, cuts in enumerate(offered)
        ]
        while all(fitting):
            numbers = [cuts[0].meeting.number for cuts in fitting]
            if max(numbers) <= min(numbers) + _AHEAD:
                return snapshot, [cuts[0] for cuts in fitting]
            fitting[numbers.index(max(numbers))].pop(0)
    raise RecipeError(
        f"there is nothing to resume in {above.root.parent}: no snapshots of the global servers and of the groups go "
        "together."
    )


def _fits(have: Sequence[Clocks], number: int, group: int, groups: int) -> bool:
    """Whether the shards of a global snapshot have the meetings of a group up to one, this one maybe, and no more."""
    before, after = (task_of(at, group, groups) for at in (number - 1, number + 1))
    has_all = number <= 1 or all(clocks.holds(before) for clocks in have)
    return has_all and not any(clocks.holds(after) for clocks in have)


def _offered(directory: Directory, group: int) -> Iterator[Cut]:
    """Yield cuts of a group, newest first: what it has, where that goes together, then what it kept."""
    with suppress(ExchangeError):  # a loss of power may have taken the newest files, but none of a cut
        last, newest = Ledger(directory.root).last(), directory.snapshot(whole_snapshots(directory.snapshots)[-1])
        if last.kind in (Kind.BEGAN, Kind.MET):
            before = last.number - 1
            if before <= last.base or all([_has(meta, group, before) for meta in _metas(newest)]):
                yield Cut(newest, last)
    for number in sorted(kept(directory), reverse=True):
        folder = _folder(directory) / str(number)
        (snapshot,) = whole_snapshots(folder)
        yield Cut(folder / str(snapshot), Meeting.read(folder / Ledger(folder).path.name))


def _has(meta: Mapping[str, Any], group: int, meeting: int) -> bool:
    """Whether a shard has what a meeting pushed to the group."""
    return Sequences.of(meta["sequences"]).position(bridge_id(group), meeting, 0) is not None


def _metas(snapshot: Path) -> Iterator[Mapping[str, Any]]:
    """Yield what the shards of a snapshot were."""
    for name in Manifest.read(snapshot).files.values():
        described = read_json(snapshot / name)
        try:
            yield described["meta"]
        except (KeyError, TypeError) as error:
            raise ExchangeError(f"{snapshot / name} is no part of a snapshot ({error}).") from error


def _folder(directory: Directory) -> Path:
    return directory.root / "cuts"
