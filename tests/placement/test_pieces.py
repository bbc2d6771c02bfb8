from __future__ import annotations

from math import prod

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from paceline.errors import PlacementError
from paceline.placement.pieces import join, take
from paceline.placement.placements import (
    PARTIAL,
    REPLICATE,
    Placement,
    Shape,
    Shard,
    divides,
    global_shape,
    local_shape,
    parse_placement,
)

QUICK = settings(max_examples=100)
shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3).map(tuple)
placements: st.SearchStrategy[Placement] = st.one_of(
    st.just(REPLICATE), st.just(PARTIAL), st.builds(Shard, st.integers(0, 3), st.integers(1, 4))
)


@QUICK
@given(placements)
def test_placements_are_read_as_they_are_written(placement: Placement) -> None:
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize("text", ["", "X", "S", "S-1", "S1/", "S1/2/3", "R "])
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(PlacementError, match="is no placement; write R, P"):
        parse_placement(text)


@QUICK
@given(shapes, placements, st.integers(1, 4))
def test_pieces_join_to_the_whole(shape: Shape, placement: Placement, parts: int) -> None:
    assume(divides(shape, placement, parts))
    whole = torch.arange(prod(shape)).view(shape)
    pieces = [take(whole, placement, parts, index) for index in range(parts)]
    assert {tuple(piece.shape) for piece in pieces} == {local_shape(shape, placement, parts)}
    assert global_shape(local_shape(shape, placement, parts), placement, parts) == shape
    assert torch.equal(join(pieces, placement), whole)
    if isinstance(placement, Shard):
        assert all(piece.is_contiguous() for piece in pieces)
        assert sorted(torch.cat([piece.flatten() for piece in pieces]).tolist()) == list(range(prod(shape)))


def test_blocks_are_dealt_out_one_piece_each() -> None:
    fused = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23])  # queries, keys, values of four heads
    assert take(fused, Shard(0, 3), 2, 0).tolist() == [0, 1, 10, 11, 20, 21]
    assert take(fused, Shard(0, 3), 2, 1).tolist() == [2, 3, 12, 13, 22, 23]


def test_what_does_not_divide_is_refused() -> None:
    assert not divides((6,), Shard(0, 2), 2)
    assert not divides((0, 4), Shard(1), 2), "empty tensors are not split"
    assert not divides((), Shard(0), 2)
    with pytest.raises(PlacementError, match=r"\(6, 4\) cannot be placed as S0/2 on 2 ranks"):
        local_shape((6, 4), Shard(0, 2), 2)
