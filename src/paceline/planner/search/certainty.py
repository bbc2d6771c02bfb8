"""How sure it is that one plan is faster than another."""

from __future__ import annotations

import math

from paceline.planner.search.candidates.candidate import Candidate

_ONE_DEVIATION = 0.8413
"""The probability that a normal variable is less than one standard deviation above its mean."""


def certainty(better: Candidate, worse: Candidate) -> float:
    """Return the probability that a plan is faster than another, if their errors are independent.

    Errors that they share, such as a device that is slower than described, decide nothing between them: so it is at
    least that.
    """
    spread = math.hypot(better.spread, worse.spread)
    if spread == 0:
        return 1.0 if better.step_s < worse.step_s else 0.5
    return 0.5 * (1 + math.erf(math.log(worse.step_s / better.step_s) / spread / math.sqrt(2)))


def is_clear(probability: float) -> bool:
    """Whether the difference is larger than the error of telling it."""
    return probability >= _ONE_DEVIATION
