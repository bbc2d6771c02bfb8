"""Errors relative to scales."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.verify.compare import Kind, differences, gaps, largest_gap, relative_gap
from paceline.verify.serial import Trajectory

NAN, INF = math.nan, math.inf


def _trajectory(gradients: dict[str, Tensor], loss: float = 1.0) -> Trajectory:
    parameters = {name: torch.ones_like(tensor) for name, tensor in gradients.items()}
    return Trajectory((loss,), gradients, parameters, {"mask": torch.tensor([-INF, 1.0])}, rate=0.1)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([], [], 0.0),
        ([NAN, INF, -INF], [NAN, INF, -INF], 0.0),
        ([NAN], [1.0], INF),
        ([INF], [1.0], INF),
        ([INF], [-INF], INF),
        ([True, False], [True, True], 1.0),
        ([1, 2], [1, 5], 3.0),
    ],
)
def test_largest_gap(a: list[float], b: list[float], expected: float) -> None:
    assert largest_gap(torch.tensor(a), torch.tensor(b)) == expected


def test_relative_gap_measures_large_elements_by_themselves() -> None:
    reference = torch.tensor([-1e30, 1.0, 0.0], dtype=torch.float64)
    assert relative_gap(reference * (1 + 1e-12), reference, 1.0) == pytest.approx(1e-12, rel=1e-3)
    assert relative_gap(reference + torch.tensor([0.0, 0.0, 0.5]), reference, 1.0) == 0.5


def test_gradients_near_zero_are_compared_on_the_scale_of_the_largest() -> None:
    serial = _trajectory({"large": torch.tensor([10.0]), "zero": torch.tensor([1e-9]), "none": torch.tensor([0.0])})
    other = _trajectory({"large": torch.tensor([10.0]), "zero": torch.tensor([2e-9]), "none": torch.tensor([0.0])})
    worst = differences(gaps(serial, other), serial, floor=1e-2)[0]
    assert (worst.kind, worst.name) == (Kind.GRADIENT, "zero")
    assert worst.rel_error == pytest.approx(1e-8)
    assert differences(gaps(serial, other), serial, floor=0.0)[0].rel_error == pytest.approx(1.0)


def test_a_missing_gradient_is_one_of_zeros() -> None:
    serial = _trajectory({"a": torch.tensor([0.0]), "b": torch.tensor([2.0])})
    other = _trajectory({"b": torch.tensor([2.0])})
    other.parameters["a"] = serial.parameters["a"]
    assert differences(gaps(serial, other), serial, floor=1e-2)[0].rel_error == 0.0
    serial.gradients["a"] = torch.tensor([1.0])
    assert differences(gaps(serial, other), serial, floor=1e-2)[0].rel_error == 1.0


def test_a_loss_that_is_not_finite_is_infinitely_wrong() -> None:
    serial, other = _trajectory({}), _trajectory({}, loss=NAN)
    worst = differences(gaps(serial, other), serial, floor=1e-2)[0]
    assert (worst.kind, worst.rel_error) == (Kind.LOSS, INF)
