"""The process groups that a benchmark compares: all ranks, once on each backend."""

from __future__ import annotations

import torch.distributed as dist

from paceline.errors import LaunchError
from paceline.shm import BACKEND, unavailable

GLOO = "gloo"
SHM = BACKEND


class Groups:
    """All ranks on each backend. A group is made when first asked for, so asking is a collective."""

    def __init__(self) -> None:
        self._made: dict[str, dist.ProcessGroup | None] = {}
        if dist.is_initialized():  # a rank that is alone has none
            self._made[dist.get_backend()] = dist.group.WORLD

    def on(self, backend: str) -> dist.ProcessGroup:
        """Return the group of all ranks on a backend; the default group where that is its backend.

        Raises:
            LaunchError: this machine does not have the backend.
        """
        if backend not in self._made:
            reason = unavailable() if backend == SHM else None
            if reason is not None:
                raise LaunchError(f"no backend '{SHM}' on this machine: {reason}")
            self._made[backend] = dist.new_group(backend=backend)
        group = self._made[backend]
        assert group is not None
        return group
