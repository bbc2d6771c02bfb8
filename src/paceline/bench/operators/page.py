"""`python -m paceline.bench.operators.page FILE...`: the tables of `docs/benchmarks.md`, from what `--json` wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.bench.groups import GLOO
from paceline.bench.operators.contestants import AXES, Contestant, mesh_of, opponent
from paceline.bench.operators.workloads import Model
from paceline.bench.table import mebibytes


def of_steps(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of step times, header first: one for each model and peer."""
    ranks = result["settings"]["ranks"]
    yield "| Model | Mesh | Peer | Ours / peer, step time | Spread | Memory a rank, ours | Memory a rank, peer |"
    yield "|---|---|---|---|---|---|---|"
    for model, compared in result["ratios"].items():
        memory = result["memory"].get(model, {})
        for key, ratio in compared.items():
            peer = Contestant(key.removesuffix(f"-{GLOO}"))
            ours = opponent(peer, Model(model), ranks)
            spread = "{low:.2f}-{high:.2f}".format(**result["spread"][model][key])
            sizes = [mebibytes(memory[who]["step_bytes"]) if who in memory else "" for who in (ours, peer)]
            name = f"{peer}, both on Gloo" if key != peer else peer
            yield _row(model, f"`{mesh_of(ours, ranks)}`", name, f"{ratio:.2f}", spread, *sizes)


def of_activations(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of activations, header first: one for each model and mesh of ours."""
    ranks = result["settings"]["ranks"]
    yield "| Model | Mesh | Activations a rank, MiB | Serial, MiB | Of serial | Step time / serial |"
    yield "|---|---|---|---|---|---|"
    for model, found in result["activations"].items():
        if Contestant.SERIAL not in found:
            continue
        serial = mebibytes(found[Contestant.SERIAL]["bytes"])
        for who in (who for who in AXES if who in found):
            part, time = found[who]["of_serial"], result["every_ratio"][model][who][Contestant.SERIAL]
            mesh = f"`{mesh_of(who, ranks)}`"
            yield _row(model, mesh, mebibytes(found[who]["bytes"]), serial, f"{part:.2f}", f"{time:.2f}")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        measured = json.loads(Path(name).read_text(encoding="utf-8"))
        print(*of_steps(measured), "", *of_activations(measured), "", sep="\n")
