"""Snapshots: what was written is what is read, in whole or with an error that names the file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import ExchangeError
from paceline.exchange.job import Consistency, Job, Rule
from paceline.exchange.shard import files
from paceline.exchange.shard.manifest import Manifest, whole_snapshots
from paceline.exchange.shard.shard import Shard, ShardState
from paceline.exchange.shard.snapshot import Snapshots, load_shard
from paceline.exchange.shard.whole import read_tables, write_initial
from tests.exchange.shard import jobs
from tests.exchange.shard.limits import full_at

JOB = jobs.job("asp", "asp", pieces=1, rule=Rule("adam", {"lr": 0.1}))


def _manifest(folder: Path, number: int, job: Job, names: dict[int, str] | None = None) -> Path:
    names = names or {shard: f"shard-{shard}.json" for shard in range(job.shards)}
    Manifest(number, 3, 3 * job.pieces, 1, names).write(folder / str(number))
    return folder / str(number)


def _apply(shards: list[Shard], tasks: range) -> None:
    for task in tasks:
        for shard in shards:
            shard.apply(jobs.update(shard, task, read=shard.position))


def _without_workers(shard: Shard) -> ShardState:
    copy = Shard.of(shard.job, shard.number, shard.state())
    copy.forget_workers()
    return copy.state()


@pytest.mark.parametrize("modes", [("asp", "asp"), ("bsp", "ssp(1)")])
def test_a_shard_goes_on_from_its_snapshot(tmp_path: Path, modes: tuple[str, str]) -> None:
    job = jobs.job(*modes, pieces=3, shards=1)
    shard = jobs.begun(job)
    _apply([shard], range(5))
    name = (writer := Snapshots(tmp_path, job)).write(writer.take(shard, 1))
    loaded = load_shard(_manifest(tmp_path, 1, job, {0: name}), job, 0)
    jobs.assert_same(_without_workers(shard), loaded.state())
    assert loaded.apply(jobs.update(shard, 4, worker=77)).repeated
    for update in [jobs.update(shard, task, worker=8) for task in (5, 6)]:
        shard.apply(update)
        loaded.apply(update._replace(sequence=update.sequence - 5))
    jobs.assert_equal_tables(shard, loaded)


def test_snapshots_build_on_each_other_and_none_needs_another(tmp_path: Path) -> None:
    shards = [jobs.begun(JOB, number) for number in range(2)]
    writer, states = Snapshots(tmp_path, JOB), {}
    _apply(shards, range(10))
    for number in range(1, 12):
        _apply(shards, range(9 + number, 10 + number))
        for shard in shards:
            writer.write(writer.take(shard, number))
            states[number, shard.number] = _without_workers(shard)
        _manifest(tmp_path, number, JOB)
    depths = [len(json.loads((tmp_path / f"{n}/shard-1.json").read_text())["rows"]) for n in range(1, 12)]
    assert depths == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    sizes = [sum(path.stat().st_size for path in tmp_path.glob(f"{n}/*rows-{n}-*")) for n in (1, 2)]
    assert sizes[1] < sizes[0]
    for number in (1, 2, 3, 5, 6, 7, 9, 10):
        shutil.rmtree(tmp_path / str(number))
    assert whole_snapshots(tmp_path) == (4, 8, 11)
    for number in (4, 8, 11):
        for shard in shards:
            loaded = load_shard(tmp_path / str(number), JOB, shard.number)
            jobs.assert_same(states[number, shard.number], loaded.state())


def test_what_changes_while_a_snapshot_is_written_is_in_the_next(tmp_path: Path) -> None:
    shard = jobs.begun(JOB)
    writer = Snapshots(tmp_path, JOB)
    _apply([shard], range(3))
    writer.write(writer.take(shard, 1))
    _apply([shard], range(3, 5))
    taken, state = writer.take(shard, 2), _without_workers(shard)
    _apply([shard], range(5, 7))
    writer.write(taken)
    _apply([shard], range(7, 9))
    writer.write(writer.take(shard, 3))
    for number, expected in ((2, state), (3, _without_workers(shard))):
        directory = _manifest(tmp_path, number, JOB, {0: "shard-0.json"})
        jobs.assert_same(expected, load_shard(directory, JOB, 0).state())


def test_a_snapshot_that_failed_is_not_built_upon(tmp_path: Path) -> None:
    shard = jobs.begun(JOB)
    writer = Snapshots(tmp_path, JOB)
    _apply([shard], range(3))
    writer.write(writer.take(shard, 1))
    first = _without_workers(shard)
    _manifest(tmp_path, 1, JOB, {0: "shard-0.json"})
    _apply([shard], range(3, 5))
    taken = writer.take(shard, 2)
    with full_at(500), pytest.raises(ExchangeError, match=r"cannot write .*/2/shard-0.*snapshots before are kept"):
        writer.write(taken)
    assert not list(tmp_path.glob("2/*.json")) and not list(tmp_path.glob("2/.*"))
    assert whole_snapshots(tmp_path) == (1,)
    jobs.assert_same(first, load_shard(tmp_path / "1", JOB, 0).state())
    _apply([shard], range(5, 6))
    later = writer.take(shard, 3)
    assert later.base is None
    writer.write(later)
    jobs.assert_same(_without_workers(shard), load_shard(_manifest(tmp_path, 3, JOB), JOB, 0).state())
    assert writer.take(shard, 4).base == 3


def test_a_base_that_is_gone_is_not_built_upon(tmp_path: Path) -> None:
    shard, writer = jobs.begun(JOB), Snapshots(tmp_path, JOB)
    _apply([shard], range(3))
    writer.write(writer.take(shard, 1))
    assert writer.take(shard, 2).base == 1
    writer = Snapshots(tmp_path, JOB)
    writer.write(writer.take(shard, 3))
    shutil.rmtree(tmp_path / "3")
    assert writer.take(shard, 4).base is None


def test_a_server_that_takes_over_writes_all(tmp_path: Path) -> None:
    shard, other = jobs.begun(JOB), jobs.begun(JOB)
    writer, successor = Snapshots(tmp_path, JOB), Snapshots(tmp_path, JOB)
    _apply([shard, other], range(3))
    writer.write(writer.take(shard, 1))
    _apply([shard, other], range(3, 5))
    writer.write(writer.take(shard, 2))
    successor.write(successor.take(other, 2))  # the chain changed meanwhile
    directory = _manifest(tmp_path, 2, JOB)
    shutil.rmtree(tmp_path / "1")
    jobs.assert_same(_without_workers(shard), load_shard(directory, JOB, 0).state())


def test_without_hard_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(files.os, "link", refused)
    shard, writer = jobs.begun(JOB), Snapshots(tmp_path, JOB)
    for number in (1, 2):
        _apply([shard], range(number, number + 1))
        writer.write(writer.take(shard, number))
    shutil.rmtree(tmp_path / "1")
    jobs.assert_same(_without_workers(shard), load_shard(_manifest(tmp_path, 2, JOB), JOB, 0).state())


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "garbage"])
@pytest.mark.parametrize("kind", ["dense", "rows", "json", "manifest"])
def test_damage_is_named(tmp_path: Path, kind: str, damage: str) -> None:
    shard, writer = jobs.begun(JOB), Snapshots(tmp_path, JOB)
    _apply([shard], range(3))
    writer.write(writer.take(shard, 1))
    directory = _manifest(tmp_path, 1, JOB)
    (path,) = directory.glob({"json": "shard-0.json", "manifest": "manifest.json"}.get(kind, f"*.{kind}-*"))
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(b"null" if kind in ("json", "manifest") else bytes(len(content)))
    else:
        at = len(content) // 2
        path.write_bytes(
            content[:at] + (b"" if damage == "truncate" else bytes([content[at] ^ 255]) + content[at + 1 :])
        )
    with pytest.raises(ExchangeError, match=str(path)):
        load_shard(directory, JOB, 0)


def test_another_job_is_refused(tmp_path: Path) -> None:
    shard, writer = jobs.begun(JOB), Snapshots(tmp_path, JOB)
    writer.write(writer.take(shard, 1))
    directory = _manifest(tmp_path, 1, JOB)
    others = {
        "its shards is 2, and now 3": replace(JOB, shards=3),
        "its pieces is 1, and now 4": replace(JOB, pieces=4),
        r"its tables is \['weight', 'rows'\], and now \['weight'\]": replace(JOB, tables=JOB.tables[:1]),
        "its width of rows is 3, and now 5": replace(JOB, tables=(JOB.tables[0], replace(JOB.tables[1], width=5))),
        "its rule of weight is adam, and now sgd": replace(
            JOB, tables=(replace(JOB.tables[0], rule=Rule("sgd")), JOB.tables[1])
        ),
        "its synchronous of rows is False, and now True": replace(
            JOB, tables=(JOB.tables[0], replace(JOB.tables[1], consistency=Consistency()))
        ),
    }
    for message, other in others.items():
        with pytest.raises(ExchangeError, match=message):
            load_shard(directory, other, 0)
    slower = replace(
        JOB, replication=3, tables=(replace(JOB.tables[0], rule=Rule("adam", {"lr": 1e-9})), JOB.tables[1])
    )
    assert load_shard(directory, slower, 0).position == 0
    with pytest.raises(ExchangeError, match="has no shard 1"):
        load_shard(_manifest(tmp_path, 1, JOB, {0: "shard-0.json"}), JOB, 1)


def test_what_a_job_begins_with_is_read_again(tmp_path: Path) -> None:
    weight = torch.randn(10, 7)
    write_initial(tmp_path, JOB, {"weight": weight})
    tables = read_tables(tmp_path / "0", JOB)
    assert torch.equal(tables.dense["weight"], weight)
    assert tables.keys["rows"].shape == (0,) and tables.rows["rows"].shape == (0, 3)
    assert Manifest.read(tmp_path / "0") == Manifest(0, 0, 0, 0, {0: "shard-0.json", 1: "shard-1.json"})
    shards = [load_shard(tmp_path / "0", JOB, number) for number in range(2)]
    _apply(shards, range(4))
    writer = Snapshots(tmp_path, JOB)
    for shard in shards:
        writer.write(writer.take(shard, 1))
    after = read_tables(_manifest(tmp_path, 1, JOB), JOB)
    assert not torch.equal(after.dense["weight"], weight)
    keys = after.keys["rows"]
    assert torch.equal(keys, keys.unique()) and len(keys) == sum(len(shard.table(jobs.ROWS)) for shard in shards)
    for shard in shards:
        mine = jobs.keys_of(shard, keys.tolist())
        rows = torch.empty(len(mine), 3)
        shard.read_rows(jobs.ROWS, mine, rows)
        assert torch.equal(after.rows["rows"][torch.isin(keys, mine)], rows)


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ({}, "weight is of .10, 7., and its values are missing"),
        ({"weight": torch.zeros(7, 10)}, r"its values are of \(7, 10\)"),
        ({"weight": torch.zeros(10, 7), "wieght": torch.zeros(1)}, "no dense table 'wieght'. Did you mean 'weight'"),
    ],
)
def test_a_beginning_that_does_not_fit_is_refused(tmp_path: Path, dense: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ExchangeError, match=message):
        write_initial(tmp_path, JOB, dense)
    assert whole_snapshots(tmp_path) == ()


def test_manifests_load_no_torch() -> None:
    code = "import sys, paceline.exchange.shard.manifest; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=os.environ.copy())


def test_one_that_is_given_up_and_removed_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another server had no room for its part; whoever writes goes on with the next one."""
    write, left = files.File.write, [2]  # rows, and what is dense

    def written(directory: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> files.File:
        made = write(directory, name, tensors)
        left[0] -= 1
        if not left[0]:
            shutil.rmtree(directory)
        return made

    monkeypatch.setattr(files.File, "write", written)
    writer, shard = Snapshots(tmp_path, JOB), jobs.begun(JOB)
    with pytest.raises(ExchangeError, match=r"cannot write .*shard-0.json"):
        writer.write(writer.take(shard, 1))
    _apply([shard], range(2))
    name = writer.write(writer.take(shard, 2))
    loaded = load_shard(_manifest(tmp_path, 2, JOB, {shard: name for shard in range(JOB.shards)}), JOB, 0)
    jobs.assert_same(_without_workers(shard), loaded.state())
