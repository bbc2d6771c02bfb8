"""The best layouts looked at closely: their schedules run in virtual time, with stages as uneven as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np

from paceline.planner.search.candidates.candidate import Candidate
from paceline.planner.search.question import Question
from paceline.simulator.scale.layout import simulate_layout


def simulated(asked: Question) -> Callable[[Candidate], Candidate]:
    """Return what gives a candidate the figures of a simulation, of the rank that needs most memory."""

    def closely(one: Candidate) -> Candidate:
        found = simulate_layout(asked.workload, one.layout, asked.cluster)
        held = {
            field.name: np.broadcast_to(getattr(found.memory, field.name), found.memory.total.shape)
            for field in fields(found.memory)
        }
        return replace(
            one,
            step_s=found.step_s,
            compute_s=found.compute_s,
            exposed_s=dict(found.exposed_s),
            bubble_s=max(found.bubble_s, 0.0),
            optimizer_s=found.optimizer_s,
            constant_s=found.constant_s,
            memory={name: float(each[found.fullest]) for name, each in held.items()},
        )

    return closely
