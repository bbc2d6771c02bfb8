"""What the loop of a worker asks of that which computes: a replica, or what runs one otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.exchange.interface import Arrivals, Rows, RowsWanted
from paceline.train.data import MicroBatch
from paceline.train.servers.worker.working_set import Taken


class Prepared(NamedTuple):
    """The samples of a task, as far as they can be made ready before it begins.

    Attributes:
        portions: the micro-batches.
        taken: with positions in place of keys, where there are sparse tables.
        keys: of the rows that it needs, by table: [n] int64, each once.
    """

    portions: Sequence[MicroBatch]
    taken: Taken | None
    keys: Mapping[int, Tensor]


class Computed(NamedTuple):
    """What became of a task.

    Attributes:
        loss: mean over its samples; NaN where nothing counts.
        weight: what that is a mean over.
        dense: gradients by table; valid until the next task.
        rows: gradients of rows by table; likewise.
        norm: global norm of the gradient before it was clipped; None: nobody asked.
    """

    loss: float
    weight: float
    dense: Mapping[int, Tensor]
    rows: Mapping[int, Rows]
    norm: float | None = None


class Evaluated(NamedTuple):
    """What held-out data said.

    Attributes:
        loss: mean over it; NaN where nothing counts.
        weight: what that is a mean over.
        metrics: further figures by name, such as `auc`.
    """

    loss: float
    weight: float
    metrics: Mapping[str, float]


class Computer(Protocol):
    """What computes gradients: `replica.Replica`, or what runs it otherwise."""

    @property
    def dense(self) -> Sequence[int]:
        """Tables that are read whole."""
        ...

    @property
    def sparse(self) -> Sequence[int]:
        """Tables of which rows are read."""
        ...

    @property
    def rooms(self) -> Sequence[Tensor]:
        """Where dense tables are read into; nothing but the worker writes there."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether dense tables may arrive while it computes."""
        ...

    def order(self) -> Sequence[int] | None:
        """Dense tables in the order of their use, if that is known."""
        ...

    def prepare(self, portions: Sequence[MicroBatch]) -> Prepared:
        """Make the samples of a task ready; any thread may, while another task is computed."""
        ...

    def take(self, prepared: Prepared) -> RowsWanted:
        """Begin with a task; return by table the keys of the rows that it needs, and where they go."""
        ...

    def arrived(self, tables: Sequence[int]) -> None:
        """What was read, or changed, is in its room."""
        ...

    def compute(self, task: int, arrivals: Arrivals | None = None) -> Computed:
        """Compute the task that was taken."""
        ...

    def evaluate(self, batches: Iterable[MicroBatch], read: Callable[[RowsWanted], None]) -> Evaluated:
        """Evaluate what was read."""
        ...
