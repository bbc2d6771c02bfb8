"""Ten thousand random calls on four ranks, more ranks than most test machines have cores."""

from __future__ import annotations

from tests.ranks import ranks
from tests.shm.implementations import every_implementation
from tests.shm.program import SMALL
from tests.shm.soak import soak

_CALLS = 10_000


@every_implementation
@ranks(4, backend="gloo", timeout_s=300)
def test_ten_thousand_calls(world, implementation):
    assert soak(world, implementation, 0, SMALL, _CALLS) >= _CALLS
