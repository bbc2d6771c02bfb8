"""Rows pulled and pushed through a server: tables, clocks and messages together, by each transport.

Settings: `message_rows` and `message_width` of a pull or push, `message_shards` that the server holds (several numbers:
each in turn), `message_ways`, `message_rounds`, `message_repetitions` in a round. One worker and one server, processes
of their own; a push is of one task and is acknowledged before the next one begins. The table has 100,000 rows, so that
what is measured is messages; `rows` has tables beyond the cache.
Rates are of the time that went by, and of the processor time of either process: what one core could do of its part.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench import options as given
from paceline.bench.statistics import spread
from paceline.bench.table import quartiles
from paceline.exchange.client.client import ServerExchange
from paceline.exchange.interface import Rows
from paceline.exchange.job import Consistency, Job, Rule, SparseTable
from paceline.exchange.server.server import Server
from paceline.exchange.shard.shard import Shard
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address, Move, Turn, View
from paceline.exchange.wire.listen import Listener

_SECRET: Final = b"of a benchmark"
_SERVER, _WORKER = 1, 2
_WAYS: Final = ("shared", "unix", "tcp")
_KEYS: Final = 100_000
_BATCHES: Final = 16
_PATIENCE_S: Final = 120.0


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    message_rows: int = 1000
    message_width: int = 16
    message_shards: tuple[int, ...] = (1, 16)
    message_ways: tuple[str, ...] = _WAYS
    message_rounds: int = 10
    message_repetitions: int = 200


READERS: Final[dict[str, given.Reader]] = {
    "message_rows": partial(given.whole_number, least=1),
    "message_width": partial(given.whole_number, least=1),
    "message_shards": partial(given.whole_numbers, least=1),
    "message_ways": partial(given.texts, known=list(_WAYS)),
    "message_rounds": partial(given.whole_number, least=1),
    "message_repetitions": partial(given.whole_number, least=1),
}
KEYS: Final = tuple(READERS)


@dataclass(frozen=True)
class _Time:
    """Seconds of one message: that went by, and of the processor in the worker's process and in the server's."""

    wall: float
    worker: float
    server: float


def run(options: dict[str, str]) -> dict[str, Any]:
    """Measure; return `messages`, the rates of each way, and `settings`."""
    settings = given.settings_with(Settings(), options, READERS)
    found = [
        {"way": way, "shards": shards, **_rates(_measured(way, shards, settings), settings.message_rows)}
        for way in settings.message_ways
        for shards in settings.message_shards
    ]
    return {"messages": found, "settings": asdict(settings)}


def _rates(times: Mapping[str, Sequence[_Time]], rows: int) -> dict[str, Any]:
    """Return rows a second: medians, and quartiles in `spread`."""
    rates = {
        f"{what}_{of}_rows_s": spread([rows / getattr(one, of) for one in of_rounds])
        for what, of_rounds in times.items()
        for of in ("wall", "worker", "server")
    }
    medians: dict[str, Any] = {key: rate.median for key, rate in rates.items()}
    return medians | {"spread": {key: rate.to_json() for key, rate in rates.items()}}


def _measured(way: str, shards: int, settings: Settings) -> dict[str, list[_Time]]:
    rule = Rule("adagrad", {"lr": 0.1})
    table = SparseTable("rows", settings.message_width, rule=rule, consistency=Consistency.parse("asp"))
    charter = Charter(Job((table,), shards=shards), Terms(tasks=2**40), Address(), transport=way, log=False)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        ours, theirs = spawn.Pipe()
        server = spawn.Process(target=_serve, args=(charter, folder, theirs), daemon=True)
        server.start()
        theirs.close()
        try:
            return _worked(charter, ours, settings)
        finally:
            ours.close()
            server.join(10)
            server.kill()


def _heard(pipe: Connection) -> Any:
    if not pipe.poll(_PATIENCE_S):
        raise RuntimeError(f"no word of the server within {_PATIENCE_S:g} s")
    return pipe.recv()


def _worked(charter: Charter, pipe: Connection, settings: Settings) -> dict[str, list[_Time]]:
    """Be the worker."""
    count, width = settings.message_rows, settings.message_width
    view = _view(charter.job, Address(**_heard(pipe)))
    exchange = ServerExchange(charter, _Member(_WORKER, view), _SECRET, outstanding=0)
    keys = [torch.randperm(max(_KEYS, count))[:count] for _ in range(_BATCHES)]
    gradients, out = torch.randn(count, width), torch.empty(count, width)
    task = iter(range(2**40))

    def push(number: int) -> None:
        exchange.push((next(task),), {}, {0: Rows(keys[number % _BATCHES], gradients)})

    def pull(number: int) -> None:
        exchange.pull_rows(0, keys[number % _BATCHES], out, 0)

    times: dict[str, list[_Time]] = {"pull": [], "push": []}
    with contextlib.closing(exchange), _one_thread():
        for turn in range(1 + settings.message_rounds):
            for what, act in (("push", push), ("pull", pull)):
                before = _clocks(pipe)
                for number in range(settings.message_repetitions):
                    act(number)
                after = _clocks(pipe)
                if turn:  # the first makes rows and connections
                    each = [(b - a) / settings.message_repetitions for a, b in zip(before, after, strict=True)]
                    times[what].append(_Time(*each))
    return times


def _clocks(pipe: Connection) -> tuple[float, float, float]:
    pipe.send("")
    server: float = _heard(pipe)
    return time.perf_counter(), time.process_time(), server


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _serve(charter: Charter, folder: str, pipe: Connection) -> None:
    """Be the server until nobody asks for its processor time any more."""
    torch.set_num_threads(1)
    listener = Listener("127.0.0.1", _SECRET, unix=str(Path(folder) / "socket"))
    failures: list[BaseException] = []
    member = _Member(_SERVER, _view(charter.job, listener.address))
    server = Server(charter, _SECRET, member, listener, partial(Shard, charter.job), None, failures.append)
    server.start()
    while not server.keeper.held and not failures:
        time.sleep(0.01)
    pipe.send(asdict(listener.address))
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send(time.process_time())
    server.close()


def _view(job: Job, address: Address) -> View:
    return View(1, {_SERVER: address}, ((_SERVER,),) * job.shards, (), 1)


class _Member:
    """A member of a job whose view never changes."""

    fenced = orphans = False
    trusted = True
    failure = ""

    def __init__(self, id: int, view: View) -> None:
        self.id, self.view = id, view
        self._never = threading.Event()

    def wait_for_view(self, newer_than: int, timeout_s: float) -> View:
        """See `membership.Member`."""
        if newer_than >= self.view.epoch:
            self._never.wait(timeout_s)
        return self.view

    def on_view(self, callback: object) -> None:
        """See `membership.Member`."""

    def synced(self, move: Move) -> None:
        """See `membership.Member`."""

    def turned(self, turn: Turn) -> None:
        """See `membership.Member`."""

    def unreached(self, server: int) -> None:
        """See `membership.Member`."""


def show(console: Console, result: dict[str, Any]) -> None:
    """Print what `run` returned."""
    settings = result["settings"]
    console.print(
        f"{settings['message_rows']} rows of {settings['message_width']} a message, through a server, one after the "
        f"other; {settings['message_rounds']} rounds; millions of rows a second. Medians, quartiles in brackets.",
        highlight=False,
    )
    table = Table(title="messages", title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("", "shards"):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    kinds = [(what, of) for what in ("push", "pull") for of in ("wall", "server", "worker")]
    for what, of in kinds:
        table.add_column(f"{what}\n{'' if of == 'wall' else f'a core of the {of}'}", justify="right", no_wrap=True)
    for one in result["messages"]:
        cells = [quartiles(one["spread"][f"{what}_{of}_rows_s"], 1e-6, 2) for what, of in kinds]
        table.add_row(one["way"], str(one["shards"]), *cells)
    console.print(table)
