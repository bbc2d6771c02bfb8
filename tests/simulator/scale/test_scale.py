"""Steps on many devices by representatives: what they cost to simulate, and what they agree with."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster, Group
from paceline.cluster.files import load
from paceline.cluster.rates import Rates
from paceline.errors import PlanError
from paceline.schedule import Edges, communicate, make
from paceline.simulator.closed_form.estimate import correction, estimate
from paceline.simulator.closed_form.footprint import footprints_of_ends
from paceline.simulator.closed_form.transformer import transformer
from paceline.simulator.layouts import SCHEDULES, Layouts
from paceline.simulator.scale.classes import classes, expected_maximum, slowest_factor
from paceline.simulator.scale.flow import Pipeline, flow
from paceline.simulator.scale.layout import ScaleSimulation, kind_of, simulate_layout
from paceline.simulator.scale.trace import events
from paceline.trace import from_chrome, to_chrome

EVEN = transformer(layers=32, hidden=8192, heads=64, sequence=2048, vocabulary=1024)
"""Its embedding and head weigh nothing beside its layers."""
GPT = transformer(layers=30, hidden=4096, heads=32, sequence=2048, vocabulary=51200, dropout=True)
FITTED = load("dgx-h100")
MACHINE = dataclasses.replace(
    FITTED,
    groups=tuple(
        dataclasses.replace(group, device=dataclasses.replace(group.device, rates=Rates())) for group in FITTED.groups
    ),
)
"""Without coefficients that are fitted anew now and then."""


def layout(**given: object) -> Layouts:
    return Layouts.of(**{"tp": 8, "pp": 8, "dp": 4, "micro_batches": 32} | given)


def chunked(schedule: int) -> int:
    return {"interleaved": 2, "zb-v": 2}.get(SCHEDULES[schedule], 1)


def parts(found: ScaleSimulation) -> float:
    return sum([found.compute_s, *found.exposed_s.values(), found.bubble_s, found.optimizer_s, found.constant_s])


# What it costs.


@pytest.mark.parametrize("schedule", range(len(SCHEDULES)), ids=SCHEDULES)
def test_what_is_simulated_grows_neither_with_replicas_nor_with_micro_batches(schedule: int) -> None:
    actions = {
        simulate_layout(
            GPT, layout(dp=dp, micro_batches=count, schedule=schedule, chunks=chunked(schedule)), MACHINE
        ).actions
        for dp in (2, 1560)
        for count in (512, 51_200)
    }
    (same,) = actions
    assert same < 20_000


def test_one_slow_device_among_100_000_is_one_more_class() -> None:
    device = MACHINE.groups[0].device
    groups = (Group(50_000, device), Group(1, device, slowdown=1.5), Group(49_999, device))
    found = simulate_layout(GPT, layout(dp=1562), dataclasses.replace(MACHINE, groups=groups))
    assert sorted(found.classes.values()) == [1, 1561]


# What it agrees with.


@pytest.mark.parametrize("schedule", range(len(SCHEDULES)), ids=SCHEDULES)
def test_even_stages_take_what_the_closed_form_says(schedule: int) -> None:
    """The closed form takes parts of a backward pass for as long as a forward pass: others leave gaps in ZB's orders.

    It does not know either that the ends of a pipeline send less, and that sums of a rank's first stages begin earlier.
    """
    which = layout(schedule=schedule, chunks=chunked(schedule))
    found, expected = simulate_layout(EVEN, which, MACHINE), estimate(EVEN, which, MACHINE.of(256))
    exposed = expected.exposed_s
    closed = float((expected.compute_s + exposed["tp"] + exposed["pp"] + expected.bubble_s)[0])
    ended = float(found.flow.ended.max())
    if kind_of(which).splits_backward:
        assert 0.97 * closed < ended < 1.1 * closed
    else:
        assert ended == pytest.approx(closed, rel=0.04)
        assert found.exposed_s["dp"] <= exposed["dp"][0] * (1 + 1e-3)
    assert found.compute_s == pytest.approx(expected.compute_s[0], rel=0.03)
    assert found.exposed_s["pp"] <= exposed["pp"][0] * (1 + 1e-9)


@pytest.mark.parametrize(
    "given",
    [
        {"pp": 1, "dp": 16, "micro_batches": 4},
        {"pp": 1, "dp": 16, "overlap": False},
        {"pp": 1, "dp": 1, "fsdp": 16, "zero": 2, "tp": 4},
        {"pp": 1, "dp": 16, "zero": 1, "recompute": 2, "regions": True},
        {"pp": 1, "dp": 2, "fsdp": 8, "zero": 3, "tp": 1, "micro_batches": 1, "micro_batch": 4},
    ],
    ids=str,
)
def test_without_stages_it_is_the_closed_form(given: dict[str, object]) -> None:
    which = layout(**given)
    found, expected = simulate_layout(GPT, which, MACHINE), estimate(GPT, which, MACHINE.of(int(which.devices[0])))
    zero_3 = given.get("zero") == 3  # gathers run beside each pass of its own, not beside the backward pass alone
    assert found.step_s == pytest.approx(expected.step_s[0], rel=0.15 if zero_3 else 1e-3)
    if not zero_3:
        for axis, seconds in expected.exposed_s.items():
            # the backward pass of the embedding runs beside sums here
            assert found.exposed_s[axis] == pytest.approx(seconds[0], rel=0.01)
        assert found.optimizer_s == pytest.approx(expected.optimizer_s[0])
    assert found.bubble_s == pytest.approx(0, abs=1e-9)


def test_what_fitted_rows_leave_over_corrects_both_alike() -> None:
    which = layout(pp=1, dp=16, recompute=1)
    assert correction(GPT, which, FITTED.of(128))[0][0] != 1
    found, expected = simulate_layout(GPT, which, FITTED), estimate(GPT, which, FITTED.of(128))
    assert found.compute_s == pytest.approx(expected.compute_s[0])
    assert found.constant_s == pytest.approx(expected.constant_s[0])
    assert found.step_s == pytest.approx(expected.step_s[0], rel=0.01)


@pytest.mark.parametrize("schedule", range(len(SCHEDULES)), ids=SCHEDULES)
@pytest.mark.parametrize("given", [{}, {"zero": 1, "recompute": 1}, {"dp": 1, "fsdp": 4, "zero": 3}], ids=str)
def test_all_time_is_accounted_for(schedule: int, given: dict[str, object]) -> None:
    found = simulate_layout(GPT, layout(schedule=schedule, chunks=chunked(schedule), **given), MACHINE)
    assert parts(found) == pytest.approx(found.step_s)
    assert found.bubble_s >= 0 and min(found.exposed_s.values()) >= 0
    assert found.step_s >= found.busy_s.max()


@pytest.mark.parametrize("schedule", range(len(SCHEDULES)), ids=SCHEDULES)
@pytest.mark.parametrize("zero", [0, 1])
def test_memory_of_both_ends_is_that_of_the_closed_form(schedule: int, zero: int) -> None:
    which = layout(schedule=schedule, chunks=chunked(schedule), zero=zero, recompute=1)
    found = simulate_layout(EVEN, which, MACHINE, begins=even_begins(which))
    first, last = footprints_of_ends(EVEN, which)
    if SCHEDULES[schedule] == "zb-v":  # whose two stages of a rank are full at different times
        assert 0.95 * first.total[0] < found.memory.total[0] <= first.total[0]
    else:
        assert found.memory.total[0] == pytest.approx(first.total[0], rel=0.01)
    assert found.memory.total[-1] == pytest.approx(last.total[0], rel=0.01)
    assert found.memory_bytes == found.memory.total[found.fullest]


def even_begins(which: Layouts) -> list[int]:
    """Stages with as many layers each; the first one has the embedding, too."""
    stages = int(which.pp[0]) * (2 if kind_of(which).value == "zb-v" else int(which.chunks[0]))
    return [0, *(1 + 32 // stages * stage for stage in range(1, stages))]


# Stages.


def test_stages_are_uneven_where_the_head_is_heavy() -> None:
    """Two of Llama 3's three smaller stages: the first, with the embedding, and the last, with the head."""
    llama = transformer(
        layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, gated=True, biases=False, tied=False,
        sequence=8192, vocabulary=128256,
    )  # fmt: skip
    found = simulate_layout(llama, layout(pp=16, dp=128), MACHINE)
    layers = [sum(block.repeats for block in blocks) for blocks in found.stages]
    assert layers[1:-1] == [8] * 14 and (layers[0], layers[-1]) == (7, 7)


def test_layers_that_do_not_divide_wait_for_those_who_have_more() -> None:
    even, uneven = (
        simulate_layout(
            transformer(layers=layers, hidden=8192, heads=64, sequence=2048, vocabulary=1024), layout(), MACHINE
        )
        for layers in (32, 33)
    )
    assert sorted(len(blocks) for blocks in uneven.stages)[-1] == 5
    assert uneven.step_s > 1.15 * even.step_s  # 5 layers instead of 4 on one rank: 25 % but for filling and draining


def test_the_first_rank_has_most_in_flight_and_the_rank_that_needs_most_is_named() -> None:
    found = simulate_layout(GPT, layout(), MACHINE)
    activations = found.memory.activations
    assert np.all(np.diff(activations[1:-1]) < 0)
    assert found.memory_bytes == max(found.memory.total)


# Devices that are slower.


@pytest.mark.parametrize("place", [0, 100, 255])
def test_one_slow_device_slows_the_step_as_its_stage_is_slower(place: int) -> None:
    device = MACHINE.groups[0].device
    groups = [Group(place, device), Group(1, device, slowdown=1.3), Group(255 - place, device)]
    slow = dataclasses.replace(MACHINE, groups=tuple(group for group in groups if group.devices))
    even, found = (simulate_layout(EVEN, layout(tp=1, dp=32), machine) for machine in (MACHINE, slow))
    assert 1.15 < found.flow.ended.max() / even.flow.ended.max() < 1.3


def test_a_slow_link_slows_what_crosses_it() -> None:
    device = MACHINE.groups[0].device
    slow = dataclasses.replace(MACHINE, groups=(Group(248, device), Group(8, device, link_slowdown=4.0)))
    even, found = (simulate_layout(EVEN, layout(), machine) for machine in (MACHINE, slow))
    assert sorted(found.classes.values()) == [1, 3]
    assert found.exposed_s["tp"] > 2 * even.exposed_s["tp"] and found.step_s > 1.2 * even.step_s
    assert found.compute_s == pytest.approx(even.compute_s)


@settings(max_examples=60)
@given(
    pp=st.integers(1, 5),
    replicas=st.integers(1, 7),
    inner=st.integers(1, 4),
    cuts=st.lists(st.integers(1, 139), max_size=4, unique=True),
    data=st.data(),
)
def test_classes_are_those_of_a_look_at_every_replica(
    pp: int, replicas: int, inner: int, cuts: list[int], data: st.DataObject
) -> None:
    devices = pp * replicas * inner
    cuts = sorted(cut for cut in cuts if cut < devices)
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, devices], strict=True)]
    device = MACHINE.groups[0].device
    kinds = [data.draw(st.integers(1, 3)) for _ in sizes]
    machine = Cluster("here", tuple(map(Group, sizes, [device] * len(sizes), map(float, kinds))), MACHINE.levels)
    owner = np.repeat([kinds.index(kind) for kind in kinds], sizes).reshape(pp, replicas, inner)
    every: dict[tuple[tuple[int, ...], ...], int] = {}
    for replica in range(replicas):
        found = tuple(tuple(sorted(set(owner[stage, replica].tolist()))) for stage in range(pp))
        every[found] = every.get(found, 0) + 1
    assert classes(machine, Layouts.of(pp=pp, dp=replicas, tp=inner)) == every


# Devices that differ by chance.


@pytest.mark.parametrize("count", [2, 10, 1000, 100_000])
def test_the_expected_maximum_is_that_of_draws(count: int) -> None:
    random = np.random.default_rng(0)
    drawn = [random.standard_normal(count).max() for _ in range(400)]
    error = float(np.std(drawn)) / np.sqrt(len(drawn))
    assert expected_maximum(count) == pytest.approx(float(np.mean(drawn)), abs=4 * error + 0.03)
    assert expected_maximum(1) == 0.0 and slowest_factor(count, 0.0) == 1.0


def test_jitter_is_what_draws_of_every_device_give() -> None:
    """Sixteen replicas of four stages on one device each, drawn 40 times: the mean of the slowest replica."""
    which, jitter = layout(tp=1, pp=4, dp=16), 0.03
    found, still = (simulate_layout(EVEN, which, MACHINE, jitter=each) for each in (jitter, 0.0))
    through, random = still.flow.pipeline, np.random.default_rng(0)

    def slowest() -> float:
        factors = 1 + jitter * random.standard_normal((16, 4))
        ended = []
        for replica in factors:
            durations = {
                (op, stage): seconds * (replica[stage] if op.is_compute else 1)
                for (op, stage), seconds in through.durations.items()
            }
            ended.append(flow(Pipeline(through.kind, 4, 1, durations, through.latency), 32).ended.max())
        return float(max(ended))

    drawn = np.mean([slowest() for _ in range(15)])
    grown, expected = found.flow.ended.max() / still.flow.ended.max(), drawn / still.flow.ended.max()
    assert grown - 1 == pytest.approx(expected - 1, rel=0.15)
    assert found.step_s > still.step_s


# Input.


def test_several_layouts_are_refused_and_so_are_more_stages_than_blocks() -> None:
    with pytest.raises(PlanError, match="one layout"):
        simulate_layout(GPT, Layouts.of(dp=[1, 2]), MACHINE)
    with pytest.raises(PlanError, match="32 blocks cannot be 64 stages"):
        simulate_layout(GPT, layout(pp=64), MACHINE)


# Traces.


def test_a_trace_has_the_names_of_a_real_pipelines_actions_and_ends_with_the_step() -> None:
    found = simulate_layout(GPT, layout(pp=2, dp=1, fsdp=4, micro_batches=6, zero=2), MACHINE)
    told = list(events(found))
    assert {event.rank for event in told} == {0, 32}
    names = [event.name for event in told if event.rank == 32]
    schedule = communicate(make("1f1b", 2, 6), Edges.chain(2))
    computed = [str(action) for action in schedule.actions[1] if action.op.is_compute]
    assert [name for name in names if name in computed] == computed
    assert {"update", "gather parameters", "sum of stage 1"} < set(names)
    assert max(event.ended_s for event in told) == pytest.approx(found.step_s - found.constant_s)
    assert from_chrome(to_chrome(told))[0].name == "F stage 0 micro-batch 0"
