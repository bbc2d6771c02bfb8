"""How predicted and measured steps are shown: a table on the terminal, and a section of `docs/accuracy.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench.machine import warn_of_load
from paceline.bench.table import mebibytes
from paceline.errors import RecipeError

BEGIN = "<!-- begin: paceline bench steps -->"
END = "<!-- end: paceline bench steps -->"
_NONE = "-"


def print_tables(console: Console, result: Mapping[str, Any]) -> None:
    """Print what `steps.main` returns."""
    console.print(_where(result), highlight=False)
    warn_of_load(console, result["machine"])
    table = Table(box=box.SIMPLE_HEAD)
    header = ("", "mesh", "step, ms", "predicted", "error", "largest part of it", "MiB", "predicted", "error", "turns")
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number in (0, 1, 5) else "right", no_wrap=True)
    for row in result["rows"]:
        turns = row["turns"]
        table.add_row(
            row["model"],
            row["mesh"],
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['predicted_s'] * 1e3:.1f}",
            _percent(row["step_error"]),
            largest_difference(row),
            _megabytes(row["memory_bytes"]),
            _megabytes(row["predicted_bytes"]),
            _percent(row["memory_error"]),
            f"{turns['kept']}/{turns['all']}",
        )
    console.print(table)
    for name in ("step", "memory"):
        console.print(_summary(name, result[name]), highlight=False)


def largest_difference(row: Mapping[str, Any]) -> str:
    """Return the part of a step in which prediction and measurement differ most, in words."""
    differences = {
        part: seconds["predicted_s"] - seconds["measured_s"]
        for part, seconds in row["parts"].items()
        if seconds["predicted_s"] is not None
    }
    if row["mesh"].startswith("pp"):  # one call runs both passes
        return ""
    if not differences:
        return ""
    most = max(differences, key=lambda part: abs(differences[part]))
    return f"{most} {differences[most] * 1e3:+.1f} ms"


def section(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the section of `docs/accuracy.md`, without its markers."""
    yield ""
    yield "    paceline bench steps --set markdown=docs/accuracy.md"
    yield ""
    yield _where(result)
    yield ""
    yield "| Model | Mesh | Step, ms | Predicted | Error | Memory a rank, MiB | Predicted | Error | Peak at |"
    yield f"|{'---|' * 9}"
    for row in result["rows"]:
        cells = (
            row["model"],
            f"`{row['mesh']}`",
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['predicted_s'] * 1e3:.1f}",
            _percent(row["step_error"]),
            _megabytes(row["memory_bytes"]),
            _megabytes(row["predicted_bytes"]),
            _percent(row["memory_error"]),
            row["peak_at"].replace("|", "\\|"),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| Mesh | Step time: MAPE | Worst | Memory: MAPE | Worst |"
    yield f"|{'---|' * 5}"
    for mesh, step in result["step"].items():
        memory = result["memory"].get(mesh, {})
        errors = [f"{found['mape']:.1%} | {_percent(found['worst'])}" if found else "- | -" for found in (step, memory)]
        yield f"| {mesh} | {' | '.join(errors)} |"


def write_section(file: Path, result: Mapping[str, Any]) -> None:
    """Write the section of a page anew, between its markers.

    Raises:
        RecipeError: the page is not there, or has no markers.
    """
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if BEGIN not in text or END not in text:
        raise RecipeError(f"{file} has no lines '{BEGIN}' and '{END}', between which the section would go; write them.")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = "\n".join(section(result))
    file.write_text(f"{before}{BEGIN}\n{lines}\n{END}{after}", encoding="utf-8")


def _where(result: Mapping[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    backends = ", ".join(f"{words} on {size} ranks" for size, words in machine["backend"].items() if size != "1")
    between = f" Between ranks: {backends}." if backends else ""
    return (
        f"{machine['cores']} cores of {machine['processor']}, torch {machine['torch']}, one thread a rank;"
        f" {settings['rounds']} rounds of {settings['steps']} steps; pipelines run 1f1b with"
        f" {settings['micro_batches']} micro-batches.{between}"
    )


def _summary(name: str, found: Mapping[str, Mapping[str, float]]) -> str:
    parts = [
        f"{mesh} {of_mesh['mape']:.1%} (worst {of_mesh['worst']:+.1%})" for mesh, of_mesh in found.items() if of_mesh
    ]
    return f"{name}: mean absolute error {', '.join(parts)}" if parts else f"{name}: not taken"


def _percent(error: float | None) -> str:
    return _NONE if error is None else f"{error:+.1%}"


def _megabytes(count: int | None) -> str:
    return _NONE if count is None else mebibytes(count)
