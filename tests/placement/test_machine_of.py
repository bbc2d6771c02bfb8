"""The solver's figures of described clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.cluster.collectives import collective_seconds
from paceline.cluster.files import load
from paceline.placement.costs import Costs
from paceline.placement.machine import Link
from paceline.placement.machine_of import machine_of
from paceline.placement.place import place
from paceline.placement.placements import REPLICATE, Shard
from paceline.placement.redistribute import Collective
from paceline.plan import Mesh
from paceline.program.capture import capture


def test_axes_of_one_size_lie_on_different_levels() -> None:
    cluster = load("dgx-h100").of(64)
    machine = machine_of(cluster, Mesh.parse("dp=8,tp=8"))
    outside, inside = machine.axes["dp"][Collective.ALL_GATHER], machine.axes["tp"][Collective.ALL_GATHER]
    assert outside.per_byte > 5 * inside.per_byte
    costs = Costs.of_machine(machine)
    prices = [costs.along(axis, 8).redistribution(1e9, Shard(0), REPLICATE, 8) for axis in ("dp", "tp")]
    assert prices[0] > 5 * prices[1]
    exact = collective_seconds(cluster, "all_gather", 1e9, 8, 8, sharing=8)
    assert prices[0] == pytest.approx(float(exact), rel=0.05)


def test_small_products_reach_less_and_the_slowest_device_counts() -> None:
    cluster = load("dgx-a100").of(8)
    machine = machine_of(cluster, Mesh.parse("tp=8"))
    assert machine.half_products.rate(2 * 16384**3) > 3 * machine.half_products.rate(2 * 64**3)
    assert machine.half_products.rate(2 * 4096**3) < cluster.groups[0].device.peak["bfloat16"]
    group = cluster.groups[0]
    slow = replace(cluster, groups=(replace(group, devices=7), replace(group, devices=1, slowdown=2.0)))
    halved = machine_of(slow, Mesh.parse("tp=8"))
    assert halved.half_products.rate(1e12) == pytest.approx(machine.half_products.rate(1e12) / 2)
    assert halved.touching.rate(1e6) == pytest.approx(machine.touching.rate(1e6) / 2)


def test_what_is_known_of_an_axis_counts_more_than_its_size() -> None:
    machine = machine_of(load("laptop"), Mesh.parse("dp=2,tp=2"))
    measured = replace(machine, links={2: dict.fromkeys(Collective, Link(1.0, 1.0)), 4: {}})
    assert measured.along("tp", 2).links == {2: machine.axes["tp"], 4: {}}
    assert measured.along("sp", 2) is measured


def test_a_mesh_of_one_rank_has_no_links() -> None:
    assert machine_of(load("laptop").of(1), Mesh()).axes == {}


class Narrow(nn.Module):
    """Two layers whose weights are small beside their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def test_a_step_costs_more_where_its_axis_leaves_the_host() -> None:
    program = capture(Narrow(), (torch.randn(512, 64),))
    mesh = Mesh.parse("tp=2")
    inside = load("dgx-h100").of(2)
    outside = replace(inside, levels=inside.levels[1:])
    near, far = (
        place(program, mesh, costs=Costs.of_machine(machine_of(cluster, mesh))).reports[0].objective_s
        for cluster in (inside, outside)
    )
    assert far > near
