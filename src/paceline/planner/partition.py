"""PipeDream's partition: consecutive layers become stages, and slow stages get several ranks.

The dynamic program of Narayanan et al. (SOSP 2019, section 3.1): the slowest stage, or transfer between stages, is to
be as quick as can be. Numbers only; `planner.profile` takes them from a module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from paceline.errors import PlanError


@dataclass(frozen=True)
class Layer:
    """What a layer costs for one micro-batch.

    Attributes:
        name: of the module that it begins with.
        seconds: of its forward and backward pass.
        activation_bytes: of what it and the layers before hand on to those after; gradients take the same way back.
        parameter_bytes: of the parameters that it is the first to read.
        shared: names of the parameters that it shares with other layers.
        may_repeat: whether ranks may take it in turns. A layer that changes a buffer may not: copies would part.
    """

    name: str
    seconds: float
    activation_bytes: float = 0.0
    parameter_bytes: float = 0.0
    shared: frozenset[str] = frozenset()
    may_repeat: bool = True


@dataclass(frozen=True)
class Level:
    """So many alike parts of a machine that are connected alike: ranks of a host, or hosts.

    Attributes:
        count: how many parts.
        bandwidth: bytes per second between two of them.
    """

    count: int
    bandwidth: float


@dataclass(frozen=True)
class Share:
    """Layers from `first` to the one before `end`, which `replicas` ranks compute in turns."""

    first: int
    end: int
    replicas: int


@dataclass(frozen=True)
class Partition:
    """Stages in order, and the seconds per micro-batch of the slowest of them or of their transfers."""

    stages: tuple[Share, ...]
    seconds: float


_Found = tuple[float, tuple[Share, ...]]
_NONE: _Found = math.inf, ()
_ROUNDED = 1 - 1e-9
"""Keeps what rounding makes a little slower than a lower bound."""
_Whole = Callable[[int, int], _Found]


def partition(layers: Sequence[Layer], levels: Sequence[Level], *, replicate: bool = True) -> Partition:
    """Return the partition whose slowest stage or transfer is quickest; of equally quick ones, one of few stages.

    `m` ranks that compute a stage in turns take `1 / m` of its time for each micro-batch, or the time in which they
    tell each other their gradients, `2 (m - 1) / m` of the parameters' bytes, if that is longer. What goes from stage
    to stage takes the time of its bytes there and back.

    Args:
        layers: in the order of the forward pass.
        levels: of the machine, the quickest first: ranks of a host, then hosts. With several levels, the stages found
            for one host are what the next level divides or repeats, as in the paper; all ranks are used.
        replicate: whether a stage may have several ranks.

    Raises:
        PlanError: there are more ranks than can be used.
    """
    if not layers or not levels or any(level.count < 1 or level.bandwidth <= 0 for level in levels):
        raise PlanError(
            f"{len(layers)} layers were to be divided among {[(it.count, it.bandwidth) for it in levels]}; give at "
            "least one layer, and levels of at least one part with a bandwidth above zero."
        )
    costs = _Costs(layers)
    whole: _Whole = costs.alone
    below = 1
    for level in levels[:-1]:
        whole = _Divided(costs, whole, below, level, replicate).on_all
        below *= level.count
    seconds, stages = _Divided(costs, whole, below, levels[-1], replicate).on_all(0, len(layers))
    if not stages:
        ranks = math.prod(level.count for level in levels)
        raise PlanError(
            f"{len(layers)} layers cannot be divided among {ranks} ranks"
            f"{' so that each stage may have several' if replicate else ' of one stage each'}. Use fewer ranks."
        )
    return Partition(stages, seconds)


def replicated(layers: Sequence[Layer], level: Level) -> float:
    """Return the seconds per micro-batch of all layers as one stage on all ranks: plain data parallelism."""
    costs = _Costs(layers)
    return costs.repeated(costs.alone(0, len(layers))[0], 0, len(layers), level, level.count)


class _Costs:
    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self._time = [0.0, *accumulate(layer.seconds for layer in layers)]
        self._bytes = [0.0, *accumulate(layer.parameter_bytes for layer in layers)]
        self._fixed = [0, *accumulate(not layer.may_repeat for layer in layers)]
        self._users: dict[str, list[int]] = {}
        for number, layer in enumerate(layers):
            for name in layer.shared:
                self._users.setdefault(name, []).append(number)

    def alone(self, first: int, end: int) -> _Found:
        return self.seconds(first, end), (Share(first, end, 1),)

    def seconds(self, first: int, end: int) -> float:
        return self._time[end] - self._time[first]

    def repeated(self, seconds: float, first: int, end: int, level: Level, count: int) -> float:
        """Seconds per micro-batch where `count` parts, each of which takes `seconds`, take micro-batches in turns."""
        told = 2 * (count - 1) * (self._bytes[end] - self._bytes[first]) / level.bandwidth
        return max(seconds, told) / count

    def may_repeat(self, first: int, end: int) -> bool:
        """Whether no layer changes a buffer, and none shares parameters with one elsewhere."""
        return self._fixed[end] == self._fixed[first] and all(
            first <= users[0] and users[-1] < end for users in self._users.values() if self._meets(users, first, end)
        )

    @staticmethod
    def _meets(users: Sequence[int], first: int, end: int) -> bool:
        return any(first <= user < end for user in users)


class _Divided:
    """Layers divided among the parts of one level, each of `below` ranks, which computes as `whole` says."""

    def __init__(self, costs: _Costs, whole: _Whole, below: int, level: Level, replicate: bool) -> None:
        self._costs = costs
        self._below = below
        self._whole = whole
        self._level = level
        self._most = level.count if replicate else 1
        self._known: dict[int, list[list[_Found]]] = {}
        self._stages: dict[tuple[int, int, int], _Found] = {}

    def on_all(self, first: int, end: int) -> _Found:
        """Return the best division of layers among all parts of the level."""
        if first not in self._known:
            self._known[first] = self._from(first)
        return self._known[first][end - first][self._level.count]

    def _from(self, first: int) -> list[list[_Found]]:
        """Return by the number of layers from `first` on, and by the number of parts, the best division."""
        count = len(self._costs.layers) - first
        best = [[_NONE] * (self._level.count + 1) for _ in range(count + 1)]
        for length in range(1, count + 1):
            for parts in range(1, self._level.count + 1):
                best[length][parts] = self._best(best, first, first + length, parts)
        return best

    def _best(self, best: Sequence[Sequence[_Found]], first: int, end: int, parts: int) -> _Found:
        found = self._stage(first, end, parts)
        for middle in reversed(range(first + 1, end)):
            handed = 2 * self._costs.layers[middle - 1].activation_bytes / self._level.bandwidth
            least = self._costs.seconds(middle, end) / self._below
            for own in range(1, min(parts - 1, self._most) + 1):
                before = best[middle - first][parts - own]
                if max(before[0], handed, least / own * _ROUNDED) > found[0]:
                    continue  # it cannot be better
                here = self._stage(middle, end, own)
                seconds = max(before[0], handed, here[0])
                if seconds < found[0] or (seconds == found[0] < math.inf and _fewer(before, here, found)):
                    found = seconds, before[1] + here[1]
        return found

    def _stage(self, first: int, end: int, count: int) -> _Found:
        """Layers as one stage on `count` parts."""
        key = first, end, count
        if key not in self._stages:
            self._stages[key] = self._made(*key)
        return self._stages[key]

    def _made(self, first: int, end: int, count: int) -> _Found:
        seconds, stages = self._whole(first, end)
        if count == 1 or not stages:
            return seconds, stages
        if count > self._most or not self._may_repeat(stages):
            return _NONE
        repeated = tuple(Share(stage.first, stage.end, count * stage.replicas) for stage in stages)
        return self._costs.repeated(seconds, first, end, self._level, count), repeated

    def _may_repeat(self, stages: Sequence[Share]) -> bool:
        return all(self._costs.may_repeat(stage.first, stage.end) for stage in stages)


def _fewer(before: _Found, here: _Found, found: _Found) -> bool:
    return len(before[1]) + len(here[1]) < len(found[1])
