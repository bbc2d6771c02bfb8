"""What holds for all tests of `shm`: its native part is there before ranks, in their little time, need it."""

from __future__ import annotations

import pytest

from paceline.shm import build
from tests.shm.implementations import Implementation


@pytest.fixture(scope="session")
def native_part() -> None:
    try:
        build.native()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _built(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("implementation") is Implementation.NATIVE:
        request.getfixturevalue("native_part")
