"""Tests on real ranks: `@ranks(4, mesh="dp=2,fsdp=2")` runs a test function in as many processes.

    @ranks(2)
    def test_sum(world):
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == world.size

The function may name `world` (the `World`), `rank` (its number) and, where the decorator gives one, `mesh` (the
`Mesh`); whatever else it names comes from pytest, fixtures and parameters alike, if it can be pickled. Processes fork
from a server that has loaded PyTorch, meet at a file, and talk through what users get by default, or `backend`. The
first rank that fails ends the test with its traceback; after `timeout_s`, which is for ranks that hang and far above
what a busy machine needs, it fails with the stacks of all ranks. What joins the job by itself, such as a training run,
is tested with `joined=False`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tests.properties  # noqa: F401 - each rank draws as pytest does
from paceline import shm
from paceline.plan import Mesh
from paceline.runtime.job.failures import Failure, first_cause, read_failures
from paceline.runtime.job.world import STORE_FILE
from paceline.shm import build

# Loaded once in the server; what tests need beyond it, each of their processes loads for itself.
PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "paceline.runtime.module",
    "paceline.runtime.job.rendezvous",
    "paceline.train.run",
    "paceline.exchange.membership.__main__",
    "paceline.train.servers.supervisor.supervise",
    "paceline.train.servers.worker.process",
    "paceline.cli.main",
    "tests.forked",
    "tests.frozen",
]

_OURS = ("world", "rank", "mesh")
_DUMP_S = 10.0  # until when a rank that runs at all has begun to write its stack
_REST_S = 0.5  # what the rest of it takes
_CAUSE_S = 2.0


def ranks(
    size: int | None = None,
    *,
    mesh: str | None = None,
    backend: str = "auto",
    timeout_s: float = 300,
    joined: bool = True,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test in `size` processes; by default as many as `mesh` has ranks."""
    parsed = Mesh.parse(mesh) if mesh is not None else None
    count = size if size is not None else parsed.size if parsed is not None else 0
    if count < 1 or (parsed is not None and parsed.size != count):
        raise ValueError(f"@ranks({size}, mesh={mesh!r}): give a number of ranks, a mesh, or both that agree")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        if not joined and "world" in signature.parameters:
            raise ValueError("a test that joins by itself is given no world")
        ours = {name for name in _OURS if name in signature.parameters and (name != "mesh" or parsed is not None)}
        where = (test.__module__, inspect.getfile(test), test.__qualname__)

        @functools.wraps(test)
        def run(**given: Any) -> None:
            if count > 1 and backend != "gloo":
                _build()
            task = (where, count, ours, parsed, backend if joined else None, given)
            for last in (False, True):
                with tempfile.TemporaryDirectory(prefix="ranks-") as job:
                    try:
                        return _run(Path(job), count, timeout_s, task)
                    except ConnectionError as error:
                        if last:
                            pytest.fail(str(error), pytrace=False)

        others = [parameter for name, parameter in signature.parameters.items() if name not in ours]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


@functools.cache
def _build() -> None:
    """Build what ranks would build at first use, which takes longer than a test may."""
    if shm.unavailable() is None and os.environ.get("PACELINE_SHM") != "portable":
        with contextlib.suppress(build.BuildError):  # there are other ways without it
            build.native()


_NOT_CONNECTED = "Gloo connectFullMesh failed"
"""What Gloo says now and then on a busy machine when its ranks connect, before any test has begun."""


def _run(job: Path, size: int, timeout_s: float, task: tuple[Any, ...]) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes = [context.Process(target=_rank, args=(rank, job, dict(os.environ), *task)) for rank in range(size)]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s  # the first start waits for the server
        running = list(processes)
        while running:
            wait([process.sentinel for process in running], max(deadline - time.monotonic(), 0))
            running = [process for process in processes if process.is_alive()]
            if any(process.exitcode for process in processes):
                told = _told(job, processes)
                if _NOT_CONNECTED in told:
                    raise ConnectionError(told)
                pytest.fail(told, pytrace=False)
            if running and time.monotonic() > deadline:
                pytest.fail(_stacks(job, processes, timeout_s), pytrace=False)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    print(_output(job, 0), end="")


def _told(job: Path, processes: list[BaseProcess]) -> str:
    """Say what the rank that failed first, and not its victims, has to say."""
    deadline = time.monotonic() + _CAUSE_S
    while True:
        all_ended = not any(process.is_alive() for process in processes)
        died = {
            rank: Failure(rank, time.time(), "", f"ended with {process.exitcode}", "", 1, False, False)
            for rank, process in enumerate(processes)
            if process.exitcode
        }
        cause = first_cause([*{**died, **read_failures(job, len(processes))}.values()])
        if not cause.is_victim or all_ended or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    text = cause.trace or cause.message
    return f"rank {cause.rank} of {len(processes)} failed:\n{text}\n{_output(job, cause.rank)}"


def _stacks(job: Path, processes: list[BaseProcess], timeout_s: float) -> str:
    asked = []
    for rank, process in enumerate(processes):
        # One that has no file yet is still starting, and would be ended by the signal.
        if process.pid is not None and process.is_alive() and _stack_file(job, rank).exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
                asked.append(rank)
    deadline = time.monotonic() + _DUMP_S
    while any(not _stack_file(job, rank).stat().st_size for rank in asked) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(_REST_S)
    parts = [f"the ranks did not end within {timeout_s:g} s"]
    for rank, process in enumerate(processes):
        if process.is_alive():
            stack = _stack_file(job, rank)
            parts.append(f"--- rank {rank} is at\n{stack.read_text() if stack.exists() else '(still starting)'}")
            parts.append(_output(job, rank))
        else:
            parts.append(f"--- rank {rank} has ended")
    return "\n".join(parts)


def _output(job: Path, rank: int) -> str:
    path = job / f"output-{rank}"
    return path.read_text(errors="replace") if path.exists() else ""


def _stack_file(job: Path, rank: int) -> Path:
    return job / f"stack-{rank}"


def _rank(
    rank: int,
    job: Path,
    environment: dict[str, str],
    where: tuple[str, str, str],
    size: int,
    ours: set[str],
    mesh: Mesh | None,
    backend: str | None,
    given: Mapping[str, Any],
) -> None:
    """Be one rank: runs in a process of its own."""
    output = os.open(job / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # pytest's capture went into the server; what is printed here goes to the file.
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    with _stack_file(job, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        faulthandler.enable(stacks)
        os.environ.clear()
        os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        os.environ.update({STORE_FILE: str(job / "store"), "GLOO_SOCKET_IFNAME": _loopback(), "OMP_NUM_THREADS": "1"})
        code = 0
        try:
            _call(where, ours, mesh, backend, given)
        except BaseException as error:  # pytest's own skip and fail too
            failure = Failure.of(rank, error)
            failure.write(job)
            code = failure.exit_code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without tearing down, which could wait for a rank that is gone


def _call(
    where: tuple[str, str, str], ours: set[str], mesh: Mesh | None, backend: str | None, given: Mapping[str, Any]
) -> None:
    import torch

    from paceline.runtime.job.rendezvous import join

    torch.set_num_threads(1)
    module, path, name = where
    test: Any = _module(module, path)
    for part in name.split("."):
        test = getattr(test, part)
    with contextlib.nullcontext() if backend is None else join(backend=backend) as world:
        ready = {"world": world, "rank": int(os.environ["RANK"]), "mesh": mesh}
        inspect.unwrap(test)(**given, **{name: ready[name] for name in ours})


def _module(name: str, path: str) -> ModuleType:
    """Load a test file as pytest did, whatever its import mode."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"
