"""Ranks' processes under our own launcher: `python -m paceline.runtime.job.worker package.module:function`.

One process loads what all ranks need and becomes them by forking, so that it is loaded once rather than by every rank.
Where that is not safe a rank begins anew, as a program of its own. A rank dies with the launcher, calls one function
with the arguments the launcher left, and leaves word of how it ended. Knows nothing of what the function does.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from paceline.errors import PacelineError
from paceline.runtime.job.failures import Failure
from paceline.runtime.job.world import JOB_DIRECTORY, LOG_DIRECTORY

LAUNCHER_PID: Final = "PACELINE_LAUNCHER_PID"
WORD: Final = "PACELINE_WORD"
"""Names the file descriptor where the launcher is told of ranks: lines `started RANK PID`, `ended RANK CODE TIME`."""

ARGUMENTS_FILE: Final = "arguments.json"
DUMP_STACKS: Final = signal.SIGUSR1

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_NVML: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"  # asked whether there are GPUs, PyTorch then opens none


def command(entry: str) -> list[str]:
    """Return what the launcher starts."""
    # -P: the directory we are in must not hide modules of ours; the worker gets the launcher's own sys.path.
    return [sys.executable, "-P", "-m", "paceline.runtime.job.worker", entry]


def main(entry: str) -> None:
    """Become the ranks of a job; in a process that the environment calls a rank, be it."""
    _die_with(int(os.environ[LAUNCHER_PID]))
    # Who wants to end in good order says so with a handler of its own; otherwise a signal ends a rank at once, also
    # where it waits for others deep inside a collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "RANK" not in os.environ and not _become_ranks(entry):
        return
    _be_rank(entry)


def log_path(directory: Path, rank: int) -> Path:
    """Return where the log of `rank` is."""
    return directory / f"rank-{rank}.log"


def _become_ranks(entry: str) -> bool:
    """Start every rank and see them to their ends; return whether this process has become one of them."""
    can_go_on = _load(entry)
    word = int(os.environ.pop(WORD))
    ranks: dict[int, int] = {}
    os.environ[LAUNCHER_PID] = str(os.getpid())
    gc.freeze()  # ranks share what is there
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if not pid:
            _grow_up(rank)
            _say(word, f"started {rank} {os.getpid()}")  # by itself: signals go to its session, which is there by now
            os.close(word)
            if not can_go_on:
                os.execv(sys.executable, command(entry))
            return True
        ranks[pid] = rank
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever tells all processes to end lets ranks do it in good order
    while ranks:
        pid, status = os.wait()
        _say(word, f"ended {ranks.pop(pid)} {os.waitstatus_to_exitcode(status)} {time.time()}")
    return False


def _load(entry: str) -> bool:
    """Load what ranks need; return whether a fork of this process is as good as a new one."""
    if sys.platform != "linux":
        return False  # macOS: what is loaded may have begun what a fork breaks
    given = _given()
    sys.path[:] = given["path"]
    told = os.environ.get(_NVML)
    os.environ[_NVML] = "1"
    try:
        for module in [*given["loaded"], entry.partition(":")[0]]:
            importlib.import_module(module)
    except Exception:  # a rank finds out for itself, and tells
        return False
    finally:
        del os.environ[_NVML]
        if told is not None:
            os.environ[_NVML] = told
    return len(os.listdir("/proc/self/task")) == 1 and not _has_opened_gpu()


def _has_opened_gpu() -> bool:
    def leads_to(descriptor: str) -> str:
        with contextlib.suppress(OSError):  # closed meanwhile
            return os.readlink(f"/proc/self/fd/{descriptor}")
        return ""

    return any(leads_to(one).startswith(("/dev/nvidia", "/dev/kfd")) for one in os.listdir("/proc/self/fd"))


def _grow_up(rank: int) -> None:
    """Become what a rank's process is: a session and a log of its own; only the first has the terminal."""
    os.setsid()  # Ctrl-C at the terminal is the launcher's to pass on, and what a rank starts is to end with it
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    _die_with(int(os.environ[LAUNCHER_PID]))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as ranks that each loaded it would have it
    if rank:
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(log_path(Path(os.environ[LOG_DIRECTORY]), rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream, file in enumerate((nothing, log, log)):
            os.dup2(file, stream)
        os.close(nothing)
        os.close(log)


def _be_rank(entry: str) -> None:
    """Run `entry` as the rank the environment names; an error ends the process here."""
    rank, job = int(os.environ["RANK"]), Path(os.environ[JOB_DIRECTORY])
    log = log_path(Path(os.environ[LOG_DIRECTORY]), rank).open("a", encoding="utf-8", buffering=1)
    faulthandler.enable(log)
    faulthandler.register(DUMP_STACKS, log, all_threads=True)
    try:
        given = _given()
        sys.path[:] = given["path"]
        _find(entry)(given["arguments"])
    except SystemExit:
        raise
    except BaseException as error:  # whatever it is, the launcher is to know
        failure = Failure.of(rank, error)
        failure.write(job)
        log.write(f"{failure.kind}: {failure.message}\n" if isinstance(error, PacelineError) else failure.trace)
        _leave(failure.exit_code)


def _given() -> Any:
    return json.loads((Path(os.environ[JOB_DIRECTORY]) / ARGUMENTS_FILE).read_text(encoding="utf-8"))


def _find(entry: str) -> Callable[[Any], object]:
    module, _, name = entry.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[[Any], object] = found
    return function


def _say(word: int, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher is gone, and so are we soon
        os.write(word, f"{line}\n".encode())


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
