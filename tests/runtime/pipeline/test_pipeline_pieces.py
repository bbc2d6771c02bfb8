"""Batches are cut into micro-batches as equal as they can be, each with its piece of every part."""

from __future__ import annotations

import pytest
import torch

from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.runtime.pipeline.pieces import count_for, micro_batch_seeds, micro_batches, samples_of


@pytest.mark.parametrize(
    ("size", "count", "sizes"), [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 5, [1, 1]), (5, 1, [5])]
)
def test_sizes_differ_by_one_at_most(size: int, count: int, sizes: list[int]) -> None:
    batch = {"x": torch.arange(size), "scale": torch.tensor(2.0), "table": torch.arange(size + 1), "n": 3}
    pieces = micro_batches(batch, count)
    assert [len(piece["x"]) for piece in pieces] == sizes
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), batch["x"])
    for piece in pieces:  # what has no samples goes with each
        assert piece["scale"] is batch["scale"] and piece["table"] is batch["table"] and piece["n"] == 3


def test_every_micro_batch_has_a_piece_of_each_part() -> None:
    pieces = micro_batches((torch.arange(10),), 2, parts=2)
    assert [piece[0].tolist() for piece in pieces] == [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]]
    for part in (0, 1):  # a rank of dp that has its part of the batch cuts the same samples
        own = micro_batches((torch.arange(10)[5 * part : 5 * part + 5],), 2)
        assert [x[0].tolist() for x in own] == [whole[0].chunk(2)[part].tolist() for whole in pieces]


@pytest.mark.parametrize(
    ("size", "wanted", "parts", "count"), [(12, None, 1, 4), (3, None, 1, 3), (12, 5, 2, 5), (4, 9, 2, 2)]
)
def test_there_are_no_more_micro_batches_than_samples(size: int, wanted: int | None, parts: int, count: int) -> None:
    plan = Plan(Mesh.parse("pp=2"), pipeline=PipelinePlan(micro_batches=wanted))
    assert count_for({"n": 1, "x": torch.zeros(size, 2)}, plan, parts) == count


def test_seeds_are_those_of_the_call_and_all_others_apart() -> None:
    assert samples_of((3, torch.tensor(1.0))) == 1
    many = [seed for first in range(50) for seed in micro_batch_seeds(first, 50)]
    assert len(set(many)) == len(many) and all(0 <= seed < 1 << 63 for seed in many)
    assert micro_batch_seeds(7, 3)[0] == 7
