"""Ranks that walk a schedule: equal to serial, holding no more than was foretold, and nothing in the end."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.runtime.pipeline.module import PipelinedModule
from paceline.runtime.pipeline.scheduling import edges_of
from paceline.runtime.pipeline.stored import pipeline_from_json, pipeline_to_json
from paceline.runtime.pipeline.walk import Walk
from paceline.schedule import Action, Op, validate
from tests.runtime.pipeline.towers import (
    SYNCHRONOUS,
    accumulated,
    assert_same_gradients,
    batch,
    gradients,
    pipelined,
    tower,
)


def flow(schedule: str, micro_batches: int = 5, **options: Any) -> dict[str, Any]:
    chunks = 2 if schedule == "interleaved" else 1
    return {"schedule": schedule, "micro_batches": micro_batches, "chunks": chunks, **options}


@pytest.mark.parametrize("mesh", ["pp=2", "pp=4"])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"tied": True}], ids=["plain", "dropout", "tied"])
def test_gradients_are_those_of_the_module(options: dict[str, Any], schedule: str, mesh: str) -> None:
    """With a batch that does not divide, labels that do not count, and a micro-batch with none that does."""
    module, given = tower(**options), batch(7, ignored=(0, 3, 4))  # 5 micro-batches of 2, 2, 1, 1, 1
    found = pipelined(module, given, mesh, **flow(schedule))
    found.seed(11)
    loss = found(*given)
    loss.backward()
    expected, serial = accumulated(module, given, 5, seed=11)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert found.last_weight == 4.0
    assert_same_gradients(found, serial)
    if options.get("tied"):
        first, *others = gradients(found)["layers.0.linear.weight"]
        assert others or schedule == "zb-v", "it has both ends on one rank"
        assert all(torch.equal(first, other) for other in others), "copies are equal bit by bit"


def test_dropout_draws_the_numbers_of_one_device() -> None:
    """As the module would, seeded so, on each micro-batch; and other numbers at the next call."""
    module, given = tower(dropout=0.5), batch(6, ignored=())
    found = pipelined(module, given, "pp=4", micro_batches=1)
    state = torch.get_rng_state()
    first, second = found(*given).item(), found(*given).item()
    assert first != second
    assert torch.equal(torch.get_rng_state(), state), "the user's generator is left alone"
    found.seed(5)
    torch.manual_seed(5)
    assert found(*given).item() == pytest.approx(module(*given).item(), rel=1e-12)


def observed(found: PipelinedModule, given: tuple[Tensor, Tensor]) -> tuple[dict[int, int], list[Walk]]:
    """The most micro-batches that each stage had in flight, and the walks."""
    in_flight: dict[int, set[int]] = defaultdict(set)
    peaks: dict[int, int] = defaultdict(int)
    walks: dict[int, Walk] = {}

    def watch(walk: Walk, action: Action, began: float, ended: float) -> None:
        walks[walk.rank.number] = walk
        if action.op is Op.FORWARD:
            in_flight[action.stage].add(action.micro_batch)
        elif action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            in_flight[action.stage].discard(action.micro_batch)
        peaks[action.stage] = max(peaks[action.stage], len(in_flight[action.stage]))
        held = {number for (stage, number), values in walk._values.items() if stage == action.stage and values}
        beyond = held - in_flight[action.stage]
        assert all(is_waited_for(walk, action.stage, number) for number in beyond), (action, beyond)

    found.observe = watch
    found(*given).backward()
    return dict(peaks), list(walks.values())


def is_waited_for(walk: Walk, stage: int, micro_batch: int) -> bool:
    """Whether a computation or a message of a micro-batch is still to come on a stage."""
    left = walk._actions[walk.position :]
    return any(
        action.stage == stage and action.micro_batch == micro_batch and action.op is not Op.UPDATE for action in left
    )


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_nothing_is_held_longer_than_needed(schedule: str) -> None:
    module, given = tower(), batch(8, ignored=())
    found = pipelined(module, given, "pp=2", **flow(schedule, 8))
    peaks, walks = observed(found, given)
    for walk in walks:
        account = validate(walk.schedule, edges_of(*(step.pipeline for step in found.steps(*given))))
        assert all(peaks[stage] <= account.stage_peaks[stage] for stage in walk.rank.stages)
        assert not any(values for values in walk._values.values()), "values are left over"
        assert not any(walk._unsent.values()) and not walk._sent
        assert not any(tensor for stage in walk.rank.stages for tensor in walk.held(stage))


def test_recomputing_stages_hold_less_and_draw_the_same() -> None:
    module, given = tower(dropout=0.5), batch(8, ignored=())
    most: dict[tuple[int, ...], int] = {}
    expected, serial = accumulated(module, given, 4, seed=3)
    for recompute in ((), (0,), (0, 1)):
        found = pipelined(module, given, "pp=2", **flow("gpipe", 4, recompute=recompute))
        largest = [0]

        def watch(walk: Walk, *_: Any, largest: list[int] = largest) -> None:
            held = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in walk.held(0)}
            largest[0] = max(largest[0], sum(held.values()))

        found.observe = watch
        found.seed(3)
        loss = found(*given)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        assert_same_gradients(found, serial)
        most[recompute] = largest[0]
    assert most[0,] < most[()] and most[0, 1] == most[0,]


def test_other_shapes_and_evaluation_find_their_parameters() -> None:
    module, given = tower(dropout=0.5, tied=True), batch(7)
    found = pipelined(module, given, "pp=4", **flow("zb-v", 3))
    for other in (given, batch(5), batch(2, ignored=()), batch(1, ignored=())):
        found.zero_grad()
        found.seed(2)
        loss = found(*other)
        loss.backward()
        expected, serial = accumulated(module, other, 3, seed=2)
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        assert_same_gradients(found, serial)
    evaluating = copy.deepcopy(module).eval()
    found.eval()
    for other in (given, batch(4, ignored=(1,))):
        loss = found(*other)
        assert not loss.requires_grad
        assert loss.item() == pytest.approx(evaluating(*other).item(), rel=1e-12)
    found.train()
    with torch.no_grad():
        found.seed(2)
        assert not found(*given).requires_grad
    found.seed(2)
    assert found(*given).requires_grad


def test_a_batch_without_any_valid_label_gives_zeros() -> None:
    given = batch(4, ignored=(0, 1, 2, 3))
    found = pipelined(tower(), given, "pp=2", micro_batches=2)
    loss = found(*given)
    assert loss.isnan() and found.last_weight == 0.0


def test_gradients_add_up_over_calls_and_scale_with_the_tangent() -> None:
    module, given = tower(), batch(7)
    found = pipelined(module, given, "pp=2", micro_batches=3)
    for factor in (2.0, 0.5):
        (found(*given) * factor).backward()
    (module(*given) * 2.5).backward()
    assert_same_gradients(found, module)
    loss = found(*given)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


def test_an_ordinary_loop_trains_as_serially() -> None:
    module, given = tower(tied=True), batch(7)
    found = pipelined(module, given, "pp=4", micro_batches=3)
    expected = copy.deepcopy(module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (found, expected)]
    for _ in range(3):
        norms = []
        for trained, optimizer in zip((found, expected), optimizers, strict=True):
            optimizer.zero_grad()
            trained(*given).backward()
            ours = isinstance(trained, PipelinedModule)
            norms.append(
                float(trained.clip_grad_norm_(0.1) if ours else nn.utils.clip_grad_norm_(trained.parameters(), 0.1))
            )
            optimizer.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)  # it is told in float32
    state = found.full_state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-10)
    for shard in found.shards():
        assert torch.equal(shard.tensor, state[shard.name]), "copies stay equal"
    start = tower(tied=True).state_dict()
    found.load_full_state_dict(start)
    assert all(torch.equal(tensor, start[name]) for name, tensor in found.full_state_dict().items())


def test_a_step_that_was_stored_is_the_same_step() -> None:
    given = batch(7)
    found = pipelined(tower(dropout=0.5), given, "dp=1,pp=4", **flow("zb-h1", 3))
    for step in found.steps(*given):
        data = pipeline_to_json(step)
        again = pipeline_from_json(data, step.constants, fakes=False)
        assert pipeline_to_json(again) == data
        assert (again.pipeline.cuts, again.sent, again.inputs) == (step.pipeline.cuts, step.sent, step.inputs)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_rounded_messages_are_near(wire: str) -> None:
    module, given = tower(dropout=0.5), batch(7)
    found = pipelined(module, given, "pp=4", micro_batches=3, wire=wire)
    found.seed(4)
    loss = found(*given)
    loss.backward()
    expected, serial = accumulated(module, given, 3, seed=4)
    assert loss.item() != pytest.approx(expected, rel=1e-9)
    assert loss.item() == pytest.approx(expected, rel=2e-2)
    for name, parameter in serial.named_parameters():
        for gradient in gradients(found)[name]:
            assert (gradient - parameter.grad).norm() <= 0.1 * parameter.grad.norm()  # type: ignore[operator,union-attr]
