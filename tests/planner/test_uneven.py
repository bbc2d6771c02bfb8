"""Dimensions that do not divide are told, with the sizes that would."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from paceline.placement.placements import REPLICATE, Shard
from paceline.plan import Mesh, Pin, Plan
from paceline.planner.explain import explain
from paceline.planner.explanation import Explanation, Held, Uneven
from paceline.planner.report import to_json
from paceline.planner.tables import summary
from paceline.planner.uneven import uneven

DOCS = Path(__file__).parents[2] / "docs/placement.md"


class Words(nn.Module):
    """A vocabulary of 1027 words, and layers of which the middle is 15 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1027, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 8)) for _ in range(2))
        self.odd = nn.Linear(8, 7, bias=False)
        self.even = nn.Linear(7, 9)
        self.head = nn.Linear(9, 1027, bias=False)
        self.scale = nn.Parameter(torch.ones(1, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(self.even(self.odd(x * self.scale)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def told(mesh: str, *pins: Pin) -> Explanation:
    return explain(Words(), (torch.zeros(4, 6, dtype=torch.long),), Plan(Mesh.parse(mesh), pins=pins))


def printed(found: Explanation) -> list[str]:
    console = Console(width=200, record=True, file=io.StringIO())
    summary(found, console)
    return [line for line in console.export_text().splitlines() if "does not divide by" in line]


def test_a_vocabulary_that_tp_cannot_split_is_told_with_sizes_that_it_could() -> None:
    found = told("tp=2")
    assert printed(found) == [
        "table.weight 1027 x 8 is split along dimension 1 over tp: 1027 does not divide by 2; 1028 or 1088 would",
        "layers.{0,1}.0.weight 15 x 8 is split along dimension 1 over tp: 15 does not divide by 2; 16 would",
        "layers.{0,1}.2.weight 8 x 15 is split along dimension 0 over tp: 15 does not divide by 2; 16 would",
        "even.weight 9 x 7 stays whole over tp: 9 does not divide by 2; 10 would",
        "head.weight 1027 x 9 stays whole over tp: 1027 does not divide by 2; 1028 or 1088 would",
    ]
    where = {held.name: held.placements for held in found.parameters}
    assert all(where[item.name] == (item.placement,) for item in found.uneven)


def test_fsdp_tells_of_what_no_dimension_divides() -> None:
    assert printed(told("fsdp=2")) == [
        "layers.{0,1}.0.bias 15 stays whole over fsdp: 15 does not divide by 2; 16 would",
        "even.weight 9 x 7 stays whole over fsdp: 9 does not divide by 2; 10 would",
        "even.bias 9 stays whole over fsdp: 9 does not divide by 2; 10 would",
        "head.weight 1027 x 9 stays whole over fsdp: 1027 does not divide by 2; 1028 or 1088 would",
    ]


@pytest.mark.parametrize("mesh", ["dp=2", "serial", "sp=2", "auto=2", "tp=1"])
def test_axes_that_promise_no_split_of_parameters_tell_nothing(mesh: str) -> None:
    assert told(mesh).uneven == ()


def test_what_the_user_pins_is_not_told() -> None:
    names = [item.name for item in told("tp=2", Pin("head.*", {"tp": "R"}), Pin("table.*", {"tp": "S1"})).uneven]
    assert "head.weight" not in names and "table.weight" not in names and "even.weight" in names


def held(shape: tuple[int, ...], *placements: object) -> Held:
    return Held("w", "float32", shape, placements, shape, 4, 4, True, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "placements", "mesh", "expected"),
    [
        ((1030, 8), (Shard(0), Shard(1)), "fsdp=2,tp=2", [("tp", 4, (1032, 1088))]),  # 515 on each of two ranks
        ((1030, 8), (Shard(1), Shard(0)), "fsdp=2,tp=2", []),
        ((12, 3, 7, 7), (Shard(0),), "tp=2", []),
        ((3, 2, 7, 7), (Shard(1),), "tp=2", [("tp", 2, (4,))]),
        ((3, 1), (REPLICATE,), "tp=4", []),  # fewer than ranks
        ((), (REPLICATE,), "fsdp=2", []),
        ((50257, 768), (Shard(1),), "tp=2", [("tp", 2, (50258, 50304))]),
    ],
)
def test_sizes_fit_all_axes_that_split_the_dimension(
    shape: tuple[int, ...], placements: tuple[object, ...], mesh: str, expected: list[tuple[str, int, tuple[int, ...]]]
) -> None:
    parsed = Mesh.parse(mesh)
    found: list[Uneven] = list(uneven([held(shape, *placements)], parsed, {axis: () for axis in parsed.names}))
    assert [(item.axis, item.divisor, item.sizes) for item in found] == expected


def test_the_json_object_tells_it_with_documented_keys() -> None:
    (plan,) = json.loads(json.dumps(to_json(told("tp=2"))))["plans"]
    assert plan["uneven"][0] == {
        "name": "table.weight",
        "shape": [1027, 8],
        "axis": "tp",
        "placement": "S1",
        "dimension": 0,
        "divisor": 2,
        "sizes": [1028, 1088],
    }
    documented = set(re.findall(r"`(\w+)`", DOCS.read_text(encoding="utf-8")))
    assert plan["uneven"][0].keys() <= documented
