"""What the peers of `ctr` do: PyTorch alone, with tables that every rank keeps whole."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.bench.results import leave
from paceline.runtime.job.rendezvous import join
from paceline.runtime.job.world import World
from paceline.train.data import Loader, open_source
from paceline.train.model import build_module
from paceline.train.recipe import load_recipe


def train_whole_tables(arguments: dict[str, Any]) -> None:
    """Train as one rank; leave the seconds of the steps that count."""
    with join(device="cpu", backend="gloo") as world:
        torch.set_num_threads(1)
        leave(arguments["folder"], world.rank, {"seconds": _seconds(arguments, world)})


def _seconds(arguments: dict[str, Any], world: World) -> float:
    recipe = load_recipe(arguments["recipe"], arguments["overrides"])
    source, _ = open_source(recipe.data)
    module = build_module(recipe)
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            layer.sparse = arguments["sparse"]
    trained = nn.parallel.DistributedDataParallel(module) if world.size > 1 else module
    optimizer = torch.optim.Adagrad(module.parameters(), lr=recipe.optimizer.lr)
    loader = Loader(source, recipe.train.batch, shard=(world.rank, world.size), seed=recipe.seed)
    first = int(arguments["steps"] * arguments["counted_from"])
    began = 0.0
    for number, step in enumerate(loader):
        if number in (first, arguments["steps"]):
            if world.size > 1:
                dist.barrier()
            if number > first:
                break
            began = time.perf_counter()
        batch = step.micro_batches[0].batch
        assert isinstance(batch, dict)
        optimizer.zero_grad()
        trained(**batch).backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    loader.close()
    return seconds
