"""PyTorch's own ways to train, unchanged, over `shm`: with two ranks they give bit by bit what they give over Gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import ranks
from tests.shm.implementations import Implementation, every_implementation, needs_native

_WIDTH = 24


Run = Callable[[int], list[torch.Tensor]]


def _same_as_gloo(world, implementation: Implementation, directory: Path, *runs: Run) -> None:
    """Run the same with Gloo and then with `implementation` as the default group, and compare."""
    want = _run_on(world, Implementation.GLOO, directory / "expected", runs)
    got = _run_on(world, implementation, directory / "tested", runs)
    for n, run in enumerate(runs):
        assert len(want[n]) == len(got[n]) > 0
        for one, other in zip(want[n], got[n], strict=True):
            assert torch.equal(one, other), run.__name__


def _run_on(world, implementation: Implementation, store: Path, runs: tuple[Run, ...]) -> list[list[torch.Tensor]]:
    if world.rank == 0:
        store.unlink(missing_ok=True)  # a test that is begun again would find addresses of processes that are gone
    dist.barrier()
    dist.destroy_process_group()
    implementation.choose()
    meeting = dist.FileStore(str(store), world.size)
    dist.init_process_group(implementation.backend, store=meeting, rank=world.rank, world_size=world.size)
    results = []
    for run in runs:
        torch.manual_seed(1)
        results.append([result.detach().clone() for result in run(world.rank)])
        dist.barrier()
    return results


def _model() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(_WIDTH, 5))


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[torch.Tensor]:
    losses = []
    for n in range(3):
        torch.manual_seed(100 * n + rank)
        loss = model(torch.randn(6, _WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def _whole(parameters: Any) -> list[torch.Tensor]:
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in parameters]


def _ddp(rank: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.01)
    return [*_steps(model, torch.optim.AdamW(model.parameters()), rank), *model.parameters()]


def _ddp_with_batch_norm_and_hook(rank: int) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.Linear(_WIDTH, 3))
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return [*_steps(wrapped, torch.optim.SGD(model.parameters(), 0.1), rank), *model.state_dict().values()]


def _ddp_with_power_sgd(rank: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.01)
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    return [*_steps(model, torch.optim.SGD(model.parameters(), 0.1), rank), *model.parameters()]


def _ddp_with_sparse_gradients(rank: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(nn.Sequential(nn.EmbeddingBag(20, _WIDTH, mode="sum", sparse=True), _model()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n in range(3):
        torch.manual_seed(10 * n + rank)
        model(torch.randint(0, 20, (6, 2 + rank))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def _ddp_with_uneven_inputs(rank: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for n in range(2 + 3 * rank):
            torch.manual_seed(10 * n + rank)
            model(torch.randn(4, _WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def _fsdp(rank: int) -> list[torch.Tensor]:
    model = _model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    losses = _steps(model, torch.optim.AdamW(model.parameters()), rank)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [*losses, *_whole([*model.parameters(), norm])]


def _fsdp_in_bfloat16(rank: int) -> list[torch.Tensor]:
    model = _model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)
    return [*_steps(model, torch.optim.SGD(model.parameters(), 0.1), rank), *_whole(model.parameters())]


def _zero(rank: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    losses = _steps(model, optimizer, rank)
    optimizer.consolidate_state_dict(to=0)
    state = [one["exp_avg"] for one in optimizer.state_dict()["state"].values()] if rank == 0 else []
    return [*losses, *model.parameters(), *state]


def _dtensor(rank: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(1 + rank)
    rows = distribute_tensor(torch.randn(7, 6), mesh, [Shard(0)])  # of rank 0; pieces are uneven
    columns = rows.redistribute(placements=[Shard(1)])
    product = columns @ distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])  # partial sums
    torch.manual_seed(1)
    pair = nn.Sequential(nn.Linear(_WIDTH, 32), nn.GELU(), nn.Linear(32, _WIDTH))
    parallelize_module(pair, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = _steps(pair, torch.optim.SGD(pair.parameters(), 0.1), 0)
    whole = [rows, columns, product.redistribute(placements=[Replicate()]), *pair.parameters()]
    return [*losses, *_whole(whole), product.redistribute(placements=[Shard(0)]).to_local()]


def _pipelines(rank: int) -> list[torch.Tensor]:
    found = []
    for kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        torch.manual_seed(1)
        layers = list(_model())
        several = kind is ScheduleInterleaved1F1B
        cuts = 4 if several else 2
        per = 4 // cuts
        parts = [nn.Sequential(*layers[n * per : (n + 1) * per + (n == cuts - 1)]) for n in range(cuts)]
        stages = [PipelineStage(parts[n], n, cuts, torch.device("cpu")) for n in range(rank, cuts, 2)]
        schedule: Any = kind(stages if several else stages[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(2)
        x, target = torch.randn(8, _WIDTH), torch.randn(8, 5)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)
        found += [*losses, *(one.grad for n in range(rank, cuts, 2) for one in parts[n].parameters())]
    return found


def _functional(rank: int) -> list[torch.Tensor]:
    group = dist.group.WORLD
    torch.manual_seed(rank)
    x = torch.randn(6, 4, requires_grad=True)
    gathered = functional.all_gather_single_autograd(x, 1, group)
    scattered = functional.reduce_scatter_single_autograd(gathered.exp(), "sum", 0, group)
    splits = [1, 2] if rank == 0 else [2, 1]  # what is sent, and as much comes back
    exchanged = functional.all_to_all_single_autograd(scattered.contiguous(), splits, splits, group)
    exchanged.square().sum().backward()
    results = [gathered, scattered, exchanged, functional.all_reduce(x.detach(), "avg", group)]
    results += [functional.permute_tensor(x.detach().view(-1), [1, 0], group), x.grad]
    return [one.wait() if isinstance(one, functional.AsyncCollectiveTensor) else one for one in results]


def _checkpoint(directory: Path) -> list[torch.Tensor]:
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(fully_shard(_model()))
    saved, loaded = models
    dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=directory / dist.get_backend())
    state = {"model": get_model_state_dict(loaded)}
    dcp.load(state, checkpoint_id=directory / dist.get_backend())
    set_model_state_dict(loaded, state["model"])
    assert all(map(torch.equal, _whole(saved.parameters()), _whole(loaded.parameters())))
    return _whole(loaded.parameters())


@every_implementation
@ranks(2, backend="gloo")
def test_ddp(world, implementation, tmp_path):
    runs = (_ddp, _ddp_with_batch_norm_and_hook, _ddp_with_power_sgd, _ddp_with_uneven_inputs, _zero)
    _same_as_gloo(world, implementation, tmp_path, *runs)


@needs_native
@pytest.mark.usefixtures("native_part")
@ranks(2, backend="gloo")
def test_ddp_with_sparse_gradients(world, tmp_path):
    _same_as_gloo(world, Implementation.NATIVE, tmp_path, _ddp_with_sparse_gradients)


@every_implementation
@ranks(2, backend="gloo")
def test_fsdp(world, implementation, tmp_path):
    _same_as_gloo(world, implementation, tmp_path, _fsdp, _fsdp_in_bfloat16)


@every_implementation
@ranks(2, backend="gloo")
def test_checkpoints(world, implementation, tmp_path):
    _same_as_gloo(world, implementation, tmp_path, lambda rank: _checkpoint(tmp_path))


@every_implementation
@ranks(2, backend="gloo")
def test_dtensor(world, implementation, tmp_path):
    _same_as_gloo(world, implementation, tmp_path, _dtensor, _functional)


@every_implementation
@ranks(2, backend="gloo")
def test_pipelines(world, implementation, tmp_path):
    _same_as_gloo(world, implementation, tmp_path, _pipelines)
