"""What is on disk before the first process of a run is started: charters, and the snapshot that servers begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from torch import Tensor

from paceline.errors import RecipeError
from paceline.exchange.directory import Directory
from paceline.exchange.job import Job
from paceline.exchange.shard.manifest import Manifest, whole_snapshots
from paceline.exchange.shard.whole import write_initial
from paceline.exchange.terms import Charter, Terms
from paceline.train.rundir import RunDirectory
from paceline.train.servers.groups.cuts import choose, keep
from paceline.train.servers.groups.ledger import Ledger
from paceline.train.servers.groups.meeting import Kind, Meeting
from paceline.train.servers.groups.offline import Change, restored, to_global, to_group
from paceline.train.servers.recipe.groups import global_job, global_terms, group_job, group_terms, met
from paceline.train.servers.recipe.section import ServerSection
from paceline.train.servers.rundir import exchange_of
from paceline.train.servers.supervisor.cluster import charter_for

Values: TypeAlias = Mapping[str, Tensor]


class Made(NamedTuple):
    """Exchanges of a run.

    Attributes:
        main: directory and charter of the one whose last snapshot is what was learnt.
        groups: of those that workers talk to; the same one where there are no groups.
    """

    main: tuple[Directory, Charter]
    groups: list[tuple[Directory, Charter]]


def begin(directory: Directory, server: ServerSection, job: Job, terms: Terms, values: Values) -> Charter:
    """Make the directory of an exchange that begins with these values."""
    charter = charter_for(server, job, terms, directory)
    directory.write(charter)
    write_initial(directory.snapshots, job, values)
    return charter


def go_on(directory: Directory, server: ServerSection, job: Job, terms: Terms) -> Charter:
    """Make the directory of an exchange anew, so that it goes on from its newest snapshot.

    What it was is kept beside it, under `before-1`, `before-2` and so on.

    Raises:
        RecipeError: there is no snapshot, or the run is at its end.
    """
    numbers = whole_snapshots(directory.snapshots)
    if not numbers:
        raise RecipeError(f"there is nothing to resume in {directory.root}: no snapshot of it is whole.")
    newest = directory.snapshot(numbers[-1])
    if Manifest.read(newest).first_task >= terms.tasks:
        raise _at_its_end(terms, job)
    return _from(directory, server, job, terms, newest, ())


def _from(
    directory: Directory, server: ServerSection, job: Job, terms: Terms, snapshot: Path, changes: Sequence[Change]
) -> Charter:
    """Make a directory anew, to go on from a snapshot in it, with changes that this may lack."""
    before = _aside(directory.root)
    Directory(before).memory.unlink(missing_ok=True)  # of hogwild: what it held is in the snapshot
    source = before / snapshot.relative_to(directory.root)
    manifest = Manifest.read(source)
    terms = replace(terms, first_task=min(manifest.first_task, terms.tasks), restored=manifest.number)
    charter = charter_for(server, job, terms, directory)
    directory.write(charter)
    restored(source, job, changes, directory.snapshot(manifest.number))
    return charter


def prepare(run: RunDirectory, server: ServerSection, job: Job, terms: Terms, values: Values, *, resume: bool) -> Made:
    """Make all exchanges of a run.

    Args:
        run: directory.
        server: the recipe's section.
        job: of a group, or the only one.
        terms: of that.
        values: what all begin with.
        resume: go on from the newest snapshot.

    Raises:
        RecipeError: there is nothing to go on from.
    """
    directory = exchange_of(run)
    if server.deployment != "groups":
        charter = go_on(directory, server, job, terms) if resume else begin(directory, server, job, terms, values)
        return Made((directory, charter), [(directory, charter)])
    if resume:
        return _groups_go_on(run, server, job, terms)
    return _groups_begin(run, server, job, terms, values)


def _groups_begin(run: RunDirectory, server: ServerSection, job: Job, terms: Terms, values: Values) -> Made:
    directory = exchange_of(run)
    over = begin(directory, server, global_job(job, server.groups), global_terms(server, terms, job), values)
    inside, its_terms = group_job(job), group_terms(server, terms)
    both = {**values, **{met(name): value for name, value in values.items()}}
    groups = []
    for number in range(server.groups):
        there = exchange_of(run, number)
        charter = begin(there, server, inside, its_terms, both)
        _begin_meetings(there, 0, charter.terms.restored)
        groups.append((there, charter))
    return Made((directory, over), groups)


def _groups_go_on(run: RunDirectory, server: ServerSection, job: Job, terms: Terms) -> Made:
    """Make all exchanges anew, so that they go on from snapshots that go together."""
    directory, there = exchange_of(run), [exchange_of(run, number) for number in range(server.groups)]
    snapshot, cuts = choose(directory, there)
    over, its_terms = global_job(job, server.groups), global_terms(server, terms, job)
    done = [Manifest.read(cut.snapshot).first_task for cut in cuts]
    if max(done) > terms.tasks:
        raise _at_its_end(terms, job)
    if min(done) == terms.tasks:
        if Manifest.read(snapshot).first_task >= its_terms.tasks:
            raise _at_its_end(terms, job)
    else:  # there is something to meet about
        meetings = max(cut.meeting.number for cut in cuts) + 1
        its_terms = replace(its_terms, tasks=max(its_terms.tasks, meetings * server.groups))
    last = sorted(enumerate(cut.meeting for cut in cuts), key=lambda held: held[1].number)
    carried = [to_global(meeting, group, len(cuts)) for group, meeting in last if meeting.kind is not Kind.BEGAN]
    main = (directory, _from(directory, server, over, its_terms, snapshot, carried))
    groups = []
    for group, (cut, its) in enumerate(zip(cuts, there, strict=True)):
        changes = [to_group(cut.meeting, group)] if cut.meeting.kind is not Kind.BEGAN else []
        charter = _from(its, server, group_job(job), group_terms(server, terms), cut.snapshot, changes)
        _begin_meetings(its, cut.meeting.number, charter.terms.restored)
        groups.append((its, charter))
    return Made(main, groups)


def _begin_meetings(group: Directory, number: int, snapshot: int) -> None:
    """Have a group begin after some meetings, with a snapshot that has them."""
    Ledger(group.root).begin(Meeting(number, number, Kind.BEGAN))
    keep(group, group.snapshot(snapshot))


def _at_its_end(terms: Terms, job: Job) -> RecipeError:
    return RecipeError(
        f"the run has done all of its {terms.tasks // job.pieces} rounds; ask for more (train.steps) to go on."
    )


def _aside(root: Path) -> Path:
    """Move a directory out of the way; return where it is."""
    number = 1
    while (target := root.with_name(f"{root.name}-before-{number}")).exists():
        number += 1
    root.rename(target)
    return target
