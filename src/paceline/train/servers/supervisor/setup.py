"""What is on disk before the first process of a run is started: charters, and the snapshot that servers begin with."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
from paceline.train.servers.recipe.job import global_job, global_terms
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
    manifest = Manifest.read(directory.snapshot(numbers[-1]))
    if manifest.first_task >= terms.tasks:
        raise RecipeError(
            f"the run has done all of its {terms.tasks // job.pieces} rounds; ask for more (train.steps) to go on."
        )
    before = _aside(directory.root)
    Directory(before).memory.unlink(missing_ok=True)  # of hogwild: what it held is in the snapshot
    terms = replace(terms, first_task=manifest.first_task, restored=manifest.number)
    charter = charter_for(server, job, terms, directory)
    directory.write(charter)
    _link(Directory(before).snapshot(manifest.number), directory.snapshot(manifest.number))
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
        raise RecipeError(
            "a run with groups of servers cannot be resumed: what each group had moved since it last met the others is "
            "not kept. Start it again, or use deployment: separate."
        )
    over = begin(directory, server, global_job(job, server.groups), global_terms(server, terms, job), values)
    groups = []
    for number in range(server.groups):
        there = exchange_of(run, number)
        groups.append((there, begin(there, server, job, terms, values)))
    return Made((directory, over), groups)


def _aside(root: Path) -> Path:
    """Move a directory out of the way; return where it is."""
    number = 1
    while (target := root.with_name(f"{root.name}-before-{number}")).exists():
        number += 1
    root.rename(target)
    return target


def _link(source: Path, target: Path) -> None:
    """Have the files of a directory in another one too."""
    for path in source.rglob("*"):
        if path.is_file():
            there = target / path.relative_to(source)
            there.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, there)
