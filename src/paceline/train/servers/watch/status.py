"""What a coordinator says of its job, as a supervisor reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

from paceline.exchange.terms import Terms

Figures: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Of servers and workers, by name."""


@dataclass(frozen=True)
class Status:
    """Where a job is.

    Attributes:
        finished: all tasks are done, and the last snapshot is written.
        failed: why it cannot go on; empty where it can.
        waiting: for what it waits; empty where it does not.
        figures: of servers and workers that are there.
        left: the last ones of those that have just left.
        begun: whether there is anything to save: servers have what the job begins with, or more.
        snapshots: numbers of those that are whole.
        saving: number of the one in the making; None where there is none.
    """

    finished: bool = False
    failed: str = ""
    waiting: str = ""
    figures: Figures = field(default_factory=dict)
    left: Figures = field(default_factory=dict)
    begun: bool = False
    snapshots: tuple[int, ...] = ()
    saving: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], terms: Terms) -> Self:
        """Read what `Observer.status` returned."""
        state, saving = values["state"], values["saving"]
        return cls(
            finished=state == "finished",
            failed=str(values["why"] or "it failed") if state == "failed" else "",
            waiting=_waiting(values, terms) if state == "waiting" else "",
            figures=_by_name(values["members"]),
            left=_by_name(values["left"]),
            begun=bool(values["view"]["chains"]) or values["tasks"]["done"] > terms.first_task,
            snapshots=tuple(one["number"] for one in values["snapshots"]),
            saving=None if saving is None else saving["number"],
        )

    def last_figures(self, end: Status) -> Figures:
        """Return what is told at the end: figures of all who are there then, or were until now.

        Args:
            end: how the job was then; rates are those of before, as nobody works any more.
        """
        before = {**self.left, **self.figures}
        rates = {
            name: {key: value for key, value in values.items() if key.endswith("_per_s")}
            for name, values in before.items()
        }
        return {
            name: {**values, **rates.get(name, {})} for name, values in (before | {**end.left, **end.figures}).items()
        }


def _by_name(members: Iterable[Mapping[str, Any]]) -> Figures:
    ordered = sorted(members, key=lambda member: (str(member["role"]), int(member["id"])))
    return {f"{member['role']}-{member['id']}": dict(member["figures"] or {}) for member in ordered}


def _waiting(values: Mapping[str, Any], terms: Terms) -> str:
    """Return for whom a job waits."""
    roles = [member["role"] for member in values["members"] if not member["leaving"]]
    if not values["view"]["chains"]:
        return f"for servers: there are {roles.count('server')} of {terms.servers}"
    return f"for workers: there are {roles.count('worker')}, and the job's minimum is {terms.workers}"
