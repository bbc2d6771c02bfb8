"""Each peer runs on the backend that its name says."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from paceline.bench import contestants
from paceline.bench.contestants import ON_SHM, OPPONENT, OURS, Contestant, backend_of, set_up
from paceline.bench.groups import GLOO, SHM, Groups
from paceline.bench.workloads import Model, Scale, workload
from paceline.runtime.job.world import World
from tests.ranks import ranks


def test_a_peer_has_the_same_opponent_on_either_backend() -> None:
    for on_shm, on_gloo in ON_SHM.items():
        assert OPPONENT[on_shm] is OPPONENT[on_gloo]
        assert (backend_of(on_shm, ours="?"), backend_of(on_gloo, ours="?")) == (SHM, GLOO)
    assert {backend_of(who, ours="?") for who in OURS} == {"?"}


@ranks(2)
def test_a_group_on_each_backend(world: World) -> None:
    groups = Groups()
    for backend in (SHM, GLOO):
        group = groups.on(backend)
        assert dist.get_backend(group) == backend and group.size() == world.size
        assert groups.on(backend) is group
    assert groups.on(dist.get_backend()) is dist.group.WORLD


@ranks(2)
def test_accelerate_trains_on_the_group_that_it_is_given(world: World) -> None:
    pytest.importorskip("accelerate")
    made: list[nn.parallel.DistributedDataParallel] = []

    class Noted(nn.parallel.DistributedDataParallel):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # passed on as they came
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(world.size))  # Accelerate asks for an address otherwise
        patch.setattr(contestants.nn.parallel, "DistributedDataParallel", Noted)
        groups, tiny = Groups(), workload(Model.GPT, Scale.TINY)
        for who, backend in ((Contestant.ACCELERATE, GLOO), (Contestant.ACCELERATE_SHM, SHM)):
            set_up(who, tiny, world, groups).step()
            assert made[-1].process_group is groups.on(backend)
