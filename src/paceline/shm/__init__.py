"""Ranks on one host exchange through shared memory: a backend for `torch.distributed` on CPUs.

    import paceline.shm
    torch.distributed.init_process_group("shm")

Everything that runs on Gloo runs on it unchanged. Where a group spans hosts, shared memory serves within each of them
and Gloo between them. This room knows nothing of the rest of Paceline.
"""

import torch.distributed as dist

from paceline.shm.backend import BACKEND, create, describe, unavailable
from paceline.shm.exchange import Exchange, Started

__all__ = ["BACKEND", "Exchange", "Started", "describe", "unavailable"]

if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
