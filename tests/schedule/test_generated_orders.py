"""The lists of small schedules against the figures of their papers, and what `make` refuses."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import ScheduleError
from paceline.schedule import Kind, Op, Schedule, make
from paceline.schedule.places import consecutive, depths


def told(schedule: Schedule, rank: int) -> str:
    """`F0 F1 B0` for one stage on the rank, `F0.0 F4.0` with stages for several."""
    several = len(schedule.stages_of(rank)) > 1
    return " ".join(
        f"{a.op.value}{f'{a.stage}.' if several else ''}{a.micro_batch}"
        for a in schedule.actions[rank]
        if a.op.is_compute
    )


def test_gpipe_holds_all_micro_batches() -> None:
    assert told(make("gpipe", 2, 3), 0) == "F0 F1 F2 B2 B1 B0"


def test_1f1b_alternates_after_its_warm_up() -> None:
    schedule = make("1f1b", 3, 4)
    assert told(schedule, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert told(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_interleaved_is_megatrons_order() -> None:
    schedule = make("interleaved", 2, 4, chunks=2)
    assert schedule.replicas == ((0,), (1,), (0,), (1,))
    assert told(schedule, 0) == "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    assert told(schedule, 1) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"


def test_interleaved_leaves_out_what_a_last_group_lacks() -> None:
    full, short = make("interleaved", 2, 4, chunks=2), make("interleaved", 2, 3, chunks=2)
    assert told(short, 0).split() == [word for word in told(full, 0).split() if not word.endswith(".3")]


def test_zb_h1_delays_weight_gradients_by_the_rank() -> None:
    schedule = make("zb-h1", 3, 4)
    assert told(schedule, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert told(schedule, 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


def test_zb_v_goes_down_and_up_again() -> None:
    schedule = make("zb-v", 3, 6)
    assert schedule.replicas == ((0,), (1,), (2,), (2,), (1,), (0,))
    assert told(schedule, 2).startswith("F2.0 F3.0 F2.1 F3.1 F2.2 F3.2 I3.0 W3.0 F2.3 I2.0 W2.0")


def test_pipedream_reads_the_newest_version_and_updates_after_each_micro_batch() -> None:
    schedule = make("pipedream", 4, 8)
    for stage, actions in enumerate(schedule.actions):
        read = {a.micro_batch: a.version for a in actions if a.op is Op.FORWARD}
        assert read == {i: max(0, i - (4 - stage) + 1) for i in range(8)}
        assert [a.version for a in actions if a.op is Op.UPDATE] == list(range(1, 9))


def test_vertical_sync_reads_one_version_on_all_stages() -> None:
    schedule = make("pipedream", 4, 8, vertical_sync=True)
    for actions in schedule.actions:
        assert {a.micro_batch: a.version for a in actions if a.op is Op.BACKWARD} == {
            i: max(0, i - 3) for i in range(8)
        }


def test_2bw_is_one_batch_late() -> None:
    schedule = make("pipedream-2bw", 3, 4, batches=3)
    for actions in schedule.actions:
        assert {(a.micro_batch // 4, a.version) for a in actions if a.op.is_compute} == {(0, 0), (1, 0), (2, 1)}
        assert [a.version for a in actions if a.op is Op.UPDATE] == [1, 2, 3]


def test_several_batches_of_pipedream_are_one_long_one() -> None:
    assert make("pipedream", 3, 2, batches=3) == make("pipedream", 3, 6)


def test_noam_is_ranks_from_a_stage_on_over_its_own() -> None:
    assert depths(consecutive([1, 1, 1, 1])) == (4, 3, 2, 1)
    assert depths(consecutive([2, 1])) == (2, 1)
    assert depths(consecutive([1, 2, 1])) == (4, 2, 1)
    schedule = make("pipedream", 3, 4, replicas=((0, 1), (2,)))
    assert told(schedule, 0) == "F0 F2 B0 B2" and told(schedule, 1) == "F1 F3 B1 B3"
    assert told(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1d", 2, 4, {}), "no schedule '1f1d'; there are naive, .*Did you mean '1f1b'"),
        (("gpipe", 0, 4, {}), "ranks is 0; it must be at least 1"),
        (("gpipe", 2, 0, {}), "micro_batches is 0"),
        (("interleaved", 2, 4, {}), "at least 2 chunks per rank; give chunks=2"),
        (("zb-v", 2, 4, {"chunks": 3}), "zb-v has 2 chunks per rank, not 3"),
        (("1f1b", 2, 4, {"chunks": 2}), "1f1b has one stage per rank; 2 chunks are for interleaved"),
        (("1f1b", 2, 4, {"batches": 2}), "1f1b drains after each batch"),
        (("pipedream-2bw", 4, 3, {}), "at least 4, not 3. Take more micro-batches, fewer stages, or 1f1b"),
        (("gpipe", 2, 4, {"replicas": ((0,), (1,))}), "replicas are for 1f1b and pipedream"),
        (("1f1b", 2, 4, {"vertical_sync": True}), "vertical_sync is for pipedream"),
        (("1f1b", 3, 4, {"replicas": ((0,), (1,))}), "must name each of the 3 ranks once"),
        (("1f1b", 2, 4, {"replicas": ((0, 1), ())}), "at least one for every stage"),
        (("1f1b", 2, 4, {"replicas": ((0, 1), (1,))}), "must name each of the 2 ranks once"),
        (("1f1b", 4, 2, {"replicas": ((0, 1, 2), (3,))}), "give at least 3, not 2"),
        (("pipedream", 5, 8, {"replicas": ((0, 1, 2), (3, 4))}), "a multiple of 6 micro-batches here: 6 or 12, not 8"),
        (
            ("pipedream", 3, 4, {"replicas": ((0, 1), (2,)), "vertical_sync": True}),
            "as many ranks each, not \\[1, 2\\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(arguments: tuple[str, int, int, Any], message: str) -> None:
    *shape, options = arguments
    with pytest.raises(ScheduleError, match=message):
        make(*shape, **options)


def test_every_kind_has_a_line_of_its_own() -> None:
    lines = [kind.summary for kind in Kind]
    assert len(set(lines)) == len(Kind) and all(len(line) <= 100 for line in lines)
