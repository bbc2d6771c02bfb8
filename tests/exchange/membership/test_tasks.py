"""Every task is done, none by two workers at once, none is dealt that would have to wait long."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.exchange.interface import Deal, Order
from paceline.exchange.job import Consistency, DenseTable, Job
from paceline.exchange.membership.state import State
from paceline.exchange.membership.tasks import Item, Tasks
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address


def job(consistency: str, pieces: int = 1) -> Job:
    return Job((DenseTable("w", (1,), consistency=Consistency.parse(consistency)),), pieces=pieces)


def drawn(tasks: Tasks, worker: int) -> Deal:
    deal = tasks.choose(worker)
    if deal.order in (Order.TASK, Order.EVALUATE):
        tasks.deal(worker, deal)
    return deal


def item(deal: Deal) -> Item:
    return deal.order, deal.number


def test_one_worker_does_all_in_order_and_evaluates_between() -> None:
    tasks = Tasks(job("bsp", 2), Terms(8, evaluate_every=2))
    seen = []
    while (deal := drawn(tasks, 1)).order is not Order.END:
        seen.append((deal.order.value, deal.number))
        tasks.done([item(deal)])
    work = [("task", k) for k in range(8)]
    assert seen == [*work[:4], ("evaluate", 2), *work[4:], ("evaluate", 4)]
    assert tasks.finished


def test_under_bsp_an_evaluation_sees_exactly_its_clock() -> None:
    tasks = Tasks(job("bsp"), Terms(4, evaluate_every=2))
    for _ in range(2):
        tasks.done([item(drawn(tasks, 1))])
    assert drawn(tasks, 1) == Deal(Order.EVALUATE, 2)
    assert drawn(tasks, 2).order is Order.WAIT
    tasks.done([(Order.EVALUATE, 2)])
    assert drawn(tasks, 2) == Deal(Order.TASK, 2)


def test_without_bsp_tasks_go_on_beside_an_evaluation() -> None:
    tasks = Tasks(job("asp"), Terms(4, evaluate_every=1))
    tasks.done([item(drawn(tasks, 1))])
    assert drawn(tasks, 1) == Deal(Order.EVALUATE, 1)
    assert drawn(tasks, 2) == Deal(Order.TASK, 1)


@pytest.mark.parametrize(("consistency", "beyond"), [("bsp", 1), ("ssp(0)", 1), ("ssp(3)", 4), ("asp", None)])
def test_nobody_runs_too_far_ahead(consistency: str, beyond: int | None) -> None:
    tasks = Tasks(job(consistency, 2), Terms(40))
    dealt = [drawn(tasks, worker) for worker in range(30)]
    clocks = [deal.number // 2 for deal in dealt if deal.order is Order.TASK]
    assert clocks == [k // 2 for k in range(30 if beyond is None else 2 * (beyond + 1))]


def test_a_worker_is_not_given_more_than_it_may_hold() -> None:
    tasks = Tasks(job("asp"), Terms(9, ahead=3))
    assert [drawn(tasks, 1).order for _ in range(4)] == [Order.TASK] * 3 + [Order.WAIT]


def test_tasks_of_who_is_gone_come_first_even_to_who_holds_enough() -> None:
    tasks = Tasks(job("bsp", 2), Terms(8))
    first, second = drawn(tasks, 1), drawn(tasks, 2)
    assert not tasks.orphans
    tasks.drop(1)
    assert tasks.orphans
    assert drawn(tasks, 2) == Deal(Order.TASK, first.number, alone=True)
    assert not tasks.orphans
    assert tasks.held(2) == [item(first), item(second)]


def test_a_task_that_was_done_after_all_is_not_dealt_again() -> None:
    tasks = Tasks(job("asp"), Terms(2))
    late = drawn(tasks, 1)
    tasks.drop(1)
    assert tasks.done([item(late)])
    assert not tasks.orphans
    assert drawn(tasks, 2) == Deal(Order.TASK, 1)
    assert not tasks.done([item(late)])


def test_who_comes_back_keeps_what_it_holds_and_gives_up_what_it_never_heard_of() -> None:
    tasks = Tasks(job("asp"), Terms(9, ahead=3))
    heard, unheard = drawn(tasks, 1), drawn(tasks, 1)
    tasks.agree(1, [item(heard), (Order.TASK, 5)])
    assert tasks.held(1) == [item(heard), (Order.TASK, 5)]
    assert drawn(tasks, 2) == Deal(Order.TASK, unheard.number, alone=True)
    later = [drawn(tasks, worker).number for worker in (2, 2, 3, 3)]
    assert later == [2, 3, 4, 6]


def test_an_evaluation_of_who_is_gone_is_done_by_another() -> None:
    tasks = Tasks(job("asp"), Terms(1))
    tasks.done([item(drawn(tasks, 1))])
    assert drawn(tasks, 1) == Deal(Order.EVALUATE, 1)
    assert drawn(tasks, 2).order is Order.WAIT
    tasks.drop(1)
    assert drawn(tasks, 2) == Deal(Order.EVALUATE, 1)
    assert not tasks.finished
    tasks.done([(Order.EVALUATE, 1)])
    assert drawn(tasks, 1).order is Order.END


def test_a_job_goes_on_where_its_snapshot_was() -> None:
    tasks = Tasks(job("bsp", 2), Terms(12, first_task=4, evaluate_every=2))
    assert drawn(tasks, 1) == Deal(Order.TASK, 4)
    assert tasks.clock == 2
    assert Tasks(job("bsp", 2), Terms(4, first_task=4)).choose(1) == Deal(Order.EVALUATE, 2)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask", "done", "done", "die", "back", "restart"]), st.integers(0, 3)),
    max_size=200,
)


@settings(max_examples=150)
@given(st.sampled_from(["bsp", "ssp(1)", "asp"]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), ACTIONS)
def test_each_task_is_done_once_whoever_dies(
    consistency: str, pieces: int, ahead: int, every: int, actions: list[tuple[str, int]]
) -> None:
    terms = Terms(4 * pieces, ahead=ahead, evaluate_every=every)
    tasks = Tasks(job(consistency, pieces), terms)
    held: dict[int, list[Item]] = {worker: [] for worker in range(4)}
    dealt_once: set[Item] = set()
    finished: Counter[Item] = Counter()
    for action, worker in [*actions, ("die", 1), ("die", 2), ("die", 3), *[("ask", 0), ("done", 0)] * 40]:
        if action == "ask":
            deal = drawn(tasks, worker)
            assert deal.order is not Order.END or len(finished) == terms.tasks + len(_clocks(every))
            if deal.order in (Order.TASK, Order.EVALUATE):
                assert item(deal) not in [one for items in held.values() for one in items]
                assert item(deal) not in finished
                assert deal.alone == (deal.order is Order.TASK and item(deal) in dealt_once)
                dealt_once.add(item(deal))
                held[worker].append(item(deal))
                if deal.order is Order.EVALUATE:
                    assert all(finished[Order.TASK, k] for k in range(deal.number * pieces))
        elif action == "done" and held[worker]:
            one = held[worker].pop(0)
            finished[one] += 1
            assert tasks.done([one])
        elif action == "die":
            tasks.drop(worker)
            held[worker] = []
        elif action == "back" and held[worker]:
            tasks.put_back(worker, [held[worker].pop()])
        elif action == "restart":
            written = json.loads(json.dumps(tasks.to_dict()))
            tasks = Tasks(job(consistency, pieces), terms)
            tasks.restore(written)
        assert {worker: sorted(items, key=str) for worker, items in held.items()} == {
            worker: sorted(tasks.held(worker), key=str) for worker in held
        }
        if not any(held.values()) and not tasks.finished:
            assert tasks.choose(worker).order in (Order.TASK, Order.EVALUATE)  # nobody waits for nothing
    assert finished == Counter(
        [(Order.TASK, k) for k in range(terms.tasks)] + [(Order.EVALUATE, c) for c in _clocks(every)]
    )
    assert tasks.choose(0).order is Order.END


def _clocks(every: int) -> set[int]:
    return {*(range(every, 4, every) if every else ()), 4}


@pytest.mark.parametrize("others", ["bsp", "ssp(3)", "asp"])
def test_where_a_table_is_bsp_tasks_wait_for_a_snapshot_that_is_due(others: str) -> None:
    terms = Terms(8, snapshot_every=2)
    both = replace(job("bsp", 2), tables=(*job("bsp").tables, *job(others).tables))
    state = State(Charter(both, terms, Address()))
    for number in range(4):
        assert drawn(state.tasks, 1) == Deal(Order.TASK, number)
        state.tasks.done([(Order.TASK, number)])
    assert state.tasks.clock == 2 and drawn(state.tasks, 1).order is Order.WAIT
    again = State(Charter(both, terms, Address()))
    again.apply(json.loads(json.dumps(state.to_record())))
    for one, ends in ((state, "complete"), (again, "dropped")):  # training does not stop for want of room on a disk
        assert drawn(one.tasks, 1).order is Order.WAIT
        one.apply({"is": "snapshot", "number": 1, "clock": 2, "epoch": 1})
        one.apply({"is": ends, "keep": 2} if ends == "complete" else {"is": ends})
        assert drawn(one.tasks, 1) == Deal(Order.TASK, 4) and one.tasks.barrier == 4


def test_where_no_table_is_bsp_nobody_waits_for_a_snapshot() -> None:
    state = State(Charter(job("ssp(1)"), Terms(8, snapshot_every=1), Address()))
    state.tasks.done([(Order.TASK, 0), (Order.TASK, 1)])
    assert drawn(state.tasks, 1) == Deal(Order.TASK, 2)
