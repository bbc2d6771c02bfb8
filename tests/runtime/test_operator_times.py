"""Calls of placed programs are timed once, kept by all that they depend on, and looked up ever after."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from paceline.placement.costs import Costs
from paceline.plan import Mesh, Plan
from paceline.program.fake import fake_mode
from paceline.runtime import collectives, exemplars, operator_times
from paceline.runtime.exemplars import Exemplars, HostClock, Lap
from paceline.runtime.module import PlacedModule, parallelize
from paceline.runtime.operator_calls import is_timed, key_of
from paceline.runtime.operator_times import MeasuredOperators, OperatorFile, roofline, timed_operators
from paceline.runtime.step import Step
from tests.ranks import ranks

aten = torch.ops.aten
CPU = torch.device("cpu")


class Net(nn.Module):
    """Two equal layers, an embedding, dropout and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1)) for _ in range(2))

    def forward(self, words: Tensor, classes: Tensor) -> Tensor:
        x = self.table(words)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(x.mean(1), classes)


@pytest.fixture(scope="module")
def step() -> Step:
    batch = {"words": torch.randint(11, (4, 5)), "classes": torch.randint(8, (4,))}
    module = parallelize(Net(), batch, Plan(Mesh()))
    assert isinstance(module, PlacedModule)
    return module.step(**batch)


def graphs_of(step: Step) -> list[Graph]:
    assert step.backward is not None
    return [step.forward, step.backward]


def calls(step: Step) -> list[Node]:
    return [node for graph in graphs_of(step) for node in graph.nodes if is_timed(node)]


def test_every_call_of_a_step_runs_once_a_round_for_all_of_its_key(step: Step) -> None:
    found = Exemplars(graphs_of(step), CPU)
    found.round(counts=False)
    assert not found.seconds and not found.failed
    found.round()
    assert set(found.seconds) == {key_of(node) for node in calls(step)}
    assert len(found) == len(found.seconds) < len(calls(step))
    assert all(seconds > 0 for seconds in found.seconds.values())


def test_keys_tell_shapes_strides_types_and_constants_apart() -> None:
    def call(x: Tensor, *arguments: float) -> str:
        graph = Graph()
        given = graph.placeholder("x")
        given.meta["val"] = x
        node = graph.call_function(aten.add.Scalar, (given, *arguments))
        node.meta["val"] = x
        return key_of(node)

    x = torch.zeros(4, 4)
    keys = [call(x, 1), call(x, 2), call(x[:2], 1), call(x.T, 1), call(x.half(), 1), call(x, 1, 2)]
    assert len(set(keys)) == len(keys)
    assert call(torch.ones(4, 4), 1) == keys[0]


def test_a_known_call_is_not_timed_again(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = timed_operators(graphs_of(step), CPU, tmp_path, budget_s=1.0)
    assert set(first) == {key_of(node) for node in calls(step)}
    monkeypatch.setattr(Exemplars, "round", lambda *_, **__: pytest.fail("it was timed before"))
    second = timed_operators(graphs_of(step), CPU, tmp_path, budget_s=1.0)
    assert second == pytest.approx(first, rel=1e-3)
    assert OperatorFile(tmp_path).load(CPU, ranks=2) == {}  # several ranks at once are another matter
    assert OperatorFile(None).load(CPU, ranks=1) == {}


def test_a_damaged_file_is_as_good_as_none(tmp_path: Path) -> None:
    file = OperatorFile(tmp_path)
    file.store(CPU, 1, {"a": 1e-3})
    assert file.load(CPU, 1) == {"a": 1e-3}
    path = tmp_path / "operators-1.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({section: {"a": 1e-3, "b": "soon", "c": -1.0} for section in content}))
    assert file.load(CPU, 1) == {"a": 1e-3}
    path.write_text("[")
    assert file.load(CPU, 1) == {}
    file.store(CPU, 1, {"d": 2e-3})
    assert file.load(CPU, 1) == {"d": 2e-3}


def test_what_is_over_the_budget_is_left_to_the_roofline(step: Step) -> None:
    found = Exemplars(graphs_of(step), CPU)
    found.round(within_s=0.0)
    assert not found.seconds
    node = next(node for node in calls(step) if node.target is aten.addmm.default)
    times = MeasuredOperators(found.seconds, roofline(Costs.default()))
    assert times.seconds(node) == roofline(Costs.default())(node) > 0
    assert times.missing == {key_of(node)}


def test_the_times_of_a_step_are_those_of_its_calls(step: Step) -> None:
    keys = Counter(key_of(node) for node in calls(step))
    timed = {key: 1e-3 * number for number, key in enumerate(keys, 1)}
    times = MeasuredOperators(timed, lambda node: pytest.fail(f"{node} was timed"), per_call=1e-6)
    total = sum(times.seconds(node) for node in calls(step))
    assert total == pytest.approx(sum(timed[key] * count for key, count in keys.items()) + 1e-6 * keys.total())
    assert times.seconds(next(node for node in step.forward.nodes if node.op == "placeholder")) == 0.0


def test_a_bucket_in_shared_memory_costs_the_copies_of_what_no_product_makes() -> None:
    with fake_mode():
        graph = Graph()
        a, b = (graph.placeholder(name) for name in "ab")
        a.meta["val"] = b.meta["val"] = torch.empty(4, 4)
        product, other = graph.call_function(aten.mm.default, (a, b)), graph.call_function(aten.add.Tensor, (a, b))
        flat = [graph.call_function(aten.view.default, (each, [16])) for each in (product, other)]
        bucket = graph.call_function(aten.cat.default, (flat,))
        graph.call_function(collectives.all_reduce_in_place, (bucket, "dp", 2))
        for node, value in ((product, a), (other, a), (flat[0], None), (flat[1], None), (bucket, None)):
            node.meta["val"] = torch.empty(32 if node is bucket else 16) if value is None else torch.empty(4, 4)
    timed = {key_of(bucket): 5.0}
    assert MeasuredOperators(timed, lambda node: 1.0).seconds(bucket) == 5.0
    asked: list[Node] = []
    shared = MeasuredOperators(timed, lambda node: asked.append(node) or 1.0, shares_memory=True)
    assert shared.seconds(bucket) == 1.0 and asked == [flat[1]]


def test_disturbed_laps_do_not_count_where_others_are_there() -> None:
    quiet, loud = [Lap(1.0, 1.0), Lap(3.0, 3.0), Lap(2.0)], [Lap(9.0, 2.5)]
    assert exemplars._typical(quiet + 5 * loud) == 2.0
    assert exemplars._typical([Lap(9.0, 2.5), Lap(8.0, 1.5)]) == 2.0  # what they had of the processor


def test_a_clock_tells_that_the_thread_had_to_wait() -> None:
    import time

    clock = HostClock()
    clock.start()
    time.sleep(0.01)
    clock.stop("asleep")
    assert clock.laps()["asleep"].disturbed and clock.laps() == {}


@ranks(2)
def test_ranks_time_together_and_know_the_same(rank: int, tmp_path: Path) -> None:
    batch = {"words": torch.randint(11, (4, 5)), "classes": torch.randint(8, (4,))}
    module = parallelize(Net(), batch, Plan(Mesh.parse("dp=2")))
    assert isinstance(module, PlacedModule)
    found = module.step(**batch)
    timed = timed_operators(graphs_of(found), CPU, tmp_path, budget_s=1.0, ranks=2)
    told = torch.tensor(sorted(timed.values()), dtype=torch.float64)
    least, most = told.clone(), told.clone()
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    assert torch.equal(least, most) and len(timed) > 10
    assert set(OperatorFile(tmp_path).load(CPU, 2)) == set(timed)


def test_counts_of_an_optimizer_that_a_graph_does_not_know_are_made_up() -> None:
    graph = Graph()
    nodes = [graph.placeholder(name) for name in ("p", "g", "m", "v")]
    for node in nodes:
        node.meta["val"] = torch.empty(3)
    how = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    lists = [[node] for node in nodes]
    call = graph.call_function(aten._fused_adamw_.default, (*lists, [], [None]), how)
    call.meta["val"] = None
    found = Exemplars([graph], CPU)
    found.round()
    assert set(found.seconds) == {key_of(call)}
    assert operator_times.MeasuredOperators(found.seconds, lambda _: 0.0).seconds(call) > 0
