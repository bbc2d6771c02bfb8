"""`paceline bench server`, transports, at toy size; and what its figures are made of."""

from __future__ import annotations

import json
import math

import pytest

from paceline.bench.server.main import main
from paceline.bench.server.transports import Settings, _against, _figures
from paceline.bench.server.transports_ways import LIMITS, WAYS, Load, way
from paceline.errors import RecipeError


def test_one_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PS_LITE", raising=False)
    asked = {"parts": "transports", "size": "1M", "rows": "10", "rounds": "2", "repetitions": "3"}
    asked["ways"] = "shared,tcp-4,gloo,ps-lite"
    result = json.loads(json.dumps(main(asked)))
    assert list(result["left_out"]) == ["ps-lite"] and "checkout" in result["left_out"]["ps-lite"]
    assert set(result["transports"]) == {"shared", "tcp-4", "memcpy", "raw-tcp"}
    assert set(result["peers"]) == {"gloo"}
    for name in ("shared", "tcp-4"):
        found = result["transports"][name]
        assert {"push_mb_s", "pull_mb_s", "raw_mb_s", "rtt_us", "push_rows_s", "pull_rows_s"} <= set(found)
        assert all(
            math.isfinite(value) and value > 0 for key, value in found.items() if key not in ("spread", "of_raw")
        )
        assert {"push", "pull"} <= set(found["of_raw"])
    assert "pull_placed" in result["transports"]["shared"]["of_raw"]
    assert result["settings"]["transports"]["rounds"] == 2
    assert result["machine"]["cores"] >= 1
    shown = capsys.readouterr().out
    assert "of raw" in shown and "left out: ps-lite" in shown


def test_rates_are_of_rounds() -> None:
    load = Load(size=10**6, rows=100, width=4)
    ours = {"push": [1.0, 2.0], "pull": [1.0, 1.0], "rtt": [1e-6, 3e-6], "push_rows": [0.5, 0.5]}
    found = _figures(ours, load)
    assert found["push_mb_s"] == pytest.approx(0.75)
    assert found["rtt_us"] == pytest.approx(2)
    assert found["push_rows_s"] == pytest.approx(200)
    against = _against(ours, {"push": [0.5, 0.5], "pull": [1.0, 0.25]}, load)
    assert against["of_raw"]["push"]["median"] == pytest.approx((0.5 + 0.25) / 2)
    assert against["of_raw"]["pull"]["median"] == pytest.approx((1 + 0.25) / 2)
    assert against["raw_mb_s"] == pytest.approx(2)


def test_who_cannot_run_is_left_out_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, "gloo", ("paceline.bench.no_such_module", "Gloo"))
    result = main({"parts": "transports", "size": "64k", "rows": "5", "rounds": "1", "ways": "gloo"})
    assert "no_such_module" in result["left_out"]["gloo"]


def test_all_ways_can_be_made() -> None:
    assert set(LIMITS) | set(LIMITS.values()) < set(WAYS)
    for name in WAYS:
        assert way(name) is not None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"ways": "shard"}, "Did you mean 'shared'"),
        ({"rounds": "0"}, "from 1"),
        ({"round": "1"}, "Did you mean 'rounds'"),
        ({"parts": "transport"}, "Did you mean 'transports'"),
    ],
)
def test_settings_are_checked(asked: dict[str, str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        main(asked)


def test_sizes_are_of_whole_numbers() -> None:
    assert Settings.read({"size": "100"}).size == 64
