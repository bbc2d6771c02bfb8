"""Measured speed-ups, the laws that fit them, and the ideal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.simulator.curves import COLOURS, INK, PALE, legend_below, logarithmic, panels, save
from paceline.simulator.laws import amdahl_speedup, gustafson_speedup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = (
    ("strong", "strong scaling", "speed-up", "Amdahl", amdahl_speedup),
    ("weak", "weak scaling", "work done in the same time", "Gustafson", gustafson_speedup),
)


def save_picture(result: dict[str, Any], file: Path) -> None:
    """Draw what `scaling.main` returns.

    Raises:
        RecipeError: the file cannot be written.
    """
    figure, both = panels(len(_PANELS))
    for axes, (kind, title, label, law, speedup) in zip(both, _PANELS, strict=True):
        found = result[kind]
        most = max(map(int, [*found["step_s"], *found["predicted"]]))
        ranks = np.geomspace(1, most, 200)
        fraction = found["fraction"]
        axes.plot(ranks, ranks, color=INK, linestyle=":", linewidth=1, label="ideal")
        axes.fill_between(
            ranks, speedup(fraction["high"], ranks), speedup(fraction["low"], ranks), color=COLOURS[0], alpha=PALE, lw=0
        )
        words = f"{law}, serial fraction {fraction['value']:.3f} ({fraction['low']:.3f} to {fraction['high']:.3f})"
        axes.plot(ranks, speedup(fraction["value"], ranks), color=COLOURS[0], linewidth=1.6, label=words)
        _draw_measured(axes, found["speedup"])
        if kind == "strong" and found["limit"]["value"] is not None and found["limit"]["value"] < most:
            axes.axhline(found["limit"]["value"], color=COLOURS[0], linestyle="--", linewidth=0.8, label="limit")
        logarithmic(axes, "xy", base=2)
        axes.set_xlabel("ranks", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
        axes.set_title(title, fontsize=9)
        legend_below(axes, columns=1)
    figure.suptitle(f"{result['title']}, {result['machine']['cores']} cores", fontsize=10)
    save(figure, file)


def _draw_measured(axes: Axes, speedups: dict[str, dict[str, float]]) -> None:
    medians = np.array([each["median"] for each in speedups.values()])
    low, high = (np.array([each[name] for each in speedups.values()]) for name in ("low", "high"))
    axes.errorbar(
        list(map(int, speedups)),
        medians,
        yerr=[medians - low, high - medians],
        fmt="o",
        color=COLOURS[1],
        markersize=5,
        capsize=3,
        label="measured (quartiles)",
    )
