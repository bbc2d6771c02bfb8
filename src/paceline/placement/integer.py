"""Integer programs: rows and columns while they are written down, and their solution by HiGHS through SciPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

_MICROSECONDS = 1e6
_GAP = 1e-3
_TIME_LIMIT_S = 60.0  # after that, what was found is good enough
_LIMIT_REACHED = 1  # the status that SciPy gives
Vector = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Optimum:
    """The value of each variable, the objective, and a proven lower bound of it."""

    values: Vector
    objective: float
    bound: float


class IntegerProgram:
    """Minimises a cost in seconds over variables between 0 and 1, of which some are whole."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self._whole: list[int] = []
        self._low: list[float] = []
        self._high: list[float] = []
        self._entries: tuple[list[int], list[int], list[float]] = ([], [], [])

    def variable(self, cost: float, *, whole: bool = False) -> int:
        """Add a variable; return its number."""
        self.costs.append(cost)
        self._whole.append(int(whole))
        return len(self.costs) - 1

    def constrain(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        """Add the row `low <= sum of coefficient * variable <= high`."""
        rows, columns, values = self._entries
        for column, value in terms:
            rows.append(len(self._low))
            columns.append(column)
            values.append(value)
        self._low.append(low)
        self._high.append(high)

    def solve(self) -> Optimum | None:
        """Return the optimum to a small gap; None where no values satisfy all rows."""
        result = self._found(np.array(self.costs) * _MICROSECONDS)
        if result.x is None:
            return None
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
        return Optimum(result.x, result.fun / _MICROSECONDS, bound / _MICROSECONDS)

    def relaxed(self) -> float:
        """Return the optimum over fractions; minus infinity where it was not found in time."""
        result = self._run(np.array(self.costs) * _MICROSECONDS, [0] * len(self.costs))
        return -math.inf if result.x is None else float(result.fun) / _MICROSECONDS

    def least(self, terms: Sequence[tuple[int, float]]) -> float:
        """Return the least that the sum of coefficient * variable can be, whatever that costs."""
        weights = np.zeros(len(self.costs))
        for column, value in terms:
            weights[column] += value
        unit = max(float(weights.max(initial=0.0)), 1.0)
        result = self._found(weights / unit)
        return math.inf if result.x is None else float(result.fun) * unit

    def _found(self, costs: Vector) -> OptimizeResult:
        """Return what was found in time, or else as late as it is found: a busy machine does not mean that none is."""
        result = self._run(costs, self._whole)
        if result.x is None and result.status == _LIMIT_REACHED:
            result = self._run(costs, self._whole, time_limit_s=math.inf)
        return result

    def _run(self, costs: Vector, whole: Sequence[int], time_limit_s: float | None = None) -> OptimizeResult:
        # Loaded by those that place a program; all others, which read one, start without.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        rows, columns, values = self._entries
        matrix = csr_matrix((values, (rows, columns)), shape=(len(self._low), len(self.costs)))
        return milp(
            costs,
            constraints=LinearConstraint(matrix, self._low, self._high),
            integrality=whole,
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": _GAP, "time_limit": _TIME_LIMIT_S if time_limit_s is None else time_limit_s},
        )
