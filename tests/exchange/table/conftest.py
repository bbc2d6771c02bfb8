from __future__ import annotations

import pytest

from paceline.exchange.table.choice import Choice
from paceline.exchange.table.implementation import Implementation
from tests.exchange.table.implementations import made


@pytest.fixture(params=list(Choice), ids=lambda one: one.value)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return made(request.param)


@pytest.fixture
def both() -> tuple[Implementation, Implementation]:
    """The native implementation and the portable one."""
    return made(Choice.NATIVE), made(Choice.PORTABLE)
