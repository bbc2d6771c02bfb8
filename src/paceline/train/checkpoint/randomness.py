"""The states of the random number generators as tensors: PyTorch on CPU and GPU, `random`, NumPy's global one."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from paceline.placement.boxes import Patch
from paceline.train.checkpoint.pieces import Held, ShardedModule

_PYTHON_VERSION = 3  # of the tuple of random.getstate()


def random_key(rank: int, generator: str) -> str:
    """Return the name in a checkpoint of the state of a generator of a rank."""
    return f"random/{rank}/{generator}"


def random_pieces(module: ShardedModule) -> list[Held]:
    """Return the states of this process's generators, once for each of its ranks."""
    common = _states()
    devices = _devices(module)
    pieces = []
    for rank in module.ranks:
        states = dict(common)
        if rank in devices:
            states["cuda"] = torch.cuda.get_rng_state(devices[rank])
        for generator, state in states.items():
            shape = tuple(state.shape)
            pieces.append(Held(random_key(rank, generator), rank, state, (Patch.all_of(shape),), shape, owner=True))
    return pieces


def restore_states(states: dict[str, Tensor], module: ShardedModule) -> None:
    """Set the generators of this process to `states` (by generator); a generator without a state keeps its own."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        for device in set(_devices(module).values()):
            torch.cuda.set_rng_state(states["cuda"], device)
    has_gauss, gauss = states["python.gauss"].tolist()
    random.setstate((_PYTHON_VERSION, tuple(states["python"].tolist()), gauss if has_gauss else None))
    if "numpy" in states:
        position, has_gauss, gauss = states["numpy.gauss"].tolist()
        key = states["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, int(position), int(has_gauss), gauss))


def _states() -> dict[str, Tensor]:
    _, numbers, gauss = random.getstate()
    states = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python.gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
    }
    state = np.random.get_state()
    if isinstance(state, tuple) and state[0] == "MT19937":
        states["numpy"] = torch.from_numpy(state[1].astype(np.int64))
        states["numpy.gauss"] = torch.tensor([*state[2:5]], dtype=torch.float64)
    return states


def _devices(module: ShardedModule) -> dict[int, torch.device]:
    """Return the GPU of each rank of this process that has one."""
    return {shard.rank: shard.tensor.device for shard in module.shards() if shard.tensor.is_cuda}
