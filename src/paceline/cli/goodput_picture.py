"""Goodput against the interval between checkpoints, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.simulator.curves import COLOURS, INK, PALE, legend_below, logarithmic, panels, save
from paceline.simulator.outages.weeks import Weeks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MINUTE_S = 60.0


def save_picture(weeks: Weeks, title: str, file: Path) -> None:
    """Draw the goodput of each number of spare hosts beside the formulas, and what the rest of the time goes into.

    Raises:
        RecipeError: the file cannot be written.
    """
    figure, (left, right) = panels(2)
    _draw_goodput(left, weeks)
    _draw_rest(right, weeks)
    figure.suptitle(title, fontsize=10)
    save(figure, file)


def _draw_goodput(axes: Axes, weeks: Weeks) -> None:
    minutes = weeks.policies[0].found.interval_s / _MINUTE_S
    for policy, colour in zip(weeks.policies, COLOURS * len(weeks.policies), strict=False):
        found, of = policy.found, f", {policy.spares} spare hosts" if weeks.waits else ""
        best = minutes[found.best], 100 * found.goodput[found.best]
        label = f"simulated{of}: {best[1]:.1f} % every {best[0]:.3g} min"
        axes.fill_between(minutes, 100 * found.low, 100 * found.high, color=colour, alpha=PALE, linewidth=0)
        axes.plot(minutes, 100 * found.goodput, color=colour, linewidth=1.6, label=label)
        axes.plot(*best, "o", color=colour, markersize=6)
    axes.plot(minutes, 100 * weeks.daly, color=INK, linestyle="--", linewidth=1, label="Daly")
    axes.plot(minutes, 100 * weeks.young, color=INK, linestyle=":", linewidth=1, label="Young")
    _label_minutes(axes)
    axes.set_ylabel("goodput, % of the time (bands: 9 of 10 runs)", fontsize=9)
    legend_below(axes, columns=1)


def _draw_rest(axes: Axes, weeks: Weeks) -> None:
    """The first policy's lost time, stacked."""
    found = weeks.policies[0].found
    names = [spent for spent, share in found.shares.items() if spent != "useful" and share.any()]
    minutes = found.interval_s / _MINUTE_S
    colours = (COLOURS * len(names))[1 : len(names) + 1]
    axes.stackplot(minutes, *(100 * found.shares[name] for name in names), labels=list(map(str, names)), colors=colours)
    _label_minutes(axes)
    axes.set_ylabel("% of the time", fontsize=9)
    of = f", {weeks.policies[0].spares} spare hosts" if weeks.waits else ""
    axes.set_title(f"what the rest goes into{of}", fontsize=9)
    legend_below(axes, columns=2)


def _label_minutes(axes: Axes) -> None:
    logarithmic(axes, "x")
    axes.set_xlabel("minutes between checkpoints", fontsize=9)
