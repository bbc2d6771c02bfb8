"""Clients connect: by the best way that both ends have, or by the one asked for."""

from __future__ import annotations

import os
import secrets
import socket
import time

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.view import Address
from paceline.exchange.wire.address import is_here
from paceline.exchange.wire.auth import authenticate
from paceline.exchange.wire.frame import Connection
from paceline.exchange.wire.opening import MAX_STREAMS, Opening, Transport
from paceline.exchange.wire.segments import available
from paceline.exchange.wire.shared import SharedConnection
from paceline.exchange.wire.sockets import SocketConnection
from paceline.exchange.wire.striped import StripedConnection


def connect(
    address: Address, secret: bytes, *, transport: str = "auto", streams: int = 1, timeout_s: float = 10
) -> Connection:
    """Connect to who listens at an address (`listen.Listener`).

    Args:
        address: of the listener.
        secret: shared by the processes of the job.
        transport: `auto`, `shared`, `unix` or `tcp`.
        streams: TCP connections that frames are striped over.
        timeout_s: after how long a listener that says nothing is given up.

    Raises:
        ConnectionLost: nobody is there.
        ExchangeError: who is there has another secret, or this way does not lead there.
    """
    way = Transport.parse(transport)
    if not 1 <= streams <= MAX_STREAMS:
        raise ExchangeError(f"{streams} streams; there are 1 to {MAX_STREAMS} for a connection.")
    until = time.monotonic() + timeout_s
    here = bool(address.unix) and is_here(address.machine)
    if way in (Transport.SHARED, Transport.UNIX) and not here:
        raise ExchangeError(
            f"the transport '{way.value}' is for processes of one host and one user, and {_named(address)} is not "
            "one for this process; choose auto or tcp."
        )
    if way is Transport.UNIX or (way in (Transport.AUTO, Transport.SHARED) and here):
        try:
            return _at_unix(address.unix, secret, until, shared=way is not Transport.UNIX and available())
        except ConnectionLost:
            if way is not Transport.AUTO or not address.port:
                raise
    if not address.port:
        raise ExchangeError(f"{_named(address)} does not listen on TCP, and is not on this host.")
    return _at_tcp(address, secret, streams, until)


def _at_unix(path: str, secret: bytes, until: float, *, shared: bool) -> Connection:
    name = f"the process at {path}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _reach_unix(sock, path, until)
        _introduce(sock, secret, Opening(shared), name, until)
        return _shared(sock, name) if shared else SocketConnection(sock, name)
    except BaseException:
        sock.close()
        raise


def _shared(sock: socket.socket, name: str) -> Connection:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with theirs:
            socket.send_fds(sock, [b"\0"], [theirs.fileno()])
    except OSError as error:
        ours.close()
        raise ConnectionLost(f"lost {name}: {error.strerror or error}.") from error
    return SharedConnection(sock, ours, name)


def _reach_unix(sock: socket.socket, path: str, until: float) -> None:
    while True:
        sock.settimeout(_left(until))
        try:
            return sock.connect(path)
        except BlockingIOError:  # many others connect at this moment
            time.sleep(0.002)
            if time.monotonic() > until:
                raise ConnectionLost(f"{path} is overrun: it accepts no connections.") from None
        except OSError as error:
            raise ConnectionLost(f"nobody listens at {path}: {error.strerror or error}.") from error


def _at_tcp(address: Address, secret: bytes, streams: int, until: float) -> Connection:
    name = _named(address)
    connection = secrets.token_bytes(16)
    socks: list[socket.socket] = []
    try:
        for stream in range(streams):
            socks.append(_reach_tcp(address, name, until))
            _introduce(socks[-1], secret, Opening(False, stream, streams, connection), name, until)
    except BaseException:
        for sock in socks:
            sock.close()
        raise
    return SocketConnection(socks[0], name) if streams == 1 else StripedConnection(socks, name)


def _reach_tcp(address: Address, name: str, until: float) -> socket.socket:
    try:
        sock = socket.create_connection((address.host, address.port), timeout=_left(until))
    except OSError as error:
        raise ConnectionLost(f"nobody listens at {name}: {error.strerror or error}.") from error
    if sock.getsockname() == sock.getpeername():  # a free port of this host can be connected to itself
        sock.close()
        raise ConnectionLost(f"nobody listens at {name}: the connection led back to this process.")
    return sock


def _introduce(sock: socket.socket, secret: bytes, opening: Opening, name: str, until: float) -> None:
    try:
        authenticate(sock, secret, server=False, timeout_s=_left(until))
        opening.send(sock)
    except ConnectionLost as error:
        raise ConnectionLost(f"{name}: {error}") from error
    except ExchangeError as error:
        raise ExchangeError(f"{name}: {error}") from error
    except OSError as error:
        raise ConnectionLost(f"lost {name}: {error.strerror or os.strerror(error.errno or 0)}.") from error


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def _named(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{host}:{address.port}" if address.port else address.unix
