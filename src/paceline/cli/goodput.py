"""`paceline goodput`: how much of some weeks advances a job that fails, and how often it should save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import JsonFile
from paceline.cli.output import write_json
from paceline.errors import RecipeError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline.simulator.outages.weeks import Policy, Weeks

_WIDTH = 130
_HOUR_S, _DAY_S = 3600.0, 86400.0


def goodput(
    cluster: Annotated[str, typer.Option(metavar="NAME|FILE", help="The machine, whose failure rate is taken.")],
    checkpoint_s: Annotated[float, typer.Option(metavar="S", help="For which a checkpoint stops the job.")],
    devices: Annotated[
        int | None, typer.Option(metavar="N", help="Of the job; default: all of the cluster.", min=1)
    ] = None,
    write_s: Annotated[
        float, typer.Option(metavar="S", help="Until a checkpoint would survive, while the job goes on.")
    ] = 0.0,
    detect_s: Annotated[float, typer.Option(metavar="S", help="Until a failure is noticed.")] = 60.0,
    restart_s: Annotated[float, typer.Option(metavar="S", help="Until the job computes again.")] = 300.0,
    spares: Annotated[
        str, typer.Option(metavar="N,N,...", help="Hosts that stand by; several numbers are compared.")
    ] = "0",
    repair_hours: Annotated[
        float, typer.Option(metavar="H", help="Mean time of a repair; 0: a broken host is replaced at once.")
    ] = 0.0,
    broken: Annotated[
        float, typer.Option(metavar="SHARE", help="Of unexpected interruptions: those that break a host.")
    ] = 1.0,
    announced: Annotated[
        float, typer.Option(metavar="SHARE", help="Of interruptions: those known beforehand, which lose no work.")
    ] = 0.0,
    failures_per_device_hour: Annotated[
        float | None, typer.Option(metavar="RATE", help="Instead of the cluster's.")
    ] = None,
    shape: Annotated[
        float, typer.Option(help="Of the Weibull distribution of times between failures; 1: exponential.")
    ] = 1.0,
    days: Annotated[float, typer.Option(help="How long a run is.")] = 30.0,
    intervals_s: Annotated[
        str | None, typer.Option(metavar="S,S,...", help="Between checkpoints; default: around the best one.")
    ] = None,
    runs: Annotated[int, typer.Option(min=2, help="Runs that are simulated for each interval.")] = 200,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Draw it as .png or .svg.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Say how much of some weeks advances a job that fails, for several intervals between checkpoints.

    Beside what a simulation says stand Daly's and Young's formulas, which know nothing of spare hosts.

    ```
    paceline goodput --cluster dgx-h100 --devices 16384 --checkpoint-s 30
    paceline goodput --cluster dgx-h100 --devices 16384 --checkpoint-s 30 --spares 8,16 --repair-hours 24
    ```
    """
    from paceline.cluster.files import load
    from paceline.simulator.curves import check_picture
    from paceline.simulator.outages.failures import Checkpoints, Interruptions, Recovery
    from paceline.simulator.outages.weeks import compare

    if out is not None:
        check_picture(out)
    machine = load(cluster)
    if failures_per_device_hour is not None:
        machine = replace(machine, failures_per_device_hour=failures_per_device_hour)
    count = devices if devices is not None else machine.devices
    weeks = compare(
        Interruptions.of(machine.of(count), count, shape=shape, announced=announced, broken=broken),
        Recovery(detect_s, restart_s, repair_s=repair_hours * _HOUR_S),
        Checkpoints(checkpoint_s, write_s),
        spares=tuple(_whole("--spares", word) for word in spares.split(",")),
        intervals_s=None if intervals_s is None else [_positive("--intervals-s", w) for w in intervals_s.split(",")],
        horizon_s=days * _DAY_S,
        runs=runs,
        seed=seed,
    )
    if str(json_file) != "-":  # else the object has the standard output to itself
        _show(weeks, f"{count:,} devices of {machine.name}", days)
    if out is not None:
        from paceline.cli.goodput_picture import save_picture

        save_picture(weeks, f"{count:,} devices of {machine.name}", out)
    if json_file is not None:
        write_json({"cluster": machine.name, "devices": count, **weeks.to_json()}, json_file)


def _whole(option: str, word: str) -> int:
    if not word.strip().isdecimal():
        raise RecipeError(f"there is '{word}' in {option}; it is a list of whole numbers, such as 0,8,16.")
    return int(word)


def _positive(option: str, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise RecipeError(f"there is '{word}' in {option}; it is a list of seconds, such as 60,300,1800.")
    return number


def _show(weeks: Weeks, title: str, days: float) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(
        f"{title}, {days:g} days, {weeks.runs} runs: interrupted after {clock(weeks.interruptions.mean_s)} on average",
        highlight=False,
    )
    for policy in weeks.policies:
        console.print(_table(weeks, policy))
    _print_best(console, weeks)


def _table(weeks: Weeks, policy: Policy) -> Table:
    from rich import box
    from rich.table import Table

    found = policy.found
    rest = {spent: share for spent, share in found.shares.items() if spent != "useful"}
    title = f"{policy.spares} spare hosts" if weeks.waits else None
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("checkpoint every")
    for name in ("goodput", "9 of 10 runs", "Daly", "Young", *map(str, rest)):
        table.add_column(name, justify="right", no_wrap=True)
    for index, interval in enumerate(found.interval_s):
        table.add_row(
            clock(interval),
            f"{found.goodput[index]:.1%}",
            f"{found.low[index]:.1%}-{found.high[index]:.1%}",
            f"{weeks.daly[index]:.1%}",
            f"{weeks.young[index]:.1%}",
            *(f"{share[index]:.1%}" for share in rest.values()),
            style="bold" if index == found.best else None,
        )
    return table


def _print_best(console: Console, weeks: Weeks) -> None:
    for policy in weeks.policies:
        found, of = policy.found, f" with {policy.spares} spare hosts" if weeks.waits else ""
        console.print(
            f"best of these{of}: every {clock(found.interval_s[found.best])}, "
            f"{found.goodput[found.best]:.2%} (standard error {found.error[found.best]:.2%}), "
            f"{found.interruptions[found.best]:.0f} interruptions",
            highlight=False,
        )
    console.print(
        f"formulas: Young every {clock(weeks.young_interval_s)}, Daly every {clock(weeks.daly_interval_s)}, "
        f"exactly every {clock(weeks.best_interval_s)}",
        highlight=False,
    )


def clock(seconds: float) -> str:
    """Return a time as people say it: `45 s`, `4 min 10 s`, `2 h 47 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
