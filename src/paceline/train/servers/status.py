"""What a coordinator says of its job, as a supervisor reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Status:
    """Where a job is.

    Attributes:
        finished: all tasks are done, and the last snapshot is written.
        failed: why it cannot go on.
        waiting: for what it waits.
        figures: of servers and workers by name.
    """

    finished: bool = False
    failed: str | None = None
    waiting: str | None = None
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Read what `Observer.status` returned."""
        members = sorted(values["members"], key=lambda member: (str(member["role"]), int(member["id"])))
        figures = {f"{member['role']}-{member['id']}": dict(member.get("figures") or {}) for member in members}
        return cls(bool(values["finished"]), values.get("failed"), values.get("waiting"), figures)
