"""The recipe of clicks with its tables on shards in memory: as good as in one process, and held-out data is scored."""

from pathlib import Path

import pytest
import torch
from in_memory import Dealing, InMemory, Kept

from paceline.train.metrics import read_metrics
from paceline.train.model import build_module
from paceline.train.recipe import load_recipe
from paceline.train.run import train
from paceline.train.servers.recipe.job import job_of, steps_of, terms_of
from paceline.train.servers.worker.parts import build_parts, named_parameters, open_sources
from paceline.train.servers.worker.reports import Listener
from paceline.train.servers.worker.worker import Worker

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes/ctr.yaml"
A9A = ROOT.parent / "shared/data/a9a"
LOGISTIC = [
    "model={factory: ctr.py:logistic}",
    f"data={{source: libsvm, files: {A9A}, validation_files: {A9A}.t}}",
    "optimizer.lr=0.1",
    "train={epochs: 1, batch: 128, validate: {every: 1000, scores: logits}}",
]


class Evaluations(Listener):
    """Keeps what was found on held-out data."""

    def __init__(self):
        self.found = []

    def on_evaluation(self, report):
        self.found.append(report)


def learnt(overrides):
    """Train with one worker; return the last evaluation, and what shards hold."""
    recipe = load_recipe(RECIPE, overrides)
    steps = steps_of(recipe, len(open_sources(recipe)[0]))
    job, terms = job_of(recipe, build_module(recipe), steps), terms_of(recipe, steps)
    kept = Kept(job, named_parameters(build_module(recipe)))
    dealing = Dealing(terms.tasks, evaluate=[steps])
    noted = Evaluations()
    parts = build_parts(recipe, job, torch.device("cpu"))
    given = {"validation": parts.validation, "listener": noted, "ahead": terms.ahead}
    Worker(InMemory(kept, 0), dealing, parts.computer, parts.portions, **given).run()
    (report,) = noted.found
    return report, kept


@pytest.mark.skipif(not A9A.exists(), reason="../shared/data/a9a is not here")
@pytest.mark.parametrize(
    ("epochs", "consistency", "table"),
    [
        (2, "'downpour(2, 2)'", "keys"),
        (2, "bsp", "{keys: keys, optimizer: {name: FTRL, lr: 1.0, l1: 0.001}}"),
    ],
    ids=["Adagrad-downpour", "FTRL-bsp"],
)
def test_a9a_reaches_its_baseline_with_its_table_on_shards(epochs, consistency, table):
    server = f"server={{workers: 1, shards: 4, consistency: {consistency}, tables: {{weight.weight: {table}}}}}"
    report, kept = learnt([*LOGISTIC, f"train.epochs={epochs}", server])
    assert report.metrics["log_loss"] <= 0.326 and report.metrics["auc"] >= 0.902
    assert report.loss == pytest.approx(report.metrics["log_loss"], abs=1e-6) and report.weight == 16_281
    (table,) = [number for number, found in enumerate(kept.job.tables) if found.name == "weight.weight"]
    assert sum(len(shard.table(table)) for shard in kept.shards) == 122


def test_scores_are_those_of_a_run_without_servers(tmp_path):
    small = ["data.args={length: 4000, held_out: 1000, values: 1000, buckets: 3000}", "train.batch=250"]
    model = "model.args={rows: 3000, width: 4, hidden: 8}"
    train(load_recipe(RECIPE, [*small, model, "server=null", "train.predict=false"]), tmp_path / "serial")
    train(load_recipe(RECIPE, [*small, model, "server=null", "mesh=dp=2", "launch=inprocess"]), tmp_path / "parallel")
    serial, parallel = (
        read_metrics(tmp_path / name / "metrics.jsonl", "validation")[-1] for name in ("serial", "parallel")
    )
    assert serial["log_loss"] == pytest.approx(serial["loss"], abs=1e-6) and serial["auc"] > 0.55
    for name in ("auc", "log_loss", "accuracy"):
        assert parallel[name] == pytest.approx(serial[name], abs=1e-4)
