"""A split vocabulary: embedding and head of a language model are split by rows, and its logits stay where they are."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.placement.costs import Costs
from paceline.placement.machine import Machine
from paceline.placement.place import PlacedProgram, place
from paceline.placement.placements import global_shape
from paceline.placement.redistribute import collective_of, is_redistribution, redistribution_of
from paceline.plan import Mesh, Pin, Plan
from paceline.program.capture import capture
from paceline.runtime.module import parallelize
from paceline.verify.precision import Precision
from paceline.verify.run import Comparison, Launch
from paceline.verify.subject import Subject

WIDTH, TIME, BATCH = 12, 16, 4
LARGE, SMALL = 1024, 256
"""Vocabularies for which a cross-entropy is rewritten in few passes, and for which it is left."""


class Language(nn.Module):
    """An embedding, one nonlinear layer and a head."""

    def __init__(self, words: int, *, tied: bool, padding: int | None, weight: bool, **loss: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH, padding_idx=padding)
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("weight", torch.linspace(0.5, 2.0, words) if weight else None)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        logits = self.head(self.norm(x + torch.tanh(self.layer(x))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), self.weight, **self.loss)


def language(
    words: int = LARGE, tied: bool = False, padding: int | None = None, weight: bool = False, **loss: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = Language(words, tied=tied, padding=padding, weight=weight, **loss)
    ids, labels = (torch.randint(0, words, (BATCH, TIME)) for _ in range(2))
    if padding is not None:
        ids[:, -5:] = padding
    labels[:, ::3] = loss.get("ignore_index", -100)
    return module, (ids, labels)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "large": ({"padding": LARGE - 1}, "tp=2,auto=2"),
    "large, tied": ({"tied": True, "padding": 3, "ignore_index": 5, "weight": True}, "tp=2,sp=2"),
    "small": ({"words": SMALL, "padding": 1, "ignore_index": SMALL, "weight": True}, "dp=2,tp=2"),
    "small, tied": ({"words": SMALL, "tied": True, "padding": 0, "ignore_index": 0}, "tp=2,auto=2"),
    "smooth": ({"label_smoothing": 0.1, "tied": True}, "fsdp=2,tp=2"),
}
"""What a model is like, and a mesh of two axes for it."""


@pytest.fixture(autouse=True)
def _quick_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models as small as these are best gathered; where collectives cost bytes only, they are split."""
    quick = Costs(latency=0.0, per_byte_sent=1e-8, machine=Machine(per_call=0.0))
    monkeypatch.setattr(Costs, "default", lambda: quick)


def by_rows(mesh: str, tied: bool = False) -> Plan:
    """Both matrices by rows along all axes that may, whatever a solver would rather have."""
    axes = [axis for axis in Mesh.parse(mesh).names if axis in ("tp", "auto")]
    names = ("embed.weight",) if tied else ("embed.weight", "head.weight")
    return Plan(Mesh.parse(mesh), pins=tuple(Pin(name, dict.fromkeys(axes, "S0")) for name in names))


@pytest.mark.parametrize("name", CASES)
def test_equal_to_serial(name: str, tmp_path: Path) -> None:
    options, mesh = CASES[name]
    comparison = Comparison(Subject(language, options), 1, tmp_path)
    for axes in ("tp=2", mesh):
        report = comparison.report(by_rows(axes, "tied" in options), Launch.INPROCESS)
        assert report.equal, report.to_json()


def test_equal_to_serial_in_float32(tmp_path: Path) -> None:
    report = Comparison(Subject(language, {}, Precision.FLOAT32), 1, tmp_path).report(by_rows("tp=2"), Launch.INPROCESS)
    assert report.equal, report.to_json()


def moved(placed: PlacedProgram) -> list[tuple[bool, int]]:
    """Of every exchange: whether it is of the backward pass, and the elements of the whole tensor along its axis."""
    found = []
    for node in placed.program.graph.nodes:
        if is_redistribution(node):
            x, source, target, _, parts = redistribution_of(node)
            if collective_of(source, target) is not None:
                shape = global_shape(tuple(x.meta["val"].shape), source, parts)
                found.append((bool(node.meta["backward"]), prod(shape)))
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("words", [SMALL, LARGE])
def test_logits_stay_where_they_are(tied: bool, words: int) -> None:
    placed = place(capture(*language(words, tied)), by_rows("tp=2", tied))
    exchanges, tokens = moved(placed), BATCH * TIME
    assert max(size for _, size in exchanges) <= tokens * WIDTH
    per_token = [backward for backward, size in exchanges if size == tokens]
    assert per_token == ([False, False, True] if words == SMALL else [False] * 3)
    local = [node for node in placed.program.graph.nodes if str(node.target) == "paceline.local_index.default"]
    assert len(local) == 4  # of the embedding, its gradient, the loss and its gradient


def test_a_vocabulary_that_does_not_pay_is_not_split() -> None:
    placed = place(capture(*language(SMALL)), Plan(Mesh.parse("tp=2")), costs=Costs())
    assert not [node for node in placed.program.graph.nodes if "local_index" in str(node.target)]


def test_a_word_beyond_the_vocabulary_is_an_error_on_pieces_too() -> None:
    module, (ids, labels) = language()
    parallel = parallelize(module, (ids, labels), by_rows("tp=2"), devices=["cpu"])
    parallel(ids, labels)
    for words in (ids, labels):
        words[0, 1] = LARGE
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            parallel(ids, labels)
        words[0, 1] = 0
