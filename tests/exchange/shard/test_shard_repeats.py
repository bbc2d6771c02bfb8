"""What comes again counts once: the same push, and the same task by somebody else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.exchange.shard.sequences import Sequences
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import OUTSTANDING, Update
from tests.exchange.shard import jobs

TASKS = 8


@given(
    modes=st.sampled_from([("bsp", "bsp"), ("asp", "asp"), ("bsp", "asp"), ("ssp(1)", "asp")]),
    repeats=st.lists(st.tuples(st.integers(0, TASKS - 1), st.booleans()), max_size=25),
    order=st.permutations(range(TASKS)),
    additions=st.booleans(),
)
@settings(max_examples=25)
def test_repeats_in_any_order_change_nothing(
    modes: tuple[str, str], repeats: list[tuple[int, bool]], order: list[int], additions: bool
) -> None:
    job = jobs.job(*modes, pieces=2, shards=1)
    once, often = jobs.begun(job), jobs.begun(job)
    order = order if modes == ("asp", "asp") else sorted(order, key=lambda task: (task // 2, order.index(task)))
    sent: list[Update] = []
    for turn, task in enumerate(order):
        update = jobs.update(once, task, worker=task % 2, sequence=turn + 1)
        update = update._replace(tasks=()) if additions and modes == ("asp", "asp") else update
        sent.append(update)
        first = once.apply(update)
        assert often.apply(update) == first
        for which, by_another in repeats:
            if which > turn:
                continue
            again = sent[which]
            if by_another and again.tasks:
                again = again._replace(worker=9, sequence=which + 1)
            applied = often.apply(again)
            assert applied.repeated and applied.staleness == 0
            assert which + 1 <= applied.position <= turn + 1
    jobs.assert_same(once.state(), often.state())


def test_a_repeat_tells_where_it_was_applied() -> None:
    shard = Shard(jobs.job("asp", "asp"), 0)
    shard.apply(Update(4, 2, (0,), -1, 1.0, ()))
    shard.apply(Update(4, 3, (1,), -1, 1.0, ()))
    assert shard.apply(Update(4, 2, (0,), -1, 1.0, ())) == (1, 0, True)
    shard.apply(Update(4, 1, (2,), -1, 1.0, ()))
    assert shard.apply(Update(4, 2, (0,), -1, 1.0, ())) == (3, 0, True)


def test_half_a_repeat_is_refused() -> None:
    """A worker taken for dead pushes two tasks, one of which somebody else has done since."""
    shard = jobs.begun(jobs.job("asp", "asp", pieces=1))
    shard.apply(jobs.update(shard, 3, worker=2, sequence=1))
    late = jobs.update(shard, 3, worker=1, sequence=7)._replace(tasks=(3, 4))
    before = shard.state()
    with pytest.raises(ExchangeError, match=r"\[3\] were applied already.*must join anew"):
        shard.apply(late)
    jobs.assert_same(before, shard.state())
    shard.apply(jobs.update(shard, 4, worker=2, sequence=2))
    assert shard.apply(late).repeated


def test_workers_that_begin_anew_are_not_taken_for_others() -> None:
    shard = jobs.begun(jobs.job("asp", "asp", pieces=1))
    shard.apply(jobs.update(shard, 0, worker=1, sequence=1))
    shard.forget_workers()
    assert shard.apply(jobs.update(shard, 0, worker=1, sequence=1)).repeated
    assert not shard.apply(jobs.update(shard, 1, worker=1, sequence=1)).repeated


@given(numbers=st.permutations(range(1, 40)), gaps=st.sets(st.integers(1, 39), max_size=4))
def test_sequences_are_known_in_any_order(numbers: list[int], gaps: set[int]) -> None:
    sequences = Sequences()
    known: set[int] = set()
    for position, number in enumerate(number for number in numbers if number not in gaps):
        assert (sequences.position(3, number, 99) is not None) == (number in known)
        sequences.add(3, number, position)
        known.add(number)
        again = Sequences.of(sequences.state())
        assert again.state() == sequences.state()
        assert all((again.position(3, n, 99) is not None) == (n in known) for n in range(1, 40))
    assert sequences.position(4, 1, 99) is None


def test_gaps_are_forgotten_once_no_push_can_fill_them() -> None:
    sequences = Sequences()
    for number in range(2, OUTSTANDING + 1):
        sequences.add(1, number, number)
    assert sequences.position(1, 1, 0) is None
    sequences.add(1, OUTSTANDING + 1, 0)
    assert sequences.state() == {"floors": [(1, OUTSTANDING + 1)], "above": []}
