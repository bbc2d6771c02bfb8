"""What a step takes, for many layouts at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.simulator.workload import Numbers


@dataclass(frozen=True)
class Footprint:
    """Bytes on the rank that needs most, for each layout."""

    parameters: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    buffers: Numbers
    """Gathered parameters, buckets and what kernels work in."""

    @property
    def total(self) -> Numbers:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True)
class Estimates:
    """Seconds of one step, for each layout, and what they are made of.

    Attributes:
        step_s: the whole step.
        compute_s: calls of the rank that has most to compute, recomputation included.
        exposed_s: collectives that nothing runs beside, by axis (`tp`, `sp`, `hw`, `pp`, `dp`, `fsdp`).
        bubble_s: waiting in a pipeline.
        optimizer_s: the update.
        constant_s: what each step takes whatever it computes.
        spread: standard deviation of the logarithm of the step's time: how sure the estimate is.
        flops: of the model for the whole batch, without recomputation.
        link_bytes: sent by one rank in a step, by level of the network.
    """

    step_s: Numbers
    compute_s: Numbers
    exposed_s: Mapping[str, Numbers]
    bubble_s: Numbers
    optimizer_s: Numbers
    constant_s: Numbers
    spread: Numbers
    flops: Numbers
    link_bytes: Mapping[str, Numbers]

    @property
    def risk_s(self) -> Numbers:
        """Seconds of a step that turns out slower by a standard deviation: what a careful choice looks at."""
        return np.asarray(self.step_s * np.exp(self.spread))
