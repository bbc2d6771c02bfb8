"""Every layout into every other, and bit for bit into the same one."""

import itertools
import random

import numpy as np
import pytest
import torch

from paceline.errors import CheckpointError
from paceline.placement.placements import Shard
from paceline.train.checkpoint import Checkpointer
from tests.train.checkpoint.sharded import (
    Sharded,
    adamw,
    assert_same,
    draws,
    everything,
    placed,
    replicated,
    seed_all,
    split,
    train,
)

LAYOUTS = [
    ("serial", split()),
    ("dp=2", replicated),
    ("fsdp=2", split(0)),
    ("fsdp=2", split(1)),
    ("fsdp=3", split(0)),
    ("fsdp=4", split(0)),
    ("fsdp=4", split(2)),
    ("dp=2,fsdp=2", split(None, 0)),
    ("dp=2,fsdp=2", split(0, 0)),
    ("tp=2", placed({"qkv.weight": Shard(0, 3), "": Shard(0)})),
    ("dp=2,tp=2", placed({}, {"qkv.weight": Shard(0, (16, 4, 4)), "lin.weight": Shard(1, 2)})),
    ("fsdp=2,tp=2", placed({"": Shard(0)}, {"qkv.weight": Shard(0, (8, 2, 2)), "": Shard(1)})),
    ("tp=2,fsdp=3", placed({"qkv.weight": Shard(1, 2), "": Shard(1)}, {"": Shard(0, 4)})),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of every layout, and what it holds."""
    found = []
    for mesh, layout in LAYOUTS:
        module = Sharded(mesh, layout)
        optimizer = adamw(module)
        train(module, optimizer, range(3))
        directory = tmp_path_factory.mktemp("saved")
        Checkpointer(directory, module, optimizer).save(3, {"position": [1, 2]}, block=True)
        found.append((directory, everything(module, optimizer)))
    return found


@pytest.mark.parametrize(("source", "target"), list(itertools.product(range(len(LAYOUTS)), repeat=2)))
def test_every_layout_into_every_other(saved, source, target):
    directory, wanted = saved[source]
    module = Sharded(*LAYOUTS[target], seed=99)
    optimizer = adamw(module)
    assert Checkpointer(directory, module, optimizer).restore() == {"position": [1, 2]}
    assert_same(everything(module, optimizer), wanted)


def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path):
    seed_all(5)
    module = Sharded("dp=2,fsdp=2", split(None, 0))
    optimizer = adamw(module)
    train(module, optimizer, range(3))
    random.gauss(0, 1)  # leaves a spare number in the generator
    np.random.randn()
    checkpoints = Checkpointer(tmp_path, module, optimizer)
    checkpoints.save(3, {}, block=True)
    wanted_draws = draws()
    train(module, optimizer, range(3, 6))
    wanted = everything(module, optimizer)

    seed_all(6)
    again = Sharded("dp=2,fsdp=2", split(None, 0), seed=1)
    optimizer = adamw(again)
    train(again, optimizer, range(8, 9))  # state of its own, to be replaced
    Checkpointer(tmp_path, again, optimizer).restore()
    assert draws() == wanted_draws
    train(again, optimizer, range(3, 6))
    assert_same(everything(again, optimizer), wanted)


def test_only_owners_write(saved):
    directory, _ = saved[7]  # dp=2,fsdp=2 with copies along dp: ranks 2 and 3 own nothing
    sizes = {path.name: path.stat().st_size for path in (directory / "step-00000003").glob("*.safetensors")}
    generators = 5056 + 2 * 625 * 8 + 1000  # bytes every rank has of its own, with the header
    assert max(sizes["rank-00002.safetensors"], sizes["rank-00003.safetensors"]) < generators
    assert min(sizes["rank-00000.safetensors"], sizes["rank-00001.safetensors"]) > generators


def test_pieces_that_nobody_owns_are_not_saved_silently(tmp_path):
    module = Sharded("fsdp=2", split(0))
    module.pieces = [p for p in module.pieces if not (p.name == "lin.bias" and p.rank == 1)]
    checkpoints = Checkpointer(tmp_path, module, torch.optim.SGD(module.parameters(), lr=1.0))
    with pytest.raises(CheckpointError, match=r"'model/lin.bias'.*no exact cover: 2 of 5 elements"):
        checkpoints.save(1, {}, block=True)
    assert list(tmp_path.iterdir()) == []
