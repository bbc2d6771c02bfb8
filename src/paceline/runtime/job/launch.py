"""Starts the ranks of a job on this host and sees all of them to their end.

One process per rank, each in a session of its own, and a store kept here where they meet: no port is raced for, and no
rank's death takes the store away. Whatever ends the job (a rank's error, a signal to us, even our own death by SIGKILL)
ends every process of it. Knows nothing of what ranks compute.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import LaunchError, PacelineError, RankFailed
from paceline.runtime.job.failures import Failure, first_cause, read_failures
from paceline.runtime.job.meeting import meeting
from paceline.runtime.job.roles import role_of
from paceline.runtime.job.signals import NotedSignals
from paceline.runtime.job.worker import ARGUMENTS_FILE, DUMP_STACKS, LAUNCHER_PID, log_path
from paceline.runtime.job.world import JOB_DIRECTORY, LOG_DIRECTORY

Json: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None

_POLL_S = 0.02
_GRACE_S = 2.0  # from SIGTERM to SIGKILL
_CAUSE_S = 2.0  # how long a broken connection is given to turn out another rank's fault
_DUMP_S = 0.5  # what a rank is given to write its stacks
_TAIL_LINES = 40


def launch(
    entry: str,
    arguments: Json,
    ranks: int,
    *,
    log_dir: Path | None = None,
    environment: Mapping[str, str] | None = None,
    rendezvous: Path | None = None,
    port: int | None = None,
    timeout_s: float | None = None,
    stop_s: float = 60,
) -> None:
    """Run `entry(arguments)` in `ranks` processes on this host, and return when all have ended well.

    Rank 0 has this process's terminal. What the others print, and every rank's traceback, is in `log_dir/rank-<r>.log`.
    SIGINT (Ctrl-C) and SIGTERM are passed on to the ranks, which may finish what they are at; a second one ends them.

    Args:
        entry: `package.module:function`, importable by what is on `sys.path` here.
        arguments: what the function is given: anything JSON can hold.
        ranks: number of processes.
        log_dir: where logs go; made if needed, and appended to. By default they are dropped at the end.
        environment: variables for the ranks beside those of this process.
        rendezvous: meet at this file rather than at a port.
        port: meet at this port; by default MASTER_PORT if that is set, else one that is free.
        timeout_s: end the job when it takes longer, in seconds.
        stop_s: after a first signal, how long ranks may take to end by themselves, in seconds.

    Raises:
        LaunchError: the port is in use, or the job took longer than `timeout_s`.
        RankFailed: a rank ended with an error, or was ended by a signal from elsewhere. The first cause is told.
        PacelineError: a rank raised it; the same class, message and exit code.
        KeyboardInterrupt: ended by SIGINT.
        SystemExit: ended by SIGTERM; 143.
    """
    if ranks < 1:
        raise LaunchError(f"cannot start {ranks} ranks; a job has at least 1.")
    variables = {**os.environ, **(environment or {})}
    with ExitStack() as stack:
        job = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        logs = (log_dir or job).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        (job / ARGUMENTS_FILE).write_text(json.dumps({"path": sys.path, "arguments": arguments}), encoding="utf-8")
        place = meeting(rendezvous, port, variables)
        stack.callback(place.close)
        variables |= {
            **place.variables,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": variables.get("OMP_NUM_THREADS", str(max(1, _cores() // ranks))),
            # All ranks are here; the host's own name may lead to an interface that is down or shut off.
            "GLOO_SOCKET_IFNAME": variables.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"),
            JOB_DIRECTORY: str(job),
            LOG_DIRECTORY: str(logs),
            LAUNCHER_PID: str(os.getpid()),
        }
        signals = stack.enter_context(NotedSignals())
        running = stack.enter_context(_Ranks(ranks, job, logs, log_dir is not None))
        running.start(entry, variables)
        place.serve()
        running.wait(signals, timeout_s, stop_s)


class _Ranks:
    """The processes of a job. Leaving the context ends whatever is left of them."""

    def __init__(self, size: int, job: Path, logs: Path, logs_are_kept: bool) -> None:
        self._size = size
        self._job = job
        self._logs = logs
        self._logs_are_kept = logs_are_kept
        self._log_starts: list[int] = []  # in bytes; logs may hold an earlier run
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, tuple[float, int]] = {}  # rank: when, return code

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while self._poll() < len(self._processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def start(self, entry: str, variables: Mapping[str, str]) -> None:
        for rank in range(self._size):
            with log_path(self._logs, rank).open("ab") as log:
                self._log_starts.append(log.tell())
                self._processes.append(
                    subprocess.Popen(
                        # -P: the directory we are in must not hide modules of ours; the worker gets our own sys.path.
                        [sys.executable, "-P", "-m", "paceline.runtime.job.worker", entry],
                        env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=None if rank == 0 else subprocess.DEVNULL,
                        stdout=None if rank == 0 else log,
                        stderr=None if rank == 0 else log,
                        # Ctrl-C at the terminal is ours to pass on, and what a rank starts is to end with it.
                        start_new_session=True,
                    )
                )

    def wait(self, signals: NotedSignals, timeout_s: float | None, stop_s: float) -> None:
        """Return when all ranks have ended well; for everything else see `launch`."""
        began = time.monotonic()
        stopping: int | None = None  # the signal passed on
        patience = doubt = 0.0  # until when
        while True:
            everyone_ended = self._poll() == self._size
            if stopping is None and signals.received:
                stopping, patience = signals.received[0], time.monotonic() + stop_s
                self._send(stopping)
            cause = self._cause(stopping)
            if cause is not None:
                doubt = doubt or time.monotonic() + _CAUSE_S
                if not cause.is_victim or everyone_ended or time.monotonic() > doubt:
                    raise self._error(cause)
            elif everyone_ended:
                break
            if stopping is not None and (len(signals.received) > 1 or time.monotonic() > patience):
                break
            if timeout_s is not None and time.monotonic() > began + timeout_s:
                raise self._too_late(timeout_s)
            time.sleep(_POLL_S)
        if stopping is not None:
            raise KeyboardInterrupt if stopping == signal.SIGINT else SystemExit(128 + stopping)

    def _poll(self) -> int:
        """Note which ranks have ended by now, and return how many."""
        for rank, process in enumerate(self._processes):
            if rank not in self._ended and process.poll() is not None:
                self._ended[rank] = time.time(), process.returncode
                _signal_session(process, signal.SIGKILL)  # children that it left
        return len(self._ended)

    def _send(self, number: int) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._ended:
                _signal_session(process, number)

    def _cause(self, stopping: int | None) -> Failure | None:
        """Return what most likely ended the job, if something did.

        Once the ranks were told to stop by a signal, those that end by it, or by connections that break then, are well.
        """
        well = (0,) if stopping is None else (0, -stopping, 128 + stopping)
        failed = {rank: end for rank, end in self._ended.items() if end[1] not in well}
        if not failed:
            return None
        ended = {rank: self._unexplained(rank, at, code) for rank, (at, code) in failed.items()}
        # Those that told why may not have ended yet.
        cause = first_cause([*{**ended, **read_failures(self._job, self._size)}.values()])
        return None if stopping is not None and cause.is_victim else cause

    def _unexplained(self, rank: int, at: float, code: int) -> Failure:
        """Describe the end of a rank that left no word."""
        how = f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (not by us; perhaps the host ran out of memory: see dmesg)"
        # Who ends a rank politely is ending all of them, us included, or is about to.
        return Failure(rank, at, "", how, "", 1, is_ours=False, is_victim=code in (-signal.SIGTERM, -signal.SIGINT))

    def _error(self, cause: Failure) -> PacelineError:
        log = f"log of rank {cause.rank}: {log_path(self._logs, cause.rank)}" if self._logs_are_kept else ""
        role = role_of(self._job, cause.rank)
        who = f"rank {cause.rank} of {self._size}" + (f" ({role})" if role else "")
        again = cause.error()
        if again is not None:
            again.add_note(f"raised by {who}; {log}")
            return again
        if cause.trace:
            text = f"failed:\n{cause.trace.rstrip()}"
        else:
            tail = self._tail(cause.rank)
            text = f"{cause.message}." + (f" The end of its log:\n{tail}" if tail else "")
        return RankFailed(f"{who} {text}" + (f"\n{log}" if log else ""))

    def _too_late(self, timeout_s: float) -> LaunchError:
        """Have the ranks still running write down where they are, and say so."""
        running = [rank for rank in range(self._size) if rank not in self._ended]
        for rank in running:
            self._processes[rank].send_signal(DUMP_STACKS)
        time.sleep(_DUMP_S)
        text = f"the job took longer than {timeout_s:g} s; still running: ranks {', '.join(map(str, running))}."
        if self._logs_are_kept:
            return LaunchError(f"{text} Where they were is at the end of their logs, {self._logs}/rank-*.log.")
        return LaunchError("\n".join([text, *(f"rank {rank} was at:\n{self._tail(rank)}" for rank in running[:4])]))

    def _tail(self, rank: int) -> str:
        with log_path(self._logs, rank).open("rb") as log:
            log.seek(self._log_starts[rank])
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def _signal_session(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        os.killpg(process.pid, number)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
