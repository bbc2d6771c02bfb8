"""Processes that a supervisor starts: each with a log of its own, none outlives it."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from paceline.errors import PacelineError
from paceline.train.servers.processes.nursery import Nursery

START_AGAIN: Final = 75
"""Exit code of a process that was well, and whose own processes were killed (EX_TEMPFAIL of sysexits.h)."""
_LIGHT: Final = ("paceline.exchange.membership",)
"""Modules that do without PyTorch, and are to: a coordinator outlives much."""
_MEMBER: Final = re.compile(r"(server|worker)(-\d+)+")
"""Names of members: with the group's number, where there are groups, and their own."""
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_POLL_S: Final = 0.02
_TAIL_LINES: Final = 30


class Child:
    """A process.

    Attributes:
        name: of its log: `worker-3` for member 3 of the job, `worker-start-2` for one that has not joined yet.
        pid: of the process.
        began: when it was started, by the monotonic clock.
    """

    def __init__(self, name: str, pid: int, poll: Callable[[], int | None], log: Path, log_start: int) -> None:
        self.name = name
        self.pid = pid
        self.began = time.monotonic()
        self._poll = poll
        self._log = log
        self._log_start = log_start

    @property
    def code(self) -> int | None:
        """How it ended: its exit code, or a signal's number below 0; None while it runs."""
        return self._poll()

    def send(self, number: int) -> None:
        """Send a signal to it and what it started."""
        if self.code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def joined(self, name: str) -> None:
        """Give the log the name of a member; whoever writes to it goes on with that."""
        path = self._log.with_name(f"{name}.log")
        if path.exists():  # of the run before it was resumed
            path.rename(_free(path))
        if _MEMBER.fullmatch(self.name):  # it was given up and joined anew: the log is of both members
            os.link(self._log, path)
        else:
            self._log.rename(path)
        self.name, self._log = name, path

    def tail(self) -> str:
        """Return the end of its log."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def wait(self) -> None:
        """Return when it has ended."""
        while self.code is None:
            time.sleep(_POLL_S)


class Children:
    """Processes by name. Leaving the context ends all that are left.

    Args:
        logs: folder of their logs.
        nursery: where those are started that need PyTorch; None: each loads it itself.
    """

    def __init__(self, logs: Path, nursery: Nursery | None = None) -> None:
        self._logs = logs
        self._nursery = nursery
        self._children: dict[str, Child] = {}
        logs.mkdir(parents=True, exist_ok=True)
        self._preparation = _dies_with_parent()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL, 0)

    def start(self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Child:
        """Run `python -m module arguments`; a child of this name must not be running."""
        path = self._logs / f"{name}.log"
        with path.open("ab") as log:
            start = log.tell()
            if self._nursery is not None and module not in _LIGHT:
                nursery, pid = self._nursery, self._nursery.start(module, arguments, str(path), environment or {})
                child = self._children[name] = Child(name, pid, lambda: nursery.code(pid), path, start)
                return child
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the terminal is the supervisor's to pass on
                preexec_fn=self._preparation,
            )
        child = self._children[name] = Child(name, process.pid, process.poll, path, start)
        return child

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children.values()))

    def named(self, kind: str) -> list[Child]:
        """Return those of a kind: `worker`, `server`, `coordinator`."""
        return [child for child in self if child.name.partition("-")[0] == kind]

    def joined(self, pid: int, name: str) -> str | None:
        """Note that a process is a member of this name now; return that of its log, None if it was not started here."""
        child = next((child for child in self if child.pid == pid), None)
        if child is None:
            return None
        if child.name.partition("-")[0] == name.partition("-")[0]:  # else a bridge, which is in two jobs
            del self._children[child.name]
            child.joined(name)
            self._children[name] = child
        return child.name

    def forget(self, child: Child) -> None:
        """Look after it no more: it has ended."""
        with suppress(ProcessLookupError, PermissionError):  # what it started itself
            os.killpg(child.pid, signal.SIGKILL)
        del self._children[child.name]

    def end(
        self,
        number: int,
        patience_s: float,
        only: Sequence[Child] | None = None,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send a signal to all, or to some, and SIGKILL to those that are there still after `patience_s`.

        Args:
            number: of the signal.
            patience_s: in seconds.
            only: whom; all by default.
            hurried: whether patience is at its end before that.
        """
        chosen = list(self) if only is None else list(only)
        for child in chosen:
            child.send(number)
        deadline = time.monotonic() + patience_s
        while any(child.code is None for child in chosen) and time.monotonic() < deadline and not hurried():
            time.sleep(_POLL_S)
        for child in chosen:
            child.send(signal.SIGKILL)
            child.wait()
            self.forget(child)


def end_with(work: Callable[[], None]) -> NoReturn:
    """Do the work of a process and end it, with what is wrong in its log and in its exit code.

    Without tearing down: whatever thread waits for somebody who is gone is not waited for.
    """
    code = 0
    try:
        work()
    except PacelineError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        code = error.exit_code
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # a fault of ours keeps its traceback
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _free(path: Path) -> Path:
    """Return a name for what a file was before."""
    number = 1
    while (free := path.with_stem(f"{path.stem}-before-{number}")).exists():
        number += 1
    return free


def _dies_with_parent() -> Callable[[], None] | None:
    """Return what has the kernel end a child when its parent is gone, however it went."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return prepare
