"""Snapshots of shards on disk: dense tables whole, of rows those touched since the last one, and all every few times.

    snapshots/7/manifest.json                  (`manifest.py`)
    snapshots/7/shard-3.json                   what shard 3 was, and which files make it up
    snapshots/7/shard-3.dense-7-*.safetensors  dense tables, and what waits for its step
    snapshots/7/shard-3.rows-5-*.safetensors   all rows; a hard link to that of snapshot 5, which may be deleted
    snapshots/7/shard-3.rows-7-*.safetensors   those touched since

Two servers may write the same shard, where its chain changes meanwhile: their files have different names, and the
description of one of them replaces that of the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor

from paceline.durable import settle
from paceline.errors import ExchangeError
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.rates import Rates
from paceline.exchange.shard.files import File
from paceline.exchange.shard.manifest import Manifest, cannot_write, read_json, write_json
from paceline.exchange.shard.shard import Shard, ShardState

_FULL_EVERY: Final = 8
"""Snapshots of which one has all rows; more make a restart read more files."""


class Taken(NamedTuple):
    """A shard as it was when a snapshot was taken of it, still in memory.

    Attributes:
        number: of the snapshot.
        shard: of which shard.
        state: of the shard; of rows all, or those touched since the snapshot `base`.
        base: snapshot that the rows come on top of; None: they are all.
    """

    number: int
    shard: int
    state: ShardState
    base: int | None


@dataclass(slots=True)
class _Last:
    """The last snapshot taken of a shard, how many it builds on, and whether it is on disk."""

    number: int
    depth: int
    written: bool = False


class Snapshots:
    """Writes the snapshots of one server's shards.

    Args:
        directory: in which each snapshot has its own.
        job: what is kept.
    """

    def __init__(self, directory: Path, job: Job) -> None:
        self._directory = directory
        self._job = job
        self._last: dict[int, _Last] = {}

    def take(self, shard: Shard, number: int) -> Taken:
        """Copy a shard; no update may come meanwhile."""
        last = self._last.get(shard.number)
        base = None
        if last is not None and last.written and last.depth + 1 < _FULL_EVERY and last.number < number:
            base = last.number if _description(self._directory / str(last.number), shard.number).exists() else None
        state = shard.state(touched_only=base is not None)
        shard.clear_touched()
        self._last[shard.number] = _Last(number, 0 if base is None or last is None else last.depth + 1)
        return Taken(number, shard.number, state, base)

    def write(self, taken: Taken) -> str:
        """Write what was taken, from any thread; returns the name that a manifest has for it.

        Raises:
            ExchangeError: it cannot be written; the snapshots before are as they were.
        """
        name = write_shard(self._directory, self._job, taken)
        last = self._last[taken.shard]
        if last.number == taken.number:
            last.written = True
        return name


def write_shard(snapshots: Path, job: Job, taken: Taken) -> str:
    """Write a shard's part of a snapshot; returns the name that a manifest has for it.

    Raises:
        ExchangeError: it cannot be written.
    """
    number, shard, state, base = taken
    directory = snapshots / str(number)
    rows_of = [f"table.{index}." for index, table in enumerate(job.tables) if not isinstance(table, DenseTable)]
    rows = {name: tensor for name, tensor in state.tensors.items() if name.startswith(tuple(rows_of))}
    dense = {name: tensor for name, tensor in state.tensors.items() if name not in rows}
    files: list[File] = []
    if base is not None:
        before = snapshots / str(base)
        files = [File(**held) for held in read_json(_description(before, shard))["rows"]]
        for file in files:
            file.link(before, directory)
    own = f"{number}-{secrets.token_hex(4)}.safetensors"
    if rows:
        files.append(File.write(directory, f"shard-{shard}.rows-{own}", rows))
    whole = File.write(directory, f"shard-{shard}.dense-{own}", dense)
    path = _description(directory, shard)
    try:
        settle(directory)
    except OSError as error:  # it was given up meanwhile, and removed
        raise cannot_write(path, error) from error
    described = {"dense": whole.to_dict(), "rows": [file.to_dict() for file in files]}
    essence = replace(job, rates=Rates()).to_dict()  # a schedule may be long, and does not matter to what is kept
    write_json(path, {"job": essence, "shard": shard, "meta": state.meta, **described})
    return path.name


def load_shard(directory: Path, job: Job, number: int, *, anew: bool = True) -> Shard:
    """Return a shard as it is in the snapshot in `directory`; tasks that it has count once.

    Args:
        directory: of the snapshot.
        job: what is kept.
        number: of the shard.
        anew: workers begin anew; else what they pushed counts once, too.

    Raises:
        ExchangeError: the snapshot is not whole, damaged, or of another job.
    """
    manifest = Manifest.read(directory)
    if number not in manifest.files:
        raise ExchangeError(
            f"the snapshot in {directory} has no shard {number}; it is of {len(manifest.files)} shards."
        )
    path = directory / manifest.files[number]
    described = read_json(path)
    try:
        _check_job(path, described["job"], job)
        dense, rows = File(**described["dense"]), [File(**held) for held in described["rows"]]
        meta = described["meta"]
    except (KeyError, TypeError) as error:
        raise ExchangeError(f"{path} is no part of a snapshot ({error}); take the snapshot before.") from error
    tensors = dense.read(directory)
    first = rows[0].read(directory) if rows else {}
    shard = Shard.of(job, number, ShardState({**tensors, **first}, meta))
    for later in rows[1:]:
        _merge(shard, later.read(directory))
    shard.clear_touched()
    if anew:
        shard.forget_workers()
    return shard


def _merge(shard: Shard, tensors: Mapping[str, Tensor]) -> None:
    for index in shard.tables:
        prefix = f"table.{index}."
        held = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if held:
            shard.table(index).load(held)


def _description(directory: Path, shard: int) -> Path:
    return directory / f"shard-{shard}.json"


def _check_job(path: Path, kept: Mapping[str, Any], job: Job) -> None:
    """Check that a snapshot is of this job; learning rates, bounds and replicas may be others.

    Raises:
        ExchangeError: it is not; what differs.
    """
    for (name, before), (_, now) in zip(_essence(kept), _essence(job.to_dict()), strict=False):
        if before != now:
            raise ExchangeError(
                f"{path} is of another job: its {name} is {before}, and now {now}. Go on with what it was made with."
            )


def _essence(job: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what must be as it was for a shard's state to mean the same, by name."""
    found = [(name, job[name]) for name in ("shards", "pieces", "seed")]
    found.append(("tables", [table["name"] for table in job["tables"]]))
    for table in job["tables"]:
        kind = {name: value for name, value in table.items() if name not in ("rule", "consistency", "name")}
        kind |= {"rule": table["rule"]["name"], "synchronous": table["consistency"] == "bsp"}
        found += [(f"{name} of {table['name']}", _plain(value)) for name, value in sorted(kind.items())]
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
