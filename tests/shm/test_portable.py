"""The group without native code: how ranks connect, die and disagree, and messages out of order.

What collectives give is in test_properties.py; here each is compared with Gloo once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline.shm.portable import PortableGroup
from paceline.shm.portable_reduce import Reduction
from paceline.shm.portable_window import Window
from tests.ranks import PRELOAD, ranks

OPS = [getattr(dist.ReduceOp, name) for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")]
LARGE = 600_003  # in float32 more than one round, and more than a ring of messages holds


def portable(timeout_s: float = 30, ranks: list[int] | None = None) -> Any:
    """Return a new group beside that of Gloo."""
    if "PORTABLE" not in dist.Backend._plugins:
        dist.Backend.register_backend(
            "portable",
            lambda o, _: PortableGroup(o.store, o.group_rank, o.group_size, o.timeout, o.global_ranks_in_group),
            extended_api=True,
            devices=["cpu"],
        )
    return dist.new_group(ranks, backend="portable", timeout=timedelta(seconds=timeout_s))


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
    group = portable(timeout_s=0.3)
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
    group = portable(timeout_s=0.3)
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


# --- who connects, and who dies: in processes of their own, because some of them are killed


def _processes(act: Callable[..., str], size: int, *, killed: int | None = None) -> dict[int, str]:
    """Return what `act(group, rank)` says on each rank that lives to say it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as place:
        ends = [context.Pipe(duplex=False) for _ in range(size)]
        started = [
            context.Process(target=_process, args=(act, rank, size, f"{place}/store", ends[rank][1]))
            for rank in range(size)
        ]
        try:
            for process, (_, writer) in zip(started, ends, strict=True):
                process.start()
                writer.close()
            return {rank: ends[rank][0].recv() for rank in range(size) if rank != killed and ends[rank][0].poll(40)}
        finally:
            for process in started:
                process.kill()
                process.join()


def _process(act: Callable[..., str], rank: int, size: int, path: str, said: Connection) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(path, size)
        group = PortableGroup(store, rank, size, timedelta(seconds=30), range(10, 10 + size))
        said.send(act(group, rank))
    except Exception as error:
        said.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_before_a_collective(group: PortableGroup, rank: int) -> str:
    group.barrier().wait()
    if rank == 2:
        _die()
    group.allreduce([torch.ones(3)]).wait()
    return "went on"


def _dies_between_rounds(group: PortableGroup, rank: int) -> str:
    if rank == 2:
        threading.Timer(0.2, _die).start()
    x = torch.ones(20_000_000)
    while True:
        group.allreduce([x]).wait()


def _dies_before_sending(group: PortableGroup, rank: int) -> str:
    group.barrier().wait()
    if rank == 2:
        _die()
    group.recv([torch.ones(3)], 2, 0).wait()
    return "went on"


def _dies_before_anybody_receives(group: PortableGroup, rank: int) -> str:
    group.barrier().wait()
    if rank == 2:
        _die()
    group.recv_anysource([torch.ones(3)], 0).wait()
    return "went on"


def _dies_before_taking(group: PortableGroup, rank: int) -> str:
    group.barrier().wait()
    if rank == 2:
        _die()
    group.send([torch.ones(LARGE)], 2, 0).wait()
    return "went on"


@pytest.mark.parametrize(
    "act",
    [
        _dies_before_a_collective,
        _dies_between_rounds,
        _dies_before_sending,
        _dies_before_anybody_receives,
        _dies_before_taking,
    ],
)
def test_a_killed_rank_is_named_and_nobody_hangs(act):
    said = _processes(act, 3, killed=2)
    assert sorted(said) == [0, 1]
    for text in said.values():
        assert re.search(r"DistBackendError: shm: .*rank 12 \(pid \d+\) died", text), text


def test_a_rank_that_never_connects_is_named():
    with pytest.raises(dist.DistBackendError, match="connecting: rank 7 did not arrive before the timeout"):
        PortableGroup(dist.HashStore(), 0, 2, timedelta(seconds=0.2), [3, 7])


@pytest.mark.parametrize("said", ["", "1 2", "a b c", "-1 0 00", f"{os.getpid()} 0 zz", "__import__('os') 1 00"])
def test_nonsense_in_the_store_is_refused(said):
    store = dist.HashStore()
    store.set("shm/1", said)
    with pytest.raises(dist.DistBackendError, match="cannot open the memory of rank 1, "):
        PortableGroup(store, 0, 2, timedelta(seconds=5), [0, 1])


def test_memory_that_does_not_hold_the_token_is_refused():
    other = os.memfd_create("other")
    os.ftruncate(other, Window.size_for(2))
    store = dist.HashStore()
    store.set("shm/1", f"{os.getpid()} {other} {'00' * 16}")
    with pytest.raises(dist.DistBackendError, match="does not hold the token that was given out"):
        PortableGroup(store, 0, 2, timedelta(seconds=5), [0, 1])
    os.ftruncate(other, 4096)
    with pytest.raises(dist.DistBackendError, match="it has 4096 bytes, not"):
        PortableGroup(store, 0, 2, timedelta(seconds=5), [0, 1])
    os.close(other)


def test_a_store_serves_again_and_nothing_stays_behind():
    store = dist.HashStore()
    before = _open_files(), threading.active_count()
    for _ in range(2):
        groups: dict[int, PortableGroup] = {}
        threads = [threading.Thread(target=_join, args=(groups, store, rank)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(groups) == [0, 1]
        assert not store.check(["shm/0"]) and not store.check(["shm/1"])
        works = [groups[rank].allreduce([torch.full((3,), float(rank))]) for rank in range(2)]
        assert [work.wait() and work.result()[0].tolist() for work in works] == [[1.0] * 3] * 2
        groups[0].shutdown()
        groups[1].abort()
        del works
    groups.clear()
    gc.collect()
    assert _open_files() == before[0]
    deadline = time.monotonic() + 10
    while threading.active_count() > before[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before[1]


def _join(groups: dict[int, PortableGroup], store: dist.Store, rank: int) -> None:
    groups[rank] = PortableGroup(store, rank, 2, timedelta(seconds=20), [0, 1])


def _open_files() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(link for link in links if "memfd" in link or "pidfd" in link)
