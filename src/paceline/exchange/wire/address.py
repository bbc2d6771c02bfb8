"""Which processes share a host, and so can meet at a Unix socket and share memory. Knows no PyTorch."""

from __future__ import annotations

import os
from typing import Final

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


def is_here(other: str) -> bool:
    """Return whether who calls itself `other` can be met at a Unix socket."""
    return bool(other) and other == machine()
