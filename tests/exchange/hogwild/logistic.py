"""Logistic regression on a9a, by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

A9A = Path(__file__).parents[4] / "shared" / "data" / "a9a"


@dataclass(frozen=True)
class Batch:
    """keys: [n] int64, rising; places: [samples, 14] of keys, n where there is none; labels: [samples], 0 or 1."""

    keys: torch.Tensor
    places: NDArray[np.int64]
    labels: torch.Tensor


@dataclass(frozen=True)
class Samples:
    """features: [samples, 14] int64, all of value 1; -1 where there are fewer. labels: [samples]."""

    features: NDArray[np.int64]
    labels: NDArray[np.float32]

    def of(self, chosen: NDArray[np.int64]) -> Batch:
        keys, places = np.unique(self.features[chosen], return_inverse=True)
        places = places.reshape(len(chosen), -1)
        if keys[0] == -1:
            keys, places = keys[1:], np.where(places == 0, len(keys) - 1, places - 1)
        return Batch(torch.from_numpy(keys), places, torch.from_numpy(self.labels[chosen]))


def read_a9a(path: Path) -> Samples:
    lines = path.read_text().split("\n")[:-1]
    features = np.full((len(lines), 14), -1, dtype=np.int64)
    for row, line in enumerate(lines):
        found = [int(word[: word.index(":")]) for word in line.split()[1:]]
        features[row, : len(found)] = found
    return Samples(features, np.array([line[0] == "1" for line in lines], dtype=np.float32))


def scores(batch: Batch, bias: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    padded = torch.cat([rows[:, 0], torch.zeros(1)])
    return bias + padded[torch.from_numpy(batch.places)].sum(1)


def gradient(batch: Batch, bias: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the mean log loss: [1] and [n, 1]."""
    error = (torch.sigmoid(scores(batch, bias, rows)) - batch.labels) / len(batch.labels)
    places = torch.from_numpy(batch.places)
    of_rows = torch.zeros(len(rows) + 1).index_add_(0, places.reshape(-1), error.repeat_interleave(places.shape[1]))
    return error.sum()[None], of_rows[:-1, None]


def quality(samples: Samples, bias: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> tuple[float, float]:
    """Return mean log loss and AUC, ties counted half, of weights `rows` of `keys`, which are rising."""
    weights = torch.zeros(int(samples.features.max()) + 2)
    weights[keys[keys < len(weights) - 1]] = rows[keys < len(weights) - 1, 0]
    given = bias + weights[torch.from_numpy(samples.features)].sum(1)  # -1 is the last weight: 0
    labels = torch.from_numpy(samples.labels)
    loss = float(torch.nn.functional.binary_cross_entropy_with_logits(given, labels))
    _, places, counts = np.unique(given.numpy(), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    positive = samples.labels == 1
    ones, zeros = int(positive.sum()), int((~positive).sum())
    return loss, float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))
