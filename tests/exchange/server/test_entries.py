"""What a message has for each shard: slices of its tensors, whatever it says of them."""

from __future__ import annotations

import pytest
import torch

from paceline.exchange.messages import Slice
from paceline.exchange.server.entry import cut


@pytest.mark.parametrize(
    "bounds",
    [
        [(0, 3), (3, 3), (3, 10)],  # as it should be: in one call
        [(0, 3), (4, 10)],
        [(0, 5), (5, 3), (3, 10)],
        [(2, 4), (0, 10)],
        [(0, 3), (3, 99)],
        [],
    ],
)
def test_slices_are_those_of_python(bounds: list[tuple[int, int]]) -> None:
    values = torch.arange(20).view(10, 2)
    slices = [Slice(shard, begin, end) for shard, (begin, end) in enumerate(bounds)]
    found = cut(values, slices)
    assert [part.tolist() for part in found] == [values.tolist()[begin:end] for begin, end in bounds]
    assert all(part.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() for part in found)
