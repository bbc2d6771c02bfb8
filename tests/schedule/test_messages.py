"""Messages along edges of any kind: each once, in an order that transports without tags can follow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ScheduleError
from paceline.schedule import Edges, Op, Payload, Schedule, communicate, make, validate
from tests.schedule.cases import Case, cases
from tests.schedule.walker import walk


def messages(schedule: Schedule, rank: int) -> list[str]:
    return [str(action) for action in schedule.actions[rank] if action.op.is_message]


@st.composite
def skipping(draw: st.DrawFn, stages: int) -> Edges:
    """The chain and any skips, with gradients back along some of them."""
    pairs = [(s, t) for t in range(stages) for s in range(t - 1)]
    skips = draw(st.sets(st.sampled_from(pairs), max_size=5)) if pairs else set()
    back = draw(st.sets(st.sampled_from(sorted(skips)), max_size=5)) if skips else set()
    plain = Edges.chain(stages)
    return Edges(plain.forward | skips, plain.backward | {(t, s) for s, t in back})


@settings(max_examples=100)
@given(cases(), st.data())
def test_edges_that_skip_stages_are_served_in_order(case: Case, data: st.DataObject) -> None:
    plain = make(case.kind.value, case.ranks, case.micro_batches, chunks=case.chunks, batches=case.batches)
    edges = data.draw(skipping(plain.stages))
    complete = communicate(plain, edges)
    validate(complete, edges)
    walk(complete, edges, data.draw(st.integers(0, 9)))
    assert [[a for a in actions if not a.op.is_message] for actions in complete.actions] == list(
        map(list, plain.actions)
    )


def test_a_send_follows_its_maker_and_a_receive_precedes_its_reader() -> None:
    schedule = communicate(make("1f1b", 2, 2), Edges.chain(2))
    assert [f"{a.op.value}{a.micro_batch}" for a in schedule.actions[0]] == (
        ["F0", "SEND0", "F1", "SEND1", "RECV0", "B0", "RECV1", "B1", "REDUCE0", "UPDATE0"]
    )
    assert [f"{a.op.value}{a.micro_batch}" for a in schedule.actions[1]] == (
        ["RECV0", "F0", "B0", "SEND0", "RECV1", "F1", "B1", "SEND1", "REDUCE0", "UPDATE0"]
    )


def test_what_was_sent_before_is_received_before() -> None:
    edges = Edges(Edges.chain(4).forward | {(0, 3)}, Edges.chain(4).backward)
    schedule = communicate(make("interleaved", 2, 2, chunks=2), edges)
    received = [a for a in schedule.actions[1] if a.op is Op.RECEIVE and a.payload is Payload.ACTIVATION]
    assert [(a.peer, a.stage, a.micro_batch) for a in received] == [
        (0, 1, 0),
        (0, 3, 0),  # read much later, but sent before the next one
        (0, 1, 1),
        (0, 3, 1),
        (2, 3, 0),
        (2, 3, 1),
    ]


def test_stages_of_one_rank_need_no_messages() -> None:
    schedule = communicate(make("zb-v", 2, 3), Edges.chain(4))
    assert not any("stage 1 micro-batch 0 act to 2" in line for line in messages(schedule, 1))
    assert communicate(make("zb-v", 1, 3), Edges.chain(2)) == make("zb-v", 1, 3)


def test_replicas_are_sent_their_own_micro_batches() -> None:
    schedule = communicate(make("1f1b", 3, 4, replicas=((0, 1), (2,))), Edges.chain(2))
    assert [line for line in messages(schedule, 0) if line.startswith("SEND")] == [
        "SEND stage 0 micro-batch 0 act to 1",
        "SEND stage 0 micro-batch 2 act to 1",
    ]


def test_messages_are_added_once() -> None:
    schedule = communicate(make("1f1b", 2, 2), Edges.chain(2))
    with pytest.raises(ScheduleError, match="has messages already"):
        communicate(schedule, Edges.chain(2))
