"""How much memory a process takes, with what ranks share counted once.

A page that two ranks map is in the resident memory of both. The kernel also tells a process's proportional share, in
which each of n processes has 1/n of such a page, but of the present only. So a peak is the peak of resident memory,
with the shared memory in it (never files or private pages) taken at its proportional share. Shared memory that was
given back since the peak counts in full.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

_SHARES = Path("/proc/self/smaps_rollup")
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def can_take_memory() -> bool:
    """Whether this system tells, and forgets on demand, the most memory that a process has had."""
    return sys.platform == "linux" and os.access(_CLEAR, os.W_OK) and _SHARES.exists() and "Pss_Shmem" in _read(_SHARES)


def memory_bytes() -> int:
    """Return the memory of this process, in bytes."""
    status = _read(_STATUS)
    return status["VmRSS"] - _others_part(status)


def private_bytes() -> int:
    """Return the memory of this process that no other may look at, in bytes."""
    status = _read(_STATUS)
    return status["VmRSS"] - status["RssShmem"]


def peak_bytes() -> int:
    """Return the most memory that this process had since `forget_peak`, in bytes."""
    status = _read(_STATUS)
    return status["VmHWM"] - _others_part(status)


def forget_peak() -> None:
    """Let the peak begin anew."""
    _CLEAR.write_text("5", encoding="ascii")  # proc(5): resets VmHWM


def give_back() -> None:
    """Return freed memory to the system, where the C library can."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _others_part(status: dict[str, int]) -> int:
    """Return how many bytes of shared memory in this process count as others'."""
    return status["RssShmem"] - _read(_SHARES)["Pss_Shmem"]


def _read(file: Path) -> dict[str, int]:
    """Return the fields of a file of the kernel that are given in kB, in bytes."""
    fields = {}
    for line in file.read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words[-1:] == ["kB"]:
            fields[name] = int(words[0]) * 1024
    return fields
