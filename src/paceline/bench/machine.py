"""What a benchmark ran on, for whoever reads its numbers later."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console

from paceline.runtime.timing import processor

_FILE_WIDTH = 140  # of tables that nobody's terminal limits
_IDLE_LOAD = 0.5


def machine() -> dict[str, Any]:
    """Return processor, cores that may be used, system, versions, and the load before the run."""
    return {
        "processor": processor(),
        "cores": cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of PyTorch, for the time of the context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def table_console() -> Console:
    """Return where tables go: as wide as the terminal, or wide enough for them in a file."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def warn_of_load(console: Console, machine: dict[str, Any]) -> None:
    """Say so where other work ran when the benchmark began."""
    if machine["load_before"] is not None and machine["load_before"] > _IDLE_LOAD:
        console.print(f"Other work ran on this machine (load {machine['load_before']:.1f}): these are no numbers.")
