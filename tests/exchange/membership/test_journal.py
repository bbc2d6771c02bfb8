"""The embedded store: what was appended is there, a torn end is cut off, damage is told, one coordinator at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.membership.store import Journal
from paceline.exchange.membership.stores import opened


def written(directory: Path, count: int = 3) -> Path:
    journal = Journal(directory)
    assert journal.load() == []
    for k in range(count):
        journal.append([{"is": "x", "k": k}], durable=k % 2 == 0)
    journal.close()
    return directory / "records"


def read(directory: Path) -> list[int]:
    journal = Journal(directory)
    try:
        return [record["k"] for record in journal.load()]
    finally:
        journal.close()


def test_what_was_appended_is_there(tmp_path: Path) -> None:
    written(tmp_path)
    assert read(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_last_line_is_cut_off_and_written_over(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(tmp_path)
    assert [record["k"] for record in journal.load()] == [0, 1]
    journal.append([{"is": "x", "k": 7}], durable=True)
    journal.close()
    assert read(tmp_path) == [0, 1, 7]


def test_damage_before_the_end_is_told(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)
    with pytest.raises(ExchangeError, match="damaged at byte 0"):
        read(tmp_path)


def test_one_record_stands_for_all_and_others_follow(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.load()
    journal.append([{"is": "x", "k": k} for k in range(5)], durable=False)
    assert journal.appended == 5
    journal.replace({"is": "x", "k": 50})
    assert journal.appended == 0
    journal.append([{"is": "x", "k": 51}], durable=False)
    journal.close()
    assert read(tmp_path) == [50, 51]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "records"]


def test_only_one_is_in_charge(tmp_path: Path) -> None:
    first, second = Journal(tmp_path), Journal(tmp_path)
    first.load()
    with pytest.raises(ExchangeError, match="is running"):
        second.load()
    first.close()
    assert second.load() == []
    second.close()


@pytest.mark.parametrize(("text", "hint"), [("embeded", "embedded"), ("edcd://x", "etcd"), ("file:///x", "write")])
def test_a_store_that_does_not_exist_is_told(tmp_path: Path, text: str, hint: str) -> None:
    with pytest.raises(ExchangeError, match=hint):
        opened(text, Directory(tmp_path))
