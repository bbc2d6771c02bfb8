"""What a coordinator says of its job, as a supervisor reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from paceline.exchange.terms import Terms


@dataclass(frozen=True)
class Status:
    """Where a job is.

    Attributes:
        finished: all tasks are done, and the last snapshot is written.
        failed: why it cannot go on; empty where it can.
        waiting: for what it waits; empty where it does not.
        figures: of servers and workers by name.
    """

    finished: bool = False
    failed: str = ""
    waiting: str = ""
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any], terms: Terms) -> Self:
        """Read what `Observer.status` returned."""
        members = sorted(values["members"], key=lambda member: (str(member["role"]), int(member["id"])))
        figures = {f"{member['role']}-{member['id']}": dict(member["figures"] or {}) for member in members}
        state = values["state"]
        failed = str(values["why"] or "it failed") if state == "failed" else ""
        waiting = _waiting(values, terms) if state == "waiting" else ""
        return cls(state == "finished", failed, waiting, figures)


def _waiting(values: Mapping[str, Any], terms: Terms) -> str:
    """Return for whom a job waits."""
    roles = [member["role"] for member in values["members"] if not member["leaving"]]
    if not values["view"]["chains"]:
        return f"for servers: there are {roles.count('server')} of {terms.servers}"
    return f"for workers: there are {roles.count('worker')}, and the job's minimum is {terms.workers}"
