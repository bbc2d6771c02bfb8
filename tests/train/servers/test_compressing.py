"""The codec of a run is chosen once, by the speed of its link, and all go by that."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from paceline.exchange.directory import Directory
from paceline.exchange.job import DenseTable, Job, SparseTable
from paceline.train.servers.worker.compressing import choice, settled


class Link:
    """Reads that take as long as they are told to."""

    def __init__(self, job: Job, seconds: float) -> None:
        self.job, self._seconds = job, seconds

    def pull(self, tables: list[int], out: list[torch.Tensor], clock: int) -> None:
        assert clock == 0 and [values.shape for values in out] == [self.job.tables[n].shape for n in tables]
        time.sleep(self._seconds)


def test_a_slow_link_has_smaller_gradients_and_a_fast_one_whole_ones() -> None:
    job = Job((SparseTable("rows", 4), DenseTable("w", (1024, 512))))
    assert choice(Link(job, 0.5)) != "none"  # type: ignore[arg-type]
    fast = Job((DenseTable("w", (1024, 1024)),))
    assert choice(Link(fast, 0.0)) == "none"  # type: ignore[arg-type]
    small = Job((SparseTable("rows", 4), DenseTable("w", (4, 4))))
    assert choice(Link(small, 0.5)) == "none"  # type: ignore[arg-type]


def test_the_first_to_choose_chooses_for_all(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    assert settled("int8", directory, lambda: pytest.fail("nobody asked")) == "int8"
    assert settled("auto", directory, lambda: "bfloat16") == "bfloat16"
    assert settled("auto", directory, lambda: "int8") == "bfloat16"
    assert settled("auto", directory) == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["codec.json"]
