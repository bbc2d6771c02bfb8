"""Calls and collectives on a described cluster: products fill a device, elementwise work fills its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, Node

from paceline.cluster.cluster import Cluster, Device, Group
from paceline.cluster.collectives import collective_seconds
from paceline.cluster.fabric import Fabric, Level
from paceline.cluster.rates import Rates
from paceline.plan import Mesh, Plan
from paceline.program.fake import evaluate, fake_mode
from paceline.simulator.placed.modelled import ModelledCollectives, ModelledOperators, modelled_times, slow_ranks

aten = torch.ops.aten
RATES = Rates(matmul=0.5, k_half=64, n_half=32, m_half=16, attention=0.25, memory=0.5, launch_s=1e-6)
DEVICE = Device("a device", {"float32": 1e12, "bfloat16": 4e12}, 1e9, 1e11, RATES)


def cluster(fabric: Fabric = Fabric.NVLINK, **group: float) -> Cluster:
    level = Level("inside", fabric, None, 1e10, 1e-6)
    return Cluster("a cluster", (Group(4, DEVICE, **group),), (level,))


def calls(dtype: torch.dtype = torch.float32) -> dict[str, Node]:
    """A product, and a chain of two elementwise calls behind it."""
    graph, mode = Graph(), fake_mode()
    with mode:
        a, b = torch.empty(512, 256, dtype=dtype), torch.empty(256, 1024, dtype=dtype)
    left, right = graph.placeholder("a"), graph.placeholder("b")
    left.meta["val"], right.meta["val"] = a, b
    found = {}
    product = graph.call_function(aten.mm.default, (left, right))
    product.meta["val"] = evaluate(product, mode)
    for name, target, source in (("exp", aten.exp.default, "mm"), ("relu", aten.relu.default, "exp")):
        found.setdefault("mm", product)
        found[name] = graph.call_function(target, (found[source],))
        found[name].meta["val"] = evaluate(found[name], mode)
    view = graph.call_function(aten.t.default, (found["relu"],))
    view.meta["val"] = evaluate(view, mode)
    graph.output((view,))
    return {**found, "view": view}


@pytest.mark.parametrize(("dtype", "peak"), [(torch.float32, 1e12), (torch.bfloat16, 4e12)])
def test_a_product_takes_longer_where_dimensions_are_small(dtype: torch.dtype, peak: float) -> None:
    ideal = 2 * 512 * 1024 * 256 / (peak * 0.5)
    expected = ideal * (1 + 16 / 512) * (1 + 32 / 1024) * (1 + 64 / 256)
    found = ModelledOperators(DEVICE).seconds(calls(dtype)["mm"])
    moved = dtype.itemsize * (512 * 256 + 256 * 1024 + 512 * 1024) / (1e11 * 0.5)
    assert found == pytest.approx(max(expected, moved))


def test_elementwise_work_reads_and_writes_and_views_are_free() -> None:
    node = calls()
    operators = ModelledOperators(DEVICE, launch_s=1e-6)
    assert operators.seconds(node["exp"]) == pytest.approx(1e-6 + 2 * 4 * 512 * 1024 / (1e11 * 0.5))
    assert operators.seconds(node["view"]) == 0.0


def test_a_chain_that_is_compiled_touches_memory_at_its_ends() -> None:
    node, apart, fused = calls(), ModelledOperators(DEVICE), ModelledOperators(DEVICE, fuses=True)
    chain = [node["exp"], node["relu"]]
    assert sum(map(fused.seconds, chain)) == pytest.approx(sum(map(apart.seconds, chain)) / 2)


def test_groups_along_an_axis_send_at_once() -> None:
    found = ModelledCollectives(cluster(), Mesh.parse("dp=2,tp=2")).seconds("all_reduce", 1 << 20, "dp")
    assert found == float(collective_seconds(cluster(), "all_reduce", float(1 << 20), 2, 2, sharing=2))


def test_ranks_that_share_memory_hide_nothing_and_start_their_own_calls() -> None:
    mesh, plan = Mesh.parse("dp=2"), Plan(Mesh.parse("dp=2"))
    host, device = (modelled_times(cluster(fabric), mesh, plan) for fabric in (Fabric.MEMORY, Fabric.NVLINK))
    assert (host.overlap, host.shares_memory, host.launch_s) == (False, True, 0.0)
    assert (device.overlap, device.shares_memory, device.launch_s) == (True, False, 1e-6)


def test_slower_groups_are_slow_ranks() -> None:
    half = replace(DEVICE, peak={"bfloat16": 2e12})
    mixed = replace(cluster(), groups=(Group(2, DEVICE), Group(1, DEVICE, slowdown=1.5), Group(2, half)))
    assert slow_ranks(mixed, 4) == {2: 1.5, 3: 2.0}


def batched(count: int, side: int) -> Node:
    graph, mode = Graph(), fake_mode()
    with mode:
        value = torch.empty(count, side, side)
    left = graph.placeholder("a")
    left.meta["val"] = value
    node = graph.call_function(aten.bmm.default, (left, left))
    node.meta["val"] = evaluate(node, mode)
    return node


def test_small_products_of_a_batch_are_computed_beside_each_other() -> None:
    device = replace(DEVICE, rates=replace(RATES, units=100))
    operators = ModelledOperators(device)
    one, many, larger = (operators.seconds(batched(*of)) for of in ((1, 8), (32, 8), (1, 16)))
    assert many < 2 * one, "they fill units that are idle else"
    assert larger == pytest.approx(one), "both fill one tile"
