"""Killed at any moment of a save, the newest whole checkpoint restores; what is left behind is cleared away."""

import dataclasses
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time

import torch

from paceline.placement.boxes import Patch
from paceline.train.checkpoint import Checkpointer, latest
from tests.train.checkpoint.sharded import SHAPES, Sharded, replicated

FORK = multiprocessing.get_context("fork")  # the child has PyTorch loaded already
FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


def fill(module, value):
    with torch.no_grad():
        for piece in module.shards():
            piece.tensor.fill_(value)


def build(directory, rows=1):
    module = Sharded("dp=2", replicated)
    for place in (0, len(SHAPES)) if rows > 1 else ():  # the first parameter of either rank
        tensor = torch.nn.Parameter(torch.zeros(rows, 6))
        changes = {"tensor": tensor, "shape": (rows, 6), "patches": (Patch.all_of((rows, 6)),)}
        module.pieces[place] = dataclasses.replace(module.pieces[place], **changes)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, Checkpointer(directory, module, optimizer, keep=1)


def check(directory, rows=1):
    """Restore the newest checkpoint and see that it is all of one save; return its number."""
    assert latest(directory) is not None
    module, checkpoints = build(directory, rows)
    extra = checkpoints.restore()
    for piece in module.shards():
        assert piece.name == "cache" or bool((piece.tensor == extra["value"]).all()), piece.name
    return extra["value"]


def die_at(event_number):
    """Kill this process just before the n-th access to a file."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        if event in FILE_EVENTS:
            seen += 1
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def in_child(work, *args):
    child = FORK.Process(target=work, args=args)
    child.start()
    child.join()
    return child.exitcode


def save_twice(directory, event_number):
    """Save the next step, deleting the one before, then that step again, replacing it."""
    torch.set_num_threads(1)
    module, checkpoints = build(directory)
    number = checkpoints.restore()["value"]
    die_at(event_number)
    for again in range(2):
        fill(module, number + again + 1)
        checkpoints.save(number + 1, {"value": number + again + 1}, block=True)


def test_killed_before_each_access_to_a_file(tmp_path):
    module, checkpoints = build(tmp_path / "start")
    fill(module, 1)
    checkpoints.save(1, {"value": 1}, block=True)
    seen, event_number, code = set(), 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        event_number += 1
        directory = tmp_path / str(event_number)
        shutil.copytree(tmp_path / "start", directory)
        code = in_child(save_twice, directory, event_number)
        seen.add(check(directory))
        module, checkpoints = build(directory)
        fill(module, 9)
        checkpoints.save(2, {"value": 9}, block=True)
        assert check(directory) == 9
        assert [path.name for path in directory.iterdir()] == ["step-00000002"]
    assert code == 0
    assert seen == {1, 2, 3}
    assert event_number > 30  # the hook saw the work


def save_forever(directory, rows, ready):
    torch.set_num_threads(1)
    module, checkpoints = build(directory, rows)
    number = checkpoints.restore()["value"]
    ready.set()
    while True:
        number += 1
        fill(module, number)
        checkpoints.save(number, {"value": number})


def test_killed_at_random_moments(tmp_path):
    rows = 100_000
    module, checkpoints = build(tmp_path, rows)
    fill(module, 1)
    checkpoints.save(1, {"value": 1}, block=True)
    value = 1
    chance = random.Random(0)
    for kill in range(15):
        ready = FORK.Event()
        child = FORK.Process(target=save_forever, args=(tmp_path, rows, ready))
        child.start()
        ready.wait()
        while kill == 0 and latest(tmp_path).name == "step-00000001":
            time.sleep(0.01)  # however busy the machine is, something is saved
        time.sleep(chance.uniform(0, 0.12))
        child.kill()
        child.join()
        found = check(tmp_path, rows)
        assert found >= value
        value = found
    assert value > 1
    # Each kill between a commit and the deletion of the one before leaves one too many; the next save clears them all.
    module, checkpoints = build(tmp_path, rows)
    fill(module, value + 1)
    checkpoints.save(value + 1, {"value": value + 1}, block=True)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{value + 1:08d}"]
