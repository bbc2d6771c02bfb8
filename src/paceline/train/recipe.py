"""Recipes: the YAML a user trains from, checked once at this edge and frozen from here on.

A recipe names everything a run needs and builds nothing: `train.run` does. Files named in it are relative to the
recipe's own folder and made absolute here, so a recipe written with `to_yaml` works from anywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from torch import nn

from paceline.documents.complaints import complaint, complaints
from paceline.documents.source import read_source
from paceline.errors import PlacementError, PlanError, RecipeError, ScheduleError, nearest
from paceline.placement.placements import Partial, parse_placement
from paceline.plan import Mesh, Pin, PipelinePlan, Plan, Recompute
from paceline.runtime.fallback_kind import Fallback
from paceline.schedule import Kind
from paceline.train.data.config import DataConfig
from paceline.train.optim import build_optimizer, build_schedule
from paceline.train.sections import Count, CountOrZero, Flag, OpenSection, Section
from paceline.train.servers.recipe.checks import check_servers
from paceline.train.servers.recipe.rules import ONLY_HERE
from paceline.train.servers.recipe.section import ServerSection


def _read_factory(text: str, info: ValidationInfo) -> str:
    """Make the file of a FACTORY absolute; what is in it is looked at when it is imported."""
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise complaint(f"cannot read '{text}'; write 'package.module:callable' or 'path/to/file.py:callable'.")
    if not place.endswith(".py"):
        return text
    folder: Path = (info.context or {}).get("folder", Path.cwd())
    path = (folder / Path(place).expanduser()).resolve()
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        there = f" There is: {', '.join(beside)}." if beside else ""
        raise complaint(f"'{text}': there is no file {path}.{nearest(path.name, beside)}{there}")
    return f"{path}:{name}"


def _read_mesh(value: Any) -> Mesh:
    if isinstance(value, Mesh):
        return value
    if not isinstance(value, str):
        raise complaint(f"mesh is {value!r}; write axis=size pairs such as 'dp=2,fsdp=4', or 'serial'.")
    try:
        return Mesh.parse(value)
    except PlanError as error:
        raise complaint(str(error)) from error


def _read_pins(value: Any) -> dict[str, str]:
    """Return the placements of each pattern as text; `{tp: S0}` and `tp=S0` are the same."""
    if not isinstance(value, dict):
        raise complaint(f"pins are {value!r}; write a placement for each pattern, as in {{'*.qkv.weight': tp=S0/3}}.")
    found = {}
    for pattern, where in value.items():
        text = ",".join(f"{axis}={at}" for axis, at in where.items()) if isinstance(where, dict) else where
        try:
            pin = Pin.parse(f"{pattern}:{text}")
            placements = list(map(parse_placement, pin.placements.values()))
        except (PlanError, PlacementError) as error:
            raise complaint(str(error), (str(pattern),)) from error
        if any(isinstance(placement, Partial) for placement in placements):
            raise complaint(
                f"the pin '{pin}' makes a parameter a partial sum; it is whole (R) or split (S0, S0/3).", (pin.pattern,)
            )
        found[pin.pattern] = pin.where
    return found


Factory = Annotated[str, AfterValidator(_read_factory)]
MeshText = Annotated[Mesh, PlainValidator(_read_mesh), PlainSerializer(str, return_type=str)]
Pins = Annotated[dict[str, str], BeforeValidator(_read_pins)]


class ModelSection(Section):
    """The user's module: a FACTORY that returns `(module, batch)`, and its keyword arguments."""

    factory: Factory
    args: dict[str, Any] = Field(default_factory=dict)


class PipelineSection(Section):
    """How micro-batches flow through stages, `train.micro_batches` of them; see `paceline.plan.PipelinePlan`."""

    schedule: str = PipelinePlan.schedule
    chunks: Count = PipelinePlan.chunks
    boundaries: tuple[str, ...] = ()
    wire: Literal["exact", "bfloat16", "int8"] = "exact"
    recompute: tuple[CountOrZero, ...] = ()
    replicas: tuple[Count, ...] = ()
    vertical_sync: Flag = False


class PlanSection(Section):
    """How the plan runs; see `paceline.plan.Plan`, whose defaults these are."""

    zero_stage: Literal[2, 3] = 3
    bucket_bytes: CountOrZero = Plan.bucket_bytes
    compile: Flag = Plan.compile
    pins: Pins = Field(default_factory=dict)
    memory_bytes: Count | None = None
    recompute: Literal["none", "attention", "blocks"] = "none"
    pipeline: PipelineSection = PipelineSection()


class ValidateSection(Section):
    """Validate after every `every` steps and at the end, on at most `batches` batches (all of the data when absent).

    Attributes:
        scores: a method of the module that tells two classes apart; see `classification.Scorer`.
        labels: the tensor of the batch that holds the classes.
    """

    every: Count
    batches: Count | None = None
    scores: str | None = None
    labels: str = "labels"


class TrainSection(Section):
    """Length of the run and shape of a step.

    Attributes:
        steps: optimizer steps; either this or `epochs`.
        epochs: passes over the training data.
        batch: samples of one optimizer step, over all ranks and micro-batches.
        micro_batches: pieces a step's batch is computed in, one after the other.
        clip: largest global norm of the gradient.
        log_every: steps between lines of the log.
        trace: steps, counted from 1, whose parts each rank notes in `traces/rank-N.json` of the run.
        validation: `validate` in the file.
        nan: what a NaN or infinite loss does.
        loss_weight: what a micro-batch's mean loss counts by: `auto`, the number of valid targets it is a mean over;
            `equal`, all micro-batches alike.
        predict: say before the run what a step should take, and compare at its end.
    """

    steps: Count | None = None
    epochs: Count | None = None
    batch: Count
    micro_batches: Count = 1
    clip: Annotated[float, Field(gt=0)] | None = None
    log_every: Count = 10
    trace: tuple[Count, ...] = ()
    validation: ValidateSection | None = Field(default=None, alias="validate")
    nan: Literal["stop"] = "stop"
    loss_weight: Literal["auto", "equal"] = "auto"
    predict: Flag = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps is None and self.epochs is None:
            raise complaint("'train.steps' or 'train.epochs' is missing; one says how long to train.", "steps")
        if self.steps is not None and self.epochs is not None:
            raise complaint("'train.steps' and 'train.epochs' are both given; set one of them to null.", "epochs")
        if self.batch % self.micro_batches:
            raise complaint(
                f"train.batch is {self.batch}, which {self.micro_batches} micro-batches do not divide; "
                f"these would: {_listed(_divisors(self.batch))}.",
                "micro_batches",
            )
        return self


class OptimizerSection(OpenSection):
    """A class of `torch.optim` by name, and its arguments; `decay_vectors` decays biases and norms too."""

    name: str = "AdamW"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    decay_vectors: Flag = False

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the optimizer's class, the learning rate among them."""
        return {"lr": self.lr, **super().options}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name in ONLY_HERE:  # the recipe looks whether there are servers
            return self
        try:
            build_optimizer(_trifle(), self.name, self.options)
        except RecipeError as error:
            raise complaint(str(error), _culprit(torch.optim, self.name, super().options, str(error))) from error
        return self


class ScheduleSection(OpenSection):
    """A learning-rate schedule.

    Attributes:
        name: `constant`, `linear`, `cosine`, or a class of `torch.optim.lr_scheduler`, to which further keys go.
        warmup: steps over which the rate first rises linearly to its peak.
        floor: where `linear` and `cosine` end, as a fraction of the peak.
    """

    name: str = "constant"
    warmup: CountOrZero = 0
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        optimizer = torch.optim.SGD(_trifle().parameters(), lr=1.0)
        try:
            build_schedule(
                optimizer,
                self.name,
                steps=self.warmup + 1,
                warmup=self.warmup,
                floor=self.floor,
                options=self.options,
            )
        except RecipeError as error:
            raise complaint(
                str(error), _culprit(torch.optim.lr_scheduler, self.name, self.options, str(error))
            ) from error
        return self


class CheckpointSection(Section):
    """Save after every `every` steps (only at the end when absent), and keep the last `keep` checkpoints."""

    every: Count | None = None
    keep: Count = 2


class SampleSection(Section):
    """What the trained model shows at the end: a FACTORY called with the model, and what to ask it for."""

    factory: Factory
    prompt: str = ""
    length: Count = 200
    temperature: Annotated[float, Field(ge=0)] = 0.8


class Recipe(Section):
    """Everything a training run needs.

    Attributes:
        compile: a shorter way to write `plan.compile`, over which it wins.
        plan_section: `plan` in the file; `Recipe.plan()` is the plan it makes with the mesh.
        precision: type of the computation; `bfloat16` is autocast over float32 parameters.
        fallback: what runs the module should it turn out impossible to capture; see `paceline.parallelize`.
        server: parameters are on servers, and replicas of the mesh are their workers.
    """

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    model: ModelSection
    data: DataConfig
    mesh: MeshText = Mesh()
    plan_section: PlanSection = Field(default_factory=PlanSection, alias="plan")
    compile: Flag | None = None
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    seed: CountOrZero = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "shm", "gloo"] = "auto"
    launch: Literal["processes", "inprocess"] = "processes"
    fallback: Literal["none", "ddp", "fsdp2"] = "none"
    train: TrainSection
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    server: ServerSection | None = None
    sample: SampleSection | None = None
    callbacks: tuple[Factory, ...] = ()

    def plan(self) -> Plan:
        """Return the plan of the run."""
        section = self.plan_section
        compiled = section.compile if self.compile is None else self.compile
        return Plan(
            self.mesh,
            zero_stage=section.zero_stage,
            bucket_bytes=section.bucket_bytes,
            compile=compiled,
            pins=tuple(Pin.parse(f"{pattern}:{where}") for pattern, where in section.pins.items()),
            memory_bytes=section.memory_bytes,
            recompute=Recompute.of(section.recompute),
            # What the loader yields is a micro-batch already.
            pipeline=PipelinePlan(micro_batches=1, **dict(section.pipeline)),
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        piece = self.train.batch // self.train.micro_batches
        parts = self.mesh.batch_parts
        if piece % parts:
            nearby = sorted({max(1, piece // parts) * parts, (piece // parts + 1) * parts})
            raise complaint(
                f"mesh '{self.mesh}' splits the batch into {parts} parts, which do not divide the {piece} samples of a "
                f"micro-batch (train.batch / train.micro_batches). Parts that would: {_listed(_divisors(piece))}; "
                f"batches that would: {_listed(n * self.train.micro_batches for n in nearby)}.",
                "mesh",
            )
        try:
            schedule = self.plan_section.pipeline.schedule
            asynchronous = not schedule.endswith(".json") and Kind.of(schedule).is_asynchronous
        except ScheduleError as error:
            raise complaint(str(error), "plan.pipeline.schedule") from error
        if asynchronous and self.train.clip is not None:
            raise complaint(
                f"train.clip needs the gradient of the whole module, which the schedule '{schedule}' never has: stages "
                "update at different times. Leave train.clip out, or take a synchronous schedule such as 1f1b.",
                "train.clip",
            )
        for pin in self.plan_section.pins.items():
            try:
                Plan(self.mesh, pins=(Pin.parse(":".join(pin)),))
            except PlanError as error:
                raise complaint(str(error), ("plan", "pins", pin[0])) from error
        if self.fallback != "none":
            try:
                Fallback.parse(self.fallback).check(self.mesh, in_process=self.launch == "inprocess")
            except PlanError as error:
                raise complaint(str(error), "fallback") from error
        if self.train.steps is not None and self.schedule.warmup > self.train.steps:
            raise complaint(
                f"schedule.warmup is {self.schedule.warmup} steps in a run of {self.train.steps}; it is at most that.",
                "schedule.warmup",
            )
        check_servers(self)
        return self


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: the YAML file.
        overrides: `a.b=value` assignments, applied in order over the file.

    Raises:
        RecipeError: the recipe cannot be read or is refused; a line for each fault says where it was written.
    """
    path = Path(path)
    source = read_source(path)
    source.override(overrides)
    try:
        return Recipe.model_validate(source.values, context={"folder": path.resolve().parent})
    except ValidationError as error:
        raise RecipeError("\n".join(complaints(error, Recipe, source))) from error


def to_yaml(recipe: Recipe) -> str:
    """Return the recipe with all its defaults written out; `load_recipe` reads it back as the same recipe."""
    values = recipe.model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def _trifle() -> nn.Module:
    """The smallest module an optimizer can be built for, to have its arguments checked before the run."""
    return nn.Linear(1, 1)


def _culprit(library: Any, name: str, options: dict[str, Any], message: str) -> str | None:
    """Return the key that `message` is about: an option the class does not take, or the name itself."""
    factory = getattr(library, name, None)
    known = inspect.signature(factory).parameters if callable(factory) else {}
    if callable(factory) or name in ("constant", "linear", "cosine"):
        for key in options:
            if key not in known:
                return key
    return "name" if f"'{name}'" in message else None


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
