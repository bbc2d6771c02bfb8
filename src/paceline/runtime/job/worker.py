"""A rank's process under our own launcher: `python -m paceline.runtime.job.worker package.module:function`.

Dies with the launcher, calls one function with the arguments the launcher left, and leaves word of how it ended. Knows
nothing of what the function does.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.runtime.job.failures import Failure
from paceline.runtime.job.world import JOB_DIRECTORY, LOG_DIRECTORY

LAUNCHER_PID = "PACELINE_LAUNCHER_PID"
ARGUMENTS_FILE = "arguments.json"
DUMP_STACKS = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(entry: str) -> None:
    """Run `entry` as the rank the environment names; an error ends the process here."""
    _die_with(int(os.environ[LAUNCHER_PID]))
    # Who wants to end in good order says so with a handler of its own; otherwise a signal ends a rank at once, also
    # where it waits for others deep inside a collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    rank, job = int(os.environ["RANK"]), Path(os.environ[JOB_DIRECTORY])
    log = log_path(Path(os.environ[LOG_DIRECTORY]), rank).open("a", encoding="utf-8", buffering=1)
    faulthandler.enable(log)
    faulthandler.register(DUMP_STACKS, log, all_threads=True)
    try:
        given = json.loads((job / ARGUMENTS_FILE).read_text(encoding="utf-8"))
        sys.path[:] = given["path"]
        _find(entry)(given["arguments"])
    except SystemExit:
        raise
    except BaseException as error:  # whatever it is, the launcher is to know
        failure = Failure.of(rank, error)
        failure.write(job)
        log.write(f"{failure.kind}: {failure.message}\n" if isinstance(error, PacelineError) else failure.trace)
        _leave(failure.exit_code)


def log_path(directory: Path, rank: int) -> Path:
    """Return where the log of `rank` is."""
    return directory / f"rank-{rank}.log"


def _find(entry: str) -> Callable[[Any], object]:
    module, _, name = entry.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[[Any], object] = found
    return function


def _die_with(launcher: int) -> None:
    """Have the kernel end this process when the launcher is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it was gone before we asked
        os._exit(1)


def _leave(code: int) -> None:
    """End without tearing down: destructors of process groups wait for collectives that will never finish."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal is gone, and with it whoever would read
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
