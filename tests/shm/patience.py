"""Groups that wait for other ranks only so long, though they were made by ranks that waited for each other."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def limit_patience(group: dist.ProcessGroup, seconds: float) -> None:
    """Let calls of `group` fail after so long from now on.

    A group that is made with little patience fails where the others are late to make it.
    """
    group.set_timeout(timedelta(seconds=seconds))
