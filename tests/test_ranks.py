"""The decorator that other tests rely on."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.plan import Mesh
from tests.ranks import ranks


@ranks(mesh="dp=2,fsdp=2")
def test_ranks_meet_and_know_their_place(world, rank, mesh):
    assert (world.rank, world.size) == (rank, 4)
    assert mesh == Mesh.parse("dp=2,fsdp=2")
    assert torch.get_num_threads() == 1
    numbers = torch.tensor([float(rank)])
    dist.all_reduce(numbers)
    assert numbers.item() == 6


@pytest.mark.parametrize("text", ["a", "b"])
@ranks(2)
def test_fixtures_and_parameters_are_passed_on(rank: int, tmp_path: Path, text: str):
    (tmp_path / str(rank)).write_text(text)
    dist.barrier()
    assert [(tmp_path / name).read_text() for name in "01"] == [text, text]


@ranks(1)
def test_one_rank_needs_no_group(world):
    assert world.size == 1
    assert not dist.is_initialized()


@ranks(3)
def _raises_while_others_wait(rank: int):
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


@ranks(2, timeout_s=3)
def _waits_for_ever(rank: int):
    if rank == 0:
        time.sleep(1000)
    dist.barrier()


@ranks(2)
def _dies(rank: int):
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


@pytest.mark.parametrize(
    ("test", "words"),
    [
        (_raises_while_others_wait, ["rank 1 of 3 failed", "ValueError: the cause"]),
        (_waits_for_ever, ["did not end within 3 s", "rank 0 is at", "rank 1 is at", "_waits_for_ever", "barrier"]),
        (_dies, ["rank 1 of 2 failed", "ended with -9"]),
    ],
)
def test_a_failure_is_told(test, words: list[str]):
    with pytest.raises(pytest.fail.Exception) as failure:
        test()
    for word in words:
        assert word in str(failure.value)
