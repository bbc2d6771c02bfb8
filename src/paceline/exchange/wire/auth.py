"""Both ends of a connection prove that they know the job's secret, without showing it. Knows no PyTorch.

    client   greeting, nonce c
    server   greeting, nonce s, HMAC(secret, "server", c, s)
    client   HMAC(secret, "client", c, s)
    server   "welcome"

Challenge and response with HMAC-SHA256 (RFC 2104) over fresh nonces: what was overheard is of no use again, and a proof
of one side is none of the other. It guards against strangers; what follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from typing import Final

from paceline.errors import ConnectionLost, ExchangeError

GREETING: Final = b"paceline exchange 1\n"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = hashlib.sha256().digest_size
_WELCOME: Final = b"welcome\n"

TIMEOUT_S: Final = 5.0
"""Within what both ends must have proved themselves."""


def authenticate(sock: socket.socket, secret: bytes, *, server: bool, timeout_s: float = TIMEOUT_S) -> None:
    """Prove to the peer, and have it prove, that both know the secret; the socket's own timeout stays as it was.

    Args:
        sock: connected, of any family; nothing has been sent or received on it.
        secret: shared by the processes of a job.
        server: whether this end listened.
        timeout_s: after how long the peer counts as silent, however slowly it talks.

    Raises:
        ConnectionLost: the peer is gone, or says nothing.
        ExchangeError: the peer is something else, or its secret is another.
    """
    if not secret:
        raise ExchangeError("the job's secret is empty, so anybody knows it; set PACELINE_SECRET to some text.")
    before = sock.gettimeout()
    talk = _Talk(sock, time.monotonic() + timeout_s)
    try:
        if server:
            _welcome(talk, secret)
        else:
            _introduce(talk, secret)
    except TimeoutError:
        raise ConnectionLost(
            f"the peer did not introduce itself within {timeout_s:g} s: it hangs, or is no process of a job."
        ) from None
    except OSError as error:
        raise ConnectionLost(f"the peer went away before it was known ({error.strerror or error}).") from error
    sock.settimeout(before)


def _welcome(talk: _Talk, secret: bytes) -> None:
    client = talk.greeted()
    server = secrets.token_bytes(_NONCE_BYTES)
    talk.say(GREETING + server + _proof(secret, b"server", client, server))
    if not hmac.compare_digest(talk.hear(_PROOF_BYTES), _proof(secret, b"client", client, server)):
        raise ExchangeError("a peer does not know the job's secret.")
    talk.say(_WELCOME)


def _introduce(talk: _Talk, secret: bytes) -> None:
    client = secrets.token_bytes(_NONCE_BYTES)
    talk.say(GREETING + client)
    server = talk.greeted()
    if not hmac.compare_digest(talk.hear(_PROOF_BYTES), _proof(secret, b"server", client, server)):
        raise ExchangeError(
            "who listens there has another secret than this process: it is of another job, or PACELINE_SECRET (or the "
            "file `secret` in the run's directory) is not the same for both."
        )
    talk.say(_proof(secret, b"client", client, server))
    if talk.hear(len(_WELCOME)) != _WELCOME:
        raise ExchangeError("who listens there did not welcome this process; is its version of Paceline another?")


def _proof(secret: bytes, who: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(secret, who + client + server, "sha256")


class _Talk:
    """Says and hears a few bytes until a time that is fixed at the start."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock, self._until = sock, until

    def greeted(self) -> bytes:
        """Hear a greeting; return its nonce."""
        greeting = self.hear(len(GREETING))
        if greeting != GREETING:
            raise ExchangeError(
                f"the peer speaks another language: it began with {greeting[:16]!r}. Is the address that of a server "
                "of this version of Paceline?"
            )
        return self.hear(_NONCE_BYTES)

    def say(self, what: bytes) -> None:
        self._sock.settimeout(self._left())
        self._sock.sendall(what)

    def hear(self, count: int) -> bytes:
        heard = b""
        while len(heard) < count:
            self._sock.settimeout(self._left())
            more = self._sock.recv(count - len(heard))
            if not more:
                raise ConnectionLost("the peer closed the connection before it was known.")
            heard += more
        return heard

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left
