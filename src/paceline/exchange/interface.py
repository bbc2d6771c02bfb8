"""What a worker sees of the servers. `client` talks to them; a replay stands in their place.

Who deals tasks reads this too, and loads no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from paceline.exchange.job import Job

if TYPE_CHECKING:
    from torch import Tensor


class Interrupted(Exception):
    """A read would wait for a task whose worker is gone: ask for that task, compute it first, and read again.

    No read that was begun before is under way any more, and what they brought is not to be used.
    """


class Order(Enum):
    """What a worker is to do next."""

    TASK = "task"
    EVALUATE = "evaluate"
    """Look at what has been learnt; `number` is the clock, all tasks of clocks below which have been applied."""
    WAIT = "wait"
    """Nothing now: all tasks are dealt, or the job is below its minimum of workers; ask again."""
    END = "end"


class Deal(NamedTuple):
    """An order. number: of the task, or the clock; alone: it was another worker's: push it by itself."""

    order: Order
    number: int = -1
    alone: bool = False


class Dealer(Protocol):
    """Who deals tasks to one worker; each task is done once, by somebody."""

    def next_task(self) -> Deal:
        """Return what to do next; tasks of lower numbers first, those of workers that are gone before all others."""
        ...

    def done(self, deals: Sequence[Deal]) -> None:
        """Say that all of this was done: pushed and acknowledged, or evaluated."""
        ...

    def put_back(self, deals: Sequence[Deal]) -> None:
        """Give up tasks that were dealt, so that somebody else does them."""
        ...


class Rows(NamedTuple):
    """Gradients of some rows. keys: [n] int64, each once; values: [n, width]."""

    keys: Tensor
    values: Tensor


class Exchange(Protocol):
    """Parameters that replicas share. For one thread."""

    @property
    def job(self) -> Job:
        """What is kept."""
        ...

    def pull(self, tables: Sequence[int], out: Sequence[Tensor], clock: int) -> None:
        """Read dense tables into `out`, tensors of their shapes, as they may be read at `clock`.

        Raises:
            Interrupted: see there.
        """
        ...

    def pull_rows(self, table: int, keys: Tensor, out: Tensor, clock: int) -> None:
        """Read rows into `out` ([n, width]). keys: [n] int64, each once.

        Raises:
            Interrupted: see there.
        """
        ...

    def forget(self) -> None:
        """Say that what was read so far goes into no gradient: it was looked at, or its task is read again."""
        ...

    def push(
        self, tasks: Sequence[int], dense: Mapping[int, Tensor], rows: Mapping[int, Rows], weight: float = 1.0
    ) -> float | None:
        """Push gradients of tasks, by table; all shards hear of the tasks. May return before it is acknowledged.

        What is given is not read any more once this returns.

        Returns:
            Where the gradients of steps are clipped (`Job.clip`) and the step of these tasks is whole with them, its
            global norm.
        """
        ...

    def flush(self) -> None:
        """Return once all pushes are acknowledged: they are on all replicas of their shards."""
        ...

    def close(self) -> None:
        """Leave the servers."""
        ...


RowsWanted: TypeAlias = "Mapping[int, tuple[Tensor, Tensor]]"
"""By table, keys ([n] int64, each once) and where their rows go ([n, width], contiguous)."""

NO_ROWS: Final[RowsWanted] = MappingProxyType({})


class Pending(Protocol):
    """A read that is under way."""

    def wait(self) -> None:
        """Return once all of it is in its `out`; this is when it counts as read.

        Raises:
            Interrupted: see there; nothing is to be taken from `out`.
        """
        ...


class Arrivals(Protocol):
    """Dense tables that come one after the other."""

    def wait(self, table: int) -> None:
        """Return once this table is in its `out`.

        Raises:
            Interrupted: see there.
        """
        ...


@runtime_checkable
class Fetching(Exchange, Protocol):
    """An exchange that also reads while its worker computes."""

    def pull_together(self, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted) -> None:
        """Read dense tables as `pull` does and rows as `pull_rows` does, in one go.

        Raises:
            Interrupted: see there.
        """
        ...

    def fetch(self, tables: Sequence[int], out: Sequence[Tensor], clock: int, rows: RowsWanted = NO_ROWS) -> Pending:
        """Begin what `pull_together` does; it is waited for, and nobody touches what is given until then."""
        ...

    def pull_in_order(self, tables: Sequence[int], out: Sequence[Tensor], clock: int) -> Arrivals:
        """Begin to read dense tables in the order in which they will be used; all of them are waited for."""
        ...
