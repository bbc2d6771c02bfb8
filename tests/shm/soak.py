"""Random calls, thousands of them, on the same few groups; by hand for as long as one likes:

python -m tests.shm.soak --seconds 600 --ranks 4 --implementation native
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.shm.implementations import Implementation
from tests.shm.program import ANYTHING, SMALL, Menu, draw_on, execute

_BATCHES = 50


def soak(world, implementation: Implementation, seed: int, menu: Menu, calls: int, seconds: float = 0) -> int:
    """Make at least so many calls, and for at least so long; return how many they were."""
    implementation.choose()
    everyone = tuple(range(world.size))
    groups = (everyone, everyone[1:], everyone[:2], everyone[-2:], everyone)
    places = {}
    for n, group_ranks in enumerate(groups):
        group = dist.new_group(list(group_ranks), backend=implementation.backend)
        if world.rank in group_ranks:
            places[n] = implementation.place(group)
    end, made = time.monotonic() + seconds, 0
    for part in itertools.count():
        program = draw_on(seed + part, groups, menu, _BATCHES)
        execute(program, world.rank, places, None)
        made += sum(len(batch) for batch in program.batches)
        more = torch.tensor(made < calls or time.monotonic() < end)
        dist.broadcast(more, 0)
        if not more:
            return made


def run_by_hand(world, implementation: Implementation, seed: int, seconds: float, anything: bool) -> None:
    made = soak(world, implementation, seed, ANYTHING if anything else SMALL, 0, seconds)
    if world.rank == 0:
        print(f"{made} calls on {world.size} ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description="Random calls, checked one by one.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--implementation", type=Implementation, default=Implementation.NATIVE)
    parser.add_argument("--anything", action="store_true", help="tensors of up to several MB too")
    given = parser.parse_args()
    print(f"seed {given.seed}")
    run = ranks(given.ranks, backend="gloo", timeout_s=given.seconds + 120)(run_by_hand)
    run(implementation=given.implementation, seed=given.seed, seconds=given.seconds, anything=given.anything)


if __name__ == "__main__":
    from tests.shm import soak as importable  # so that the ranks find its functions by name

    importable.main()
