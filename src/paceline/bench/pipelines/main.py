"""`paceline bench pipelines`: each schedule of ours against `torch.distributed.pipelining`'s and what is possible.

Settings (`--set key=value`): `rounds`, `steps` (of a turn), `ranks`, `schedules` (separated by commas), `cut` (`auto`,
or `layers`: where torch's stages begin), `gloo` (`yes` or `no`: once more with ours on Gloo alone), `scale` (`full`, or
`tiny` to see that it runs), `memory`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.bench import options as given
from paceline.bench.groups import GLOO
from paceline.bench.machine import machine, table_console
from paceline.bench.pipelines import pytorch
from paceline.bench.pipelines.contestants import Contestant, Cut, Schedule, Setting, Side
from paceline.bench.pipelines.figures import Seen, bound, compared, of_least, times
from paceline.bench.pipelines.jobs import Job
from paceline.bench.pipelines.table import print_tables
from paceline.bench.results import found
from paceline.bench.statistics import slowest
from paceline.bench.turns import SERIAL
from paceline.bench.workloads import Model, Scale
from paceline.runtime.job.backend import Choice
from paceline.runtime.job.launch import launch
from paceline.runtime.process_memory import can_take_memory

_LIMIT_S = 3600.0
_SAME = 1e-4  # losses of all who train the same, relative to each other
_NOTHING: Mapping[str, str] = {}
# glibc otherwise keeps freed blocks of many megabytes, at sizes that depend on what was freed before.
_PROMPT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    rounds: int = 12
    steps: int = 2
    ranks: int = 2
    schedules: tuple[Schedule, ...] = tuple(Schedule)
    cut: Cut = Cut.AUTO
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
            "schedules": partial(given.names, known=list(Schedule)),
            "cut": partial(given.name, known=list(Cut)),
            "gloo": given.yes_or_no,
            "memory": given.yes_or_no,
            "scale": partial(given.name, known=list(Scale)),
        }
        return given.settings_with(cls(), options, readers)

    @property
    def setting(self) -> Setting:
        """What all contestants have in common."""
        return Setting(self.scale, self.ranks, self.cut)

    @property
    def ours(self) -> tuple[str, ...]:
        """Ours on each schedule."""
        return tuple(str(Contestant(Side.OURS, schedule)) for schedule in self.schedules)

    @property
    def torch(self) -> tuple[str, ...]:
        """Those schedules that torch has."""
        return tuple(str(Contestant(Side.TORCH, s)) for s in self.schedules if pytorch.has(s.kind))

    @property
    def controls(self) -> tuple[str, ...]:
        """Ours without communication; schedules of the same stages have one together."""
        return tuple(dict.fromkeys(str(Contestant(Side.CONTROL, schedule.control)) for schedule in self.schedules))

    def to_json(self) -> dict[str, Any]:
        """Return what of it a reader of the figures has to know."""
        own = {key: value for key, value in asdict(self).items() if key not in ("gloo", "memory")}
        return {**own, "layers": self.setting.layers, "micro_batches": self.setting.micro_batches}


def main(options: dict[str, str]) -> dict[str, Any]:
    """Measure, print tables, and return the object of `--json`; its keys are told in `benchmarks/README.md`.

    Raises:
        RecipeError: a setting is unknown.
        RuntimeError: contestants do not train the same, so that there is nothing to compare.
    """
    settings = Settings.read(options)
    on = machine()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        figures, on["backend"] = _measure(settings, Path(folder))
    result: dict[str, Any] = {key: {Model.GPT.value: value} for key, value in figures.items()}
    result |= {"settings": settings.to_json(), "machine": on}
    print_tables(table_console(), result)
    return result


def opponent(peer: str, schedules: Sequence[Schedule]) -> str:
    """Return which of ours a peer is compared with: the one on its schedule, or 1F1B where it has none."""
    if peer != SERIAL:
        return str(Contestant(Side.OURS, Contestant.named(peer).schedule))
    ours = Schedule.ONE_F_ONE_B if Schedule.ONE_F_ONE_B in schedules else schedules[0]
    return str(Contestant(Side.OURS, ours))


def check_losses(found: Mapping[str, Any]) -> None:
    """Refuse to compare those who do not train the same.

    Raises:
        RuntimeError: losses of the first two steps differ.
    """
    for key in ("loss", "next_loss"):
        losses = {who: loss for who, loss in found[key].items() if not who.startswith(Side.CONTROL)}
        first = next(iter(losses))
        for who, loss in losses.items():
            if not math.isclose(loss, losses[first], rel_tol=_SAME):
                raise RuntimeError(
                    f"{who} does not train what {first} does: the {key.replace('_', ' ')} is {loss:.6f}, not "
                    f"{losses[first]:.6f}. Their times say nothing about each other."
                )


def _measure(settings: Settings, folder: Path) -> tuple[dict[str, Any], str]:
    """Return the figures, and in words what ours ran on."""
    names = (*settings.ours, SERIAL, *settings.torch, *settings.controls)
    told = _run("take_step_times", "step times", names, settings, folder, watched=settings.schedules)
    check_losses(told[0])
    rounds, optimizer = _by_round(told, "step_s"), _by_round(told, "optimizer_s")
    peers = [peer for peer in (SERIAL, *settings.torch) if peer in rounds]
    against = {peer: opponent(peer, settings.schedules) for peer in peers}
    pairs = {peer: compared(rounds[ours], rounds[peer]) for peer, ours in against.items()}
    on_gloo: dict[str, list[float]] = {}
    if settings.gloo and len(peers) > 1:
        alone = (*(against[peer] for peer in peers[1:]), *peers[1:])
        again = _run("take_step_times", "Gloo alone", alone, settings, folder, backend=Choice.GLOO)
        check_losses(again[0])
        on_gloo = _by_round(again, "step_s")
        pairs |= {f"{peer}-{GLOO}": compared(on_gloo[against[peer]], on_gloo[peer]) for peer in peers[1:]}
    seen = {
        schedule: Seen(
            settings.setting,
            schedule,
            [rank["seen"][schedule] for rank in told],
            [rank["seen"][schedule.control] for rank in told],
        )
        for schedule in settings.schedules
    }
    figures = {
        "ratios": {peer: found["median"] for peer, found in pairs.items()},
        "spread": pairs,
        "step_s": {
            who: {**times(seconds), "optimizer": times(optimizer[who])["median"]} for who, seconds in rounds.items()
        },
        "bound": {
            schedule: of_least(rounds[ours], bound(settings.setting, schedule, rounds[SERIAL]))
            for schedule, ours in zip(settings.schedules, settings.ours, strict=True)
        },
        "control": {schedule: _against_control(of, rounds, optimizer) for schedule, of in seen.items()},
        "bubble": {schedule: of.bubble() for schedule, of in seen.items()},
        "activations": {schedule: of.activations() for schedule, of in seen.items()},
        "memory": _memory(settings, (*settings.ours, *peers), folder),
        "gloo": {"step_s": {who: times(seconds) for who, seconds in on_gloo.items()}, "rounds": on_gloo},
        "rounds": rounds,
        "titles": settings.setting.workload.title,
        **{key: told[0][key] for key in ("loss", "left_out", "backend", "start")},
    }
    return figures, told[0]["words"]


def _memory(settings: Settings, names: Sequence[str], folder: Path) -> dict[str, dict[str, int]]:
    """Return the peak memory of each contestant, of the rank with most."""
    if not (settings.memory and can_take_memory()):
        return {}
    ranks = _run("take_memory", "memory", names, settings, folder, environment=_PROMPT_MALLOC)
    taken = [rank["memory"] for rank in ranks]
    return {who: {key: max(rank[who][key] for rank in taken) for key in taken[0][who]} for who in names}


def _against_control(
    seen: Seen, rounds: Mapping[str, list[float]], optimizer: Mapping[str, list[float]]
) -> dict[str, float]:
    """Return how long a step takes at least with nothing to wait for but other stages, and how ours compares."""
    control = str(Contestant(Side.CONTROL, seen.schedule.control))
    least = seen.least(rounds[control], optimizer[control])
    ours = rounds[str(Contestant(Side.OURS, seen.schedule))]
    return {**of_least(ours, least), "step_s": times(rounds[control])["median"], "stretch": seen.stretch}


def _by_round(ranks: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[float]]:
    """Return, for each contestant, the seconds of the slowest rank in each round."""
    return {who: slowest([rank[key][who] for rank in ranks]) for who in ranks[0][key]}


def _run(
    name: str,
    title: str,
    names: Sequence[str],
    settings: Settings,
    folder: Path,
    watched: Sequence[Schedule] = (),
    backend: Choice = Choice.AUTO,
    environment: Mapping[str, str] = _NOTHING,
) -> list[dict[str, Any]]:
    """Run a job on fresh processes, one thread each, and return what its ranks found."""
    own = folder / f"{name}-{backend.value}"
    own.mkdir()
    job = Job(
        folder=str(own),
        scale=settings.scale,
        ranks=settings.ranks,
        cut=settings.cut,
        names=tuple(names),
        watched=tuple(watched),
        rounds=settings.rounds,
        steps=settings.steps,
        backend=backend.value,
        title=title,
    )
    launch(
        f"paceline.bench.pipelines.jobs:{name}",
        job.to_json(),
        settings.ranks,
        # A cache of this run alone: the first start is cold, the others are not.
        environment={"OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(folder / "programs"), **environment},
        timeout_s=_LIMIT_S,
    )
    return found(own, settings.ranks)
