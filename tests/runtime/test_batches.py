"""What a rank takes out of the part of a batch that its process was given is what it takes out of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.errors import PlanError
from paceline.placement.placements import REPLICATE, Shard
from paceline.plan import Axis, Mesh
from paceline.program.program import InputRole
from paceline.runtime.batches import grown, pieces_of_part, pieces_of_whole
from paceline.runtime.step import Step
from tests.runtime.placed import Placements, step_of

R = REPLICATE
B, T = 8, 12
BATCH = {
    "tokens": torch.arange(B * T).view(B, T),
    "images": torch.arange(B * 6 * 4).view(B, 1, 6, 4),
    "positions": torch.arange(T),  # no batch dimension
    "scale": torch.tensor(2),
}
WAYS: dict[str, Placements] = {
    "dp=2": {"tokens": (Shard(0),), "images": (Shard(0),)},
    "tp=2": {},
    "sp=2": {"tokens": (Shard(1),), "positions": (Shard(0),)},
    "dp=2,tp=2": {"tokens": (Shard(0), R), "images": (Shard(0), R)},
    "tp=2,dp=2": {"tokens": (R, Shard(0)), "images": (R, Shard(0))},
    "dp=2,sp=2": {
        "tokens": (Shard(0), Shard(1)),
        "images": (Shard(0), R),
        "positions": (R, Shard(0)),
    },
    "sp=2,dp=2": {
        "tokens": (Shard(1, 2), Shard(0)),  # striped
        "images": (R, Shard(0)),
        "positions": (Shard(0, 2), R),
    },
    "dp=2,sp=3,fsdp=2": {
        "tokens": (Shard(0), Shard(1, 2), Shard(0)),
        "images": (Shard(0), R, Shard(0)),
        "positions": (R, Shard(0, 2), R),
    },
    "fsdp=2,hw=2": {
        "tokens": (Shard(0), R),
        "images": (Shard(0), Shard(2)),
    },
    "hw=2,fsdp=2,tp=2": {
        "tokens": (R, Shard(0), R),
        "images": (Shard(3), Shard(0), R),
    },
    "dp=2,auto=2": {"tokens": (Shard(0), Shard(0, 2)), "images": (Shard(0), Shard(0))},
}


def step_on(mesh: Mesh, placements: Placements) -> Step:
    return step_of(mesh, InputRole.BATCH, {name: tuple(x.shape) for name, x in BATCH.items()}, placements)


def part_of(index: int, count: int) -> dict[str, Tensor]:
    """What a loader gives a process: a part of the samples, and whatever else there is."""
    samples = ("tokens", "images")
    return {name: x.chunk(count)[index] if name in samples else x for name, x in BATCH.items()}


def where(mesh: Mesh, rank: int) -> list[tuple[int, int]]:
    return [(index, mesh[axis]) for axis, index in mesh.coordinate(rank).items()]


@pytest.mark.parametrize("text", WAYS)
def test_a_part_gives_the_pieces_that_the_whole_gives(text: str) -> None:
    mesh = Mesh.parse(text)
    step = step_on(mesh, WAYS[text])
    for rank in range(mesh.size):
        index = mesh.batch_part(rank)
        expected = pieces_of_whole(step, BATCH, where(mesh, rank))
        found = pieces_of_part(step, part_of(index, mesh.batch_parts), where(mesh, rank), index)
        assert found.keys() == expected.keys() == BATCH.keys()
        for name, piece in found.items():
            assert torch.equal(piece, expected[name]), (rank, name)
            assert piece.is_contiguous()


def test_what_needs_no_cut_is_not_copied() -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    given = part_of(1, 2)
    found = pieces_of_part(step_on(mesh, WAYS["dp=2,tp=2"]), given, where(mesh, 3), 1)
    assert all(found[name] is given[name] for name in given)


def test_the_batch_that_parts_make_is_that_of_the_axes_that_split_it() -> None:
    whole = grown(part_of(0, 2), 2)
    assert {name: x.shape for name, x in whole.items()} == {name: x.shape for name, x in BATCH.items()}


def test_samples_that_another_process_was_given_are_not_made_up() -> None:
    mesh = Mesh.parse("auto=2,dp=2")
    step = step_on(mesh, {"tokens": (Shard(0), Shard(0)), "images": (R, Shard(0))})
    assert not Axis.AUTO.splits_batch
    with pytest.raises(PlanError, match=r"splits the samples of 'tokens' too\. Name .* first \(mesh 'dp=2,auto=2'\)"):
        pieces_of_part(step, part_of(1, 2), where(mesh, 1), 1)
