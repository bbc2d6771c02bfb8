"""What ranks do in the tests of the launcher: functions that a worker imports by name.

PyTorch is imported by those that need it: it takes longer than anything else here.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import DataError, NonFiniteError


def report(directory: str) -> None:
    """Write down what the ranks found, and the sum of their numbers."""
    import torch
    import torch.distributed as dist

    from paceline.runtime.job.rendezvous import join

    with join() as world:
        total = torch.tensor([float(world.rank)])
        if world.size > 1:
            dist.all_reduce(total)
        facts = {
            "world": [world.rank, world.size, world.local_rank, world.local_size, world.launcher.name],
            "sum": total.item(),
            "port": os.environ.get("MASTER_PORT"),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "backend": [world.backend.name, world.backend.words],
        }
        print(f"rank {world.rank} prints")
        (Path(directory) / f"{world.rank}.json").write_text(json.dumps(facts))


def fail_in_a_collective(how: str) -> None:
    """Rank 1 fails while the others wait for it, and with a collective under way that they never answer.

    A process group in this state can be neither destroyed nor abandoned: its destructor waits.
    """
    import torch
    import torch.distributed as dist

    from paceline.runtime.job.rendezvous import join

    with join() as world:
        if world.rank == 1:
            dist.broadcast(torch.ones(1000), 0, async_op=True)
            if how == "ours":
                raise DataError("file x is empty; give another.")
            raise ValueError("the cause")
        try:
            dist.barrier()
        except RuntimeError as error:
            raise KeyError("a victim") from error


def report_and_fail(directory: str) -> None:
    report(directory)
    fail_in_a_collective("raise")


def die_in_a_collective(arguments: list[str]) -> None:
    """Rank 1 is ended by a signal in the middle of exchanges."""
    backend, name = arguments
    import torch
    import torch.distributed as dist

    from paceline.runtime.job.rendezvous import join

    with join(backend=backend) as world:
        for number in range(1000):
            dist.all_reduce(torch.ones(100_000))
            if world.rank == 1 and number == 10:
                os.kill(os.getpid(), signal.Signals[name])


def rank_1_has_no_shared_memory(arguments: list[str]) -> None:
    """Write down what carries tensors all the same."""
    backend, directory = arguments
    from paceline import shm
    from paceline.runtime.job.rendezvous import join

    shm.unavailable = lambda: "this is a test." if os.environ["RANK"] == "1" else None
    with join(backend=backend) as world:
        (Path(directory) / f"{world.rank}.json").write_text(json.dumps([world.backend.name, world.backend.words]))


def fail(how: str) -> None:
    """Rank 1 ends in some way while the others are busy."""
    if os.environ["RANK"] != "1":
        time.sleep(1000)
    if how == "import":
        import no_such_module  # noqa: F401
    if how == "ours":
        raise NonFiniteError("loss is NaN in step 3.")
    if how == "exit":
        sys.exit(7)
    os.kill(os.getpid(), signal.Signals[how])


def wait_in_a_collective(directory: str) -> None:
    """Rank 0 sleeps, and the others wait for it."""
    import torch.distributed as dist

    from paceline.runtime.job.rendezvous import join

    with join() as world:
        sleep(directory) if world.rank == 0 else _begin(directory)
        dist.barrier()


def sleep(directory: str) -> None:
    """Sleep for ever, and so does a child."""
    _begin(directory)
    time.sleep(1000)


def _begin(directory: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    _tell(directory, f"{os.getpid()} {child.pid}")


def _tell(directory: str, processes: str) -> None:
    """Let the test know that this rank is where it is to be, and in which processes."""
    name = Path(directory) / f"{os.environ['RANK']}.pids"
    name.with_suffix(".partial").write_text(processes)
    name.with_suffix(".partial").rename(name)


def end_in_good_order(directory: str) -> None:
    """Finish what is under way when told to end, as the training loop does."""
    told: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
    _tell(directory, str(os.getpid()))
    while not told:
        time.sleep(0.01)
    time.sleep(0.3)
    (Path(directory) / f"{os.environ['RANK']}.saved").touch()
    sys.exit(130)


def refuse_to_end(directory: str) -> None:
    """Do nothing about a signal but note that it came."""
    told = Path(directory) / f"{os.environ['RANK']}.told"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: told.touch())
    sleep(directory)


def tell_loaded(arguments: list[str]) -> None:
    """Write down whether a module was there when the rank began."""
    directory, module = arguments
    (Path(directory) / f"{os.environ['RANK']}.json").write_text(json.dumps(module in sys.modules))


def one_stays_away(directory: str) -> None:
    """Rank 2 never arrives; the time of the others is over once both are there."""
    if os.environ["RANK"] == "2":
        time.sleep(1000)
    from paceline.runtime.job import rendezvous

    rendezvous.roll_call = roll_call_of([0, 1], timeout_s=1)
    with rendezvous.join():
        pass


def roll_call_of(there: list[int], timeout_s: float) -> Callable[..., int]:
    """Return a roll call that takes `timeout_s`, or longer until these ranks have signed in."""
    from paceline.runtime.job import arrival

    def wait(store: Any, key: str, deadline: float) -> bytes | None:
        if key.endswith("/verdict"):
            while not store.check([f"0/here/{rank}" for rank in there]):
                time.sleep(0.01)
        return usual(store, key, deadline)

    def call(store: Any, world: Any, _: float, *given: Any, **named: Any) -> int:
        return arrival.roll_call(store, world, timeout_s, *given, **named)

    usual, arrival._wait = arrival._wait, wait
    return call


if __name__ == "__main__":  # under torchrun
    globals()[sys.argv[1]](*sys.argv[2:])
