"""What calls give back: works, their futures, and what they keep alive; groups that come and go."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.shm.implementations import every_implementation
from tests.shm.patience import limit_patience


def _group(world, implementation):
    implementation.choose()
    return dist.new_group(list(range(world.size)), backend=implementation.backend)


@every_implementation
@ranks(2, backend="gloo")
def test_futures_hold_the_results(world, implementation):
    group = _group(world, implementation)
    for size in (1, 2_000_000):
        x = torch.full((size,), world.rank + 1.0)
        halved = dist.all_reduce(x, group=group, async_op=True).get_future().then(lambda f: f.value()[0] / 2)
        assert torch.equal(halved.wait(), torch.full((size,), 1.5))
        assert torch.equal(x, torch.full((size,), 3.0))
    x = torch.full((3,), float(world.rank))
    assert dist.broadcast(x, 1, group, async_op=True).get_future().wait()[0].tolist() == [1.0] * 3


@every_implementation
@ranks(2, backend="gloo")
def test_works_say_when_they_have_ended(world, implementation):
    group = _group(world, implementation)
    if world.rank == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        assert not work.is_completed()
        dist.barrier()
    else:
        dist.barrier()
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    while not work.is_completed():  # without anybody waiting for it
        time.sleep(0.001)
    assert work.is_success()
    assert work.wait() and work.wait()


@every_implementation
@ranks(2, backend="gloo")
def test_an_impatient_wait_is_an_error(world, implementation):
    group = _group(world, implementation)
    if world.rank == 0:
        with pytest.raises(RuntimeError):  # PyTorch's own, as with Gloo
            dist.all_reduce(torch.ones(4), group=group, async_op=True).wait(timedelta(seconds=0.2))
    dist.barrier()


@every_implementation
@ranks(2, backend="gloo")
def test_a_rank_that_does_not_arrive_is_named(world, implementation):
    group = _group(world, implementation)
    limit_patience(group, 0.5)
    if world.rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"[Rr]ank 1\b"):
            dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()
    group = _group(world, implementation)
    limit_patience(group, 0.5)
    if world.rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"[Rr]ank 1\b"):
            dist.recv(torch.ones(4), 1, group)
    dist.barrier()


@every_implementation
@ranks(2, backend="gloo")
def test_tensors_live_as_long_as_calls_need_them(world, implementation):
    group, other = _group(world, implementation), 1 - world.rank
    sends = [dist.isend(torch.full((300_000,), float(n)), other, group, tag=n) for n in range(4)]
    works = [dist.all_reduce(torch.ones(300_000), group=group, async_op=True) for _ in range(4)]
    gc.collect()
    junk = [torch.full((300_000,), -1.0) for _ in range(8)]
    for n in reversed(range(4)):
        received = torch.zeros(300_000)
        dist.recv(received, other, group, tag=n)
        assert torch.equal(received, torch.full((300_000,), float(n)))
    for work in sends + works:
        work.wait()
    assert all(torch.equal(one, junk[0]) for one in junk)


@every_implementation
@ranks(2, backend="gloo")
def test_works_that_nobody_keeps_happen(world, implementation):
    group = _group(world, implementation)
    x = torch.ones(1000)
    for _ in range(5):
        dist.all_reduce(x, group=group, async_op=True)
    dist.all_reduce(torch.ones(1), group=group)  # after them
    assert torch.equal(x, torch.full((1000,), 32.0))


@every_implementation
@ranks(3, backend="gloo")
def test_nobody_passes_a_barrier_early(world, implementation):
    group, store = _group(world, implementation), dist.distributed_c10d._get_default_store()
    for n in range(20):
        if world.rank == n % 3:
            time.sleep(0.005)
        store.set(f"arrived {n} {world.rank}", "")
        dist.barrier(group)
        assert store.check([f"arrived {n} {rank}" for rank in range(3)])


def _held() -> tuple[int, int, int]:
    """Return how many files, mappings of shared memory and threads this process has."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = sum("memfd:" in line or "/dev/shm" in line or " rw-s " in line for line in maps)
    return len(list(Path("/proc/self/fd").iterdir())), shared, len(list(Path("/proc/self/task").iterdir()))


@every_implementation
@ranks(2, backend="gloo")
def test_destroyed_groups_give_everything_back(world, implementation):
    def use():
        group = _group(world, implementation)
        work = dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
        dist.send(torch.ones(10), 1, group) if world.rank == 0 else dist.recv(torch.ones(10), 0, group)
        work.wait()
        dist.barrier()
        dist.destroy_process_group(group)

    for _ in range(3):
        use()
    gc.collect()
    before = _held()
    for _ in range(10):
        use()
    gc.collect()
    after = _held()
    # One each that stayed would make ten; a single one may be about to go.
    assert all(now < then + 5 for now, then in zip(after, before, strict=True)), f"{before} before, {after} after"


@every_implementation
@ranks(2, backend="gloo")
def test_a_group_destroyed_with_calls_under_way_leaves_nobody_waiting(world, implementation):
    group = _group(world, implementation)
    x = torch.ones(300_000)
    if world.rank == 0:
        dist.all_reduce(x, group=group, async_op=True)
    else:
        time.sleep(0.1)
        try:
            dist.all_reduce(x, group=group)
            assert torch.equal(x, torch.full_like(x, 2))
        except dist.DistBackendError as error:
            assert "rank 0" in str(error)
    dist.destroy_process_group(group)
    dist.barrier()


@every_implementation
@ranks(2, backend="gloo")
def test_messages_end_with_an_error_though_nobody_waits_for_them(world, implementation):
    group = _group(world, implementation)
    if world.rank == 0:
        dist.barrier()
        dist.destroy_process_group(group)
    else:
        received = dist.irecv(torch.ones(4), 0, group)
        dist.barrier()
        while not received.is_completed():
            time.sleep(0.01)
        with pytest.raises(dist.DistBackendError, match=r"(?i)rank 0\b"):
            received.wait()
    dist.barrier()
