"""What the micro-batches of a stage add up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from paceline.program.stages import Stage
from paceline.runtime.pipeline.stage_rank import Pieces


@dataclass
class Sums:
    """What the micro-batches of a stage have added up to, since it was last updated.

    Attributes:
        gradients: by parameter; of this rank alone.
        weight: of the losses.
        read: each micro-batch, in the order of their gradients, and the version of the weights it read.
    """

    gradients: dict[str, Pieces] = field(default_factory=dict)
    weight: float = 0.0
    read: list[tuple[int, int]] = field(default_factory=list)


def add_up(sums: Sums, stage: Stage, made: Mapping[str, Pieces], share: float) -> None:
    """Add the gradients that one micro-batch made; none where its loss is a mean over nothing."""
    sums.weight += share
    held: Pieces = []
    more: Pieces = []
    for parameter, name in stage.gradients.items():
        if name not in made:
            continue
        if parameter not in sums.gradients:  # a copy: what was made may be a view of something else
            sums.gradients[parameter] = [piece.clone() for piece in made[name]]
        else:
            held += sums.gradients[parameter]
            more += made[name]
    if held:
        torch._foreach_add_(held, more)
