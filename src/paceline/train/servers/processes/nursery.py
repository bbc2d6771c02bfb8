"""Where processes are born grown up: forked in milliseconds from one that has loaded PyTorch, and done nothing with it.

To load PyTorch takes a process some seconds, in which a worker that died is not replaced. The nursery is forked from a
program that has only just begun; its children are those of a supervisor in all but the kernel's eyes, and end with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn, Self

import torch

from paceline.errors import RankFailed

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_MODULES: Final = ("paceline.exchange.server.__main__", "paceline.train.servers.worker.process")


class Nursery:
    """The way to it."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._sock = sock
        self._lines = sock.makefile("r", encoding="utf-8")
        self._codes: dict[int, int] = {}
        self._gone = False

    @classmethod
    def fork(cls) -> Self | None:
        """Make one; None where the system has no such thing.

        To be called before the program has a thread or has computed anything: neither goes into a child whole.
        """
        if sys.platform != "linux":
            return None
        for module in _MODULES:
            importlib.import_module(module)
        gc.freeze()  # children share what is there
        here, there = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            there.close()
            return cls(pid, here)
        here.close()
        os.setsid()
        _die_with(parent)
        _tend(there)

    def start(self, module: str, arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> int:
        """Start `main()` of a module in a process of its own; return its number. It takes signals from now on.

        Raises:
            RankFailed: the nursery was killed.
        """
        asked = {"module": module, "arguments": list(arguments), "log": log, "environment": dict(environment)}
        answer = self._ask({"start": asked})
        if answer is None:
            raise RankFailed(
                f"process {self.pid}, which all servers and workers here are started by and end with, was killed; "
                "perhaps the host ran out of memory (see dmesg). The run goes on with --resume."
            )
        return int(answer["pid"])

    def code(self, pid: int) -> int | None:
        """Return how a child ended, as `subprocess.Popen.poll` does."""
        if pid not in self._codes:
            answer = self._ask({"ended": True})
            if answer is None:  # with the nursery its children ended
                return -signal.SIGKILL
            self._codes |= {int(ended): code for ended, code in answer["ended"]}
        return self._codes.get(pid)

    def close(self) -> None:
        """End it, and what is left of its children."""
        self._lines.close()
        self._sock.close()
        os.waitpid(self.pid, 0)

    def _ask(self, question: Mapping[str, Any]) -> Any:
        """Return the answer; None if the nursery is gone."""
        line = ""
        if not self._gone:
            with suppress(OSError):
                self._sock.sendall(json.dumps(question).encode() + b"\n")
                line = self._lines.readline()
        self._gone = not line.endswith("\n")
        return None if self._gone else json.loads(line)


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)


def _tend(sock: socket.socket) -> NoReturn:
    """Be the nursery, until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sock.makefile("r", encoding="utf-8")
    for line in lines:
        asked = json.loads(line)
        answer = {"pid": _born(sock, **asked["start"])} if "start" in asked else {"ended": _ended()}
        sock.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _ended() -> list[tuple[int, int]]:
    """Return children that have ended, and how."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def _born(sock: socket.socket, module: str, arguments: list[str], log: str, environment: dict[str, str]) -> int:
    parent = os.getpid()
    ready, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told)
        os.read(ready, 1)  # its end: whoever has its number may send it signals
        os.close(ready)
        return pid
    code = 1
    try:
        os.close(ready)
        _die_with(parent)
        os.setsid()
        sock.close()
        for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            signal.signal(number, action)
        os.close(told)
        _redirect(log)
        os.environ.update(environment)
        code = _run(module, arguments)
    except BaseException:  # the log could not be opened: no other place is left for this
        traceback.print_exc()
    finally:
        os._exit(code)


def _redirect(log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(out, stream)


def _run(module: str, arguments: list[str]) -> int:
    """Run a module as `python -m` would; return its exit code."""
    # The variable is read when PyTorch is loaded, which was before.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sys.argv = [module, *arguments]
    code = 1
    try:
        found = importlib.import_module(module)
        if hasattr(found, "__path__"):
            found = importlib.import_module(f"{module}.__main__")
        code = int(found.main() or 0)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # its log is to have it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
