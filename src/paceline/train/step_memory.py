"""The memory of tensors in a step, as a process on a CPU or a CUDA device shows it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from paceline.runtime.interface import ParallelModule
from paceline.runtime.process_memory import can_take_memory, forget_peak, give_back, memory_bytes, peak_bytes

_WEIGHED = 3
"""So many steps are looked at for their memory."""


class StepMemory:
    """The most bytes that tensors take in a step: those before the first, and by how much the process has grown since.

    Args:
        module: that is trained.
        optimizer: of its parameters.
    """

    def __init__(self, module: ParallelModule, optimizer: Optimizer) -> None:
        self._device = module.peers.devices[0]
        self._tells = self._device.type == "cpu" and can_take_memory()
        self._beside = 0
        if self._tells:
            give_back()
            self._beside = memory_bytes() - _held(module, optimizer)
        self._peers = module.peers
        self._looking = False
        self._peaks: list[int] = []

    def after_step(self) -> None:
        """Look at the step that is over, if the look before was right before it; then get ready for the next."""
        if not self._tells or len(self._peaks) >= _WEIGHED:
            return
        if self._looking:
            self._peaks.append(peak_bytes())
        give_back()  # what the C library keeps for later would hide what the next step needs
        forget_peak()
        self._looking = True

    def begin_anew(self) -> None:
        """Something else than a step was done."""
        self._looking = False

    def most(self) -> int | None:
        """Return the most bytes of tensors over all ranks; None where nobody could look. A collective."""
        if self._device.type == "cuda":
            own = int(torch.cuda.max_memory_allocated(self._device))
        else:
            own = max(self._peaks) - self._beside if self._peaks else 0
        most = torch.tensor([own], device=self._device)
        if not self._peers.alone:
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most) or None


def _held(module: ParallelModule, optimizer: Optimizer) -> int:
    """Return the bytes of the tensors that are there between steps."""
    state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
    tensors = [*module.parameters(), *module.buffers(), *state]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
