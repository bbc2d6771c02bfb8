"""What is on disk before the first process of a run is started: charters, and the snapshot that servers begin with."""

from __future__ import annotations

import shutil
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
from paceline.train.servers.rundir import Part, part_of, parts_before
from paceline.train.servers.supervisor.cluster import charter_for
from paceline.train.servers.supervisor.renewal import renewed

Values: TypeAlias = Mapping[str, Tensor]


class Made(NamedTuple):
    """Exchanges of a run.

    Attributes:
        main: directory and charter of the one whose last snapshot is what was learnt.
        groups: of those that workers talk to; the same one where there are no groups.
    """

    main: tuple[Directory, Charter]
    groups: list[tuple[Directory, Charter]]


class Place(NamedTuple):
    """Of an exchange: where it is written, and where it will be; what it was is there until then."""

    draft: Directory
    becomes: Directory


class _Places(NamedTuple):
    """Of a part of a run."""

    becomes: Part
    draft: Part

    def of(self, group: int | None) -> Place:
        """Return those of its exchange, or of a group's."""
        return Place(self.draft.exchange(group), self.becomes.exchange(group))


def begin(place: Place, server: ServerSection, job: Job, terms: Terms, values: Values) -> Charter:
    """Write an exchange that begins with these values."""
    charter = charter_for(server, job, terms, place.becomes)
    place.draft.write(charter)
    write_initial(place.draft.snapshots, job, values)
    return charter


def go_on(place: Place, server: ServerSection, job: Job, terms: Terms) -> Charter:
    """Write an exchange that goes on from the newest snapshot of what is there.

    Raises:
        RecipeError: there is no snapshot, or the run is at its end.
    """
    there = place.becomes
    numbers = whole_snapshots(there.snapshots)
    if not numbers:
        raise RecipeError(f"there is nothing to resume in {there.root}: no snapshot of it is whole.")
    newest = there.snapshot(numbers[-1])
    if Manifest.read(newest).first_task >= terms.tasks:
        raise _at_its_end(terms, job)
    return _from(place, server, job, terms, newest, ())


def _from(
    place: Place, server: ServerSection, job: Job, terms: Terms, snapshot: Path, changes: Sequence[Change]
) -> Charter:
    """Write an exchange that goes on from a snapshot of before, with changes that this may lack."""
    manifest = Manifest.read(snapshot)
    terms = replace(terms, first_task=min(manifest.first_task, terms.tasks), restored=manifest.number)
    charter = charter_for(server, job, terms, place.becomes)
    place.draft.write(charter)
    restored(snapshot, job, changes, place.draft.snapshot(manifest.number))
    return charter


def prepare(run: RunDirectory, server: ServerSection, job: Job, terms: Terms, values: Values, *, resume: bool) -> Made:
    """Make all exchanges of a run.

    What it did before is kept beside (`rundir.parts_before`). Whoever dies in here leaves the run as it was, or ready
    to go on.

    Args:
        run: directory, with its recipe.
        server: the recipe's section.
        job: of a group, or the only one.
        terms: of that.
        values: what all begin with.
        resume: go on from the newest snapshot.

    Raises:
        RecipeError: there is nothing to go on from.
    """
    with renewed(run) as draft:
        shutil.copyfile(run.config, draft.recipe)
        places = _Places(part_of(run), draft)
        if server.deployment == "groups":
            made = (_groups_go_on if resume else _groups_begin)(places, server, job, terms, values)
        else:
            main = places.of(None)
            charter = go_on(main, server, job, terms) if resume else begin(main, server, job, terms, values)
            made = Made((main.becomes, charter), [(main.becomes, charter)])
    for before in parts_before(run):  # of hogwild: what it held is in the snapshot
        before.exchange().memory.unlink(missing_ok=True)
    return made


def _groups_begin(places: _Places, server: ServerSection, job: Job, terms: Terms, values: Values) -> Made:
    main = places.of(None)
    over = begin(main, server, global_job(job, server.groups), global_terms(server, terms, job), values)
    inside, its_terms = group_job(job), group_terms(server, terms)
    both = {**values, **{met(name): value for name, value in values.items()}}
    groups = []
    for number in range(server.groups):
        place = places.of(number)
        charter = begin(place, server, inside, its_terms, both)
        _begin_meetings(place.draft, 0, charter.terms.restored)
        groups.append((place.becomes, charter))
    return Made((main.becomes, over), groups)


def _groups_go_on(places: _Places, server: ServerSection, job: Job, terms: Terms, _: Values) -> Made:
    """Write all exchanges, so that they go on from snapshots that go together."""
    main, its = places.of(None), [places.of(number) for number in range(server.groups)]
    snapshot, cuts = choose(main.becomes, [place.becomes for place in its])
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
    charter = _from(main, server, over, its_terms, snapshot, carried)
    groups = []
    for group, (cut, place) in enumerate(zip(cuts, its, strict=True)):
        changes = [to_group(cut.meeting, group)] if cut.meeting.kind is not Kind.BEGAN else []
        its_charter = _from(place, server, group_job(job), group_terms(server, terms), cut.snapshot, changes)
        _begin_meetings(place.draft, cut.meeting.number, its_charter.terms.restored)
        groups.append((place.becomes, its_charter))
    return Made((main.becomes, charter), groups)


def _begin_meetings(group: Directory, number: int, snapshot: int) -> None:
    """Have a group begin after some meetings, with a snapshot that has them."""
    Ledger(group.root).begin(Meeting(number, number, Kind.BEGAN))
    keep(group, group.snapshot(snapshot))


def _at_its_end(terms: Terms, job: Job) -> RecipeError:
    return RecipeError(
        f"the run has done all of its {terms.tasks // job.pieces} rounds; ask for more (train.steps) to go on."
    )
