"""Which implementation a process has."""

from __future__ import annotations

import pytest

from paceline.errors import ExchangeError
from paceline.exchange.table import choice
from paceline.exchange.table.build import BuildError
from paceline.exchange.table.portable.tables import Portable


@pytest.fixture
def without_compiler(monkeypatch):
    def native():
        raise BuildError("there is no C++ compiler")

    monkeypatch.setattr(choice, "native", native)
    choice.chosen.cache_clear()
    yield
    choice.chosen.cache_clear()


def test_without_a_compiler_numpy_computes_and_it_is_said(without_compiler, monkeypatch):
    monkeypatch.delenv(choice.CHOICE, raising=False)
    with pytest.warns(UserWarning, match="by numpy, slower than they could be: there is no"):
        assert isinstance(choice.chosen(), Portable)


def test_who_asks_for_native_code_gets_no_other(without_compiler, monkeypatch):
    monkeypatch.setenv(choice.CHOICE, "native")
    with pytest.raises(ExchangeError, match=r"PACELINE_TABLE is native, and .* no C"):
        choice.chosen()


def test_who_asks_for_numpy_gets_it(without_compiler, monkeypatch):
    monkeypatch.setenv(choice.CHOICE, "portable")
    assert isinstance(choice.chosen(), Portable)


def test_what_is_unknown_is_explained(without_compiler, monkeypatch):
    monkeypatch.setenv(choice.CHOICE, "nativ")
    with pytest.raises(ExchangeError, match=r"it is native, portable, or not set.*Did you mean 'native'"):
        choice.chosen()
