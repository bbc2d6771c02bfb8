"""Programs for tests of the nursery: one that keeps children there, and what those are."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import RankFailed
from paceline.train.servers.processes.children import Children
from paceline.train.servers.processes.nursery import Nursery


def main() -> None:
    """Do the scene of that name, or, as a child, wait to be ended."""
    scene, *arguments = sys.argv[1:]
    scenes: dict[str, Callable[..., None]] = {"wait": wait, "at once": at_once, "gone": gone}
    scenes[scene](*arguments)


def wait() -> None:
    time.sleep(300)


def at_once(logs: str) -> None:
    """A child is told to end before it can have come to anything; it is born slowly."""
    session = os.setsid
    os.setsid = lambda: (time.sleep(0.2), session())  # type: ignore[assignment, func-returns-value]
    nursery = Nursery.fork()
    os.setsid = session
    with Children(Path(logs), nursery) as children:
        child = children.start("worker-start-0", __name__, "wait")
        child.send(signal.SIGTERM)
        child.wait()
        print(child.code)


def gone(logs: str) -> None:
    """The nursery is killed: children end with it, and others cannot be started."""
    nursery = Nursery.fork()
    assert nursery is not None
    with Children(Path(logs), nursery) as children:
        child = children.start("worker-start-0", __name__, "wait")
        print(child.pid, child.code, flush=True)
        os.kill(nursery.pid, signal.SIGKILL)
        child.wait()
        print(child.code)
        try:
            children.start("worker-start-1", __name__, "wait")
        except RankFailed as error:
            print(error)
