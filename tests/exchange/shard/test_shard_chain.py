"""Replicas that die at any moment, pushes that come again, and logs: what is left is the replay of what was agreed."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.exchange.job import Job
from paceline.exchange.shard.log import Record, UpdateLog, read_updates
from paceline.exchange.shard.norms import Stage, closing
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Update
from tests.exchange.shard import jobs

TASKS = 16


class _Server:
    def __init__(self, number: int, shard: Shard, folder: Path) -> None:
        self.shard = shard
        self.path = folder / f"server-{number}.log"
        self.log = UpdateLog(self.path, number)
        self.inbox: deque[tuple[int, Update]] = deque()  # position, update


class _Chain:
    """A chain of servers for one shard, by hand: the head applies, each hands on in order, the tail acknowledges."""

    def __init__(self, job: Job, servers: int, folder: Path) -> None:
        self.job, self.folder, self.epoch = job, folder, 1
        self.every = [_Server(number, jobs.begun(job), folder) for number in range(servers)]
        self.alive = list(self.every)
        self.applied: list[Update] = []  # by position, as the head sees it
        self.acknowledged: set[int] = set()
        self.known: dict[int, Update] = {}  # updates by task, as the clients hold them
        self.closings: dict[int, Update] = {}

    def push(self, update: Update) -> None:
        head = self.alive[0]
        if not self._apply(head, update):
            self._acknowledge()

    def _apply(self, server: _Server, update: Update) -> bool:
        applied = server.shard.apply(update)
        if applied.repeated:
            return False
        record = Record(
            self.epoch, 0, applied.position, update.worker, update.sequence, applied.staleness, update.tasks
        )
        server.log.append([record])
        if server is self.alive[0]:
            self.applied.append(update)
        at = self.alive.index(server)
        if at + 1 < len(self.alive):
            self.alive[at + 1].inbox.append((applied.position, update))
        self._acknowledge()
        return True

    def _acknowledge(self) -> None:
        tail = self.alive[-1].shard
        self.acknowledged |= {task for update in self.applied[: tail.position] for task in update.tasks}

    def deliver(self, which: int) -> None:
        server = self.alive[which % len(self.alive)]
        if server.inbox:
            position, update = server.inbox.popleft()
            if position > server.shard.position:
                assert self._apply(server, update)

    def close(self) -> None:
        """Somebody closes the step that the tail has all pieces of, if it is clipped, or says so again."""
        tail = self.alive[-1].shard
        share = tail.share(tail.completed)
        if share.stage is Stage.WHOLE:
            self.closings[tail.completed] = closing(tail.completed, math.sqrt(share.value))
        for update in list(self.closings.values())[-2:]:
            self.push(update)

    def join(self) -> None:
        """A new tail goes on from the state of the old one."""
        shard = Shard.of(self.job, 0, self.alive[-1].shard.state())
        self.alive.append(_Server(len(self.every), shard, self.folder))
        self.every.append(self.alive[-1])
        self.epoch += 1

    def kill(self, which: int) -> None:
        """A server dies; its successor gets all again that it may lack, and the others go on in a new epoch."""
        if len(self.alive) == 1:
            return
        del self.alive[which % len(self.alive)]
        self.epoch += 1
        del self.applied[self.alive[0].shard.position :]
        self.alive[0].inbox.clear()  # of an epoch that is over
        for before, server in zip(self.alive, self.alive[1:], strict=False):
            start = server.shard.position
            server.inbox = deque(enumerate(self.applied[start : before.shard.position], start + 1))
        self._acknowledge()


def _new(chain: _Chain, task: int, worker: int, sequence: int) -> Update:
    shard = chain.alive[-1].shard
    return jobs.update(shard, task, worker=worker, sequence=sequence, read=shard.position)


@given(
    mode=st.sampled_from(["bsp", "ssp(1)", "asp", "clipped"]),
    servers=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40)
def test_what_is_acknowledged_stays_and_counts_once(mode: str, servers: int, seed: int) -> None:
    random = Random(seed)
    with TemporaryDirectory() as folder:
        clip = 0.5 if mode == "clipped" else None
        mode = "bsp" if mode == "clipped" else mode
        chain = _Chain(replace(jobs.job(mode, mode, pieces=2, shards=1), clip=clip), servers, Path(folder))
        sequences = [0] * 5
        waiting = deque(range(TASKS))
        for event in random.choices("pdrokjc", weights=(8, 12, 2, 2, 2, 1, 4), k=100):
            which = random.randrange(4)
            tail = chain.alive[-1].shard
            if event == "p" and waiting and all(tail.ready(t, chain.job.clock(waiting[0])) for t in tail.tables):
                task = waiting.popleft()
                sequences[which] += 1
                chain.known[task] = _new(chain, task, which + 1, sequences[which])
                chain.push(chain.known[task])
            elif event == "d":
                chain.deliver(which)
            elif event == "r" and chain.known:  # the same push comes again
                chain.push(random.choice(list(chain.known.values())))
            elif event == "o" and chain.known:  # its worker is taken for dead: another one computes it anew
                task = random.choice(list(chain.known))
                sequences[4] += 1
                again = _new(chain, task, 5, sequences[4])
                chain.known[task] = random.choice([chain.known[task], again])
                chain.push(again)
            elif event == "k":
                chain.kill(which)
            elif event == "j":
                chain.join()
            elif event == "c":
                chain.close()
            tail = chain.alive[-1].shard
            assert all(tail.apply(chain.known[task]._replace(sequence=10**6)).repeated for task in chain.acknowledged)
        for update in chain.known.values():
            chain.push(update)
        for turn in range(len(chain.alive) * TASKS):
            chain.deliver(turn)
            for which in range(len(chain.alive)):
                chain.deliver(which)
            chain.close()
        assert chain.acknowledged == set(chain.known)
        _check_replay(chain)


def _check_replay(chain: _Chain) -> None:
    """All replicas are equal, and the logs of all servers, dead ones too, give the same again."""
    first = chain.alive[0].shard
    for server in chain.alive[1:]:
        jobs.assert_same(first.state(), server.shard.state())
    agreed = read_updates([server.path for server in chain.every], {0: 0}, {0: first.position})
    assert [record.tasks for record in agreed[0]] == [update.tasks for update in chain.applied]
    again = jobs.begun(chain.job)
    by_origin = {(update.worker, update.sequence): update for update in chain.applied}
    for record in agreed[0]:
        applied = again.apply(by_origin[record.worker, record.sequence])
        assert (applied.position, applied.staleness) == (record.position, record.staleness)
    jobs.assert_same(first.state(), again.state())
