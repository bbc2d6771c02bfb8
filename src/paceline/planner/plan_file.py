"""Plans as files: what a search writes, what a run directory holds, and what `paceline train --plan` executes.

plan:           the plan, as `paceline.Plan.from_dict` reads it
batch:          samples of a step
micro_batches:  pieces in which it is computed
expected:       what the search expects of a step, for people
between_ranks:  what carried tensors in the run that wrote it, for people
placements:     where parameters lay in that run, for people
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.documents.source import Genre, read_source
from paceline.errors import PlanError, nearest
from paceline.plan import Plan

_GENRE = Genre("plan", PlanError, "keys such as 'plan:' and 'batch:'", "there is no plan ")
_NEEDED = ("plan", "batch", "micro_batches")
_FOR_PEOPLE = ("expected", "between_ranks", "placements")


@dataclass(frozen=True)
class PlanFile:
    """A plan, and the step that it is for.

    Attributes:
        batch: samples of a step.
        micro_batches: pieces in which it is computed.
    """

    plan: Plan
    batch: int
    micro_batches: int

    def to_yaml(self, for_people: Mapping[str, Any]) -> str:
        """Return the text of the file, with what else people want to know."""
        values = {"plan": self.plan.to_dict(), "batch": self.batch, "micro_batches": self.micro_batches, **for_people}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def read_plan_file(path: Path) -> PlanFile:
    """Read a plan.

    Raises:
        PlanError: the file cannot be read, a key is unknown or missing, or the plan cannot be.
    """
    values = read_source(path, _GENRE).values
    known = (*_NEEDED, *_FOR_PEOPLE)
    for key in values:
        if key not in known:
            raise PlanError(f"{path}: unknown key '{key}'; known keys: {', '.join(known)}.{nearest(str(key), known)}")
    for key in _NEEDED:
        if key not in values:
            raise PlanError(
                f"{path} has no '{key}'; a plan file has {', '.join(_NEEDED)}. `paceline plan -o` writes one."
            )
    batch, micro_batches = (_count(values[key], key, path) for key in _NEEDED[1:])
    if not isinstance(values["plan"], dict):
        raise PlanError(f"{path}: 'plan' is {values['plan']!r}; it is a section with keys such as 'mesh'.")
    try:
        return PlanFile(Plan.from_dict(values["plan"]), batch, micro_batches)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise PlanError(f"{path}: the plan has a value of a wrong kind: {error}.") from error


def _count(value: object, key: str, path: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{path}: '{key}' is {value!r}; it is a whole number from 1.")
    return value
