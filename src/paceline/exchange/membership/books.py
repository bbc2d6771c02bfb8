"""The coordinator's books: state, journal and events. What is written is in the store before anybody hears of it."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Final

from paceline.exchange.membership.state import State
from paceline.exchange.membership.store import Record, Store
from paceline.exchange.terms import Charter

_LOG: Final = logging.getLogger(__name__)

_COMPACT_AT: Final = 50_000
"""Records after which one is written that stands for all."""

_LASTING: Final = frozenset({"join", "leave", "gone", "view", "failed", "snapshot", "complete", "dropped", "anew"})
"""Records that must outlive a loss of power: ids, epochs, and what members go by. Tasks that were dealt or done need
not: shards know which they have."""


class Books:
    """State that is kept.

    Args:
        charter: of the job.
        store: not yet loaded.
        events: file that events are appended to.
        anew: nobody of before is there any more: begin from the snapshot of the terms.
    """

    def __init__(self, charter: Charter, store: Store, events: Path, *, anew: bool = False) -> None:
        self._store, self._durable = store, charter.durable
        records = store.load()
        self.recovered = bool(records) and not anew
        self.state = State.of(charter, records)
        self._records: list[Record] = []
        self._lines: list[str] = []
        self._torn = False  # the last line is half of one
        self._events = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if records and anew:
            self.write({"is": "anew"})
            self.commit()

    def write(self, record: Record) -> None:
        """Change the state; see `State.apply`."""
        self.state.apply(record)
        self._records.append(record)

    def event(self, name: str, **values: Any) -> None:
        """Have people know; see `docs/server.md` for the names."""
        line = {"time": round(time.time(), 6), "event": name, "epoch": self.state.view.epoch, **values}
        self._lines.append(json.dumps(line))

    def commit(self) -> None:
        """Have what was written outlive this process; called before anybody is told of it.

        Raises:
            ExchangeError: the store cannot keep it, or another coordinator is in charge.
        """
        if self._records:
            durable = self._durable or any(record["is"] in _LASTING for record in self._records)
            self._store.append(self._records, durable)
            self._records.clear()
        if self._lines:
            self._write_events("".join(f"{line}\n" for line in self._lines).encode())
            self._lines.clear()
        if self._store.appended >= _COMPACT_AT:
            self._store.replace(self.state.to_record())

    def _write_events(self, lines: bytes) -> None:
        """Write lines for people. Nobody depends on them: of a full disk half may be there, and the next begin anew."""
        written = 0
        try:
            written = os.write(self._events, b"\n" * self._torn + lines) - self._torn
        except OSError as error:
            _LOG.warning("events could not be written (%s): %s", error, lines.decode())
        self._torn = written != len(lines) and (self._torn or written > 0)

    def close(self) -> None:
        """End; the store is free."""
        self.commit()
        self._store.close()
        os.close(self._events)
