"""What is always shown beside the best: plain data parallelism, FSDP, and Megatron's rule of thumb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from paceline.planner.search.candidates.candidate import Candidate
from paceline.planner.search.fitting import Fitting, fitting, in_ways_that_fit
from paceline.planner.search.question import AXES, Question
from paceline.simulator.layouts import Flags, Layouts

Best = Callable[[Layouts], Candidate]
"""Returns the best of some layouts."""


@dataclass(frozen=True)
class Baseline:
    """A layout that people would take without a search.

    Attributes:
        name: for people.
        what: what it is.
        plan: its best form that fits, or else the one that needs least memory; None where there is none at all.
        why_not: why there is none.
    """

    name: str
    what: str
    plan: Candidate | None
    why_not: str = ""


def baselines(asked: Question, found: Fitting, best: Best) -> tuple[Baseline, ...]:
    """Return them, each with micro-batches and recomputation that suit it best."""
    if asked.axes != frozenset(AXES):  # they are shown whatever a search may use
        found = fitting(replace(asked, axes=frozenset(AXES)))
    alone = f"the batch of {asked.batch} samples does not divide by {asked.devices} ranks"
    ddp = found.leanest.dp == asked.devices
    fsdp = found.leanest.fsdp == asked.devices
    rule = _megatron(asked, found)
    return (
        Baseline("DDP", "replicas", _form(asked, found, ddp, best), "" if ddp.any() else alone),
        Baseline("FSDP", "ZeRO-3", _form(asked, found, fsdp, best, zero=3), "" if fsdp.any() else alone),
        Baseline(
            "Megatron",
            "tp within a node, then pp until it fits, then dp",
            _form(asked, found, rule, best),
            "" if rule.any() else f"no such mesh divides both {asked.devices} ranks and {asked.batch} samples",
        ),
    )


def _form(asked: Question, found: Fitting, which: Flags, best: Best, *, zero: int | None = None) -> Candidate | None:
    """Return the best form that fits of some layouts, or else the one that needs least."""
    if not which.any():
        return None
    fit = in_ways_that_fit(asked, found.leanest[which])
    if zero is not None and len(fit):  # it is shown as it is known, even where less would do
        fit = replace(fit, zero=np.where(fit.fsdp > 1, zero, 0))
    least = np.flatnonzero(which)[np.argmin(found.least_bytes[which])]
    return best(fit if len(fit) else found.leanest[least : least + 1])


def _megatron(asked: Question, found: Fitting) -> Flags:
    """Return which layouts follow Megatron-LM's rule.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
    takeaways 1 and 2: tensor parallelism within a node, stages until the model fits, replicas of that.
    """
    one = found.leanest
    family = np.asarray((one.fsdp == 1) & (one.sp == 1) & (one.hw == 1) & (one.tp <= asked.node))
    if not family.any():
        return family
    family &= one.tp == one.tp[family].max()
    fits = family & (found.least_bytes <= asked.memory_bytes)
    depth = one.pp[fits].min() if fits.any() else one.pp[family].max()
    return np.asarray(family & (one.pp == depth))
