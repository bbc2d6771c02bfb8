"""How much memory this process has used at most."""

from __future__ import annotations

import sys

import torch


def peak_memory(device: torch.device) -> int:
    """Return bytes: the most ever allocated on an accelerator, or this process's largest resident size on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows has no such module
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
