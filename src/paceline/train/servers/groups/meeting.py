"""What a meeting moves, between a group and the global servers.

Tables of a group are those of its module, then as many that say what each was after the last meeting
(`recipe.groups.group_job`). All differences are element by element, so it does not matter of which moment each is.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.interface import Rows

_DENSE, _KEYS, _ROWS = "dense", "keys", "rows"
_SINCE: Final = "since"


@dataclass(frozen=True)
class Difference:
    """What is pushed, by table."""

    dense: Mapping[int, Tensor] = field(default_factory=dict)
    rows: Mapping[int, Rows] = field(default_factory=dict)


class Kind(Enum):
    """What a meeting was."""

    BEGAN = "began"
    """None: all up to here was done before the exchange was begun."""
    MET = "met"
    LAST = "last"
    """With what the group held at its end; what comes back goes to nobody, unless the run is resumed."""
    NOTHING = "nothing"
    """After that: the group has nothing more to move, and the others count on its meetings."""


@dataclass(frozen=True)
class Meeting:
    """A meeting that was agreed on: both sides are to get theirs, once.

    Attributes:
        number: from 1.
        base: number of that with which the exchange of the group began.
        kind: see there.
        moved: for the global servers, which subtract it.
        back: for the group's, which add it.
        inside, above: of each shard the position up to which changed rows are known.
    """

    number: int
    base: int
    kind: Kind
    moved: Difference = Difference()
    back: Difference = Difference()
    inside: Sequence[int] = ()
    above: Sequence[int] = ()

    def write(self, path: Path) -> None:
        """Write a file that is there in whole or not at all, however this process ends.

        Raises:
            ExchangeError: it cannot be written.
        """
        tensors = {**_named("moved", self.moved), **_named("back", self.back)}
        tensors |= {f"{_SINCE}.{name}": torch.tensor(getattr(self, name)) for name in ("inside", "above")}
        about = {"number": self.number, "base": self.base, "kind": self.kind.value}
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, draft, {"meeting": json.dumps(about)})
            draft.replace(path)
        except (OSError, SafetensorError) as error:
            draft.unlink(missing_ok=True)
            raise ExchangeError(
                f"cannot write {path} ({error}); groups of servers do not meet without it: make room on the disk."
            ) from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote.

        Raises:
            ExchangeError: it is not there, or damaged.
        """
        try:
            with safe_open(path, "pt") as file:
                about: dict[str, Any] = json.loads(file.metadata()["meeting"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
            inside, above = (tensors.pop(f"{_SINCE}.{name}").long().tolist() for name in ("inside", "above"))
            moved, back = (_difference(name, tensors) for name in ("moved", "back"))
            return cls(about["number"], about["base"], Kind(about["kind"]), moved, back, inside, above)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise ExchangeError(f"cannot read the meeting in {path}: {error}") from error


class Values(NamedTuple):
    """What was read, by table: whole tables, and rows."""

    dense: Mapping[int, Tensor]
    rows: Mapping[int, Tensor]


class Met(NamedTuple):
    """Rows that take part in a meeting. keys: [n] int64; own: which of them the group's tasks have changed: [n]."""

    keys: Tensor
    own: Tensor


def moves(
    count: int, share: float, here: Values, there: Values, met: Mapping[int, Met]
) -> tuple[Difference, Difference]:
    """Return what global servers subtract, and what those of the group add.

    Args:
        count: tables of the module.
        share: what the group's movement counts by.
        here: values of the group, and what they were after the last meeting.
        there: global values.
        met: which rows these are.
    """
    dense: dict[int, Tensor] = {}
    rows: dict[int, Rows] = {}
    back_dense: dict[int, Tensor] = {}
    back_rows: dict[int, Rows] = {}
    for table, value in there.dense.items():
        own, before = here.dense[table], here.dense[count + table]
        dense[table] = (before - own) * share
        new = value - dense[table]
        back_dense |= {table: new - own, count + table: new - before}
    for table, value in there.rows.items():
        keys, is_own = met[table]
        own, before = here.rows[table], here.rows[count + table]
        step = torch.where(is_own[:, None], (before - own) * share, torch.zeros_like(own))
        new = value - step
        some = (step != 0).any(1)
        rows[table] = Rows(keys[some], step[some])
        for index, old in ((table, own), (count + table, before)):
            some = (new != old).any(1)
            back_rows[index] = Rows(keys[some], (new - old)[some])
    moved = Difference(dense, {table: held for table, held in rows.items() if len(held.keys)})
    back = Difference(back_dense, {table: held for table, held in back_rows.items() if len(held.keys)})
    return moved, back


def _named(what: str, difference: Difference) -> dict[str, Tensor]:
    named = {f"{what}.{_DENSE}.{table}": values.contiguous() for table, values in difference.dense.items()}
    for table, (keys, rows) in difference.rows.items():
        named |= {f"{what}.{_KEYS}.{table}": keys.contiguous(), f"{what}.{_ROWS}.{table}": rows.contiguous()}
    return named


def _difference(what: str, tensors: Mapping[str, Tensor]) -> Difference:
    dense: dict[int, Tensor] = {}
    rows: dict[int, Rows] = {}
    for name, values in tensors.items():
        of, kind, table = name.split(".")
        if of == what and kind == _DENSE:
            dense[int(table)] = values
        elif of == what and kind == _KEYS:
            rows[int(table)] = Rows(values, tensors[f"{what}.{_ROWS}.{table}"])
    return Difference(dense, rows)
