"""What ranks see of a commit while it happens."""

import os
import time

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.train.checkpoint import Checkpointer, latest
from paceline.train.checkpoint.commit import Save, await_commit
from paceline.train.checkpoint.manifest import MANIFEST, read_manifest
from tests.train.checkpoint.sharded import Sharded


@pytest.fixture
def uncommitted(tmp_path) -> Save:
    """A save that all ranks have written, and the leader has yet to rename."""
    module = Sharded("serial")
    Checkpointer(tmp_path, module, torch.optim.SGD(module.parameters(), lr=1.0)).save(1, {}, block=True)
    final = latest(tmp_path)
    save = Save(tmp_path, 1, read_manifest(final / MANIFEST).save_id, world=2, timeout=5.0)
    os.rename(final, save.partial)
    return save


def test_a_rank_that_looks_for_notes_while_the_leader_renames_finds_the_checkpoint(uncommitted, monkeypatch):
    """The directory is there when the rank begins to list it, and is gone when it does."""
    scan = os.scandir

    def rename_once(path):
        if str(path) == str(uncommitted.partial) and uncommitted.partial.exists():
            os.rename(uncommitted.partial, uncommitted.final)

    def late_scan(path="."):
        rename_once(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", late_scan)
    monkeypatch.setattr(time, "sleep", lambda _: rename_once(uncommitted.partial))  # for a Python that lists otherwise
    await_commit(uncommitted)
    assert latest(uncommitted.directory) == uncommitted.final


def test_a_note_is_told_to_all(uncommitted):
    uncommitted.note(1).write_text("the disk is full.")
    with pytest.raises(CheckpointError, match="the disk is full"):
        await_commit(uncommitted)
