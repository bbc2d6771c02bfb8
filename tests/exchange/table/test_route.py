"""Keys go to the shards that the layout says, in the order in which they came."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ExchangeError
from paceline.exchange.layout import shards_of
from paceline.exchange.table.route import route, stray_key, stray_of_several, unique_keys, unique_rows


def test_route_sorts_by_shard_and_keeps_the_order_within(implementation):
    keys = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(0))
    order, offsets = route(keys, 16, implementation)
    of = torch.from_numpy(shards_of(keys.numpy(), 16))
    assert offsets[0] == 0 and offsets[-1] == 1000
    for shard in range(16):
        mine = order[offsets[shard] : offsets[shard + 1]]
        assert torch.equal(mine, torch.nonzero(of == shard)[:, 0])


def test_a_key_of_another_shard_is_found(implementation):
    keys = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(0))
    order, offsets = route(keys, 16, implementation)
    mine = keys[order[offsets[3] : offsets[4]]]
    assert stray_key(mine, 3, 16, implementation) is None
    assert stray_key(mine[:0], 3, 16, implementation) is None
    foreign = keys[order[offsets[4] : offsets[4] + 2]]
    assert stray_key(torch.cat([mine, foreign]), 3, 16, implementation) == int(foreign[0])


def test_a_key_that_is_not_of_its_part_is_found(implementation):
    keys = torch.arange(100)
    order, offsets = route(keys, 4, implementation)
    ordered, bounds = keys[order], offsets.tolist()
    assert stray_of_several(ordered, bounds, [0, 1, 2, 3], 4, implementation) is None
    assert stray_of_several(ordered, bounds, [0, 1, 3, 3], 4, implementation) == ordered[bounds[2]]
    assert stray_of_several(ordered, [*bounds[:3], bounds[3] + 1], [0, 1, 2], 4, implementation) == ordered[bounds[3]]
    assert stray_of_several(ordered, [0], [], 4, implementation) is None
    with pytest.raises(ValueError, match="bounds do not"):
        stray_of_several(ordered, [0, 3, 2], [0, 0], 4, implementation)


def test_unique_rows_add_up_in_order(implementation):
    keys = torch.tensor([9, 4, 9, 9, -1, 4])
    rows = torch.tensor([[1e16], [1.0], [1.0], [-1e16], [-0.0], [2.0]], dtype=torch.float64)
    unique, sums = unique_rows(keys, rows, implementation)
    assert unique.tolist() == [9, 4, -1]
    assert sums[:, 0].tolist() == [(1e16 + 1.0) - 1e16, 3.0, -0.0]
    assert torch.signbit(sums[2])
    found, places = unique_keys(keys, implementation)
    assert torch.equal(found[places], keys)


def test_rows_that_are_unique_stay(implementation):
    rows = torch.randn(3, 2)
    keys, sums = unique_rows(torch.tensor([3, 1, 2]), rows, implementation)
    assert keys.tolist() == [3, 1, 2] and torch.equal(sums, rows)


def test_no_keys(implementation):
    none = torch.empty(0, dtype=torch.int64)
    order, offsets = route(none, 4, implementation)
    assert len(order) == 0 and offsets.tolist() == [0] * 5
    assert [len(x) for x in unique_rows(none, torch.empty(0, 2), implementation)] == [0, 0]


def test_what_is_no_key_is_explained(implementation):
    with pytest.raises(ExchangeError, match=r"torch.float32 of \(2,\)"):
        route(torch.ones(2), 3, implementation)
    with pytest.raises(ExchangeError, match="as many"):
        unique_rows(torch.tensor([1, 2]), torch.ones(3, 1), implementation)
