"""Much at once: threads, calls from callbacks, hundreds of calls under way, and processes that are forked meanwhile."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading

import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.shm.implementations import every_implementation


def _group(world, implementation):
    implementation.choose()
    return dist.new_group(list(range(world.size)), backend=implementation.backend)


def _in_threads(count, call):
    """Run `call(n)` in as many threads; raise what one of them raises."""
    errors = []

    def guarded(n):
        try:
            call(n)
        except Exception as error:  # raised again in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@every_implementation
@ranks(2, backend="gloo")
def test_threads_with_their_own_groups(world, implementation):
    """As in a program that trains in one thread and saves in another."""
    groups = [_group(world, implementation) for _ in range(4)]

    def call(n):
        x = torch.full((1000,), n + 1.0)
        for _ in range(50):
            dist.all_reduce(x, dist.ReduceOp.AVG, group=groups[n])
        assert x.eq(n + 1.0).all()

    _in_threads(4, call)


@every_implementation
@ranks(2, backend="gloo")
def test_threads_take_turns_in_one_group(world, implementation):
    """Equal calls, so that it does not matter which of them meet."""
    group = _group(world, implementation)

    def call(_):
        for _ in range(50):
            x = torch.ones(1000)
            dist.all_reduce(x, group=group)
            assert x.eq(2).all()

    _in_threads(4, call)


@every_implementation
@ranks(2, backend="gloo")
def test_threads_exchange_messages_in_one_group(world, implementation):
    group, other = _group(world, implementation), 1 - world.rank

    def call(n):
        for turn in range(30):
            size = 1 + 3000 * (turn % 3) * n
            sent, received = torch.full((size,), 100.0 * n + turn), torch.empty(size)
            first, second = (dist.send, dist.recv) if world.rank == n % 2 else (dist.recv, dist.send)
            for what in (first, second):
                what(sent if what is dist.send else received, other, group, tag=n)
            assert torch.equal(received, sent)

    _in_threads(4, call)


@every_implementation
@ranks(2, backend="gloo")
def test_callbacks_make_calls(world, implementation):
    """As PowerSGD's hook for DDP does, which waits for them there."""
    group = _group(world, implementation)

    def again(future):
        x = future.value()[0] + 1
        return dist.all_reduce(x, group=group, async_op=True).get_future().wait()[0]

    for n in (1, 100_000):
        future = dist.all_reduce(torch.ones(n), group=group, async_op=True).get_future()
        assert torch.equal(future.then(again).then(lambda one: one.value() * 2).wait(), torch.full((n,), 12.0))


@every_implementation
@ranks(2, backend="gloo")
def test_hundreds_of_calls_under_way(world, implementation):
    group = _group(world, implementation)
    tensors = [torch.full((1 + 37 * n,), float(world.rank)) for n in range(300)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    assert all(torch.equal(x, torch.ones_like(x)) for x in tensors)


@every_implementation
@ranks(2, backend="gloo")
def test_hundreds_of_messages_under_way(world, implementation):
    group, other = _group(world, implementation), 1 - world.rank
    sizes = [1 + 97 * n for n in range(300)]
    sends = [dist.isend(torch.full((size,), float(size)), other, group, tag=size) for size in sizes]
    for size in reversed(sizes):  # the last one first, so that all others arrive unexpected
        x = torch.zeros(size)
        dist.recv(x, other, group, tag=size)
        assert torch.equal(x, torch.full((size,), float(size)))
    for work in sends:
        work.wait()


def _touch(x):
    x.add_(1)
    gc.collect()


@every_implementation
@ranks(2, backend="gloo")
def test_processes_that_come_and_go(world, implementation):
    """As the workers of a DataLoader do, which are forked from a rank."""
    group = _group(world, implementation)
    x = torch.ones(100_000)
    work = dist.all_reduce(x, group=group, async_op=True)
    child = multiprocessing.get_context("fork").Process(target=_touch, args=(torch.ones(3),))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    forked = os.fork()
    if forked == 0:
        del work, group
        gc.collect()
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0
    subprocess.run([sys.executable, "-c", ""], check=True)
    work.wait()
    dist.all_reduce(x, group=group)
    assert torch.equal(x, torch.full_like(x, 4))
    dist.barrier()
