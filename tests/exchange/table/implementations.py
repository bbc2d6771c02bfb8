"""The implementations that tests compare; the native one where it can be built."""

from __future__ import annotations

import os

import pytest

from paceline.exchange.table.build import BuildError
from paceline.exchange.table.choice import CHOICE, Choice
from paceline.exchange.table.implementation import Implementation

_TESTED = [Choice(os.environ[CHOICE])] if CHOICE in os.environ else list(Choice)


def made(choice: Choice) -> Implementation:
    """Return an implementation, or skip the test."""
    if choice not in _TESTED:
        pytest.skip(f"{CHOICE} is set")
    try:
        return choice.make()
    except BuildError as error:
        pytest.skip(str(error))
