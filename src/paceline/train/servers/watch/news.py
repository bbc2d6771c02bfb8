"""What the coordinator wrote down of members and shards, in words: who came, who went and why, what was copied."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.exchange.membership.seats import Process


class News:
    """Reads events as they are written.

    Args:
        path: of `events.jsonl`.
        group: in front of each line, where there are groups.
        joined: is told role, number and process of who joined here, rather than on another host; returns the name of
            its log if it was started by this process.
        gone: is told the number of who was given up.
    """

    def __init__(
        self,
        path: Path,
        group: str,
        joined: Callable[[str, int, int], str | None],
        gone: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._group = group
        self._joined, self._gone = joined, gone
        self._at = 0
        self._over = False
        self._copies: set[tuple[int, ...]] = set()
        self._copying_since_s = 0.0

    def new(self) -> Iterator[str]:
        """Yield lines of what happened since the last time; none of the job's end."""
        if not self._path.exists():
            return
        with self._path.open("rb") as events:
            events.seek(self._at)
            whole, newline, _ = events.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        for line in whole.splitlines():
            text = self._told(_event(line))
            if text is not None:
                yield f"{self._group}{text}"

    def _told(self, event: Mapping[str, Any]) -> str | None:
        match event.get("event"):
            case _ if self._over:
                return None
            case "finished":
                self._over = True
            case "joined":
                here = Process(event.get("where", ""), event["pid"])
                log = self._joined(event["role"], event["id"], event["pid"]) if here.visible or not here.where else None
                return f"{event['role']} {event['id']} joined" + (f" (its log: {log}.log)" if log else "")
            case "gone":
                self._gone(event["id"])
                return f"{event['role']} {event['id']} is gone: {event['why']}"
            case "left":
                return f"{event['role']} {event['id']} left"
            case "unreached":
                return f"server {event['id']} does not reach server {event['server']}: what they shared goes elsewhere"
            case "recovered":
                return "the coordinator is back, and knows all that it knew"
            case "snapshot failed":
                return f"snapshot {event['number']} failed, and is tried again: {event['why']}"
            case "view":
                return self._copied(event)
        return None

    def _copied(self, view: Mapping[str, Any]) -> str | None:
        """Tell of copies once no more are under way."""
        if view["moves"]:
            self._copying_since_s = self._copying_since_s if self._copies else view["time"]
            self._copies |= {tuple(move) for move in view["moves"]}
            return None
        count, self._copies = len(self._copies), set()
        return f"{count} shards were copied in {view['time'] - self._copying_since_s:.1f} s" if count else None


def _event(line: bytes) -> dict[str, Any]:
    """Return an event; nothing of half a line, which a disk that was full took."""
    event: dict[str, Any] = {}
    with suppress(ValueError):
        event = json.loads(line)
    return event
