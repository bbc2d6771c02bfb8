"""What a described Transformer keeps, against the formulas of Korthikanti et al. 2022 (arXiv 2205.05198), table 2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.simulator.closed_form.footprint import footprint, footprints_of_ends
from paceline.simulator.closed_form.transformer import transformer
from paceline.simulator.layouts import SCHEDULES, Layouts
from paceline.simulator.workload import Precision, Recompute, Workload

S, B, H, A, LAYERS, WORDS = 1024, 3, 512, 8, 16, 4096
SBH = S * B * H
SCORES = 5 * A * S / H
PRECISION = Precision(parameter=2.0, gradient=4.0, optimizer=12.0)


def gpt(*, tied: bool = True) -> Workload:
    """A GPT whose attention writes its scores."""
    return transformer(
        layers=LAYERS,
        hidden=H,
        heads=A,
        sequence=S,
        vocabulary=WORDS,
        fused=False,
        dropout=True,
        tied=tied,
        precision=PRECISION,
    )


def layers_alone(workload: Workload) -> Workload:
    return replace(workload, blocks=tuple(block for block in workload.blocks if block.repeats))


@pytest.mark.parametrize(
    ("tp", "regions", "recompute", "per_layer"),
    [
        (1, False, Recompute.NONE, 34 + SCORES),
        (4, False, Recompute.NONE, 10 + 24 / 4 + SCORES / 4),
        (4, True, Recompute.NONE, 34 / 4 + SCORES / 4),
        (4, False, Recompute.SELECTIVE, 10 + 24 / 4),
        (4, True, Recompute.SELECTIVE, 34 / 4),
        (4, False, Recompute.FULL, 2),
    ],
)
def test_a_layer_keeps_what_the_paper_says(tp: int, regions: bool, recompute: Recompute, per_layer: float) -> None:
    layouts = Layouts.of(tp=tp, micro_batch=B, regions=regions, recompute=recompute.value)
    held = footprint(layers_alone(gpt()), layouts)
    assert held.activations[0] == pytest.approx(LAYERS * SBH * per_layer)


def test_an_interleaved_pipeline_keeps_more_by_the_paper_s_factor() -> None:
    """1 + (p - 1) / (p v) of all layers, on the first of p ranks with v chunks each."""
    layouts = Layouts.of(pp=4, chunks=2, micro_batches=32, micro_batch=B, schedule=SCHEDULES.index("interleaved"))
    held = footprint(layers_alone(gpt()), layouts)
    chunks = LAYERS / 8 * SBH * (34 + SCORES)
    assert held.activations[0] == pytest.approx(4 * 2 * chunks * (1 + 3 / 8))


def test_the_last_rank_has_a_copy_of_a_tied_table_and_the_logits() -> None:
    layouts = Layouts.of(pp=4, micro_batches=8, micro_batch=B)
    tied, untied = (footprints_of_ends(gpt(tied=each), layouts) for each in (True, False))
    for ends in (tied, untied):
        assert ends[0].parameters[0] == pytest.approx(ends[1].parameters[0], rel=0.001)
    assert tied[1].parameters[0] == untied[1].parameters[0]
    alone = Layouts.of(micro_batch=B)
    whole = [footprint(gpt(tied=each), alone).parameters[0] for each in (True, False)]
    assert whole[1] - whole[0] == 2 * WORDS * H
    # in half precision, before they are cast to the single precision that is kept
    assert tied[1].buffers[0] == 2 * S * B * WORDS
    assert tied[0].buffers[0] == 0
