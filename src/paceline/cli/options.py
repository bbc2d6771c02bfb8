"""Options that several verbs share."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.plan import Pin, PipelinePlan, Recompute


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


Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="S",
        help="How micro-batches flow through pp: 1f1b, gpipe, zb-h1, ...; see paceline schedule.",
    ),
]
MicroBatches = Annotated[
    int | None, typer.Option("--micro-batches", metavar="M", min=1, help="Pieces in which a batch flows through pp.")
]
Chunks = Annotated[
    int | None, typer.Option("--chunks", min=1, help="Stages per rank of pp, for schedules that interleave them.")
]
Boundaries = Annotated[
    str | None,
    typer.Option("--boundaries", metavar="NAMES", help="Modules with which stages begin, as in blocks.2,blocks.4."),
]
RecomputeOption = Annotated[
    Recompute | None,
    typer.Option(
        "--recompute", help="What the backward pass computes again instead of keeping it; see docs/placement.md."
    ),
]


def pipeline_with(
    plan: PipelinePlan, schedule: str | None, micro_batches: int | None, chunks: int | None, boundaries: str | None
) -> PipelinePlan:
    """Return how micro-batches flow, with what the options say."""
    return replace(
        plan,
        schedule=schedule or plan.schedule,
        micro_batches=micro_batches or plan.micro_batches,
        chunks=chunks or plan.chunks,
        boundaries=plan.boundaries if boundaries is None else tuple(filter(None, boundaries.split(","))),
    )


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
