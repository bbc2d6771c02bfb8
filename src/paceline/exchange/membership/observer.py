"""Who looks at a job without being of it: the progress view, the command line, tests."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any, Self

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.membership.link import dialled
from paceline.exchange.membership.protocol import Incoming, Message, packed
from paceline.exchange.terms import Charter


class Observer:
    """Asks the coordinator. After the coordinator was away, the next question reaches the one in its place."""

    def __init__(self, charter: Charter, secret: bytes) -> None:
        self._charter, self._secret = charter, secret
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None

    @classmethod
    def connect(cls, charter: Charter, secret: bytes) -> Self:
        """Return an observer of a job.

        Raises:
            ConnectionLost: there is no coordinator.
            ExchangeError: the secret is another.
        """
        observer = cls(charter, secret)
        with observer._lock:
            observer._dial()
        return observer

    def status(self) -> dict[str, Any]:
        """Return how the job is.

            state     waiting (for servers or workers), running, saving (the last snapshot), finished or failed
            why       it failed, or waits
            epoch, view
            tasks     total, done, dealt (and not done), waiting (of workers that are gone), next, clock
            members   id, role, pid, machine, leaving, connected, silent_s, figures (as they reported)
            left      id, role and figures of members that left in the last minute
            snapshot  number of the last that is complete; snapshots, saving: number and clock of those that are still
                      there, and of the one in the making

        Raises:
            ConnectionLost: there is no coordinator now.
        """
        status: dict[str, Any] = self._ask({"say": "status"})["status"]
        return status

    def snapshot(self) -> int | None:
        """Have a snapshot begun, if none is in the making; return the number of that in the making.

        Raises:
            ConnectionLost: there is no coordinator now.
        """
        number: int | None = self._ask({"say": "snapshot"})["number"]
        return number

    def close(self) -> None:
        """Look no more."""
        with self._lock:
            self._hang_up()

    def _ask(self, message: Message) -> Message:
        with self._lock:
            try:
                if self._sock is None:
                    self._dial()
                return self._answer(message)
            except (OSError, ExchangeError) as error:
                self._hang_up()
                if isinstance(error, ExchangeError):
                    raise
                raise ConnectionLost(f"the coordinator went away ({error}).") from error

    def _answer(self, message: Message) -> Message:
        assert self._sock is not None
        self._sock.sendall(packed(message))
        incoming = Incoming()
        while True:
            arrived = self._sock.recv(1 << 20)
            if not arrived:
                raise ConnectionLost("the coordinator went away.")
            for answer in incoming.feed(arrived):
                return answer

    def _dial(self) -> None:
        self._sock = dialled(self._charter.coordinator, self._secret)
        self._sock.settimeout(10)

    def _hang_up(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.close()
            self._sock = None
