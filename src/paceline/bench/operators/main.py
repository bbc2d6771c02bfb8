"""`paceline bench operators`: split operators against PyTorch's tensor parallelism, DDP and FSDP2, interleaved.

Settings (`--set key=value`): `rounds`, `steps` (of a turn), `ranks`, `models`, `peers` (both separated by commas),
`gloo` (`yes` or `no`: once more with ours on Gloo alone), `scale` (`full`, or `tiny` to see that it runs), `memory`.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.bench import options as given
from paceline.bench.groups import GLOO
from paceline.bench.machine import machine, table_console
from paceline.bench.operators.contestants import AXES, PEERS, VARIANTS, Contestant, can_train, opponent, ours
from paceline.bench.operators.jobs import Job
from paceline.bench.operators.table import print_tables
from paceline.bench.operators.workloads import Model, workload
from paceline.bench.results import found
from paceline.bench.statistics import Spread, ratios, slowest, spread
from paceline.bench.workloads import Scale
from paceline.errors import RecipeError
from paceline.runtime.job.backend import Choice
from paceline.runtime.job.launch import launch
from paceline.runtime.process_memory import can_take_memory

_LIMIT_S = 3600.0
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
    peers: tuple[Contestant, ...] = PEERS
    gloo: bool = True
    scale: Scale = Scale.FULL
    memory: bool = True

    @classmethod
    def read(cls, options: dict[str, str]) -> Settings:
        """Read `key=value` pairs.

        Raises:
            RecipeError: a key or a value is unknown.
        """
        readers: dict[str, given.Reader] = {
            "rounds": partial(given.whole_number, least=1),
            "steps": partial(given.whole_number, least=1),
            "ranks": partial(given.whole_number, least=2),
            "models": partial(given.names, known=list(Model)),
            "peers": partial(given.names, known=list(PEERS)),
            "gloo": given.yes_or_no,
            "memory": given.yes_or_no,
            "scale": partial(given.name, known=list(Scale)),
        }
        return given.settings_with(cls(), options, readers)

    def contestants(self, model: Model) -> tuple[Contestant, ...]:
        """Ours first, so that a start is taken before the peers' libraries are loaded."""
        return (*ours(model, self.ranks), *(peer for peer in self.peers if can_train(peer, model, self.ranks)))

    def on_gloo_alone(self, model: Model) -> tuple[Contestant, ...]:
        """Return who runs once more where ours have Gloo only: the peers that split operators too, and opponents."""
        peers = [peer for peer in self.contestants(model) if peer in VARIANTS]
        return (*dict.fromkeys(opponent(peer, model, self.ranks) for peer in peers), *peers) if self.gloo else ()

    def to_json(self) -> dict[str, Any]:
        """Return what of it a reader of the figures has to know."""
        return {key: value for key, value in asdict(self).items() if key in ("rounds", "steps", "ranks", "scale")}


def main(options: dict[str, str]) -> dict[str, Any]:
    """Measure, print tables, and return the object of `--json`; its keys are told in `benchmarks/README.md`.

    Raises:
        RecipeError: a setting is unknown, or a model needs a library that is not installed.
    """
    settings = Settings.read(options)
    needing = [model for model in settings.models if model.needs_transformers]
    if needing and importlib.util.find_spec("transformers") is None:
        others = ",".join(model for model in Model if model not in needing)
        raise RecipeError(
            f"{' and '.join(needing)} need Hugging Face's library: install 'paceline[hf]', or --set models={others}."
        )
    result: dict[str, Any] = {
        "ratios": {},
        "spread": {},
        "memory": {},
        "activations": {},
        "every_ratio": {},
        "step_s": {},
        "start": {},
        "loss": {},
        "left_out": {},
        "backend": {},
        "rounds": {},
        "gloo": {},
        "titles": {},
        "settings": settings.to_json(),
        "machine": machine(),
    }
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for model in settings.models:
            _measure(model, settings, Path(folder), result)
    print_tables(table_console(), result)
    return result


def _measure(model: Model, settings: Settings, folder: Path, result: dict[str, Any]) -> None:
    contestants = settings.contestants(model)
    times = _run("take_step_times", "step times", model, contestants, settings, folder)
    rounds, optimizer = _by_round(times, "step_s"), _by_round(times, "optimizer_s")
    ran = tuple(who for who in contestants if who in rounds)
    peers = [peer for peer in ran if peer not in AXES]
    compared: dict[str, Spread] = {
        peer: ratios(rounds[opponent(peer, model, settings.ranks)], rounds[peer]) for peer in peers
    }
    result["titles"][model] = workload(model, settings.scale).title
    result["every_ratio"][model] = {
        who: {peer: ratios(rounds[who], rounds[peer]).median for peer in peers} for who in ran if who in AXES
    }
    result["step_s"][model] = {
        who: {**spread(rounds[who]).to_json(), "optimizer": spread(optimizer[who]).median} for who in rounds
    }
    for key in ("loss", "left_out", "backend", "start"):
        result[key][model] = times[0][key]
    result["machine"]["backend"] = times[0]["words"]
    result["rounds"][model] = rounds

    alone = tuple(who for who in settings.on_gloo_alone(model) if who in rounds)
    if any(who in AXES for who in alone):
        on_gloo = _by_round(
            _run("take_step_times", "Gloo alone", model, alone, settings, folder, Choice.GLOO), "step_s"
        )
        compared |= {
            f"{peer}-{GLOO}": ratios(on_gloo[opponent(peer, model, settings.ranks)], on_gloo[peer])
            for peer in on_gloo
            if peer not in AXES
        }
        result["gloo"][model] = {
            "step_s": {who: spread(on_gloo[who]).to_json() for who in on_gloo},
            "rounds": on_gloo,
        }
    result["ratios"][model] = {peer: found.median for peer, found in compared.items()}
    result["spread"][model] = {peer: {"low": found.low, "high": found.high} for peer, found in compared.items()}
    if settings.memory and can_take_memory():
        taken = _run("take_memory", "memory", model, ran, settings, folder, environment=_PROMPT_MALLOC)
        memory = {
            who: {key: max(rank["memory"][who][key] for rank in taken) for key in taken[0]["memory"][who]}
            for who in ran
        }
        result["memory"][model] = memory
        result["activations"][model] = _activations(memory)


def _activations(memory: dict[Contestant, dict[str, int]]) -> dict[Contestant, dict[str, float]]:
    """Return what a step needs beyond what is kept from step to step, in bytes and as a part of serial's."""
    needed = {who: taken["step_bytes"] - taken["held_bytes"] for who, taken in memory.items()}
    serial = needed.get(Contestant.SERIAL)
    return {who: {"bytes": count, **({"of_serial": count / serial} if serial else {})} for who, count in needed.items()}


def _by_round(ranks: list[dict[str, Any]], key: str) -> dict[Contestant, list[float]]:
    """Return, for each contestant, the seconds of the slowest rank in each round."""
    return {Contestant(who): slowest([rank[key][who] for rank in ranks]) for who in ranks[0][key]}


def _run(
    name: str,
    title: str,
    model: Model,
    contestants: Sequence[Contestant],
    settings: Settings,
    folder: Path,
    backend: Choice = Choice.AUTO,
    environment: Mapping[str, str] = _NOTHING,
) -> list[dict[str, Any]]:
    """Run a job on fresh processes, one thread each, and return what its ranks found."""
    own = folder / f"{model}-{name}-{backend.value}"
    own.mkdir()
    job = Job(
        folder=str(own),
        model=model,
        scale=settings.scale,
        contestants=tuple(contestants),
        rounds=settings.rounds,
        steps=settings.steps,
        backend=backend.value,
        title=f"{model}: {title}",
    )
    launch(
        f"paceline.bench.operators.jobs:{name}",
        job.to_json(),
        settings.ranks,
        # A cache of this run alone: the first start of each model is cold, the others are not.
        environment={"OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(folder / "programs"), **environment},
        timeout_s=_LIMIT_S,
    )
    return found(own, settings.ranks)
