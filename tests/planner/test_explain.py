"""What is told of a plan is what runs: held, kept and exchanged, in the names of the user's module."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from paceline.placement.place import place
from paceline.placement.placements import PARTIAL, REPLICATE, Shard
from paceline.plan import Mesh, Pin, Plan
from paceline.planner.explain import explain, explain_factory
from paceline.planner.explanation import Explanation, What
from paceline.planner.report import to_json
from paceline.planner.tables import details, summary
from paceline.program.capture import capture
from paceline.program.program import Program
from paceline.runtime.inprocess import InProcessExecutor
from paceline.runtime.step import schedule
from paceline.verify.traffic import traffic
from tests import models
from tests.runtime.graphs import scatter
from tests.runtime.steps import BATCH, WIDTH, Stack, batch

BLOCKS = 3
DOCS = Path(__file__).parents[2] / "docs/placement.md"


def stack() -> models.Built:
    return Stack(BLOCKS), batch()


def gpt() -> models.Built:
    return models.gpt(dropout=0.0)


@cache
def captured(family: Callable[[], models.Built]) -> Program:
    return capture(*family())


def told_of(family: Callable[[], models.Built], plan: Plan) -> Explanation:
    """What is told of a program that is captured once for all plans."""
    with mock.patch.object(sys.modules[explain.__module__], "capture", lambda *_, **__: captured(family).copy()):
        return explain(*family(), plan)


@cache
def told(mesh: str, zero_stage: int = 3) -> Explanation:
    return told_of(stack, Plan(Mesh.parse(mesh), zero_stage=zero_stage))


@cache
def told_of_gpt(mesh: str) -> Explanation:
    return told_of(gpt, Plan(Mesh.parse(mesh)))


def test_parameters_are_told_as_a_rank_holds_them() -> None:
    module, found = Stack(BLOCKS), told("dp=2,fsdp=2")
    assert [(held.name, held.shape) for held in found.parameters] == [
        (name, tuple(parameter.shape)) for name, parameter in module.named_parameters()
    ]
    for held in found.parameters:
        assert held.placements == (REPLICATE, Shard(0))
        assert held.local == (held.shape[0] // 2, *held.shape[1:])
        assert held.whole_bytes == 2 * held.bytes
    whole = sum(parameter.nbytes for parameter in module.parameters())
    assert (found.memory.parameters, found.memory.gradients, found.memory.optimizer) == (whole // 2, whole // 2, whole)


@pytest.mark.parametrize(("family", "mesh"), [(models.own, "serial"), (models.own, "dp=2,fsdp=2"), (gpt, "fsdp=2")])
def test_what_is_kept_is_what_a_run_keeps(family: Callable[[], models.Built], mesh: str) -> None:
    plan = Plan(Mesh.parse(mesh))
    memory = told_of(family, plan).memory
    step = schedule(place(captured(family).copy(), plan.mesh), plan)
    inputs = []
    for placed, node in zip(step.inputs, step.forward.nodes, strict=False):
        whole = torch.zeros(placed.shape, dtype=node.meta["val"].dtype)
        inputs.append(scatter(whole, placed.placements, plan.mesh))
    given = {piece.untyped_storage()._cdata for pieces in inputs for piece in pieces}
    run = InProcessExecutor(plan.mesh, [torch.device("cpu")]).prepare(step.forward, step.constants)
    for results in run([list(column) for column in zip(*inputs, strict=True)]):
        saved = {value.untyped_storage()._cdata: value.untyped_storage() for value in results[len(step.outputs) :]}
        assert memory.kept == sum(storage.nbytes() for key, storage in saved.items() if key not in given)


def test_activations_have_the_shapes_and_placements_that_modules_return() -> None:
    found = {(item.name, item.operator): item for item in told("dp=2,fsdp=2").activations}
    hidden = found["blocks.1.1", "addmm"]
    assert (hidden.shape, hidden.local) == ((BATCH, 4 * WIDTH), (BATCH // 4, 4 * WIDTH))
    assert hidden.placements == (Shard(0), Shard(0))
    assert hidden.main and hidden.kept, "the activation function's gradient reads it"
    assert not found["blocks.1.3", "addmm"].kept, "the residual sum does not"
    assert found["blocks.1.2", "gelu"].kept and not found["blocks.1.2", "gelu"].main
    gpt = {(item.name, item.operator): item for item in told_of_gpt("dp=2").activations}
    assert gpt["blocks.0.attention.qkv", "mm"].shape == (models.BATCH, models.TIME, 72), "as it is returned"


def test_every_collective_of_a_step_is_told() -> None:
    for mesh, zero_stage in (("dp=2,fsdp=2", 3), ("fsdp=2", 2)):
        plan = Plan(Mesh.parse(mesh), zero_stage=zero_stage)
        step = schedule(place(captured(stack).copy(), plan.mesh), plan)
        found = told(mesh, zero_stage)
        for backward, graph in ((False, step.forward), (True, step.backward)):
            count: Counter[str] = Counter()
            nbytes: Counter[str] = Counter()
            for total in found.totals:
                if total.backward is backward:
                    count[total.kind] += total.collectives
                    nbytes[total.kind] += total.bytes
            assert {kind: (v.count, v.bytes) for kind, v in traffic(graph).items()} == {
                kind: (count[kind], nbytes[kind]) for kind in count
            }


def test_what_moves_is_named() -> None:
    found = told("dp=2,fsdp=2").transfers
    names = [name for name, _ in Stack(BLOCKS).named_parameters()]

    def moved(axis: str, kind: str, what: What) -> list[str]:
        return [item.name for item in found if (item.axis, item.kind, item.what) == (axis, kind, what)]

    assert sorted(moved("dp", "all_reduce", What.GRADIENT)) == sorted(names)
    assert sorted(moved("fsdp", "reduce_scatter", What.GRADIENT)) == sorted(names)
    gathered = [item for item in found if item.what is What.PARAMETER]
    assert sorted(item.name for item in gathered if not item.backward) == sorted(names)
    assert 0 < sum(item.backward for item in gathered) < len(names), "a bias is not gathered again"
    assert {(item.source, item.target) for item in gathered} == {(Shard(0), REPLICATE)}
    assert all(item.target in (Shard(0), REPLICATE) for item in found if item.what is What.GRADIENT)
    rest = [item for item in found if item.what not in (What.GRADIENT, What.PARAMETER)]
    assert rest and all(item.source == PARTIAL and item.bytes == 8 for item in rest), "the loss, a number"


def test_zero_2_keeps_what_zero_3_gathers_again() -> None:
    kept = {item.name for item in told("fsdp=2", 2).activations if item.what is What.PARAMETER and item.kept}
    again = {item.name for item in told("fsdp=2", 3).transfers if item.what is What.PARAMETER and item.backward}
    assert kept == again
    assert not any(item.what is What.PARAMETER for item in told("fsdp=2", 3).activations)


def test_repeated_blocks_are_told_together() -> None:
    (dp,) = told("dp=2").per_block[:1]
    assert (dp.axis, dp.name, dp.blocks) == ("dp", "blocks.{0..2}", BLOCKS)
    assert dp.tensors == ((True, "all_reduce", 6),)
    assert sum(part.blocks * n for part in told("dp=2").per_block for _, _, n in part.tensors) == len(
        told("dp=2").transfers
    )


def test_a_block_of_a_gpt_needs_two_all_reduces_each_way_along_tp() -> None:
    (block,) = [part for part in told_of_gpt("tp=2").per_block if part.name.startswith("blocks")]
    assert block.tensors == ((False, "all_reduce", 2), (True, "all_reduce", 2))
    qkv = next(held for held in told_of_gpt("tp=2").parameters if held.name.endswith("qkv.weight"))
    assert qkv.placements == (Shard(0, 3),)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 5, padding=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_halos_are_told_by_the_module_that_reads_them() -> None:
    found = explain(Convolutions(), (torch.zeros(2, 3, 32, 64),), Plan(Mesh.parse("hw=2")))
    halos = [item for item in found.transfers if item.kind == "halo" and not item.backward]
    row = 2 * 64 * 4  # of a channel of 2 images of 64 columns, in float32
    assert [(item.name, item.source, item.bytes) for item in halos] == [
        ("layers.0", Shard(2), 1 * 3 * row),
        ("layers.2", Shard(2), 2 * 4 * row),
    ]
    (total,) = [total for total in found.totals if total.kind == "halo" and not total.backward]
    assert (total.tensors, total.collectives, total.bytes) == (2, 2, sum(item.bytes for item in halos))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float().square().mean()


def test_autocast_gathers_casts_of_parameters() -> None:
    found = explain(Wide(), (torch.zeros(64, 512),), Plan(Mesh.parse("fsdp=2")), autocast=torch.bfloat16)
    weight = next(held for held in found.parameters if held.name == "inner.weight")
    gathered = [item for item in found.transfers if item.name == weight.name and item.what is What.PARAMETER]
    assert [item.bytes for item in gathered] == [weight.bytes // 2], "a cast and transposed shard"
    assert [(item.operator, item.source) for item in gathered] == [("t", Shard(1))]


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(x)


class Odd(nn.Module):
    """Holds an operator without a rule, in a part of it that is in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Exponential())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def odd() -> tuple[nn.Module, list[Tensor]]:
    return Odd().eval(), [torch.zeros(4, 4, 4)]


def test_operators_without_a_rule_are_told_with_their_modules() -> None:
    (unknown,) = explain_factory(odd, Plan(Mesh.parse("dp=2"))).unknown
    assert "matrix_exp" in unknown.operator
    assert unknown.modules == ("inner.2", "inner.2"), "in both passes"


def test_a_module_in_evaluation_is_told_as_it_trains_and_stays_in_evaluation() -> None:
    module, example = odd()
    found = explain(module, tuple(example), Plan(Mesh.parse("dp=2")), optimizer=("SGD", 0))
    assert any(item.name == "inner.1" for item in found.activations), "dropout is at work"
    assert not any(part.training for part in module.modules())
    assert (found.optimizer, found.memory.optimizer) == ("SGD", 0)


def test_pins_are_followed() -> None:
    pins = (Pin("blocks.*.1.weight", {"fsdp": "S1"}),)
    found = explain(Stack(1), batch(), Plan(Mesh.parse("fsdp=2"), pins=pins))
    where = {held.name: held.placements for held in found.parameters}
    assert where["blocks.0.1.weight"] == (Shard(1),)
    assert where["blocks.0.3.weight"] == (Shard(0),)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)).square().mean()


def test_a_tied_parameter_is_told_once_and_pinned_by_any_of_its_names() -> None:
    plan = Plan(Mesh.parse("fsdp=2"), pins=(Pin("head.*", {"fsdp": "S1"}),))
    found = explain(Tied(), (torch.zeros(4, 3, dtype=torch.long),), plan)
    (held,) = found.parameters
    assert (held.name, held.aliases, held.placements) == ("table.weight", ("head.weight",), (Shard(1),))
    assert "table.weight = head.weight" in printed(found)


# What is printed and written.


def printed(found: Explanation, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    summary(found, console)
    details(found, console)
    return console.export_text()


def test_the_tables_fit_and_name_blocks_once() -> None:
    text = printed(told("dp=2,fsdp=2"))
    assert max(map(len, text.splitlines())) <= 100
    (row,) = [line for line in text.splitlines() if line.startswith("blocks.{0..2}.1.weight")]
    assert re.split(r"\s{2,}", row) == ["blocks.{0..2}.1.weight", "32 x 8", "R", "S0", "16 x 8", "3 x 1.02 kB"]
    assert "dp, each of blocks.{0..2}: backward 6 all_reduce" in text
    assert "fsdp, each of blocks.{0..2}: forward 6 all_gather; backward" in text
    assert "blocks.{0..2}.{1,3}.weight.grad" in text


def test_a_narrow_terminal_and_a_mesh_of_one_rank_are_served_too() -> None:
    assert max(map(len, printed(told("dp=2"), width=60).splitlines())) <= 60
    assert "none" in printed(told("serial"))


def test_the_json_object_is_plain_and_documented() -> None:
    (plan,) = json.loads(json.dumps(to_json(told("dp=2,fsdp=2")), allow_nan=False))["plans"]
    assert plan["parameters"][0]["placements"] == {"dp": "R", "fsdp": "S0"}
    assert plan["collectives"]["dp"]["backward"]["all_reduce"]["tensors"] == 18
    documented = set(re.findall(r"`(\w+)`", DOCS.read_text(encoding="utf-8")))
    entries = [plan, plan["memory"], plan["seconds"]]
    entries += [plan[key][0] for key in ("parameters", "activations", "transfers", "per_block", "solver")]
    assert {key for entry in entries for key in entry} - documented == set()
