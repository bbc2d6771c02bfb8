"""The validator against damaged schedules: each is refused, and where it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ScheduleError
from paceline.schedule import Action, Edges, Op, Payload, Schedule, communicate, make, validate
from tests.schedule.cases import prove, schedules
from tests.schedule.walker import Wrong, walk

Change = Callable[[list[Action]], None]


def changed(schedule: Schedule, rank: int, change: Change) -> Schedule:
    lists = [list(actions) for actions in schedule.actions]
    change(lists[rank])
    return replace(schedule, actions=tuple(map(tuple, lists)))


def ready(name: str = "1f1b", ranks: int = 2, micro_batches: int = 3, **options: int) -> Schedule:
    plain = make(name, ranks, micro_batches, **options)
    return communicate(plain, Edges.chain(plain.stages))


def position(schedule: Schedule, rank: int, op: Op, micro_batch: int = 0) -> int:
    return next(n for n, a in enumerate(schedule.actions[rank]) if (a.op, a.micro_batch) == (op, micro_batch))


def refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        prove(schedule)


# Every kind.


@settings(max_examples=100)
@given(schedules(), st.data())
def test_leaving_out_any_action_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    gone = data.draw(st.integers(0, len(schedule.actions[rank]) - 1))
    refused(changed(schedule, rank, lambda actions: actions.__delitem__(gone)), f"rank {rank}")


@given(schedules(), st.data())
def test_doing_anything_twice_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    places = st.integers(0, len(schedule.actions[rank]) - 1)
    again = schedule.actions[rank][data.draw(places)]
    where = data.draw(places)
    refused(changed(schedule, rank, lambda actions: actions.insert(where, again)), f"rank {rank}, action")


@settings(max_examples=150)
@given(schedules(), st.data())
def test_two_actions_change_places_just_where_a_walk_allows_it(schedule: Schedule, data: st.DataObject) -> None:
    edges = Edges.chain(schedule.stages)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    length = len(schedule.actions[rank])
    first = data.draw(st.integers(0, length - 1))
    second = min(length - 1, first + data.draw(st.integers(1, 6)))

    def swap(actions: list[Action]) -> None:
        actions[first], actions[second] = actions[second], actions[first]

    other = changed(schedule, rank, swap)
    try:
        walk(other, edges, data.draw(st.integers(0, 9)))
    except Wrong:
        refused(other, "rank")
    else:
        validate(other, edges)


# One at a time.


def test_a_dropped_receive_is_missed() -> None:
    schedule = ready()
    gone = position(schedule, 1, Op.RECEIVE, 2)
    refused(
        changed(schedule, 1, lambda actions: actions.__delitem__(gone)),
        r"rank 1 lacks the action RECV stage 1 micro-batch 2 act from 0",
    )


def test_a_receive_after_its_reader_is_too_late() -> None:
    schedule = ready()
    late = position(schedule, 1, Op.RECEIVE, 0)
    refused(
        changed(schedule, 1, lambda actions: actions.insert(late + 1, actions.pop(late))),
        r"rank 1, action 0 \(F stage 1 micro-batch 0\): it reads act of stage 0, which has not been received yet",
    )


def test_a_send_before_its_maker_is_too_early() -> None:
    schedule = ready()
    early = position(schedule, 0, Op.SEND)
    refused(
        changed(schedule, 0, lambda actions: actions.insert(0, actions.pop(early))),
        r"rank 0, action 0 \(SEND stage 0 micro-batch 0 act to 1\): what it sends has not been made yet",
    )


def test_two_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    schedule = ready("gpipe")
    sent, awaited = position(schedule, 0, Op.SEND), position(schedule, 0, Op.RECEIVE, 2)
    refused(
        changed(schedule, 0, lambda actions: actions.insert(sent, actions.pop(awaited))),
        r"deadlock: rank 0 waits at action 1 \(RECV stage 0 micro-batch 2 grad from 1\) for rank 1; "
        r"rank 1 waits at action 0 \(RECV stage 1 micro-batch 0 act from 0\) for rank 0",
    )


def test_messages_out_of_order_are_refused() -> None:
    schedule = ready("gpipe")
    first, second = position(schedule, 1, Op.RECEIVE, 0), position(schedule, 1, Op.RECEIVE, 1)
    refused(
        changed(schedule, 1, lambda actions: actions.insert(first, actions.pop(second))),
        r"rank 1, action 0 \(RECV stage 1 micro-batch 1 act from 0\): messages arrive in the order .* rank 0 sends "
        r"first: SEND stage 0 micro-batch 0 act to 1",
    )


def version(op: Op, micro_batch: int, made: int) -> Change:
    def change(actions: list[Action]) -> None:
        at = next(n for n, a in enumerate(actions) if (a.op, a.micro_batch) == (op, micro_batch))
        actions[at] = replace(actions[at], version=made)

    return change


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (1, version(Op.FORWARD, 2, 3), r"rank 1, action 13 .*reads version 3 of its stage, whose newest is 2"),
        (0, version(Op.BACKWARD, 3, 1), r"rank 0, .*reads version 1, but its F read version 2"),
        (0, version(Op.UPDATE, 0, 2), r"UPDATE stage 0 version 2\): the next version of its stage is 1"),
        (
            0,
            version(Op.SEND, 0, 1),
            r"its version is 1; it is 0 or more, and 0 for what neither reads nor makes weights",
        ),
        (0, version(Op.FORWARD, 0, -1), r"its version is -1"),
    ],
)
def test_a_wrong_version_is_refused(rank: int, change: Change, message: str) -> None:
    refused(changed(ready("pipedream", 2, 5), rank, change), message)


def test_swapped_versions_are_refused() -> None:
    schedule = ready("pipedream", 2, 5)

    def swap(actions: list[Action]) -> None:
        version(Op.FORWARD, 2, 2)(actions)
        version(Op.FORWARD, 3, 1)(actions)

    refused(changed(schedule, 0, swap), r"reads version 2 of its stage, whose newest is 1")


def shape(schedule: Schedule, **fields: object) -> Change:
    def change(actions: list[Action]) -> None:
        actions[0] = replace(actions[0], **fields)  # type: ignore[arg-type]

    return change


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": 2}, "there are 2 stages, from 0"),
        ({"stage": 1}, r"rank 0, action 0 \(F stage 1 micro-batch 0\): it belongs to rank 1"),
        ({"micro_batch": 3}, "there are 3 micro-batches, from 0"),
        ({"peer": 1}, "only SEND and RECV have a payload and a peer"),
        ({"op": Op.SEND}, "a message needs its payload and its peer"),
        ({"op": Op.SEND, "payload": Payload.ACTIVATION, "peer": 0}, r"there is no forward edge \(0, 0\)"),
        ({"op": Op.SEND, "payload": Payload.GRADIENT, "peer": 1}, r"there is no backward edge \(0, 1\)"),
        ({"op": Op.REDUCE, "micro_batch": 1}, "it is of a stage, not of a micro-batch"),
    ],
)
def test_an_action_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    refused(changed(ready(), 0, shape(ready(), **fields)), message)


def test_parts_and_the_whole_of_a_backward_pass_exclude_each_other() -> None:
    schedule = ready("zb-h1")
    whole = Action(Op.BACKWARD, 0, 0)
    refused(
        changed(schedule, 0, lambda actions: actions.insert(9, whole)), "it is a part of the B stage 0 micro-batch 0"
    )


def test_a_backward_pass_may_be_whole_for_some_micro_batches() -> None:
    schedule = ready("zb-h1", 1, 2)

    def merge(actions: list[Action]) -> None:
        actions[1:3] = [Action(Op.BACKWARD, 0, 0)]

    assert prove(changed(schedule, 0, merge)).makespan == 6


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("F B UPDATE", "REDUCE of its stage must come first"),
        ("F REDUCE B UPDATE", "there is no gradient since the last UPDATE"),
        ("F B REDUCE REDUCE UPDATE", "its stage is reduced already"),
        ("F B REDUCE", "no UPDATE of stage 0 comes after it, so its gradient is lost"),
        ("B F REDUCE UPDATE", "F of its micro-batch has not been done yet"),
        ("F W I REDUCE UPDATE", "I of its micro-batch has not been done yet"),
        ("F I REDUCE UPDATE", "rank 0 lacks the action W stage 0 micro-batch 0"),
        ("F REDUCE UPDATE", "there is no gradient since the last UPDATE"),
        ("B REDUCE UPDATE", "rank 0 lacks the action F stage 0"),
    ],
)
def test_one_rank_is_held_to_its_order(ops: str, message: str) -> None:
    actions = tuple(Action(Op(word), 0, version=int(word == "UPDATE")) for word in ops.split())
    refused(Schedule("own", 1, ((0,),), (actions,)), message)


def test_a_gradient_between_reduce_and_update_is_refused() -> None:
    schedule = ready("1f1b", 1, 2)
    early = position(schedule, 0, Op.REDUCE)
    refused(
        changed(schedule, 0, lambda actions: actions.insert(2, actions.pop(early))),
        "it comes between REDUCE and UPDATE of its stage",
    )


def test_replicas_that_reduce_different_times_are_a_deadlock() -> None:
    plain = make("1f1b", 2, 4, replicas=((0, 1),))
    extra = [Action(Op.REDUCE, 0), Action(Op.UPDATE, 0, version=1)]

    def more(actions: list[Action]) -> None:
        actions[2:2] = extra
        actions[-1] = replace(actions[-1], version=2)

    with pytest.raises(ScheduleError, match=r"rank 0 waits at action 6 \(REDUCE stage 0\) for the other ranks"):
        prove(changed(plain, 0, more))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"micro_batches": 0}, "at least one micro-batch"),
        ({"replicas": ()}, "every rank from 0 on needs a stage and a list"),
        ({"replicas": ((0,), (2,))}, "the stages lie on the ranks \\[0, 2\\]"),
        ({"replicas": ((0, 0), (1,))}, "stage 0 lies on the ranks \\[0, 0\\]"),
        ({"replicas": ((), (0, 1))}, "stage 0 lies on the ranks \\[\\]"),
    ],
)
def test_stages_and_ranks_must_fit(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        replace(ready(), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ({(1, 0)}, set(), r"forward edge leads to a later stage; \(1, 0\) does not"),
        ({(-1, 0)}, set(), r"\(-1, 0\) does not"),
        (set(), {(0, 1)}, r"backward edge leads to an earlier stage; \(0, 1\) does not"),
        ({(0, 2)}, set(), r"the edge \(0, 2\) is of no stage: there are 2"),
    ],
)
def test_edges_lead_where_they_must(
    forward: set[tuple[int, int]], backward: set[tuple[int, int]], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(ready(), Edges(frozenset(forward), frozenset(backward)))


def test_an_edge_without_messages_is_missed() -> None:
    with pytest.raises(ScheduleError, match="rank 0 lacks the action SEND stage 0 micro-batch 0 act to 1"):
        validate(make("1f1b", 2, 3), Edges.chain(2))


# Time.


def test_durations_and_latency_are_counted() -> None:
    schedule, edges = ready("gpipe", 2, 1), Edges.chain(2)
    slow = {(Op.FORWARD, 1): 5.0, (Op.BACKWARD, 1): 7.0, (Op.UPDATE, 0): 0.5}
    account = validate(schedule, edges, slow, latency=0.25)
    assert account.makespan == 1 + 0.25 + 5 + 7 + 0.25 + 2 + 0.5
    assert account.busy == (3, 12) and account.messages == 2
    ops = [action.op for action in schedule.actions[0]]
    assert account.times[0][ops.index(Op.BACKWARD)] == (13.5, 15.5)


def test_an_account_of_no_time_has_no_bubble() -> None:
    nothing = {(op, stage): 0.0 for op in Op for stage in range(2)}
    account = validate(ready(), Edges.chain(2), nothing)
    assert (account.makespan, account.bubble, account.stall) == (0, 0, 0)
