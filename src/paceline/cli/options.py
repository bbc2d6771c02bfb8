"""Options that several verbs share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.plan import Pin


class Launch(StrEnum):
    """Where the ranks of a mesh live."""

    PROCESSES = "processes"
    INPROCESS = "inprocess"


class Backend(StrEnum):
    """What carries tensors between ranks on CPUs."""

    AUTO = "auto"
    SHM = "shm"
    GLOO = "gloo"


BackendOption = Annotated[
    Backend | None,
    typer.Option(
        "--backend",
        help="Between ranks on CPUs: shm, shared memory within a host; gloo, sockets; auto, shm where it can be.",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as one JSON object; - prints it.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="PATTERN:AXIS=PLACEMENT",
        help="Say where parameters live, as in --pin 'blocks.*.qkv.weight:tp=S0/3'; may be repeated.",
    ),
]
LaunchOption = Annotated[
    Launch | None,
    typer.Option("--launch", help="A process per rank, or all ranks in this process (the best debugger)."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe, as in --set train.steps=100."),
]


def assignments(
    sets: list[str] | None,
    mesh: str | None = None,
    launch: Launch | None = None,
    backend: Backend | None = None,
    pins: list[str] | None = None,
) -> list[str]:
    """Return the overrides of a recipe that the options amount to; the special ones win over --set.

    Raises:
        PlanError: a pin cannot be read.
    """
    special = {
        "mesh": mesh,
        "launch": launch.value if launch else None,
        "backend": backend.value if backend else None,
    }
    pinned: dict[str, list[str]] = {}
    for pin in map(Pin.parse, pins or []):
        pinned.setdefault(pin.pattern, []).append(pin.where)
    return [
        *(sets or []),
        *(f"{key}={value}" for key, value in special.items() if value is not None),
        *(f"plan.pins.'{pattern}'={','.join(where)}" for pattern, where in pinned.items()),
    ]
