"""The A100's profile is fitted to the runs that its rule chooses, and predicts the others as well as its page says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.bench.predictions.a100 import FITTED, ONE_HOST, SEVERAL_HOSTS, TABLE, chosen, of_source
from paceline.bench.predictions.judging import Judged, judged
from paceline.bench.predictions.predicted import predictions
from paceline.bench.predictions.profiles import shipped_identities
from paceline.bench.predictions.rows import read_rows
from paceline.bench.predictions.samples import Sample, samples_of
from paceline.cluster.files import load

DATA = Path(__file__).parents[4] / "shared" / "data" / "measured_runs.csv"
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="the published runs are not beside this repository")


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    everything = samples_of(read_rows(DATA).rows).usable
    return [sample for source in (*FITTED, TABLE) for sample in of_source(everything, source)]


@pytest.fixture(scope="module")
def found(samples: list[Sample]) -> list[Judged]:
    clusters = {name: load(name) for name in {sample.configuration.cluster for sample in samples}}
    known = shipped_identities()
    lines = frozenset(line for sample in samples if sample.identity in known for line in sample.lines)
    return judged(samples, predictions(samples, clusters), clusters, lines)


def errors(found: list[Judged], source: str) -> np.ndarray:
    return np.array([abs(row.error) for row in found if row.counts and source in row.sample.row.text("source")])


def test_the_rule_chooses_as_many_as_it_says_and_none_of_table_1(samples: list[Sample]) -> None:
    fitted = chosen(samples)
    assert len({sample.row.line for sample in fitted}) == sum(FITTED.values())
    assert not of_source(fitted, TABLE)


def test_a_held_out_size_is_not_among_the_chosen(samples: list[Sample]) -> None:
    fitted = of_source(chosen(samples, seed=1, hidden=1024), ONE_HOST)
    assert {sample.configuration.model.hidden for sample in fitted} == {1024}


def test_the_profile_lists_what_the_rule_chooses(samples: list[Sample]) -> None:
    assert {sample.identity for sample in chosen(samples)} <= shipped_identities()
    assert not {sample.identity for sample in of_source(samples, TABLE)} & shipped_identities()
    profile = load("dgx-a100").slowest.device.rates
    assert len(profile.residuals) == sum(FITTED.values())


def test_runs_that_were_not_fitted_are_predicted(found: list[Judged]) -> None:
    table, several, one = (errors(found, source) for source in (TABLE, SEVERAL_HOSTS, ONE_HOST))
    assert len(table) == 10
    assert table.mean() < 0.05
    assert table.max() < 0.12
    assert several.mean() < 0.05
    assert np.median(several) < 0.03
    assert one.mean() < 0.02
