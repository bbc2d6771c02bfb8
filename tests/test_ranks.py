"""The decorator that other tests rely on."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

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


@ranks(2, timeout_s=0.05)
def _waits_for_ever(rank: int, directory: Path):
    (directory / str(rank)).touch()
    time.sleep(1000)


@ranks(2)
def _dies(rank: int):
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


@pytest.mark.parametrize(
    ("test", "words"),
    [
        (_raises_while_others_wait, ["rank 1 of 3 failed", "ValueError: the cause"]),
        (_dies, ["rank 1 of 2 failed", "ended with -9"]),
    ],
)
def test_a_failure_is_told(test, words: list[str]):
    with pytest.raises(pytest.fail.Exception) as failure:
        test()
    for word in words:
        assert word in str(failure.value)


def test_ranks_that_take_too_long_say_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    began = time.monotonic()

    def monotonic() -> float:
        """Time passes once both are where they stay."""
        return time.monotonic() + 1 if all((tmp_path / name).exists() for name in "01") else began

    monkeypatch.setattr("tests.ranks.time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    with pytest.raises(pytest.fail.Exception) as failure:
        _waits_for_ever(directory=tmp_path)
    message = str(failure.value)
    assert "did not end within 0.05 s" in message
    for rank in range(2):
        assert f"rank {rank} is at" in message
    assert message.count("in _waits_for_ever") == 2


@ranks(1)
def test_examples_of_properties_have_no_deadline_on_ranks_either():
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
