"""What the other sections of a recipe may say once parameters are on servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.documents.complaints import complaint
from paceline.errors import RecipeError
from paceline.exchange.job import Mode
from paceline.plan import Axis
from paceline.schedule import Kind
from paceline.train.servers.recipe.rules import ONLY_HERE, rule_of

if TYPE_CHECKING:
    from paceline.train.recipe import Recipe
    from paceline.train.servers.recipe.section import ServerSection


def check_servers(recipe: Recipe) -> None:
    """Hold a recipe to what servers can do.

    Raises:
        PydanticCustomError: something does not go together; it says what would.
    """
    server, optimizer = recipe.server, recipe.optimizer
    if server is None or server.average_every is not None:
        if optimizer.name in ONLY_HERE:
            raise complaint(
                f"{optimizer.name} is a rule of parameter servers and not in torch.optim; add a section `server`, "
                "without average_every, or choose another optimizer.",
                "optimizer.name",
            )
    else:
        try:
            rule_of(optimizer.name, optimizer.options)
        except RecipeError as error:
            raise complaint(str(error), "optimizer.name") from error
    if server is not None:
        if server.deployment == "groups" and optimizer.name == "FTRL":
            raise complaint(
                "groups of servers add differences to each other's parameters, which under FTRL follow from its state: "
                "choose another optimizer, or deployment: separate.",
                "optimizer.name",
            )
        _check_step(recipe, server)
        _check_rest(recipe, server)


def _check_step(recipe: Recipe, server: ServerSection) -> None:
    settings, pieces = recipe.train, server.tasks_of_a_step
    unit = pieces * settings.micro_batches * recipe.mesh.batch_parts
    if settings.batch % unit:
        raise complaint(
            f"train.batch is {settings.batch}; it is divided into {pieces} tasks (server.pieces), those into "
            f"{settings.micro_batches} micro-batches and these over {recipe.mesh.batch_parts} parts of the mesh: take "
            f"a multiple of {unit}.",
            "train.batch",
        )
    every = server.average_every or 1
    if settings.steps is not None and settings.steps % every:
        raise complaint(
            f"train.steps is {settings.steps}; servers average every {every} steps, so it is a multiple of that.",
            "train.steps",
        )


def applies_means(recipe: Recipe) -> bool:
    """Whether what servers apply is a mean of several tasks' gradients."""
    server = recipe.server
    if server is None or server.average_every is not None or server.is_hogwild:
        return False
    tasks = server.tasks_of_a_step // (server.groups if server.deployment == "groups" else 1)
    return tasks > 1 and Mode.BSP in _modes(server)


def _modes(server: ServerSection) -> set[Mode]:
    """Return how far tables may drift apart."""
    return {
        server.dense_consistency.mode,
        server.sparse_consistency.mode if server.tables else server.dense_consistency.mode,
    }


def _check_rest(recipe: Recipe, server: ServerSection) -> None:
    if recipe.train.clip is not None and applies_means(recipe) and len(_modes(server)) > 1:
        raise complaint(
            "train.clip is for one gradient, and here there are several: dense parameters and sparse tables under "
            f"'{server.consistency}' and '{server.sparse}' are updated at different times, of different tasks. Take "
            "one consistency for both, or server.pieces: 1, or leave train.clip out.",
            "train.clip",
        )
    if recipe.train.trace:
        raise complaint(
            "train.trace is of steps whose ranks go together, and workers of servers do not; leave it out. What a "
            "worker's tasks spent on reads, computing and pushes is in worker-N.jsonl, with the run's exchange.",
            "train.trace",
        )
    schedule = recipe.schedule
    rules = {recipe.optimizer.name, *(table.optimizer.name for table in server.tables.values() if table.optimizer)}
    if (schedule.name != "constant" or schedule.warmup) and "FTRL" in rules:
        raise complaint(
            "the values of FTRL follow from its learning rate, which so cannot change while it trains: all would jump, "
            "those of rows without a gradient too. Its steps become smaller by themselves, by the gradients of each "
            "element. Leave the schedule constant without warmup, or choose another optimizer.",
            "schedule.name",
        )
    pipeline = recipe.plan_section.pipeline.schedule
    if Axis.PP.value in recipe.mesh.names and not pipeline.endswith(".json") and Kind.of(pipeline).is_asynchronous:
        raise complaint(
            f"stages under the schedule '{pipeline}' update themselves, and servers are to do that: take a synchronous "
            "one, such as 1f1b.",
            "plan.pipeline.schedule",
        )
    validation = recipe.train.validation
    split = [axis.value for axis in (Axis.FSDP, Axis.TP, Axis.PP, Axis.AUTO) if axis.value in recipe.mesh.names]
    if recipe.launch == "processes" and split and validation is not None and validation.scores:
        raise complaint(
            f"train.validate.scores calls the whole module in one process, and '{split[0]}' splits it: add launch: "
            "inprocess, take dp, or leave scores out.",
            "train.validate.scores",
        )
    if server.is_hogwild and recipe.mesh.size > 1:
        raise complaint("workers of hogwild are of one rank each; leave the mesh serial.", "mesh")
