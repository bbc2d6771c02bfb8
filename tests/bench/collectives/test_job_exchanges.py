"""Collectives of a running job, beside what a cluster expects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.bench.collectives.exchanges import Exchange, Kind
from paceline.bench.collectives.expected import expected_seconds
from paceline.bench.collectives.within_job import Found, bus_bytes, divisible
from paceline.cluster.files import load
from tests.ports import free_port


def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port())]
    command += ["-m", "paceline.cli.main", "bench", "collectives", "--json", str(tmp_path / "found.json")]
    for setting in ("sizes=1k,16", "rounds=2", "cluster=laptop", "kinds=all_reduce,all_to_all"):
        command += ["--set", setting]
    settings = {"OMP_NUM_THREADS": "1", "PACELINE_CACHE": "off", "PACELINE_SHM": "portable"}
    run = subprocess.run(
        command, env={**os.environ, **settings}, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["job"]["ranks"] == 2 and found["settings"] == {"rounds": 2, "cluster": "laptop"}
    assert set(found["collectives"]["2"]) == {"all_reduce", "all_to_all"}
    for sizes in found["collectives"]["2"].values():
        assert list(sizes) == ["1024", "16"]
        for each in sizes.values():
            assert each["us"] > 0 and each["bus_gb_s"] > 0 and each["expected_us"] > 0
    assert run.stdout.count("2 ranks on") == 1, "one rank prints"
    assert "the cluster 'laptop'" in run.stdout


def test_what_is_reached_of_what_is_expected() -> None:
    exchange = Exchange(Kind.ALL_REDUCE, 1 << 20, ranks=4)
    expected = expected_seconds(load("laptop"), exchange) * 1e6
    assert Found(2 * expected, 1.0, expected, 2.0).reached == pytest.approx(0.5)
    assert Found(1.0, 1.0).reached is None
    assert bus_bytes(exchange) == 2 * (1 << 20) * 3 / 4
    assert bus_bytes(Exchange(Kind.BROADCAST, 1 << 20, ranks=4)) == 1 << 20
    assert [divisible(size, 3) for size in (1, 12, 13)] == [12, 12, 24]
