"""Patches of pieces: what they say is what cutting the tensor gives."""

from __future__ import annotations

import itertools
from math import prod

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from paceline.errors import PlacementError
from paceline.placement.boxes import Box, Patch, patches
from paceline.placement.pieces import take
from paceline.placement.placements import PARTIAL, REPLICATE, Placement, Shape, Shard, divides, local_shape

QUICK = settings(max_examples=100)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Shape, list[Placement], list[int]]:
    """A tensor, and up to three axes that split it, often along one dimension."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6, 8, 12, 24]), max_size=3)))
    local, placements, sizes = shape, [], []
    for _ in range(draw(st.integers(0, 3))):
        parts = draw(st.integers(1, 3))
        possible: list[Placement] = [REPLICATE]
        for dim, size in enumerate(local):
            units = size // parts
            cuts = sorted(draw(st.sets(st.integers(1, units - 1), max_size=2))) if units > 1 else []
            segments = tuple((b - a) * parts for a, b in itertools.pairwise([0, *cuts, units]))
            shards = [Shard(dim, draw(st.integers(1, 4))), Shard(dim, segments)]
            possible += [shard for shard in shards if divides(local, shard, parts)]
        placement = draw(st.sampled_from(possible))
        local = local_shape(local, placement, parts)
        placements.append(placement)
        sizes.append(parts)
    return shape, placements, sizes


def ranks(sizes: list[int]) -> list[list[tuple[int, int]]]:
    return [list(zip(index, sizes, strict=True)) for index in itertools.product(*map(range, sizes))]


def piece(whole: Tensor, placements: list[Placement], where: list[tuple[int, int]]) -> Tensor:
    for placement, (index, parts) in zip(placements, where, strict=True):
        whole = take(whole, placement, parts, index)
    return whole


@QUICK
@given(layouts())
def test_patches_put_the_piece_together(layout: tuple[Shape, list[Placement], list[int]]) -> None:
    shape, placements, sizes = layout
    whole = torch.arange(prod(shape)).view(shape)
    for where in ranks(sizes):
        expected = piece(whole, placements, where)
        found = torch.full_like(expected, -1)
        for patch in patches(shape, placements, where):
            assert patch.whole.shape == patch.local.shape
            assert bool((found[patch.local.index] == -1).all()), "patches of a piece do not overlap"
            found[patch.local.index] = whole[patch.whole.index]
        assert torch.equal(found, expected)


@QUICK
@given(layouts())
def test_a_box_is_found_in_the_piece(layout: tuple[Shape, list[Placement], list[int]]) -> None:
    shape, placements, sizes = layout
    whole = torch.arange(prod(shape)).view(shape)
    half = Box(tuple(size // 2 for size in shape), tuple(size - size // 2 for size in shape))
    for where in ranks(sizes):
        mine = piece(whole, placements, where)
        for patch in patches(shape, placements, where):
            shared = patch.whole.intersect(half)
            if shared is not None:
                assert torch.equal(mine[patch.find(shared).index], whole[shared.index])


def test_there_are_as_few_as_possible() -> None:
    assert patches((8, 6), [Shard(0), Shard(0)], [(1, 2), (0, 2)]) == (Patch.single((4, 0), (2, 6)),)
    assert len(patches((12, 6), [Shard(0, 3)], [(1, 2)])) == 3
    assert len(patches((12, 6), [Shard(0, 3), Shard(1, 2)], [(1, 2), (0, 3)])) == 6
    assert len(patches((12, 6), [Shard(0, 3), Shard(0)], [(0, 2), (0, 3)])) == 1, "an inner axis takes whole blocks"
    assert patches((6,), [Shard(0, (4, 2))], [(0, 1)]) == (Patch.all_of((6,)),)
    assert patches((), [REPLICATE, PARTIAL], [(0, 2), (1, 2)]) == (Patch.all_of(()),)


def test_queries_keys_and_values_of_a_rank() -> None:
    found = patches((12, 4), [REPLICATE, Shard(0, (8, 2, 2))], [(1, 2), (1, 2)])
    assert [str(patch.whole) for patch in found] == ["[4:8, 0:4]", "[9:10, 0:4]", "[11:12, 0:4]"]
    assert [str(patch.local) for patch in found] == ["[0:4, 0:4]", "[4:5, 0:4]", "[5:6, 0:4]"]


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"\(3, 4\) cannot be placed as S0 on 2 ranks"):
        patches((6, 4), [Shard(0), Shard(0)], [(0, 2), (0, 2)])
    with pytest.raises(PlacementError, match="cannot be placed as S2"):
        patches((6, 4), [Shard(2)], [(0, 2)])
