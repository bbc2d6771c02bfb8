"""How a run that a signal ends is saved: its workers leave, and then servers write what they have."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Final

from paceline.errors import RankFailed
from paceline.runtime.job.signals import NotedSignals
from paceline.train.servers.supervisor.cluster import Cluster
from paceline.train.servers.supervisor.clusters import Clusters
from paceline.train.servers.supervisor.workforce import Workforce

_GRACE_S: Final = 20.0
"""What workers have to finish what they are at."""
_SNAPSHOT_S: Final = 60.0
"""What servers have to write a snapshot."""
_POLL_S: Final = 0.05


class Saving:
    """A snapshot of one exchange as it is from now on, whatever is in the making, fails, or is asked of nobody.

    Args:
        cluster: the exchange.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before: int | None = None

    def is_there(self) -> bool:
        """Whether it is written, or there is nothing that could be; asks for it while it is not.

        Raises:
            RankFailed: the job failed meanwhile.
        """
        status = self._cluster.status()
        if status is None:  # its coordinator is being started
            return False
        if status.failed:
            raise RankFailed(f"the job failed while it was saved: {status.failed}")
        if status.finished or not status.begun:
            return True
        if self._before is None:  # a snapshot that was begun before may lack what was done since
            self._before = max((*status.snapshots, status.saving or 0), default=0)
        if any(number > self._before for number in status.snapshots):
            return True
        if status.saving is None:
            self._cluster.ask_for_snapshot()
        return False


def stop_by_signal(clusters: Clusters, workforce: Workforce, signals: NotedSignals) -> bool:
    """Stop a run as its user asked; whether it was saved. A second signal ends this at once.

    Raises:
        RankFailed: it could not be saved.
    """
    return _stop(clusters, workforce, lambda: len(signals.received) > 1)


def stop_unwritten(error: OSError, clusters: Clusters, workforce: Workforce, signals: NotedSignals) -> RankFailed:
    """Stop a run whose figures cannot be written, and save it if that can be; return what there is to say."""
    try:
        saved = "and saved." if _stop(clusters, workforce, lambda: bool(signals.received)) else "by a signal, unsaved."
    except RankFailed as failed:
        saved = f"and not saved: {failed}"
    return RankFailed(
        f"what the run does cannot be written ({error}). It was stopped {saved} Make room, and go on with --resume."
    )


def _stop(clusters: Clusters, workforce: Workforce, hurried: Callable[[], bool]) -> bool:
    """Have workers leave, and servers write a snapshot; whether it was written, rather than given up in a hurry.

    Raises:
        RankFailed: no snapshot came.
    """
    workforce.end(signal.SIGTERM, _GRACE_S, hurried)
    deadline = time.monotonic() + _SNAPSHOT_S
    wanted = [Saving(cluster) for cluster in clusters.all]
    while not hurried():
        wanted = [saving for saving in wanted if not saving.is_there()]
        if not wanted:
            return True
        if time.monotonic() > deadline:
            raise RankFailed(f"servers wrote no snapshot within {_SNAPSHOT_S:g} s; see their logs.")
        time.sleep(_POLL_S)
        clusters.look()
    return False
