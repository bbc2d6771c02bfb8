"""PipeDream's partition is the best of all partitions, which are few for a few layers and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PlanError
from paceline.planner.partition import Layer, Level, Share, partition, replicated

COSTS = st.integers(0, 12).map(float)
PARAMETERS = st.sampled_from([frozenset[str](), frozenset[str](), frozenset({"tied"})])
LAYERS = st.lists(
    st.builds(Layer, st.just("layer"), COSTS, COSTS, COSTS, PARAMETERS, st.integers(0, 4).map(bool)),
    min_size=1,
    max_size=6,
)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write `total` as so many numbers from 1."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def price(layers: Sequence[Layer], stages: Sequence[Share], bandwidth: float) -> float | None:
    """The slowest stage or transfer, as the paper writes it; None where replicas are not allowed."""
    steps = []
    for number, stage in enumerate(stages):
        inside, m = layers[stage.first : stage.end], stage.replicas
        outside = [*layers[: stage.first], *layers[stage.end :]]
        if m > 1 and not all(layer.may_repeat for layer in inside):
            return None
        if m > 1 and any(a.shared & b.shared for a in inside for b in outside):
            return None
        compute = sum(layer.seconds for layer in inside) / m
        steps.append(max(compute, 2 * (m - 1) / m * sum(layer.parameter_bytes for layer in inside) / bandwidth))
        if number + 1 < len(stages):
            steps.append(2 * inside[-1].activation_bytes / bandwidth)
    return max(steps)


def everything(layers: Sequence[Layer], ranks: int, bandwidth: float) -> Iterator[tuple[float, tuple[Share, ...]]]:
    for count in range(1, min(len(layers), ranks) + 1):
        for sizes in compositions(len(layers), count):
            for replicas in compositions(ranks, count):
                ends = [sum(sizes[: i + 1]) for i in range(count)]
                stages = tuple(Share(end - size, end, m) for end, size, m in zip(ends, sizes, replicas, strict=True))
                found = price(layers, stages, bandwidth)
                if found is not None:
                    yield found, stages


@given(LAYERS, st.integers(1, 5), st.sampled_from([0.25, 1.0, 4.0, 1e6]))
def test_none_is_better(layers: list[Layer], ranks: int, bandwidth: float) -> None:
    known = list(everything(layers, ranks, bandwidth))
    if not known:
        with pytest.raises(PlanError, match=f"cannot be divided among {ranks} ranks"):
            partition(layers, [Level(ranks, bandwidth)])
        return
    found = partition(layers, [Level(ranks, bandwidth)])
    assert found.seconds == pytest.approx(min(seconds for seconds, _ in known), rel=1e-12)
    assert price(layers, found.stages, bandwidth) == pytest.approx(found.seconds, rel=1e-12)
    assert sum(stage.replicas for stage in found.stages) == ranks
    alone = [seconds for seconds, stages in known if all(stage.replicas == 1 for stage in stages)]
    if alone:
        plain = partition(layers, [Level(ranks, bandwidth)], replicate=False)
        assert plain.seconds == pytest.approx(min(alone), rel=1e-12)


@given(LAYERS, st.integers(1, 2), st.integers(1, 2))
def test_two_levels_are_the_paper_s(layers: list[Layer], inside: int, hosts: int) -> None:
    """Each host is one part of the outer level, and does its layers as best it can."""
    fast, slow = Level(inside, 4.0), Level(hosts, 1.0)
    options = []
    cuts = [(len(layers),)] if hosts == 1 else [(len(layers),), *((i, len(layers)) for i in range(1, len(layers)))]
    for ends in cuts:
        bounds = list(zip((0, *ends), ends, strict=False))
        m = hosts // len(bounds)
        try:
            within = [partition(layers[a:b], [fast]) for a, b in bounds]
        except PlanError:
            continue
        if any(layer.shared or not layer.may_repeat for layer in layers):
            return  # what may not repeat depends on layers of other hosts; one level covers it
        sizes = [sum(layer.parameter_bytes for layer in layers[a:b]) for a, b in bounds]
        times = [max(w.seconds, 2 * (m - 1) * size / 1.0) / m for w, size in zip(within, sizes, strict=True)]
        options.append(max(*times, 0.0, *(2 * layers[end - 1].activation_bytes / 1.0 for end in ends[:-1])))
    if options:
        assert partition(layers, [fast, slow]).seconds == pytest.approx(min(options), rel=1e-12)


def test_a_slow_layer_gets_more_ranks() -> None:
    layers = [Layer("convolutions", 6.0, 1.0, 0.1), Layer("products", 2.0, 0.0, 90.0)]
    found = partition(layers, [Level(4, 10.0)])
    assert found.stages == (Share(0, 1, 3), Share(1, 2, 1))
    assert found.seconds == 2.0
    assert replicated(layers, Level(4, 10.0)) == pytest.approx(2 * 3 / 4 * 90.1 / 10.0)


def test_what_cannot_be_divided() -> None:
    with pytest.raises(PlanError, match=r"1 layers cannot be divided among 2 ranks of one stage each\. Use fewer"):
        partition([Layer("only", 1.0)], [Level(2, 1.0)], replicate=False)
    with pytest.raises(PlanError, match="give at least one layer"):
        partition([], [Level(2, 1.0)])
