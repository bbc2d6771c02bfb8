"""Starts the ranks of a job on this host and sees all of them to their end.

One process per rank, each in a session of its own, forked from one that has loaded what they need; and a store kept
here where they meet: no port is raced for, and no rank's death takes the store away. Whatever ends the job (a rank's
error, a signal to us, even our own death by SIGKILL) ends every process of it. Knows nothing of what ranks compute.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import LaunchError, PacelineError, RankFailed
from paceline.runtime.job.failures import Failure, first_cause, read_failures
from paceline.runtime.job.meeting import meeting
from paceline.runtime.job.processes import End, Processes
from paceline.runtime.job.roles import role_of
from paceline.runtime.job.signals import NotedSignals
from paceline.runtime.job.worker import ARGUMENTS_FILE, DUMP_STACKS, LAUNCHER_PID, log_path
from paceline.runtime.job.world import JOB_DIRECTORY, LOG_DIRECTORY

Json: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None

_POLL_S = 0.02
_GRACE_S = 2.0  # from SIGTERM to SIGKILL
_CAUSE_S = 2.0  # how long a broken connection is given to turn out another rank's fault
_DUMP_S = 10.0  # how long a rank may take to begin to write its stacks; one that runs at all does so at once
_REST_S = 0.5  # what the rest of them takes
_TAIL_LINES = 40


def launch(
    entry: str,
    arguments: Json,
    ranks: int,
    *,
    loaded: Sequence[str] = (),
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
        loaded: modules beside that of `entry` that ranks need; to be loaded once, before there are ranks.
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
        given = {"path": sys.path, "loaded": [*loaded], "arguments": arguments}
        (job / ARGUMENTS_FILE).write_text(json.dumps(given), encoding="utf-8")
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
        log_starts = [_length(log_path(logs, rank)) for rank in range(ranks)]
        processes = Processes(entry, ranks, variables)
        running = stack.enter_context(_Ranks(processes, job, logs, log_starts, log_dir is not None))
        place.serve()
        running.wait(signals, timeout_s, stop_s)


class _Ranks:
    """The ranks of a job. Leaving the context ends whatever is left of them."""

    def __init__(
        self, processes: Processes, job: Path, logs: Path, log_starts: Sequence[int], logs_are_kept: bool
    ) -> None:
        self._processes = processes
        self._size = len(log_starts)
        self._job = job
        self._logs = logs
        self._log_starts = log_starts  # in bytes; logs may hold an earlier run
        self._logs_are_kept = logs_are_kept

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.send(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while not self._all_ended() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._processes.send(signal.SIGKILL)
        self._processes.close()

    def _all_ended(self) -> bool:
        self._processes.poll()
        return not self._processes.running

    def wait(self, signals: NotedSignals, timeout_s: float | None, stop_s: float) -> None:
        """Return when all ranks have ended well; for everything else see `launch`."""
        began = time.monotonic()
        stopping: int | None = None  # the signal passed on
        patience = doubt = 0.0  # until when
        while True:
            everyone_ended = self._all_ended()
            if stopping is None and signals.received:
                stopping, patience = signals.received[0], time.monotonic() + stop_s
                self._processes.send(stopping)
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

    def _cause(self, stopping: int | None) -> Failure | None:
        """Return what most likely ended the job, if something did.

        Once the ranks were told to stop by a signal, those that end by it, or by connections that break then, are well.
        """
        well = (0,) if stopping is None else (0, -stopping, 128 + stopping)
        ended = {r: self._unexplained(r, end) for r, end in self._processes.ended.items() if end.code not in well}
        if not ended:
            return None
        # Those that told why may not have ended yet.
        cause = first_cause([*{**ended, **read_failures(self._job, self._size)}.values()])
        return None if stopping is not None and cause.is_victim else cause

    def _unexplained(self, rank: int, end: End) -> Failure:
        """Describe the end of a rank that left no word."""
        how = f"ended with exit code {end.code}" if end.code > 0 else f"was ended by {signal.Signals(-end.code).name}"
        if end.code == -signal.SIGKILL:
            how += " (not by us; perhaps the host ran out of memory: see dmesg)"
        # Who ends a rank politely is ending all of them, us included, or is about to.
        polite = end.code in (-signal.SIGTERM, -signal.SIGINT)
        return Failure(rank, end.at, "", how, "", 1, is_ours=False, is_victim=polite)

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
        running = self._processes.running
        logs = {log: _length(log) for log in (log_path(self._logs, rank) for rank in running)}
        for rank in running:
            self._processes.ask(rank, DUMP_STACKS)
        deadline = time.monotonic() + _DUMP_S
        while any(_length(log) == before for log, before in logs.items()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        time.sleep(_REST_S)
        text = f"the job took longer than {timeout_s:g} s; still running: ranks {', '.join(map(str, running))}."
        if self._logs_are_kept:
            return LaunchError(f"{text} Where they were is at the end of their logs, {self._logs}/rank-*.log.")
        return LaunchError("\n".join([text, *(f"rank {rank} was at:\n{self._tail(rank)}" for rank in running[:4])]))

    def _tail(self, rank: int) -> str:
        with log_path(self._logs, rank).open("rb") as log:
            log.seek(self._log_starts[rank])
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def _length(log: Path) -> int:
    """Return the bytes that a log has already; it exists then."""
    with log.open("ab") as file:
        return file.tell()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
