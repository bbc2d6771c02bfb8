"""The application: its verbs, its help, and how errors end it."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline import __version__
from paceline.cli.bench import HELP as BENCH_HELP
from paceline.cli.bench import bench
from paceline.cli.calibrate import calibrate
from paceline.cli.goodput import goodput
from paceline.cli.join import join
from paceline.cli.plan import plan
from paceline.cli.schedule import HELP as SCHEDULE_HELP
from paceline.cli.schedule import schedule
from paceline.cli.simulate import simulate
from paceline.cli.train import train
from paceline.cli.verify import verify
from paceline.errors import PacelineError
from paceline.plan import Axis

INTERRUPTED = 130  # 128 + SIGINT, what a shell expects of a program that Ctrl-C ended

_AXES = "\n".join(f"- `{axis.value}`: {axis.summary}" for axis in Axis)

_HELP = f"""
Plans, proves and runs the distributed training of any PyTorch model.

Start with one of these:

    paceline train recipes/gpt-stdlib.yaml
    paceline verify recipes/gpt-stdlib.yaml --mesh fsdp=2
    paceline plan recipes/gpt-stdlib.yaml --mesh fsdp=2
    paceline verify --model my_model.py:build --mesh dp=2

A MESH says how ranks are arranged, the axis with the slowest link first: `dp=2`, `fsdp=4`, `dp=2,fsdp=4`, or `serial`.

{_AXES}

A FACTORY names your own code, `package.module:callable` or `path/to/file.py:callable`. It returns `(module, batch)`,
where `module(*batch)` or `module(**batch)` gives a scalar loss or an object with `.loss`.

Exit codes: 0 done, 1 the check or the run failed, 2 bad input.
"""


class _Verbs(TyperGroup):
    """Ends the program with one readable message where the fault is not ours; a fault of ours keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
            typer.echo(str(error), err=True)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            typer.echo("\ninterrupted", err=True)
            raise typer.Exit(INTERRUPTED) from error


app = typer.Typer(
    name="paceline",
    cls=_Verbs,
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(join)
app.command()(verify)
app.command()(plan)
app.command()(simulate)
app.command(help=SCHEDULE_HELP)(schedule)
app.command()(calibrate)
app.command(help=BENCH_HELP)(bench)
app.command()(goodput)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass  # the callback of the option does it all; the help of the application is given above


def main() -> None:
    """Run the command line; what the installed script `paceline` calls."""
    app(prog_name="paceline")


if __name__ == "__main__":
    main()
