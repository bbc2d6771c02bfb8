"""What must be true of a job once it is over, read from what it left behind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from paceline.exchange.replay.whole import replay
from paceline.exchange.shard.log import read_log, read_updates
from paceline.exchange.shard.snapshot import load_shard
from tests.exchange.chaos.cast import Cast
from tests.exchange.chaos.toil import Toil


def check(play: Cast) -> None:
    """Check all of it."""
    check_masters(play)
    check_tasks(play)
    check_result(play)


def check_result(play: Cast) -> None:
    """What is on disk at the end is what the logs say, computed once more, bit for bit."""
    outcome = replay(play.directory, lambda worker, exchange, dealer: Toil(exchange, dealer).run())
    assert outcome.difference is None, outcome


def check_tasks(play: Cast) -> None:
    """Every task is applied to every shard, once."""
    job, terms = play.charter.job, play.charter.terms
    last = play.directory.snapshot(play.status()["snapshot"])
    final = {shard: load_shard(last, job, shard).position for shard in range(job.shards)}
    logs = read_updates(sorted(play.directory.root.glob("updates/server-*.log")), final=final)
    for shard in range(job.shards):
        tasks = sorted(task for record in logs[shard] for task in record.tasks)
        assert tasks == list(range(terms.tasks)), f"shard {shard}"


class Said(NamedTuple):
    """A server said that it goes by a view."""

    server: int
    epoch: int
    master_of: frozenset[int]


def check_masters(play: Cast) -> None:
    """Every shard has one master in every epoch: the coordinator says so, and servers agree, in words and deeds."""
    views = {event["epoch"]: event for event in play.events("view") if event["chains"]}
    # A coordinator that was killed had its view in the journal, and maybe not yet among the events.
    untold = set(range(min(views), max(views) + 1)) - views.keys()
    assert untold <= {event["epoch"] for event in play.events("recovered")}
    for epoch, view in views.items():
        assert all(view["chains"]), f"epoch {epoch} has a shard without a master: {view}"
        assert all(len(set(chain)) == len(chain) for chain in view["chains"]), f"epoch {epoch}: {view}"
    masters: Counter[tuple[int, int]] = Counter()
    for said in _said(play):
        masters.update((said.epoch, shard) for shard in said.master_of)
        if said.epoch in views:
            heads = {shard for shard, chain in enumerate(views[said.epoch]["chains"]) if chain[0] == said.server}
            assert said.master_of == heads, said
    assert set(masters.values()) == {1}
    for path in play.directory.root.glob("updates/server-*.log"):
        server = int(path.stem.partition("-")[2])
        for record in read_log(path):
            if view := views.get(record.epoch):
                copies = [move[2] for move in view["moves"] if move[0] == record.shard]
                assert server in (*view["chains"][record.shard], *copies), (server, record)


def _said(play: Cast) -> Iterator[Said]:
    for actor in play.actors:
        for line in actor.said.splitlines():
            if found := re.search(r"server (\d+) in epoch (\d+): master of ([\d, ]+|none);", line):
                shards = frozenset() if found[3] == "none" else frozenset(map(int, found[3].split(",")))
                yield Said(int(found[1]), int(found[2]), shards)
