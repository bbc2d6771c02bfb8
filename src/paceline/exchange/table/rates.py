"""What computes by a rule, at the learning rate of the moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.exchange.table.rules import UpdateRule

T = TypeVar("T")


class AtRate(Generic[T]):
    """Makes something for a rule, and anew when its learning rate is another one.

    Args:
        rule: with the rate that factors are of.
        make: makes it.
    """

    def __init__(self, rule: UpdateRule, make: Callable[[UpdateRule], T]) -> None:
        self._rule, self._make = rule, make
        self._factor, self._made = 1.0, make(rule)

    def __call__(self, factor: float) -> T:
        """Return what is for `factor` times the rule's rate."""
        if factor != self._factor:
            self._factor, self._made = factor, self._make(self._rule.at(factor))
        return self._made
