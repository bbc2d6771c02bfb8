"""Versions of weights: micro-batches in flight keep those that they began with, while newer ones are made.

PipeDream's weight stashing. An update leaves the tensors of the old version as they are where somebody still reads
them, and changes a copy; so what a forward pass saved, views of weights too, stays true.
"""

from __future__ import annotations

from torch import Tensor, nn

from paceline.runtime.pipeline.stage_rank import Pieces, StageRank
from paceline.schedule import Schedule


class Versions:
    """The versions of the parameters of one pipeline rank, during one walk.

    Args:
        rank: whose parameters they are; its newest ones are version 0.
        schedule: which says until when each version is read.
        parameters: of each stage on the rank, by name.
    """

    def __init__(self, rank: StageRank, schedule: Schedule, parameters: dict[int, list[str]]) -> None:
        self._rank = rank
        self._parameters = parameters
        self._newest = dict.fromkeys(rank.stages, 0)
        self._old: dict[tuple[int, int], dict[str, Pieces]] = {}
        self._last_read: dict[tuple[int, int], int] = {}
        for position, action in enumerate(schedule.actions[rank.number]):
            if action.op.is_compute:
                self._last_read[action.stage, action.version] = position

    def parameter(self, stage: int, version: int, name: str) -> Pieces:
        """Return the pieces of a parameter of a version that the schedule still reads."""
        if version == self._newest[stage]:
            return [pieces[name].detach() for pieces in self._rank.state.pieces]
        return self._old[stage, version][name]

    def make_room(self, stage: int, version: int, position: int) -> None:
        """Before a version is made at a position of the list: drop what is not read again, and keep what is."""
        for old in [key for key in self._old if key[0] == stage and self._last_read.get(key, -1) < position]:
            del self._old[old]
        newest = self._newest[stage]
        if self._last_read.get((stage, newest), -1) > position:
            kept: dict[str, Pieces] = {}
            for name in self._parameters[stage]:
                kept[name] = [_set_aside(pieces[name]) for pieces in self._rank.state.pieces]
            self._old[stage, newest] = kept
        self._newest[stage] = version


def _set_aside(tensor: Tensor) -> Tensor:
    """Return the tensor of a parameter, which from now on has a copy instead."""
    assert isinstance(tensor, nn.Parameter)
    old = tensor.data
    tensor.data = old.clone()
    return old
