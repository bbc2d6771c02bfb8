"""Learning rates in few bytes: the same numbers come back, to the bit."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.rates import Rates


@given(st.lists(st.floats(allow_nan=True, width=64), max_size=50))
def test_numbers_come_back_to_the_bit(numbers: list[float]) -> None:
    kept = Rates(**json.loads(json.dumps({"packed": Rates.of(numbers).packed})))
    assert [struct.pack("d", one) for one in kept.numbers] == [struct.pack("d", one) for one in numbers]
    assert kept == Rates.of(numbers)


def test_the_last_number_stays_and_without_any_it_is_one() -> None:
    kept = Rates.of([0.5, 0.25])
    assert [kept.at(clock) for clock in (0, 1, 2, 99)] == [0.5, 0.25, 0.25, 0.25]
    assert Rates().at(7) == Rates.of([]).at(7) == 1.0


def test_a_long_schedule_is_small() -> None:
    steps = 100_000
    numbers = [0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
    job = Job((DenseTable("w", (1,)),), rates=Rates.of(numbers))
    said = json.dumps(job.to_dict())
    assert len(said) < 1.5 * steps < len(json.dumps(numbers)) / 10
    assert Job.from_dict(json.loads(said)) == job
    assert list(Job.from_dict(json.loads(said)).rates.numbers) == numbers


@pytest.mark.parametrize("packed", ["!", "AAAA", "eJwDAAAAAAE=" + "A"])
def test_what_is_no_schedule_is_refused(packed: str) -> None:
    with pytest.raises(ExchangeError, match="learning rates of the job cannot be read"):
        Rates(packed).at(0)


def test_who_asks_for_no_rates_loads_no_numpy() -> None:
    asked = "import sys, paceline.exchange.job as j; j.Job(()).rate(3); print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True, text=True).stdout == "False\n"
