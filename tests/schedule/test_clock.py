"""Schedules in virtual time with messages that take time and ranks that are slow."""

from paceline.schedule import Action, Edges, Op, Payload, Schedule, clock, communicate, make

EDGES = Edges.chain(2)
ACTIVATION = (Payload.ACTIVATION, 0, 1)


def forward_only(micro_batches: int) -> Schedule:
    actions = tuple(tuple(Action(Op.FORWARD, stage, m) for m in range(micro_batches)) for stage in range(2))
    return communicate(Schedule("forward", micro_batches, ((0,), (1,)), actions), EDGES)


def begins(schedule: Schedule, rank: int, op: Op, spans: tuple[tuple[clock.Span, ...], ...]) -> list[float]:
    return [span[0] for action, span in zip(schedule.actions[rank], spans[rank], strict=True) if action.op is op]


def test_messages_between_two_ranks_go_one_after_the_other() -> None:
    schedule = forward_only(3)
    spans = clock.run(schedule, messages={ACTIVATION: 2.0})
    assert begins(schedule, 0, Op.FORWARD, spans) == [0.0, 1.0, 2.0]  # a send does not block
    assert begins(schedule, 1, Op.FORWARD, spans) == [3.0, 5.0, 7.0]  # the link is busy for two each


def test_latency_is_beside_what_a_link_takes() -> None:
    schedule = forward_only(3)
    spans = clock.run(schedule, latency=2.0)
    assert begins(schedule, 1, Op.FORWARD, spans) == [3.0, 4.0, 5.0]  # however many are on the way
    spans = clock.run(schedule, latency=2.0, messages={ACTIVATION: 0.5})
    assert begins(schedule, 1, Op.FORWARD, spans) == [3.5, 4.5, 5.5]


def test_a_slow_rank_holds_back_the_others() -> None:
    schedule = communicate(make("1f1b", 2, 4), EDGES)
    even, slow = clock.run(schedule), clock.run(schedule, slowness={1: 2.0})
    ends = [max(end for spans in found for _, end in spans) for found in (even, slow)]
    assert ends == [15.0, 27.0]  # a forward and a backward pass of stage 0 around four of both on stage 1
