"""Axes of one rank split nothing, whatever they are for, and nothing moves along them."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch.fx import Graph

from paceline.placement.place import place
from paceline.placement.placements import REPLICATE
from paceline.plan import Mesh, Pin, Plan
from paceline.planner.explain import explain
from paceline.program.capture import capture
from paceline.runtime.job.world import World
from paceline.runtime.module import PlacedModule, parallelize
from paceline.runtime.step import Step
from paceline.runtime.traffic import exchanges
from paceline.train.checkpoint import Checkpointer
from paceline.verify.run import verify
from tests.ranks import ranks
from tests.runtime.steps import Stack, batch, graphs

ONE = ["dp=1", "fsdp=1", "tp=1", "sp=1", "hw=1", "auto=1", "dp=1,tp=1"]


def trained(mesh: str, **options: object) -> PlacedModule:
    """A module after one step, in this process alone."""
    plan = Plan(Mesh.parse(mesh)).with_(**options)
    devices = None if plan.mesh.size == 1 else ["cpu"]
    parallel = parallelize(Stack(1), batch(), plan, devices=devices)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel(*batch()).backward()
    optimizer.step()
    return parallel


def assert_trained(parallel: PlacedModule) -> None:
    serial = Stack(1)
    optimizer = torch.optim.SGD(serial.parameters(), lr=0.1)
    serial(*batch()).backward()
    optimizer.step()
    for name, tensor in parallel.full_state_dict().items():
        torch.testing.assert_close(tensor, serial.state_dict()[name], rtol=1e-12, atol=1e-12, msg=name)


def along(graph: Graph, axis: str) -> list[object]:
    return [found for found in exchanges(graph) if found.axis == axis]


@pytest.mark.parametrize("mesh", ONE)
def test_one_rank_trains_as_the_serial_module(mesh: str) -> None:
    parallel = trained(mesh)
    assert_trained(parallel)
    assert not [found for graph in graphs(parallel.step(*batch())) for found in exchanges(graph)]
    everywhere = (REPLICATE,) * len(parallel.mesh.axes)
    assert {parallel.placements(name) for name in parallel.state_names} == {everywhere}
    assert all(shard.owner for shard in parallel.shards())


@pytest.mark.parametrize("mesh", ["dp=1,tp=2", "tp=2,dp=1", "fsdp=2,tp=1"])
def test_beside_others_they_are_as_if_they_were_not_there(mesh: str) -> None:
    (one,) = [axis for axis, parts in Mesh.parse(mesh).axes if parts == 1]
    (other,) = [f"{axis}={parts}" for axis, parts in Mesh.parse(mesh).axes if parts > 1]
    without, step = (parallelize(Stack(1), batch(), Plan(Mesh.parse(m)), devices=["cpu"]) for m in (other, mesh))
    steps: list[Step] = [found.step(*batch()) for found in (without, step)]
    for mine, theirs in zip(*map(graphs, steps), strict=True):
        assert [str(n.target) for n in mine.nodes] == [str(n.target) for n in theirs.nodes]
        assert not along(theirs, one)
    report = verify("tests.models:own", mesh, launch="inprocess")
    assert report.equal, report.to_json()


@ranks(mesh="dp=1,tp=2")
def test_processes_have_them_too(mesh: Mesh, world: World) -> None:
    parallel = parallelize(Stack(1), batch(), Plan(mesh))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel(*batch()).backward()
    optimizer.step()
    assert_trained(parallel)


def test_a_checkpoint_goes_from_one_rank_to_several_and_back(tmp_path: Path) -> None:
    meshes = ["dp=1", "dp=1,tp=2", "tp=1"]
    source = trained(meshes[0])
    expected = source.full_state_dict()
    for step, (before, after) in enumerate(itertools.pairwise(meshes)):
        optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
        Checkpointer(tmp_path / before, source, optimizer).save(step, {}, block=True)
        source = trained(after)
        source.load_full_state_dict({name: torch.zeros_like(tensor) for name, tensor in expected.items()})
        Checkpointer(tmp_path / before, source, torch.optim.SGD(source.parameters(), lr=0.1)).restore()
        for name, tensor in source.full_state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def test_explanations_have_a_column_for_them_and_no_transfers() -> None:
    found = explain(Stack(2), batch(), Plan(Mesh.parse("dp=1,tp=2")))
    assert all(held.placements[0] == REPLICATE for held in found.parameters)
    assert any(held.placements[1] != REPLICATE for held in found.parameters)
    assert all(len(item.placements) == 2 for item in found.activations)
    assert {item.axis for item in found.transfers} == {"tp"}
    assert [report.axis for report in found.solver] == ["tp"]


def test_a_pin_along_one_is_kept_by_being_whole() -> None:
    parallel = trained("tp=1", pins=(Pin("blocks.*.1.weight", {"tp": "S0"}),))
    assert parallel.placements("blocks.0.1.weight") == (REPLICATE,)
    assert_trained(parallel)


def test_a_program_is_not_changed_by_being_placed() -> None:
    program = capture(Stack(1), batch())
    before = [(node.name, copy.copy(node.meta)) for node in program.graph.nodes]
    for _ in range(2):
        found = place(program, Mesh.parse("dp=1,tp=1"))
        assert all(found.placements[item] == (REPLICATE, REPLICATE) for item in program.inputs)
    assert [(node.name, node.meta) for node in program.graph.nodes] == before
