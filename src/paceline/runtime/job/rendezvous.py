"""How ranks find each other: from the environment to a process group, and out again.

Works the same under our own launcher, torchrun, SLURM and Open MPI. Knows nothing of who started the processes beyond
what they left in the environment.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from paceline.errors import LaunchError, PacelineError
from paceline.runtime.job.arrival import noted, roll_call, sign_out
from paceline.runtime.job.backend import Choice, for_cpus, notes, open_group
from paceline.runtime.job.world import LOG_DIRECTORY, STORE_FILE, Launcher, World, check_world

__all__ = ["Launcher", "World", "check_world", "join"]

_DEVICES = ("auto", "cpu", "cuda")
_LEAVE_S = 60.0  # how long rank 0 keeps the store for ranks that have not yet left


@contextmanager
def join(device: str = "cpu", backend: str = "auto", timeout_s: float = 55) -> Iterator[World]:
    """Be a rank of the job that the environment names; alone, be the only one.

    With more than one rank, the default process group of `torch.distributed` exists inside. Leaving is collective; by
    an exception a rank leaves alone and at once.

    Args:
        device: `cpu`, `cuda`, or `auto`: `cuda` when this host has a device for each of its ranks.
        backend: what carries tensors on CPUs (on GPUs it is NCCL): `shm`, shared memory within a host; `gloo`; or
            `auto`: `shm` when some ranks share a host and every host can. World.backend says what it came to be.
        timeout_s: how long to wait for ranks that have not arrived, in seconds.

    Raises:
        LaunchError: the environment contradicts itself, the meeting point cannot be reached, a rank did not arrive or
            arrived twice, there are too few devices, or `shm` cannot be.
    """
    choice = Choice.parse(backend)
    world = World.from_environment(os.environ) or World()
    world = replace(world, device_name=_device_name(device, world))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.size == 1:
        yield world
        return

    logs = os.environ.get(LOG_DIRECTORY)
    deadline = time.monotonic() + timeout_s
    store = _open_store(os.environ, world, timeout_s)
    meeting = roll_call(
        store,
        world,
        max(deadline - time.monotonic(), 1),
        Path(logs) if logs else None,
        backend=choice.value,
        notes=notes(choice, world),
    )
    carrier = for_cpus(choice, lambda name: noted(store, meeting, name))
    world = replace(world, backend=open_group(carrier, PrefixStore(f"{meeting}/group", store), world))
    try:
        yield world
    except BaseException as error:
        _leave_alone(error)
        raise
    sign_out(store, world, meeting, _LEAVE_S)
    dist.destroy_process_group()


def _leave_alone(error: BaseException) -> None:
    """Let this process end although its collectives never will.

    A process group whose collectives are under way can be neither destroyed nor aborted: gloo waits for peers that wait
    for us, in its destructor too. So it is left as it is, and the process ends without tearing down.
    """
    code = 1
    if isinstance(error, PacelineError):
        code = error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        code = 130
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(end)


def _device_name(device: str, world: World) -> str:
    if device not in _DEVICES:
        raise LaunchError(f"unknown device '{device}'; it is one of: {', '.join(_DEVICES)}.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu":
        return "cpu"
    if count >= world.local_size:
        return f"cuda:{world.local_rank}"
    # Schedulers can show each task its own device only.
    if count == 1 and world.launcher in (Launcher.SLURM, Launcher.OPEN_MPI):
        return "cuda:0"
    if device == "auto":
        return "cpu"
    raise LaunchError(
        f"device 'cuda' needs a GPU for each of the {world.local_size} ranks on this host, and there "
        f"{'is' if count == 1 else 'are'} {count or 'none'}. Start fewer ranks, or choose the device 'cpu'."
    )


def _open_store(environment: Mapping[str, str], world: World, timeout_s: float) -> Store:
    """Return the store where the ranks of this job meet; keys of ours only.

    Raises:
        LaunchError: there is no way to it.
    """
    if STORE_FILE in environment:
        return PrefixStore("paceline", FileStore(environment[STORE_FILE], world.size))
    host, port = _address(environment, world)
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        raise LaunchError(
            f"the host where the ranks are to meet, '{host}', has no address ({error.strerror}). Set MASTER_ADDR "
            "(torchrun: --master-addr, --rdzv-endpoint or --local-addr) to a name or number of rank 0's host that all "
            "hosts know."
        ) from error
    # Ours and torchrun keep the store in the launching process; otherwise rank 0 does.
    kept_by_launcher = (
        world.launcher is Launcher.PACELINE or environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    )
    if world.rank == 0 and not kept_by_launcher:
        listening = _listen(port, world)
        store: Store = TCPStore(
            host, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
        )
    else:
        store = _connect(host, port, timeout_s, kept_by_launcher)
    # torchrun starts ranks anew at the same store.
    return PrefixStore(f"paceline/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _address(environment: Mapping[str, str], world: World) -> tuple[str, int]:
    host = environment.get("MASTER_ADDR")
    port = environment.get("MASTER_PORT")
    if host is None and world.local_size == world.size:
        host = "127.0.0.1"
    if port is None and world.launcher is Launcher.SLURM and "SLURM_JOB_ID" in environment:
        # The same on all hosts, and different for jobs that run side by side; below the range of outgoing connections.
        port = str(15000 + int(environment["SLURM_JOB_ID"]) % 15000)
    if host is None or port is None:
        missing = " and ".join(name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if value is None)
        raise LaunchError(
            f"{world.launcher.value} started {world.size} ranks, but the environment does not say where they meet: set "
            f"{missing} to rank 0's host and a free port on it, the same for all ranks"
            + (" (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT)." if world.launcher is Launcher.OPEN_MPI else ".")
        )
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise LaunchError(f"MASTER_PORT is '{port}'; a port is a number from 1 to 65535.")
    return host, int(port)


def _listen(port: int, world: World) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
        return socket.create_server(("", port), backlog=4096)
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot listen on port {port} ({error.strerror}). It is in use by another program or job, or a "
            f"second process here claims to be rank 0 of {world.size}. Set MASTER_PORT to a free port, the same for "
            "all ranks."
        ) from error


def _connect(host: str, port: int, timeout_s: float, kept_by_launcher: bool) -> Store:
    """Return a client of the store at `host`.

    The constructor ignores its timeout where something answers that is no store, so it gets a thread, and is left.
    """
    outcome: list[Store] = []

    def connect() -> None:
        with suppress(dist.DistError):
            outcome.append(
                TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
            )

    thread = threading.Thread(target=connect, name="paceline-connect", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s + 1
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.2)
    if outcome:
        return outcome[0]
    keeper = f"{'the launcher' if kept_by_launcher else 'rank 0'}, which keeps the meeting point"
    if _answers(host, port):
        raise LaunchError(
            f"what answers on {host}:{port} is not {keeper}. Choose another MASTER_PORT, the same for all ranks."
        )
    raise LaunchError(
        f"{keeper} {host}:{port}, never answered within {timeout_s:g} s. Was it started, and does MASTER_ADDR name "
        "its host, as this host sees it?"
    )


def _answers(host: str, port: int) -> bool:
    """Whether somebody accepts connections there. How the client fails does not tell: between its tries it sleeps."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
