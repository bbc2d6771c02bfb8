"""What is said of a replay of a run that was resumed: what of it is proved, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ExchangeError
from paceline.exchange.replay.compare import Difference
from paceline.exchange.replay.whole import Outcome
from paceline.verify.server_replay import PartReport, ReplayReport, verify_replay

EQUAL = Outcome(snapshot=3, updates=1200, workers=2, difference=None, seconds=0.5)
UNLIKE = Outcome(4, 10, 1, Difference(0, 7, "bias, element 2", "1.0", "2.0"), 0.5)


def report(*outcomes: Outcome | None, begins_at: int = 0) -> ReplayReport:
    *before, last = outcomes
    parts = [PartReport(Path(f"exchange-before-{n}"), one, is_last=False) for n, one in enumerate(before, start=1)]
    return ReplayReport(Path("run"), [*parts, PartReport(Path("exchange"), last, is_last=True)], begins_at)


def test_a_run_in_one_part() -> None:
    assert report(EQUAL).text == "equal: 1,200 updates of 2 workers, replayed in 0.5 s, give snapshot 3 bit for bit"
    assert report(UNLIKE).text.startswith(
        "DIFFERENT: 10 updates of 1 workers, replayed in 0.5 s, do not give snapshot 4:"
    )
    assert report(EQUAL).equal and not report(UNLIKE).equal


def test_parts_are_told_in_order_and_then_all_of_them() -> None:
    told = report(EQUAL, None, EQUAL)
    before, nothing, last, whole = told.text.splitlines()
    assert before.endswith("give what was gone on from, snapshot 3, bit for bit") and before.startswith(
        "exchange-before-1"
    )
    assert nothing == "exchange-before-2: nothing that it did was gone on from"
    assert last.startswith("exchange: equal: ") and whole.startswith("equal: each part began with")
    assert told.equal and [part["equal"] for part in told.to_json()["parts"]] == [True, None, True]
    assert report(EQUAL, None).text.splitlines()[1] == "exchange: it has no snapshot yet"


def test_a_part_that_is_unlike_or_gone_is_no_proof_of_the_run() -> None:
    unlike = report(UNLIKE, EQUAL)
    assert not unlike.equal and len(unlike.text.splitlines()) == 2
    assert "snapshot 4: shard 0 at position 7: bias, element 2 is 1.0" in unlike.text
    gone = report(EQUAL, begins_at=2)
    assert gone.text.splitlines()[-1].startswith("NOT PROVED: what was done before snapshot 2")
    assert gone.to_json()["begins_at"] == 2


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match="is no run with parameter servers"):
        verify_replay(tmp_path)
