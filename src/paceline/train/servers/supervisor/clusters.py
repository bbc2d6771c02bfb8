"""All exchanges of a run: one, or one for each group of workers and a global one over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.train.servers.processes.children import Children
from paceline.train.servers.recipe.section import ServerSection
from paceline.train.servers.supervisor.cluster import Cluster
from paceline.train.servers.supervisor.setup import Made
from paceline.train.servers.watch.status import Status


class Clusters:
    """The processes of all exchanges.

    Args:
        made: what is on disk.
        children: where processes are started.
        server: the recipe's section.
    """

    def __init__(self, made: Made, children: Children, server: ServerSection) -> None:
        self._colocated = server.deployment == "colocated"
        grouped = server.deployment == "groups"
        served: Sequence[str] = ("paceline.exchange.server",)
        if server.is_hogwild:
            served = ("paceline.exchange.hogwild.keeper", "--rows", str(server.rows))
        self.main = Cluster(*made.main, children, replace=server.replace, server=served)
        self.groups = [self.main]
        if grouped:
            self.groups = [
                Cluster(*exchange, children, replace=server.replace, label=f"-{number}")
                for number, exchange in enumerate(made.groups)
            ]

    @property
    def all(self) -> list[Cluster]:
        """All exchanges: the main one first."""
        return self.groups if self.groups[0] is self.main else [self.main, *self.groups]

    def start(self) -> None:
        """Start coordinators, and servers but for those that come with workers."""
        for cluster in self.all:
            cluster.start(0 if self._colocated else cluster.charter.terms.servers)

    def look(self) -> None:
        """See `Cluster.look`."""
        for cluster in self.all:
            cluster.look()

    def news(self) -> Iterator[str]:
        """Yield what happened since the last time, in words."""
        for cluster in self.all:
            yield from cluster.news()

    def status(self) -> Status:
        """Return where the run is: done when the main exchange is, and failed or waiting if any is."""
        found = self.main.status() or Status()
        if self.groups[0] is self.main:
            return found
        figures, left = dict(found.figures), dict(found.left)
        for number, cluster in enumerate(self.groups):
            status = cluster.status() or Status()
            found = replace(found, failed=found.failed or status.failed, waiting=found.waiting or status.waiting)
            figures |= {f"group-{number}/{name}": values for name, values in status.figures.items()}
            left |= {f"group-{number}/{name}": values for name, values in status.left.items()}
        return replace(found, figures=figures, left=left)

    def close(self) -> None:
        """Ask no more."""
        for cluster in self.all:
            cluster.close()
