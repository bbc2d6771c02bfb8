"""Traces: Chrome's form and back, and recording."""

import json
from pathlib import Path

from paceline.trace import Category, Event, Recorder, from_chrome, noting, to_chrome, write

EVENTS = [
    Event("forward", Category.PHASE, 0, 0.0, 0.25, {"micro_batch": 1}),
    Event("all_reduce dp", Category.NETWORK, 1, 0.125, 0.5),
]


def test_events_come_back_from_the_form_of_chrome(tmp_path: Path) -> None:
    write(EVENTS, tmp_path / "traces" / "rank-0.json")
    assert from_chrome(json.loads((tmp_path / "traces" / "rank-0.json").read_text())) == EVENTS


def test_a_rank_is_a_process_and_a_category_a_thread() -> None:
    entries = to_chrome(EVENTS)["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in entries if e["ph"] == "M"}
    found = {(e["pid"], e["tid"]): e["name"] for e in entries if e["ph"] == "X"}
    assert {names[pid, None] for pid, _ in found} == {"rank 0", "rank 1"}
    assert {names[where]: name for where, name in found.items()} == {"phase": "forward", "network": "all_reduce dp"}
    (forward,) = [e for e in entries if e["name"] == "forward"]
    assert (forward["ts"], forward["dur"]) == (0.0, 0.25e6)


def test_a_recorder_counts_from_when_it_was_made() -> None:
    seconds = iter([10.0, 11.0, 13.0])
    recorder = Recorder(3, clock=lambda: next(seconds))
    with noting(recorder, "update"):
        pass
    assert recorder.events == [Event("update", Category.PHASE, 3, 1.0, 3.0)]
    with noting(None, "update"):
        pass
