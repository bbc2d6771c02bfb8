"""The next part of a run takes the place of the one before in one step, at whatever moment its supervisor dies.

    exchange.draft      is being written; of no use where whoever wrote it died
    exchange.next       written, and on the disk: from here on the run goes on with it
    exchange-before-1   what `exchange` was, moved there first
    exchange            what `exchange.next` was

All exchanges of a part are in its one directory, so those of groups and of the servers above them change together.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.durable import settle
from paceline.train.rundir import RunDirectory
from paceline.train.servers.rundir import NAME, Part, part_of


@contextmanager
def renewed(run: RunDirectory) -> Iterator[Part]:
    """Write the next part of a run. It is the run's once the block has ended well, and never half of it."""
    put_in_place(run)
    draft = run.root / f"{NAME}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield Part(draft)
    _settle_all(draft)
    draft.rename(_next(run))
    settle(run.root)
    put_in_place(run)


def put_in_place(run: RunDirectory) -> None:
    """Have a part that is written take the place of the one before, which whoever wrote it may not have come to."""
    written, place = _next(run), part_of(run).root
    if not written.exists():
        return
    if place.exists():
        place.rename(_aside(place))
    written.rename(place)
    settle(run.root)


def _next(run: RunDirectory) -> Path:
    return run.root / f"{NAME}.next"


def _aside(root: Path) -> Path:
    """Return the next free place for what has been."""
    number = 1
    while (target := root.with_name(f"{root.name}-before-{number}")).exists():
        number += 1
    return target


def _settle_all(folder: Path) -> None:
    """Have all that is in a folder outlive a loss of power; what is elsewhere too does so already."""
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            if path.stat().st_nlink == 1:
                settle(path)
        settle(Path(root))
