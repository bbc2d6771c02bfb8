"""Processes of tests, forked in milliseconds from one that has loaded PyTorch, as ranks of `tests.ranks` are.

A process of its own that loads PyTorch takes seconds of a core for that alone. What a test is to show of a real process
(that it can be killed or stopped, that others find it, how it ends) is the same in a forked one. What loads when, and
what a terminal sees, is not: that takes `subprocess`.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import psutil

from tests.ranks import PRELOAD

_PR_SET_PDEATHSIG = 1

Output: TypeAlias = Path | int
"""A file that is appended to, or a descriptor."""


class Forked:
    """A process that runs `main()` of a module, as `python -m MODULE ARGUMENTS` would.

    It leads a session of its own and ends with pytest. Its variables are those of pytest, and `environment`.
    """

    def __init__(
        self, module: str, *arguments: object, output: Output, errors: Output | None = None, **environment: str
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._lock = threading.Lock()
        streams = [_sent(output), _sent(output if errors is None else errors)]
        self._process = context.Process(
            target=_live, args=(module, [*map(str, arguments)], streams, {**os.environ, **environment})
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, a signal's number below 0; None while it runs."""
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return as `poll` does, once it has ended or that time is over."""
        with self._lock:
            self._process.join(timeout_s)
            return self._process.exitcode

    def send(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop it, as a debugger would, and return once it is."""
        self.send(signal.SIGSTOP)
        while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def kill(self) -> None:
        """End it at once, if it is still there, and wait for that."""
        self.send(signal.SIGKILL)
        self.wait()


def _sent(output: Output) -> str | Connection:
    return str(output) if isinstance(output, Path) else Connection(os.dup(output), readable=False)


def _live(module: str, arguments: list[str], streams: Sequence[str | Connection], environment: dict[str, str]) -> None:
    code: object = 1
    try:
        _be_alone(streams, environment)
        sys.argv = [module, *arguments]
        code = importlib.import_module(module).main() or 0
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _be_alone(streams: Sequence[str | Connection], environment: dict[str, str]) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in enumerate(streams, start=1):
        if isinstance(stream, str):
            stream = Connection(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), readable=False)
        os.dup2(stream.fileno(), number)
        stream.close()
    # pytest's capture went into the server; who forks from here redirects these two numbers, and no others
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
