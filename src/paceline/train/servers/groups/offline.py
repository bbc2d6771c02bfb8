"""Meetings carried into snapshots, where servers are gone: what was pushed to a shard before counts once here too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.exchange.client.outgoing import Cutter
from paceline.exchange.client.pushes import Push
from paceline.exchange.client.routes import DenseRoutes
from paceline.exchange.job import Job, Rule, SparseTable
from paceline.exchange.server.entry import pushed
from paceline.exchange.shard.manifest import Manifest
from paceline.exchange.shard.shard import Shard
from paceline.exchange.shard.snapshot import Taken, load_shard, write_shard
from paceline.exchange.shard.whole import Tables
from paceline.exchange.table.sparse import KEYS, VALUES, Sparse
from paceline.train.servers.groups.bridge import bridge_id, task_of
from paceline.train.servers.groups.meeting import Difference, Meeting, Met, Values
from paceline.train.servers.recipe.groups import met as name_of_met


@dataclass(frozen=True)
class Change:
    """What a bridge pushed; see `updates.Update`."""

    worker: int
    sequence: int
    tasks: Sequence[int]
    difference: Difference

    def apply(self, job: Job, shards: Sequence[Shard]) -> bool:
        """Apply it to all shards that lack it; return whether any did."""
        outgoing = Cutter(job, DenseRoutes(job)).cut(self.difference.dense, self.difference.rows, keep=False)
        push = Push(self.worker, self.sequence, self.tasks, 1.0, [-1] * job.shards, outgoing)
        entries = pushed(push.frame(range(job.shards)), job, borrowed=False)
        return any([not shards[entry.shard].apply(entry.update(job)).repeated for entry in entries])


def to_global(meeting: Meeting, group: int, groups: int) -> Change:
    """Return what a meeting pushes to the global servers."""
    task = task_of(meeting.number, group, groups)
    return Change(bridge_id(group), meeting.number, (task,), meeting.moved)


def to_group(meeting: Meeting, group: int) -> Change:
    """Return what a meeting pushes to the servers of the group."""
    return Change(bridge_id(group), meeting.number, (), meeting.back)


def restored(source: Path, job: Job, changes: Sequence[Change], target: Path) -> None:
    """Have a snapshot in another place, with changes applied that it lacks; the same files where it lacks none.

    Args:
        source: directory of the snapshot.
        job: what is kept.
        changes: in the order in which they are to be applied.
        target: directory of the new one; what is there is removed.

    Raises:
        ExchangeError: it cannot be read or written.
    """
    shutil.rmtree(target, ignore_errors=True)
    if changes:
        shards = [load_shard(source, job, number, anew=False) for number in range(job.shards)]
        if any([change.apply(job, shards) for change in changes]):
            _write(shards, job, Manifest.read(source), target)
            return
    linked(source, target)


def _write(shards: Sequence[Shard], job: Job, manifest: Manifest, target: Path) -> None:
    """Write shards as a snapshot; target: named by its number."""
    number = int(target.name)
    files = {
        shard.number: write_shard(target.parent, job, Taken(number, shard.number, shard.state(), None))
        for shard in shards
    }
    Manifest(number, manifest.clock, manifest.first_task, manifest.epoch, files).write(target)


def linked(source: Path, target: Path) -> None:
    """Have the files of a directory in another one too; its manifest last, so that it is whole or not there."""
    paths = sorted(
        (path for path in source.rglob("*") if path.is_file()), key=lambda path: path.name == "manifest.json"
    )
    for path in paths:
        there = target / path.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, there)


class Held(NamedTuple):
    """What a group held at its end, as a meeting takes it."""

    values: Values
    met: dict[int, Met]


def held(tables: Tables, job: Job) -> Held:
    """Return what a group holds, and what that was after its last meeting; of rows those that differ.

    Args:
        tables: of the group.
        job: of the group.
    """
    count = len(job.tables) // 2
    dense: dict[int, torch.Tensor] = {}
    rows: dict[int, torch.Tensor] = {}
    met: dict[int, Met] = {}
    for index, table in enumerate(job.tables[:count]):
        beside = name_of_met(table.name)
        if not isinstance(table, SparseTable):
            dense |= {index: tables.dense[table.name], count + index: tables.dense[beside]}
            continue
        keys, now = tables.keys[table.name], tables.rows[table.name]
        before = Sparse(table.width, now.dtype, Rule("sgd", {"lr": 1.0}), table.initializer, job.seed)
        before.load({KEYS: tables.keys[beside], VALUES: tables.rows[beside]})
        old = torch.empty_like(now)
        before.read(keys, old)
        some = (now != old).any(1)
        rows |= {index: now[some], count + index: old[some]}
        met[index] = Met(keys[some], torch.ones(int(some.sum()), dtype=torch.bool))
    return Held(Values(dense, rows), met)
