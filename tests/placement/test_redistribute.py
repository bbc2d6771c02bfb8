"""Redistribution over an earlier axis of tensors that a later axis has cut: the same result as before the cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.placement.pieces import join, take
from paceline.placement.placements import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Shard,
    divides,
    local_shape,
    parse_placement,
)
from paceline.placement.redistribute import can_redistribute, redistribute
from paceline.placement.rules import Call, MapRule, Strategy, rule_of

OUTER, INNER = 2, 3
SHAPE = (72, 6)
WHOLE = torch.arange(72.0 * 6).reshape(SHAPE)
PLACEMENTS: list[Placement] = [
    REPLICATE,
    PARTIAL,
    *(Shard(0, blocks) for blocks in (1, 2, 3, 4, 6, 12)),
    Shard(1),
    Shard(1, 3),
]


def _call(source: Placement, target: Placement) -> Call:
    arguments = {"1": source, "2": target, "3": "outer", "4": OUTER}
    before, after = (local_shape(SHAPE, placement, OUTER) for placement in (source, target))
    return Call(redistribute, arguments, (before,), (torch.float32,), (after,), (torch.float32,))


def _pieces(whole: Tensor, placement: Placement, parts: int) -> list[Tensor]:
    return [take(whole, placement, parts, rank) for rank in range(parts)]


@pytest.mark.parametrize(("source", "target"), [(str(s), str(t)) for s, t in itertools.permutations(PLACEMENTS, 2)])
def test_a_later_axis_may_cut_in_any_way(source: str, target: str) -> None:
    before, after = parse_placement(source), parse_placement(target)
    if not can_redistribute(before, after):
        return
    rule = rule_of(_call(before, after))
    assert isinstance(rule, MapRule)
    for inner in PLACEMENTS:
        if isinstance(inner, Partial) or not divides(local_shape(SHAPE, before, OUTER), inner, INNER):
            continue
        result = rule.forward(inner, INNER)
        if result is None or not divides(local_shape(SHAPE, after, OUTER), result, INNER):
            continue
        _check(rule, before, after, inner, result)


def _check(rule: MapRule, before: Placement, after: Placement, inner: Placement, result: Placement) -> None:
    arguments: dict[str, Any] = {"1": before, "2": after}
    arguments |= rule.localize(arguments, Strategy((inner,), (result,)), INNER)
    pieces = [_pieces(piece, inner, INNER) for piece in _pieces(WHOLE, before, OUTER)]  # [outer][inner]
    expected = [_pieces(piece, result, INNER) for piece in _pieces(WHOLE, after, OUTER)]
    for index in range(INNER):
        whole = join([pieces[rank][index] for rank in range(OUTER)], arguments["1"])
        moved = _pieces(whole, arguments["2"], OUTER)
        for rank in range(OUTER):
            assert torch.equal(moved[rank], expected[rank][index]), (before, after, inner, result)
