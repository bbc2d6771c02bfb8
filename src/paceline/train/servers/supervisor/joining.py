"""Processes that join a run which somebody else started; they end with whoever started them, or when the run ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from paceline.errors import ExchangeError, RankFailed
from paceline.exchange.wire.address import bound
from paceline.runtime.job.signals import NotedSignals
from paceline.train.recipe import load_recipe
from paceline.train.rundir import RunDirectory
from paceline.train.servers.processes.children import Child, Children
from paceline.train.servers.processes.nursery import Nursery
from paceline.train.servers.rundir import exchange_of, part_of
from paceline.train.servers.watch.news import News

_POLL_S: Final = 0.05


def join_run(
    root: Path,
    kind: str,
    count: int,
    group: int | None = None,
    nursery: Nursery | None = None,
    *,
    bind: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Start workers or servers for a run, and return when all of them have ended.

    Args:
        root: directory of the run.
        kind: `worker` or `server`.
        count: how many.
        group: of a run with groups, which one.
        nursery: where they are started; None: each loads PyTorch itself.
        bind: of servers: the interface of this host that they listen on; None: that of the run.
        say: is told who has joined.

    Raises:
        ExchangeError: there is no such run, or no such interface.
        RankFailed: one of them failed.
        SystemExit: a signal had them leave; 130 for Ctrl-C, 143 for SIGTERM.
    """
    run = RunDirectory(root)
    directory = exchange_of(run, group)
    charter = directory.read()
    section = load_recipe(run.config).server
    if kind == "server" and section is not None and section.is_hogwild:
        raise ExchangeError(f"workers of {root} share memory (server.consistency: hogwild), and there are no servers.")
    if group is None and (groups := part_of(run).groups()):
        raise ExchangeError(f"{root} has groups: say which one with --group: {', '.join(map(str, groups))}.")
    if kind == "server":
        _check_interface(charter.bind if bind is None else bind)
    label = "" if group is None else f"-{group}"

    def joined(role: str, number: int, pid: int) -> str | None:
        log = children.joined(pid, f"{role}{label}-{number}")
        if log is not None:
            say(f"{role} {number} joined (its log: {log}.log)")
        return log

    with Children(root / "logs", nursery) as children, NotedSignals() as signals:
        news = News(directory.events, "", joined)
        list(news.new())  # of before
        for number in range(count):
            _start(children, run, kind, f"{kind}-joined-{os.getpid()}-{number}", group, bind)
        told = False
        while any(True for _ in children):
            if signals.received and not told:
                told = True
                for child in children:
                    child.send(signals.received[0])
            if len(signals.received) > 1:
                break
            list(news.new())  # of others, whoever started the run tells
            for child in children:
                _look(children, child, left=told)
            time.sleep(_POLL_S)
    if signals.received:
        raise SystemExit(128 + signals.received[0])


def _check_interface(bind: str) -> None:
    try:
        bound(bind, 0).close()
    except ExchangeError as error:
        raise ExchangeError(
            f"{error} A server that joins from another host than the run's is told with --bind."
        ) from None


def _start(children: Children, run: RunDirectory, kind: str, name: str, group: int | None, bind: str | None) -> None:
    if kind == "server":
        interface = [] if bind is None else ["--bind", bind]
        children.start(name, "paceline.exchange.server", str(exchange_of(run, group).root), *interface)
        return
    grouped = [] if group is None else ["--group", str(group)]
    children.start(name, "paceline.train.servers.worker.process", str(run.root), *grouped)


def _look(children: Children, child: Child, *, left: bool) -> None:
    code = child.code
    if code is None:
        return
    tail = child.tail()
    children.forget(child)
    if code > 0 or (code < 0 and not left):
        raise RankFailed(f"{child.name} ended with exit code {code}. The end of its log:\n{tail}")
