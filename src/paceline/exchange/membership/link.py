"""A way to the coordinator that outlives it: what was not confirmed is said again to whoever comes in its place."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.membership.protocol import Incoming, Message, packed
from paceline.exchange.view import Address
from paceline.exchange.wire.address import is_here
from paceline.exchange.wire.auth import authenticate

_LOG: Final = logging.getLogger(__name__)

_PAUSES_S: Final = (0.01, 0.02, 0.05, 0.1)
"""Between attempts to connect."""

_TELL_S: Final = 5.0
"""After how long without a coordinator that is told, and how often from then on."""

_ANSWER_S: Final = 2.0
"""Within what a coordinator introduces itself; one that does not is stopped, or about to be replaced."""

PATIENCE_S: Final = 600.0
"""How long a process without a coordinator goes on: nobody came to start one again, so nobody waits for its work."""


def dialled(address: Address, secret: bytes) -> socket.socket:
    """Return a connection to the coordinator, both ends known to each other.

    Raises:
        ConnectionLost: nobody is there.
        ExchangeError: who is there has another secret, or is something else.
    """
    sock = _connected(address)
    try:
        authenticate(sock, secret, server=False, timeout_s=_ANSWER_S)
    except BaseException:
        sock.close()
        raise
    return sock


def _connected(address: Address) -> socket.socket:
    why = ""
    if address.unix and (not address.machine or is_here(address.machine)):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(address.unix)
            return sock
        except OSError as error:
            sock.close()
            why = f"no coordinator listens at {address.unix} ({error.strerror or error})."
    if address.port:
        try:
            sock = socket.create_connection((address.host, address.port), timeout=5)
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            why = f"no coordinator listens at {address.host}:{address.port} ({error.strerror or error})."
    if why:
        raise ConnectionLost(why)
    raise ExchangeError(
        f"the coordinator listens at {address.unix} of another host only; give the job a host and port for it."
    )


class Link:
    """Says and asks, through one coordinator after the other.

    Args:
        address: of the coordinator.
        secret: of the job.
        greeting: what to say first on each connection; its answer goes to `heard` too.
        heard: told of each message, also answers, before who asked has them; called by the link's own thread.
        lost: told once, when none will be heard any more, and why.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        greeting: Callable[[], Message],
        heard: Callable[[Message], None],
        lost: Callable[[str], None],
    ) -> None:
        self._address, self._secret = address, secret
        self._greeting, self._heard, self._lost = greeting, heard, lost
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._numbers = 0
        self._unconfirmed: dict[int, tuple[Message, bool]] = {}  # and whether it waits for an answer of its own
        self._answers: dict[int, Message] = {}
        self._sock: socket.socket | None = None
        self._closed: str | None = None

    def start(self, timeout_s: float) -> None:
        """Connect for the first time, and stay connected.

        Raises:
            ConnectionLost: no coordinator came.
            ExchangeError: who is there has another secret, or does not want this process.
        """
        self._connect(timeout_s)
        threading.Thread(target=self._run, name="coordinator link", daemon=True).start()

    def say(self, message: Message, *, keep: bool = True) -> int:
        """Say something, and return its number.

        Args:
            message: what is said.
            keep: say it again to the next coordinator if this one does not confirm it.
        """
        with self._lock:
            return self._put(message, waits=False, keep=keep and self._closed is None)

    def ask(self, message: Message) -> Message:
        """Return the answer to a question, whichever coordinator gives it.

        Raises:
            ConnectionLost: there will be none.
        """
        with self._lock:
            number = self._put(message, waits=True, keep=True)
            self._answered.wait_for(lambda: number in self._answers or self._closed is not None)
            self._unconfirmed.pop(number, None)
            if number not in self._answers:
                raise ConnectionLost(self._closed or "")
            answer = self._answers.pop(number)
        if "wrong" in answer:
            raise ExchangeError(answer["wrong"])
        return answer

    def unconfirmed(self) -> list[Message]:
        """Return what was said and not confirmed, in order."""
        with self._lock:
            return [message for message, _ in self._unconfirmed.values()]

    def renew(self) -> None:
        """Leave a connection that seems dead; what was not confirmed is said again over the next one."""
        with self._lock:
            self._hang_up()

    def close(self, why: str = "this process closed its connection to the coordinator.") -> None:
        """End; who waits for an answer gets none."""
        with self._lock:
            if self._closed is None:
                self._closed = why
            self._hang_up()
            self._answered.notify_all()

    def _put(self, message: Message, *, waits: bool, keep: bool) -> int:
        self._numbers += 1
        numbered = {**message, "n": self._numbers}
        if keep:
            self._unconfirmed[self._numbers] = (numbered, waits)
        self._send(numbered)
        return self._numbers

    def _send(self, message: Message) -> None:
        """Send, if there is anybody; the thread that reads notices when there is not."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.sendall(packed(message))

    def _hang_up(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while self._closed is None:
            try:
                self._read()
                self._drop()
                self._connect(PATIENCE_S)
            except ExchangeError as error:
                self._give_up(str(error))
            except Exception as error:  # of a thread: without it nobody would have an answer any more
                _LOG.exception("what the coordinator said could not be taken")
                self._give_up(f"what it said could not be taken: {error!r}.")
        self._drop()

    def _give_up(self, why: str) -> None:
        if self._closed is None:
            self.close(why)
            self._lost(why)

    def _drop(self) -> None:
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None

    def _read(self) -> None:
        """Hear messages until the connection ends."""
        assert self._sock is not None
        incoming = Incoming()
        while self._closed is None:
            try:
                arrived = self._sock.recv(1 << 20)
            except OSError:
                return
            if not arrived:
                return
            for message in incoming.feed(arrived):
                self._take(message)

    def _take(self, message: Message) -> None:
        self._heard(message)
        number = message.get("answer")
        if number is None:
            return
        if "wrong" in message:
            _LOG.error("what this process said was refused: %s", message["wrong"])
        with self._lock:
            for said in [n for n, (_, waits) in self._unconfirmed.items() if n < number and not waits]:
                del self._unconfirmed[said]
            if self._unconfirmed.pop(number, (None, False))[1]:
                self._answers[number] = message
                self._answered.notify_all()

    def _connect(self, patience_s: float) -> None:
        """Connect, introduce this process, and say again what was not confirmed."""
        began_s = told_s = time.monotonic()
        attempt = 0
        while self._closed is None:
            try:
                sock = dialled(self._address, self._secret)
                answer = self._introduced(sock)
            except ConnectionLost as error:
                now_s = time.monotonic()
                if now_s - began_s > patience_s:
                    raise ConnectionLost(f"{error} It was tried for {now_s - began_s:.0f} s; start one.") from error
                if now_s - told_s > _TELL_S:
                    told_s = now_s
                    _LOG.warning("%s Waiting for one since %.0f s.", error, now_s - began_s)
                time.sleep(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)])
                attempt += 1
                continue
            self._heard(answer)
            with self._lock:
                self._sock = sock
                for message, _ in self._unconfirmed.values():
                    self._send(message)
            return

    def _introduced(self, sock: socket.socket) -> Message:
        """Say who this is; return the answer. What else is told meanwhile comes after it."""
        try:
            sock.settimeout(_ANSWER_S)
            sock.sendall(packed(self._greeting()))
            head = _exactly(sock, 4)
            answer = next(Incoming().feed(head + _exactly(sock, int.from_bytes(head))))
            sock.settimeout(None)
        except OSError as error:
            sock.close()
            raise ConnectionLost(f"the coordinator went away ({error.strerror or error}).") from error
        return answer


def _exactly(sock: socket.socket, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        more = sock.recv(count - len(got))
        if not more:
            raise ConnectionResetError("it closed the connection")
        got += more
    return bytes(got)
