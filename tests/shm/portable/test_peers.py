"""Who connects to a group without native code, and who dies: in processes of their own, because some are killed."""

from __future__ import annotations

import contextlib
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

import pytest
import torch
import torch.distributed as dist

from paceline.shm.portable import PortableGroup
from paceline.shm.portable.window import Window
from tests.ranks import PRELOAD

LARGE = 600_003  # in float32 more than a ring of messages holds


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
    except Exception as error:  # whatever it is, the parent judges it
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


@pytest.mark.parametrize(
    "said",
    ["", "1 2", "a b c", "-1 0 00", pytest.param(f"{os.getpid()} 0 zz", id="no hexadecimal"), "__import__('os') 1 00"],
)
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
