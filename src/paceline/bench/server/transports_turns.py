"""Everybody in turn: each way has a server and a client in processes of their own, and one client works at a time."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from paceline.bench.server.transports_ways import Client, Load, Times, example, way

_DENSE, _SMALL = ("push", "pull", "pull_placed"), ("push_rows", "pull_rows", "rtt")
_DENSE_REPETITIONS = 5
_SMALL_BEFORE = 100
"""Small things that are done before any is timed: until then a way may still give back the memory of large ones."""
_PATIENCE_S = 120.0


def take_turns(
    names: Sequence[str], load: Load, rounds: int, repetitions: int
) -> tuple[dict[str, Times], dict[str, str]]:
    """Return the seconds of each round by way and what it did, and why ways were left out.

    Args:
        names: of ways.
        load: what is moved.
        rounds: how often everybody has a turn.
        repetitions: in a turn, of what is short.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, contextlib.ExitStack() as stack:
        pairs = {name: stack.enter_context(_Pair(name, load, Path(folder) / name)) for name in names}
        left_out = {name: why for name, pair in pairs.items() if (why := pair.start())}
        for name in left_out:
            pairs.pop(name).end()
        taken: dict[str, dict[str, list[float]]] = {name: {} for name in pairs}
        order = list(pairs)
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("push and pull", total=rounds * len(order))
            for turn in range(rounds):
                first = turn % max(1, len(order))
                for name in order[first:] + order[:first]:
                    for what, seconds in pairs[name].turn(repetitions).items():
                        taken[name].setdefault(what, []).append(seconds)
                    progress.advance(task)
        return dict(taken), left_out


class _Pair:
    """The two processes of a way."""

    def __init__(self, name: str, load: Load, folder: Path) -> None:
        folder.mkdir()
        self._name = name
        fork = multiprocessing.get_context("fork")
        self._ours, theirs = fork.Pipe()
        self._processes: list[ForkProcess] = [
            fork.Process(target=_serve, args=(name, load, folder), daemon=True),
            fork.Process(target=_be_client, args=(name, load, folder, theirs)),
        ]
        self._theirs = theirs

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> str:
        """Return why this way cannot run here; nothing where it can."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads; the children start afresh
            for process in self._processes:
                process.start()
        self._theirs.close()
        return str(self._heard())

    def turn(self, repetitions: int) -> dict[str, float]:
        """Return seconds by what was done."""
        self._ours.send(repetitions)
        found: dict[str, float] = self._heard()
        return found

    def end(self) -> None:
        """End both processes, if they are there."""
        with contextlib.suppress(OSError):
            self._ours.send(0)  # to close it is not enough: processes that were started later have it too
        for process in reversed(self._processes):
            if process.pid is None:
                continue
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []
        self._ours.close()

    def _heard(self) -> Any:
        if not self._ours.poll(_PATIENCE_S):
            return f"no word within {_PATIENCE_S:g} s"
        try:
            return self._ours.recv()
        except EOFError:
            return "its process ended without a word"


def _serve(name: str, load: Load, folder: Path) -> None:
    _quiet(folder)
    way(name).serve(folder, load)


def _be_client(name: str, load: Load, folder: Path, pipe: Connection) -> None:
    _quiet(folder)
    try:
        client = way(name).connect(folder, load)
        _check(client, load)
        pipe.send("")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
        return
    with contextlib.suppress(EOFError):
        while repetitions := pipe.recv():
            pipe.send(_turn(client, repetitions))
    client.close()


def _quiet(folder: Path) -> None:
    """Send what libraries print to a file."""
    torch.set_num_threads(1)
    log = os.open(folder / f"log-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _check(client: Client, load: Load) -> None:
    """See that the tensors arrive."""
    has = example(load)
    for name, pull in (("dense", client.pull), ("dense", client.pull_placed), ("values", client.pull_rows)):
        if pull is not None and not torch.equal(pull(), has[name]):
            raise RuntimeError(f"what was pulled is not what the server has: {name}")


def _turn(client: Client, repetitions: int) -> dict[str, float]:
    """Return the seconds of each thing, median of some repetitions, or their mean where one is too short to time."""
    gc.collect()
    found = {}
    for what in (*_DENSE, *_SMALL):
        act: Callable[[], object] | None = getattr(client, what)
        if act is None:
            continue
        act()
        if what in _DENSE:
            found[what] = statistics.median(_seconds(act, 1) for _ in range(_DENSE_REPETITIONS))
        else:
            _seconds(act, _SMALL_BEFORE)
            found[what] = _seconds(act, repetitions)
    return found


def _seconds(act: Callable[[], object], repetitions: int) -> float:
    began = time.perf_counter()
    for _ in range(repetitions):
        act()
    return (time.perf_counter() - began) / repetitions
