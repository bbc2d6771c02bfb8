"""The log of updates: what servers agree on is read again, and what never was committed is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.exchange.shard.log import Record, UpdateLog, read_log, read_updates
from tests.exchange.shard.limits import full_at


def _record(position: int, epoch: int = 1, *, shard: int = 0, worker: int = 1, tasks: tuple[int, ...] = ()) -> Record:
    return Record(epoch, shard, position, worker, position, 2, tasks or (position,))


def _written(path: Path, *records: Record) -> Path:
    log = UpdateLog(path, 3)
    log.append(records)
    log.close()
    return path


@given(
    records=st.lists(
        st.builds(
            Record,
            *[st.integers(0, 2**40)] * 6,
            st.lists(st.integers(0, 2**62), max_size=5).map(tuple),
        ),
        max_size=6,
    ),
    batch=st.integers(1, 3),
    torn=st.integers(0, 80),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_records_survive_and_a_torn_one_is_left_out(
    tmp_path: Path, records: list[Record], batch: int, torn: int
) -> None:
    path = tmp_path / "server-3.log"
    path.unlink(missing_ok=True)
    log = UpdateLog(path, 3)
    for start in range(0, len(records), batch):
        log.append(records[start : start + batch])
    log.close()
    assert read_log(path) == records
    content = path.read_bytes()
    last = 8 * (8 + len(records[-1].tasks)) if records else 0
    torn = min(torn, last)
    path.write_bytes(content[: len(content) - torn])
    assert read_log(path) == (records[:-1] if torn else records)
    more = _record(7)
    _written(path, more)
    assert read_log(path) == [*(records[:-1] if torn else records), more]


def test_a_log_that_ends_in_zeros_lost_its_end(tmp_path: Path) -> None:
    path = _written(tmp_path / "a", _record(1))
    with path.open("ab") as file:
        file.write(bytes(4096))
    assert read_log(path) == [_record(1)]
    _written(path, _record(2))
    assert read_log(path) == [_record(1), _record(2)]


@pytest.mark.parametrize("content", [b"", b"\0" * 30])
def test_a_server_that_was_killed_before_it_wrote_anything_has_applied_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    assert read_log(path) == []
    log = UpdateLog(path, 3)
    log.append([_record(1)])
    log.close()
    assert read_log(path) == [_record(1)]


def test_damage_in_the_middle_is_said(tmp_path: Path) -> None:
    path = _written(tmp_path / "a", _record(1), _record(2), _record(3))
    content = bytearray(path.read_bytes())
    content[24 + 72 + 30] ^= 1
    path.write_bytes(content)
    with pytest.raises(ExchangeError, match=f"{path} is damaged at byte 96"):
        read_log(path)
    path.write_bytes(b"something else altogether")
    with pytest.raises(ExchangeError, match="is no log of updates"):
        read_log(path)
    with pytest.raises(ExchangeError, match="cannot read the log"):
        read_log(tmp_path / "nowhere")


def test_a_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "a"
    log = UpdateLog(path, 3)
    log.append([_record(1)])
    with full_at(200), pytest.raises(ExchangeError, match=rf"cannot write {path} \(.*make room"):
        log.append([_record(2), _record(3), _record(4)])
    assert read_log(path) == [_record(1)]
    log.append([_record(2)])
    log.close()
    assert read_log(path) == [_record(1), _record(2)]


def test_replicas_that_agree_are_one_sequence(tmp_path: Path) -> None:
    head = _written(tmp_path / "1", *(_record(n) for n in range(1, 6)), _record(1, shard=2, tasks=(1, 2)))
    late = _written(tmp_path / "2", *(_record(n) for n in range(3, 5)), _record(5, 2))
    agreed = read_updates([head, late])
    assert [record.position for record in agreed[0]] == [1, 2, 3, 4, 5]
    assert agreed[2] == [_record(1, shard=2, tasks=(1, 2))]
    assert read_updates([head], {0: 3, 2: 1}) == {0: [_record(4), _record(5)], 2: []}


def test_replicas_that_disagree_are_named(tmp_path: Path) -> None:
    paths = [_written(tmp_path / "1", _record(1)), _written(tmp_path / "2", _record(1, worker=5))]
    with pytest.raises(ExchangeError, match=f"disagree about position 1 of shard 0 in epoch 1.*{paths[1]}"):
        read_updates(paths)


def test_what_a_dead_head_applied_alone_is_replaced_or_cut(tmp_path: Path) -> None:
    """It had applied 3 and 4 by itself; its successor applied another 3, and stopped there."""
    dead = _written(tmp_path / "1", *(_record(n) for n in (1, 2, 3, 4)))
    successor = _written(tmp_path / "2", _record(1), _record(2), _record(3, 2, worker=8, tasks=(4,)))
    agreed = read_updates([dead, successor], {0: 0}, {0: 3})
    assert agreed[0] == [_record(1), _record(2), _record(3, 2, worker=8, tasks=(4,))]
    with pytest.raises(ExchangeError, match="task 4 was applied twice to shard 0, at 3 and 4"):
        read_updates([dead, successor])


@pytest.mark.parametrize("final", [None, {0: 4}])
def test_a_missing_position_is_named(tmp_path: Path, final: dict[int, int] | None) -> None:
    path = _written(tmp_path / "1", _record(1), _record(2), _record(4))
    with pytest.raises(ExchangeError, match="no log has position 3 of shard 0, of 4"):
        read_updates([path], None, final)


def test_missing_ends_are_named(tmp_path: Path) -> None:
    path = _written(tmp_path / "1", _record(2))
    with pytest.raises(ExchangeError, match="no log has position 1 of shard 0"):
        read_updates([path], {0: 0})
    with pytest.raises(ExchangeError, match="no log has position 3 of shard 0, of 5"):
        read_updates([path], {0: 1}, {0: 5})
    with pytest.raises(ExchangeError, match="no log has position 1 of shard 7, of 2"):
        read_updates([path], {7: 0}, {7: 2})
    assert read_updates([path], {0: 1, 7: 4}, {0: 2, 7: 4}) == {0: [_record(2)], 7: []}
