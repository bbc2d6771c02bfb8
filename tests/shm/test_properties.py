"""Random programs of calls give what they must, and what Gloo gives.

With `PACELINE_SHM_SEEDS=100:400` in the environment the seeds 100 to 399 are run instead of the first few.
"""

from __future__ import annotations

import hashlib
import os

import torch.distributed as dist

from tests.ranks import ranks
from tests.shm.implementations import Implementation, every_implementation
from tests.shm.program import ANYTHING, draw, execute

_FIRST, _END = (int(part) for part in os.environ.get("PACELINE_SHM_SEEDS", "0:8").split(":"))


def _run(world, implementation):
    implementation.choose()
    for seed in range(_FIRST, _END):
        program = draw(seed, world.size, ANYTHING)
        under_test, reference, made = {}, {}, []
        for n, group_ranks in enumerate(program.groups):
            ours = dist.new_group(list(group_ranks), backend=implementation.backend)
            gloos = dist.new_group(list(group_ranks), backend="gloo")
            if world.rank in group_ranks:
                under_test[n], reference[n] = implementation.place(ours), Implementation.GLOO.place(gloos)
                made += [ours, gloos]
        reductions = execute(program, world.rank, under_test, reference)
        digests = [None] * world.size
        dist.all_gather_object(digests, [hashlib.sha256(one).hexdigest() for one in reductions])
        assert all(one == digests[0] for one in digests), f"seed {seed}: all-reduces differ in their bits between ranks"
        for group in made:
            dist.destroy_process_group(group)


@every_implementation
@ranks(2, backend="gloo")
def test_programs_of_two_ranks(world, implementation):
    _run(world, implementation)


@every_implementation
@ranks(3, backend="gloo")
def test_programs_of_three_ranks(world, implementation):
    _run(world, implementation)


@ranks(3, backend="gloo")
def test_gloo_itself_passes(world):
    _run(world, Implementation.GLOO)
