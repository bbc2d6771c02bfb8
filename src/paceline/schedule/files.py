"""Schedules in files: JSON that people can read and write.

    {
      "format": "paceline-schedule-1",
      "name": "1f1b",
      "micro_batches": 2,
      "replicas": [[0], [1]],
      "actions": [
        ["F 0 0", "F 0 1", "B 0 0", "B 0 1", "REDUCE 0", "UPDATE 0 v1"],
        ["F 1 0", "B 1 0", "F 1 1", "B 1 1", "REDUCE 1", "UPDATE 1 v1"]
      ]
    }

An action is its name, stage and micro-batch, then the version where it is not 0; a message goes on with `act` or `grad`
and the stage at the other end: `SEND 0 1 act 1`, `RECV 1 1 act 0`. SEND and RECV may be left out, all of them: they
follow from the edges between stages, which a model has and a schedule has not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from paceline.errors import ScheduleError, nearest
from paceline.schedule.actions import Action, Op, Payload, Schedule

FORMAT = "paceline-schedule-1"
_KEYS = ("format", "name", "micro_batches", "replicas", "actions")
_NUMBER = "[0-9]{1,9}"
_WORDS = re.compile(
    rf"(?P<op>\w+) (?P<stage>{_NUMBER})( (?P<micro_batch>{_NUMBER}))?( v(?P<version>{_NUMBER}))?"
    rf"( (?P<payload>[a-z]+) (?P<peer>{_NUMBER}))?"
)


def save(schedule: Schedule, file: Path) -> None:
    """Write a schedule.

    Raises:
        ScheduleError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_text(schedule), encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"the schedule {file} cannot be written: {error}.") from error


def load(file: Path) -> Schedule:
    """Read a schedule. Its form is checked here; `validate` proves the rest.

    Raises:
        ScheduleError: the file cannot be read, or is no schedule; the message says where.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"the schedule {file} cannot be read: {error}.") from error
    try:
        return from_text(text)
    except ScheduleError as error:
        raise ScheduleError(f"{file}: {error}") from error


def to_text(schedule: Schedule) -> str:
    """Return a schedule as JSON, with a line for each rank."""
    lists = ",\n".join(f"    {json.dumps([_to_words(action) for action in actions])}" for actions in schedule.actions)
    head = {
        "format": FORMAT,
        "name": schedule.name,
        "micro_batches": schedule.micro_batches,
        "replicas": schedule.replicas,
    }
    lines = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return f'{{\n{lines}  "actions": [\n{lists}\n  ]\n}}\n'


def from_text(text: str) -> Schedule:
    """Return the schedule that `to_text` wrote, or a person.

    Raises:
        ScheduleError: it is none.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"a schedule is JSON, and this is not: {error}.") from error
    if not isinstance(values, dict):
        raise ScheduleError(f"a schedule is a JSON object with {', '.join(_KEYS)}.")
    if values.get("format") != FORMAT:
        raise ScheduleError(f"the format is {values.get('format')!r}; this version reads {FORMAT!r} only.")
    for key in _KEYS:
        if key not in values:
            raise ScheduleError(f"'{key}' is missing; a schedule has {', '.join(_KEYS)}.")
    for key in values:
        if key not in _KEYS:
            raise ScheduleError(f"there is no key '{key}'; a schedule has {', '.join(_KEYS)}.{nearest(key, _KEYS)}")
    if not isinstance(values["name"], str):
        raise ScheduleError(f"'name' is {values['name']!r}; it is a text.")
    return Schedule(
        name=values["name"],
        micro_batches=_number(values["micro_batches"], "'micro_batches'"),
        replicas=tuple(
            tuple(_number(rank, f"a rank of stage {stage}") for rank in _list(ranks, f"'replicas' of stage {stage}"))
            for stage, ranks in enumerate(_list(values["replicas"], "'replicas'"))
        ),
        actions=tuple(
            tuple(_action(words, rank, position) for position, words in enumerate(_list(listed, f"rank {rank}")))
            for rank, listed in enumerate(_list(values["actions"], "'actions'"))
        ),
    )


def _to_words(action: Action) -> str:
    words = [action.op.value, str(action.stage)]
    if action.op not in (Op.REDUCE, Op.UPDATE):
        words.append(str(action.micro_batch))
    if action.version:
        words.append(f"v{action.version}")
    if action.payload is not None:
        words += [action.payload.value, str(action.peer)]
    return " ".join(words)


def _action(words: Any, rank: int, position: int) -> Action:
    where = f"rank {rank}, action {position} ({words!r})"
    found = _WORDS.fullmatch(words) if isinstance(words, str) else None
    if found is None:
        raise ScheduleError(f"{where}: write an action as 'F 0 3', 'B 0 3 v1', 'SEND 0 3 act 1' or 'UPDATE 0 v1'.")
    ops, payloads = [op.value for op in Op], [payload.value for payload in Payload]
    if found["op"] not in ops:
        raise ScheduleError(f"{where}: there is no '{found['op']}'; actions are {', '.join(ops)}.")
    if found["payload"] not in (None, *payloads):
        raise ScheduleError(f"{where}: messages carry {' or '.join(payloads)}, not '{found['payload']}'.")
    op = Op(found["op"])
    if (found["micro_batch"] is None) != (op in (Op.REDUCE, Op.UPDATE)):
        of = "a stage" if found["micro_batch"] else "a stage and a micro-batch"
        raise ScheduleError(f"{where}: {op.value} is of {of}, in this order.")
    return Action(
        op,
        int(found["stage"]),
        int(found["micro_batch"] or 0),
        int(found["version"] or 0),
        Payload(found["payload"]) if found["payload"] else None,
        int(found["peer"]) if found["peer"] else None,
    )


def _number(value: Any, what: str) -> int:
    if type(value) is not int:  # a bool is an int, too
        raise ScheduleError(f"{what} is {value!r}; it is a whole number.")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ScheduleError(f"{what} is {value!r}; it is a list.")
    return value
