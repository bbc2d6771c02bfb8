"""Coefficients are found again from steps that they make, and what steps do not show is said to be so."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.cluster.cluster import Cluster, Device, Group
from paceline.cluster.fabric import Fabric, Level
from paceline.cluster.rates import Rates
from paceline.simulator.closed_form.choosing import spread_out
from paceline.simulator.closed_form.estimate import estimate
from paceline.simulator.closed_form.fitting import Measured, Prior, fit, with_rates
from paceline.simulator.closed_form.kriging import NOISE, kriged
from paceline.simulator.closed_form.transformer import transformer
from paceline.simulator.layouts import Layouts

TRUE = Rates(matmul=0.6, memory=0.7, launch_s=20e-6, step_s=0.02)
PRIORS = {
    "matmul": Prior(0.8, 0.3),
    "memory": Prior(0.8, 0.3),
    "launch_s": Prior(30e-6, 0.5),
    "step_s": Prior(0.01, 1.0),
    "overlap": Prior(0.5, 0.6),
}
MODEL = transformer(layers=12, hidden=1024, heads=16, sequence=1024, vocabulary=50304, fused=False)
LAYOUTS = Layouts.of(micro_batch=[1, 2, 4, 8, 16, 32, 1, 2], micro_batches=[1, 1, 1, 1, 1, 1, 8, 8])


def cluster(rates: Rates) -> Cluster:
    device = Device("device", {"bfloat16": 312e12}, 80e9, 2e12, rates)
    links = Level("links", Fabric.NVLINK, 8, 250e9, 5e-6), Level("network", Fabric.INFINIBAND, None, 25e9, 1e-5)
    return Cluster("cluster", (Group(64, device),), links)


def rows() -> Measured:
    seconds = estimate(MODEL, LAYOUTS, cluster(TRUE)).step_s
    return Measured(tuple("abcdefgh"), MODEL, LAYOUTS, cluster(Rates()), seconds)


def test_coefficients_that_made_steps_are_found_again() -> None:
    found = fit([rows()], Rates(), priors=PRIORS, hold=0.01)
    for name in ("matmul", "memory", "launch_s", "step_s"):
        assert getattr(found.rates, name) == pytest.approx(getattr(TRUE, name), rel=0.02)
    assert np.abs(found.residuals).max() < 0.005


def test_what_no_row_shows_stays_at_its_prior_and_is_said_to() -> None:
    found = fit([rows()], Rates(), priors=PRIORS, hold=0.01)  # one device: no gradients to sum beside anything
    assert found.rates.overlap == pytest.approx(0.5)
    assert "overlap" in found.unidentified
    assert "launch_s" not in found.unidentified


def test_a_strong_hold_keeps_coefficients_at_their_priors() -> None:
    found = fit([rows()], Rates(), priors=PRIORS, hold=1e4)
    for name, prior in PRIORS.items():
        assert getattr(found.rates, name) == pytest.approx(prior.centre, rel=1e-2)


def test_one_odd_row_does_not_decide() -> None:
    measured = rows()
    odd = replace(measured, seconds=measured.seconds * np.array([1, 1, 1, 3, 1, 1, 1, 1]))
    priors = {name: PRIORS[name] for name in ("matmul", "launch_s")}
    found = fit([odd], TRUE, priors=priors, hold=0.01)
    assert found.rates.matmul == pytest.approx(TRUE.matmul, rel=0.05)


def test_estimates_of_fitted_rows_are_what_was_measured_and_surer() -> None:
    measured = rows()
    slower = replace(measured, seconds=measured.seconds * 1.15)  # what no coefficient explains
    found = fit([slower], TRUE, priors={"overlap": PRIORS["overlap"]})
    fitted = cluster(found.rates)
    near = estimate(MODEL, LAYOUTS, fitted)
    assert near.step_s == pytest.approx(slower.seconds, rel=0.03)
    far = estimate(MODEL, Layouts.of(tp=8, pp=8, micro_batch=64, micro_batches=64), fitted)
    assert far.spread[0] > 2 * near.spread.max()
    plain = estimate(MODEL, Layouts.of(tp=8, pp=8, micro_batch=64, micro_batches=64), cluster(TRUE))
    assert far.step_s[0] == pytest.approx(plain.step_s[0], rel=0.02)


def test_parts_of_a_corrected_step_add_up_to_it() -> None:
    found = fit([replace(rows(), seconds=rows().seconds * 1.15)], TRUE, priors={"overlap": PRIORS["overlap"]})
    step = estimate(MODEL, LAYOUTS, with_rates(cluster(TRUE), found.rates))
    parts = step.compute_s + sum(step.exposed_s.values()) + step.bubble_s + step.optimizer_s + step.constant_s
    assert parts == pytest.approx(step.step_s)


def test_kriging_of_two_points_is_what_the_formula_says() -> None:
    zeros = [0.0] * 8
    apart = [0.0, 0.8, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]  # one reach in tp, of both kernels
    expected, spread = kriged(np.array([zeros, apart, zeros]), [[*zeros, 0.1]])
    total = 0.07**2 + 0.1**2
    weight = total / (total + NOISE**2)
    assert expected[0] == pytest.approx(0.1 * weight)
    assert expected[1] == pytest.approx(0.1 * weight * np.exp(-0.5))
    assert expected[2] == expected[0]
    assert spread[0] < spread[1] < np.sqrt(total + NOISE**2)


def test_an_odd_residual_is_taken_for_noise() -> None:
    point = np.zeros((1, 8))
    modest, _ = kriged(point, [[*point[0], 0.3]])
    odd, _ = kriged(point, [[*point[0], 3.0]])
    assert odd[0] < modest[0]


def test_points_are_chosen_from_the_middle_outwards_without_twins() -> None:
    points = np.array([[0.0], [0.0], [10.0], [1.0], [4.0]])
    assert spread_out(points, 3) == [4, 2, 0]
    assert spread_out(points, 3, start=2) == [2, 0, 4]
    assert sorted(spread_out(points, 9)) == [0, 1, 2, 3, 4]
