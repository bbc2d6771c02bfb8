"""Truncated, damaged and foreign checkpoints are refused by name, and the newest whole one is found."""

import json
import logging
import shutil
import zlib

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.train.checkpoint import Checkpointer, export_checkpoint, latest
from tests.train.checkpoint.sharded import Sharded, adamw, everything, train


@pytest.fixture
def run(tmp_path):
    """Checkpoints of steps 1 and 2 by two ranks, and the checkpointer."""
    module = Sharded("fsdp=2")
    optimizer = adamw(module)
    checkpoints = Checkpointer(tmp_path, module, optimizer)
    for step in (1, 2):
        train(module, optimizer, range(step, step + 1))
        checkpoints.save(step, {"step": step}, block=True)
    return checkpoints, tmp_path / "step-00000001", tmp_path / "step-00000002"


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path, place=-5):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


BREAKAGES = {
    "truncated data": (lambda path: truncate(path / "rank-00001.safetensors"), "rank-00001.*instead of.*truncated"),
    "flipped data": (lambda path: flip(path / "rank-00000.safetensors"), "rank-00000.*damaged.*checksum"),
    "flipped header": (lambda path: flip(path / "rank-00000.safetensors", 30), "rank-00000.*damaged.*checksum"),
    "lost data": (lambda path: (path / "rank-00001.safetensors").unlink(), "rank-00001.*cannot be read: No such file"),
    "truncated manifest": (lambda path: truncate(path / "manifest.json"), "manifest.json is truncated or damaged"),
    "empty manifest": (lambda path: (path / "manifest.json").write_bytes(b""), "manifest.json is truncated or damaged"),
    "lost manifest": (lambda path: (path / "manifest.json").unlink(), "not a Paceline checkpoint: it has no manifest"),
    "foreign manifest": (lambda path: (path / "manifest.json").write_text('{"steps": 1}'), "not written by Paceline"),
    "foreign list": (lambda path: (path / "manifest.json").write_text("[1]"), "not written by Paceline"),
    "binary manifest": (lambda path: (path / "manifest.json").write_bytes(b"\x80\x04\xff"), "truncated or damaged"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_refused_by_name_and_skipped(run, caplog, breakage):
    checkpoints, first, second = run
    change, message = BREAKAGES[breakage]
    change(second)
    before = everything(checkpoints._module, checkpoints._optimizer)
    with pytest.raises(CheckpointError, match=message) as refusal:
        checkpoints.restore(second)
    assert str(second) in str(refusal.value)
    after = everything(checkpoints._module, checkpoints._optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())  # nothing half loaded
    with caplog.at_level(logging.WARNING):
        assert latest(first.parent) == first
    assert str(second) in caplog.text
    assert checkpoints.restore() == {"step": 1}
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(second, first.parent / "out.safetensors")


def test_every_flipped_bit_of_the_manifest_is_noticed(run):
    checkpoints, _, second = run
    path = second / "manifest.json"
    sound = path.read_bytes()
    for place in range(0, len(sound), max(1, len(sound) // 150)):
        flip(path, place)
        with pytest.raises(CheckpointError, match=str(path)):
            checkpoints.restore(second)
        path.write_bytes(sound)
    assert checkpoints.restore(second) == {"step": 2}


def test_a_later_format_says_what_to_do(run):
    checkpoints, _, second = run
    document = json.loads((second / "manifest.json").read_text())
    (second / "manifest.json").write_text(json.dumps({**document, "version": 9}))
    with pytest.raises(CheckpointError, match="version 9; this Paceline reads versions up to 2"):
        checkpoints.restore(second)


def test_the_first_format_is_read(run):
    """It did not say where in a file a piece is: each was all that the file held of the tensor."""
    checkpoints, first, second = run
    document = json.loads((first / "manifest.json").read_text())
    for entry in document["body"]["tensors"].values():
        for piece in entry["pieces"]:
            assert not any(piece.pop("at"))
    body = json.dumps(document["body"], sort_keys=True, separators=(",", ":"))
    document |= {"version": 1, "crc32": zlib.crc32(body.encode())}
    (first / "manifest.json").write_text(json.dumps(document))
    assert checkpoints.restore(second) == {"step": 2}
    assert checkpoints.restore(first) == {"step": 1}


def test_nothing_whole(run, tmp_path):
    checkpoints, first, second = run
    for path in (first, second):
        truncate(path / "rank-00000.safetensors")
    assert latest(tmp_path) is None
    assert checkpoints.newest() is None
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        checkpoints.restore()
    with pytest.raises(CheckpointError, match=r"nowhere is not a Paceline checkpoint"):
        checkpoints.restore(tmp_path / "nowhere")
    assert latest(tmp_path / "nowhere") is None


def test_the_newest_is_the_one_saved_last_not_the_greatest_step(run):
    checkpoints, first, second = run
    checkpoints.restore(first)
    checkpoints.save(1, {"again": True}, block=True)
    assert latest(first.parent) == first
    assert checkpoints.restore() == {"again": True}
    assert sorted(path.name for path in first.parent.iterdir()) == [first.name, second.name]


def test_strangers_in_the_directory_are_left_alone(run, tmp_path):
    checkpoints, _, _ = run
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "precious").write_text("data")
    (tmp_path / "notes").mkdir()
    for step in (3, 4, 5):
        checkpoints.save(step, {}, block=True)
    Checkpointer(tmp_path, checkpoints._module, checkpoints._optimizer)
    assert [path.read_text() for path in tmp_path.glob("step-00000003.unknown-*/precious")] == ["data"]
    assert (tmp_path / "notes").is_dir()
    assert latest(tmp_path) == tmp_path / "step-00000005"


def test_a_checkpoint_of_another_module_is_refused_with_names(run, tmp_path):
    _, _, second = run
    shutil.copytree(second, tmp_path / "copy")
    module = Sharded("fsdp=2")
    for i, piece in enumerate(module.pieces):
        if piece.name == "lin.weight":
            module.pieces[i] = type(piece)(**{**vars(piece), "name": "linear.weight"})
    module.state_names = {
        name.replace("lin.w", "linear.w"): s.replace("lin.w", "linear.w") for name, s in module.state_names.items()
    }
    with pytest.raises(CheckpointError) as refusal:
        Checkpointer(tmp_path, module, adamw(module)).restore(tmp_path / "copy")
    assert "missing 'linear.weight' (float32[5, 4, 3]). Did you mean 'lin.weight'?" in str(refusal.value)
    assert "unexpected 'lin.weight'" in str(refusal.value)
    assert str(tmp_path / "copy") in str(refusal.value)
