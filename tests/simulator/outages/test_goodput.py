"""Weeks of a job that fails: against exact formulas, against what was published, and where formulas say nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.simulator.outages.failures import Checkpoints, Interruptions, Recovery
from paceline.simulator.outages.goodput import Goodput, Spent, simulate_goodput
from paceline.simulator.outages.intervals import (
    best_interval,
    daly_interval,
    exponential_goodput,
    young_goodput,
    young_interval,
)

HOUR, DAY = 3600.0, 86400.0
DEVICES, DAYS, INTERRUPTED, PLANNED = 16_384, 54, 466, 47
"""Llama 3, section 3.3.4 (arXiv 2407.21783), where more than 90 % of the time was effective."""
STANDARD_ERRORS = 4.5  # what a right simulation exceeds once in 100,000 comparisons


def llama(recovery: Recovery, minutes: list[float], checkpoints: Checkpoints | None = None) -> Goodput:
    interruptions = Interruptions(DAYS * DAY / INTERRUPTED, announced=PLANNED / INTERRUPTED, broken=0.0)
    intervals = 60.0 * np.array(minutes)
    saving = checkpoints or Checkpoints(stall_s=5.0)
    return simulate_goodput(interruptions, recovery, saving, intervals, horizon_s=DAYS * DAY, runs=100)


# Formulas.


@given(stall=st.floats(0.1, 600), mean=st.floats(3600, 1e6))
def test_the_exact_optimum_is_one(stall: float, mean: float) -> None:
    best = best_interval(stall, mean)
    here, less, more = exponential_goodput(best * np.array([1, 0.99, 1.01]), Checkpoints(stall), mean, 300.0)
    assert here > less and here > more


@given(share=st.floats(1e-5, 0.5))
def test_dalys_optimum_is_close_to_the_exact_one_and_youngs_where_failures_are_rare(share: float) -> None:
    mean = 1e5
    exact = best_interval(share * mean, mean)
    assert daly_interval(share * mean, mean) == pytest.approx(exact, rel=0.01)
    assert young_interval(share * mean, mean) == pytest.approx(exact, rel=1.5 * math.sqrt(share))


def test_a_checkpoint_that_takes_longer_than_jobs_live_is_taken_as_often_as_they_fail() -> None:
    assert daly_interval(5.0, 2.0) == 2.0


def test_the_first_order_is_right_where_failures_are_rare() -> None:
    interval, mean = 1000.0, 1e6
    exact = exponential_goodput(interval, Checkpoints(10.0), mean, 300.0)
    assert young_goodput(interval, 10.0, mean, 300.0) == pytest.approx(exact, abs=1e-5)
    assert young_goodput(1e4, 10.0, 1e3, 300.0) == 0.0  # not below


# Simulation.


@pytest.mark.parametrize("write_s", [0.0, 150.0])
@pytest.mark.parametrize("mean_s", [3000.0, 30_000.0])
def test_simulation_agrees_with_the_exact_formula_where_failures_are_exponential(mean_s: float, write_s: float) -> None:
    intervals = np.geomspace(200.0, 5000.0, 6)
    checkpoints, recovery = Checkpoints(20.0, write_s), Recovery(detect_s=100.0, restart_s=400.0)
    interruptions = Interruptions(mean_s, broken=0.0)
    found = simulate_goodput(interruptions, recovery, checkpoints, intervals, horizon_s=1000 * mean_s, runs=50)
    exact = exponential_goodput(intervals, checkpoints, mean_s, 500.0)
    # what is under way at the end counts as done: of 1,000 intervals between failures, less than a part of one
    assert np.all(np.abs(found.goodput - exact) < STANDARD_ERRORS * found.error + intervals / (1000 * mean_s))
    assert np.all(found.error < 0.003)


def test_waiting_for_repairs_is_what_the_formula_says_without_spares() -> None:
    checkpoints, recovery = Checkpoints(20.0), Recovery(100.0, 400.0, spares=0, repair_s=2000.0)
    interruptions = Interruptions(10_000.0, broken=0.5)
    intervals = np.array([600.0])
    found = simulate_goodput(interruptions, recovery, checkpoints, intervals, horizon_s=2e7, runs=50)
    # a repair of which detection takes the first 100 s: what is left of an exponential is exponential
    waiting = 0.5 * 2000.0 * math.exp(-100 / 2000)
    exact = exponential_goodput(intervals, checkpoints, 10_000.0, 500.0, waiting)
    assert np.all(np.abs(found.goodput - exact) < STANDARD_ERRORS * found.error + 1e-4)


@settings(max_examples=25)
@given(
    mean=st.floats(500, 1e5),
    shape=st.floats(0.5, 2),
    announced=st.floats(0, 1),
    spares=st.integers(0, 3),
    detect=st.floats(0, 2000),
    restart=st.floats(0, 2000),
    stall=st.floats(0, 300),
    write=st.floats(0, 100),
    seed=st.integers(0, 99),
)
def test_all_time_is_accounted_for(
    mean: float,
    shape: float,
    announced: float,
    spares: int,
    detect: float,
    restart: float,
    stall: float,
    write: float,
    seed: int,
) -> None:
    found = simulate_goodput(
        Interruptions(mean, shape, announced, 0.7),
        Recovery(detect, restart, spares, 5000.0),
        Checkpoints(stall, write),
        np.array([100.0, 1000.0]),
        horizon_s=1e5,
        runs=3,
        seed=seed,
    )
    assert sum(found.shares.values()) == pytest.approx(np.ones(2))
    assert all(np.all(share >= -1e-12) for share in found.shares.values())
    assert np.array_equal(found.shares[Spent.USEFUL], found.goodput)


def test_spares_are_worth_something_and_many_are_as_good_as_instant_repair() -> None:
    interruptions, checkpoints = Interruptions(10_000.0), Checkpoints(10.0)

    def goodput(spares: int, repair_s: float) -> float:
        recovery = Recovery(60.0, 300.0, spares, repair_s)
        return float(
            simulate_goodput(interruptions, recovery, checkpoints, np.array([500.0]), horizon_s=5e6, runs=20).goodput[0]
        )

    by_spares = [goodput(spares, DAY) for spares in (0, 2, 8, 40)]
    assert by_spares == sorted(by_spares) and by_spares[0] < 0.2
    assert by_spares[-1] == goodput(0, 0.0)


def test_what_is_announced_loses_no_work() -> None:
    def lost(announced: float) -> float:
        interruptions = Interruptions(5000.0, announced=announced, broken=0.0)
        found = simulate_goodput(interruptions, Recovery(), Checkpoints(10.0), np.array([500.0]), horizon_s=1e6, runs=5)
        return float(found.shares[Spent.LOST][0] + found.shares[Spent.DETECTION][0])

    assert lost(1.0) == 0.0 < lost(0.0)


def test_interruptions_that_come_in_clusters_leave_longer_quiet_times() -> None:
    """A shape of a half has the same mean time; a job whose recovery is free loses less."""
    results = [
        simulate_goodput(
            Interruptions(10_000.0, shape),
            Recovery(0, 0),
            Checkpoints(10.0),
            np.array([2000.0]),
            horizon_s=5e6,
            runs=20,
        )
        for shape in (0.5, 1.0)
    ]
    assert results[0].goodput > results[1].goodput
    for found in results:
        assert found.interruptions == pytest.approx(500, rel=0.05)


def test_a_seed_gives_the_same_and_another_something_else() -> None:
    def once(seed: int) -> float:
        interruptions = Interruptions(5000.0)
        found = simulate_goodput(
            interruptions, Recovery(), Checkpoints(10.0), np.array([500.0]), horizon_s=1e5, runs=3, seed=seed
        )
        return float(found.goodput[0])

    assert once(1) == once(1) != once(2)


# What was published.


def test_llama_3_is_interrupted_as_often_as_it_was() -> None:
    found = llama(Recovery(120.0, 300.0), [10.0])
    # a run's count is Poisson's: its mean over 100 runs is known to within 2.2
    assert found.interruptions[0] == pytest.approx(INTERRUPTED, abs=STANDARD_ERRORS * math.sqrt(INTERRUPTED / 100))
    unexpected = found.interruptions[0] - found.announced[0]
    assert unexpected == pytest.approx(419, abs=STANDARD_ERRORS * math.sqrt(419 / 100))


def test_llama_3s_effective_time_follows_from_restarts_that_were_published() -> None:
    """Detection by the collectives' timeout of 10 minutes at worst, restarts of 5 (Kokolis et al., arXiv 2410.21680).

    More than 90 % then needs quick detection and checkpoints every few minutes; half an hour between them is too long.
    """
    quick = llama(Recovery(detect_s=120.0, restart_s=300.0), [5.0, 10.0, 30.0])
    assert np.all(quick.low[:2] > 0.90) and quick.goodput[1] < 0.95
    assert quick.goodput[2] < 0.90
    slow = llama(Recovery(detect_s=600.0, restart_s=300.0), [5.0, 10.0])
    assert np.all(slow.goodput < 0.91) and np.all(slow.goodput > 0.85)
    by_hand = llama(Recovery(detect_s=600.0, restart_s=1800.0), [5.0, 10.0])
    assert np.all(by_hand.high < 0.85)


def test_a_cluster_says_how_often_jobs_are_interrupted() -> None:
    rate = INTERRUPTED / (DAYS * 24 * DEVICES)
    cluster = Cluster("here", (), (), failures_per_device_hour=rate)
    assert Interruptions.of(cluster, DEVICES).mean_s == pytest.approx(DAYS * DAY / INTERRUPTED)
    assert Interruptions.of(cluster, 2 * DEVICES).mean_s == pytest.approx(DAYS * DAY / INTERRUPTED / 2)
    with pytest.raises(PlanError, match="does not say how often"):
        Interruptions.of(Cluster("here", (), ()), DEVICES)


# Input.


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Interruptions(0.0), "mean time"),
        (lambda: Interruptions(1.0, announced=1.5), "between 0 and 1"),
        (lambda: Recovery(detect_s=-1.0), "detect_s is -1"),
        (lambda: Recovery(spares=-1), "spares"),
        (lambda: Checkpoints(math.nan), "stall_s"),
        (lambda: llama(Recovery(), [1.0], Checkpoints(1.0, 90.0)), "would overlap"),
        (lambda: llama(Recovery(), [0.0]), "positive"),
    ],
)
def test_what_cannot_be_is_refused(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(PlanError, match=says):
        make()
