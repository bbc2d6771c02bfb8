"""The implementations that tests compare."""

from __future__ import annotations

import pytest

from paceline.exchange.table.implementation import Implementation

every_implementation = pytest.mark.parametrize("implementation", list(Implementation), ids=lambda one: one.value)
