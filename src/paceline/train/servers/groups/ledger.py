"""Which meetings a group has had, in the directory of its exchange.

    meetings/last.safetensors     the last that was agreed on: whoever bridges the group next begins with it
    meetings/notes.jsonl          of each where its values were read, for a replay
    meetings/rows-N.safetensors   of meeting N the rows that took part, likewise

A meeting is agreed on once `last.safetensors` names it. Of notes of one that was not, and was done again, the later
ones count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file

from paceline.errors import ExchangeError
from paceline.train.servers.groups.meeting import Kind, Meeting, Met

_LAST = "last.safetensors"


@dataclass(frozen=True)
class Note:
    """Where the values of a meeting were read.

    Attributes:
        number, kind: see `Meeting`.
        inside, above: positions of the shards that were read.
        met: the rows that took part, by table.
    """

    number: int
    kind: Kind
    inside: Mapping[int, int] = field(default_factory=dict)
    above: Mapping[int, int] = field(default_factory=dict)
    met: Mapping[int, Met] = field(default_factory=dict)


class Ledger:
    """The meetings of one group.

    Args:
        root: directory of its exchange.
        logged: whether notes are taken.
    """

    def __init__(self, root: Path, *, logged: bool = True) -> None:
        self._folder = root / "meetings"
        self._logged = logged

    @property
    def path(self) -> Path:
        """File of the last meeting."""
        return self._folder / _LAST

    def begin(self, meeting: Meeting) -> None:
        """Begin with a meeting, of before."""
        meeting.write(self.path)

    def last(self) -> Meeting:
        """Return the last meeting that was agreed on.

        Raises:
            ExchangeError: there is no ledger here.
        """
        return Meeting.read(self.path)

    def agree(self, meeting: Meeting, note: Note) -> None:
        """Write that a meeting was agreed on.

        Raises:
            ExchangeError: the disk is full.
        """
        if self._logged:
            self._write(note)
        meeting.write(self.path)

    def notes(self) -> list[Note]:
        """Return the notes of all meetings that were agreed on, in order.

        Raises:
            ExchangeError: they cannot be read.
        """
        found: dict[int, Note] = {}
        path = self._folder / "notes.jsonl"
        last = self.last().number
        try:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
            for line in map(json.loads, lines):
                number, kind = int(line["meeting"]), Kind(line["kind"])
                inside, above = ({int(s): int(p) for s, p in line[side]} for side in ("inside", "above"))
                found[number] = Note(number, kind, inside, above, self._rows(number) if line["rows"] else {})
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ExchangeError(f"cannot read the meetings in {path}: {error}") from error
        return [note for number, note in sorted(found.items()) if number <= last]

    def _write(self, note: Note) -> None:
        if note.met:
            tensors = {
                f"{table}.{name}": held for table, met in note.met.items() for name, held in met._asdict().items()
            }
            save_file(tensors, self._file(note.number))
        sides = {"inside": sorted(note.inside.items()), "above": sorted(note.above.items())}
        line = {"meeting": note.number, "kind": note.kind.value, "rows": bool(note.met), **sides}
        with (self._folder / "notes.jsonl").open("a", encoding="utf-8") as notes:
            notes.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _rows(self, number: int) -> dict[int, Met]:
        tensors = load_file(self._file(number))
        tables = sorted({int(name.partition(".")[0]) for name in tensors})
        return {table: Met(tensors[f"{table}.keys"], tensors[f"{table}.own"]) for table in tables}

    def _file(self, number: int) -> Path:
        return self._folder / f"rows-{number}.safetensors"
