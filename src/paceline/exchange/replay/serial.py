"""Shards that go through the updates that a log names, in its order, with reads between them where they were."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline.errors import ExchangeError
from paceline.exchange.shard.log import Record
from paceline.exchange.shard.norms import Share, Stage, closing, norm_of
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Update


class Line:
    """One shard.

    Args:
        shard: as it was before the first record.
        records: its updates in order.
        reads: positions at which it was read, each as often as it was.
        mark: the position at which `reached` is called.
        applied: called after each update.
    """

    def __init__(
        self,
        shard: Shard,
        records: Sequence[Record],
        reads: Iterable[int],
        mark: int,
        reached: Callable[[Shard], None],
        applied: Callable[[Shard], None],
    ) -> None:
        self.shard = shard
        self._records = records
        self._first = shard.position + 1
        self._named = {(record.worker, record.sequence) for record in records}
        self._expected = Counter(reads)
        self._offered: dict[tuple[int, int], Update] = {}
        self._wanted: dict[int, list[Callable[[Shard], None]]] = defaultdict(list)
        self._mark, self._reached, self._applied = mark, reached, applied
        if shard.position == mark:
            reached(shard)

    @property
    def last(self) -> int:
        """The position after its last update."""
        return self._first - 1 + len(self._records)

    def offer(self, update: Update) -> None:
        """Here is an update: it is applied when it is its turn, if ever. Its tensors stay what they are."""
        if (update.worker, update.sequence) in self._named:
            self._offered[update.worker, update.sequence] = update
            self._advance()

    def want(self, position: int, read: Callable[[Shard], None]) -> None:
        """Have the shard read at a position, which is one of the reads that were expected.

        Raises:
            ExchangeError: it is beyond that.
        """
        if position < self.shard.position:
            raise ExchangeError(
                f"shard {self.shard.number} was read at position {position}, and went on without that read: the "
                "actions of workers and the logs of updates do not belong together."
            )
        self._wanted[position].append(read)
        self._advance()

    def forget(self, positions: Iterable[int]) -> None:
        """Expect no more of these reads."""
        self._expected.subtract(positions)
        self._advance()

    def lacks(self) -> str | None:
        """Return what it waits for, or None where nothing is left."""
        position = self.shard.position
        if self._expected[position] > 0:
            return f"shard {self.shard.number} waits at position {position} for {self._expected[position]} reads"
        if position == self.last:
            return None
        record = self._records[position + 1 - self._first]
        return (
            f"shard {self.shard.number} waits for update {record.sequence} of worker {record.worker} (tasks "
            f"{', '.join(map(str, record.tasks)) or 'none'}), its position {record.position}"
        )

    def _advance(self) -> None:
        """Read and apply as far as can be."""
        while True:
            position = self.shard.position
            for read in self._wanted.pop(position, ()):
                self._expected[position] -= 1
                read(self.shard)
            if self._expected[position] > 0 or position >= self.last:
                return
            record = self._records[position + 1 - self._first]
            update = self._offered.pop((record.worker, record.sequence), None)
            if update is None:
                return
            del self._expected[position]
            self._apply(update, record)
            if self.shard.position == self._mark:
                self._reached(self.shard)
            self._applied(self.shard)  # which may have this very line go on

    def _apply(self, update: Update, record: Record) -> None:
        applied = self.shard.apply(update)
        found = (update.tasks, applied.position, applied.staleness, applied.repeated)
        if found != (record.tasks, record.position, record.staleness, False):
            raise ExchangeError(
                f"update {record.sequence} of worker {record.worker} came to shard {self.shard.number} with tasks "
                f"{list(record.tasks)}, {record.staleness} updates old; the replay has tasks {list(update.tasks)}, "
                f"{applied.staleness} updates old: its worker did something else this time."
            )


class Lines:
    """All shards of a job.

    Args:
        shards: as they were when the run began.
        records: of each shard its updates.
        reads: of each shard the positions at which it was read.
        marks: of each shard the position whose state is wanted.
        reached: called with a shard when it is at its mark.

    Where steps are closed, nobody offers what closes them: it follows from what the shards come to (`shard.norms`).
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        records: Mapping[int, Sequence[Record]],
        reads: Mapping[int, Sequence[int]],
        marks: Mapping[int, int],
        reached: Callable[[Shard], None],
    ) -> None:
        self._left = set(marks)
        self._shares: dict[int, dict[int, Share]] = defaultdict(dict)  # by clock and shard, of steps that are open
        self._next = 0  # the lowest clock that may be open

        def note(shard: Shard) -> None:
            self._left.discard(shard.number)
            reached(shard)

        self._lines = {
            shard.number: Line(
                shard,
                records.get(shard.number, ()),
                (position for position in reads.get(shard.number, ()) if position >= shard.position),
                marks.get(shard.number, -1),
                note,
                self._close if shard.job.closes_steps else _nothing,
            )
            for shard in shards
        }

    def __getitem__(self, shard: int) -> Line:
        return self._lines[shard]

    @property
    def complete(self) -> bool:
        """Whether all marks were reached."""
        return not self._left

    @property
    def ended(self) -> bool:
        """Whether all shards are after their last updates."""
        return all(line.shard.position == line.last for line in self._lines.values())

    def _close(self, shard: Shard) -> None:
        """Offer what closes a step once the last shard has all of its pieces."""
        clock = shard.completed
        share = shard.share(clock)
        if share.stage is not Stage.WHOLE or clock < self._next:
            return
        self._shares[clock][shard.number] = share
        if len(self._shares[clock]) < len(self._lines):
            return
        norm = norm_of(self._shares.pop(clock).values())
        assert norm is not None
        self._next = clock + 1
        for line in self._lines.values():
            line.offer(closing(clock, norm))

    def lacks(self) -> list[str]:
        """Return what shards wait for that have not reached their marks."""
        return [lack for shard in sorted(self._left) if (lack := self._lines[shard].lacks()) is not None]


def _nothing(shard: Shard) -> None:
    """Steps are not closed."""
