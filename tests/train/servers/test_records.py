"""What workers write down, and the steps that come of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.errors import ExchangeError
from paceline.train.data.source import DatasetSource
from paceline.train.servers.watch.steps import Steps
from paceline.train.servers.watch.view import staleness_words
from paceline.train.servers.worker.records import RecordFile, RecordReader, threads_of
from paceline.train.servers.worker.reports import EvaluationReport, TaskReport
from paceline.train.servers.worker.samples import TaskSamples, samples_of_step
from tests.train.servers.toys import Points

FULL = Path("/dev/full")


def task(number: int, loss: float, weight: float = 1.0) -> TaskReport:
    return TaskReport(number, loss, weight, 0.1, 0.2, 0.3, False, 1000 + number)


def test_lines_are_read_as_they_come_and_no_half_ones(tmp_path: Path) -> None:
    reader, first = RecordReader([tmp_path]), RecordFile(tmp_path / "worker-0.jsonl", 0)
    first.on_task(task(0, 0.5))
    assert [line["task"] for line in reader.new() if "task" in line] == [0]
    with (tmp_path / "worker-1.jsonl").open("w") as torn:
        torn.write('{"begun": 1, "threads": 3}\n{"task": 1, "loss"')
    first.on_evaluation(EvaluationReport(2, math.nan, 0.0, 0.1, {"auc": math.nan}))
    lines = list(reader.new())
    assert [line.get("evaluation") for line in lines] == [2, None]
    assert lines[0]["loss"] is None and lines[0]["metrics"] == {"auc": None}
    assert list(reader.new()) == []
    assert threads_of(tmp_path / "worker-1.jsonl") == 3
    reader.close()
    first.close()


@pytest.mark.skipif(not FULL.exists(), reason="a Linux device")
def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    path.symlink_to(FULL)
    with pytest.raises(ExchangeError, match=r"worker-0.jsonl \(No space left on device\).*make room"):
        RecordFile(path, 0)


def test_a_step_is_there_once_all_its_tasks_are_each_of_them_once() -> None:
    steps = Steps(pieces=2, steps=4, every=1, rates=[0.4, 0.3, 0.2, 0.1], samples=[4, 3, 1].__getitem__)

    def take(number: int, loss: float | None, weight: float = 1.0) -> list[tuple[int, float, float, str]]:
        found = steps.take([{"task": number, "loss": loss, "weight": weight, "memory_bytes": 5}])
        assert all(report.learning_rate == [0.4, 0.3, 0.2, 0.1][report.step - 1] for report in found)
        return [(report.step, report.loss, report.weight, report.unit) for report in found]

    assert take(2, 4.0) == take(3, 8.0) == take(1, 3.0, 3.0) == []
    assert take(1, 9.0) == []  # by somebody who died before the first was known to be done
    assert take(0, 1.0) == [(1, 2.5, 4.0, "samples"), (2, 6.0, 2.0, "tokens")]
    assert take(0, 7.0) == []
    assert take(5, None, 0.0) == []
    ((step, loss, weight, _),) = take(4, None, 0.0)
    assert (step, weight) == (3, 0.0) and math.isnan(loss)
    assert steps.done == 3


def test_a_step_has_the_norm_that_one_of_its_workers_names() -> None:
    records = [
        {"task": task, "loss": 1.0, "weight": 1.0, "norm": norm}
        for task, norm in enumerate([None, 2.5, 3.5, None, None, None])
    ]

    def norms(*, normed: bool) -> list[float | None]:
        steps = Steps(pieces=2, steps=3, every=1, rates=[0.1] * 3, samples=lambda step: 2, normed=normed)
        return [report.grad_norm for report in steps.take(records)]

    assert norms(normed=True) == [2.5, 3.5, None]
    assert norms(normed=False) == [None] * 3  # of groups: each has its own


def test_steps_that_become_known_at_once_share_the_time_since_those_before() -> None:
    steps = Steps(pieces=1, steps=9, every=1, rates=[0.1] * 9, samples=lambda step: 4)
    records = [{"task": task, "loss": 1.0, "weight": 4.0} for task in range(9)]
    (first,) = steps.take(records[:1])
    others = steps.take(records[1:])
    assert first.seconds > 0 and [report.step for report in others] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert len({report.seconds for report in others}) == 1 and others[0].seconds > 0


def test_a_step_has_as_many_samples_as_its_tasks() -> None:
    read = TaskSamples(DatasetSource(Points(36), "points"), batch=8, pieces=2)  # the fifth step of an epoch has four
    for step in range(10):
        found = [part.samples for piece in range(2) for part in read.portions(2 * step + piece)]
        assert sum(found) == samples_of_step(step, 36, 8)


@pytest.mark.parametrize(
    ("histogram", "words"),
    [
        ({}, "-"),
        ({"0": 3, "1": 1}, "0: 75 %, 1: 25 %"),
        ({"8": 1, "0": 5, "1": 2, "2": 1, "4": 1}, "0: 50 %, 1: 20 %, 2-3: 10 %, 4+: 20 %"),
    ],
)
def test_staleness_in_words(histogram: dict[str, int], words: str) -> None:
    assert staleness_words(histogram) == words
