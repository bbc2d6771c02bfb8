"""Where stages begin, and which part of a backward pass nobody waits for."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.files import load
from paceline.errors import PlanError
from paceline.simulator.closed_form.demands import block_demand
from paceline.simulator.closed_form.device_seconds import block_times
from paceline.simulator.closed_form.transformer import transformer
from paceline.simulator.layouts import Layouts
from paceline.simulator.scale.stages import block_passes, divide, occurrences

GPT = transformer(layers=12, hidden=2048, heads=16, sequence=1024, vocabulary=50304)


def sums(seconds: list[float], begins: tuple[int, ...]) -> list[float]:
    return [sum(seconds[begin:end]) for begin, end in zip(begins, [*begins[1:], len(seconds)], strict=True)]


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=9), st.data())
def test_no_division_has_a_quicker_slowest_stage(seconds: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(seconds)))
    found = divide(seconds, stages)
    assert len(found) == stages and found[0] == 0 and sorted(set(found)) == list(found)
    every = ((0, *rest) for rest in combinations(range(1, len(seconds)), stages - 1))
    assert max(sums(seconds, found)) == pytest.approx(min(max(sums(seconds, begins)) for begins in every))


def test_equal_layers_are_dealt_out_evenly_and_what_is_left_is_not_where_the_head_is() -> None:
    assert divide([1.0] * 8, 4) == (0, 2, 4, 6)
    embedding_layers_head = [0.1, *[1.0] * 10, 1.5]
    assert sums(embedding_layers_head, divide(embedding_layers_head, 4)) == pytest.approx([3.1, 3.0, 3.0, 2.5])


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match="3 blocks cannot be 4 stages"):
        divide([1.0] * 3, 4)


def test_blocks_stand_in_a_row() -> None:
    assert [block.name for block in occurrences(GPT)] == ["embedding", *["layers.*"] * 12, "head"]


@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("regions", [False, True])
def test_passes_are_those_of_the_estimate_told_apart(recompute: int, regions: bool) -> None:
    cluster = load("dgx-a100").of(64)
    layout = Layouts.of(tp=4, dp=16, micro_batch=2, recompute=recompute, regions=regions)
    for block in GPT.blocks:
        passes = block_passes(block, layout, cluster, "bfloat16")
        times = block_times(block_demand(block, layout, cluster), cluster.slowest, "bfloat16")
        assert passes.total == pytest.approx(float(times.total[0]))
        assert passes.forward == pytest.approx(float(times.forward[0]))
        assert 0 <= passes.weights < passes.backward


def test_half_of_the_products_of_a_backward_pass_make_gradients_of_weights() -> None:
    """And so a third of a layer's calls, all passes together, where products are most of it."""
    wide = transformer(layers=2, hidden=16384, heads=128, sequence=1024, vocabulary=256)
    layer = next(block for block in wide.blocks if block.repeats)
    passes = block_passes(layer, Layouts.of(), load("dgx-a100").of(8), "bfloat16")
    assert passes.weights / (passes.forward + passes.backward) == pytest.approx(1 / 3, abs=0.03)


def test_collectives_of_a_layer_are_as_long_forward_as_backward_unless_forward_is_done_twice() -> None:
    layer = next(block for block in GPT.blocks if block.repeats)
    cluster = load("dgx-a100").of(8)
    plain = block_passes(layer, Layouts.of(tp=8), cluster, "bfloat16")
    again = block_passes(layer, Layouts.of(tp=8, recompute=2), cluster, "bfloat16")
    assert plain.sent_forward["tp"] == pytest.approx(plain.sent_backward["tp"])
    assert again.sent_forward["tp"] == pytest.approx(plain.sent_forward["tp"])
    assert again.sent_backward["tp"] == pytest.approx(2 * plain.sent_backward["tp"])
