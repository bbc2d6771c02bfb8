"""Where processes meet: who shares a host, and so Unix sockets and memory; interfaces of TCP. Knows no PyTorch."""

from __future__ import annotations

import os
import socket
from typing import Final

from paceline.errors import ExchangeError

_BOOT: Final = "/proc/sys/kernel/random/boot_id"
# A path means the same socket to processes that see the same files; descriptors pass between those of one user.
_NAMESPACES: Final = ("mnt", "user")

UNIX_PATH_BYTES: Final = 107
"""Longest path of a Unix socket on Linux (`sun_path`, without its end)."""


def machine() -> str:
    """Return what processes have in common if, and only if, they can meet at a Unix socket.

    Empty where the system does not say: such a process shares a host with nobody, and uses TCP.
    """
    try:
        with open(_BOOT, encoding="ascii") as boot:
            parts = [boot.read().strip()]
        parts += [f"{name}:{os.stat(f'/proc/self/ns/{name}').st_ino}" for name in _NAMESPACES]
    except OSError:
        return ""
    return " ".join((*parts, f"uid:{os.geteuid()}"))


def bound(bind: str, port: int) -> socket.socket:
    """Return a socket that has a port of an interface of this host, and does not listen yet.

    Args:
        bind: address or name of the interface; `0.0.0.0` or `::` for all.
        port: 0 for one that is free.

    Raises:
        ExchangeError: there is no such interface, or its port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise ExchangeError(
            f"cannot listen on {bind} port {port}: {error.strerror or error}. `bind` is the address of an interface of "
            "this host, such as 127.0.0.1, or 0.0.0.0 for all."
        ) from error
    return sock


def reachable(bind: str) -> str:
    """Return by what name others reach an interface; that of this host for all of its interfaces."""
    return socket.gethostname() if bind in ("0.0.0.0", "::") else bind


def is_here(other: str) -> bool:
    """Return whether who calls itself `other` can be met at a Unix socket."""
    return bool(other) and other == machine()
