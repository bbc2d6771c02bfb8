"""The models of clicks and the made-up log: what they compute, and what they learn in one process."""

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.exchange.layout import mixed
from paceline.program.factory import load_factory
from paceline.train.classification import Scorer
from paceline.train.data import Loader, open_source
from paceline.train.data.config import FactoryData, LibsvmData
from paceline.train.model import build_module
from paceline.train.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
DATA = Path(__file__).parents[3] / "shared/data"
clicks, deep, logistic = (load_factory(f"ctr.py:{name}", RECIPES) for name in ("clicks", "deep", "logistic"))


def fit(module, source, held_out, lr, batch, epochs=1):
    """Train by torch.optim, and score."""
    optimizer = torch.optim.Adagrad(module.parameters(), lr=lr)
    for epoch in range(epochs):
        for step in Loader(source, batch).epoch(epoch):
            optimizer.zero_grad()
            module(**step.micro_batches[0].batch).backward()
            optimizer.step()
    scorer = Scorer(module, "logits")
    for step in Loader(held_out, 4096).epoch():
        scorer.add(step.micro_batches[0].batch)
    return scorer.result()


def test_the_recipe_fits_its_model_and_data():
    recipe = load_recipe(RECIPES / "ctr.yaml")
    module = build_module(recipe)
    assert set(recipe.server.tables) < {name for name, _ in module.named_parameters()}
    source, held_out = open_source(recipe.data)
    batch = source.batch(np.arange(5))
    batch["keys"].fill_(0)  # the only row that the module has
    assert module(**batch).item() == pytest.approx(np.log(2), abs=0.2)
    assert getattr(module, recipe.train.validation.scores)(batch["keys"], numbers=batch["numbers"]).shape == (5,)
    assert len(held_out) == 20_000 and source.batch(np.arange(100))["keys"].min() < -(2**50)


def test_made_up_clicks_are_the_same_for_a_seed_and_have_frequent_values():
    (log, later), (again, _), (other, _) = clicks(9_000, 1_000), clicks(9_000, 1_000), clicks(9_000, 1_000, seed=1)
    assert all(torch.equal(log[name], again[name]) for name in log) and not torch.equal(log["keys"], other["keys"])
    assert len(later["labels"]) == 1_000 and 0.2 < log["labels"].mean() < 0.5
    counts = [len(log["keys"][:, field].unique()) for field in range(8)]
    assert counts == sorted(counts) and counts[0] == 3 and counts[-1] > 2_000
    _, often = log["keys"][:, 7].unique(return_counts=True)
    assert often.max() > 20 * often.double().mean()
    hashed, _ = clicks(100, 10, buckets=50)
    assert hashed["keys"].min() >= 1 and hashed["keys"].max() < 50


def test_keys_are_mixed_as_servers_mix_them():
    values = torch.randint(-(2**62), 2**62, (1000,))
    found = load_factory("ctr.py:_mixed", RECIPES)(values)
    assert np.array_equal(found.numpy().view(np.uint64), mixed(values.numpy()))


def test_padding_counts_for_nothing():
    for factory, given in ((logistic, {}), (deep, {"fields": 4, "numbers": 0, "width": 3})):
        module, _ = factory(rows=10, **given)
        table = next(p for p in module.parameters() if p.dim() == 2)
        torch.nn.init.normal_(table[1:].detach())
        keys, values = torch.tensor([[3, 5, 0, 0]]), torch.tensor([[1.0, -2.0, 0.0, 0.0]])
        logit = module.logits(keys, values)
        assert torch.equal(logit, module.logits(keys, values + torch.tensor([0, 0, 7.0, 7.0])))
        module(keys, torch.ones(1), values).backward()
        assert not table.grad[0].any() and table.grad[3].all()


def test_the_deep_model_learns_what_a_regression_cannot():
    data = FactoryData(source="factory", dataset=f"{RECIPES}/ctr.py:clicks", args={"length": 60_000, "buckets": 50_000})
    source, held_out = open_source(data)
    torch.manual_seed(0)
    flat = fit(logistic(50_000)[0], source, held_out, 0.1, 500)
    high = fit(deep(50_000)[0], source, held_out, 0.05, 500)
    assert high["auc"] > flat["auc"] + 0.01 and high["log_loss"] < flat["log_loss"] - 0.01


@pytest.mark.skipif(not (DATA / "a9a").exists(), reason="../shared/data/a9a is not here")
def test_a9a_reaches_its_baseline():
    source, test = open_source(
        LibsvmData(source="libsvm", files=[str(DATA / "a9a")], validation_files=[str(DATA / "a9a.t")])
    )
    found = fit(logistic(124)[0], source, test, 0.1, 128, epochs=2)
    assert found["log_loss"] <= 0.326 and found["auc"] >= 0.902 and found["accuracy"] > 0.848
