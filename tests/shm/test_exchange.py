"""Exchanges that are started early and finished late give what the calls of `torch.distributed` do."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from paceline.shm import Exchange
from tests.ranks import ranks
from tests.shm.implementations import Implementation, needs_native
from tests.shm.patience import limit_patience
from tests.shm.values import FLOATS, Spec, Want, packed, reduced

pytestmark = [needs_native, pytest.mark.usefixtures("native_part")]

# Elements of each rank's row: results of 64 KB and more lie in shared memory, and sums are shared from 32 KB on.
COUNTS = (0, 1, 7, 1000, 4096, 8192, 16_384, 16_387, 70_001, 150_000)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8)


def _exchange(world) -> tuple[dist.ProcessGroup, Exchange]:
    Implementation.NATIVE.choose()
    group = dist.new_group(list(range(world.size)), backend="shm")
    exchange = Exchange.of(group)
    assert exchange is not None
    return group, exchange


class _Random:
    """A random exchange: how one rank starts it, and what it must give."""

    def __init__(self, draw: random.Random, rank: int, size: int) -> None:
        self._kind = draw.choice(("all_reduce", "all_reduce_in_place", "reduce_scatter", "all_gather", "all_to_all"))
        self._sizes = [draw.choice(COUNTS) for _ in range(draw.randint(1, 3))]  # of parts whose rows go to the ranks
        rows = size if self._kind in ("reduce_scatter", "all_to_all") else 1
        dtype, seed = draw.choice(DTYPES), draw.randrange(1 << 40)
        self._spec = Spec((rows * sum(self._sizes),), dtype, seed, bits=False)
        self._packed = draw.random() < 0.5
        self._rank, self._size = rank, size

    def start(self, exchange: Exchange):
        x = self._spec.values(self._rank)
        if self._packed:
            x = packed(exchange, x.tensor_split(3))
        if self._kind == "reduce_scatter":
            return exchange.reduce_scatter(x, self._sizes)
        return getattr(exchange, self._kind)(x.view(self._size, -1) if self._kind == "all_to_all" else x)

    def difference(self, got: torch.Tensor) -> str | None:
        every = [self._spec.values(rank) for rank in range(self._size)]
        if self._kind == "all_gather":
            want = Want(torch.stack(every))
        elif self._kind == "all_to_all":
            want = Want(torch.stack([x.view(self._size, -1)[self._rank] for x in every]))
        elif self._kind == "reduce_scatter":
            want = reduced(ReduceOp.SUM, [self._rows(x) for x in every])
        else:
            want = reduced(ReduceOp.SUM, every)
        found = want.difference(got)
        return (
            f"{self._kind} of {self._sizes} of {self._spec.dtype}, packed: {self._packed}: {found}" if found else None
        )

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split([self._size * size for size in self._sizes])
        return torch.cat([part.view(self._size, -1)[self._rank] for part in parts])


def _run_at_random(world) -> None:
    group, exchange = _exchange(world)
    for seed in range(4):
        draw, own = random.Random(seed), random.Random(100 * seed + world.rank)
        under_way = []
        for _ in range(50):
            if len(under_way) < 8 and (not under_way or draw.random() < 0.5):
                one = _Random(draw, world.rank, world.size)
                under_way.append((one, one.start(exchange)))
            else:
                one, started = under_way.pop(draw.randrange(len(under_way)))
                if own.random() < 0.1:
                    time.sleep(own.random() / 100)  # others are then ahead, and reuse their memory
                found = one.difference(started.wait())
                assert not found, f"seed {seed}: {found}"
            if draw.random() < 0.1:  # calls of torch.distributed go on beside them
                x = torch.full((5000,), float(world.rank))
                dist.all_reduce(x, group=group)
                assert torch.equal(x, torch.full_like(x, sum(range(world.size))))
        for one, started in under_way:
            assert not one.difference(started.wait())


@ranks(2, backend="gloo")
def test_programs_of_two_ranks(world):
    _run_at_random(world)


@ranks(3, backend="gloo")
def test_programs_of_three_ranks(world):
    _run_at_random(world)


@ranks(2, backend="gloo")
def test_what_is_packed_becomes_the_sum_itself(world):
    _, exchange = _exchange(world)
    x = packed(exchange, [torch.ones(300_000), torch.zeros(5)])
    assert exchange.all_reduce_in_place(x).wait().data_ptr() == x.data_ptr()
    assert torch.equal(x, torch.cat([torch.full((300_000,), 2.0), torch.zeros(5)]))


@ranks(2, backend="gloo")
def test_inputs_stay_as_they_are(world):
    _, exchange = _exchange(world)
    for x in (torch.ones(100_000), packed(exchange, [torch.ones(100_000)])):
        started = [
            exchange.all_reduce(x),
            exchange.reduce_scatter(x, [20_000, 30_000]),
            exchange.all_gather(x),
            exchange.all_to_all(x.view(2, 50_000)),
        ]
        for one in started:
            one.wait()
        assert torch.equal(x, torch.ones(100_000))


@ranks(2, backend="gloo")
def test_memory_does_not_grow(world):
    _, exchange = _exchange(world)
    kept = []
    for n in range(200):
        x = packed(exchange, [torch.full((250_000,), float(n))])
        kept.append(exchange.all_gather(exchange.all_reduce(x).wait()).wait().data_ptr())
    assert len(set(kept)) < 20


@pytest.mark.parametrize("differ", ["kind", "size", "type"])
@ranks(2, backend="gloo")
def test_programs_that_differ_are_an_error_on_every_rank(world, differ):
    group, exchange = _exchange(world)
    first = world.rank == 0
    shape = (300,) if differ == "size" and first else (200,)
    x = torch.ones(shape, dtype=torch.int32 if differ == "type" and first else torch.float32)
    start = exchange.all_gather if differ == "kind" and first else exchange.all_reduce
    with pytest.raises(dist.DistBackendError, match=rf"(?i)\brank {1 - world.rank}\b"):
        start(x).wait()
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1), group=group)


@ranks(2, backend="gloo")
def test_a_rank_that_does_not_start_is_named(world):
    group, exchange = _exchange(world)
    limit_patience(group, 0.5)
    if world.rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"(?i)\brank 1\b"):
            exchange.all_reduce(torch.ones(4)).wait()
    dist.barrier()
