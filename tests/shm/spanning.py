"""Ranks of a group that spans hosts, in processes of their own; hosts are network namespaces, or only said.

python -m tests.shm.spanning        flat Gloo against levels between two namespaces, as root
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from typing import Any

import torch
import torch.distributed as dist

from paceline.shm import BACKEND, hosts
from tests.ranks import PRELOAD

_CLONE_NEWNET = 0x40000000
_PORT = 29511


@dataclass(frozen=True)
class Namespace:
    """A network namespace: as far as networks go, a host.

    Attributes:
        path: a file that stands for it.
        address: of its interface `veth`.
    """

    path: str
    address: str

    def enter(self) -> None:
        """Move this process there, and let Gloo use its interface."""
        with open(self.path) as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.path}")
        os.environ["GLOO_SOCKET_IFNAME"] = "veth"

    def command(self, *words: str) -> list[str]:
        """Return a command that runs another one there."""
        return ["nsenter", f"--net={self.path}", *words]


@contextmanager
def two_namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Make two namespaces joined by a cable; they end with this process, however that ends."""
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(2):
            hold = ["unshare", "--net", "sh", "-c", "echo ready; exec cat"]  # cat ends with our end of the pipe
            holders.append(
                subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )
            if not holders[-1].stdout.readline():
                raise OSError(f"unshare fails: {holders[-1].communicate()[1].decode().strip()}")
        pids = [holder.pid for holder in holders]
        both = (
            Namespace(f"/proc/{pids[0]}/ns/net", "10.213.77.1"),
            Namespace(f"/proc/{pids[1]}/ns/net", "10.213.77.2"),
        )
        _run(
            both[0].command("ip", "link", "add", "veth", "type", "veth", "peer", "name", "veth", "netns", str(pids[1]))
        )
        for one in both:
            _run(one.command("ip", "address", "add", f"{one.address}/24", "dev", "veth"))
            _run(one.command("ip", "link", "set", "veth", "up"))
            _run(one.command("ip", "link", "set", "lo", "up"))
        yield both
    finally:
        for holder in holders:
            holder.communicate()


def no_namespaces() -> str | None:
    """Return why there can be no namespaces here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    try:
        with two_namespaces():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {getattr(error, 'stderr', error)}"


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def pretend(host: str) -> None:
    """Let this process be on a host of this name, and share memory only with those that are, too."""
    hosts.identity = lambda: host


@dataclass(frozen=True)
class Job:
    """Four ranks, two in each of `namespaces`, or all here on the `hosts` they say; they meet at `store`."""

    store: str = ""
    hosts: str | None = None
    namespaces: tuple[Namespace, Namespace] | None = None
    size: int = 4

    def join(self, rank: int) -> None:
        """Become this rank."""
        torch.set_num_threads(1)
        os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        timeout = timedelta(seconds=600)
        if self.namespaces is not None:
            self.namespaces[rank // 2].enter()
            store: Any = dist.TCPStore(self.namespaces[0].address, _PORT, self.size, rank == 0, timeout)
        else:
            store = dist.FileStore(self.store, self.size)
        if self.hosts is not None:
            pretend(self.hosts[rank])
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=self.size, timeout=timeout)


def run(job: Job, body: Callable[..., str], *given: Any, timeout_s: float = 300) -> list[str | None]:
    """Return what `body(rank, *given)` returns on each rank; None where a rank was killed or hangs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ends, processes = [], []
    for rank in range(job.size):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=_rank, args=(rank, job, theirs, body, given)))
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    told: list[str | None] = [None] * job.size
    deadline = time.monotonic() + timeout_s
    try:
        left = dict(zip(ends, range(job.size), strict=True))
        while left and (ready := wait_for_any(list(left), max(deadline - time.monotonic(), 0))):
            for end in ready:
                rank = left.pop(end)
                with suppress(EOFError):  # of one that was killed
                    told[rank] = end.recv()
        return told
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _rank(rank: int, job: Job, pipe: Connection, body: Callable[..., str], given: Sequence[Any]) -> None:
    job.join(rank)
    pipe.send(body(rank, *given))
    dist.destroy_process_group()
    os._exit(0)  # rank 0 keeps the store that others may still be told through


def call_everything(rank: int) -> str:
    """Make some calls and compare with what they must give."""
    size = dist.get_world_size()
    gradient = torch.arange(200_001.0) % 97 * (rank + 1)
    dist.all_reduce(gradient)
    assert torch.equal(gradient, torch.arange(200_001.0) % 97 * (size * (size + 1) // 2))
    gathered = torch.empty(size * 7, dtype=torch.int64)
    dist.all_gather_single(gathered, torch.full((7,), rank))
    assert gathered.tolist() == [other for other in range(size) for _ in range(7)]
    mine = torch.empty(3)
    dist.reduce_scatter_single(mine, torch.arange(3.0 * size))
    assert mine.tolist() == [size * (3 * rank + n) for n in range(3)]
    for root in range(size):
        tensor = torch.full((5,), rank)
        dist.broadcast(tensor, root)
        assert tensor.tolist() == [root] * 5
    turned = torch.empty(size, dtype=torch.int64)
    dist.all_to_all_single(turned, torch.arange(size) + 10 * rank)
    assert turned.tolist() == [10 * other + rank for other in range(size)]
    message = torch.empty(2)
    work = dist.isend(torch.full((2,), float(rank)), (rank + 1) % size)
    dist.recv(message, (rank - 1) % size)
    work.wait()
    assert message.tolist() == [float((rank - 1) % size)] * 2
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 3))
    module(torch.ones(2, 50) * rank).sum().backward()
    assert module.module.weight.grad.eq(2 * sum(range(size)) / size).all()
    dist.barrier()
    return "right"


def until_one_is_killed(rank: int, victim: int) -> str:
    """Call and call; one rank is killed, and the others return what they are told."""
    tensor = torch.ones(100_000)
    started = 0.0
    try:
        for n in range(1_000_000):
            dist.all_reduce(tensor)
            if n == 20:
                started = time.monotonic()
                if rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
    except dist.DistBackendError as error:
        after = time.monotonic() - started
        try:
            dist.all_reduce(tensor)
        except dist.DistBackendError as again:
            assert "the group has ended" in str(again)
            return f"after {after:.2f} s: {error}"
    return "no error"


def faults(told: Sequence[str | None], victim: int) -> list[str]:
    """Return which of the others were not told, or not of the rank that was killed."""
    named = rf"(?s)after .*failed on rank \d.*\branks? ([\d, ]*\b)?{victim}\b"
    others = [(rank, text) for rank, text in enumerate(told) if rank != victim]
    return [f"rank {rank}: {text}" for rank, text in others if not re.match(named, text or "")]


def measure(rank: int) -> str:
    """Return microseconds by size: flat Gloo, and levels."""
    flat = dist.new_group(backend="gloo")
    lines = []
    for count in (16, 256, 16_384, 262_144, 4_194_304):
        tensor = torch.zeros(count)
        times: dict[str, list[float]] = {"flat": [], "levels": []}
        rounds = max(1, min(50, 1_000_000 // count))
        for turn in range(12):
            for name, group in (("flat", flat), ("levels", None)):
                dist.barrier()
                started = time.perf_counter()
                for _ in range(rounds):
                    dist.all_reduce(tensor, group=group)
                if turn > 1:
                    times[name].append((time.perf_counter() - started) / rounds)
        each = ", ".join(f"{name} {statistics.median(all_) * 1e6:.0f} us" for name, all_ in times.items())
        lines.append(f"all_reduce of {count * 4} bytes: {each}")
    return "\n".join(lines)


if __name__ == "__main__":
    from tests.shm import spanning as importable  # so that the ranks find its functions by name

    with importable.two_namespaces() as both_namespaces:
        print(importable.run(importable.Job(namespaces=both_namespaces), importable.measure)[0])
