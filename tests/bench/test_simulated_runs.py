"""Published runs by representatives: the simulation is as close to them as the closed form is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.bench.predictions.measured import measured
from paceline.bench.predictions.predicted import described
from paceline.bench.predictions.rows import read_rows
from paceline.bench.predictions.samples import Sample, samples_of
from paceline.cluster.files import load
from paceline.simulator.closed_form.estimate import estimate
from paceline.simulator.scale.layout import simulate_layout

DATA = Path(__file__).parents[2] / "../shared/data/measured_runs.csv"
SOURCES = {"Megatron-LM 2021, Table 1": "images/cases", "DGX Cloud, Llama 3": "llama3."}


@pytest.fixture(scope="module")
def samples() -> tuple[Sample, ...]:
    if not DATA.exists():
        pytest.skip("the published runs are not here")
    wanted = [row for row in read_rows(DATA).rows if any(part in row.text("source") for part in SOURCES.values())]
    return tuple(samples_of(wanted).usable)


@pytest.mark.parametrize("source", SOURCES)
def test_errors_are_those_of_the_closed_form(samples: tuple[Sample, ...], source: str) -> None:
    rows = [each for each in samples if SOURCES[source] in each.row.text("source") and not each.is_memory][:12]
    assert len(rows) >= 10
    closed, simulated = [], []
    for row in rows:
        workload, layout = described([row.configuration])
        cluster = load(row.configuration.cluster)
        took = measured(row, cluster)
        closed.append(float(estimate(workload, layout, cluster).step_s[0]) / took - 1)
        simulated.append(simulate_layout(workload, layout, cluster).step_s / took - 1)
    assert np.mean(np.abs(simulated)) < np.mean(np.abs(closed)) + 0.02
    assert np.mean(np.abs(simulated)) < 0.1
