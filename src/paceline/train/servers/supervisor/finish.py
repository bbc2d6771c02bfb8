"""The end of a run: a trained module from what servers wrote last, and what to do with it."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.job import Job
from paceline.exchange.shard.manifest import Manifest, whole_snapshots
from paceline.exchange.shard.whole import Tables, read_tables
from paceline.exchange.terms import Terms
from paceline.program.factory import load_factory
from paceline.train.callbacks import EndReport
from paceline.train.recipe import Recipe
from paceline.train.rundir import RunDirectory, write_whole
from paceline.train.servers.rundir import buffers_of, exchange_of
from paceline.train.startup import Speaker, train_longer


def finish(
    recipe: Recipe,
    run: RunDirectory,
    directory: Directory,
    job: Job,
    module: nn.Module,
    speaker: Speaker,
    report: EndReport,
) -> None:
    """Write the trained module, let it show what it has learnt, and say what to do next.

    Args:
        recipe: of the run.
        run: its directory.
        directory: of the exchange whose newest snapshot is what was learnt.
        job: what it holds.
        module: the user's; takes the trained values.
        speaker: says things.
        report: how it ended.

    Raises:
        ExchangeError: the module cannot be written.
    """
    tables = newest(directory, job)
    _write_model(state_of(module, tables, buffers_of(run)), run, directory)
    if recipe.sample is not None and not tables.keys:
        module.load_state_dict(load_file(run.model))
        section = recipe.sample
        sample = load_factory(section.factory, Path.cwd())
        text = str(sample(module, prompt=section.prompt, length=section.length, temperature=section.temperature))
        write_whole(run.sample, text)
        speaker.console.rule("what the model writes")
        speaker.say(text)
        speaker.console.rule()
    speaker.say(_next_steps(recipe, run, report, logged=directory.read().log))


def is_unwritten(run: RunDirectory, terms: Terms, groups: int) -> bool:
    """Whether a run did all that it was to do, and its trained module is not there: it ended as it was to be written.

    Args:
        run: its directory.
        terms: that are asked for now, of a group or the only exchange.
        groups: how many there are; 0 where there are none.
    """
    directory = exchange_of(run)
    numbers = whole_snapshots(directory.snapshots)
    if not numbers or exchange_of(run, 0 if groups else None).read().terms.tasks != terms.tasks:
        return False
    snapshot = directory.snapshot(numbers[-1])
    if Manifest.read(snapshot).first_task < directory.read().terms.tasks:
        return False
    return not run.model.exists() or run.model.stat().st_mtime_ns < snapshot.stat().st_mtime_ns  # of before a resume


def _write_model(state: Mapping[str, Tensor], run: RunDirectory, directory: Directory) -> None:
    """Write the trained module, in whole or not at all."""
    draft = run.model.with_name(f".{run.model.name}.{os.getpid()}")
    try:
        save_file(dict(state), draft)
        draft.replace(run.model)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        raise ExchangeError(
            f"cannot write {run.model} ({error}). All that was learnt is in {directory.snapshots}: make room, and have "
            "it written with --resume."
        ) from error


def newest(directory: Directory, job: Job) -> Tables:
    """Return what the newest snapshot holds.

    Raises:
        ExchangeError: there is none, or it is damaged.
    """
    numbers = whole_snapshots(directory.snapshots)
    if not numbers:
        raise ExchangeError(f"no snapshot in {directory.snapshots} is whole.")
    return read_tables(directory.snapshot(numbers[-1]), job)


def state_of(module: nn.Module, tables: Tables, buffers: Path) -> dict[str, Tensor]:
    """Return what is written of a trained module: its state, under its own names.

    In place of a sparse table `NAME` there are `NAME.keys` ([n] int64) and `NAME.rows` ([n, width]).
    """
    held = load_file(buffers) if buffers.exists() else {}
    first = {id(tensor): name for name, tensor in reversed(list(module.named_parameters()))}
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        table = first.get(id(tensor), name)
        if table in tables.keys:
            state |= {f"{name}.keys": tables.keys[table], f"{name}.rows": tables.rows[table].clone()}
        else:
            found = tables.dense.get(table, held.get(name, tensor.detach()))
            state[name] = found.detach().cpu().contiguous().clone()
    return state


def _next_steps(recipe: Recipe, run: RunDirectory, report: EndReport, *, logged: bool) -> str:
    lines = [
        f"step {report.step}, {report.seconds:.0f} s. Everything is in {run.root}: the model in {run.model.name}, "
        f"figures in {run.metrics.name}.",
        "",
        "What next:",
        train_longer(recipe, run, report),
    ]
    if logged:
        lines.append(f"  prove what was done   paceline verify --replay {shlex.quote(str(run.root))}")
    if importlib.util.find_spec("tensorboard") is not None:
        lines.append(f"  look at the curves    tensorboard --logdir {shlex.quote(str(run.tensorboard))}")
    return "\n".join(lines)
