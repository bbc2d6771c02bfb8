"""Slow links take strong codecs, quick ones none."""

from __future__ import annotations

import pytest

from paceline.exchange.compress import choose
from paceline.exchange.compress.codec import Identity
from paceline.exchange.compress.names import parse

_SHAPES = [(1000, 300), (1000, 300), (300,), (20, 3, 3, 3), ()]


def _with_speeds(monkeypatch, seconds):
    """Let codecs take these seconds for each element."""
    measured = choose._measured

    def pretended(codec, sample):
        return measured(codec, sample)[0], seconds.get(codec.name, 0.0) * sample.numel()

    monkeypatch.setattr(choose, "_measured", pretended)


def test_links(monkeypatch):
    _with_speeds(monkeypatch, {"bfloat16": 1e-10, "int8": 1e-9, "power_sgd": 2e-9, "sampled_top_k": 3e-9})
    assert isinstance(choose.choose(1e12, _SHAPES), Identity)
    assert str(choose.choose(1e10, _SHAPES)) == "bfloat16"
    assert str(choose.choose(1e6, _SHAPES)) in ("power_sgd(4)", "sampled_top_k(0.01)")


def test_a_milder_codec_stays_unless_another_is_worth_it():
    def one(name, seconds):
        return choose.Weighed(parse(name), 1.0, seconds, 0.0)

    assert str(choose.chosen([one("none", 1.0), one("bfloat16", 0.95)]).codec) == "none"
    assert str(choose.chosen([one("none", 1.0), one("bfloat16", 0.85), one("int8", 0.8)]).codec) == "bfloat16"


def test_what_a_push_takes():
    none, int8 = choose.weigh(1e9, _SHAPES, [parse("none"), parse("int8")])
    elements = 2 * 300_000 + 300 + 540 + 1
    assert none.link_s == pytest.approx(4e-9 * elements) and none.codec_s == 0 and none.ratio == 1
    assert int8.ratio == pytest.approx(4 / (1 + 4 / 128), rel=0.02) and int8.codec_s > 0
    assert "3.9 times fewer bytes" in str(int8)


def test_large_tensors_are_measured_in_part():
    (int8,) = choose.weigh(1e9, [(300_000, 300)], [parse("int8")])
    assert int8.link_s == pytest.approx(9e7 * (1 + 4 / 128) / 1e9, rel=0.01)


def test_nothing_to_send():
    assert isinstance(choose.choose(1e9, []), Identity)
    assert isinstance(choose.choose(1e9, [(0, 3)]), Identity)
