"""`python -m paceline.bench.pipelines.page FILE...`: the tables of `docs/benchmarks.md`, from what `--json` wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.bench.groups import GLOO
from paceline.bench.table import mebibytes


def of_steps(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of step times, header first: one for each schedule, for its ranks."""
    yield (
        "| Ranks | Schedule | Ours / torch | low, min | Both on Gloo | low, min | Ours / bound | low, min "
        "| Ours / without communication | low, min | Memory a rank, ours | Memory a rank, torch |"
    )
    yield f"|{'---|' * 12}"
    for model, bounds in result["bound"].items():
        spread, memory = result["spread"][model], result["memory"].get(model, {})
        for schedule, of_bound in bounds.items():
            peer = f"torch-{schedule}"
            pairs = (spread.get(peer), spread.get(f"{peer}-{GLOO}"), of_bound, result["control"][model][schedule])
            sizes = [memory.get(who) for who in (f"paceline-{schedule}", peer)]
            yield _row(
                str(result["settings"]["ranks"]),
                f"`{schedule}`",
                *(cell for pair in pairs for cell in _pair(pair)),
                *(mebibytes(size["step_bytes"]) if size else "" for size in sizes),
            )


def of_bubbles(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of bubbles and activations, header first: one for each schedule."""
    yield (
        "| Ranks | Schedule | Bubble, formula | With measured durations | Measured | low, min "
        "| Activations by stage, MiB, predicted | measured |"
    )
    yield f"|{'---|' * 8}"
    for model, bubbles in result["bubble"].items():
        for schedule, found in bubbles.items():
            shares = [f"{found[key] * 100:.1f}%" for key in ("formula", "of_durations", "median")]
            held = result["activations"][model][schedule]
            sizes = [", ".join(f"{count / 2**20:.1f}" for count in held[key]) for key in ("predicted", "measured")]
            lowest = f"{found['low'] * 100:.1f}, {found['min'] * 100:.1f}"
            yield _row(str(result["settings"]["ranks"]), f"`{schedule}`", *shares, lowest, *sizes)


def _pair(found: Mapping[str, float] | None) -> list[str]:
    return ["", ""] if found is None else [f"{found['median']:.2f}", f"{found['low']:.2f}, {found['min']:.2f}"]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        measured = json.loads(Path(name).read_text(encoding="utf-8"))
        print(*of_steps(measured), "", *of_bubbles(measured), "", sep="\n")
