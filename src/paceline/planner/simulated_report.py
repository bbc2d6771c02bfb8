"""A simulated step for people and for programs: a table with a line for ranks that are alike, and one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from paceline.planner import printing, words
from paceline.simulator.placed.memory import Held, Peak
from paceline.simulator.placed.simulation import RankTold, Simulation

_LISTED = 6
_TOLD = (Held.PARAMETERS, Held.GRADIENTS, Held.OPTIMIZER, Held.ACTIVATIONS)


def print_simulation(told: Simulation, console: Console) -> None:
    """Print what a step comes to."""
    pieces = f"{told.micro_batches} micro-batch{'es' * (told.micro_batches > 1)}"
    printing.section(console, f"A step of mesh '{told.plan.mesh}': {words.time(told.step_s)}, {pieces}")
    console.print(f"times: {told.source}", highlight=False, markup=False)
    phases = ", ".join(f"{name} {words.time(seconds)}" for name, seconds in told.phases.items())
    console.print(f"of which: {phases}", highlight=False, markup=False)
    launches = any(rank.launch_s for rank in told.ranks)
    columns = ("ranks", "compute", "exposed", *(("launching",) if launches else ()), "bubble", "update")
    rows = [
        (
            ranks_in_words(rank.ranks),
            words.time(rank.compute_s),
            ", ".join(f"{axis} {words.time(seconds)}" for axis, seconds in rank.exposed_s.items()) or "-",
            *((words.time(rank.launch_s),) if launches else ()),
            words.time(rank.bubble_s),
            words.time(rank.update_s),
        )
        for rank in told.ranks
    ]
    printing.print_table(console, columns, rows)
    printing.section(console, "Memory at its peak")
    printing.print_table(console, ("where", "ranks", "memory", *_TOLD, "other"), map(_peak_row, told.ranks))


def _peak_row(rank: RankTold) -> Sequence[str]:
    parts = [rank.peak.parts.get(part, 0) for part in _TOLD]
    where = where_in_words(rank.peak)
    return (
        where,
        ranks_in_words(rank.ranks),
        *map(words.size, (rank.peak.bytes, *parts, rank.peak.bytes - sum(parts))),
    )


def simulation_to_json(told: Simulation) -> dict[str, Any]:
    """Return one object; docs/simulator.md tells its keys."""
    return {
        "plan": told.plan.to_dict(),
        "times": told.source,
        "step_s": told.step_s,
        "micro_batches": told.micro_batches,
        "phases_s": dict(told.phases),
        "ranks": [_rank_to_json(rank) for rank in told.ranks],
    }


def _rank_to_json(rank: RankTold) -> dict[str, Any]:
    peak = rank.peak
    return {
        "ranks": list(rank.ranks),
        "compute_s": rank.compute_s,
        "exposed_s": dict(rank.exposed_s),
        "bubble_s": rank.bubble_s,
        "launch_s": rank.launch_s,
        "update_s": rank.update_s,
        "handed_bytes": dict(rank.handed_bytes),
        "peak": {
            "bytes": peak.bytes,
            "phase": peak.phase,
            "module": peak.module,
            "operator": peak.operator,
            "parts": {part.value: nbytes for part, nbytes in peak.parts.items()},
        },
    }


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return `0`, `0-3` or `0, 2`, and how many there are where they are many."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > _LISTED:
        return f"{ranks[0]}, {ranks[1]}, .. {ranks[-1]} ({len(ranks)})"
    return ", ".join(map(str, ranks))


def where_in_words(peak: Peak) -> str:
    """Return `backward, blocks.5, gelu_backward`."""
    return ", ".join(filter(None, (peak.phase, peak.module, peak.operator)))
