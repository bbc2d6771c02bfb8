"""How compared models are shown: a summary on the terminal, and the page `docs/models.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench.families import family_of
from paceline.bench.models.cells import Cell, Verdict, mesh_of

_WORST_LAST = list(Verdict)
_MARKS = {Verdict.EQUAL: "=", Verdict.DIFFERS: "**differs**", Verdict.REFUSED: "refused", Verdict.FAILS: "**fails**"}

_ON_MESHES = """# Models

{count} families, small and with random weights, each compared with its serial module on every mesh that makes sense for
it: `hw` where there are images, `sp` where there is a time axis, or images, whose patches are a sequence along their
height."""

_ON_STAGES = """# Models on stages

{count} families, small and with random weights, each cut into stages and compared with its serial module under every
schedule that is named. A batch of 4 flows in 3 micro-batches, which it does not divide into; `interleaved` and `zb-v`
have two stages on each rank."""

_PAGE = """{introduction} Nobody adapted them: those of Hugging Face are its own classes. This page is written by a
command, on {date}, with {versions}:

    {command}

One model on one mesh, on processes of its own:

    paceline verify --model {factory} --mesh {mesh}

What is compared, and how equal is equal, is in [verify.md](verify.md): losses, gradients, buffers and parameters of two
optimizer steps with dropout on, within 1e-9 in float64 and 1e-4 in float32. Here all ranks run in one process.

## Equal or not

`=`: equal in {dtypes}. `refused`: an error says what does not divide, before anything runs. {equal} of {total}
comparisons are equal.

{matrix}

{reasons}## Errors and traffic

The error is the worst of all that is compared, relative to its scale. Collectives are those of one step on each rank,
forward and backward; bytes are what a rank hands to them ({bytes_dtype}). An operator without a rule is computed whole
by every rank.

{details}
"""


def print_summary(console: Console, cells: Sequence[Cell]) -> None:
    """Print which models are equal on which mesh, and why others are not."""
    meshes = _meshes(cells)
    table = Table(title="equal to serial", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for mesh in meshes:
        table.add_column(mesh.replace(",", ",\n"))
    for model, verdicts in _matrix(cells).items():
        table.add_row(model, *(str(verdicts.get(mesh, "")) for mesh in meshes))
    console.print(table)
    for line in _reasons(cells):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def page(cells: Sequence[Cell], options: Mapping[str, str], machine: Mapping[str, Any]) -> str:
    """Return `docs/models.md`.

    Args:
        cells: of all models, in the order of the tables.
        options: settings of the command; where results are kept is not told.
        machine: what `bench.machine.machine` returned.
    """
    settings = [f"--set '{key}={value}'" for key, value in options.items() if key not in ("results", "jobs")]
    dtypes = list(dict.fromkeys(cell.dtype for cell in cells))
    meshes = _meshes(cells)
    versions = [f"torch {machine['torch']}", f"transformers {metadata.version('transformers')}"]
    rows = [
        [family_of(model).title, *(_MARKS[verdicts[mesh]] if mesh in verdicts else "" for mesh in meshes)]
        for model, verdicts in _matrix(cells).items()
    ]
    reasons = "\n".join(f"- {line}" for line in _reasons(cells))
    on_stages = all(mesh_of(mesh).stage_ranks > 1 for mesh in meshes)
    return _PAGE.format(
        introduction=(_ON_STAGES if on_stages else _ON_MESHES).format(count=len(rows)),
        mesh="pp=2 --schedule 1f1b" if on_stages else "tp=2",
        date=datetime.now(UTC).date().isoformat(),
        versions=", ".join([*versions, f"Python {machine['python']}"]),
        command=" ".join(["paceline bench models", *settings]),
        factory=family_of(cells[0].model).factory_name,
        dtypes=" and ".join(dtypes),
        equal=sum(cell.verdict is Verdict.EQUAL for cell in cells),
        total=len(cells),
        matrix=_markdown(["Model", *(f"`{mesh}`" for mesh in meshes)], rows),
        reasons=f"What is not equal, and why:\n\n{reasons}\n\n" if reasons else "",
        bytes_dtype=dtypes[-1],
        details=_markdown(
            ["Model", "Mesh", *(f"Error, {dtype}" for dtype in dtypes), "Collectives", "Bytes", "Without a rule"],
            list(_details(cells, dtypes)),
        ),
    )


def _details(cells: Sequence[Cell], dtypes: Sequence[str]) -> Iterator[list[str]]:
    by_key = {(cell.model, cell.mesh, cell.dtype): cell for cell in cells}
    for model in dict.fromkeys(cell.model for cell in cells):
        for mesh in _meshes([cell for cell in cells if cell.model == model]):
            found = [by_key[model, mesh, dtype] for dtype in dtypes]
            last = found[-1]
            collectives = ", ".join(f"{volume.count} {kind}" for kind, volume in last.collectives)
            yield [
                family_of(model).title,
                f"`{mesh}`",
                *(_error(cell) for cell in found),
                collectives,
                f"{last.bytes:,}" if last.collectives else "",
                ", ".join(f"`{operator}`" for operator in last.operators),
            ]


def _error(cell: Cell) -> str:
    if cell.verdict in (Verdict.REFUSED, Verdict.FAILS):
        return str(cell.verdict)
    return f"{cell.worst:.1e} ({cell.of})" if cell.worst is not None else f"infinite ({cell.of})"


def _matrix(cells: Sequence[Cell]) -> dict[str, dict[str, Verdict]]:
    """Return the worst verdict of all types, by model and mesh."""
    found: dict[str, dict[str, Verdict]] = {}
    for cell in cells:
        verdicts = found.setdefault(cell.model, {})
        verdicts[cell.mesh] = max(verdicts.get(cell.mesh, cell.verdict), cell.verdict, key=_WORST_LAST.index)
    return found


def _reasons(cells: Sequence[Cell]) -> list[str]:
    """Return a line for each reason that a model is not equal; the same for several meshes and types is one line."""
    where: dict[tuple[str, Verdict, str], list[Cell]] = {}
    for cell in cells:
        if cell.verdict is not Verdict.EQUAL:
            where.setdefault((cell.model, cell.verdict, cell.reason), []).append(cell)
    return [
        f"{family_of(model).title}, {_places(found)}: {verdict}: {reason}"
        for (model, verdict, reason), found in where.items()
    ]


def _places(cells: Sequence[Cell]) -> str:
    meshes = ", ".join(f"`{mesh}`" for mesh in _meshes(cells))
    return f"{meshes} in {' and '.join(dict.fromkeys(cell.dtype for cell in cells))}"


def _meshes(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.mesh for cell in cells))


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
