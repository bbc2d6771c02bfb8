"""The section `server`: what is accepted, what is refused and with which words, and the job that follows from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from paceline.errors import ExchangeError, RecipeError
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Mode, Rule, SparseTable
from paceline.exchange.rates import Rates
from paceline.train.recipe import Recipe, load_recipe, to_yaml
from paceline.train.servers.recipe.groups import global_job
from paceline.train.servers.recipe.job import job_of, steps_of, terms_of
from paceline.train.servers.recipe.rules import rule_of

Load = Callable[..., Recipe]
MINIMAL = """\
name: small
model: {factory: "model.py:build"}
data: {source: stdlib}
train: {steps: 12, batch: 16}
optimizer: {name: SGD, lr: 0.1}
server: {workers: 4}
"""


@pytest.fixture
def load(tmp_path: Path) -> Load:
    (tmp_path / "model.py").write_text("def build(): ...\n")

    def load_text(*overrides: str) -> Recipe:
        path = tmp_path / "r.yaml"
        path.write_text(MINIMAL)
        return load_recipe(path, overrides)

    return load_text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["server.workerz=3"], ["unknown key 'server.workerz'", "Did you mean 'workers'?"]),
        (["server.consistency=sps(2)"], ["sps(2)", "ssp(3)", "Did you mean 'ssp'?", "hogwild"]),
        (["server.compression=topk(0.1)"], ["unknown compression 'topk(0.1)'", "Did you mean 'top_k'?", "auto"]),
        (["server.compression=topk(0.1)"], ["topk(0.1)", "Did you mean 'top_k'?"]),
        (["server.minimum=5"], ["minimum is 5", "begins with 4"]),
        (["server.replication=2"], ["replication 2", "there are 1"]),
        (["server.damp_stale=true"], ["no meaning under bsp"]),
        (["server.tables={emb: {kys: ids}}"], ["unknown key 'kys'", "keys, initializer, optimizer"]),
        (["server.tables={emb: {keys: ids, initializer: norml(1)}}"], ["norml(1)", "Did you mean 'normal'?"]),
        (["server.tables={emb: ids}", "server.consistency=downpour(2,2)", "server.sparse=asp"], ["do not go together"]),
        (["server.average_every=2", "server.consistency=downpour(2,2)"], ["leave out downpour"]),
        (["server.average_every=5"], ["train.steps is 12", "every 5 steps"]),
        (["server.deployment=groups", "server.groups=3"], ["which 3 groups do not divide"]),
        (["server.pieces=3"], ["train.batch is 16", "a multiple of 3"]),
        (
            ["train.clip=1.0", "server.consistency=asp", "server.tables={emb: i}", "server.sparse=bsp"],
            ["train.clip", "'asp' and 'bsp'", "one consistency for both"],
        ),
        (["train.trace=[1]"], ["train.trace", "leave it out"]),
        (["schedule.warmup=2", "optimizer.name=FTRL"], ["FTRL", "cannot change"]),
        (["schedule.name=linear", "server.tables={e: {keys: i, optimizer: {name: FTRL, lr: 1}}}"], ["FTRL"]),
        (["optimizer.name=Adamax"], ["no rule 'Adamax'", "Did you mean 'Adam"]),
        (["optimizer={name: Adam, lr: 0.1, lr_decay: 1}"], ["lr_decay", "betas"]),
        (["optimizer={name: FTRL, lr: 0.1, l1: -1}"], ["l1", "-1"]),
        (["server=null", "optimizer.name=FTRL"], ["rule of parameter servers", "add a section `server`"]),
        (["mesh=tp=2", "train.validate={every: 5, scores: odds}"], ["scores", "'tp' splits it", "launch: inprocess"]),
        (["mesh=pp=2", "plan.pipeline.schedule=pipedream"], ["update themselves", "1f1b"]),
        (["server.consistency=hogwild", "server.damp_stale=true"], ["there are none"]),
        (["server.durable=true", "server.log=false"], ["about logs"]),
        (["server.lease_s=0"], ["server.lease_s", "0.1"]),
    ],
)
def test_faults_are_named_with_what_to_do(load: Load, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load(*overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_is_written_out_reads_back_as_the_same(load: Load, tmp_path: Path) -> None:
    recipe = load(
        "server.tables={'emb.weight': ids, 'wide.weight': {keys: 1, initializer: normal(0.1), "
        "optimizer: {name: FTRL, lr: 0.2, l1: 0.5}}}",
        "server.consistency=downpour(5,2)",
        "optimizer.name=FTRL",
    )
    copy = tmp_path / "config.yaml"
    copy.write_text(to_yaml(recipe))
    assert load_recipe(copy) == recipe
    assert recipe.server is not None
    assert recipe.server.tables["emb.weight"].keys == "ids"
    assert recipe.server.dense_consistency == Consistency(Mode.ASP, None, 5, 2)


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("SGD", {"lr": 1}, Rule("sgd", {"lr": 1.0})),
        ("SGD", {"lr": 1, "momentum": 0.9}, Rule("momentum", {"lr": 1.0, "momentum": 0.9})),
        ("Adam", {"lr": 1, "betas": [0.5, 0.6]}, Rule("adam", {"lr": 1.0, "beta1": 0.5, "beta2": 0.6})),
        ("RowwiseAdagrad", {"lr": 1}, Rule("rowwise_adagrad", {"lr": 1.0})),
    ],
)
def test_optimizers_are_rules(name: str, options: dict[str, object], rule: Rule) -> None:
    assert rule_of(name, options) == rule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(3, 4)
        self.wide = nn.Parameter(nn.init.zeros_(nn.Parameter().data.new_empty(5)))
        self.head = nn.Linear(4, 2)
        self.tied = self.head
        self.fixed = nn.Parameter(self.wide.detach().clone(), requires_grad=False)


def test_parameters_are_tables(load: Load) -> None:
    recipe = load(
        "server.tables={emb.weight: {keys: ids, initializer: normal(0.1), optimizer: {name: FTRL, lr: 0.2}}, wide: k}",
        "server.sparse=ssp(2)",
        "optimizer={name: AdamW, lr: 0.1}",
    )
    job = job_of(recipe, Net(), 12)
    by_name = {table.name: table for table in job.tables}
    assert list(by_name) == ["wide", "emb.weight", "head.weight", "head.bias"]
    ssp, adamw = Consistency(Mode.SSP, 2), {"weight_decay": 0.01, "decoupled_weight_decay": 1.0, "lr": 0.1}
    assert by_name["emb.weight"] == SparseTable(
        "emb.weight", 4, rule=Rule("ftrl", {"lr": 0.2}), consistency=ssp, initializer=Initializer("normal", 0.1)
    )
    assert by_name["wide"] == SparseTable("wide", 1, rule=Rule("adam", adamw), consistency=ssp)
    assert by_name["head.weight"] == DenseTable("head.weight", (2, 4), rule=Rule("adam", adamw))
    assert "weight_decay" not in by_name["head.bias"].rule.options  # as torch.optim is given groups
    assert job.pieces == 4
    with pytest.raises(ExchangeError, match=r"no parameter of the module.*Did you mean 'emb\.weight'"):
        job_of(load("server.tables={emb.wait: ids}"), Net(), 12)


def test_terms_of_a_run(load: Load) -> None:
    recipe = load("checkpoint={every: 5, keep: 3}", "train.validate={every: 4}")
    terms = terms_of(recipe, steps_of(recipe, 100))
    assert (terms.tasks, terms.ahead, terms.snapshot_every, terms.evaluate_every) == (48, 2, 5, 4)
    assert terms.kept_snapshots == 3
    recipe = load("train={epochs: 3, batch: 16}", "server.consistency=downpour(2,3)")
    assert steps_of(recipe, 100) == 21
    assert terms_of(recipe, 21).ahead == 7
    averaged = load("server.average_every=4", "checkpoint.every=6")
    assert terms_of(averaged, 12).tasks == 12
    assert terms_of(averaged, 12).snapshot_every == 2
    assert job_of(averaged, Net(), 12).tables[0].rule == Rule("sgd", {"lr": 1.0})


def test_learning_rates_are_those_of_the_schedule(load: Load) -> None:
    assert job_of(load(), Net(), 12).rates == Rates()
    scheduled = "schedule={name: cosine, warmup: 4, floor: 0.5}"
    job = job_of(load(scheduled, "optimizer.lr=0.5"), Net(), 12)
    numbers = job.rates.numbers
    assert list(numbers[:5]) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert (len(numbers), job.rate(3), job.rate(11), job.rate(99)) == (12, 1.0, numbers[11], numbers[11])
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job
    assert job_of(load(scheduled, "server.average_every=4"), Net(), 12).rates == Rates()  # they are of local steps
    assert global_job(job, 2).rates == Rates()
    stairs = job_of(load("schedule={name: StepLR, step_size: 5, gamma: 0.5}", "optimizer.lr=0.5"), Net(), 12).rates
    assert list(stairs.numbers) == [1.0] * 5 + [0.5] * 5 + [0.25] * 2


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("{name: OneCycleLR, max_lr: 1, total_steps: 12}", "changes momentum too.*cycle_momentum: false"),
        ("{name: CosineAnnealingLR, T_max: 12, eta_min: 0.01}", "tables with lr 0.9 of their own"),
    ],
)
def test_what_is_more_than_a_factor_is_refused(load: Load, schedule: str, words: str) -> None:
    tables = "server.tables={emb.weight: {keys: ids, optimizer: {name: Adagrad, lr: 0.9}}}"
    recipe = load(f"schedule={schedule}", "optimizer.momentum=0.9", tables)
    with pytest.raises(RecipeError, match=words):
        job_of(recipe, Net(), 12)


@pytest.mark.parametrize(
    ("overrides", "by_servers"),
    [
        ([], True),
        (["server.tables={emb.weight: i}"], True),
        (["server={workers: 4, deployment: groups}"], True),
        (["server={workers: 4, deployment: groups, groups: 4}"], False),
        (["server.consistency=ssp(1)"], False),
        (["server.pieces=1"], False),
        (["server.pieces=1", "server.tables={emb.weight: i}", "server.sparse=asp"], False),
        (["server.average_every=2"], False),
        (["server={workers: 4, consistency: hogwild}"], False),
    ],
    ids=str,
)
def test_means_are_clipped_by_servers_and_gradients_of_tasks_by_workers(
    load: Load, overrides: list[str], by_servers: bool
) -> None:
    job = job_of(load("train.clip=0.5", *overrides), Net(), 12)
    assert job.clip == (0.5 if by_servers else None)
    assert global_job(job, 2).clip is None
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job
