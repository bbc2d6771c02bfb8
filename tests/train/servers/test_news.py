"""What the coordinator wrote down, in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.exchange.membership.seats import Process
from paceline.train.servers.watch.news import News


def test_who_came_and_went_is_told_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    given_up: list[int] = []
    news = News(path, "", lambda role, number, pid: f"{role}-{number}" if pid == 7 else None, given_up.append)
    assert list(news.new()) == []

    def write(*events: dict[str, Any], end: str = "\n") -> None:
        with path.open("a") as file:
            file.write("\n".join(map(json.dumps, events)) + end)

    write({"event": "began"}, {"event": "joined", "role": "server", "id": 1, "pid": 7})
    write({"event": "joined", "role": "worker", "id": 2, "pid": 8})
    write({"event": "joined", "role": "worker", "id": 3, "pid": 7, "where": "another host"})
    told = ["server 1 joined (its log: server-1.log)", "worker 2 joined", "worker 3 joined"]
    assert list(news.new()) == told
    here = {"event": "joined", "role": "worker", "id": 4, "pid": 7, "where": Process.own().where}
    write(here)
    assert list(news.new()) == ["worker 4 joined (its log: worker-4.log)"]
    write({"event": "view", "time": 1.0, "moves": [[0, 1, 3, 2], [1, 1, 3, 2]]})
    write({"event": "view", "time": 1.5, "moves": [[1, 1, 3, 2], [2, 1, 3, 3]]})
    assert list(news.new()) == []
    gone = {"event": "gone", "role": "worker", "id": 2, "why": "it died"}
    write({"event": "view", "time": 3.0, "moves": []}, gone, end="")
    assert list(news.new()) == ["3 shards were copied in 2.0 s"]  # the other line is not whole yet
    write(end="\n")
    assert list(news.new()) == ["worker 2 is gone: it died"] and given_up == [2]
    write({"event": "left", "role": "worker", "id": 5}, end="")
    with path.open("r+b") as file:  # the disk was full, and then was not
        file.truncate(path.stat().st_size - 9)
    write(end="\n")
    write({"event": "left", "role": "worker", "id": 6})
    assert list(news.new()) == ["worker 6 left"]
    write({"event": "finished"}, {"event": "gone", "role": "server", "id": 1, "why": "the job is over"})
    assert list(news.new()) == []
