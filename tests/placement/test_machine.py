"""Rates by size, and costs made of them."""

from __future__ import annotations

import pytest
import torch

from paceline.placement.costs import Costs
from paceline.placement.machine import Curve, Link, Machine, constant, links_from_json, links_to_json, two_digits
from paceline.placement.placements import PARTIAL, REPLICATE, Placement, Shard
from paceline.placement.redistribute import Collective
from paceline.placement.rules.rule import Call

aten = torch.ops.aten


def test_a_rate_is_a_line_between_its_points_and_stays_beyond_them() -> None:
    curve = Curve(((10.0, 1.0), (1000.0, 3.0)))
    assert [curve.rate(size) for size in (1, 10, 100, 1000, 1e6)] == pytest.approx([1, 1, 2, 3, 3])
    assert curve.seconds(100) == pytest.approx(50) and curve.seconds(0) == 0
    assert constant(5.0).rate(123) == 5.0


def test_figures_have_two_digits() -> None:
    assert [two_digits(value) for value in (0.0123456, 98765.0, 1e-9)] == [0.012, 99000.0, 1e-9]


def test_links_are_written_and_read() -> None:
    links = {kind: Link(1e-4 * (1 + number), 1e-9) for number, kind in enumerate(Collective)}
    assert links_from_json(links_to_json(links)) == links
    with pytest.raises(ValueError, match="no positive number"):
        links_from_json({kind.value: [float("nan"), 1.0] for kind in Collective})


@pytest.mark.parametrize(
    ("source", "target", "kind", "touched"),
    [
        (PARTIAL, REPLICATE, Collective.ALL_REDUCE, 0.0),
        (PARTIAL, Shard(0), Collective.REDUCE_SCATTER, 1.0),
        (Shard(0), REPLICATE, Collective.ALL_GATHER, 0.0),
        (Shard(1), REPLICATE, Collective.ALL_GATHER, 1.0),
        (Shard(0), Shard(1), Collective.ALL_TO_ALL, 0.5),
    ],
)
def test_what_was_measured_of_links_counts(
    source: Placement, target: Placement, kind: Collective, touched: float
) -> None:
    links = {each: Link(1.0 + number, 1e-6) for number, each in enumerate(Collective)}
    measured = Costs.of_machine(Machine(touching=constant(1e6), links={4: links}))
    found = measured.redistribution(1e6, source, target, 4)
    assert found == pytest.approx(links[kind].latency + 1.0 + touched)
    assert measured.redistribution(1e6, source, target, 2) < found, "two ranks were not measured"
    assert measured.redistribution(1e6, source, source, 4) == 0


def test_small_products_are_slower_and_halves_have_rates_of_their_own() -> None:
    machine = Machine(
        per_call=1e-9,
        products=Curve(((2e3, 1e9), (2e9, 1e11))),
        half_products=constant(1e12),
        touching=constant(1e18),
    )
    costs = Costs.of_machine(machine)

    def seconds(side: int, dtype: torch.dtype = torch.float32, parts: int = 1) -> float:
        shape = (side, side)
        call = Call(aten.mm.default, {}, (shape, shape), (dtype, dtype), (shape,), (dtype,))
        split = (Shard(0), REPLICATE) if parts > 1 else (REPLICATE, REPLICATE)
        return costs.operator(call, split, split[:1], parts)

    assert seconds(1000) == pytest.approx(2e9 / 1e11, rel=1e-3)
    assert seconds(10) == pytest.approx(2e3 / 1e9, rel=1e-2)
    assert seconds(1000, parts=2) > seconds(1000) / 2, "a smaller product runs at a lower rate"
    assert seconds(1000, torch.bfloat16) == pytest.approx(2e9 / 1e12, rel=1e-3)
    assert seconds(1000, torch.float64) == pytest.approx(2 * seconds(1000), rel=1e-3)


def test_a_batch_of_products_that_is_split_has_fewer_of_the_same_size() -> None:
    costs = Costs.of_machine(
        Machine(per_call=1e-12, products=Curve(((2e3, 1e6), (2e9, 1e12))), touching=constant(1e18))
    )
    shape = (8, 10, 10)
    call = Call(aten.bmm.default, {}, (shape, shape), (torch.float32,) * 2, (shape,), (torch.float32,))
    whole = costs.operator(call, (REPLICATE, REPLICATE), (REPLICATE,), 2)
    batch = costs.operator(call, (Shard(0), Shard(0)), (Shard(0),), 2)
    rows = costs.operator(call, (Shard(1), REPLICATE), (Shard(1),), 2)
    assert whole == pytest.approx(8 * 2e3 / 1e6) and batch == pytest.approx(whole / 2)
    assert rows == pytest.approx(whole / 2), "below the smallest size that was measured the rate stays"


def test_who_holds_a_parameter_updates_it() -> None:
    costs = Costs.of_machine(Machine(touching=constant(1e6)))
    assert costs.update(1e6) == pytest.approx(7.0)
