"""A shard that goes on from a state has the same future, to the bit; and what is wrong is refused before it changes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.exchange.job import DenseTable, Rule
from paceline.exchange.layout import shards_of
from paceline.exchange.shard.norms import closing
from paceline.exchange.shard.shard import Shard, ShardState
from paceline.exchange.updates import Part, Update
from tests.exchange.shard import jobs

RULES = (Rule("momentum", {"lr": 0.1}), Rule("adam", {"lr": 0.1}), Rule("ftrl", {"lr": 0.1}), Rule("adagrad"))


def _through_json(state: ShardState) -> ShardState:
    return ShardState(state.tensors, json.loads(json.dumps(state.meta)))


@given(
    modes=st.sampled_from([("bsp", "bsp"), ("bsp", "asp"), ("ssp(1)", "downpour(2, 2)")]),
    rule=st.sampled_from(RULES),
    order=st.permutations(range(8)),
    cut=st.integers(0, 8),
)
@settings(max_examples=25)
def test_a_copy_at_any_point_has_the_same_future(
    modes: tuple[str, str], rule: Rule, order: list[int], cut: int
) -> None:
    job = jobs.job(*modes, pieces=4, shards=1, rule=rule)
    shard = jobs.begun(job)
    copy: Shard | None = None
    for turn, task in enumerate(sorted(order, key=lambda task: task // 4)):
        if turn == cut:
            copy = Shard.of(job, 0, _through_json(shard.state()))
        update = jobs.update(shard, task, sequence=turn + 1, read=shard.position)
        applied = shard.apply(update)
        if copy is not None:
            assert copy.apply(update) == applied
            assert copy.apply(update).repeated
    copy = copy or Shard.of(job, 0, _through_json(shard.state()))
    jobs.assert_same(_through_json(shard.state()), _through_json(copy.state()))


def test_a_state_is_a_copy() -> None:
    shard = jobs.begun(jobs.job(pieces=2))
    shard.apply(jobs.update(shard, 1))
    state = shard.state()
    kept = {name: tensor.clone() for name, tensor in state.tensors.items()}
    copy = Shard.of(shard.job, 0, state)
    shard.apply(jobs.update(shard, 0))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in state.tensors.items())
    jobs.assert_same(_through_json(state), _through_json(copy.state()))


def test_replicas_of_all_shards_agree_and_shards_are_apart() -> None:
    job = jobs.job("asp", "asp", shards=3, pieces=1)
    chains = [[jobs.begun(job, number) for _ in range(3)] for number in range(3)]
    for task in range(6):
        for chain in chains:
            update = jobs.update(chain[0], task)
            assert len({shard.apply(update) for shard in chain}) == 1
    for chain in chains:
        for replica in chain[1:]:
            jobs.assert_same(chain[0].state(), replica.state())
    keys = [set(chain[0].table(jobs.ROWS).state()["keys"].tolist()) for chain in chains]
    assert not keys[0] & keys[1] and not keys[1] & keys[2] and all(keys)


def test_an_addition_is_plain_and_counts_once() -> None:
    shard = jobs.begun(jobs.job("bsp", "asp", shards=1))
    before = shard.read(jobs.DENSE).clone()
    rows, keys = torch.empty(2, 3), torch.tensor([8, 9])
    shard.read_rows(jobs.ROWS, keys, rows)
    added = (Part(jobs.DENSE, None, torch.ones(70)), Part(jobs.ROWS, keys, torch.ones(2, 3)))
    for _ in range(2):
        shard.apply(Update(1, 1, (), -1, 1.0, added))
    assert torch.equal(shard.read(jobs.DENSE), before + 1)
    now = torch.empty(2, 3)
    shard.read_rows(jobs.ROWS, keys, now)
    assert torch.equal(now, rows + 1)
    assert (shard.position, shard.completed) == (1, 0)


def _bad(shard: Shard) -> dict[str, Update]:
    good = jobs.update(shard, 0)
    dense, rows = good.parts
    assert rows.keys is not None
    foreign = torch.arange(50)[torch.from_numpy(shards_of(torch.arange(50).numpy(), 2) == 1)][:1]

    def of(*parts: Part) -> Update:
        return good._replace(parts=parts)

    return {
        "is for table 7; held are": of(dense._replace(table=7)),
        r"values \[3\] for table weight": of(dense._replace(values=torch.ones(3))),
        "torch.float64 for table weight, of float32": of(dense._replace(values=dense.values.double())),
        "keys and values": of(Part(jobs.DENSE, rows.keys, dense.values)),
        "no keys and values": of(Part(jobs.ROWS, None, rows.values)),
        r"rows \[n, 3\]": of(Part(jobs.ROWS, rows.keys, rows.values[:, :2])),
        "keys torch.int32": of(Part(jobs.ROWS, rows.keys.int(), rows.values)),
        f"key {int(foreign)} of table rows: of another shard": of(Part(jobs.ROWS, foreign, torch.ones(1, 3))),
        "several parts for one table": of(rows, rows),
        "sequences begin with 1": good._replace(sequence=0),
        "in rising order": good._replace(tasks=(1, 0)),
        "tasks are from 0": good._replace(tasks=(-1,)),
        "weighs nan": good._replace(weight=float("nan")),
        "weighs -1": good._replace(weight=-1.0),
    }


@pytest.mark.parametrize("message", _bad(jobs.begun(jobs.job())))
def test_what_does_not_fit_is_refused_before_anything_changes(message: str) -> None:
    shard = jobs.begun(jobs.job())
    shard.apply(jobs.update(shard, 2))
    before = shard.state()
    update = _bad(shard)[message]
    for refuse in (shard.check, shard.apply):
        with pytest.raises(ExchangeError, match=message) as caught:
            refuse(update._replace(worker=6))
        assert "of worker 6 for shard 0" in str(caught.value)
    jobs.assert_same(before, shard.state())


def test_an_addition_under_ftrl_is_refused_before_anything_changes() -> None:
    shard = jobs.begun(jobs.job(rule=Rule("ftrl")))
    before = shard.state()
    with pytest.raises(ExchangeError, match="ftrl"):
        shard.apply(jobs.update(shard, 0)._replace(tasks=()))
    jobs.assert_same(before, shard.state())


def test_a_shard_without_elements_of_a_table_does_without() -> None:
    job = replace(jobs.job(shards=4), tables=(DenseTable("small", (3,)), *jobs.job().tables[1:]))
    shards = [Shard(job, number) for number in range(4)]
    assert [shard.tables for shard in shards].count((1,)) == 3
    for shard in shards:
        for task in range(3):
            shard.apply(jobs.update(shard, task))
        shard.apply(closing(0, 0.0))
        assert shard.completed == 1
        jobs.assert_same(Shard.of(job, shard.number, shard.state()).state(), shard.state())
