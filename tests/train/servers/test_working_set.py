"""Working sets: the same losses and gradients as the whole table, under fixed shapes and any keys."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline import parallelize
from paceline.errors import ExchangeError
from paceline.train.servers.worker.working_set import WorkingSet


class Wide(nn.Module):
    """A weight per key, and an embedding per key."""

    def __init__(self, rows, padded=True):
        super().__init__()
        padding = 0 if padded else None
        self.weight = nn.Embedding(rows, 1, padding_idx=padding)
        self.embedding = nn.Embedding(rows, 3, padding_idx=padding)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, keys, labels):
        logits = self.weight(keys).sum(dim=(1, 2)) + self.embedding(keys).sum(dim=1).square().sum(dim=1) + self.bias
        return F.binary_cross_entropy_with_logits(logits, labels)


TABLES = {"weight.weight": "keys", "embedding.weight": "keys"}


def batches(count, rows, size=5, seed=0):
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        keys = torch.randint(rows, (size, 4), generator=random)
        yield {"keys": keys, "labels": torch.randint(2, (size,), generator=random).double()}


def shuffled(keys):
    """Give keys of [0, 50) other names, all over the 64 bits, some of them below 0."""
    return torch.where(keys == 0, 0, keys * 0x9E3779B97F4A7C1 - 2**61)


@pytest.mark.parametrize("padded", [True, False])
def test_losses_and_gradients_are_those_of_the_whole_table(padded):
    torch.manual_seed(0)
    whole = Wide(50, padded).double()
    example, *others = batches(4, 50)
    working = WorkingSet(Wide(1, padded).double(), TABLES, example)
    module = parallelize(working.module, working.take(example).batch)
    shapes = set()
    for batch in [example, *others]:
        whole.zero_grad()
        expected = whole(**batch)
        expected.backward()
        taken = working.take(batch | {"keys": shuffled(batch["keys"])})
        of = {int(shuffled(key)): int(key) for key in batch["keys"].unique()}
        rows = torch.tensor([of[int(key)] for key in taken.keys["weight.weight"]])
        for name in TABLES:
            working.room(taken, name).copy_(whole.get_parameter(name).detach()[rows])
        shapes.add(tuple(tuple(value.shape) for value in taken.batch.values()))
        module.zero_grad()
        loss = module(**taken.batch)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        grads = {shard.name: shard.tensor.grad for shard in module.shards()}
        for name, (keys, values) in working.gradients(taken, grads).items():
            assert torch.equal(keys, taken.keys[name])
            gradient = whole.get_parameter(name).grad
            assert torch.allclose(values, gradient[rows], rtol=1e-12, atol=0)
            assert values.abs().sum().item() == pytest.approx(gradient.abs().sum().item(), rel=1e-12)
    assert len(shapes) == 1 and len(module.startups) == 1


def test_padding_is_neither_asked_for_nor_filled():
    example = {"keys": torch.tensor([[7, 0], [-3, 7]]), "labels": torch.zeros(2)}
    working = WorkingSet(Wide(1), TABLES, example)
    taken = working.take(example)
    assert taken.keys["embedding.weight"].tolist() == [7, -3] and taken.batch["keys"].tolist() == [[1, 0], [2, 1]]
    assert working.capacities == {"weight.weight": 5, "embedding.weight": 5}
    assert working.widths == {"weight.weight": 1, "embedding.weight": 3}
    working.fill(taken, {"embedding.weight": torch.ones(2, 3)})
    assert working.module.embedding.weight[:3].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    into = {"embedding.weight": nn.Parameter(torch.zeros(5, 3))}
    working.fill(taken, {"embedding.weight": torch.full((2, 3), 2.0)}, into)
    assert into["embedding.weight"].sum() == 12 and working.module.embedding.weight.sum() == 6


def test_a_vector_is_a_table_of_width_one_and_a_tuple_is_a_batch():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, keys, labels):
            return F.binary_cross_entropy_with_logits(self.weight[keys].sum(dim=1), labels)

    batch = (torch.tensor([[9, 4], [4, 4]]), torch.tensor([0.0, 1.0]))
    working = WorkingSet(Linear(), {"weight": 0}, batch)
    taken = working.take(batch)
    working.fill(taken, {"weight": torch.tensor([[1.0], [2.0]])})
    loss = working.module(*taken.batch)
    loss.backward()
    assert loss.item() == pytest.approx((F.softplus(torch.tensor(3.0)) + F.softplus(torch.tensor(-4.0))).item() / 2)
    assert working.gradients(taken)["weight"].values.shape == (2, 1)


class OtherPadding(Wide):
    def __init__(self):
        super().__init__(9)
        self.embedding.padding_idx = None


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"weight.wieght": "keys"}, r"no parameter 'weight.wieght'.*Did you mean 'weight.weight'"),
        ({"weight.weight": "kyes"}, r"no 'kyes' to point.*it has: keys, labels\. Did you mean 'keys'"),
        ({"weight.weight": 0}, "no '0' to point"),
        (TABLES, "must treat the key 0 alike"),
        ({"weight.weight": "labels"}, "'labels' .* is torch.float64; keys are int64"),
    ],
)
def test_faults(tables, message):
    (example,) = batches(1, 9)
    with pytest.raises(ExchangeError, match=message):
        WorkingSet(OtherPadding(), tables, example).take(example)


def test_too_many_keys_and_no_gradient():
    (example,) = batches(1, 50)
    working = WorkingSet(Wide(1), TABLES, example, capacity=3)
    with pytest.raises(ExchangeError, match=r"different 'keys', and the working set of 'weight.weight' has room for 3"):
        working.take(example)
    few = {"keys": torch.ones(1, 4, dtype=torch.int64), "labels": torch.zeros(1)}
    with pytest.raises(ExchangeError, match=r"'weight\.weight' has no gradient"):
        working.gradients(working.take(few))
