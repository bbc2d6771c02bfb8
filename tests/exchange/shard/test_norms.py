"""Steps that are clipped: what shards know of the norm, and what closes a step: once, and on all replicas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.errors import ExchangeError
from paceline.exchange.job import DenseTable, Job, Rule
from paceline.exchange.shard.norms import Share, Stage, closing, factor, norm_of, squares
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Part, Update
from tests.exchange.shard import jobs

SGD = Rule("sgd", {"lr": 1.0})


def clipped(clip: float = 1.5, *, shards: int = 2, dtype: str = "float64", rule: Rule = SGD) -> Job:
    return replace(jobs.job(shards=shards, dtype=dtype, rule=rule), clip=clip)


def close(shards: list[Shard], clock: int) -> float:
    norm = norm_of(shard.share(clock) for shard in shards)
    assert norm is not None
    for shard in shards:
        assert not shard.apply(closing(clock, norm)).repeated
    return norm


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_shards_together_apply_what_serial_clipping_gives(clip: float) -> None:
    made = clipped(clip)
    shards = [jobs.begun(made, number) for number in range(2)]
    before = [jobs.tables_of(shard) for shard in shards]
    rows: dict[int, torch.Tensor] = {}
    gradients = []  # of elements that are nowhere else: one for each shard and table
    for shard in shards:
        updates = [jobs.update(shard, task, weight=1.0 + task) for task in range(3)]
        dense = sum(u.weight * p.values for u in updates for p in u.parts if p.table == jobs.DENSE)
        gradients.append(dense / 6 if isinstance(dense, torch.Tensor) else torch.zeros(0, dtype=torch.float64))
        for update in updates:
            for part in update.parts:
                if part.keys is not None:
                    for key, row in zip(part.keys.tolist(), part.values, strict=True):
                        rows[key] = rows.get(key, torch.zeros(3, dtype=torch.float64)) + update.weight * row / 6
            shard.apply(update)
        assert shard.completed == 0 and shard.share(0).stage is Stage.WHOLE
        for name, tensor in before[shard.number].items():
            assert torch.equal(jobs.tables_of(shard)[name], tensor)
    parameters = [nn.Parameter(torch.zeros_like(one)) for one in [*gradients, *rows.values()]]
    for parameter, gradient in zip(parameters, [*gradients, *rows.values()], strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(parameters, clip)
    assert close(shards, 0) == pytest.approx(float(expected), rel=1e-12)
    for shard, parameter in zip(shards, parameters, strict=False):
        assert shard.completed == 1
        if jobs.DENSE in shard.tables:
            moved = before[shard.number]["0.values"] - shard.read(jobs.DENSE)
            torch.testing.assert_close(moved, parameter.grad, rtol=1e-11, atol=1e-12)
    for key, parameter in zip(rows, parameters[2:], strict=True):
        (shard,) = (one for one in shards if len(jobs.keys_of(one, [key])))
        fresh, now = torch.empty(1, 3, dtype=torch.float64), torch.empty(1, 3, dtype=torch.float64)
        jobs.begun(made, shard.number).read_rows(jobs.ROWS, torch.tensor([key]), fresh)
        shard.read_rows(jobs.ROWS, torch.tensor([key]), now)
        torch.testing.assert_close((fresh - now)[0], parameter.grad, rtol=1e-11, atol=1e-12)


def test_nobody_reads_past_a_step_that_is_open() -> None:
    shard = jobs.begun(clipped(shards=1))
    for task in range(3):
        assert not shard.ready(jobs.DENSE, 1)
        shard.apply(jobs.update(shard, task))
    assert not shard.ready(jobs.DENSE, 1)
    assert shard.missing(jobs.DENSE, 1) == (0, 1, 2)  # whoever has one of them closes the step
    with pytest.raises(ExchangeError, match="clock 1, and table"):
        shard.check(jobs.update(shard, 3))
    close([shard], 0)
    assert shard.ready(jobs.DENSE, 1) and shard.missing(jobs.DENSE, 1) == ()
    shard.apply(jobs.update(shard, 3, read=shard.position))
    with pytest.raises(ExchangeError, match="may be from 4 on"):
        shard.check(jobs.update(shard, 4, read=3))


def test_a_closing_counts_once_and_not_before_its_time() -> None:
    shard = jobs.begun(clipped(shards=1))
    for task in range(2):
        shard.apply(jobs.update(shard, task))
    with pytest.raises(ExchangeError, match="closes clock 0; here clocks below 0 are closed, and of those below 0 all"):
        shard.check(closing(0, 1.0))
    assert shard.share(0) == Share(Stage.GATHERING, pytest.approx(math.nan, nan_ok=True))
    shard.apply(jobs.update(shard, 2))
    for norm in (math.nan, math.inf, -1.0):
        with pytest.raises(ExchangeError, match="a finite norm from 0"):
            shard.check(closing(0, norm))
    with pytest.raises(ExchangeError, match="closes clock 1"):
        shard.check(closing(1, 1.0))
    norm = close([shard], 0)
    before = shard.state()
    shard.check(closing(0, norm))
    assert shard.apply(closing(0, norm)).repeated
    jobs.assert_same(before, shard.state())
    assert shard.share(0) == Share(Stage.CLOSED, norm)
    assert shard.share(1).stage is Stage.GATHERING


def test_who_closes_what_a_dead_worker_closed_in_part_takes_its_norm() -> None:
    shards = [jobs.begun(clipped(), number) for number in range(2)]
    for shard in shards:
        for task in range(3):
            shard.apply(jobs.update(shard, task))
    shares = [shard.share(0) for shard in shards]
    norm = norm_of(shares)
    assert norm == math.sqrt(math.fsum(share.value for share in shares))
    shards[1].apply(closing(0, norm))
    assert norm_of(shard.share(0) for shard in shards) == norm
    shards[0].apply(closing(0, norm))
    for shard in shards:
        for task in range(3, 6):
            shard.apply(jobs.update(shard, task))
    later = close(shards, 1)
    assert norm_of(shard.share(0) for shard in shards) is None  # long ago
    assert norm_of(shard.share(1) for shard in shards) == later
    assert norm_of(shard.share(2) for shard in shards) is None  # not yet


@pytest.mark.parametrize("after", range(1, 9))
def test_a_copy_goes_on_as_the_shard_itself(after: int) -> None:
    made = clipped(0.7, shards=1, rule=Rule("adam", {"lr": 0.1}))
    shard = jobs.begun(made)
    copy: Shard | None = None
    for count in range(1, 9):
        clock, task = divmod(count - 1, 4)
        update = (
            closing(clock, math.sqrt(shard.share(clock).value)) if task == 3 else jobs.update(shard, 3 * clock + task)
        )
        shard.apply(update)
        if copy is not None:
            copy.apply(update)
            assert copy.share(clock)[0] is shard.share(clock)[0]
        if count == after:
            copy = Shard.of(made, 0, shard.state())
    assert copy is not None and shard.completed == 2
    jobs.assert_same(shard.state(), copy.state())
    assert copy.share(1) == shard.share(1)


def test_a_step_without_weight_has_no_norm_and_changes_nothing() -> None:
    shard = Shard(clipped(shards=1), 0)
    ones = Part(jobs.DENSE, None, torch.ones(70, dtype=torch.float64))
    for task in range(3):
        shard.apply(Update(1, task + 1, (task,), -1, 0.0, (ones,)))
    assert close([shard], 0) == 0
    assert not shard.read(jobs.DENSE).any()


def test_a_shard_that_holds_nothing_takes_part() -> None:
    made = Job((DenseTable("few", (3,), "float64", SGD),), shards=4, pieces=1, clip=1.0)
    shards = [Shard(made, number) for number in range(4)]
    assert any(not shard.tables for shard in shards)
    for shard in shards:
        parts = tuple(Part(0, None, torch.full_like(shard.read(0), 2.0)) for _ in shard.tables)
        shard.apply(Update(1, 1, (0,), -1, 1.0, parts))
    assert close(shards, 0) == pytest.approx(math.sqrt(12))
    assert {shard.completed for shard in shards} == {1}


def test_a_run_without_clipping_may_go_on_with_it() -> None:
    plain, made = jobs.job(shards=1, dtype="float64", rule=SGD), clipped(shards=1)
    shard = jobs.begun(plain)
    for task in range(3):
        shard.apply(jobs.update(shard, task))
    now = Shard.of(made, 0, shard.state())
    assert now.completed == 1
    for task in range(3, 6):
        now.apply(jobs.update(now, task))
    close([now], 1)
    back = Shard.of(plain, 0, now.state())
    assert back.completed == 2


@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), max_size=300),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    copies=st.sampled_from([1, 700]),
)
@settings(max_examples=40)
def test_squares_are_added_up_whole(values: list[float], dtype: torch.dtype, copies: int) -> None:
    tensor = torch.tensor(values, dtype=dtype).repeat(copies)
    exact = math.fsum(value * value for value in tensor.double().tolist())
    assert squares([Part(0, None, tensor), Part(1, None, tensor[:3])]) == pytest.approx(
        exact + math.fsum(value * value for value in tensor[:3].double().tolist()), rel=1e-13
    )


def test_what_overflows_is_infinite() -> None:
    assert squares([Part(0, None, torch.full((2,), 1e200, dtype=torch.float64))]) == math.inf
    assert norm_of([Share(Stage.WHOLE, 1.7e308)] * 2) == math.inf


def test_the_factor_is_that_of_pytorch() -> None:
    for norm in (0.0, 0.3, 1.0, 1.0 + 1e-9, 7.5):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        parameter.grad = torch.full((1,), norm, dtype=torch.float64)
        nn.utils.clip_grad_norm_([parameter], 1.0)
        assert norm * factor(1.0, norm) == pytest.approx(float(parameter.grad), abs=1e-15)
