"""The jobs of a run whose groups of workers have servers of their own, under global ones.

A group keeps, beside each table, what that was after its last meeting with the global servers (`met:NAME`): so what it
has moved since is known to its servers alone, replicated and in their snapshots, and whoever bridges it need not be.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from paceline.exchange.job import Consistency, Job, Mode, Rule
from paceline.exchange.rates import Rates
from paceline.exchange.terms import Terms
from paceline.train.servers.recipe.section import ServerSection

_MET: Final = "met:"
_AVERAGED: Final = Rule("sgd", {"lr": 1.0})
"""What a group has moved is pushed as a gradient: at a rate of 1 it is subtracted."""


def met(name: str) -> str:
    """Return the name of the table that says what another was after the last meeting."""
    return f"{_MET}{name}"


def group_job(job: Job) -> Job:
    """Return what the servers of a group keep. job: what its workers train."""
    beside = tuple(replace(table, name=met(table.name), rule=_AVERAGED) for table in job.tables)
    return replace(job, tables=job.tables + beside, notes_changes=True)


def trained(job: Job) -> Job:
    """Return what workers see of a job: without what only bridges read. The tables have the same indices."""
    return replace(job, tables=tuple(table for table in job.tables if not table.name.startswith(_MET)))


def global_job(job: Job, groups: int) -> Job:
    """Return what global servers keep: what a group has moved is added, by its share. job: what workers train."""
    near = Consistency(Mode.SSP, 1)
    tables = tuple(replace(table, rule=_AVERAGED, consistency=near) for table in job.tables)
    return replace(job, tables=tables, pieces=groups, damp_stale=False, notes_changes=True, clip=None, rates=Rates())


def group_terms(server: ServerSection, terms: Terms) -> Terms:
    """Return how a group goes: its snapshots are of clocks at which it meets the others. terms: as for one job."""
    every = server.sync_every
    return replace(terms, snapshot_every=-(-terms.snapshot_every // every) * every)


def global_terms(server: ServerSection, terms: Terms, job: Job) -> Terms:
    """Return how the job over groups goes: a task of it is a meeting of a group. terms, job: of a group."""
    every = server.sync_every
    meetings = -(-terms.tasks // (job.pieces * every))
    return replace(
        terms,
        tasks=meetings * server.groups,
        servers=server.servers,
        workers=server.groups,
        ahead=1,
        evaluate_every=0,
        snapshot_every=-(-terms.snapshot_every // every),
    )
