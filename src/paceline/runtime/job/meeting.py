"""Where the ranks that we start find each other: a port that we listen on, or a file.

The launcher keeps the store, so that ranks do not race for a port and the end of rank 0 does not take it away.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.errors import LaunchError
from paceline.runtime.job.world import STORE_FILE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_HOST = "127.0.0.1"


class Meeting(Protocol):
    """A place to meet."""

    @property
    def variables(self) -> dict[str, str]:
        """What tells ranks where it is."""

    def serve(self) -> None:
        """Answer those who come; until then they wait."""

    def close(self) -> None:
        """Be gone."""


class MeetingAtFile:
    """A file, made by who comes first."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)  # of a job before, whose ranks would be taken for ours
        self._path = path.resolve()

    @property
    def variables(self) -> dict[str, str]:
        """Where the file is."""
        return {STORE_FILE: str(self._path)}

    def serve(self) -> None:
        """Do nothing: the file system answers."""

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class MeetingAtPort:
    """A port on this host, reachable from this host only.

    Args:
        port: which one, or None for any that is free.

    Raises:
        LaunchError: the port is in use or not ours to take.
    """

    def __init__(self, port: int | None) -> None:
        self._store: TCPStore | None = None
        try:
            # Listening from now on: ranks may knock while PyTorch is still being loaded here.
            self._socket = socket.create_server((_HOST, port or 0), backlog=4096)
        except (OSError, OverflowError) as error:
            reason = (
                "is in use, perhaps by another job"
                if isinstance(error, OSError) and error.errno == errno.EADDRINUSE
                else f"cannot be listened on ({error})"
            )
            raise LaunchError(
                f"port {port} on {_HOST} {reason}. Choose another MASTER_PORT, or unset it, and a free port is taken."
            ) from error
        self._port = int(self._socket.getsockname()[1])

    @property
    def variables(self) -> dict[str, str]:
        """Host and port, under the names that everybody knows."""
        return {"MASTER_ADDR": _HOST, "MASTER_PORT": str(self._port)}

    def serve(self) -> None:
        """Let a store take over the port."""
        from torch._C._distributed_c10d import TCPStore  # takes a second, in which the ranks have started already

        self._store = TCPStore(
            _HOST,
            self._port,
            None,
            True,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
            use_libuv=True,
        )

    def close(self) -> None:
        """Let go of the port."""
        self._socket.close()
        self._store = None


def meeting(path: Path | None, port: int | None, environment: Mapping[str, str]) -> Meeting:
    """Return the file at `path` if given, else `port`, else MASTER_PORT of `environment`, else a free port.

    Raises:
        LaunchError: the port is in use, or MASTER_PORT is no number.
    """
    if path is not None:
        return MeetingAtFile(path)
    given = environment.get("MASTER_PORT")
    if port is None and given is not None:
        if not given.isdecimal():
            raise LaunchError(f"MASTER_PORT is '{given}'; a port is a number from 1 to 65535, or leave it unset.")
        port = int(given)
    return MeetingAtPort(port)
