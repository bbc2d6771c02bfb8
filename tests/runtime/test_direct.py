"""Direct exchanges equal the collectives that they stand for, in any order, several under way at once."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runtime.direct import AllGather, AllReduce, ReduceScatter, can_exchange, let_compute_go_first
from tests.ranks import ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


@ranks(3, backend="gloo")
def test_each_equals_its_collective(world):
    group, index, parts = dist.group.WORLD, world.rank, world.size
    gather, scatter, reduce = (kind(group, index) for kind in (AllGather, ReduceScatter, AllReduce))
    for dtype in DTYPES:
        for size in (0, 1, 7, 1000):
            every = [torch.arange(size * parts).view(parts, size).add(rank).to(dtype) for rank in range(parts)]
            mine = every[index]
            assert torch.equal(gather(mine[0]).wait(), torch.stack([x[0] for x in every]))
            summed = every[0] + every[1] + every[2]  # in the order of ranks
            assert torch.equal(scatter(mine).wait(), summed[index])
            assert torch.equal(reduce(mine.view(-1)).wait().view(parts, size), summed)


@ranks(2, backend="gloo")
def test_what_is_sent_may_be_strided(world):
    group = dist.group.WORLD
    x = torch.arange(12.0).view(3, 4).t() + world.rank
    assert torch.equal(ReduceScatter(group, world.rank)(x[:2]).wait(), 2 * (x[world.rank] - world.rank) + 1)
    assert torch.equal(AllGather(group, world.rank)(x[:, 0]).wait()[1 - world.rank], x[:, 0] + 1 - 2 * world.rank)


def _exchange_at_random(world, plan):
    """Start exchanges in one order and wait in another; among them collectives of Gloo's own on the same group."""
    group, index, parts = dist.group.WORLD, world.rank, world.size
    kinds = [kind(group, index) for kind in (AllGather, ReduceScatter, AllReduce)]
    started, expected = [], []
    for kind, size, _ in plan:
        every = [torch.full((parts, size), float(rank + 1)) + torch.arange(size) for rank in range(parts)]
        if kind == 3:
            dist.all_reduce(every[index])
            continue
        sent = every[index][0] if kind != 1 else every[index]
        results = [torch.stack([x[0] for x in every]), sum(every)[index], sum(x[0] for x in every)]
        started.append(kinds[kind](sent))
        expected.append(results[kind])
    late = sorted(range(len(started)), key=lambda i: [p for p in plan if p[0] != 3][i][2])
    for i in late:
        assert torch.equal(started[i].wait(), expected[i])


@ranks(3, backend="gloo")
def test_many_under_way_at_once(world):
    @settings(max_examples=25, derandomize=True, database=None)
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(0, 9)), max_size=12))
    def check(plan):
        _exchange_at_random(world, plan)

    check()


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_only_tensors_on_the_cpu(device):
    assert not can_exchange(None, torch.device("cpu"))
    assert not can_exchange(None, torch.device(device))


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
@ranks(2, backend="gloo")
def test_threads_of_gloo_do_not_interrupt_compute(world):
    for _ in range(50):  # a thread has its name once it has run, which on a busy machine may be later
        let_compute_go_first()
        tasks = [task for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()]
        if tasks and all(os.sched_getscheduler(int(task.name)) == os.SCHED_BATCH for task in tasks):
            break
        time.sleep(0.1)
    assert tasks and all(os.sched_getscheduler(int(task.name)) == os.SCHED_BATCH for task in tasks)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER  # the thread that computes
