"""Saving: a snapshot, in the background, bounded in everything, and loud when it fails."""

import os
import subprocess
import threading

import psutil
import pytest
import torch

from paceline.errors import CheckpointError
from paceline.placement.boxes import Patch
from paceline.train.checkpoint import Checkpointer, latest
from tests.train.checkpoint.sharded import Sharded, adamw, assert_same, everything, train


class Large(Sharded):
    """With one large parameter, so that writing takes longer than coming back from `save`."""

    def __init__(self, megabytes: int, mesh: str = "serial") -> None:
        super().__init__(mesh)
        shape = (megabytes << 18,)
        tensor = torch.nn.Parameter(torch.ones(shape))
        self.pieces.append(type(self.pieces[0])("large", 0, tensor, True, shape, (Patch.all_of(shape),), True))
        self.state_names = {**self.state_names, "large": "large"}


def values(module):
    return {piece.name: piece.tensor.detach().clone() for piece in module.shards()}


def test_what_is_written_is_the_state_at_the_call(tmp_path):
    module = Large(32)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    checkpoints = Checkpointer(tmp_path, module, optimizer)
    extra = {"position": [0]}
    for step in (1, 2):  # the second save reuses the buffers of the first
        wanted = values(module)
        extra["position"][0] = step
        checkpoints.save(step, extra)
        extra["position"][0] = -1
        optimizer.param_groups[0]["lr"] = 0.25
        with torch.no_grad():
            for piece in module.shards():
                piece.tensor.add_(5)
        checkpoints.wait()
        optimizer.param_groups[0]["lr"] = 1.0
        assert checkpoints.restore() == {"position": [step]}
        assert optimizer.param_groups[0]["lr"] == 1.0
        found = values(module)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted if name != "cache")
        train(module, optimizer, range(1))


def test_fifty_saves_leave_no_trace(tmp_path):
    module = Large(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    checkpoints = Checkpointer(tmp_path, module, optimizer, keep=3)
    process = psutil.Process()

    def save(steps):
        for step in steps:
            checkpoints.save(step, {})
        checkpoints.wait()
        return process.num_fds(), threading.active_count(), process.memory_info().rss

    files, threads, memory = save(range(10))
    files_after, threads_after, memory_after = save(range(10, 60))
    assert (files_after, threads_after) == (files, threads)
    assert memory_after - memory < 8 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-000000{step}" for step in (57, 58, 59)]


def test_values_that_are_not_plain_are_refused_at_once(tmp_path):
    module = Sharded("serial")
    checkpoints = Checkpointer(tmp_path, module, adamw(module))
    with pytest.raises(CheckpointError, match=r"extra\['schedule'\]\['milestones'\] has the key 10; keys must be text"):
        checkpoints.save(1, {"schedule": {"milestones": {10: 1}}})
    with pytest.raises(CheckpointError, match=r"extra\['loss'\]\[1\] is a Tensor.*\.item\(\)"):
        checkpoints.save(1, {"loss": [1.0, torch.tensor(2.0)]})
    with pytest.raises(CheckpointError, match="at least 1"):
        Checkpointer(tmp_path, module, adamw(module), keep=0)
    assert list(tmp_path.iterdir()) == []


def test_a_type_without_a_place_in_safetensors_is_told(tmp_path):
    module = Sharded("fsdp=2")
    place = next(i for i, piece in enumerate(module.pieces) if piece.name == "norm.mean")
    piece = module.pieces[place]
    module.pieces[place] = type(piece)(**{**vars(piece), "tensor": piece.tensor.to(torch.complex128)})
    checkpoints = Checkpointer(tmp_path, module, adamw(module))
    with pytest.raises(CheckpointError, match=r"'model/norm.mean' has type torch.complex128"):
        checkpoints.save(1, {}, block=True)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("left", [0, 4096, 24 << 10])
def test_a_full_disk_is_told_and_nothing_is_lost(tiny_disk, left):
    module = Sharded("fsdp=2")
    optimizer = adamw(module)
    train(module, optimizer, range(1))
    checkpoints = Checkpointer(tiny_disk / "checkpoints", module, optimizer)
    checkpoints.save(1, {"step": 1}, block=True)
    first = everything(module, optimizer)
    ballast = tiny_disk / "ballast"
    free = os.statvfs(tiny_disk)
    ballast.write_bytes(bytes(free.f_bavail * free.f_bsize - left))

    train(module, optimizer, range(1, 2))
    checkpoints.save(2, {"step": 2})
    with pytest.raises(CheckpointError, match=r"step 2 was not saved: the disk of .* is full"):
        checkpoints.save(3, {"step": 3})
    assert [path.name for path in (tiny_disk / "checkpoints").iterdir()] == ["step-00000001"]
    assert latest(tiny_disk / "checkpoints").name == "step-00000001"

    ballast.unlink()
    second = everything(module, optimizer)
    checkpoints.save(4, {"step": 4}, block=True)  # told once, then goes on
    assert checkpoints.restore() == {"step": 4}
    assert_same(everything(module, optimizer), second)
    assert checkpoints.restore(tiny_disk / "checkpoints" / "step-00000001") == {"step": 1}
    assert_same(everything(module, optimizer), first)


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    module = Sharded("serial")
    with pytest.raises(CheckpointError, match="cannot make the directory"):
        Checkpointer(tmp_path / "file" / "checkpoints", module, adamw(module))
    checkpoints = Checkpointer(tmp_path / "checkpoints", module, adamw(module))
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="step 1 was not saved: the file system refused"):
        checkpoints.save(1, {}, block=True)
    checkpoints.close()
