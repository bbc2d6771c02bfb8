"""Real processes: every number of ranks into every other, a late rank, a failing one and one that is gone."""

import resource

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from paceline.errors import CheckpointError
from paceline.placement.placements import Shard
from paceline.train.checkpoint import Checkpointer, latest
from tests.ranks import ranks
from tests.train.checkpoint.sharded import Sharded, adamw, assert_same, everything, placed, replicated, split, train

LAYOUTS = {
    1: ("serial", split()),
    2: ("dp=2", replicated),
    3: ("fsdp=3", split(0)),
    4: ("dp=2,tp=2", placed({}, {"qkv.weight": Shard(0, 3), "": Shard(1)})),
}


def save_at(rank, world, directory):
    module = Sharded(*LAYOUTS[world.size], rank=rank)
    optimizer = adamw(module)
    train(module, optimizer, range(2))
    Checkpointer(directory / str(world.size), module, optimizer).save(2, {"size": world.size}, block=True)
    whole = everything(module, optimizer)
    if rank == 0:
        save_file(whole, directory / f"{world.size}.safetensors")


def load_at(rank, world, directory):
    for source in LAYOUTS:
        module = Sharded(*LAYOUTS[world.size], rank=rank, seed=9)
        optimizer = adamw(module)
        assert Checkpointer(directory / str(source), module, optimizer).restore() == {"size": source}
        assert_same(everything(module, optimizer), load_file(directory / f"{source}.safetensors"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of every number of ranks, and what each holds."""
    directory = tmp_path_factory.mktemp("saved")
    for size in LAYOUTS:
        ranks(size)(save_at)(directory=directory)
    return directory


@pytest.mark.parametrize("size", LAYOUTS)
def test_every_number_of_ranks_loads_from_every_other(saved, size):
    ranks(size)(load_at)(directory=saved)


def start(directory, rank):
    """Two ranks, trained for a step and saved."""
    module = Sharded("fsdp=2", split(0), rank=rank)
    optimizer = adamw(module)
    train(module, optimizer, range(1))
    checkpoints = Checkpointer(directory / "saves", module, optimizer)
    checkpoints.save(1, {"step": 1}, block=True)
    return module, optimizer, checkpoints


def names(directory):
    dist.barrier()
    found = sorted(path.name for path in (directory / "saves").iterdir())
    dist.barrier()
    return found


@ranks(2)
def test_a_late_rank_holds_up_nobody(rank, tmp_path):
    _, _, checkpoints = start(tmp_path, rank)
    if rank == 0:
        checkpoints.save(2, {})
    dist.barrier()  # rank 0 has come back
    assert latest(tmp_path / "saves").name == "step-00000001"
    dist.barrier()
    if rank == 1:
        checkpoints.save(2, {})
    checkpoints.wait()
    assert latest(tmp_path / "saves").name == "step-00000002"


@ranks(2)
def test_all_are_told_when_one_cannot_write(rank, tmp_path):
    module, optimizer, checkpoints = start(tmp_path, rank)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for victim in (0, 1):
        if rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # bytes a file may have
        checkpoints.save(2, {})
        with pytest.raises(CheckpointError, match="step 2 was not saved"):
            checkpoints.save(3, {})
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert names(tmp_path) == ["step-00000001"]
    train(module, optimizer, range(1, 2))
    wanted = everything(module, optimizer)
    checkpoints.save(4, {"step": 4}, block=True)
    train(module, optimizer, range(2, 3))
    assert checkpoints.restore() == {"step": 4}
    assert_same(everything(module, optimizer), wanted)


@ranks(2)
def test_all_refuse_what_one_finds_broken(rank, tmp_path):
    module, optimizer, checkpoints = start(tmp_path, rank)
    wanted = everything(module, optimizer)
    train(module, optimizer, range(1, 2))
    checkpoints.save(2, {"step": 2}, block=True)
    broken = tmp_path / "saves" / "step-00000002"
    if rank == 0:  # only rank 1 checks and needs this file
        data = broken / "rank-00001.safetensors"
        data.write_bytes(data.read_bytes()[:-1])
    dist.barrier()
    with pytest.raises(CheckpointError, match="step-00000002"):
        checkpoints.restore(broken)
    assert checkpoints.newest().name == "step-00000001"
    assert checkpoints.restore() == {"step": 1}
    assert_same(everything(module, optimizer), wanted)


@ranks(2)
def test_a_rank_that_never_comes_is_named(rank, tmp_path):
    module, optimizer, _ = start(tmp_path, rank)
    checkpoints = Checkpointer(tmp_path / "saves", module, optimizer, timeout=1.0)
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"step 2 was not saved: rank 1 did not finish writing within 1 s"):
            checkpoints.save(2, {}, block=True)
    assert names(tmp_path) == ["step-00000001"]


def test_ranks_elsewhere_need_a_process_group(tmp_path):
    module = Sharded("dp=2", replicated, rank=0)
    with pytest.raises(CheckpointError, match=r"holds 1 of 2 ranks.*torchrun"):
        Checkpointer(tmp_path, module, adamw(module))
