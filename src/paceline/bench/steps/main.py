"""`paceline bench steps`: predicted beside measured, step time and peak memory of five models on this machine.

Settings (`--set key=value`): `rounds`, `steps` (of a turn), `models`, `meshes` (separated by semicolons),
`micro_batches` (of pipelines), `backend` (`auto`, `shm` or `gloo`), `scale` (`full`, or `tiny` to see that it runs),
`memory` (`yes` or `no`), `markdown` (a file whose section between markers is written anew).
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.bench import options as given
from paceline.bench.machine import machine, table_console
from paceline.bench.results import found
from paceline.bench.steps.jobs import PARTS, Job, undisturbed
from paceline.bench.steps.table import print_tables, write_section
from paceline.bench.steps.workloads import Model, workload_of
from paceline.bench.workloads import Scale
from paceline.errors import RecipeError
from paceline.plan import Mesh
from paceline.runtime.job.backend import Choice
from paceline.runtime.job.launch import launch
from paceline.runtime.process_memory import can_take_memory

_LIMIT_S = 1800.0
_NOTHING: Mapping[str, str] = {}
_SERIAL = "serial"
_OTHERS = 0.1
"""Turns in which others had more than so many processors are left out."""
_LEAST = 3
# glibc otherwise keeps freed blocks of many megabytes, at sizes that depend on what was freed before.
_PROMPT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    rounds: int = 7
    steps: int = 3
    models: tuple[Model, ...] = tuple(Model)
    meshes: tuple[str, ...] = (_SERIAL, "dp=2", "fsdp=2", "tp=2", "pp=2")
    micro_batches: int = 4
    backend: Choice = Choice.AUTO
    scale: Scale = Scale.FULL
    memory: bool = True
    markdown: Path | None = None

    @classmethod
    def read(cls, options: dict[str, str]) -> Settings:
        """Read `key=value` pairs.

        Raises:
            RecipeError: a key or a value is unknown.
            LaunchError: a backend is.
            PlanError: a mesh cannot be read.
        """
        readers: dict[str, given.Reader] = {
            "rounds": partial(given.whole_number, least=1),
            "steps": partial(given.whole_number, least=1),
            "micro_batches": partial(given.whole_number, least=1),
            "models": partial(given.names, known=list(Model)),
            "meshes": given.meshes,
            "backend": given.backend,
            "scale": partial(given.name, known=list(Scale)),
            "memory": given.yes_or_no,
            "markdown": given.path,
        }
        return given.settings_with(cls(), options, readers)

    def by_ranks(self) -> dict[int, tuple[str, ...]]:
        """Return the meshes by how many ranks they have: those of one size are measured in one job, in turn."""
        sizes = {mesh: Mesh.parse(mesh).size for mesh in self.meshes}
        return {size: tuple(mesh for mesh in self.meshes if sizes[mesh] == size) for size in sorted({*sizes.values()})}


def main(options: dict[str, str]) -> dict[str, Any]:
    """Measure, print tables, and return the object of `--json`; its keys are told in `benchmarks/README.md`.

    Raises:
        RecipeError: a setting is unknown, or a model needs a library that is not installed.
    """
    settings = Settings.read(options)
    if set(settings.models) - {Model.GPT} and importlib.util.find_spec("transformers") is None:
        raise RecipeError(
            "all models but gpt need Hugging Face's library: install 'paceline[hf]', or --set models=gpt."
        )
    result: dict[str, Any] = {
        "rows": [],
        "titles": {model.value: workload_of(model, settings.scale).title for model in settings.models},
        "rounds": {},
        "settings": {
            "rounds": settings.rounds,
            "steps": settings.steps,
            "micro_batches": settings.micro_batches,
            "backend": settings.backend.value,
            "scale": settings.scale.value,
        },
        "machine": machine(),
    }
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for model in settings.models:
            for size, meshes in settings.by_ranks().items():
                _measure(model, size, meshes, settings, Path(folder), result)
    result |= summary(result["rows"])
    print_tables(table_console(), result)
    if settings.markdown is not None:
        write_section(settings.markdown, result)
    return result


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the errors of all rows together, and of those on each mesh: of step times, and of memory."""

    def errors(key: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        all_errors = [row[key] for row in rows if row.get(key) is not None]
        if not all_errors:
            return {}
        sizes = [abs(error) for error in all_errors]
        return {"mape": fmean(sizes), "median": median(sizes), "worst": max(all_errors, key=abs), "rows": len(sizes)}

    meshes = dict.fromkeys(str(row["mesh"]) for row in rows)
    return {
        name: {
            "all": errors(f"{name}_error", rows),
            **{mesh: errors(f"{name}_error", [row for row in rows if row["mesh"] == mesh]) for mesh in meshes},
        }
        for name in ("step", "memory")
    }


def row_of(
    model: Model, mesh: str, rounds: Sequence[Mapping[str, float]], predicted: Mapping[str, Any], peak: int | None
) -> dict[str, Any]:
    """Return what was predicted of one model on one mesh beside what was measured; errors are predicted / measured - 1.

    Args:
        model: which.
        mesh: on which mesh.
        rounds: of the slowest rank.
        predicted: see `steps_jobs.told`.
        peak: bytes of the rank that needed most memory; None where it was not taken.
    """
    kept = undisturbed(rounds, _OTHERS, min(_LEAST, len(rounds)))
    step = median(each["step"] for each in kept)
    phases = predicted["phases"]
    parts = {
        "forward": phases.get("forward"),
        "backward": phases.get("backward"),
        "update": phases.get("norm", 0.0) + phases.get("update", 0.0),
    }
    return {
        "model": model.value,
        "mesh": mesh,
        "step_s": step,
        "predicted_s": predicted["step_s"],
        "step_error": predicted["step_s"] / step - 1,
        "parts": {part: {"measured_s": median(e[part] for e in kept), "predicted_s": parts[part]} for part in PARTS},
        "exposed_s": predicted["exposed_s"],
        "memory_bytes": peak,
        "predicted_bytes": predicted["peak_bytes"],
        "memory_error": None if not peak else predicted["peak_bytes"] / peak - 1,
        "peak_at": predicted["peak_at"],
        "turns": {"all": len(rounds), "kept": len(kept), "others": median(each["others"] for each in kept)},
    }


def tensor_peak(private: int, process: Mapping[str, int]) -> int:
    """Return the most bytes of tensors, with the room through which ranks exchange.

    A process also holds programs, code and what libraries keep, which is nothing of a plan: between two steps, that is
    what is private and no tensor.

    Args:
        private: bytes of tensors between two steps that are not shared, counted.
        process: see `turns.take_memory`.
    """
    return process["step_bytes"] - (process["held_private_bytes"] - private)


def _measure(
    model: Model, size: int, meshes: tuple[str, ...], settings: Settings, folder: Path, result: dict[str, Any]
) -> None:
    """Add the rows of a model on meshes of one size."""
    ranks = _run("take_steps", model, size, meshes, settings, folder)
    peaks: dict[str, int] = {}
    if settings.memory and can_take_memory():
        memory = _run("take_memory", model, size, meshes, settings, folder, _PROMPT_MALLOC)
        taken = [rank["memory"] for rank in memory]
        peaks = {
            mesh: max(tensor_peak(of["private_bytes"][mesh], rank[mesh]) for of, rank in zip(ranks, taken, strict=True))
            for mesh in meshes
        }
    result["machine"].setdefault("backend", {})[str(size)] = ranks[0]["words"]
    for mesh in meshes:
        turns = zip(*(rank["rounds"][mesh] for rank in ranks), strict=True)
        slowest = [max(turn, key=lambda rank: rank["step"]) for turn in turns]
        result["rounds"].setdefault(model.value, {})[mesh] = slowest
        result["rows"].append(row_of(model, mesh, slowest, ranks[0]["predicted"][mesh], peaks.get(mesh)))


def _run(
    name: str,
    model: Model,
    size: int,
    meshes: tuple[str, ...],
    settings: Settings,
    folder: Path,
    environment: Mapping[str, str] = _NOTHING,
) -> list[dict[str, Any]]:
    """Run a job on fresh processes, one thread each, and return what its ranks found."""
    own = folder / f"{model}-{size}-{name}"
    own.mkdir()
    title = f"{model} on {size} rank{'s' * (size > 1)}{': memory' if name == 'take_memory' else ''}"
    job = Job(
        folder=str(own),
        model=model,
        scale=settings.scale,
        meshes=meshes,
        micro_batches=settings.micro_batches,
        rounds=settings.rounds,
        steps=settings.steps,
        backend=settings.backend.value,
        title=title,
    )
    launch(
        f"paceline.bench.steps.jobs:{name}",
        job.to_json(),
        size,
        environment={"OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(folder / "programs"), **environment},
        timeout_s=_LIMIT_S,
    )
    return found(own, size)
