"""Stages and partitions, as JSON and for people; the keys are documented in `docs/pipelines.md` and stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console

from paceline.plan import Axis, Mesh
from paceline.planner import words
from paceline.planner.partition import Share
from paceline.planner.partitioned import Partitioned
from paceline.planner.printing import print_table, say, section
from paceline.planner.stages import SentTold, StagesTold

_STAGES = ("modules", "stage", "ranks", "time", "parameters", "kept", "in flight", "held")
_SENT = ("module", "from", "to", "shape", "dtype", "bytes")
_FOUND = ("modules", "stage", "ranks", "time", "parameters", "sends")
_BESIDE = ("layout", "time", "samples/s")


def stages_to_json(told: StagesTold) -> dict[str, Any]:
    """Return the object for a pipeline."""
    account = told.account
    schedule = {
        "name": told.schedule.name,
        "micro_batches": told.schedule.micro_batches,
        "bubble": account.bubble,
        "seconds": account.makespan,
        "messages": account.messages,
        "in_flight": list(account.rank_peaks),
    }
    return {
        "mesh": str(told.plan.mesh),
        "ranks": told.plan.mesh.size,
        "plan": told.plan.to_dict(),
        "stages": [
            {**asdict(stage), "ranks": list(stage.ranks), "parameters": list(stage.parameters)} for stage in told.stages
        ],
        "sent": [
            {
                "from": sent.source,
                "to": sent.target,
                "pass": words.pass_(sent.backward),
                "module": sent.module,
                "shape": list(sent.shape),
                "dtype": sent.dtype,
                "bytes": sent.bytes,
            }
            for sent in told.sent
        ],
        "schedule": schedule,
    }


def print_stages(told: StagesTold, console: Console, *, details: bool) -> None:
    """Print stages, the schedule and what is sent; with details, each tensor."""
    mesh, account = told.plan.mesh, told.account
    say(console, f"mesh {mesh}: {mesh.size} ranks, {len(told.stages)} stages on {mesh.stage_ranks} of them")
    if mesh.inner.size > 1:
        say(console, f"each stage is placed on {mesh.inner}; bytes are those of one of its ranks")
    section(console, "stages, for one micro-batch")
    print_table(console, _STAGES, _stage_rows(told))
    section(console, f"schedule {told.schedule.name}")
    say(
        console,
        f"{told.schedule.micro_batches} micro-batches take {words.time(account.makespan)} by this model, "
        f"bubble {account.bubble:.1%}; {account.messages} messages between ranks of the pipeline",
    )
    section(console, "what stages send, for one micro-batch")
    print_table(console, _SENT, _sent_rows(told) if details else _edge_rows(told))


def _stage_rows(told: StagesTold) -> Iterator[tuple[str, ...]]:
    for number, stage in enumerate(told.stages):
        yield (
            _between(stage.first, stage.last),
            str(number),
            words.ranks(stage.ranks),
            words.time(stage.seconds),
            words.size(stage.parameter_bytes),
            words.size(stage.saved_bytes),
            str(stage.in_flight),
            words.size(stage.in_flight * stage.saved_bytes),
        )


def _edge_rows(told: StagesTold) -> Iterator[tuple[str, ...]]:
    """A row for each pair of stages and pass."""
    edges: dict[tuple[int, int, bool], list[SentTold]] = {}
    for sent in told.sent:
        edges.setdefault((sent.source, sent.target, sent.backward), []).append(sent)
    for (source, target, _), found in edges.items():
        largest = max(found, key=lambda sent: sent.bytes)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        name = words.module(largest.module) + more
        shape, nbytes = words.shape(largest.shape), words.size(sum(sent.bytes for sent in found))
        yield name, str(source), str(target), shape, largest.dtype, nbytes


def _sent_rows(told: StagesTold) -> Iterator[tuple[str, ...]]:
    for sent in told.sent:
        ends = str(sent.source), str(sent.target)
        yield words.module(sent.module), *ends, words.shape(sent.shape), sent.dtype, words.size(sent.bytes)


def partition_to_json(told: Partitioned) -> dict[str, Any]:
    """Return the object for a partition."""
    return {
        "mesh": str(told.plan.mesh),
        "bandwidth": told.machine[0].bandwidth,
        "samples": told.samples,
        "seconds": told.found.seconds,
        "pipeline_seconds": None if told.pipeline is None else told.pipeline.seconds,
        "data_seconds": told.data,
        "schedule": told.schedule,
        "boundaries": list(told.boundaries),
        "replicas": list(told.replicas),
        "stages": [_share(told, stage) for stage in told.found.stages],
        "layers": [
            {
                "name": layer.name,
                "seconds": layer.seconds,
                "activation_bytes": layer.activation_bytes,
                "parameter_bytes": layer.parameter_bytes,
                "shared": sorted(layer.shared),
                "may_repeat": layer.may_repeat,
            }
            for layer in told.layers
        ],
    }


def _share(told: Partitioned, stage: Share) -> dict[str, Any]:
    layers = told.layers[stage.first : stage.end]
    return {
        "first": layers[0].name,
        "last": layers[-1].name,
        "replicas": stage.replicas,
        "seconds": sum(layer.seconds for layer in layers),
        "parameter_bytes": sum(layer.parameter_bytes for layer in layers),
        "activation_bytes": layers[-1].activation_bytes,
    }


def print_partition(told: Partitioned, console: Console) -> None:
    """Print stages, what the plain layouts would take, and the lines for a recipe."""
    ranks, level = told.plan.mesh.stage_ranks, told.machine[0]
    say(
        console,
        f"PipeDream's partition of {len(told.layers)} layers among {ranks} ranks with {words.size(level.bandwidth)}/s "
        "between them",
    )
    section(console, "stages, for one micro-batch")
    print_table(console, _FOUND, _share_rows(told))
    section(console, "time for each micro-batch, once the pipeline is full, by this model")
    print_table(console, _BESIDE, _beside(told, ranks))
    section(console, "for the recipe")
    lines = [f"mesh: {told.plan.mesh}", "plan:", "  pipeline:", f"    schedule: {told.schedule}"]
    say(console, "\n".join([*lines, *_lines(told)]))
    if len(told.replicas) == 1:
        console.print()
        outer = Mesh(((Axis.DP.value, ranks),))
        say(
            console, f"One stage on all ranks is data parallelism: the mesh '{outer}' does the same without a pipeline."
        )


def _lines(told: Partitioned) -> Iterator[str]:
    if told.boundaries:
        yield f"    boundaries: [{', '.join(told.boundaries)}]"
    if set(told.replicas) != {1}:
        yield f"    replicas: [{', '.join(map(str, told.replicas))}]"


def _share_rows(told: Partitioned) -> Iterator[tuple[str, ...]]:
    for number, stage in enumerate(told.found.stages):
        share = _share(told, stage)
        yield (
            _between(share["first"], share["last"]),
            str(number),
            str(stage.replicas),
            words.time(share["seconds"]),
            words.size(share["parameter_bytes"]),
            words.size(share["activation_bytes"]),
        )


def _beside(told: Partitioned, ranks: int) -> Iterator[tuple[str, ...]]:
    plain = None if told.pipeline is None else told.pipeline.seconds
    rows = [
        ("this partition", told.found.seconds),
        (f"{ranks} stages of one rank", plain),
        (f"one stage on {ranks} ranks", told.data),
    ]
    for name, seconds in rows:
        if seconds is None:
            yield name, "impossible", ""
        else:
            yield name, words.time(seconds), words.rate(told.samples, seconds)


def _between(first: str, last: str) -> str:
    return words.module(first) if first == last else f"{words.module(first)} .. {words.module(last)}"
