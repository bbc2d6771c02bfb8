"""`paceline join`: more workers or servers for a run that goes on, from another terminal or another host."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import RecipeError


class Kind(StrEnum):
    """What joins."""

    WORKER = "worker"
    SERVER = "server"


def join(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run with a section `server`.")],
    kind: Annotated[Kind, typer.Argument(help="What joins.")],
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    group: Annotated[int | None, typer.Option(min=0, help="Of a run with groups: which one.")] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Of servers: the interface of this host that they listen on; default: the run's."
        ),
    ] = None,
) -> None:
    """Join a run whose parameters are on servers.

    Parts of the parameters move to a new server while the run goes on; a new worker is dealt tasks at once. Ctrl-C or
    SIGTERM lets them leave in good order: a server once what it holds is elsewhere, a worker after the task at hand.

        paceline join runs/ctr-1 worker --count 2
        paceline join runs/ctr-1 server

    On another host the run's directory must be seen there, and the run must listen beyond loopback (server.bind):

        paceline join runs/ctr-1 server --bind 10.0.0.2
    """
    from paceline.train.servers.processes.nursery import Nursery
    from paceline.train.servers.supervisor.joining import join_run

    if not (run_dir / "exchange").is_dir():
        raise RecipeError(
            f"{run_dir} is no run with servers: it has no directory 'exchange'. Name the directory of a run whose "
            "recipe has a section `server`, such as runs/ctr-1."
        )
    if bind is not None and kind is Kind.WORKER:
        raise RecipeError("--bind is for servers: a worker listens on no interface. Leave it out.")
    join_run(run_dir, kind.value, count, group, Nursery.fork(), bind=bind, say=typer.echo)
