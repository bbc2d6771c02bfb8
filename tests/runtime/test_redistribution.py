"""Redistributions of random tensors, run by all ranks: the global value never changes, whatever the placements."""

from __future__ import annotations

from math import prod

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from paceline.placement.calls import call_of
from paceline.placement.placements import PARTIAL, REPLICATE, Placement, Shape, Shard, divides, local_shape
from paceline.placement.redistribute import can_redistribute, redistribute
from paceline.placement.rules import MapRule, Strategy, rule_of
from paceline.plan import Mesh
from paceline.runtime import collectives
from paceline.runtime.passes.communicate import communicate
from tests.runtime.graphs import Writer, gather, integers, local_of, run, scatter, starts

QUICK = settings(max_examples=80)
sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12])
shapes = st.lists(sizes, min_size=1, max_size=3).map(tuple).filter(lambda shape: prod(shape) <= 500)
shards = st.builds(Shard, st.integers(0, 2), st.sampled_from([1, 1, 2, 3]))
placements: st.SearchStrategy[Placement] = st.one_of(st.just(REPLICATE), st.just(PARTIAL), shards)
meshes = st.tuples(st.sampled_from([2, 3]), st.sampled_from([2, 3])).map(
    lambda parts: Mesh((("dp", parts[0]), ("fsdp", parts[1])))
)


def possible(shape: Shape, source: Placement, target: Placement, parts: int) -> bool:
    # A term of a sum is only ever made of a replicated tensor, and nothing is moved to where it is.
    return (
        divides(shape, source, parts)
        and divides(shape, target, parts)
        and can_redistribute(source, target)
        and source != target
    )


@QUICK
@given(shapes, placements, placements, st.sampled_from([2, 3]))
def test_along_one_axis(shape: Shape, source: Placement, target: Placement, parts: int) -> None:
    assume(possible(shape, source, target, parts))
    mesh = Mesh((("fsdp", parts),))
    whole = integers(shape)
    writer = Writer()
    x = writer.input(local_shape(shape, source, parts))
    graph = writer.output([writer.move(x, source, target, "fsdp", parts)])
    communicate(graph, 0)
    (found,) = run(graph, mesh, [scatter(whole, [source], mesh)])
    assert torch.equal(gather(found, [target], mesh), whole)


@QUICK
@given(meshes, shapes, placements, placements, placements)
def test_an_inner_axis_follows_through_the_outer_ones_move(
    mesh: Mesh, shape: Shape, source: Placement, target: Placement, inner: Placement
) -> None:
    """The rule says how the pieces of the inner axis are placed after the outer axis was redistributed: run it."""
    outer_parts, inner_parts = mesh["dp"], mesh["fsdp"]
    assume(possible(shape, source, target, outer_parts))
    local = local_shape(shape, source, outer_parts)
    assume(divides(local, inner, inner_parts))
    writer = Writer()
    call = call_of(writer.move(writer.input(local), source, target, "dp", outer_parts))
    rule = rule_of(call)
    assert isinstance(rule, MapRule)
    after = rule.forward(inner, inner_parts)
    assume(after is not None and divides(local_shape(shape, target, outer_parts), after, inner_parts))
    assert after is not None
    back = rule.backward(after, inner_parts)
    assert back is None or rule.forward(back, inner_parts) == after
    changed = rule.localize(dict(call.arguments), Strategy((inner,), (after,)), inner_parts)
    writer = Writer()
    x = writer.input(local_of(shape, [source, inner], mesh))
    graph = writer.output([writer.move(x, changed.get("1", source), changed.get("2", target), "dp", outer_parts)])
    communicate(graph, 0)
    whole = integers(shape)
    (found,) = run(graph, mesh, [scatter(whole, [source, inner], mesh)])
    assert torch.equal(gather(found, [target, after], mesh), whole)


@QUICK
@given(st.data(), meshes, st.integers(0, 3000))
def test_many_in_one_graph_share_buckets(data: st.DataObject, mesh: Mesh, bucket_bytes: int) -> None:
    """Gradients and parameters of several tensors and both axes, in buckets of any size."""
    writer, inputs, wholes, targets, nodes = Writer(), [], [], [], []
    for _ in range(data.draw(st.integers(1, 6))):
        shape = data.draw(shapes)
        axis = data.draw(st.sampled_from(mesh.names))
        source, target = data.draw(placements), data.draw(placements)
        if not possible(shape, source, target, mesh[axis]):
            continue
        before, after = ([p if name == axis else REPLICATE for name in mesh.names] for p in (source, target))
        x = writer.input(local_of(shape, before, mesh))
        moved = writer.move(x, source, target, axis, mesh[axis])
        nodes.append(writer.call(torch.ops.aten.mul.Tensor, moved, 2.0) if data.draw(st.booleans()) else moved)
        wholes.append(integers(shape))
        inputs.append(scatter(wholes[-1], before, mesh))
        targets.append(after)
    assume(nodes)
    factors = [1.0 if node.target is redistribute else 2.0 for node in nodes]
    graph = writer.output(nodes)
    communicate(graph, bucket_bytes)
    if bucket_bytes == 0:
        assert not any(node.target is torch.ops.aten.cat.default for node in graph.nodes)
    for found, whole, after, factor in zip(run(graph, mesh, inputs), wholes, targets, factors, strict=True):
        assert torch.equal(gather(found, after, mesh), factor * whole)


def test_what_needs_no_communication_makes_none() -> None:
    writer = Writer()
    x = writer.input((4, 6))
    cut = writer.move(x, REPLICATE, Shard(1, 3), "dp", 2)
    term = writer.move(x, REPLICATE, PARTIAL, "dp", 2)
    graph = writer.output([cut, term])
    communicate(graph, 1 << 20)
    assert not starts(graph)
    whole, mesh = integers((4, 6)), Mesh.parse("dp=2")
    pieces, terms = run(graph, mesh, [[whole, whole]])
    assert torch.equal(gather(pieces, [Shard(1, 3)], mesh), whole)
    assert torch.equal(terms[0], whole) and not terms[1].any()


@pytest.mark.parametrize("target", [REPLICATE, Shard(0), Shard(1)])
def test_the_collective_of_a_sum(target: Placement) -> None:
    writer = Writer()
    graph = writer.output([writer.move(writer.input((4, 6)), PARTIAL, target, "dp", 2)])
    communicate(graph, 0)
    (start,) = starts(graph)
    assert start.target is (collectives.all_reduce if target == REPLICATE else collectives.reduce_scatter)
