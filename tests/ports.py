"""Ports for those who must be told one before anybody listens there."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a port of this host that nobody has, and that nobody is given who asks for just any."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return several such ports."""
    ports, free = list(range(10_000, 30_000)), []
    random.SystemRandom().shuffle(ports)
    while len(free) < count:
        with suppress(OSError), socket.create_server(("127.0.0.1", ports.pop())) as server:
            free.append(server.getsockname()[1])
    return free
