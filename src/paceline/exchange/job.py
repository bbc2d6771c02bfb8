"""What is kept on servers and by which rules: a job, as every process of it knows it. Plain values, no PyTorch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Self, TypeAlias

from paceline.errors import ExchangeError, nearest
from paceline.exchange.rates import Rates


class Mode(Enum):
    """How far replicas may drift apart."""

    BSP = "bsp"
    SSP = "ssp"
    ASP = "asp"

    @property
    def summary(self) -> str:
        """One line for `--help` and error messages."""
        return {
            Mode.BSP: "a step is the sum of all its tasks, applied at once: equal to serial",
            Mode.SSP: "updates apply as they come; nobody reads parameters that lack an update older than the bound",
            Mode.ASP: "updates apply as they come, and nobody waits",
        }[self]


@dataclass(frozen=True)
class Consistency:
    """Who may read what.

    A *clock* is a round of `Job.pieces` tasks: task k is of clock k // pieces. Who computes a task of clock c reads a
    table once all tasks of clocks below c - bound have been applied to it. So a worker that dies or joins changes no
    bound: its tasks are computed by somebody.

    Attributes:
        mode: see there.
        bound: clocks by which a read may be behind; 0 under BSP, None under ASP.
        fetch_every: tasks that a worker computes on what it fetched once (n_fetch of Downpour, Dean et al. 2012), with
            steps of its own meanwhile, as there. Rows are fetched when they are first needed.
        push_every: tasks of which the sum of gradients goes in one push (n_push there).
    """

    mode: Mode = Mode.BSP
    bound: int | None = 0
    fetch_every: int = 1
    push_every: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `bsp`, `ssp(3)`, `asp` or `downpour(n_fetch, n_push)`.

        Raises:
            ExchangeError: it is none of these.
        """
        match = re.fullmatch(r"\s*(\w+)\s*(?:\(([\d\s,]*)\))?\s*", text)
        name = match[1] if match else text
        numbers = [int(n) for n in (match[2] or "").replace(",", " ").split()] if match else []
        if name == "bsp" and not numbers:
            return cls(Mode.BSP, 0)
        if name == "ssp" and len(numbers) == 1:
            return cls(Mode.SSP, numbers[0])
        if name == "asp" and not numbers:
            return cls(Mode.ASP, None)
        if name == "downpour" and len(numbers) == 2 and min(numbers) > 0:
            return cls(Mode.ASP, None, *numbers)
        known = ["bsp", "ssp", "asp", "downpour"]
        raise ExchangeError(
            f"cannot read the consistency '{text}'; write bsp, ssp(bound), asp or downpour(n_fetch, n_push), such as "
            f"ssp(3).{nearest(name, known) if name not in known else ''}"
        )

    def __str__(self) -> str:
        if (self.fetch_every, self.push_every) != (1, 1):
            return f"downpour({self.fetch_every}, {self.push_every})"
        return f"ssp({self.bound})" if self.mode is Mode.SSP else self.mode.value


@dataclass(frozen=True)
class Rule:
    """What a gradient does to a parameter, and its numbers; see `table/rules` for names and what each takes.

    Attributes:
        name: sgd, momentum, adagrad, rowwise_adagrad, adam or ftrl.
        options: learning rate (`lr`) and the rule's own numbers; those left out have the rule's defaults.
    """

    name: str = "sgd"
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Initializer:
    """Values of a row that is new, drawn from (seed, key) alone: the same on every server and in every replay.

    Attributes:
        name: zeros, normal (scale: standard deviation) or uniform (from -scale to scale).
    """

    name: str = "zeros"
    scale: float = 0.0


@dataclass(frozen=True)
class DenseTable:
    """A parameter that is read whole.

    Attributes:
        name: of the parameter.
        shape: its shape.
        dtype: `float32`, `float64`, `bfloat16`, ...
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    rule: Rule = Rule()
    consistency: Consistency = Consistency()

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class SparseTable:
    """Rows by 64-bit keys, made when they are first read or updated.

    Attributes:
        name: of the parameter.
        width: elements of a row.
        dtype: `float32` or `float64`.
    """

    name: str
    width: int
    dtype: str = "float32"
    rule: Rule = Rule()
    consistency: Consistency = Consistency()
    initializer: Initializer = Initializer()


Table: TypeAlias = DenseTable | SparseTable


@dataclass(frozen=True)
class Job:
    """What all processes of a job agree on. Tables are known by their index.

    Attributes:
        tables: what is kept.
        shards: into how many parts keys are divided, once for all of the job; each lives on one chain of servers.
        pieces: tasks of a clock; under BSP the pieces of a step's batch.
        replication: servers that hold each shard, as far as there are as many.
        seed: of new rows.
        damp_stale: a gradient that is n updates old counts 1 / (1 + n); not under BSP.
        notes_changes: shards note which rows are changed, for who carries changes to other servers.
        clip: largest global norm of the gradient of a step, where all tables are synchronous; None: any. See
            `shard.norms`.
        rates: by clock, how many times a rule's `lr` the learning rate of its tasks' updates is.
    """

    tables: tuple[Table, ...]
    shards: int = 16
    pieces: int = 1
    replication: int = 1
    seed: int = 0
    damp_stale: bool = False
    notes_changes: bool = False
    clip: float | None = None
    rates: Rates = field(default_factory=Rates)

    def clock(self, task: int) -> int:
        """The clock of a task."""
        return task // self.pieces

    def rate(self, clock: int) -> float:
        """How many times its `lr` a rule's learning rate is for updates of a clock."""
        return self.rates.at(clock)

    def is_synchronous(self, table: int) -> bool:
        """Whether a table changes once a clock, by the mean of its pieces."""
        return self.tables[table].consistency.mode is Mode.BSP

    @cached_property
    def closes_steps(self) -> bool:
        """Whether shards apply a step only once all of them have all of it; see `shard.norms`.

        So where all tables are synchronous: a worker that dies while it pushes leaves no shard ahead of the others,
        and who does its task again reads what it had read.
        """
        synchronous = all(map(self.is_synchronous, range(len(self.tables))))
        return self.clip is not None or (synchronous and self.shards > 1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        tables = [
            {**asdict(table), "kind": "dense" if isinstance(table, DenseTable) else "sparse"} for table in self.tables
        ]
        for values, table in zip(tables, self.tables, strict=True):
            values["consistency"] = str(table.consistency)
        return {**asdict(self), "tables": tables}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        return cls(**{**values, "tables": tuple(map(_table, values["tables"])), "rates": Rates(**values["rates"])})


def _table(values: Mapping[str, Any]) -> Table:
    given = dict(values)
    given |= {"rule": Rule(**given["rule"]), "consistency": Consistency.parse(given["consistency"])}
    if given.pop("kind") == "dense":
        return DenseTable(**{**given, "shape": tuple(given["shape"])})
    return SparseTable(**{**given, "initializer": Initializer(**given["initializer"])})
