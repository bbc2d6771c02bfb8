"""Schedules in files: what is written comes back, and what is wrong is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from paceline.errors import ScheduleError
from paceline.schedule import make
from paceline.schedule.files import from_text, load, save, to_text
from tests.schedule.cases import Case, cases, prove


@settings(max_examples=50)
@given(cases())
def test_what_is_written_comes_back(case: Case) -> None:
    schedule = case.schedule()
    assert from_text(to_text(schedule)) == schedule


def test_a_file_is_read_and_proven(tmp_path: Path) -> None:
    schedule = make("pipedream", 3, 6, replicas=((0, 1), (2,)))
    save(schedule, tmp_path / "new" / "own.json")
    assert load(tmp_path / "new" / "own.json") == schedule
    prove(load(tmp_path / "new" / "own.json"))


def test_a_person_can_write_one() -> None:
    schedule = from_text("""{
        "format": "paceline-schedule-1", "name": "by hand", "micro_batches": 2, "replicas": [[0], [1]],
        "actions": [["F 0 0", "SEND 0 0 act 1", "F 0 1", "SEND 0 1 act 1", "RECV 0 0 grad 1", "B 0 0", "REDUCE 0",
                     "UPDATE 0 v1", "RECV 0 1 grad 1", "B 0 1", "REDUCE 0", "UPDATE 0 v2"],
                    ["RECV 1 0 act 0", "F 1 0", "B 1 0", "SEND 1 0 grad 0", "REDUCE 1", "UPDATE 1 v1",
                     "RECV 1 1 act 0", "F 1 1 v1", "B 1 1 v1", "SEND 1 1 grad 0", "REDUCE 1", "UPDATE 1 v2"]]
    }""")
    assert prove(schedule).stage_versions == (2, 1)


def values() -> dict[str, Any]:
    return json.loads(to_text(make("1f1b", 2, 2)))


def put(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda schedule: schedule | {key: value}


def write(words: Any) -> Callable[[dict[str, Any]], Any]:
    def change(schedule: dict[str, Any]) -> Any:
        schedule["actions"][1][2] = words
        return schedule

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda schedule: [], "a schedule is a JSON object with format, name"),
        (put("format", "paceline-schedule-2"), "the format is 'paceline-schedule-2'; this version reads"),
        (lambda schedule: {"format": "paceline-schedule-1"}, "'name' is missing"),
        (put("micro_batch", 1), "no key 'micro_batch'; .* Did you mean 'micro_batches'"),
        (put("name", 3), "'name' is 3; it is a text"),
        (put("micro_batches", 2.0), "'micro_batches' is 2.0; it is a whole number"),
        (put("micro_batches", True), "'micro_batches' is True"),
        (put("replicas", {}), "'replicas' is {}; it is a list"),
        (put("replicas", [0, 1]), "'replicas' of stage 0 is 0; it is a list"),
        (put("replicas", [["0"], [1]]), "a rank of stage 0 is '0'"),
        (put("replicas", [[0]]), "the stages lie on the ranks \\[0\\]"),
        (put("actions", [["F 0 0"], 1]), "rank 1 is 1; it is a list"),
        (write("F 0"), "rank 1, action 2 .* F is of a stage and a micro-batch"),
        (write("REDUCE 1 1"), "rank 1, action 2 .* REDUCE is of a stage, in this order"),
        (write("X 0 0"), "there is no 'X'; actions are F, B, I, W, SEND, RECV, REDUCE, UPDATE"),
        (write("F 0 -1"), "write an action as 'F 0 3'"),
        (write("F 0 0 1"), "write an action as"),
        (write(["F", 0, 0]), "write an action as"),
        (write("SEND 1 0 gradient 0"), "messages carry act or grad, not 'gradient'"),
    ],
)
def test_what_is_no_schedule_is_refused(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps(change(values())))
    with pytest.raises(ScheduleError, match=f"own.json: .*{message}"):
        load(file)


def test_what_cannot_be_read_or_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="a schedule is JSON, and this is not"):
        load(tmp_path / "text")
    for name in ("bytes", "missing"):
        with pytest.raises(ScheduleError, match=f"{name} cannot be read"):
            load(tmp_path / name)
    with pytest.raises(ScheduleError, match="cannot be written"):
        save(make("1f1b", 1, 1), tmp_path / "text" / "below.json")
    with pytest.raises(ScheduleError, match="this is not"):
        from_text("[" * 100_000)
