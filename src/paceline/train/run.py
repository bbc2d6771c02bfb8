"""`paceline train`, as every rank runs it: from a recipe to a run directory.

Builds what a recipe names, in order, and hands it to the loop; each part lives in a room of its own.
"""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.optim import Optimizer

from paceline.errors import RecipeError
from paceline.planner.plan_file import PlanFile
from paceline.program.factory import load_factory
from paceline.runtime.job.rendezvous import World, join
from paceline.runtime.module import ParallelModule, PlacedModule, parallelize
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.simulator.placed.measured import handed_bytes
from paceline.simulator.placed.workspace import MeasuredWorkspaces
from paceline.train.asynchronous import AsynchronousTrainer, VersionLog
from paceline.train.callbacks import Callback, EndReport
from paceline.train.checkpoint import Checkpointer, export_safetensors
from paceline.train.classification import Scorer
from paceline.train.data import Batch, Loader, MicroBatch, Source, open_source
from paceline.train.explain import circumstances_of
from paceline.train.loop import FitSettings, Trainer
from paceline.train.metrics import LogLines, MetricsFile, TensorBoard
from paceline.train.model import InFloat64, build_module
from paceline.train.optim import build_optimizer, build_schedule
from paceline.train.prediction import PredictionTable, prediction_of
from paceline.train.progress import progress
from paceline.train.recipe import Recipe, to_yaml
from paceline.train.rundir import RunDirectory, write_whole
from paceline.train.startup import FirstStep, Speaker, next_steps, resume_command
from paceline.train.tracing import TraceFile


def train(recipe: Recipe, out: Path, resume: bool = False) -> EndReport:
    """Train as the rank that the environment names; a collective over all ranks of the recipe's mesh.

    Args:
        recipe: what to train.
        out: the run directory; all ranks see it.
        resume: go on from its newest checkpoint.

    Raises:
        SystemExit: a signal ended the run early, with a checkpoint; 130 for Ctrl-C, 143 for SIGTERM.
        PacelineError: bad input, or the training failed.
    """
    run = RunDirectory(out)
    with join(recipe.device, recipe.backend) as world, run.logging(world.rank) as log:
        # Rank 0 speaks for all; the others keep to their logs.
        speaker = Speaker(Console(quiet=world.rank != 0), log)
        try:
            report = _Run(recipe, run, world, speaker).train(resume)
        except Exception as error:
            log.error("ended by %s: %s", type(error).__name__, error)
            raise
    if report.signal is not None:
        raise SystemExit(128 + report.signal)
    return report


class _Run:
    """The parts of a run on one rank."""

    def __init__(self, recipe: Recipe, run: RunDirectory, world: World, speaker: Speaker) -> None:
        self.recipe = recipe
        self.run = run
        self.world = world
        self.speaker = speaker
        self.leads = world.rank == 0

    def train(self, resume: bool) -> EndReport:
        recipe, run = self.recipe, self.run
        if self.leads:
            run.root.mkdir(parents=True, exist_ok=True)
            write_whole(run.config, to_yaml(recipe))
        if self.world.size > 1:
            self.speaker.say(f"between ranks: {self.world.backend.words}")
        with self.speaker.phase("data"):
            source, held_out = self._sources()
            example = Loader(source, recipe.train.batch, recipe.train.micro_batches).example()
        with self.speaker.phase("model"):
            user_module = build_module(recipe).to(self.world.device)
        with self.speaker.phase("capture and placement"):
            module = parallelize(
                user_module,
                example,
                recipe.plan(),
                devices=_all_devices(recipe) if recipe.launch == "inprocess" else None,
                autocast=torch.bfloat16 if recipe.precision == "bfloat16" else None,
                fallback=None if recipe.fallback == "none" else recipe.fallback,
            )
        if self.leads:
            self.speaker.say(_how_planned(module, recipe.fallback))
            write_whole(run.plan, _plan_text(module, self.world, recipe))
        comparison = self._comparison(module, example)
        with self.speaker.phase("optimizer"):
            trainer = self._trainer(module, source, held_out, comparison)
            if resume:
                trainer.resume()
        report = trainer.fit()
        if report.signal is None:
            self._finish(module, report)
        else:
            name = signal.Signals(report.signal).name
            self.speaker.say(f"{name}: stopped after step {report.step} of {report.steps}, and saved it. To go on:")
            self.speaker.say(f"  {resume_command(run)}")
        return report

    def _sources(self) -> tuple[Source, Source | None]:
        source, held_out = open_source(self.recipe.data)
        if self.recipe.precision == "float64":
            return InFloat64(source), InFloat64(held_out) if held_out is not None else None
        return source, held_out

    def _comparison(self, module: ParallelModule, example: Batch) -> Callable[[Optimizer], list[Callback]]:
        """Return what makes the callback that tells how steps compared with their prediction, which is made now."""
        recipe = self.recipe
        if not recipe.train.predict:
            return lambda optimizer: []
        with self.speaker.phase("prediction"):
            on_cpu = self.world.device.type == "cpu"
            given = replace(circumstances_of(recipe), workspaces=MeasuredWorkspaces() if on_cpu else None)
            prediction, reason = prediction_of(module, example, given)
        counted = {} if reason is not None else handed_bytes(module, example, recipe.train.micro_batches)
        file = self.run.prediction if self.leads else None
        console = self.speaker.console
        return lambda optimizer: [PredictionTable(prediction, reason, module, optimizer, counted, file, console)]

    def _trainer(
        self,
        module: ParallelModule,
        source: Source,
        held_out: Source | None,
        comparison: Callable[[Optimizer], list[Callback]],
    ) -> Trainer:
        recipe, settings = self.recipe, self.recipe.train
        parts = recipe.mesh.batch_parts
        loader = Loader(
            source, settings.batch, settings.micro_batches, module.input_shard, seed=recipe.seed, divisor=parts
        )
        # Epochs of whole steps: the last one may be smaller than the batch.
        steps = settings.steps if settings.steps is not None else (settings.epochs or 1) * len(loader)
        optimizer = build_optimizer(
            module, recipe.optimizer.name, recipe.optimizer.options, decay_vectors=recipe.optimizer.decay_vectors
        )
        schedule = build_schedule(
            optimizer,
            recipe.schedule.name,
            steps=steps,
            warmup=recipe.schedule.warmup,
            floor=recipe.schedule.floor,
            options=recipe.schedule.options,
        )
        kind: Callable[..., Trainer] = Trainer
        if isinstance(module, PipelinedModule) and module.is_asynchronous:
            kind = partial(AsynchronousTrainer, record=VersionLog(self.run.versions(self.world.rank)))
        return kind(
            module,
            optimizer,
            loader,
            FitSettings(
                steps=steps,
                seed=recipe.seed,
                clip=settings.clip,
                validate_every=settings.validation.every if settings.validation is not None else 0,
                checkpoint_every=recipe.checkpoint.every or 0,
                equal_weights=settings.loss_weight == "equal",
            ),
            schedule=schedule,
            validation=self._validation(module, held_out),
            metrics=self._metrics(module, held_out),
            checkpoints=Checkpointer(self.run.checkpoints, module, optimizer, keep=recipe.checkpoint.keep),
            callbacks=[*self._callbacks(), *self._traces(module, optimizer), *comparison(optimizer)],
        )

    def _validation(self, module: ParallelModule, held_out: Source | None) -> Callable[[], Iterable[MicroBatch]] | None:
        """Return what gives the validation batches anew; they have the size of a training micro-batch.

        Shuffled, so that the first few are a fair sample of all, and the same ones each time.
        """
        section = self.recipe.train.validation
        if section is None:
            return None
        if held_out is None:
            raise RecipeError(
                "train.validate asks for validation, but data.validation is 0: nothing was set apart. Give it a "
                "fraction, such as 0.05, or leave out train.validate."
            )
        batch = self.recipe.train.batch // self.recipe.train.micro_batches
        parts = self.recipe.mesh.batch_parts
        loader = Loader(held_out, batch, shard=module.input_shard, seed=self.recipe.seed, divisor=parts)

        def batches() -> Iterable[MicroBatch]:
            for step in islice(loader.epoch(), section.batches):
                yield from step.micro_batches

        return batches

    def _metrics(self, module: ParallelModule, held_out: Source | None) -> Callable[[], Mapping[str, float]] | None:
        """Return what scores the validation data, if that is asked for: with the user's own module, on rank 0."""
        section = self.recipe.train.validation
        if section is None or section.scores is None or held_out is None:
            return None
        user_module = build_module(self.recipe) if self.leads else None
        scorer = Scorer(user_module, section.scores, section.labels) if user_module is not None else None
        loader = Loader(held_out, self.recipe.train.batch // self.recipe.train.micro_batches, seed=self.recipe.seed)

        def metrics() -> Mapping[str, float]:
            state = module.full_state_dict()
            if user_module is None or scorer is None:
                return {}
            user_module.load_state_dict(state)
            for step in islice(loader.epoch(), section.batches):
                scorer.add(step.micro_batches[0].batch)
            return scorer.result()

        return metrics

    def _callbacks(self) -> list[Callback]:
        log = self.speaker.log
        callbacks: list[Callback] = [LogLines(log, self.recipe.train.log_every), FirstStep(self.speaker)]
        if self.leads:
            callbacks += [
                MetricsFile(self.run.metrics),
                TensorBoard(self.run.tensorboard, log),
                progress(self.speaker.console),
            ]
        return callbacks + [load_factory(factory, Path.cwd())(self.run.root) for factory in self.recipe.callbacks]

    def _traces(self, module: ParallelModule, optimizer: Optimizer) -> list[Callback]:
        """What notes the parts of some steps."""
        steps = self.recipe.train.trace
        return [TraceFile(self.run.trace(self.world.rank), module, optimizer, steps)] if steps else []

    def _finish(self, module: ParallelModule, report: EndReport) -> None:
        """Write the trained module, let it show what it has learnt, and say what to do next."""
        export_safetensors(module, self.run.model)
        if not self.leads:
            return
        if self.recipe.sample is not None:
            text = self._sample()
            write_whole(self.run.sample, text)
            self.speaker.console.rule("what the model writes")
            self.speaker.say(text)
            self.speaker.console.rule()
        tensorboard = importlib.util.find_spec("tensorboard") is not None
        placed = isinstance(module, (PlacedModule, PipelinedModule))
        self.speaker.say(next_steps(self.recipe, self.run, report, tensorboard=tensorboard, placed=placed))

    def _sample(self) -> str:
        """What the user's own module, with the trained weights, answers to the recipe's prompt."""
        section = self.recipe.sample
        assert section is not None
        user_module = build_module(self.recipe)
        user_module.load_state_dict(load_file(self.run.model))
        return str(
            load_factory(section.factory, Path.cwd())(
                user_module, prompt=section.prompt, length=section.length, temperature=section.temperature
            )
        )


def _all_devices(recipe: Recipe) -> list[torch.device]:
    """The devices over which ranks in one process are spread."""
    if recipe.device != "cpu" and torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")]


def _how_planned(module: ParallelModule, fallback: str) -> str:
    """What the time before the first step went to; on rank 0, which plans for all."""
    if not module.startups:
        return f"  the module could not be captured: it runs under fallback '{fallback}', with averages over ranks"
    startup = module.startups[0]
    if startup.capture_s == 0:
        return "  the placed program was found in the cache"
    return f"  capture {startup.capture_s:.2f} s, placement {startup.place_s:.2f} s"


def _plan_text(module: ParallelModule, world: World, recipe: Recipe) -> str:
    """The plan that executes and, for people, what is between ranks and where each parameter and buffer lies."""
    file = PlanFile(module.plan, recipe.train.batch, recipe.train.micro_batches)
    shapes = {shard.name: shard.shape for shard in module.shards()}
    placed = {
        name: f"{list(shape)} {', '.join(map(str, module.placements(name)))}".rstrip() for name, shape in shapes.items()
    }
    return file.to_yaml({"between_ranks": world.backend.words, "placements": placed})
