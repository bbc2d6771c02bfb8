"""Memory in closed form: who splits what, and how many micro-batches are in flight."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.schedule.formulas import peak_activations
from paceline.schedule.kinds import Kind
from paceline.simulator.closed_form.footprint import footprint
from paceline.simulator.layouts import SCHEDULES, Layouts
from paceline.simulator.workload import Along, Amount, Block, Precision, Recompute, Workload

LAYERS = 16
WEIGHTS = 1000.0
WORDS = 5000.0
KEPT = 64.0
PRECISION = Precision(parameter=2.0, gradient=4.0, optimizer=12.0)
PER_SAMPLE = frozenset({Along.BATCH})


def block(name: str, count: int, weights: float, kept: float, workspace: float = 0.0) -> Block:
    """A block whose parameters `tp` splits, and which keeps a tenth of it where all is computed again."""
    everything = (Amount(kept, PER_SAMPLE),)
    return Block(
        name=name,
        count=count,
        work=(),
        messages=(),
        parameters=(Amount(weights, frozenset({Along.TP})),),
        kept={
            Recompute.NONE: everything,
            Recompute.SELECTIVE: everything,
            Recompute.FULL: (Amount(kept / 10, PER_SAMPLE),),
        },
        output=Amount(8.0, PER_SAMPLE),
        workspace=Amount(workspace, PER_SAMPLE),
    )


def model(head_workspace: float = 0.0) -> Workload:
    """Words in, layers, words out."""
    return Workload(
        "model",
        (
            block("words", 1, WORDS, 0.0),
            block("layers.*", LAYERS, WEIGHTS, KEPT),
            block("head", 1, WORDS, 0.0, head_workspace),
        ),
        precision=PRECISION,
    )


def test_one_rank_holds_everything() -> None:
    held = footprint(model(), Layouts.of(micro_batch=3))
    elements = LAYERS * WEIGHTS + 2 * WORDS
    assert held.parameters[0] == 2 * elements
    assert held.gradients[0] == 4 * elements
    assert held.optimizer[0] == 12 * elements
    assert held.activations[0] == LAYERS * KEPT * 3
    assert held.buffers[0] == 0
    assert held.total[0] == 18 * elements + LAYERS * KEPT * 3


def test_each_stage_of_zero_splits_more() -> None:
    held = footprint(model(), Layouts.of(fsdp=4, zero=[1, 2, 3]))
    elements = LAYERS * WEIGHTS + 2 * WORDS
    assert list(held.optimizer) == [3 * elements] * 3
    assert list(held.gradients) == [4 * elements, elements, elements]
    assert list(held.parameters) == [2 * elements, 2 * elements, elements / 2]
    # of the largest block: whole gradients before they are split, and two blocks' gathered parameters
    assert list(held.buffers) == [0, 4 * WORDS, 4 * WORDS + 2 * 2 * WORDS]


def test_a_distributed_optimizer_splits_its_state_over_replicas_and_parts_of_the_sequence() -> None:
    elements = LAYERS * WEIGHTS + 2 * WORDS
    assert footprint(model(), Layouts.of(dp=4, sp=2, zero=1)).optimizer[0] == 12 * elements / 8
    assert footprint(model(), Layouts.of(dp=4, sp=2, zero=0)).optimizer[0] == 12 * elements


def test_features_split_parameters() -> None:
    assert footprint(model(), Layouts.of(tp=4)).parameters[0] == 2 * (LAYERS * WEIGHTS + 2 * WORDS) / 4


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 24])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_as_many_micro_batches_are_in_flight_as_the_schedule_has(
    name: str, chunks: int, ranks: int, micro_batches: int
) -> None:
    layouts = Layouts.of(pp=ranks, micro_batches=micro_batches, chunks=chunks, schedule=SCHEDULES.index(name))
    stages = peak_activations(Kind(name), ranks, micro_batches, chunks=chunks)[0]
    assert footprint(model(), layouts).activations[0] == pytest.approx(stages * KEPT * LAYERS / (ranks * chunks))


def test_the_last_rank_is_told_where_the_vocabulary_needs_more_than_what_is_in_flight() -> None:
    layouts = Layouts.of(pp=4, micro_batches=8)
    assert footprint(model(), layouts).activations[0] == 4 * 4 * KEPT
    told = footprint(model(head_workspace=1e6), layouts)
    assert told.activations[0] == 4 * KEPT
    assert told.buffers[0] == 1e6


def test_recomputing_keeps_less_and_needs_one_block_at_a_time() -> None:
    held = footprint(model(), Layouts.of(recompute=[policy.value for policy in Recompute]))
    assert list(held.activations) == pytest.approx([LAYERS * KEPT, LAYERS * KEPT, LAYERS * KEPT / 10])
    assert list(held.buffers) == pytest.approx([0, 0, KEPT * 0.9])


def test_a_stage_with_a_layer_more_is_the_one_that_is_told() -> None:
    assert footprint(model(), Layouts.of(pp=3)).activations[0] == 6 * KEPT


def test_many_models_at_once_are_each_as_they_are_alone() -> None:
    counts = np.array([2.0, 16.0])
    many = Workload("many", (block("layers.*", 1, WEIGHTS, KEPT),), precision=PRECISION)
    layer = many.blocks[0]
    both = Workload(
        "both",
        (Block("layers.*", counts, (), (), layer.parameters, layer.kept, layer.output),),
        precision=PRECISION,
    )
    held = footprint(both, Layouts.of(tp=[1, 2]))
    assert list(held.parameters) == [2 * 2 * WEIGHTS, 2 * 16 * WEIGHTS / 2]
