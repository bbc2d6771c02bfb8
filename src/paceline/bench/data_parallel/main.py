"""`paceline bench data-parallel`: dp and fsdp against serial, DDP, FSDP2 and Accelerate, in one interleaved run.

Settings (`--set key=value`): `rounds`, `steps` (of a turn), `ranks`, `models`, `peers` (both separated by commas),
`backend` (of ours: `auto`, `shm` or `gloo`), `scale` (`full`, or `tiny` to see that it runs), `memory` (`yes` or `no`).
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.bench import options as given
from paceline.bench.contestants import OPPONENT, OURS, Contestant
from paceline.bench.data_parallel.jobs import Job
from paceline.bench.machine import machine, table_console
from paceline.bench.results import found
from paceline.bench.statistics import ratios, slowest, spread
from paceline.bench.table import print_tables
from paceline.bench.workloads import Model, Scale, workload
from paceline.errors import RecipeError
from paceline.runtime.job.backend import Choice
from paceline.runtime.job.launch import launch
from paceline.runtime.process_memory import can_take_memory

_LIMIT_S = 1800.0
_NOTHING: Mapping[str, str] = {}
# glibc otherwise keeps freed blocks of many megabytes, at sizes that depend on what was freed before.
_PROMPT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    rounds: int = 12
    steps: int = 2
    ranks: int = 2
    models: tuple[Model, ...] = tuple(Model)
    peers: tuple[Contestant, ...] = tuple(OPPONENT)
    backend: Choice = Choice.AUTO
    scale: Scale = Scale.FULL
    memory: bool = True

    @classmethod
    def read(cls, options: dict[str, str]) -> Settings:
        """Read `key=value` pairs.

        Raises:
            RecipeError: a key or a value is unknown.
            LaunchError: a backend is.
        """
        readers: dict[str, given.Reader] = {
            "rounds": partial(given.whole_number, least=1),
            "steps": partial(given.whole_number, least=1),
            "ranks": partial(given.whole_number, least=2),
            "models": partial(given.names, known=list(Model)),
            "peers": partial(given.names, known=list(OPPONENT)),
            "backend": given.backend,
            "scale": partial(given.name, known=list(Scale)),
            "memory": given.yes_or_no,
        }
        return given.settings_with(cls(), options, readers)

    def contestants(self, model: Model) -> tuple[Contestant, ...]:
        """Ours first, so that a start is taken before the peers' libraries are loaded."""
        peers = [
            peer
            for peer in self.peers
            if peer is not Contestant.DDP_SYNC_BATCH_NORM or workload(model, self.scale).has_batch_norm
        ]
        opponents = {OPPONENT[peer] for peer in peers}
        return (*(ours for ours in OURS if ours in opponents), *peers)


def main(options: dict[str, str]) -> dict[str, Any]:
    """Measure, print a table, and return the object of `--json`; its keys are told in `benchmarks/README.md`.

    Raises:
        RecipeError: a setting is unknown, or a model needs a library that is not installed.
    """
    settings = Settings.read(options)
    if set(settings.models) - {Model.GPT} and importlib.util.find_spec("transformers") is None:
        raise RecipeError("llama and resnet need Hugging Face's library: install 'paceline[hf]', or --set models=gpt.")
    result: dict[str, Any] = {
        "ratios": {},
        "spread": {},
        "memory": {},
        "forward_backward": {},
        "step_s": {},
        "start": {},
        "loss": {},
        "left_out": {},
        "backend": {},
        "rounds": {},
        "titles": {},
        "settings": {
            "rounds": settings.rounds,
            "steps": settings.steps,
            "ranks": settings.ranks,
            "backend": settings.backend.value,
        },
        "machine": machine(),
    }
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for model in settings.models:
            _measure(model, settings, Path(folder), result)
    print_tables(table_console(), result)
    return result


def _measure(model: Model, settings: Settings, folder: Path, result: dict[str, Any]) -> None:
    contestants = settings.contestants(model)
    times = _run("take_step_times", model, contestants, settings, folder, "step times")
    rounds = {who: slowest([rank["step_s"][who] for rank in times]) for who in times[0]["step_s"]}
    optimizer = {who: slowest([rank["optimizer_s"][who] for rank in times]) for who in rounds}
    passes = {who: [a - b for a, b in zip(rounds[who], optimizer[who], strict=True)] for who in rounds}
    peers = {peer: OPPONENT[peer] for peer in settings.peers if peer in rounds}
    compared = {peer: ratios(rounds[ours], rounds[peer]) for peer, ours in peers.items()}
    result["titles"][model] = workload(model, settings.scale).title
    result["ratios"][model] = {peer: found.median for peer, found in compared.items()}
    result["spread"][model] = {peer: {"low": found.low, "high": found.high} for peer, found in compared.items()}
    result["forward_backward"][model] = {
        peer: ratios(passes[ours], passes[peer]).median for peer, ours in peers.items()
    }
    result["step_s"][model] = {
        who: {**spread(rounds[who]).to_json(), "optimizer": spread(optimizer[who]).median} for who in rounds
    }
    result["loss"][model] = times[0]["loss"]
    result["left_out"][model] = times[0]["left_out"]
    result["backend"][model] = times[0]["backend"]
    result["machine"]["backend"] = times[0]["words"]
    result["rounds"][model] = rounds
    if Contestant.OURS_DP in contestants:
        second = _run("take_start", model, contestants, settings, folder, "second start")
        result["start"][model] = {
            "cold": times[0]["start"][Contestant.OURS_DP],
            "warm": second[0]["start"][Contestant.OURS_DP],
        }
    if settings.memory and can_take_memory():
        ran = tuple(who for who in contestants if who in rounds)
        memory = _run("take_memory", model, ran, settings, folder, "memory", _PROMPT_MALLOC)
        result["memory"][model] = {
            who: {key: max(rank["memory"][who][key] for rank in memory) for key in ("step_bytes", "start_bytes")}
            for who in ran
        }


def _run(
    name: str,
    model: Model,
    contestants: Sequence[Contestant],
    settings: Settings,
    folder: Path,
    title: str,
    environment: Mapping[str, str] = _NOTHING,
) -> list[dict[str, Any]]:
    """Run a job on fresh processes, one thread each, and return what its ranks found."""
    own = folder / f"{model}-{name}"
    own.mkdir()
    job = Job(
        folder=str(own),
        model=model,
        scale=settings.scale,
        contestants=tuple(contestants),
        rounds=settings.rounds,
        steps=settings.steps,
        backend=settings.backend.value,
        title=f"{model}: {title}",
    )
    launch(
        f"paceline.bench.data_parallel.jobs:{name}",
        job.to_json(),
        settings.ranks,
        # A cache of this run alone: the first start of each model is cold, the others are not.
        environment={"OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(folder / "programs"), **environment},
        timeout_s=_LIMIT_S,
    )
    return found(own, settings.ranks)
