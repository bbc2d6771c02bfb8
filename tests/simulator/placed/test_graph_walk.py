"""Graphs in virtual time: what overlaps, what waits, and for whom."""

from dataclasses import dataclass

import pytest
import torch
from torch.fx import Graph, Node

from paceline.plan import Mesh
from paceline.program.fake import fake_mode
from paceline.runtime import collectives
from paceline.simulator.placed.ranks import Ranks
from paceline.simulator.placed.times import Times
from paceline.simulator.placed.walk import walk
from paceline.trace import Category

aten = torch.ops.aten


class Operators:
    """A product takes 4 s, everything else 1 s."""

    def seconds(self, node: Node) -> float:
        return 4.0 if node.target is aten.mm.default else 1.0


@dataclass
class Collectives:
    taken: float = 3.0

    def seconds(self, kind: str, nbytes: int, axis: str) -> float:
        return self.taken


def graph(work_between: bool = True) -> Graph:
    """x is exchanged while a product is computed."""
    found = Graph()
    x = found.placeholder("x")
    started = found.call_function(collectives.all_reduce, (x, "dp", 2))
    product = found.call_function(aten.mm.default, (x, x)) if work_between else x
    waited = found.call_function(collectives.wait, (started,))
    total = found.call_function(aten.add.Tensor, (waited, product))
    found.output((total,))
    with fake_mode():
        value = torch.empty(8, 8)
        for node in found.nodes:
            node.meta.update(val=value, module="block", backward=False)
    return found


def walked(
    times: Times, slowness: dict[int, float] | None = None, *, mesh: str = "dp=2", between: bool = True
) -> Ranks:
    ranks = Ranks(Mesh.parse(mesh), slowness or {}, times.launch_s)
    walk(graph(between), times, ranks)
    return ranks


def test_a_collective_is_hidden_behind_what_is_computed_meanwhile() -> None:
    ranks = walked(Times(Operators(), Collectives()))
    assert ranks.of(0, ranks.now) == 5.0
    assert ranks.of(0, ranks.exposed["dp"]) == 0.0


def test_what_is_not_hidden_is_exposed() -> None:
    ranks = walked(Times(Operators(), Collectives(6.0)))
    assert ranks.of(0, ranks.now) == 7.0
    assert ranks.of(0, ranks.exposed["dp"]) == 2.0
    assert ranks.of(0, ranks.computed) == 5.0


def test_without_overlap_it_is_done_in_the_wait() -> None:
    ranks = walked(Times(Operators(), Collectives(), overlap=False))
    assert ranks.of(0, ranks.now) == 8.0
    assert ranks.of(0, ranks.exposed["dp"]) == 3.0


def test_a_slow_rank_is_waited_for_along_its_axis_only() -> None:
    times = Times(Operators(), Collectives(), overlap=False)
    ranks = walked(times, {1: 2.0}, mesh="dp=2,tp=2")  # ranks 1 and 3 exchange along dp
    ended = [ranks.of(rank, ranks.now) for rank in range(4)]
    assert ended == [8.0, 13.0, 8.0, 12.0]  # 4 or 8, then 3 after both of a group, then 1 or 2
    assert ranks.of(3, ranks.exposed["dp"]) == 7.0


def test_a_device_waits_for_its_host() -> None:
    ranks = walked(Times(Operators(), Collectives(0.0), launch_s=2.5), between=False)
    assert ranks.of(0, ranks.now) == 6.0  # two starts, and a call of one second
    assert ranks.of(0, ranks.computed) == 1.0


def test_events_tell_modules_and_bytes() -> None:
    events = walked(Times(Operators(), Collectives(6.0))).events
    assert {(e.name, e.category) for e in events} == {
        ("mm", Category.COMPUTE),
        ("add", Category.COMPUTE),
        ("all_reduce dp", Category.NETWORK),
        ("all_reduce dp", Category.WAIT),
    }
    (sent,) = [e for e in events if e.category is Category.NETWORK]
    assert sent.arguments == {"module": "block", "bytes": 256}
    assert {e.rank for e in events} == {0}


def test_repeating_is_walking_once_more() -> None:
    times = Times(Operators(), Collectives(6.0))
    once = Ranks(Mesh.parse("dp=2"))
    walk(graph(), times, once)
    before = once.snapshot()
    walk(graph(), times, once)
    once.repeat(before, 2)
    often = Ranks(Mesh.parse("dp=2"))
    for _ in range(4):
        walk(graph(), times, often)
    assert once.now == pytest.approx(often.now)
    assert once.computed == pytest.approx(often.computed)
    assert once.exposed["dp"] == pytest.approx(often.exposed["dp"])
    assert once.handed_bytes == often.handed_bytes
