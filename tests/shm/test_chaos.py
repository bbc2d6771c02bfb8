"""A rank that ends in the middle of calls: the others get an error that names it, end, and leave nothing behind."""

from __future__ import annotations

import pytest

from tests.shm.chaos import Case, End, cases, play
from tests.shm.implementations import every_implementation


@every_implementation
def test_killed_in_the_middle(implementation):
    for case in cases(implementation, End.KILL, 8, seed=1):
        faults = play(case).faults(case)
        assert not faults, f"{case}\n" + "\n".join(faults)


@every_implementation
@pytest.mark.parametrize("end", [end for end in End if end is not End.KILL], ids=lambda end: end.name.lower())
def test_ended_otherwise(implementation, end):
    case = Case(implementation, end, victim=1, seed=2)
    faults = play(case).faults(case)
    assert not faults, f"{case}\n" + "\n".join(faults)
