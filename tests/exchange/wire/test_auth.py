"""Who may talk: both ends prove that they know the secret, and strangers cannot hold anybody."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from paceline.errors import ConnectionLost, ExchangeError, PacelineError
from paceline.exchange.wire.address import is_here, machine
from paceline.exchange.wire.auth import GREETING, authenticate

SECRET = b"a secret of 64 characters"


def both(server: bytes, client: bytes) -> tuple[PacelineError | None, PacelineError | None]:
    """Return what went wrong at either end."""
    ends = socket.socketpair()
    failed: list[PacelineError | None] = [None, None]

    def meet(index: int, secret: bytes) -> None:
        try:
            authenticate(ends[index], secret, server=index == 0, timeout_s=5)
        except PacelineError as error:
            failed[index] = error
            ends[index].close()

    thread = threading.Thread(target=meet, args=(0, server))
    thread.start()
    meet(1, client)
    thread.join()
    for end in ends:
        end.close()
    return failed[0], failed[1]


def server_hears(talk: Callable[[socket.socket], object], timeout_s: float = 5) -> PacelineError:
    """Return what a server says of a stranger."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        talk(theirs)
        with pytest.raises(PacelineError) as caught:
            authenticate(ours, SECRET, server=True, timeout_s=timeout_s)
    return caught.value


def test_who_knows_the_secret_is_let_in() -> None:
    assert both(SECRET, SECRET) == (None, None)


@pytest.mark.parametrize("client", [b"", b"another", SECRET + b"x", SECRET[:-1]])
def test_another_secret_is_refused_with_advice(client: bytes) -> None:
    server, told = both(SECRET, client)
    assert server is not None
    assert type(told) is ExchangeError
    assert "PACELINE_SECRET" in str(told)
    assert SECRET.decode() not in str(told)


def test_an_empty_secret_is_none() -> None:
    assert all(type(error) is ExchangeError for error in both(b"", b""))


def test_a_client_that_goes_on_without_knowing_is_refused() -> None:
    error = server_hears(lambda sock: sock.sendall(GREETING + bytes(32) + bytes(32)))
    assert type(error) is ExchangeError


def test_what_a_server_proved_is_no_proof_of_a_client() -> None:
    """The server's own answer to the same nonces comes back to it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(GREETING + bytes(32))

        def reflect() -> None:
            answer = theirs.recv(len(GREETING) + 64, socket.MSG_WAITALL)
            theirs.sendall(answer[-32:])

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(ExchangeError, match="secret"):
            authenticate(ours, SECRET, server=True)
        thread.join()


def test_another_language_is_named() -> None:
    assert "GET / HTTP" in str(server_hears(lambda sock: sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")))


def test_a_silent_stranger_is_left() -> None:
    assert type(server_hears(lambda sock: None, timeout_s=0.05)) is ConnectionLost


def test_a_stranger_that_drips_is_left() -> None:
    stop = threading.Event()

    def drip(sock: socket.socket) -> None:
        def talk() -> None:
            for byte in GREETING:
                if stop.wait(0.03):
                    return
                with contextlib.suppress(OSError):
                    sock.send(bytes([byte]))

        threading.Thread(target=talk).start()

    began = time.monotonic()
    error = server_hears(drip, timeout_s=0.1)
    stop.set()
    assert isinstance(error, ConnectionLost)
    assert time.monotonic() - began < 5


def test_the_timeout_of_the_socket_stays() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(None)
        thread = threading.Thread(target=lambda: authenticate(theirs, SECRET, server=False))
        thread.start()
        authenticate(ours, SECRET, server=True)
        thread.join()
        assert ours.gettimeout() is None


def test_a_machine_is_itself() -> None:
    assert machine() == machine()
    assert is_here(machine())
    assert not is_here("")
    assert not is_here(machine() + "x")


def test_membership_needs_no_torch() -> None:
    code = (
        "import sys, paceline.exchange.wire.auth, paceline.exchange.wire.address\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
