"""The workers of a run, as a supervisor keeps them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from paceline.errors import RankFailed
from paceline.train.rundir import RunDirectory
from paceline.train.servers.processes.children import START_AGAIN, Child, Children
from paceline.train.servers.recipe.section import ServerSection
from paceline.train.servers.supervisor.cluster import Cluster

_HASTY_S: Final = 5.0
"""A worker that is killed within this of its start may be so for a reason of its own, such as too little memory."""
_TRIES: Final = 10

log = logging.getLogger("paceline")


class Workforce:
    """Starts workers and starts anew those that were killed.

    Args:
        run: directory.
        server: the recipe's section.
        groups: whose servers workers of each group use; one where there are no groups.
        children: where processes are started.
    """

    def __init__(self, run: RunDirectory, server: ServerSection, groups: Sequence[Cluster], children: Children) -> None:
        self._run = run
        self._server = server
        self._groups = groups
        self._children = children
        self._workers: dict[str, tuple[Child, int]] = {}  # and the group
        self._bridges: dict[int, Child] = {}  # by group
        self._beside: dict[str, str] = {}  # servers that leave with a worker
        self._next = 0
        self._hasty = 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = str(max(1, cores // server.workers))

    @property
    def size(self) -> int:
        """Workers and bridges that are there."""
        return len(self._workers) + len(self._bridges)

    def start(self) -> None:
        """Start all workers, those of the groups in turns, and the bridges of groups."""
        if len(self._groups) > 1:
            for group in range(len(self._groups)):
                self._start_bridge(group)
        for number in range(self._server.workers):
            self._start_one(number % len(self._groups))

    def _start_one(self, group: int) -> None:
        name, cluster = f"worker-start-{self._next}", self._groups[group]
        if self._server.deployment == "colocated":
            self._beside[name] = cluster.start_server()
        arguments = [str(self._run.root), "--index", str(self._next)]
        if len(self._groups) > 1:
            arguments += ["--group", str(group)]
        self._next += 1
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", self._threads)}
        child = self._children.start(name, "paceline.train.servers.worker.process", *arguments, environment=environment)
        self._workers[name] = (child, group)

    def _start_bridge(self, group: int) -> None:
        server = self._server
        options = {"group": group, "groups": server.groups, "every": server.sync_every}
        arguments = [str(self._run.root), *(word for name, n in options.items() for word in (f"--{name}", str(n)))]
        child = self._children.start(f"bridge-{group}", "paceline.train.servers.groups.process", *arguments)
        self._bridges[group] = child

    def _look_at_bridges(self) -> None:
        for group, child in list(self._bridges.items()):
            code = child.code
            if code is None:
                continue
            del self._bridges[group]
            tail = child.tail()
            self._children.forget(child)
            if code > 0 and code != START_AGAIN:
                raise RankFailed(f"{child.name} ended with exit code {code}. The end of its log:\n{tail}")
            if code:
                self._count_hasty(child, tail)
                log.warning("%s was killed (%d); another goes on where it was", child.name, code)
                self._start_bridge(group)

    def look(self) -> None:
        """Take leave of workers that have ended, and replace those that were killed.

        Raises:
            RankFailed: one failed by a fault of its own.
        """
        self._look_at_bridges()
        for name, (child, group) in list(self._workers.items()):
            code = child.code
            if code is None:
                continue
            del self._workers[name]
            tail = child.tail()
            self._children.forget(child)
            if name in self._beside:
                self._groups[group].dismiss(self._beside.pop(name))
            if code > 0 and code != START_AGAIN:
                raise RankFailed(f"{child.name} ended with exit code {code}. The end of its log:\n{tail}")
            if code == 0:
                log.info("%s left", child.name)
                continue
            self._count_hasty(child, tail)
            if self._server.replace:
                self._start_one(group)
            another = "; another is started" if self._server.replace else ""
            log.warning("%s was killed (%d)%s", child.name, code, another)

    def _count_hasty(self, child: Child, tail: str) -> None:
        self._hasty = self._hasty + 1 if time.monotonic() - child.began < _HASTY_S else 0
        if self._hasty > _TRIES:
            raise RankFailed(f"{child.name} is killed as soon as it is started. The end of its log:\n{tail}")

    def _everybody(self) -> list[Child]:
        return [child for child, _ in self._workers.values()] + list(self._bridges.values())

    def end(self, number: int, patience_s: float, hurried: Callable[[], bool] = lambda: False) -> None:
        """Send all a signal, and see them to their end; without patience once that is hurried."""
        self._children.end(number, patience_s, self._everybody(), hurried)
        self._workers.clear()
        self._bridges.clear()

    def wait(self, patience_s: float) -> None:
        """Wait for workers to end by themselves, and end those that do not."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and any(child.code is None for child in self._everybody()):
            time.sleep(0.02)
        self.end(9, 0)
