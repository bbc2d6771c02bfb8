"""Ten thousand random calls on four ranks, more ranks than most test machines have cores."""

from __future__ import annotations

import pytest

from tests.ranks import ranks
from tests.shm.implementations import Implementation, needs_native
from tests.shm.program import SMALL
from tests.shm.soak import soak


@needs_native
@pytest.mark.usefixtures("native_part")
@ranks(4, backend="gloo")
def test_five_thousand_calls(world):
    assert soak(world, Implementation.NATIVE, 0, SMALL, 5_000) >= 5_000


@ranks(4, backend="gloo")
def test_in_pure_python(world):
    assert soak(world, Implementation.PORTABLE, 0, SMALL, 2500) >= 2500
