"""The parts of a worker, built as a recipe says: the same in every worker, and in a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from paceline.errors import ExchangeError, RecipeError
from paceline.exchange.job import Job
from paceline.runtime.interface import ParallelModule
from paceline.runtime.module import parallelize
from paceline.train.classification import Scorer
from paceline.train.data import Loader, MicroBatch, Source, open_source
from paceline.train.data.order import Cut
from paceline.train.model import InFloat64, build_module
from paceline.train.optim import build_optimizer
from paceline.train.recipe import Recipe
from paceline.train.servers.recipe.job import groups_of, steps_of
from paceline.train.servers.recipe.rates import factors_of
from paceline.train.servers.worker.averaging import LocalSteps
from paceline.train.servers.worker.computer import Computer
from paceline.train.servers.worker.replica import Replica, plain, some_of
from paceline.train.servers.worker.samples import TaskSamples
from paceline.train.servers.worker.working_set import WorkingSet


@dataclass(frozen=True)
class Parts:
    """What a worker is made of.

    Attributes:
        module: the user's on the ranks of the mesh.
        computer: computes gradients with it.
        portions: returns the samples of a task.
        validation: returns held-out data, batch by batch.
        buffers: names of the module's buffers that its state has; servers do not keep them.
    """

    module: ParallelModule
    computer: Computer
    portions: Callable[[int], Sequence[MicroBatch]]
    validation: Callable[[], Iterable[MicroBatch]]
    buffers: frozenset[str] = frozenset()

    def state_of_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers, whole; a collective."""
        if not self.buffers:
            return {}
        state = self.module.full_state_dict()
        return {name: tensor.contiguous() for name, tensor in state.items() if name in self.buffers}


def open_sources(recipe: Recipe) -> tuple[Source, Source | None]:
    """Return the data to train on, and that held out, in the recipe's precision."""
    source, held_out = open_source(recipe.data)
    if recipe.precision == "float64":
        return InFloat64(source), InFloat64(held_out) if held_out is not None else None
    return source, held_out


def build_parts(recipe: Recipe, job: Job, device: torch.device, group: int = 0) -> Parts:
    """Build a worker; the first step is planned here.

    Args:
        recipe: with a section `server`.
        job: which servers keep, of one group.
        device: where it computes.
        group: of workers, from 0; each has its own part of every step.

    Raises:
        PacelineError: something in the recipe cannot be built.
    """
    server = recipe.server
    if server is None:
        raise ExchangeError("the recipe has no section `server`.")
    settings, parts = recipe.train, recipe.mesh.batch_parts
    source, held_out = open_sources(recipe)

    def samples(shard: tuple[int, int], divisor: int, micro_batches: int) -> TaskSamples:
        pieces = server.tasks_of_a_step
        group_size = pieces // groups_of(server)
        return TaskSamples(
            source,
            settings.batch,
            pieces,
            micro_batches,
            seed=recipe.seed,
            shard=shard,
            divisor=divisor,
            first=group * group_size,
            group=group_size,
        )

    user_module = build_module(recipe).to(device)
    buffers = {name for name, _ in user_module.named_buffers(remove_duplicate=False)} & user_module.state_dict().keys()
    task = settings.batch // server.tasks_of_a_step  # samples
    cut = Cut(task, task, settings.micro_batches, parts)
    example = samples((0, 1), 1, 1 if server.tables else settings.micro_batches).example()
    working_set = None
    if server.tables:  # of all rows of a task, whatever it is computed in
        working_set = WorkingSet(user_module, {name: table.keys for name, table in server.tables.items()}, example)
        example = some_of(plain(working_set.take(example).batch), slice(task // settings.micro_batches))
    module = parallelize(
        user_module,
        example,
        recipe.plan(),
        devices=[device] if recipe.launch == "inprocess" else None,
        autocast=torch.bfloat16 if recipe.precision == "bfloat16" else None,
        fallback=None if recipe.fallback == "none" else recipe.fallback,
    )
    equal = settings.loss_weight == "equal"
    section = settings.validation
    scored = section is not None and section.scores is not None
    scorer = None
    if section is not None and section.scores is not None and 0 in module.ranks:
        scorer = Scorer(user_module, section.scores, section.labels)
    whole = working_set is not None or (scored and not module.peers.alone)  # what keys and scores are of
    given: tuple[tuple[int, int], int] = ((0, 1), 1) if whole else (module.input_shard, parts)
    replica = Replica(
        module,
        user_module,
        job,
        seed=recipe.seed,
        equal=equal,
        working_set=working_set,
        scorer=scorer,
        cut=cut if whole else None,
        clip=settings.clip if job.clip is None else None,  # else servers clip
    )
    read = samples(*given, 1 if whole else settings.micro_batches)
    computer: Computer = replica
    if server.average_every is not None:
        optimizer = build_optimizer(
            module, recipe.optimizer.name, recipe.optimizer.options, decay_vectors=recipe.optimizer.decay_vectors
        )
        factors = factors_of(recipe, steps_of(recipe, len(source)))
        computer = LocalSteps(replica, optimizer, server.average_every, read.portions, factors)
    return Parts(
        module,
        computer,
        read.portions if computer is replica else _nothing,
        _validation(recipe, held_out, *given),
        frozenset(buffers),
    )


def check_validation(recipe: Recipe, held_out: Source | None) -> None:
    """Hold a recipe that asks for validation to data for it.

    Raises:
        RecipeError: nothing is set apart.
    """
    if recipe.train.validation is not None and held_out is None:
        raise RecipeError(
            "train.validate asks for validation, but data.validation is 0: nothing was set apart. Give it a "
            "fraction, such as 0.05, or leave out train.validate."
        )


def _validation(
    recipe: Recipe, held_out: Source | None, shard: tuple[int, int], divisor: int
) -> Callable[[], Iterable[MicroBatch]]:
    """Return what gives the validation batches anew: of the size of a micro-batch, and the same ones each time."""
    section = recipe.train.validation
    if section is None or held_out is None:
        return tuple
    assert recipe.server is not None
    batch = recipe.train.batch // (recipe.server.tasks_of_a_step * recipe.train.micro_batches)
    loader = Loader(held_out, batch, shard=shard, seed=recipe.seed, divisor=divisor)
    return lambda: (part for step in islice(loader.epoch(), section.batches) for part in step.micro_batches)


def _nothing(task: int) -> Sequence[MicroBatch]:
    """The samples of a task whose computer reads them itself."""
    return ()


def named_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values that servers begin with, whole and on the CPU."""
    return {name: p.detach().cpu() for name, p in module.named_parameters() if p.requires_grad}
