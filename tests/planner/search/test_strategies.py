"""What each pure strategy stores and sends: the formulas of docs/planning.md, and the cluster's own count of bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.fabric import Fabric, Level
from paceline.planner.search.strategies import Pure, Strategy, parameter_elements, strategies
from paceline.simulator.closed_form.estimate import estimate
from paceline.simulator.layouts import Layouts
from tests.planner.search.tiny import cluster, workload

RANKS, BATCH = 4, 8
GPT = workload()
P = parameter_elements(GPT, Layouts.of())
READ, GRADIENT, STATE = GPT.precision.parameter, GPT.precision.gradient, GPT.precision.optimizer


def each() -> dict[Pure, Strategy]:
    return {one.name: one for one in strategies(GPT, RANKS, BATCH)}


def test_there_are_as_many_parameters_as_the_model_has() -> None:
    assert pytest.approx(24 * 12 * 2048**2 + 50304 * 2048, rel=0.01) == P


@pytest.mark.parametrize(
    ("name", "parameters", "gradients", "optimizer", "sent"),
    [
        (Pure.DDP, READ * P, GRADIENT * P, STATE * P, 2 * 3 / 4 * GRADIENT * P),
        (Pure.ZERO_1, READ * P, GRADIENT * P, STATE * P / 4, 3 / 4 * (GRADIENT + READ) * P),
        (Pure.ZERO_2, READ * P, GRADIENT * P / 4, STATE * P / 4, 3 / 4 * (GRADIENT + READ) * P),
        (Pure.ZERO_3, READ * P / 4, GRADIENT * P / 4, STATE * P / 4, 3 / 4 * (GRADIENT + 2 * READ) * P),
        (Pure.SERVER, READ * P, GRADIENT * P, 0.0, 4 * READ * P),
    ],
)
def test_formulas_of_what_splits_the_batch(
    name: Pure, parameters: float, gradients: float, optimizer: float, sent: float
) -> None:
    memory = each()[name].memory
    assert memory is not None
    assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == pytest.approx(
        (parameters, gradients, optimizer)
    )
    assert each()[name].sent_bytes == pytest.approx(sent)


def test_what_splits_the_model_stores_less_and_sends_activations() -> None:
    found = each()
    ddp, tp, pp, sp = (found[name].memory for name in (Pure.DDP, Pure.TP, Pure.PP, Pure.SP))
    assert ddp and tp and pp and sp
    assert 0.25 <= tp["parameters"] / ddp["parameters"] < 0.3
    assert 0.25 <= pp["parameters"] / ddp["parameters"] < 0.4
    assert sp["parameters"] == ddp["parameters"]
    whole = 2048 * 2048 * 2.0  # bytes of a sample's activations
    assert found[Pure.PP].sent_bytes == pytest.approx(2 * BATCH * whole)
    assert found[Pure.TP].sent_bytes == pytest.approx(24 * 4 * 2 * 3 / 4 * BATCH * whole, rel=0.1)


@pytest.mark.parametrize(("name", "layout"), [(Pure.DDP, {"dp": 4}), (Pure.TP, {"tp": 4})])
def test_rings_send_what_a_cluster_of_one_level_counts(name: Pure, layout: dict[str, int]) -> None:
    level = Level("wire", Fabric.PCIE, None, 1e9, 1e-5)
    one = replace(cluster(4), levels=(level,))
    samples = BATCH // 4 if name is Pure.DDP else BATCH
    sent = estimate(GPT, Layouts.of(**layout, micro_batch=samples), one).link_bytes["wire"]
    assert each()[name].sent_bytes == pytest.approx(float(sent[0]), rel=0.05)


def test_what_cannot_be_split_says_why() -> None:
    found = {one.name: one for one in strategies(GPT, 48, 40)}
    assert found[Pure.DDP].why_not == "the batch of 40 samples does not divide by 48"
    assert found[Pure.PP].why_not == "there are 24 layers for 48 ranks"
    assert found[Pure.TP].memory is None and "48 does not divide 16" in found[Pure.TP].why_not
    assert found[Pure.HW].why_not == "there is nothing that it splits"
    assert [one.name for one in found.values() if not one.name.is_executable] == [Pure.ZERO_1, Pure.SERVER]
