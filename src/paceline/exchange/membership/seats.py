"""Members, as the coordinator knows them: who they are, and what process they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Self

from paceline.exchange.view import Address


class Role(Enum):
    """What a member does."""

    SERVER = "server"
    WORKER = "worker"


@dataclass(frozen=True)
class Process:
    """A process, among all that ever were.

    Attributes:
        where: processes with the same one see each other's numbers; empty where the system does not say.
        pid: its number there.
        started: when, in the kernel's ticks since boot: numbers are used again.
    """

    where: str = ""
    pid: int = 0
    started: int = 0

    @classmethod
    def own(cls) -> Self:
        """Return this process."""
        pid = os.getpid()
        found = _stat(pid)
        return cls(_where(), pid, found[1] if found else 0)

    @property
    def visible(self) -> bool:
        """Whether this process can tell if that one lives."""
        return bool(self.where) and self.where == _where()

    @property
    def lives(self) -> bool:
        """Whether it still runs, or is stopped, rather than ended. Only of a visible one."""
        found = _stat(self.pid)
        return found is not None and found[0] not in "ZX" and found[1] == self.started


def _where() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{boot.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """State and time of start; the second field of the file, a name in brackets, may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


@dataclass(frozen=True)
class Seat:
    """A member.

    Attributes:
        id: given once.
        role: server or worker.
        nonce: by which it is known when it comes back.
        process: what it is.
        address: where it listens; of servers.
        leaving: it wants to go.
    """

    id: int
    role: Role
    nonce: str
    process: Process = Process()
    address: Address = field(default_factory=Address)
    leaving: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "role": self.role.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        made = {
            "role": Role(values["role"]),
            "process": Process(**values["process"]),
            "address": Address(**values["address"]),
        }
        return cls(**{**values, **made})
