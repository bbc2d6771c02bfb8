"""Ranks that end in the middle of calls, and what the others then see; by hand, with how long that took:

python -m tests.shm.chaos --kills 100 --implementation native
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.shm import Exchange
from tests.ranks import PRELOAD
from tests.shm.implementations import Implementation
from tests.shm.patience import limit_patience
from tests.shm.values import packed

_READY_S = 300.0
_ERROR_S = 60.0  # after that a rank counts as one that hangs, however busy the machine is
_SHORT_S = 3.0  # the group's timeout where a rank neither ends nor arrives
_SIZES = (1, 1000, 40_000, 2_000_000)


class End(Enum):
    """How a rank ends."""

    KILL = "SIGKILL"
    TERMINATE = "SIGTERM"
    STOP = "SIGSTOP"  # it lives on, and does not arrive
    RAISE = "an exception"
    EXIT = "sys.exit"
    OS_EXIT = "os._exit"
    DESTROY = "destroy_process_group"  # it lives on without the group

    @property
    def signal(self) -> signal.Signals | None:
        """Return the signal that does it."""
        return signal.Signals[self.value] if self.value.startswith("SIG") else None

    @property
    def lives_on(self) -> bool:
        """Return whether the process is still there, so that the timeout of its group may have to tell the others."""
        return self in (End.STOP, End.DESTROY)

    @property
    def timeout_s(self) -> float:
        """Return the timeout of the group."""
        return _SHORT_S if self.lives_on else 10 * _ERROR_S


@dataclass(frozen=True)
class Case:
    """Attributes: `victim`, the rank that ends; `end`, how; `seed` of what it is doing then."""

    implementation: Implementation
    end: End
    victim: int
    seed: int
    size: int = 3


@dataclass
class Outcome:
    """What happened to the ranks that did not end by themselves.

    Attributes:
        errors: what each was told, by rank.
        again: what each was told at its next call.
        delays: seconds from the victim's end to each error.
        hanging: stacks of ranks that were told nothing, and of those that then did not end.
        left: names in /dev/shm that are still there.
        doing: what each was doing.
    """

    errors: dict[int, str] = field(default_factory=dict)
    again: dict[int, str] = field(default_factory=dict)
    delays: dict[int, float] = field(default_factory=dict)
    doing: dict[int, str] = field(default_factory=dict)
    hanging: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def faults(self, case: Case, bound_s: float = _ERROR_S) -> list[str]:
        """Return what should not be so; `bound_s` is how soon ranks must be told."""
        found = list(self.hanging)
        found += [f"left behind: {name}" for name in self.left]
        bound_s += case.end.timeout_s if case.end.lives_on else 0
        others = set(range(case.size)) - {case.victim}
        for rank in others:
            told, again = self.errors.get(rank), self.again.get(rank)
            where = f"rank {rank}, in {self.doing.get(rank)}"
            # A group of two may be without the victim, and lose the other one only once that one was told.
            # In a ring each waits for its neighbour, and may lose patience before that one, which waits too, does.
            doing = self.doing.get(rank, "")
            indirect = doing.startswith("_pair") or (case.end.lives_on and doing.startswith(("_ring", "_pass")))
            causes = others | {case.victim} if indirect else {case.victim}
            if told is None:
                found.append(f"{where}, was told nothing")
            elif not any(re.search(rf"\b[Rr]ank {cause}\b", told) for cause in causes - {rank}):
                found.append(f"{where}, was not told that rank {case.victim} ended: {told}")
            elif self.delays[rank] > bound_s:
                found.append(f"{where}, was told after {self.delays[rank]:.2f} s: {told}")
            if again is not None and "DistBackendError" not in again:
                found.append(f"{where}, at its next call: {again}")
        return found


def play(case: Case) -> Outcome:
    """Start ranks that call and call, let one end, and see what becomes of the others."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        pipes, processes = [], []
        for rank in range(case.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(case, rank, directory, theirs, dict(os.environ)))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _watch(case, Path(directory), pipes, processes)
        finally:
            for process in processes:
                process.kill()  # one that is stopped, too
                process.join()


def _watch(case: Case, directory: Path, pipes: list[Connection], processes: list[Any]) -> Outcome:
    outcome, names = Outcome(), set[str]()
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(_READY_S):
            outcome.hanging.append(_stack(directory, rank, processes[rank], "does not start"))
            return outcome
        names |= pipe.recv()
    victim = processes[case.victim]
    if case.end.signal is not None:
        time.sleep(random.Random(case.seed).uniform(0, 0.05))
        ended = time.monotonic()
        os.kill(victim.pid, case.end.signal)
    else:
        ended = pipes[case.victim].recv()  # it says when

    told, others = {}, {rank: pipe for rank, pipe in enumerate(pipes) if rank != case.victim}
    deadline = time.monotonic() + _ERROR_S
    while others and (ready := wait(list(others.values()), max(deadline - time.monotonic(), 0))):
        for rank in [rank for rank, pipe in others.items() if pipe in ready]:
            try:
                told = others[rank].recv()
            except EOFError:
                del others[rank]
                continue
            if "at" in told:
                outcome.delays[rank] = told["at"] - ended
                outcome.errors[rank], outcome.doing[rank] = told["error"], told["doing"]
            else:
                outcome.again[rank] = told["again"]
    for rank in others:
        state = "hangs at its end" if rank in outcome.errors else "hangs"
        outcome.hanging.append(_stack(directory, rank, processes[rank], state))
    if case.end.lives_on:
        victim.kill()
    for rank, process in enumerate(processes):
        if rank not in others:
            process.join(_ERROR_S)
            if process.is_alive():
                outcome.hanging.append(_stack(directory, rank, process, "does not end"))
    outcome.left = [name for name in names if Path(name).exists()]
    return outcome


def _stack(directory: Path, rank: int, process: Any, state: str) -> str:
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1)
    return f"rank {rank} {state}:\n{(directory / f'stack-{rank}').read_text()}"


def _rank(case: Case, rank: int, directory: str, pipe: Connection, environment: dict[str, str]) -> None:
    """Be one rank."""
    stacks = (Path(directory) / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    sys.stderr = stacks  # the end by an exception is meant, and not to be seen
    case.implementation.choose()
    store = dist.FileStore(f"{directory}/store", case.size)
    dist.init_process_group(case.implementation.backend, store=store, rank=rank, world_size=case.size)
    hammer = _Hammer(case, rank)
    ends = random.Random(case.seed).randrange(5, 200) if rank == case.victim and case.end.signal is None else -1
    for _ in range(3):
        hammer.strike()
    pipe.send(_names_in_shared_memory())
    try:
        for n in itertools.count():
            if n == ends:
                pipe.send(time.monotonic())
                _end(case.end)
            hammer.strike()
    except Exception as error:  # whatever it is, the parent judges it
        at = time.monotonic()
        if rank == case.victim:
            raise
        pipe.send({"at": at, "error": f"{type(error).__name__}: {error}", "doing": hammer.doing})
    try:
        hammer.strike_again()
        pipe.send({"again": "no error"})
    except Exception as error:  # as above
        pipe.send({"again": f"{type(error).__name__}: {error}"})
    dist.destroy_process_group()


def _end(how: End) -> None:
    match how:
        case End.RAISE:
            raise ValueError("this rank ends by an exception")
        case End.EXIT:
            sys.exit(3)
        case End.OS_EXIT:
            os._exit(4)
        case End.DESTROY:
            dist.destroy_process_group()
            time.sleep(600)


def _names_in_shared_memory() -> set[str]:
    """Return what this process has open or mapped in /dev/shm."""
    links = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink() and entry.exists()}
    maps = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {name for name in links | maps if name.startswith("/dev/shm/") and not name.endswith("(deleted)")}


class _Hammer:
    """Calls one collective or message after the other; in tensors made once, so that nearly all the time is theirs."""

    def __init__(self, case: Case, rank: int) -> None:
        self._draw = random.Random(case.seed)
        self._rank, self._size = rank, case.size
        made = {"backend": case.implementation.backend}
        self._all = dist.new_group(list(range(case.size)), **made)
        self._pairs = {pair: dist.new_group(list(pair), **made) for pair in itertools.combinations(range(case.size), 2)}
        dist.barrier()  # so that no rank is late in a group of little patience
        for group in [self._all, *(group for pair, group in self._pairs.items() if rank in pair)]:
            limit_patience(group, case.end.timeout_s)
        self._tensors = {size: torch.zeros(size) for size in _SIZES}
        self._wide = {size: torch.zeros(case.size * size) for size in _SIZES}
        self._exchange = Exchange.of(self._all)
        self.doing = "nothing"

    def strike(self) -> None:
        """Make the next call; the same on all ranks."""
        kinds: tuple[Callable[[int], None], ...] = (
            self._reduce,
            self._gather,
            self._scatter,
            self._all_to_all,
            self._broadcast,
            self._barrier,
            self._burst,
            self._ring,
            self._pass,
            self._pair,
            self._started,
        )
        kind, size = self._draw.choice(kinds), self._draw.choice(_SIZES)
        self.doing = f"{kind.__name__} of {size}"
        kind(size)

    def strike_again(self) -> None:
        """Make a call of the group of all ranks after an error."""
        self._reduce(_SIZES[0])

    def _reduce(self, size: int) -> None:
        dist.all_reduce(self._tensors[size], group=self._all)

    def _gather(self, size: int) -> None:
        dist.all_gather_single(self._wide[size], self._tensors[size], self._all)

    def _scatter(self, size: int) -> None:
        dist.reduce_scatter_single(self._tensors[size], self._wide[size], group=self._all)

    def _all_to_all(self, size: int) -> None:
        dist.all_to_all_single(self._wide[size], self._wide[size].clone(), group=self._all)

    def _broadcast(self, size: int) -> None:
        dist.broadcast(self._tensors[size], self._draw.randrange(self._size), self._all)

    def _barrier(self, size: int) -> None:
        dist.barrier(self._all)

    def _burst(self, size: int) -> None:
        works = [dist.all_reduce(tensor, group=self._all, async_op=True) for tensor in self._tensors.values()]
        for work in works:
            work.wait()

    def _ring(self, size: int) -> None:
        after, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        sends = dist.P2POp(dist.isend, self._tensors[size], after, self._all)
        receives = dist.P2POp(dist.irecv, self._wide[size][:size], before, self._all)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    def _pass(self, size: int) -> None:
        source, target = self._draw.sample(range(self._size), 2)
        if self._rank == source:
            dist.send(self._tensors[size], target, self._all)
        elif self._rank == target:
            dist.recv(self._tensors[size], source, self._all)

    def _pair(self, size: int) -> None:
        pair = self._draw.choice(list(self._pairs))
        if self._rank in pair:
            dist.all_reduce(self._tensors[size], group=self._pairs[pair])

    def _started(self, size: int) -> None:
        if self._exchange is None:
            return
        bucket = packed(self._exchange, [self._tensors[size], self._tensors[_SIZES[0]]])
        started = [self._exchange.all_gather(self._tensors[size]), self._exchange.all_reduce_in_place(bucket)]
        for one in started:
            one.wait()


def cases(implementation: Implementation, end: End, count: int, seed: int) -> Iterator[Case]:
    """Yield cases of random victims."""
    draw = random.Random(seed)
    for _ in range(count):
        yield Case(implementation, end, draw.randrange(3), draw.randrange(1 << 30))


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill ranks and see whether the others are told.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--end", type=End, default=End.KILL)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--implementation", type=Implementation, default=Implementation.NATIVE)
    given = parser.parse_args()
    delays, wrong = [], 0
    for case in cases(given.implementation, given.end, given.kills, given.seed):
        outcome = play(case)
        delays += outcome.delays.values()
        faults = outcome.faults(case, bound_s=1)
        wrong += bool(faults)
        for fault in faults:
            print(f"{case}\n    {fault}", flush=True)
    delays.sort()
    print(
        f"{given.kills} times {given.end.value}, seed {given.seed}: {wrong} with faults; errors after "
        f"{statistics.median(delays) * 1e3:.0f} ms in the median, {delays[int(len(delays) * 0.95)] * 1e3:.0f} ms at "
        f"the 95th percentile, {delays[-1] * 1e3:.0f} ms at most"
    )
    sys.exit(wrong > 0)


if __name__ == "__main__":
    from tests.shm import chaos as importable  # so that the ranks find its functions by name

    importable.main()
