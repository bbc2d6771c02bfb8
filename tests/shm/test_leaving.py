"""A rank that leaves after its last call, while the other is still on its way to it, has done its part."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from tests.ranks import PRELOAD, ranks
from tests.shm.implementations import Implementation, every_implementation

_LATE_S = 0.1
_LIMIT_S = 300  # after that a rank hangs, however busy the machine is
_SMALL, _LARGE = 5, 1_000_000

Last = Callable[[int, torch.Tensor, torch.Tensor, dist.ProcessGroup], object]

# Which of two ranks is early, and what both call last, with a tensor of ones and one of zeros that becomes ones.
CALLS: dict[str, tuple[int, Last]] = {
    "broadcast": (0, lambda rank, one, zero, group: dist.broadcast(one if rank == 0 else zero, 0, group)),
    "scatter": (0, lambda rank, one, zero, group: dist.scatter(zero, [one, one] if rank == 0 else None, 0, group)),
    "gather": (1, lambda rank, one, zero, group: dist.gather(one, [one, zero] if rank == 0 else None, 0, group)),
    "reduce": (1, lambda rank, one, zero, group: dist.reduce(zero if rank == 0 else one, 0, group=group)),
    "all_to_all": (0, lambda rank, one, zero, group: dist.all_to_all([one.clone(), zero], [one, one], group)),
    "all_gather": (1, lambda rank, one, zero, group: dist.all_gather([one.clone(), zero], one, group)),
    "send": (0, lambda rank, one, zero, group: dist.recv(zero, 0, group) if rank else dist.send(one, 1, group)),
    "recv": (1, lambda rank, one, zero, group: dist.recv(zero, 1, group) if not rank else dist.send(one, 0, group)),
    "barrier": (0, lambda rank, one, zero, group: (dist.barrier(group), zero.add_(1))),
}


def _call(name: str, rank: int, size: int, group: dist.ProcessGroup) -> None:
    early, last = CALLS[name]
    one, zero = torch.ones(size), torch.zeros(size)
    if rank != early:
        time.sleep(_LATE_S)
    last(rank, one, zero, group)
    if rank != early:
        assert torch.equal(zero, one), name


@every_implementation
@ranks(2, backend="gloo")
def test_by_destroying_its_group(world, implementation):
    implementation.choose()
    for name in CALLS:
        for size in (_SMALL, _LARGE):
            group = dist.new_group([0, 1], backend=implementation.backend)
            _call(name, world.rank, size, group)
            dist.destroy_process_group(group)


@every_implementation
def test_by_ending(implementation, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    for name, size in [*((name, _SMALL) for name in CALLS), ("broadcast", _LARGE), ("send", _LARGE)]:
        pipes, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            store = str(tmp_path / f"{name}-{size}")
            processes.append(context.Process(target=_rank, args=(implementation, name, rank, size, store, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        told = []
        try:
            for pipe in pipes:
                assert pipe.poll(_LIMIT_S), f"{name}: a rank hangs"
                with contextlib.suppress(EOFError):
                    told.append(pipe.recv())
        finally:
            for process in processes:
                process.kill()
                process.join()
        assert told == ["done", "done"], name


def _rank(implementation: Implementation, name: str, rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    implementation.choose()
    dist.init_process_group(implementation.backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    try:
        _call(name, rank, size, dist.group.WORLD)
        pipe.send("done")
    except Exception as error:  # whatever it is, the parent judges it
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)
