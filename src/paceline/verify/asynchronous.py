"""Verifying an asynchronous schedule: its ranks train, and a serial replay of what they logged must be equal.

There is no serial run that it equals: stages read old weights. But what they read is defined, so the replay is equal
bit by bit; where stages are split over further axes, within the tolerance of the type, as their sums have other orders.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.plan import Plan
from paceline.program.capture import Batch
from paceline.program.program import Program
from paceline.runtime.pipeline.asynchronous import Log, Made
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.runtime.pipeline.pieces import count_for, micro_batch_seeds, micro_batches, part_of, samples_of
from paceline.schedule import Kind as ScheduleKind
from paceline.verify.compare import Kind, gap, largest_gap, loss_name
from paceline.verify.replay import Replay
from paceline.verify.serial import Piece, Trajectory
from paceline.verify.steps import MOMENTUM
from paceline.verify.subject import SEED, dense_copy

FINAL = "final.safetensors"


@dataclass(frozen=True)
class _Portion:
    """This process's part of a micro-batch."""

    batch: Batch
    samples: int
    whole: bool = False


@dataclass(frozen=True)
class Trained:
    """What the ranks of one process did: the loss of each batch, the stages' parameters, and the log.

    `threads` it computed with: how many there are decides in which order kernels add up.
    """

    threads: int
    losses: tuple[float, ...]
    stages: tuple[tuple[str, ...], ...]
    log: Log

    def save(self, file: Path) -> None:
        """Write it as JSON."""
        log = [made._asdict() for made in self.log]
        file.write_text(json.dumps({**asdict(self), "log": log}), encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Trained:
        """Read what `save` wrote."""
        values: Any = json.loads(file.read_text(encoding="utf-8"))
        log = [
            Made(
                made["rank"], made["stage"], made["version"], tuple((index, version) for index, version in made["read"])
            )
            for made in values["log"]
        ]
        return cls(values["threads"], tuple(values["losses"]), tuple(map(tuple, values["stages"])), log)


def pieces_of(batches: list[Batch], plan: Plan) -> list[list[Batch]]:
    """Return the micro-batches of each batch."""
    parts = plan.mesh.batch_parts
    return [micro_batches(batch, count_for(batch, plan, parts), parts) for batch in batches]


def seeds_of(pieces: list[list[Batch]]) -> list[list[int]]:
    """Return the seeds of the micro-batches of each batch."""
    return [micro_batch_seeds(SEED + number, len(found)) for number, found in enumerate(pieces)]


def train(module: PipelinedModule, batches: list[Batch], rate: float, final: Path) -> Trained:
    """Train on batches that flow into each other; rank 0 writes the whole state. A collective."""
    pieces = pieces_of(batches, module.plan)
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=MOMENTUM)
    shard = module.input_shard
    result = module.train_batches(
        [[_Portion(part_of(piece, *shard), samples_of(piece)) for piece in found] for found in pieces],
        seeds_of(pieces),
        lambda _stage, _version: optimizer.step(),
    )
    state = module.full_state_dict()
    if 0 in module.ranks:
        save_file({name: dense_copy(tensor) for name, tensor in state.items()}, final)
    return Trained(
        torch.get_num_threads(), tuple(batch.loss for batch in result.batches), module.trained_by_stage, result.log
    )


def replay(
    program_of: Callable[[Batch], Program],
    module: nn.Module,
    batches: list[Batch],
    plan: Plan,
    trained: list[Trained],
    rate: float,
    weight_of: Callable[[Batch], float],
) -> Trajectory:
    """Return what the logs of all ranks lead to, computed serially; its losses are those of batches."""
    pieces = pieces_of(batches, plan)
    seeds = seeds_of(pieces)
    flat = [
        Piece(piece, seed, share)
        for found, of_batch in zip(pieces, seeds, strict=True)
        for piece, seed, share in zip(found, of_batch, _shares(found, plan, program_of, weight_of), strict=True)
    ]
    log = list(dict.fromkeys(made for part in trained for made in part.log))  # ranks of one stage log alike
    with _threads(trained[0].threads):
        run = Replay(
            lambda piece: program_of(piece.batch),
            module,
            trained[0].stages,
            log,
            lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM),
        ).run(flat)
    losses, first = [], 0
    for found in pieces:
        mine = range(first, first + len(found))
        total = sum(flat[index].share for index in mine)
        losses.append(sum(flat[index].share * run.losses[index] for index in mine if flat[index].share) / total)
        first += len(found)
    return Trajectory(tuple(losses), {}, run.parameters, run.buffers, rate)


def gaps_from(final: Path, losses: tuple[float, ...], replayed: Trajectory) -> dict[tuple[Kind, str], float]:
    """Return the largest difference of each parameter, buffer and loss from the replay."""
    state: dict[str, Tensor] = load_file(final)
    found = {(Kind.PARAMETER, name): largest_gap(state[name], value) for name, value in replayed.parameters.items()}
    found |= {
        (Kind.BUFFER, name): largest_gap(state[name], value)
        for name, value in replayed.buffers.items()
        if name in state
    }
    pairs = enumerate(zip(losses, replayed.losses, strict=True))
    return found | {(Kind.LOSS, loss_name(number)): gap(a, b) for number, (a, b) in pairs}


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _shares(
    pieces: list[Batch], plan: Plan, program_of: Callable[[Batch], Program], weight_of: Callable[[Batch], float]
) -> list[float]:
    """What each micro-batch of a batch counts by in an update, in the numbers that the ranks use."""
    if ScheduleKind.of(plan.pipeline.schedule) is ScheduleKind.PIPEDREAM or len(pieces) == 1:
        return [1.0] * len(pieces)
    weights = [weight_of(piece) for piece in pieces]
    counted = any(program_of(piece).weight is None for piece in pieces)
    return weights if counted else [weight / sum(weights) for weight in weights]
