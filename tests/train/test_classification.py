"""AUC, log loss and accuracy: against their definitions, with ties; scores by a method of the user's module."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.errors import RecipeError
from paceline.train.classification import Scorer, accuracy, auc, log_loss


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=1, max_size=40))
def test_auc_is_the_part_of_pairs_in_order(samples):
    scores, labels = (np.array(values, dtype=np.float32) for values in zip(*samples, strict=True))
    pairs = [(a > b) + (a == b) / 2 for a in scores[labels == 1] for b in scores[labels == 0]]
    found = auc(scores, labels)
    assert found == pytest.approx(np.mean(pairs)) if pairs else math.isnan(found)


def test_log_loss_and_accuracy():
    logits = np.array([0.0, 2.0, -1.0, 800.0], dtype=np.float32)
    labels = np.array([1.0, 1.0, 0.0, 0.0])
    expected = np.log([2, 1 + math.exp(-2), 1 + math.exp(-1)]).sum() + 800
    assert log_loss(logits, labels) == pytest.approx(expected / 4, rel=1e-12)
    assert accuracy(logits, labels) == 0.5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -1.0]))
        self.drop = nn.Dropout(0.9)

    def logits(self, x):
        return self.drop(x) @ self.weight[:, None]

    def twice(self, x):
        return x

    def forward(self, x, y):
        raise NotImplementedError


def test_a_method_of_the_module_scores_without_the_labels():
    scorer = Scorer(Model(), "logits", "y")
    x = torch.tensor([[2.0, 0], [0, 1], [0, 3], [1, 0]])
    y = torch.tensor([1, 0, 1, 0])
    for _ in range(2):  # a result begins anew
        scorer.add({"x": x[:3], "y": y[:3]})
        scorer.add({"x": x[3:], "y": y[3:]})
        found = scorer.result()
        assert found["auc"] == 0.5 and found["accuracy"] == 0.5
        assert found["log_loss"] == pytest.approx(log_loss(np.array([2.0, -1, -3, 1]), y.numpy()))
    assert scorer.result() == {}
    scorer.add({"x": x, "y": torch.zeros(4)})
    assert set(scorer.result()) == {"log_loss", "accuracy"}


def test_faults():
    with pytest.raises(RecipeError, match=r"Model has no such method.*Did you mean 'logits'"):
        Scorer(Model(), "logit")
    with pytest.raises(RecipeError, match="'labels', and the batch has x, y; name"):
        Scorer(Model(), "logits").add({"x": torch.ones(1, 2), "y": torch.ones(1)})
    with pytest.raises(RecipeError, match=r"'twice' returned scores of shape \[1, 2\] for 1 samples"):
        Scorer(Model(), "twice", "y").add({"x": torch.ones(1, 2), "y": torch.ones(1)})
