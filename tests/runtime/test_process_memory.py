"""What ranks share counts once in total; what is a rank's own counts in full, at its peak too."""

from __future__ import annotations

import mmap
import os

import pytest
import torch
import torch.distributed as dist

from paceline.runtime.job.world import World
from paceline.runtime.process_memory import can_take_memory, forget_peak, give_back, memory_bytes, peak_bytes
from tests.ranks import ranks

MIB = 1 << 20
SLACK = 8 * MIB  # code that is loaded, and what the interpreter and glibc do meanwhile

pytestmark = pytest.mark.skipif(not can_take_memory(), reason="this system does not tell")


def touched(memory: mmap.mmap, count: int) -> None:
    for page in range(0, count, mmap.PAGESIZE):
        memory[page] = 1


@ranks(2)
def test_a_page_of_both_ranks_is_half_of_each(world: World) -> None:
    where: list[object] = [None]
    if world.rank == 0:
        descriptor = os.memfd_create("shared")
        os.ftruncate(descriptor, 64 * MIB)
        where = [f"/proc/{os.getpid()}/fd/{descriptor}"]
    dist.broadcast_object_list(where)
    if world.rank == 1:
        descriptor = os.open(str(where[0]), os.O_RDWR)
    give_back()
    before = memory_bytes()
    forget_peak()
    with mmap.mmap(descriptor, 64 * MIB) as memory:
        touched(memory, 64 * MIB)
        dist.barrier()
        now, peak = memory_bytes(), peak_bytes()
        dist.barrier()
    assert now - before == pytest.approx(32 * MIB, abs=SLACK)
    assert peak - before == pytest.approx(32 * MIB, abs=SLACK)


@ranks(1)
def test_own_memory_counts_at_its_peak() -> None:
    give_back()
    before = memory_bytes()
    forget_peak()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    assert memory_bytes() - before == pytest.approx(64 * MIB, abs=SLACK)
    del block
    assert memory_bytes() - before == pytest.approx(0, abs=SLACK)
    assert peak_bytes() - before == pytest.approx(64 * MIB, abs=SLACK)
    forget_peak()
    assert peak_bytes() - before == pytest.approx(0, abs=SLACK)
