"""A connection that came in, of a worker or of a predecessor: its requests, one after the other, and their answers."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.job import DenseTable
from paceline.exchange.messages import Columns, Kind, columns
from paceline.exchange.server.arena import Arena
from paceline.exchange.server.copies import copied
from paceline.exchange.server.entry import pushed, received, rows_pushed
from paceline.exchange.server.keeper import Keeper
from paceline.exchange.server.pending import PendingPush
from paceline.exchange.server.requests import Broken, Changed, NotYet, Read, Refused, Unsure
from paceline.exchange.wire.frame import Connection, Frame, Meta

_log = logging.getLogger(__name__)

_PATIENCE_S: Final = 0.02
"""How long a read waits for its clocks before the answer is NOT_YET; its worker may have to do what is missing."""


class Peer:
    """Answers one connection, in a thread of its own, until it ends.

    Args:
        connection: to whom.
        keeper: of this server.
        figures: tells what this server did.
        failed: told of an error that nobody expects; this server cannot go on then.

    Attributes:
        server: who has connected; None: no server, or nobody that has said so yet.
        opened: see `replica.Upstream`.
    """

    def __init__(
        self,
        connection: Connection,
        keeper: Keeper,
        figures: Callable[[], dict[str, Any]],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.connection = connection
        self.name = "a peer"
        self.server: int | None = None
        self.opened = 0
        self._keeper, self._figures, self._failed = keeper, figures, failed
        self._arena = Arena()
        self._borrowed = True
        self._later: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None

    def run(self) -> None:
        """Answer until the connection ends."""
        try:
            while True:
                self._borrowed = True
                self._answer(self.connection.receive(self._place))
        except ConnectionLost:
            pass
        except Broken as broken:
            self._failed(broken.why)
        except ExchangeError as error:
            _log.warning("%s is cut off: %s", self.name, error)
        except Exception as error:  # of a thread: told to whoever runs the server
            self._failed(error)
        finally:
            self._later.put(None)
            self.connection.close()

    def commit(self, epoch: int, pairs: list[tuple[int, int]]) -> None:
        """Tell a predecessor what is committed; see `replica.Upstream`."""
        numbers = np.array(pairs, dtype=np.int64).reshape(-1)
        with contextlib.suppress(ConnectionLost):  # it sends again over a new connection, and asks so
            self.connection.send(Frame(Kind.COMMITTED, epoch=epoch, numbers=numbers))

    def _place(self, frame: Frame, metas: Sequence[Meta]) -> Sequence[Tensor] | None:
        """Receive into memory of its own what outlives its message."""
        if frame.kind not in (Kind.FORWARD, Kind.COPY) and not (frame.kind == Kind.PUSH and self._keeper.hands_on):
            return None
        self._borrowed = False
        return [torch.empty(meta.shape, dtype=meta.dtype) for meta in metas]

    def _answer(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.PULL:
                self._guarded(frame, self._pull)
            case Kind.PUSH:
                self._guarded(frame, self._push)
            case Kind.CHANGED:
                self._guarded(frame, self._changed)
            case Kind.NORMS:
                self._guarded(frame, self._norms)
            case Kind.FORWARD:
                self._hand_on(frame)
            case Kind.COPY:
                self._copy(frame)
            case Kind.HELLO:
                said = json.loads(frame.text)
                self.name = f"{said['role']} {said['id']}"
                if said["role"] == "server":
                    self.server, self.opened = int(said["id"]), int(said["opened"])
            case Kind.PING:
                self.connection.send(Frame(Kind.PING, request=frame.request))
            case Kind.FIGURES:
                answer = Frame(Kind.FIGURES, request=frame.request, text=json.dumps(self._figures()))
                self.connection.send(answer)
            case _:
                raise ExchangeError(f"a server takes no message of kind {frame.kind}.")

    def _guarded(self, frame: Frame, answer: Callable[[Frame], Frame | None]) -> None:
        """Answer a worker's request, whatever is wrong with it."""
        try:
            said = answer(frame)
        except Refused as refused:
            said = Frame(Kind.REFUSED, epoch=refused.epoch, request=frame.request, text=str(refused))
        except NotYet as wait:
            said = Frame(Kind.NOT_YET, request=frame.request, numbers=np.array(wait.tasks, dtype=np.int64))
        except ExchangeError as error:
            said = Frame(Kind.FAILED, request=frame.request, text=str(error))
        if said is not None:
            self.connection.send(said)

    def _pull(self, frame: Frame) -> Frame:
        self._arena.clear()
        try:
            reads = [self._read(asked) for asked in columns(frame.numbers, frame.tensors)]
        except (ValueError, IndexError) as error:
            raise ExchangeError(f"a read of {self.name} cannot be understood: {error}") from error
        found = self._keeper.answering.read(frame.epoch, frame.clock, reads, _PATIENCE_S)
        positions = found.positions
        numbers = np.array([positions[shard] for read in reads for shard in read.shards], dtype=np.int64)
        return Frame(Kind.PULLED, request=frame.request, numbers=numbers, tensors=found.values)

    def _read(self, asked: Columns) -> Read:
        """Return what a payload asks for."""
        table, bounds = self._keeper.job.tables[asked.table], asked.bounds()
        if bounds is None:
            raise ValueError("slices do not lie one after the other")
        dtype = getattr(torch, table.dtype)
        if isinstance(table, DenseTable):
            if bounds[-1] > table.count:
                raise ValueError(f"{bounds[-1]} elements of table {table.name}, which has {table.count}")
            out = self._arena.take(dtype, bounds[-1]) if len(asked.shards) != 1 else None
            return Read(asked.table, asked.shards, bounds, None, out)
        (keys,) = asked.tensors
        if keys.shape != (bounds[-1],):
            raise ValueError(f"slices of {bounds[-1]} rows, with keys of {tuple(keys.shape)}")
        return Read(asked.table, asked.shards, bounds, keys, self._arena.take(dtype, bounds[-1], table.width))

    def _changed(self, frame: Frame) -> Frame:
        if len(frame.numbers) % 3:
            raise ExchangeError(f"a question of {self.name} for changes cannot be understood.")
        wanted = [Changed(*numbers) for numbers in frame.numbers.reshape(-1, 3).tolist()]
        found = self._keeper.answering.changed(frame.epoch, wanted, frame.worker)
        positions = np.array([found.positions[one.shard] for one in wanted], dtype=np.int64)
        return Frame(Kind.PULLED, request=frame.request, numbers=positions, tensors=found.values)

    def _norms(self, frame: Frame) -> Frame:
        stages, values = self._keeper.answering.norms(frame.epoch, frame.clock, frame.numbers.tolist()).values
        return Frame(Kind.PULLED, request=frame.request, numbers=stages.numpy(), tensors=[values])

    def _push(self, frame: Frame) -> Frame | None:
        keeper = self._keeper
        rows = rows_pushed(frame, keeper.job)
        if rows is not None:
            pending = PendingPush(frame.request, len(rows.reads), self._send_later)
            entries = pushed(frame, keeper.job, borrowed=self._borrowed) if keeper.hands_on else []
            if keeper.push_rows(frame.epoch, rows, entries, pending):
                return pending.release()
        entries = pushed(frame, keeper.job, borrowed=self._borrowed)
        updates = [entry.update(keeper.job) for entry in entries]
        pending = PendingPush(frame.request, len(entries), self._send_later)
        keeper.push(frame.epoch, entries, updates, pending)
        return pending.release()

    def _hand_on(self, frame: Frame) -> None:
        keeper = self._keeper
        entries = received(frame, borrowed=self._borrowed)
        updates = [entry.update(keeper.job) for entry in entries]
        try:
            with self._passing_over(frame):
                keeper.hand_on(frame.epoch, entries, updates, self)
        except ConnectionLost:
            raise
        except ExchangeError as error:
            raise RuntimeError("replicas differ") from error

    def _copy(self, frame: Frame) -> None:
        move, shard = copied(frame, self._keeper.job)
        with self._passing_over(frame):
            self._keeper.take_copy(frame.epoch, move, shard, self)

    @contextlib.contextmanager
    def _passing_over(self, frame: Frame) -> Iterator[None]:
        """Pass over what is of an epoch that is over: its sender begins again in the next.

        Raises:
            ConnectionLost: this server could not follow; over a new connection the sender begins again.
        """
        try:
            yield
        except Refused as refused:
            if refused.epoch <= frame.epoch or isinstance(refused, Unsure):  # a copy that goes on is not sent again
                raise ConnectionLost(str(refused)) from None

    def _send_later(self, frame: Frame) -> None:
        """Send an answer without making the caller wait for a peer that does not listen."""
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name=f"answers for {self.name}", daemon=True)
            self._writer.start()
        self._later.put(frame)

    def _write(self) -> None:
        try:
            while (frame := self._later.get()) is not None:
                self.connection.send(frame)
        except ConnectionLost:
            pass
