"""Curves as pictures: what every figure of this project needs of matplotlib, which is not a part of the base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import RecipeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2a6f97", "#c8553d", "#588157", "#e09f3e", "#7b2d8b", "#6c757d")
"""Told apart by people who do not see all colours, too, in this order."""
INK = "#222222"
PALE = 0.2
"""Opacity of areas behind curves."""
_HEIGHT, _WIDTH = 4.6, 4.8
_FORMATS = (".png", ".svg")


def check_picture(file: Path) -> None:
    """Hold a file for a picture to what can be written, before anything is computed for it.

    Raises:
        RecipeError: another suffix, or matplotlib is not there.
    """
    if file.suffix not in _FORMATS:
        raise RecipeError(f"{file} is no picture; curves are drawn as {' or '.join(_FORMATS)}.")
    try:
        import matplotlib  # noqa: F401  (whether it is there)
    except ImportError as error:
        raise RecipeError("drawing curves needs matplotlib: pip install paceline[viz].") from error


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with some panels side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH * count, _HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, count, place + 1) for place in range(count)]
    for each in axes:
        each.grid(True, which="major", linewidth=0.4, alpha=0.5)
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
    return figure, axes


def logarithmic(axes: Axes, names: str, base: int = 10) -> None:
    """Make the axes named, `x`, `y` or `xy`, logarithmic, with numbers that people write."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in names:
            axes.set(**{f"{name}scale": "log"})
            axis.set_major_locator(LogLocator(base, subs=(1.0, 2.0, 5.0) if base == 10 else (1.0,)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())


def legend_below(axes: Axes, columns: int) -> None:
    """Say what is what below a panel, where no curve is."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=columns, fontsize=8, frameon=False)


def save(figure: Figure, file: Path) -> None:
    """Write a figure in the form that the file's suffix says.

    Raises:
        RecipeError: the file cannot be written.
    """
    from matplotlib import rc_context

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "paceline"}):  # equal figures are equal files
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {})
    except OSError as error:
        raise RecipeError(f"the picture {file} cannot be written: {error}.") from error
