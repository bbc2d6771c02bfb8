"""`paceline bench models`: families of models on every kind of mesh, each compared with its serial module.

Settings (`--set key=value`): `models`, `dtypes` (separated by commas), `meshes` (separated by semicolons), `schedules`
(of pipelines, where a mesh has the axis `pp`; separated by commas), `jobs` (processes at a time), `results` (a file
that keeps what was found: a run that was ended goes on from there, as long as no line of Paceline's code has changed),
`markdown` (a page that the tables are written to).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import paceline
from paceline.bench import options as given
from paceline.bench.families import FAMILIES, family_of
from paceline.bench.families.family import Family
from paceline.bench.machine import cores, machine, table_console
from paceline.bench.models.cells import Cell, Task, mesh_of, run
from paceline.bench.models.table import page, print_summary
from paceline.errors import RecipeError
from paceline.plan import Axis, Mesh, PipelinePlan
from paceline.schedule import Kind
from paceline.verify.precision import Precision

MESHES = ("dp=2", "fsdp=2", "tp=2", "tp=4", "sp=2", "hw=2", "dp=2,tp=2", "fsdp=2,tp=2", "sp=2,tp=2")
_DTYPES = (Precision.FLOAT64, Precision.FLOAT32)


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    models: tuple[str, ...] = tuple(family.name for family in FAMILIES)
    meshes: tuple[str, ...] = MESHES
    schedules: tuple[str, ...] = (PipelinePlan.schedule,)
    dtypes: tuple[str, ...] = tuple(dtype.value for dtype in _DTYPES)
    jobs: int = 0
    results: Path | None = None
    markdown: Path | None = None

    @classmethod
    def read(cls, options: dict[str, str]) -> Settings:
        """Read `key=value` pairs.

        Raises:
            RecipeError: a key or a value is unknown.
            PlanError: a mesh cannot be read.
        """
        readers: dict[str, given.Reader] = {
            "models": partial(given.texts, known=cls.models),
            "meshes": given.meshes,
            "schedules": partial(given.texts, known=[kind.value for kind in Kind if not kind.is_asynchronous]),
            "dtypes": partial(given.texts, known=[item.value for item in Precision]),
            "jobs": partial(given.whole_number, least=1),
            "results": given.path,
            "markdown": given.path,
        }
        return given.settings_with(cls(), options, readers)

    @property
    def wanted(self) -> list[tuple[str, str, str]]:
        """Model, type and mesh of every cell of the tables."""
        return [
            (model, dtype, mesh)
            for model in self.models
            for dtype in self.dtypes
            for mesh in self._meshes
            if suits(family_of(model), mesh)
        ]

    @property
    def _meshes(self) -> Iterator[str]:
        """Meshes; those with stages, once for each schedule."""
        for mesh in self.meshes:
            if Mesh.parse(mesh).stage_ranks == 1:
                yield mesh
            else:
                yield from (f"{mesh} {schedule}" for schedule in self.schedules)


def suits(family: Family, mesh: str) -> bool:
    """Whether a family has what every axis of a mesh splits."""
    axes = {Axis(name) for name in mesh_of(mesh).names}
    has_sequence = family.has_time or family.has_images  # patches of images are a sequence, along their height
    return (has_sequence or Axis.SP not in axes) and (family.has_images or Axis.HW not in axes)


def main(options: dict[str, str]) -> dict[str, Any]:
    """Compare, print a summary, write the page, and return the object of `--json`.

    Raises:
        RecipeError: a setting is unknown, or a file cannot be read or written.
    """
    settings = Settings.read(options)
    results = Results(settings.results)
    wanted = settings.wanted
    todo = [key for key in wanted if key not in results.cells]
    console = table_console()
    if len(todo) < len(wanted):
        console.print(f"{len(wanted) - len(todo)} of {len(wanted)} comparisons are in {settings.results} already.")
    for cells in _run(todo, settings.jobs or cores()):
        results.add(cells)
    cells = [results.cells[key] for key in wanted]
    print_summary(console, cells)
    if settings.markdown is not None:
        _write(settings.markdown, page(cells, options, machine()))
    return {"models": [cell.to_json() for cell in cells], "machine": machine()}


class Results:
    """What was found, by model, type and mesh; kept in a file of JSON lines where there is one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._sources = sources_hash()
        self.cells: dict[tuple[str, str, str], Cell] = {}
        if file is not None and file.exists():
            self._read(file)

    def add(self, cells: Sequence[Cell]) -> None:
        """Keep what was found."""
        self.cells.update({(cell.model, cell.dtype, cell.mesh): cell for cell in cells})
        if self._file is not None:
            lines = [json.dumps({"sources": self._sources, **cell.to_json()}) + "\n" for cell in cells]
            _write(self._file, "".join(lines), append=True)

    def _read(self, file: Path) -> None:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                values = json.loads(line)
                if values.pop("sources") == self._sources:
                    cell = Cell.from_json(values)
                    self.cells[cell.model, cell.dtype, cell.mesh] = cell
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RecipeError(
                    f"line {number} of {file} is not what this benchmark writes: {error}. Name another file with "
                    "--set results=FILE, or remove it."
                ) from error


def sources_hash() -> str:
    """Return the SHA-256 of all source files of Paceline, as the processes of a run load them."""
    digest = hashlib.sha256()
    root = Path(paceline.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _run(todo: Sequence[tuple[str, str, str]], jobs: int) -> Iterator[list[Cell]]:
    """Yield the cells of each model in each type as they are found, in any order."""
    tasks = [
        Task(model, dtype, tuple(mesh for _, _, mesh in keys))
        for (model, dtype), keys in groupby(todo, key=lambda key: key[:2])
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool,
    ):
        bar = progress.add_task("comparisons", total=len(todo))
        futures: list[Future[list[Cell]]] = [pool.submit(run, task) for task in tasks]
        try:
            for future in as_completed(futures):
                cells = future.result()
                yield cells
                progress.advance(bar, len(cells))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write(file: Path, text: str, *, append: bool = False) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a" if append else "w", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise RecipeError(f"{file} cannot be written: {error}.") from error
