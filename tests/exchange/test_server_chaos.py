"""A job of processes through whatever happens: its result is what its logs say, and nothing is lost or doubled.

PACELINE_CHAOS_S: for how many seconds things happen; few by default, as the machine has other tests to run. With 60,
servers, workers and the coordinator are killed, stopped, sent away or joined by others about a hundred times.
"""

from __future__ import annotations

import faulthandler
import os
import random
from collections.abc import Iterator

import pytest

from paceline.exchange.terms import Terms
from tests.exchange.chaos.cast import cast
from tests.exchange.chaos.findings import check
from tests.exchange.chaos.script import Script
from tests.exchange.chaos.toil import job

SECONDS = float(os.environ.get("PACELINE_CHAOS_S", "5"))
TASKS_PER_S = 20


@pytest.fixture(autouse=True)
def _stacks() -> Iterator[None]:
    faulthandler.dump_traceback_later(240 + 3 * SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize(
    ("consistency", "seed", "clip"), [("asp", 1, None), ("ssp(2)", 2, None), ("bsp", 3, None), ("bsp", 4, 100.0)]
)
def test_whatever_happens(consistency: str, seed: int, clip: float | None) -> None:
    if (consistency.startswith("ssp") or clip is not None) and "PACELINE_CHAOS_S" not in os.environ:
        pytest.skip("asp and bsp are its ends; set PACELINE_CHAOS_S for this too")
    terms = Terms(int(SECONDS * TASKS_PER_S) // 2 * 2 + 40, servers=3, workers=1, lease_s=1.5, snapshot_every=100)
    with cast(job(consistency, replication=2, clip=clip), terms) as play:
        script = Script(play, SECONDS, TASKS_PER_S, random.Random(seed))
        script.servers += [play.server() for _ in range(3)]
        script.workers += [play.worker(0.01) for _ in range(3)]
        play.wait(lambda: play.status()["view"]["chains"], "a beginning")
        script.run()
        print(dict(script.done))
        play.finish()
        check(play)
