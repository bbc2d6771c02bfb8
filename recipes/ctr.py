"""Models of clicks: sparse logistic regression, and a deep model of embeddings and their products. Plain PyTorch.

Also a log of made-up clicks, so that the recipe needs no data. Keys are any 64-bit numbers; 0 is that of no feature.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FIELDS = 8
NUMBERS = 4


class LogisticRegression(nn.Module):
    """A weight for each key. `model(keys, labels, values)` is the mean log loss."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Embedding(rows, 1, padding_idx=0)
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.weight.weight)

    def logits(self, keys: Tensor, values: Tensor | None = None) -> Tensor:  # [B, F], [B, F] -> [B]
        """Return the log of the odds of a click."""
        weights = self.weight(keys).squeeze(-1)
        return (weights if values is None else weights * values).sum(dim=1) + self.bias

    def forward(
        self, keys: Tensor, labels: Tensor, values: Tensor | None = None, numbers: Tensor | None = None
    ) -> Tensor:
        """Return the loss, which is what Paceline trains. Numbers are not used: have them as keys."""
        return F.binary_cross_entropy_with_logits(self.logits(keys, values), labels)


class DeepModel(nn.Module):
    """An embedding and a weight for each key, the products of all pairs of embeddings, and layers on top.

    As DLRM (Naumov et al., 2019): numbers pass through layers of their own, and their result is one more embedding.
    The first weight of a key is its linear term, which learns much faster than the rest.
    """

    def __init__(self, rows: int, fields: int, numbers: int, width: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Embedding(rows, 1, padding_idx=0)
        self.embedding = nn.Embedding(rows, width, padding_idx=0)
        nn.init.zeros_(self.linear.weight)
        nn.init.normal_(self.embedding.weight, std=0.05)
        nn.init.zeros_(self.embedding.weight[0].detach())  # of the key that stands for none
        self.bottom = (
            nn.Sequential(nn.Linear(numbers, hidden), nn.ReLU(), nn.Linear(hidden, width)) if numbers else None
        )
        vectors = fields + bool(numbers)
        self.top = nn.Sequential(
            nn.Linear(vectors * vectors + (width if numbers else 0), hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def logits(self, keys: Tensor, values: Tensor | None = None, numbers: Tensor | None = None) -> Tensor:
        """Return the log of the odds of a click. keys, values: [B, F]; numbers: [B, N] -> [B]."""
        linear, vectors = self.linear(keys).squeeze(-1), self.embedding(keys)
        if values is not None:
            linear, vectors = linear * values, vectors * values[..., None]
        seen = []
        if self.bottom is not None and numbers is not None:
            seen = [self.bottom(numbers)]
            vectors = torch.cat([vectors, seen[0][:, None]], dim=1)  # [B, F + 1, D]
        products = vectors @ vectors.transpose(1, 2)  # [B, F + 1, F + 1]
        return linear.sum(dim=1) + self.top(torch.cat([products.flatten(1), *seen], dim=1)).squeeze(-1)

    def forward(
        self, keys: Tensor, labels: Tensor, values: Tensor | None = None, numbers: Tensor | None = None
    ) -> Tensor:
        """Return the loss."""
        return F.binary_cross_entropy_with_logits(self.logits(keys, values, numbers), labels)


def logistic(rows: int = 1) -> tuple[LogisticRegression, dict[str, Tensor]]:
    """The factory of the regression. Of a table on servers one row will do; one that is kept whole has all rows."""
    return LogisticRegression(rows), {"keys": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.zeros(2)}


def deep(
    rows: int = 1, fields: int = FIELDS, numbers: int = NUMBERS, width: int = 8, hidden: int = 64
) -> tuple[DeepModel, dict[str, Tensor]]:
    """The factory of the deep model: `fields` keys and `numbers` numbers a sample."""
    batch = {"keys": torch.zeros(2, fields, dtype=torch.int64), "labels": torch.zeros(2)}
    if numbers:
        batch["numbers"] = torch.zeros(2, numbers)
    return DeepModel(rows, fields, numbers, width, hidden), batch


def clicks(
    length: int = 200_000, held_out: int = 20_000, values: int = 100_000, buckets: int | None = None, seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The factory of the data: a log of made-up clicks to train on, and what came after it to validate on.

    Each of 8 fields has from 3 to `values` values, few of which are frequent, as in real logs. A sample is a click by
    the odds of hidden effects: of each value, of fields in pairs, of numbers.

    Args:
        length: samples to train on.
        held_out: samples to validate on.
        values: of the field that has most.
        buckets: keys are hashed to below this many; None: they have 64 bits.
        seed: of all that is made up.
    """
    random = torch.Generator().manual_seed(seed)
    count = length + held_out
    sizes = (values ** (torch.arange(1, FIELDS + 1) / FIELDS)).long()
    # The density of value v is as 1 / v.
    value = (sizes ** torch.rand(count, FIELDS, generator=random)).long() + sizes.cumsum(0) - sizes
    effects = 0.7 * torch.randn(int(sizes.sum()) + 1, generator=random)[value]  # [n, 8]
    tastes = torch.randn(int(sizes.sum()) + 1, 2, generator=random)[value]  # [n, 8, 2]
    numbers = torch.empty(count, NUMBERS).exponential_(generator=random)
    logits = effects.sum(dim=1) + 0.6 * (tastes[:, 1::2] * tastes[:, ::2]).sum(dim=(1, 2))
    logits += 0.5 * numbers[:, 0] - 0.5 * numbers[:, 1] - 1.5
    labels = (torch.rand(count, generator=random) < logits.sigmoid()).float()
    keys = _mixed(value + (1 << 40))
    if buckets is not None:
        keys = keys.remainder(buckets - 1) + 1
    log = {"keys": keys, "numbers": numbers.log1p(), "labels": labels}
    return {name: x[:length] for name, x in log.items()}, {name: x[length:] for name, x in log.items()}


def _mixed(x: Tensor) -> Tensor:
    """Return well mixed bits of 64-bit numbers: the finalizer of SplitMix64, in arithmetic that wraps around."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & (2**33 - 1))
