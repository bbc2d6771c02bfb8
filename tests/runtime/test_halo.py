"""Windows of split tensors: their rows, in one process and over processes, against indexing the whole tensor."""

from __future__ import annotations

import random
from dataclasses import dataclass

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor
from torch.fx import Graph, Node

from paceline.placement.pieces import take
from paceline.placement.placements import Shard
from paceline.placement.windows import Edge, Rows, foreign_rows, window, window_sum
from paceline.plan import Mesh
from paceline.runtime.binding import AxisGroup
from paceline.runtime.executor import ProcessExecutor
from paceline.runtime.job.world import World
from paceline.runtime.passes.communicate import communicate
from paceline.verify.traffic import Volume, traffic
from tests.ranks import ranks
from tests.runtime.graphs import Writer, integers, run

QUICK = settings(max_examples=150, derandomize=True, database=None)
EDGES: list[Edge] = ["lowest", "nearest", "reflect", "wrap", 0.0, 2.5]


@dataclass(frozen=True)
class Case:
    """A window on a tensor of `piece` rows a rank, along `dim` of three."""

    parts: int
    piece: int
    dim: int
    rows: Rows
    edge: Edge

    @property
    def size(self) -> int:
        return self.piece * self.parts

    def shape(self, rows: int) -> tuple[int, ...]:
        return tuple(rows if d == self.dim else n for d, n in enumerate((2, 3, 2)))


cases = st.builds(
    Case,
    parts=st.integers(2, 4),
    piece=st.integers(1, 5),
    dim=st.integers(0, 2),
    rows=st.builds(Rows, first=st.integers(-9, 9), step=st.integers(-7, 7), length=st.integers(1, 12)),
    edge=st.sampled_from(EDGES),
)


def row(whole: Tensor, dim: int, at: int, edge: Edge) -> Tensor:
    """One row of a tensor, or what is beyond its edge: written apart from the code, and as plainly as can be."""
    size = whole.shape[dim]
    if 0 <= at < size:
        return whole.select(dim, at)
    if edge == "nearest":
        return whole.select(dim, 0 if at < 0 else size - 1)
    if edge == "wrap":
        return whole.select(dim, at % size)
    if edge == "reflect":
        while not 0 <= at < size:
            at = -at if at < 0 else 2 * (size - 1) - at
            at = 0 if size == 1 else at
        return whole.select(dim, at)
    return torch.full_like(whole.select(dim, 0), float("-inf") if edge == "lowest" else float(edge))


def windows_of(whole: Tensor, case: Case) -> list[Tensor]:
    return [
        torch.stack([row(whole, case.dim, at, case.edge) for at in case.rows.of(rank)], case.dim)
        for rank in range(case.parts)
    ]


def window_in(writer: Writer, case: Case, dtype: torch.dtype = torch.float64) -> Node:
    x, rows = writer.input(case.shape(case.piece), dtype), case.rows
    return writer.call(window, x, case.dim, rows.first, rows.step, rows.length, case.edge, "hw", case.parts)


def sum_in(writer: Writer, case: Case) -> Node:
    x, rows = writer.input(case.shape(case.rows.length)), case.rows
    where = case.dim, rows.first, rows.step, rows.length, case.size
    return writer.call(window_sum, x, *where, case.edge, "hw", case.parts)


def finished(writer: Writer, *found: Node) -> Graph:
    graph = writer.output(found)
    communicate(graph, 0)
    return graph


def window_graph(case: Case, dtype: torch.dtype = torch.float64) -> Graph:
    writer = Writer()
    return finished(writer, window_in(writer, case, dtype))


def sum_graph(case: Case) -> Graph:
    writer = Writer()
    return finished(writer, sum_in(writer, case))


def pieces(whole: Tensor, case: Case) -> list[Tensor]:
    return [take(whole, Shard(case.dim), case.parts, rank) for rank in range(case.parts)]


def inner(a: list[Tensor], b: list[Tensor]) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))


@QUICK
@given(cases)
def test_a_window_is_the_rows_of_the_whole_tensor(case: Case) -> None:
    whole = integers(case.shape(case.size))
    (found,) = run(window_graph(case), Mesh((("hw", case.parts),)), [pieces(whole, case)])
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, windows_of(whole, case), strict=True))


@QUICK
@given(cases)
def test_the_sum_is_the_adjoint(case: Case) -> None:
    if case.edge not in ("nearest", "reflect", "wrap"):
        case = Case(case.parts, case.piece, case.dim, case.rows, 0.0)
    mesh = Mesh((("hw", case.parts),))
    x, y = integers(case.shape(case.size)), [integers(case.shape(case.rows.length)) for _ in range(case.parts)]
    (windows,) = run(window_graph(case), mesh, [pieces(x, case)])
    (sums,) = run(sum_graph(case), mesh, [y])
    assert inner(windows, y) == inner(pieces(x, case), sums)


def test_whole_numbers_and_booleans_have_windows_too() -> None:
    case = Case(2, 2, 0, Rows(-1, 2, 4), "lowest")
    whole = torch.arange(24).view(4, 3, 2)
    (found,) = run(window_graph(case, torch.int64), Mesh.parse("hw=2"), [pieces(whole, case)])
    assert found[0][0].eq(torch.iinfo(torch.int64).min).all() and torch.equal(found[0][1:], whole[:3])
    case = Case(2, 2, 0, Rows(-1, 2, 4), 0.0)
    (found,) = run(window_graph(case, torch.bool), Mesh.parse("hw=2"), [pieces(whole > 4, case)])
    assert not found[0][0].any() and torch.equal(found[0][1:], whole[:3] > 4)


def test_the_rows_that_a_window_needs_of_others() -> None:
    assert foreign_rows(Rows(-1, 4, 6), 8, 0.0, 2) == 1
    assert foreign_rows(Rows(-1, 4, 6), 16, 0.0, 4) == 2
    assert foreign_rows(Rows(0, 4, 4), 8, 0.0, 2) == 0
    assert foreign_rows(Rows(4, -4, 4), 8, 0.0, 2) == 4


def test_traffic_is_that_of_the_rank_that_sends_most() -> None:
    case = Case(3, 4, 1, Rows(-1, 4, 7), 0.0)  # a row to the next rank, two to the one before
    assert traffic(window_graph(case)) == {"halo": Volume(1, 3 * 2 * 2 * 8)}
    assert traffic(sum_graph(case)) == {"halo": Volume(1, 3 * 2 * 2 * 8)}


def _drawn(seed: int, parts: int) -> Case:
    draw = random.Random(seed)
    rows = Rows(draw.randint(-9, 9), draw.randint(-7, 7), draw.randint(1, 12))
    return Case(parts, draw.randint(1, 5), draw.randint(0, 2), rows, draw.choice(EDGES))


def _check_over_processes(rank: int, size: int, *, compile: bool, count: int) -> None:
    """Many windows and sums in one graph: all of them start before the first is waited for."""
    group = dist.group.WORLD
    assert group is not None
    mesh, groups = Mesh((("hw", size),)), {"hw": AxisGroup(group.group_name, rank, group)}
    torch.manual_seed(0)
    writer, nodes, given, wanted = Writer(), [], [], []
    for seed in range(count):
        case = _drawn(seed, size)
        whole, windows = integers(case.shape(case.size)), [integers(case.shape(case.rows.length)) for _ in range(size)]
        nodes += [window_in(writer, case), sum_in(writer, case)]
        given += [pieces(whole, case)[rank], windows[rank]]
        (sums,) = run(sum_graph(case), mesh, [windows])
        wanted += [windows_of(whole, case)[rank], sums[rank]]
    executor = ProcessExecutor(rank, groups, mesh=mesh, compile=compile)
    found = executor.prepare(finished(writer, *nodes), {})([given])[0]
    for mine, serial in zip(found, wanted, strict=True):
        assert torch.equal(mine, serial) and mine.is_contiguous()


@ranks(3)
def test_over_processes(world: World, rank: int) -> None:
    _check_over_processes(rank, world.size, compile=False, count=60)


@ranks(2, backend="gloo")
def test_over_processes_by_sockets(world: World, rank: int) -> None:
    _check_over_processes(rank, world.size, compile=False, count=60)


@ranks(2)
def test_compiled(world: World, rank: int) -> None:
    _check_over_processes(rank, world.size, compile=True, count=2)
