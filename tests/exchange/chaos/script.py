"""What happens to a job: servers, workers and the coordinator are killed, stopped, sent away and joined by others."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.exchange.chaos.cast import Actor, Cast


@dataclass
class Script:
    """Plays for some seconds, as a seed draws it.

    Servers are killed, stopped or sent away one at a time, when all shards have all their copies: what is promised is
    that a job survives one failure less than it has copies. Workers are treated as it comes.

    Attributes:
        done: how often each thing happened.
    """

    play: Cast
    seconds: float
    tasks_per_s: float
    draw: random.Random
    done: Counter[str] = field(default_factory=Counter)
    servers: list[Actor] = field(default_factory=list)
    workers: list[Actor] = field(default_factory=list)
    _due: list[tuple[float, Actor]] = field(default_factory=list)
    _leaving: list[Actor] = field(default_factory=list)

    def run(self) -> None:
        """Play; then wake who is stopped."""
        began = time.monotonic()
        acts: dict[str, Callable[[], bool]] = {
            "kill a server": lambda: self._part_with_a_server(signal.SIGKILL),
            "stop a server": lambda: self._part_with_a_server(signal.SIGSTOP),
            "send a server away": lambda: self._part_with_a_server(signal.SIGTERM),
            "add a server": self._add_a_server,
            "kill a worker": lambda: self._part_with_a_worker(signal.SIGKILL),
            "stop a worker": lambda: self._part_with_a_worker(signal.SIGSTOP),
            "send a worker away": lambda: self._part_with_a_worker(signal.SIGTERM),
            "add a worker": self._add_a_worker,
            "restart the coordinator": self._restart_the_coordinator,
        }
        while (now := time.monotonic() - began) < self.seconds:
            self.play.limit(int(now * self.tasks_per_s))
            self._wake(time.monotonic())
            # What has happened least is likeliest, of what can happen now.
            for name in sorted(acts, key=lambda act: self.done[act] + 2 * self.draw.random()):
                if acts[name]():
                    self.done[name] += 1
                    break
            time.sleep(self.draw.uniform(0.1, 0.9))
        self._wake(float("inf"))
        self.workers += [self.play.worker(0.01) for _ in range(2)]  # the others may be on their way out

    @property
    def _lease_s(self) -> float:
        return self.play.charter.terms.lease_s

    def _wake(self, now: float) -> None:
        for due in [due for due in self._due if due[0] <= now]:
            due[1].send(signal.SIGCONT)
            self._due.remove(due)

    def _settled(self) -> bool:
        """Whether all shards have all their copies, on servers that are still there."""
        status = self.play.status()
        view, copies = status["view"], self.play.charter.job.replication
        gone = {server.pid for server in self.servers if not server.lives}
        noticed = not any(member["pid"] in gone for member in status["members"])
        return noticed and not view.get("moves", True) and all(len(chain) == copies for chain in view["chains"])

    def _part_with_a_server(self, number: signal.Signals) -> bool:
        """Kill, stop or dismiss a server that serves; another must be able to take its place."""
        there = [server for server in self.servers if server.lives]
        stopped = [actor for _, actor in self._due]
        if len(there) <= self.play.charter.job.replication or any(server in stopped for server in there):
            return False
        if not self._settled():
            return False
        self._hit(self.draw.choice(there), number)
        return True

    def _part_with_a_worker(self, number: signal.Signals) -> bool:
        busy = [*self._leaving, *(actor for _, actor in self._due)]
        there = [worker for worker in self.workers if worker.lives and worker not in busy]
        if len(there) < 3:
            return False
        self._hit(self.draw.choice(there), number)
        return True

    def _hit(self, actor: Actor, number: signal.Signals) -> None:
        actor.send(number)
        if number is signal.SIGKILL:
            actor.end()  # else it may still be taken for one that is there
        if number is signal.SIGTERM:
            self._leaving.append(actor)
        if number is signal.SIGSTOP:  # for longer than its lease, or not quite
            lease_s = self._lease_s * self.draw.choice((0.4, 1.5))
            self._due.append((time.monotonic() + lease_s, actor))

    def _add_a_server(self) -> bool:
        if sum(server.lives for server in self.servers) > self.play.charter.job.replication + 2:
            return False
        self.servers.append(self.play.server())
        return True

    def _add_a_worker(self) -> bool:
        if sum(worker.lives for worker in self.workers) > 4:
            return False
        self.workers.append(self.play.worker(0.01))
        return True

    def _restart_the_coordinator(self) -> bool:
        if self.draw.random() > 0.3:
            return False
        self.play.coordinator.send(signal.SIGKILL)
        self.play.coordinator.end()
        time.sleep(self.draw.uniform(0.0, 0.5))
        self.play.start_coordinator()
        return True
