"""Which copy to move so that servers have equally much to do.

A copy costs its server every update; a tail answers workers' reads besides, a head takes their updates and hands them
on. The imbalance is the weighted sum over servers of the squares of these three counts. A step is taken where it makes
the sum smaller, so steps come to an end. A step adds a copy before it drops one: where all servers hold all shards,
heads stay where they are, however uneven.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from paceline.exchange.membership.ring import Chain, preferences

_WEIGHTS: Final = {"copies": 1, "heads": 3, "tails": 2}
"""With these all three counts end near even, after whatever has happened."""

_APART: Final = 1 << 20
"""That copies are on different machines, where there are several, goes before how even the loads are."""


class Loads:
    """How many copies, heads and tails each server has.

    Args:
        chains: all of them.
        servers: those that count; others are about to leave, and what they have does not matter.
        machines: where servers are; those of which that is not known or empty are each for themselves.
    """

    def __init__(
        self, chains: Iterable[Chain], servers: Collection[int], machines: Mapping[int, str] | None = None
    ) -> None:
        self.servers = tuple(sorted(servers))
        self._places = frozenset(servers)
        self._machines = machines if machines and len(set(machines.values())) > 1 else None
        self._counts: dict[tuple[str, int], int] = defaultdict(int)
        for chain in chains:
            self.replace((), chain)

    def replace(self, before: Chain, after: Chain) -> None:
        """A chain becomes another."""
        for what, step in self._steps(before, after).items():
            self._counts[what] += step

    def growth(self, before: Chain, after: Chain) -> int:
        """Return by how much the imbalance would grow; it shrinks where this is negative."""
        grown = sum(self._grown(*what, step) for what, step in self._steps(before, after).items() if step)
        return grown + self.apart(after) - self.apart(before)

    def cost_of_target(self, target: int, *, head: bool = False) -> int:
        """Return by how much the imbalance grows at a server that becomes the tail of a chain, and its head."""
        cost = self._grown("copies", target, 1) + self._grown("tails", target, 1)
        return cost + self._grown("heads", target, 1) if head else cost

    def saved_by_dropping(self, chain: Chain, at: int) -> int:
        """Return by how much it grows elsewhere, where a chain gets another tail and loses one of its servers."""
        grown = self._grown("copies", chain[at], -1) + self._grown("tails", chain[-1], -1)
        if at == 0:
            grown += self._grown("heads", chain[0], -1)
            grown += self._grown("heads", chain[1], 1) if len(chain) > 1 else 0
        return grown

    def apart(self, chain: Chain) -> int:
        """Return what it counts that copies are on one machine; 0 where there are not several."""
        return 0 if self._machines is None else _APART * _together(chain, self._machines)

    def _grown(self, what: str, server: int, step: int) -> int:
        if server not in self._places:
            return 0
        return _WEIGHTS[what] * step * (2 * self._counts[what, server] + step)

    def _steps(self, before: Chain, after: Chain) -> dict[tuple[str, int], int]:
        steps: dict[tuple[str, int], int] = defaultdict(int)
        for chain, step in ((before, -1), (after, 1)):
            if not chain:
                continue
            for server in chain:
                steps["copies", server] += step
            steps["heads", chain[0]] += step
            steps["tails", chain[-1]] += step
        for what in [what for what in steps if what[1] not in self._places]:
            del steps[what]
        return steps


def _together(chain: Chain, machines: Mapping[int, str]) -> int:
    """Return how many copies are where another one is."""
    return len(chain) - len({machines.get(server) or server for server in chain})


def shortened(chain: Chain, length: int, loads: Loads) -> Chain:
    """Return a chain without the servers that it can best do without; `loads` learns of it."""
    while len(chain) > length:
        without = [chain[:at] + chain[at + 1 :] for at in range(len(chain))]
        best = min(without, key=lambda shorter: loads.growth(chain, shorter))
        loads.replace(chain, best)
        chain = best
    return chain


class Step(NamedTuple):
    """A shard gets a copy at `target`, and may then do without another: its chain becomes `after`."""

    growth: int
    shard: int
    target: int
    after: Chain


def copy(shard: int, chain: Chain, loads: Loads, without: Collection[int] = ()) -> Step | None:
    """Return the best further copy of a shard, None where all servers have it. without: those that cannot have one."""
    free = [target for target in preferences(loads.servers, shard) if target not in chain and target not in without]
    if not free:
        return None
    target = min(free, key=lambda one: loads.cost_of_target(one, head=not chain) + loads.apart((*chain, one)))
    after = (*chain, target)
    return Step(loads.growth(chain, after), shard, target, after)


def shift(
    chains: Sequence[tuple[int, Chain]], loads: Loads, allowed: Callable[[Chain, int], bool] = lambda *_: True
) -> Step | None:
    """Return the step that evens the loads most, or None where none does.

    What a step costs at its target does not depend on the chain, and what it saves there not on the target: a chain
    whose best step cannot be the best of all is passed over.

    Args:
        chains: those that may change, with their shards.
        loads: of all chains.
        allowed: whether a chain may get a copy at a server now.
    """
    best: Step | None = None
    costs = {target: loads.cost_of_target(target) for target in loads.servers}
    alone = {target: loads.cost_of_target(target, head=True) for target in loads.servers}
    for shard, chain in chains:
        of_target = alone if len(chain) == 1 else costs
        found = [loads.saved_by_dropping(chain, at) for at in range(len(chain))]
        least = min(of_target.values(), default=0) + min(found) - loads.apart(chain)
        if least >= (best.growth if best else 0):
            continue
        for target in preferences(loads.servers, shard):
            if target in chain or not allowed(chain, target):
                continue
            for at, saved in enumerate(found):
                growth = of_target[target] + saved
                after = (*chain[:at], *chain[at + 1 :], target)
                growth += loads.apart(after) - loads.apart(chain)
                if growth < (best.growth if best else 0):
                    best = Step(growth, shard, target, after)
    return best
