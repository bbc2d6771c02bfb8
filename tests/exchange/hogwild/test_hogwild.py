"""Workers of one host on one memory: alone, it is what a server would do; together, only racing updates are lost."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from paceline.errors import ExchangeError
from paceline.exchange.hogwild import memory as hogwild_memory
from paceline.exchange.hogwild.exchange import HogwildExchange
from paceline.exchange.hogwild.memory import Memory
from paceline.exchange.hogwild.rows import SharedRows
from paceline.exchange.hogwild.snapshot import begin, write_snapshot
from paceline.exchange.interface import Rows
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.shard.shard import Shard
from paceline.exchange.shard.snapshot import load_shard
from paceline.exchange.shard.whole import gather, read_tables, write_initial
from paceline.exchange.table.build import BuildError
from paceline.exchange.table.choice import Choice
from tests.exchange.hogwild.logistic import A9A, quality, read_a9a
from tests.exchange.shard import jobs
from tests.exchange.shard.limits import full_at
from tests.forked import Forked

ASP = Consistency.parse("asp")
RULES = {
    "sgd": {"lr": 0.1, "weight_decay": 0.1},
    "momentum": {"lr": 0.1},
    "adagrad": {"lr": 0.1},
    "adam": {"lr": 0.1},
    "ftrl": {"lr": 0.1},
}
COUNTING = Job((SparseTable("rows", 2, "float32", Rule("sgd", {"lr": 1.0}), ASP),), shards=1)


def _memory(folder: Path, job: Job, rows: int = 5000) -> Memory:
    dense = {t.name: torch.linspace(-1, 1, t.count).view(t.shape) for t in job.tables if isinstance(t, DenseTable)}
    write_initial(folder / "snapshots", job, dense)
    path = folder / "memory"
    Path(f"{path}.json").write_text(json.dumps(job.to_dict()))
    return begin(path, job, folder / "snapshots" / "0", rows=rows)


class Worker(NamedTuple):
    """A process, and the file that it writes to."""

    process: Forked
    output: Path

    @property
    def said(self) -> list[str]:
        return self.output.read_text().splitlines() if self.output.exists() else []


def _workers(memory: Memory, *arguments: Sequence[object]) -> list[Worker]:
    """Workers that have attached, and begin at the same time."""
    name = "tests.exchange.hogwild.hogwild_worker"
    begun, started = Path(f"{memory.path}.go"), []
    begun.unlink(missing_ok=True)
    for number, (what, *given) in enumerate(arguments):
        output = Path(f"{memory.path}.said-{number}")
        output.unlink(missing_ok=True)
        started.append(Worker(Forked(name, what, memory.path, *given, output=output), output))
    for worker in started:
        while not worker.said:
            assert worker.process.wait(0.001) is None
        assert worker.said == ["ready"]
    begun.touch()
    return started


def _figures(workers: Sequence[Worker]) -> list[dict[str, object]]:
    assert [worker.process.wait(90) for worker in workers] == [0] * len(workers)
    return [json.loads(worker.said[-1]) for worker in workers]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", RULES)
def test_one_worker_does_what_a_server_would(tmp_path: Path, rule: str, dtype: str) -> None:
    job = jobs.job("asp", "asp", shards=1, dtype=dtype, rule=Rule(rule, RULES[rule]))
    exchange = HogwildExchange(memory := _memory(tmp_path, job))
    shard = load_shard(tmp_path / "snapshots" / "0", job, 0)
    weight = torch.empty(10, 7, dtype=getattr(torch, dtype))
    for task in range(6):
        update = jobs.update(shard, task, read=shard.position)
        dense, rows = update.parts
        assert rows.keys is not None
        here, there = torch.empty_like(rows.values), torch.empty_like(rows.values)
        exchange.pull([jobs.DENSE], [weight], 0)
        exchange.pull_rows(jobs.ROWS, rows.keys, here, 0)
        shard.read_rows(jobs.ROWS, rows.keys, there)
        assert torch.equal(weight.view(-1), shard.read(jobs.DENSE)) and torch.equal(here, there)
        shard.apply(update)
        exchange.push([task], {jobs.DENSE: dense.values.view(10, 7)}, {jobs.ROWS: Rows(rows.keys, rows.values)})
    assert exchange.figures() == {"updates": 6, "staleness": {"0": 6}, "rows": {"rows": len(shard.table(jobs.ROWS))}}
    write_snapshot(memory, tmp_path / "snapshots", 1, 2)
    copy = load_shard(tmp_path / "snapshots" / "1", job, 0)
    jobs.assert_equal_tables(shard, copy)
    assert copy.completed == 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", [*RULES, "rowwise_adagrad"])
def test_native_code_and_numpy_give_the_same_bits(tmp_path: Path, rule: str, dtype: str) -> None:
    table = SparseTable("rows", 5, dtype, Rule(rule, RULES.get(rule, {})), ASP, Initializer("uniform", 0.3))
    found = []
    for choice in Choice:
        try:
            implementation = choice.make()
        except BuildError as error:
            pytest.skip(str(error))
        memory = _memory(tmp_path / choice.value, Job((table,), shards=1))
        rows = SharedRows(memory, 0, implementation)
        random = np.random.default_rng(3)
        for _ in range(30):
            keys = random.choice(300, 40, replace=False)
            rows.update(keys, random.normal(size=(40, 5)).astype(dtype))
        read = np.empty((300, 5), dtype=dtype)
        rows.read(np.arange(300), read)
        found.append([read, *rows.all()[1], rows.all()[0]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    job = jobs.job("asp", "asp", shards=3, rule=Rule("adam", {"lr": 0.1}))
    memory = _memory(tmp_path, job)
    exchange = HogwildExchange(memory)

    def push(to: HogwildExchange, task: int) -> None:
        keys = torch.randperm(300, generator=torch.Generator().manual_seed(task))[:50]
        to.push([task], {jobs.DENSE: torch.ones(10, 7) * task}, {jobs.ROWS: Rows(keys, torch.ones(50, 3) * task)})

    for task in range(5):
        push(exchange, task)
    write_snapshot(memory, tmp_path / "snapshots", 1, 1)
    again = begin(tmp_path / "again", job, tmp_path / "snapshots" / "1", rows=5000)
    push(exchange, 5)
    push(HogwildExchange(again), 5)
    for name, made in (("2", memory), ("3", again)):
        write_snapshot(made, tmp_path / "snapshots", int(name), 2)
    one, other = (read_tables(tmp_path / "snapshots" / name, job) for name in ("2", "3"))
    assert torch.equal(one.dense["weight"], other.dense["weight"])
    assert torch.equal(one.keys["rows"], other.keys["rows"]) and torch.equal(one.rows["rows"], other.rows["rows"])


def test_a_parameter_may_lie_in_the_memory(tmp_path: Path) -> None:
    job = jobs.job("asp", "asp", rule=Rule("sgd", {"lr": 1.0}))
    memory = _memory(tmp_path, job)
    one, other = HogwildExchange(memory), HogwildExchange(Memory.attach(memory.path, job))
    weight = one.values(jobs.DENSE)
    before = weight.clone()
    one.pull([jobs.DENSE], [weight], 0)
    for _ in range(3):
        other.push([0], {jobs.DENSE: torch.ones(10, 7)}, {})
    torch.testing.assert_close(weight, before - 3)
    one.push([1], {jobs.DENSE: torch.ones(10, 7)}, {})
    assert one.figures()["staleness"] == {"2": 1}


def test_rows_made_at_the_same_time_are_made_once(tmp_path: Path) -> None:
    """All make the same rows, each adds to its own as well: what nobody else writes to is exact."""
    memory = _memory(tmp_path, COUNTING)
    figures = _figures(_workers(memory, *(("add", start, start + 1500, 5) for start in (0, 500))))
    tables = gather(COUNTING, [_shard(memory, tmp_path)])
    keys, rows = tables.keys["rows"], tables.rows["rows"]
    assert torch.equal(keys, torch.arange(2000))
    assert (rows[:500] == -5).all() and (rows[1500:] == -5).all()
    assert (rows[500:1500] <= -1).all() and (rows[500:1500] >= -10).all()
    assert [found["updates"] for found in figures] == [20, 20]


def _shard(memory: Memory, folder: Path) -> Shard:
    write_snapshot(memory, folder / "snapshots", 9, 0)
    return load_shard(folder / "snapshots" / "9", memory.job, 0)


def test_a_worker_that_is_killed_lets_go(tmp_path: Path) -> None:
    memory = _memory(tmp_path, COUNTING, rows=400_000)
    exchange = HogwildExchange(memory)
    for turn in range(2):
        (worker,) = _workers(memory, ("make",))
        while memory.made(0) < 3000 * (turn + 1) and worker.process.wait(0.001) is None:
            pass
        worker.process.send(signal.SIGKILL)
        assert worker.process.wait(30) == -signal.SIGKILL
        exchange.push([0], {}, {0: Rows(torch.arange(-10 * turn - 10, -10 * turn), torch.ones(10, 2))})
        tables = gather(COUNTING, [_shard(memory, tmp_path)])
        assert torch.equal(tables.keys["rows"], tables.keys["rows"].unique())
        assert (tables.rows["rows"][: 10 * turn + 10] == -1).all()


def test_half_an_update_of_a_killed_worker_stays_and_its_task_is_done_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs.job("asp", "asp", rule=Rule("sgd", {"lr": 1.0}))
    memory = _memory(tmp_path, job)
    weight, rows, keys = torch.empty(10, 7), torch.empty(4, 3), torch.arange(4)
    one, other = HogwildExchange(memory), HogwildExchange(Memory.attach(memory.path, job))
    before = one.values(jobs.DENSE).clone()
    one.pull_rows(jobs.ROWS, keys, rows, 0)
    gradients = {jobs.DENSE: torch.ones(10, 7)}, {jobs.ROWS: Rows(keys, torch.ones(4, 3))}
    with monkeypatch.context() as patch:
        patch.setattr(SharedRows, "_make", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):  # with dense tables written, and no row
            one.push([0], *gradients)
    other.push([0], *gradients)
    other.pull([jobs.DENSE], [weight], 0)
    assert torch.equal(weight, before - 1 - 1)
    other.pull_rows(jobs.ROWS, keys, after := torch.empty(4, 3), 0)
    assert torch.equal(after, rows - 1)


@pytest.mark.parametrize("kept", [0, 3])
def test_rows_whose_maker_was_killed_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """It was killed once rows were found by the index, and before they counted."""
    memory = _memory(tmp_path, COUNTING)
    rows = SharedRows(memory, 0)
    keys, ones = np.arange(20), np.ones((20, 2), dtype=np.float32)
    if kept:
        rows.update(keys[:kept], ones[:kept])
    with monkeypatch.context() as patch:
        patch.setattr(memory, "set_made", lambda *_: None)
        with pytest.raises(ValueError, match="no such row"):
            rows.update(keys, ones)
    other = SharedRows(Memory.attach(memory.path, COUNTING), 0)
    assert len(other) == kept
    for given in (keys[15:], keys[4:9][::-1], keys):
        other.update(given, ones[: len(given)])
    found, (values,) = other.all()
    assert sorted(found.tolist()) == keys.tolist()
    read = np.empty((20, 2), dtype=np.float32)
    other.read(keys, read)
    assert (values[np.argsort(found)] == read).all()
    expected = np.full(20, -1.0)
    expected[:kept] -= 1
    expected[15:] -= 1
    expected[4:9] -= 1
    assert (read[:, 0] == expected).all()


def test_a_full_table_and_a_full_disk_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _memory(tmp_path, COUNTING, rows=100_000)
    exchange = HogwildExchange(memory)
    exchange.push([0], {}, {0: Rows(torch.arange(10), torch.ones(10, 2))})

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(ExchangeError, match=r"no room for rows \d+ .*\(No space left"):
        patch.setattr(hogwild_memory.os, "posix_fallocate", full)
        exchange.push([0], {}, {0: Rows(torch.arange(90_000), torch.ones(90_000, 2))})
    assert memory.made(0) == 10
    exchange.push([0], {}, {0: Rows(torch.arange(90_000), torch.ones(90_000, 2))})
    with pytest.raises(ExchangeError, match=r"table rows is full: .* made for 100000 rows"):
        exchange.push([0], {}, {0: Rows(torch.arange(100_001), torch.ones(100_001, 2))})
    rows = torch.empty(100_000, 2)
    exchange.pull_rows(0, torch.arange(100_000), rows, 0)
    assert (rows[:10] == -2).all() and (rows[10:90_000] == -1).all() and (rows[90_000:] == 0).all()
    with full_at(1000), pytest.raises(ExchangeError, match="cannot make the shared memory"):
        begin(tmp_path / "other", COUNTING, tmp_path / "snapshots" / "0", rows=100)
    assert not list(tmp_path.glob("*other*"))


def test_what_is_not_this_job_s_memory_is_refused(tmp_path: Path) -> None:
    memory = _memory(tmp_path, COUNTING)
    with pytest.raises(ExchangeError, match=r"cannot open the shared memory .*nowhere"):
        Memory.attach(tmp_path / "nowhere", COUNTING)
    with pytest.raises(ExchangeError, match="is not the memory of this job"):
        Memory.attach(memory.path, jobs.job("asp", "asp"))
    (tmp_path / "short").write_bytes(memory.path.read_bytes()[:5000])
    with pytest.raises(ExchangeError, match="has 5000 bytes, and this job needs"):
        Memory.attach(tmp_path / "short", COUNTING)
    half = Job((DenseTable("weight", (3,), "bfloat16", consistency=ASP),), shards=1)
    with pytest.raises(ExchangeError, match="weight is bfloat16; in shared memory it is float32 or float64"):
        _memory(tmp_path, half)


@pytest.mark.skipif(not A9A.exists(), reason="there is no ../shared/data/a9a")
def test_logistic_regression_converges(tmp_path: Path) -> None:
    rule = Rule("adagrad", {"lr": 0.1})
    tables = (
        DenseTable("bias", (1,), rule=rule, consistency=ASP),
        SparseTable("weights", 1, rule=rule, consistency=ASP, initializer=Initializer()),
    )
    memory = _memory(tmp_path, Job(tables, shards=1))
    figures = _figures(_workers(memory, *(("learn", A9A, worker, 2) for worker in range(2))))
    found = gather(memory.job, [_shard(memory, tmp_path)])
    loss, auc = quality(read_a9a(Path(f"{A9A}.t")), found.dense["bias"], found.rows["weights"], found.keys["weights"])
    print(f"log loss {loss:.4f}, AUC {auc:.4f}, {figures}")
    assert loss <= 0.326 and round(auc, 3) >= 0.902
    assert all(found["updates"] == 32561 // 2 // 16 for found in figures)
