"""`paceline schedule`: what a schedule of a pipeline looks like, and what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import JsonFile
from paceline.cli.output import write_json
from paceline.errors import ScheduleError
from paceline.schedule import Account, Edges, Kind, Schedule, communicate, make, validate
from paceline.schedule.files import load, save
from paceline.schedule.places import Replicas, consecutive

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 100
_KINDS = "\n".join(f"- `{kind.value}`: {kind.summary}" for kind in Kind)

HELP = f"""
Draw a schedule of a pipeline, prove it, and say what it takes. Nothing runs.

Times are in units of a forward pass of a stage; a backward pass takes two, its parts one each, messages and updates
none. docs/pipelines.md says how to choose.

    paceline schedule 1f1b --ranks 4 --micro-batches 8
    paceline schedule interleaved --ranks 4 --micro-batches 8 --chunks 2 -o interleaved.svg

{_KINDS}
"""


def schedule(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help="One of those listed above.")] = None,
    ranks: Annotated[int | None, typer.Option(metavar="P", help="Pipeline ranks.")] = None,
    micro_batches: Annotated[int | None, typer.Option(metavar="M", help="Micro-batches of one batch.")] = None,
    chunks: Annotated[int, typer.Option(metavar="V", help="Stages per rank, for interleaved.")] = 1,
    batches: Annotated[int, typer.Option(metavar="B", help="Batches before an asynchronous schedule drains.")] = 1,
    replicas: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Ranks of each stage, as in 2,1, for 1f1b and pipedream.")
    ] = None,
    vertical_sync: Annotated[
        bool, typer.Option("--vertical-sync", help="All stages of pipedream read the version that the first reads.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option(metavar="IN.json", help="A schedule of your own, instead of a KIND.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Draw it as .svg or .png, or write its actions as .json."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Draw a schedule of a pipeline, prove it, and say what it takes; `HELP` is what users read."""
    if (kind is None) == (file is None):
        raise ScheduleError(f"name one schedule: a KIND ({', '.join(k.value for k in Kind)}) or --file IN.json.")
    if file is not None:
        if (ranks, micro_batches, chunks, batches, replicas, vertical_sync) != (None, None, 1, 1, None, False):
            raise ScheduleError(f"{file} says all about its schedule; leave out the options that make one.")
        plain = load(file)
    else:
        assert kind is not None
        placed = None if replicas is None else consecutive(_counts(replicas))
        plain = make(
            Kind.of(kind).value,
            _ranks(ranks, placed),
            _given(micro_batches, "--micro-batches"),
            chunks=chunks,
            batches=batches,
            replicas=placed,
            vertical_sync=vertical_sync,
        )
    edges = Edges.chain(plain.stages)
    complete = plain if plain.has_messages else communicate(plain, edges)
    account = validate(complete, edges)

    if str(json_file) != "-":  # else the object has the standard output to itself
        _show(complete, account)
    if out is not None:
        _write(plain, complete, account, out)
    if json_file is not None:
        write_json(_told(complete, account), json_file)


def _ranks(ranks: int | None, replicas: Replicas | None) -> int:
    if ranks is None and replicas is not None:
        return sum(map(len, replicas))
    return _given(ranks, "--ranks")


def _given(number: int | None, option: str) -> int:
    if number is None:
        raise ScheduleError(f"say how many: {option} is missing.")
    return number


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ScheduleError(f"--replicas {text} is not a list of the ranks of each stage, such as 2,1.")
    return counts


def _show(complete: Schedule, account: Account) -> None:
    from rich.console import Console

    from paceline.schedule.draw.terminal import staves

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(staves(complete, account, console.width), soft_wrap=True)
    console.print(f"bubble {account.bubble:.1%}, makespan {account.makespan:g}, {account.messages} messages")
    console.print(_table(complete, account))


def _table(complete: Schedule, account: Account) -> Table:
    from rich.table import Table

    table = Table("rank", "stages", "activations in flight", "weight versions", box=None)
    for rank in range(complete.ranks):
        stages = complete.stages_of(rank)
        versions = [str(account.stage_versions[stage]) for stage in stages]
        table.add_row(str(rank), ", ".join(map(str, stages)), str(account.rank_peaks[rank]), ", ".join(versions))
    return table


def _write(plain: Schedule, complete: Schedule, account: Account, out: Path) -> None:
    if out.suffix == ".json":
        save(plain, out)
        return
    from paceline.schedule.draw.picture import save_picture

    save_picture(complete, account, out)


def _told(complete: Schedule, account: Account) -> dict[str, Any]:
    return {
        "name": complete.name,
        "ranks": complete.ranks,
        "stages": complete.stages,
        "micro_batches": complete.micro_batches,
        "replicas": [list(ranks) for ranks in complete.replicas],
        "asynchronous": complete.is_asynchronous,
        "makespan": account.makespan,
        "bubble": account.bubble,
        "stall": account.stall,
        "busy": list(account.busy),
        "rank_peaks": list(account.rank_peaks),
        "stage_peaks": list(account.stage_peaks),
        "stage_versions": list(account.stage_versions),
        "messages": account.messages,
    }
