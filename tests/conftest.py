"""What holds for all tests: none reads or leaves programs in the user's own cache, and each process has one thread.

Tensors of tests are small: a second thread would only wait, and take a core from another rank.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest
import torch

import tests.properties  # noqa: F401 - chooses how they are tested


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let each test draw the same numbers, whichever ran before it in this process."""
    torch.manual_seed(0)
    random.seed(0)


def pytest_configure(config: pytest.Config) -> None:
    """A worker of pytest-xdist is started with its program on the command line; it stands for pytest itself."""
    if hasattr(config, "workerinput"):
        sys.modules["__main__"].__file__ = pytest.__file__


@pytest.fixture(scope="session", autouse=True)
def _surroundings() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", "off")
        patch.setenv("OMP_NUM_THREADS", "1")  # of processes that tests start
        yield
    torch.set_num_threads(threads)
