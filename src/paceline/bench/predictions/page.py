"""The part of `docs/accuracy.md` that is the output of `paceline bench predictions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.bench.predictions.table import percent, ranges


def lines_of_page(result: Mapping[str, Any], file: str) -> Iterator[str]:
    """Yield the lines of the page: what `predictions.result_of` returns, for a file of that name."""
    read = result["read"]
    yield f"    paceline bench predictions --data {file} --set markdown=docs/accuracy.md"
    yield ""
    yield (
        f"{read['rows']} rows, of which {read['predicted']} are predicted. A run that tells its time in several ways "
        "counts once. Errors are of predicted over measured, in per cent."
    )
    for title, compared in (("Step times", result), ("Memory", result["memory"])):
        yield from _errors(f"{title}, rows never fitted", compared["by_source"], compared["all"])
        if compared["fitted"]:
            yield from _errors(f"{title}, fitted rows", compared["fitted"], None)
    if result["regret"]["groups"]:
        yield from _regrets(result["regret"])
    yield ""
    yield f"Fitted rows, by line of {file}: {ranges(result['fitted_rows'], 400) or 'none'}."
    yield ""
    yield "| Left out | Rows |"
    yield "|---|---|"
    for reason, found in result["left_out"].items():
        yield f"| {reason} | {found['rows']} |"


def _errors(title: str, by_source: Mapping[str, Any], everything: Mapping[str, Any] | None) -> Iterator[str]:
    yield ""
    yield f"### {title}"
    yield ""
    yield "| Source, machine | Rows | MAPE | Median | Worst | Bias |"
    yield "|---|---|---|---|---|---|"
    rows = list(by_source.items())
    if everything is not None and everything["rows"]:
        rows.append(("all", everything))
    for name, found in rows:
        shares = " | ".join(percent(found[key]) for key in ("mape", "median", "worst", "bias"))
        yield f"| {name} | {found['rows']} | {shares} |"


def _regrets(regret: Mapping[str, Any]) -> Iterator[str]:
    costly = [each for each in regret["groups"].items() if each[1]["regret"] > 0]
    count = len(regret["groups"])
    yield ""
    yield "### Regret of the layout predicted to be fastest"
    yield ""
    yield (
        f"Mean {percent(regret['mean'])}, worst {percent(regret['worst'])}, over {count} groups of at least three "
        f"layouts of one model, batch and number of GPUs. The fastest is picked in {count - len(costly)} of them; in "
        "the others:"
    )
    yield ""
    yield "| Model, machine | Layouts | Regret |"
    yield "|---|---|---|"
    for name, found in sorted(costly, key=lambda each: -each[1]["regret"]):
        yield f"| {name} | {found['rows']} | {percent(found['regret'])} |"
