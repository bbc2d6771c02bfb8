"""What each micro-batch counts by: a mean of means is not the mean where they hold unequal numbers of valid tokens."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import PlanError
from paceline.runtime.pipeline.step import PipelineStep


class Shares:
    """The shares of the micro-batches of one call.

    Gradients are added up by share and divided by the sum of shares at the end, so they may be of any scale: fractions
    that add up to one where they are known beforehand, the counts themselves where the program computes them.

    Raises:
        PlanError: the loss is no mean that could be read off the program, and there are several micro-batches.
    """

    def __init__(self, steps: Sequence[PipelineStep], *, equal: bool, group: int | None = None) -> None:
        self._weights = [step.weight for step in steps]
        self._known: list[float] | None = None
        group = group or len(steps)
        if group == 1 or equal:
            self._known = [1.0 / group] * len(steps)
        elif all(weight is not None for weight in self._weights):
            weights = [weight or 0.0 for weight in self._weights]
            totals = [sum(weights[first : first + group]) for first in range(0, len(steps), group)]
            self._known = [weight / totals[index // group] for index, weight in enumerate(weights)]
        elif not all(step.counts for step in steps):
            raise PlanError(
                "this loss is not a mean that Paceline can read off the program (a cross-entropy, or the mean of a "
                "tensor), so it cannot weight the micro-batches of a pipeline. Use one micro-batch (it waits for each "
                "stage), or say that all micro-batches weigh the same (train.loss_weight: equal)."
            )

    def of(self, micro_batch: int, count: float | None) -> float:
        """Return the share of a micro-batch; `count` is what its program counted, None where it does not."""
        if self._known is not None:
            return self._known[micro_batch]
        assert count is not None, "shares that are not known beforehand travel with the gradients"
        return count

    def weight(self, micro_batch: int, count: float | None) -> float | None:
        """Return what the loss of a micro-batch is a mean over; None where nobody knows."""
        return self._weights[micro_batch] if count is None else count
