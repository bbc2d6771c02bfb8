"""Cases of every kind of schedule, for tests."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from paceline.schedule import Account, Edges, Kind, Schedule, communicate, make, validate
from paceline.schedule.places import consecutive


@dataclass(frozen=True)
class Case:
    kind: Kind
    ranks: int
    micro_batches: int
    chunks: int = 1
    batches: int = 1

    def schedule(self) -> Schedule:
        """With its messages along a chain."""
        plain = make(self.kind.value, self.ranks, self.micro_batches, chunks=self.chunks, batches=self.batches)
        return communicate(plain, Edges.chain(plain.stages))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind, ranks = draw(st.sampled_from(Kind)), draw(st.integers(1, 5))
    fewest = ranks if kind is Kind.PIPEDREAM_2BW else 1
    return Case(
        kind,
        ranks,
        draw(st.integers(fewest, 11)),
        chunks=draw(st.integers(2, 3)) if kind is Kind.INTERLEAVED else 1,
        batches=draw(st.integers(1, 3)) if kind.is_asynchronous else 1,
    )


@st.composite
def replicated(draw: st.DrawFn) -> Schedule:
    """A schedule of stages with several ranks, with its messages."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    name = draw(st.sampled_from([kind.value for kind in Kind if kind.replicates]))
    plain = make(name, sum(counts), 6 * draw(st.integers(1, 2)), replicas=consecutive(counts))
    return communicate(plain, Edges.chain(plain.stages))


def schedules() -> st.SearchStrategy[Schedule]:
    """Schedules of all kinds with their messages."""
    return st.one_of(cases().map(Case.schedule), replicated())


def prove(schedule: Schedule, edges: Edges | None = None) -> Account:
    """Add messages where there are none, and validate."""
    edges = Edges.chain(schedule.stages) if edges is None else edges
    return validate(schedule if schedule.has_messages else communicate(schedule, edges), edges)
