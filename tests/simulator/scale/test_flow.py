"""Micro-batches through a pipeline: what is extended by a period equals what is walked as a whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedule import Kind, Op
from paceline.schedule.formulas import ideal_bubble
from paceline.schedule.memory import peaks
from paceline.simulator.scale.flow import Pipeline, flow

DRAINING = [kind for kind in Kind if not kind.is_asynchronous]
SECONDS = st.sampled_from([0.5, 1.0, 1.0, 1.0, 1.01, 1.5, 2.0, 3.0])


def pipeline(kind: Kind, ranks: int, seconds: list[float], chunks: int = 1, latency: float = 0.0) -> Pipeline:
    """Each stage takes another time; a backward pass 1.5 to 2.5 times its forward pass."""
    stages = ranks * {Kind.INTERLEAVED: chunks, Kind.ZB_V: 2}.get(kind, 1)
    durations: dict[tuple[Op, int], float] = {}
    for stage in range(stages):
        forward = seconds[stage % len(seconds)]
        back = forward * (1.5 + stage % 3 / 2)
        durations |= {(Op.FORWARD, stage): forward, (Op.BACKWARD, stage): back}
        durations |= {(Op.BACKWARD_INPUT, stage): 0.6 * back, (Op.BACKWARD_WEIGHT, stage): 0.4 * back}
        durations[Op.SEND, stage] = 0.05 * (stage % 2)
    return Pipeline(kind, ranks, chunks if kind is Kind.INTERLEAVED else 1, durations, latency)


def even(kind: Kind, ranks: int, chunks: int = 1) -> Pipeline:
    return Pipeline(kind, ranks, chunks, {})


@pytest.mark.parametrize("kind", DRAINING, ids=lambda kind: kind.value)
@settings(max_examples=30)
@given(
    ranks=st.integers(1, 5),
    seconds=st.lists(SECONDS, min_size=1, max_size=10),
    chunks=st.integers(2, 3),
    latency=st.sampled_from([0.0, 0.1, 0.7]),
    micro_batches=st.integers(1, 150),
)
def test_extending_equals_walking_all(
    kind: Kind, ranks: int, seconds: list[float], chunks: int, latency: float, micro_batches: int
) -> None:
    through = pipeline(kind, ranks, seconds, chunks, latency)
    found, whole = flow(through, micro_batches), through.walk(micro_batches)
    assert found.micro_batches == micro_batches
    for rank, (actions, spans) in enumerate(zip(whole.schedule.actions, whole.times, strict=True)):
        computed = [pair for pair in zip(actions, spans, strict=True) if pair[0].op.is_compute]
        assert found.ended[rank] == pytest.approx(computed[-1][1][1], rel=1e-9)
        last = {action.stage: span for action, span in computed if action.op.makes_gradients}
        for stage, (start, end) in last.items():
            assert found.last_began[stage] == pytest.approx(start, rel=1e-9)
            assert found.last_ended[stage] == pytest.approx(end, rel=1e-9)


@pytest.mark.parametrize("kind", DRAINING, ids=lambda kind: kind.value)
def test_what_is_walked_does_not_grow_with_micro_batches(kind: Kind) -> None:
    chunks = 2 if kind is Kind.INTERLEAVED else 1
    few, many = (flow(even(kind, 4, chunks), count) for count in (400, 400_000))
    assert many.actions == few.actions < 400 * 4 * chunks * 2
    assert many.ended.max() == pytest.approx(few.ended.max() + 399_600 * few.pace_s)


@pytest.mark.parametrize("kind", DRAINING, ids=lambda kind: kind.value)
@pytest.mark.parametrize("micro_batches", [8, 64, 1000])
def test_even_stages_have_the_bubble_of_theory(kind: Kind, micro_batches: int) -> None:
    ranks, chunks = 4, 2 if kind is Kind.INTERLEAVED else 1
    found = flow(even(kind, ranks, chunks), micro_batches)
    stages = found.walked.schedule.stages
    busy = micro_batches * 3 * stages
    bubble = 1 - busy / (ranks * found.ended.max())
    assert bubble == pytest.approx(ideal_bubble(kind, ranks, micro_batches, chunks=chunks))


@pytest.mark.parametrize("kind", DRAINING, ids=lambda kind: kind.value)
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 500])
def test_what_is_held_is_that_of_the_whole_schedule(kind: Kind, micro_batches: int) -> None:
    ranks, chunks = 4, 2 if kind is Kind.INTERLEAVED else 1
    found = flow(even(kind, ranks, chunks), micro_batches)
    held = found.peak([1.0] * found.walked.schedule.stages)
    assert tuple(held) == peaks(even(kind, ranks, chunks).schedule(micro_batches))[1]


def test_what_is_held_counts_each_stage_with_its_own_size() -> None:
    found = flow(even(Kind.ONE_F_ONE_B, 3), 100)
    assert np.array_equal(found.peak([10.0, 1.0, 5.0]), [30.0, 2.0, 5.0])


def test_a_pace_that_shows_late_is_waited_for() -> None:
    """The last stage is slower by a thousandth: for hundreds of micro-batches the first one just fills what waits."""
    durations = {(Op.FORWARD, stage): 1.0 for stage in range(4)} | {(Op.BACKWARD, stage): 2.0 for stage in range(4)}
    durations[Op.BACKWARD, 3] = 2.001
    through = Pipeline(Kind.ONE_F_ONE_B, 4, 1, durations)
    found, whole = flow(through, 5000), through.walk(5000)
    assert found.ended[0] == pytest.approx(whole.times[0][-1][1], rel=1e-9)
    assert found.pace_s == pytest.approx(3.001)
