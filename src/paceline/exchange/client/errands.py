"""What a worker wants of shards, asked of those who hold them until all have answered, through all changes of view.

An errand is for some shards. Each round asks the servers that hold what is still pending, one message each, all sent
before any answer is awaited. A server that refuses, or is lost, leaves its shards pending; the next round begins with
the next view. Nobody gives up: as long as there is a coordinator there will be a view in which somebody answers.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from torch import Tensor

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.client.links import Links
from paceline.exchange.interface import Interrupted
from paceline.exchange.messages import Kind
from paceline.exchange.view import View
from paceline.exchange.wire.frame import Frame, Meta

_LOG = logging.getLogger(__name__)
_RETRY_S: Final = 0.02
"""How long a refused request waits for a newer view before it is sent again."""
_TELL_S: Final = 5.0
"""After how long a wait is told, and how often from then on."""


class Membership(Protocol):
    """What is asked of `membership.member.Member`."""

    @property
    def view(self) -> View:
        """The newest view."""
        ...

    @property
    def orphans(self) -> bool:
        """Whether tasks of workers that are gone wait for somebody."""
        ...

    def wait_for_view(self, newer_than: int, timeout_s: float) -> View:
        """Return a view newer than an epoch, or the newest one after some time."""
        ...


class Errand(ABC):
    """Something that each of some shards has to answer.

    Attributes:
        pending: shards that have not answered and are not asked now.
        asked: by request the server and its shards.
        epoch: in which it was last asked.
        awaited: tasks without which a server could not answer, in the last round.
        waited_s: seconds that went by with NOT_YET.
    """

    def __init__(self, shards: Iterable[int]) -> None:
        self.pending = set(shards)
        self.asked: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.epoch = -1
        self.awaited: tuple[int, ...] = ()
        self.refused = False
        self.failed: ExchangeError | None = None
        self.waited_s = 0.0

    @abstractmethod
    def holder(self, view: View, shard: int) -> int:
        """Return the server that answers for a shard."""

    @abstractmethod
    def frame(self, shards: Sequence[int]) -> Frame:
        """Return the request for shards of one server."""

    @abstractmethod
    def take(self, shards: Sequence[int], answer: Frame) -> None:
        """Take the answer for some shards."""

    def room(self, shards: Sequence[int], metas: Sequence[Meta]) -> Sequence[Tensor] | None:
        """Return where the tensors of the answer for some shards go; None: wherever."""
        return None

    def place(self, request: int, answer: Frame, metas: Sequence[Meta]) -> Sequence[Tensor] | None:
        """See `links.Asker`."""
        return self.room(self.asked[request][1], metas) if metas else None

    def answered(self, request: int, answer: Frame) -> None:
        """See `links.Asker`."""
        _, shards = self.asked.pop(request)
        if answer.kind in (Kind.PULLED, Kind.PUSHED):
            self.take(shards, answer)
            return
        self.pending.update(shards)
        if answer.kind == Kind.NOT_YET:
            self.awaited += tuple(answer.numbers.tolist())
        elif answer.kind == Kind.REFUSED:
            self.refused = True
        else:
            self.failed = ExchangeError(
                f"a server cannot do what it was asked: {answer.text or Kind(answer.kind).name}"
            )

    def lost(self, request: int) -> None:
        """See `links.Asker`."""
        self.pending.update(self.asked.pop(request)[1])
        self.refused = True


class Errands:
    """Runs errands of one thread over its links.

    Args:
        check: raises where this worker may go on no longer.
        awaited: told for which tasks a read waits.

    Attributes:
        hurry: whether reads that have to wait give way, orphans or not. Any thread may set it.
    """

    def __init__(
        self,
        membership: Membership,
        links: Links,
        check: Callable[[], None],
        awaited: Callable[[Sequence[int]], None],
    ) -> None:
        self._membership, self._links, self._check, self._awaited = membership, links, check, awaited
        self.hurry = False

    def begin(self, errand: Errand) -> None:
        """Ask for what is pending, of the newest view."""
        view = self._membership.view
        errand.epoch = view.epoch
        by_server: dict[int, list[int]] = {}
        for shard in sorted(errand.pending):
            if view.chains and view.chains[shard]:
                by_server.setdefault(errand.holder(view, shard), []).append(shard)
            else:
                errand.refused = True
        for server, shards in by_server.items():
            frame = errand.frame(shards)
            frame.epoch = view.epoch
            try:
                request = self._links.ask(server, frame, errand)
            except ConnectionLost:
                errand.refused = True
                continue
            errand.asked[request] = (server, tuple(shards))
            errand.pending.difference_update(shards)

    def finish(self, errand: Errand, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Return once all shards have answered; it has begun.

        Args:
            errand: what has begun.
            meanwhile: called whenever it has to be asked again.

        Raises:
            Interrupted: it waits for tasks, and there are some whose workers are gone.
            ExchangeError: a server says that what was asked is wrong, or this worker may not go on.
        """
        began = told = time.monotonic()
        while True:
            self._hear(errand)
            if errand.failed is not None:
                raise errand.failed
            if not errand.pending:
                return
            self._check()
            now = time.monotonic()
            if now - told > _TELL_S:
                told = now
                _LOG.warning("%s", _waiting(errand, self._membership.view, now - began))
            if errand.awaited:
                self._awaited(errand.awaited)
                if self._membership.orphans or self.hurry:
                    raise Interrupted
            meanwhile()
            if errand.refused:
                self._membership.wait_for_view(errand.epoch, _RETRY_S)
            errand.awaited, errand.refused = (), False
            self.begin(errand)

    def _hear(self, errand: Errand) -> None:
        """Wait for all answers to what was asked."""
        began = time.monotonic()
        while errand.asked:
            server, _ = next(iter(errand.asked.values()))
            self._links.receive(server)
        if errand.awaited:
            errand.waited_s += time.monotonic() - began


def _waiting(errand: Errand, view: View, waited_s: float) -> str:
    """Say what is waited for."""
    if errand.awaited:
        tasks = ", ".join(map(str, sorted(set(errand.awaited))[:8]))
        return f"waiting for {waited_s:.0f} s for tasks {tasks}: they are not done, and a bound asks for them"
    held = {shard: view.chains[shard] for shard in sorted(errand.pending) if view.chains}
    nobody = [shard for shard, chain in held.items() if not chain]
    if not view.chains or nobody:
        return (
            f"waiting for {waited_s:.0f} s for servers: in epoch {view.epoch} nobody holds shards {nobody or 'at all'}"
        )
    servers = sorted({server for chain in held.values() for server in chain})
    return f"waiting for {waited_s:.0f} s for servers {servers}: they refuse, or are not reached, in epoch {view.epoch}"
