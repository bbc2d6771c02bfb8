"""Steps that are found by sums over targets and over chains are those that all sums over both give."""

from __future__ import annotations

import random

import pytest

from paceline.exchange.membership.balance import Loads, Step, copy, shift
from paceline.exchange.membership.ring import Chain, preferences


def brute(chains: list[tuple[int, Chain]], loads: Loads) -> Step | None:
    steps = [
        Step(loads.growth(chain, after), shard, target, after)
        for shard, chain in chains
        for target in preferences(loads.servers, shard)
        if target not in chain
        for at in range(len(chain))
        if (after := (*chain[:at], *chain[at + 1 :], target))
    ]
    best = min(steps, key=lambda step: step.growth, default=None)
    return best if best is not None and best.growth < 0 else None


@pytest.mark.parametrize("seed", range(20))
def test_the_best_step_is_the_best_of_all(seed: int) -> None:
    draws = random.Random(seed)
    servers = range(draws.randint(1, 6))
    machines = {server: f"m{server % 3}" for server in servers} if seed % 2 else None
    length = draws.randint(1, min(3, len(servers)))
    chains = [(shard, tuple(draws.sample(servers, length))) for shard in range(12)]
    staying = [server for server in servers if draws.random() < 0.8]
    loads = Loads((chain for _, chain in chains), staying, machines)
    assert shift(chains, loads) == brute(chains, loads)
    for shard, chain in [*chains, (0, ())]:
        grown = [loads.growth(chain, (*chain, one)) for one in staying if one not in chain]
        step = copy(shard, chain, loads)
        assert (step and step.growth) == min(grown, default=None)
