"""The group without native code: calls, messages out of order, and ranks that disagree.

What collectives give is in test_properties.py; here each is compared with Gloo once.
"""

from __future__ import annotations

import copy
import functools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline.shm.portable import PortableGroup
from paceline.shm.portable.reduce import Reduction
from tests.ranks import ranks
from tests.shm.patience import limit_patience

OPS = [getattr(dist.ReduceOp, name) for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")]
LARGE = 600_003  # in float32 more than one round, and more than a ring of messages holds


def portable(ranks: list[int] | None = None) -> Any:
    """Return a new group beside that of Gloo."""
    if "PORTABLE" not in dist.Backend._plugins:
        dist.Backend.register_backend(
            "portable",
            lambda o, _: PortableGroup(o.store, o.group_rank, o.group_size, o.timeout, o.global_ranks_in_group),
            extended_api=True,
            devices=["cpu"],
        )
    return dist.new_group(ranks, backend="portable", timeout=timedelta(seconds=60))


def alone(store: dist.Store) -> PortableGroup:
    return PortableGroup(store, 0, 1, timedelta(seconds=10), [0])


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) * (rank + 2) % 7 + 1).to(dtype)


# --- the same as Gloo


@ranks(3)
def test_collectives_give_what_gloo_gives(rank):
    group = portable()
    for shape in ((5, 3), (), (0,)):
        _both(group, dist.all_reduce, numbers(rank, *shape))
    for dtype in (torch.bfloat16, torch.float64, torch.uint8):
        _both(group, dist.all_reduce, numbers(rank, 5, 3, dtype=dtype))
    for op in OPS:
        _both(group, functools.partial(dist.all_reduce, op=op), numbers(rank, 5, 3, dtype=torch.int64))
    x = numbers(rank, LARGE)
    _both(group, dist.all_reduce, x)
    _both(group, lambda x, **on: dist.broadcast(x, 2, **on), x)
    _both(group, lambda x, **on: dist.all_gather_into_tensor(x, numbers(rank, 7, 5), **on), torch.zeros(21, 5))
    _both(
        group, lambda x, **on: dist.reduce_scatter_tensor(x, numbers(rank, 3, 200_001), **on), torch.zeros(1, 200_001)
    )
    _both(group, lambda x, **on: dist.all_gather(list(x), numbers(rank, 600_001), **on), torch.zeros(3, 600_001))
    _both(group, lambda x, **on: dist.all_to_all_single(x, numbers(rank, 3, 200_001), **on), torch.zeros(3, 200_001))
    parts = [numbers(other + rank, 4) for other in range(3)]
    _both(group, lambda x, **on: dist.reduce_scatter(x, parts, **on), torch.zeros(4))
    _both(group, lambda x, **on: dist.scatter(x, parts if rank == 1 else None, 1, **on), torch.zeros(4))
    _both(
        group, lambda x, **on: dist.gather(numbers(rank, 4), list(x) if rank == 1 else None, 1, **on), torch.zeros(3, 4)
    )
    rows = [[0, 2, 1], [3, 0, 1], [0, 0, 0]]
    takes = [rows[other][rank] for other in range(3)]
    given = numbers(rank, sum(rows[rank]), 5)
    _both(
        group,
        lambda x, **on: dist.all_to_all_single(x, given, takes, rows[rank], **on),
        torch.zeros(sum(takes), 5),
    )
    dist.reduce(x, 1, group=group)
    assert torch.equal(x, sum(numbers(r, LARGE) for r in range(3)) if rank == 1 else numbers(rank, LARGE))


def _both(group: Any, call: Any, x: torch.Tensor) -> None:
    expected, got, later = x.clone(), x.clone(), x.clone()
    call(expected)
    call(got, group=group)
    work = call(later, group=group, async_op=True)
    work.wait()
    assert work.is_completed() and work.is_success()
    assert torch.equal(got, expected) and torch.equal(later, expected), (got, expected)


@ranks(2)
def test_averages_booleans_and_tensors_in_another_order(rank):
    group = portable()
    x = torch.tensor([1.0, 2.0]) * (rank + 1)
    dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
    assert x.tolist() == [1.5, 3.0]
    b = torch.tensor([rank == 0, True, False])
    dist.all_reduce(b, group=group)
    assert b.tolist() == [True, True, False]
    whole = torch.full((4, 6), float(rank + 1))
    dist.all_reduce(whole.t()[::2], group=group)
    assert torch.equal(whole, torch.tensor([3.0, rank + 1.0] * 3).expand(4, 6))
    with torch.inference_mode():
        y = torch.zeros(3, 2).t()
    dist.all_gather_into_tensor(y, torch.full((3,), float(rank)), group=group, async_op=True).wait()
    assert y.tolist() == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]


@ranks(2)
def test_ddp_and_fsdp_train_on_it(rank):
    group = portable()
    torch.manual_seed(1)
    serial = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    sharded = fully_shard(copy.deepcopy(serial), mesh=DeviceMesh.from_group(group, "cpu"))
    mine = copy.deepcopy(serial)
    with torch.no_grad():
        mine[0].bias += rank  # DDP gives all ranks what the first one has
    parallel = DistributedDataParallel(mine, process_group=group, bucket_cap_mb=1e-5)
    whole = torch.cat([numbers(0, 6, 4), numbers(1, 6, 4)])
    for model, x in ((serial, whole), (sharded, numbers(rank, 6, 4)), (parallel, numbers(rank, 6, 4))):
        model(x).square().mean().backward()
    for one, other, third in zip(serial.parameters(), sharded.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad)
        torch.testing.assert_close(third.grad, one.grad)


@ranks(2)
def test_a_callback_may_wait_for_a_collective(rank):
    group = portable()
    x, y = torch.ones(2), torch.ones(2)

    def again(_: Any) -> torch.Tensor:
        return dist.all_reduce(y, group=group, async_op=True).get_future().wait()[0]

    assert dist.all_reduce(x, group=group, async_op=True).get_future().then(again).wait().tolist() == [2, 2]


# --- messages


@ranks(2)
def test_messages_in_any_order(rank):
    group = portable()
    sizes = [3, 0, LARGE, 1]
    if rank == 0:
        works = [dist.isend(numbers(tag, n), 1, group, tag) for tag, n in enumerate(sizes)]
    else:
        got = [torch.zeros(n) for n in sizes]
        works = [dist.irecv(got[tag], 0, group, tag) for tag in (3, 1, 2, 0)]
    for work in works:
        work.wait()
    assert rank == 0 or all(torch.equal(got[tag], numbers(tag, n)) for tag, n in enumerate(sizes))


@ranks(2)
def test_messages_of_one_tag_keep_their_order(rank):
    group = portable()
    if rank == 0:
        for n in range(50):
            dist.send(torch.tensor([n]), 1, group)
        dist.send(torch.zeros(1), 1, group, tag=9)
        return
    dist.recv(torch.ones(1), 0, group, tag=9)  # by now the others lie in buffers
    got = [torch.zeros(1, dtype=torch.int64) for _ in range(50)]
    for one in got:
        dist.recv(one, 0, group)
    assert [int(one) for one in got] == list(range(50))


@ranks(3)
def test_a_message_from_anybody_says_from_whom(rank):
    group = portable()
    if rank:
        dist.send(torch.full((2,), float(rank)), 0, group)
        return
    for _ in range(2):
        x = torch.zeros(2)
        assert dist.recv(x, None, group) == int(x[0])


@ranks(2)
def test_large_messages_both_ways_at_once(rank):
    group = portable()
    x, y = numbers(rank, LARGE), torch.zeros(LARGE)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 1 - rank, group), dist.P2POp(dist.irecv, y, 1 - rank, group)]
    ):
        work.wait()
    assert torch.equal(y, numbers(1 - rank, LARGE))


@ranks(2)
def test_a_message_of_another_size_is_an_error(rank):
    group = portable()
    if rank == 0:
        dist.send(torch.zeros(4), 1, group)
        return
    with pytest.raises(dist.DistBackendError, match=r"recv\(tag 0, 8 bytes\): rank 0 \(pid \d+\) sent 16 bytes"):
        dist.recv(torch.zeros(2), 0, group)


@ranks(2)
def test_what_was_sent_before_leaving_arrives(rank):
    group = portable()
    if rank == 0:
        dist.send(torch.ones(3), 1, group)
        dist.destroy_process_group(group)
        dist.barrier()
        return
    dist.barrier()
    x = torch.zeros(3)
    dist.recv(x, 0, group)
    assert x.tolist() == [1, 1, 1]
    with pytest.raises(dist.DistBackendError, match=r"recv\(tag 0, 12 bytes\): rank 0 \(pid \d+\) has left the group"):
        dist.recv(x, 0, group)


# --- what goes wrong


@ranks(3)
def test_different_calls_are_an_error_on_all_ranks(rank):
    calls = [
        lambda group: dist.all_reduce(torch.ones(2), group=group),
        lambda group: dist.broadcast(torch.ones(2), 0, group=group),
        lambda group: dist.all_reduce(torch.ones(2, dtype=torch.int32), group=group),
    ]
    expected = "all_reduce, SUM, 2 x float32; .* broadcast from 0, 2 x float32; .* all_reduce, SUM, 2 x int32"
    group = portable()
    with pytest.raises(dist.DistBackendError, match=expected):
        calls[rank](group)
    with pytest.raises(dist.DistBackendError, match=r"the group is broken .* different collectives"):
        dist.barrier(group)


@ranks(2)
def test_uneven_parts_that_do_not_fit_are_an_error_on_both(rank):
    group = portable()
    with pytest.raises(dist.DistBackendError, match=r"rank 1 .*gives 4 bytes to rank 0.* which wants 8"):
        dist.all_to_all_single(torch.zeros(3), torch.zeros(2), [1, 2], [1, 1], group=group)


@ranks(2)
def test_a_rank_that_does_not_come_is_named(rank):
    group = portable()
    limit_patience(group, 0.3)
    if rank == 0:
        with pytest.raises(
            dist.DistBackendError, match=r"barrier: rank 1 \(pid \d+\) did not arrive before the timeout"
        ):
            dist.barrier(group)
    dist.barrier()
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match=r"rank 0 \(pid \d+\) gave up: barrier: rank 1"):
            dist.barrier(group)


@ranks(2)
def test_a_message_that_does_not_come_is_named(rank):
    group = portable()
    limit_patience(group, 0.3)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"recv\(tag 5, 4 bytes\): rank 1 .* did not answer"):
            dist.recv(torch.zeros(1), 1, group, tag=5)
    dist.barrier()


@ranks(2)
def test_aborting_ends_what_waits_on_both(rank):
    group = portable()
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        with pytest.raises(dist.DistBackendError, match="not done within"):
            work.wait(timedelta(seconds=0.1))
        group.abort()
        with pytest.raises(dist.DistBackendError):
            work.wait()
        with pytest.raises(RuntimeError):
            work.get_future().wait()
        with pytest.raises(dist.DistBackendError, match="shut down"):
            dist.barrier(group)
    dist.barrier()
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match=r"rank 0 \(pid \d+\) gave up: rank 0 was told to abort"):
            dist.barrier(group)


def test_what_it_cannot_do_is_refused_with_advice():
    group = alone(dist.HashStore())
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp.BAND
    with pytest.raises(ValueError, match=r"ReduceOp.BAND does not go with torch.float32, for which there is SUM"):
        group.allreduce([torch.ones(2)], options)
    with pytest.raises(ValueError, match=r"torch.sparse_coo on cpu: use .to_dense\(\)"):
        group.allreduce([torch.ones(2).to_sparse()])
    with pytest.raises(ValueError, match="cannot split 3 rows among 1 ranks as \\[2\\]"):
        group.all_to_all_single(torch.ones(3), torch.ones(3), [2], [3])
    with pytest.raises(ValueError, match="no messages with rank 0"):
        group.send([torch.ones(2)], 0, 0)


def test_half_precision_is_rounded_once():
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    into = torch.zeros(1, dtype=torch.bfloat16)
    views = [part.view(torch.uint8).numpy() for part in (*parts, into)]
    Reduction(dist.ReduceOp.SUM, torch.bfloat16)(views[:3], views[3])
    assert into.item() == 258.0  # 256 + 1 is 256 in bfloat16
