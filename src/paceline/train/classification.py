"""How well a model tells two classes apart: area under the ROC curve, log loss, accuracy, on data held out.

The loss that is trained need not be any of them, and AUC is no mean over samples. So all scores are kept, 8 bytes for
each with its label, and the figures are exact.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.errors import RecipeError, nearest

Scores = NDArray[np.floating[Any]]


def auc(scores: Scores, labels: Scores) -> float:
    """Return the probability that a positive sample has a higher score than a negative one, ties counting half.

    From the sum of ranks (Mann and Whitney, 1947), those of equal scores averaged. scores, labels (0 or 1): [n]. NaN
    where all samples are of one class.
    """
    positive = labels > 0
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return math.nan
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(sizes) - (sizes - 1) / 2  # from 1
    return float((ranks[group[positive]].sum() - count * (count + 1) / 2) / (count * others))


def log_loss(logits: Scores, labels: Scores) -> float:
    """Return the mean cross-entropy in nats of labels (0 or 1) under the odds exp(logit): [n], [n]."""
    z = logits.astype(np.float64)
    return float((np.logaddexp(0, z) - z * labels).mean())


def accuracy(logits: Scores, labels: Scores) -> float:
    """Return which part of the labels the sign of the logit tells: [n], [n]."""
    return float(((logits > 0) == (labels > 0)).mean())


class Scorer:
    """Scores held-out data by a method of the user's module, called with what it names of the batch, and no labels.

    Args:
        module: the user's, with its parameters where they were trained to.
        method: returns a logit for each sample: [n] or [n, 1].
        labels: which tensor of the batch holds the classes, 0 and 1.

    Raises:
        RecipeError: the module has no such method.
    """

    def __init__(self, module: nn.Module, method: str, labels: str = "labels") -> None:
        found = getattr(module, method, None)
        if not callable(found):
            own = [name for name in vars(type(module)) if not name.startswith("_")]
            raise RecipeError(
                f"train.validate.scores is '{method}', and {type(module).__name__} has no such method. It is one that "
                f"takes tensors of the batch and returns a logit for each sample.{nearest(method, own)}"
            )
        self._module = module
        self._method: Callable[..., Tensor] = found
        self._name = method
        self._labels = labels
        self._seen: list[tuple[Scores, Scores]] = []

    def add(self, batch: Mapping[str, Tensor] | tuple[Tensor, ...]) -> None:
        """Score a batch.

        Raises:
            RecipeError: the batch has no labels by that name, or the scores are not one for each sample.
        """
        if not isinstance(batch, Mapping) or self._labels not in batch:
            names = ", ".join(batch) if isinstance(batch, Mapping) else "no names"
            raise RecipeError(
                f"train.validate.labels is '{self._labels}', and the batch has {names}; name the tensor with classes."
            )
        named = inspect.signature(self._method).parameters
        trained = self._module.training
        self._module.eval()
        with torch.no_grad():
            logits = self._method(**{key: value for key, value in batch.items() if key in named})
        self._module.train(trained)
        labels = batch[self._labels]
        if logits.numel() != labels.numel():
            raise RecipeError(
                f"'{self._name}' returned scores of shape {list(logits.shape)} for {labels.numel()} samples; return a "
                "logit for each."
            )
        self._seen.append((_flat(logits), _flat(labels)))

    def result(self) -> dict[str, float]:
        """Return `auc`, `log_loss` and `accuracy` of all that was scored since the last time; no `auc` of one class."""
        seen, self._seen = self._seen, []
        if not seen:
            return {}
        logits, labels = (np.concatenate(values) for values in zip(*seen, strict=True))
        figures = {"auc": auc, "log_loss": log_loss, "accuracy": accuracy}
        found = {name: figure(logits, labels) for name, figure in figures.items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}


def _flat(tensor: Tensor) -> Scores:
    flat: Scores = tensor.detach().reshape(-1).cpu().to(torch.promote_types(tensor.dtype, torch.float32)).numpy()
    return flat
