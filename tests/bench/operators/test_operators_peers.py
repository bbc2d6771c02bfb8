"""PyTorch's tensor parallelism is set up so that it trains what serial does, and really splits the layers."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from paceline.bench.contestants import mean_over_ranks
from paceline.bench.groups import GLOO, Groups
from paceline.bench.operators.contestants import Contestant, set_up
from paceline.bench.operators.tensor_parallel import Variant, parameter_groups, tensor_parallel
from paceline.bench.operators.workloads import Model, workload
from paceline.bench.workloads import Scale
from paceline.runtime.job.world import World
from tests.ranks import ranks


@pytest.mark.parametrize("model", [model for model in Model if model.has_tensor_parallel])
@ranks(2, backend="gloo")
def test_two_steps_equal_serial(world: World, model: Model) -> None:
    if model.needs_transformers:
        pytest.importorskip("transformers")
    made, groups = workload(model, Scale.TINY), Groups()

    def losses(who: Contestant) -> list[float]:
        contender = set_up(who, made, world, groups)
        return [mean_over_ranks(contender.step()[0]) for _ in range(2)]

    serial = losses(Contestant.SERIAL)
    assert serial[1] < serial[0]
    for who in (Contestant.TP, Contestant.TP_LOSS, Contestant.TP_SEQUENCE):
        assert losses(who) == pytest.approx(serial, rel=1e-5)


@ranks(2, backend="gloo")
def test_layers_are_split_and_no_parameter_is_left_out(world: World) -> None:
    module, _ = workload(Model.GPT, Scale.TINY).build()
    count = sum(1 for _ in module.parameters())
    split = tensor_parallel(module, DeviceMesh.from_group(Groups().on(GLOO), "cpu"), Variant.SEQUENCE)
    for name in ("blocks.0.attention.q", "blocks.1.perceptron.up", "head"):
        weight = split.get_submodule(name).weight
        assert isinstance(weight, DTensor)
        assert weight.to_local().shape[0] * world.size == weight.shape[0]
    groups = parameter_groups(split)
    assert sum(len(group["params"]) for group in groups) == count
    for group in groups:
        assert len({isinstance(parameter, DTensor) for parameter in group["params"]}) == 1


@ranks(4, backend="gloo")
def test_two_axes_equal_serial(world: World) -> None:
    made, groups = workload(Model.GPT, Scale.TINY), Groups()
    serial, both = (
        [mean_over_ranks(set_up(who, made, world, groups).step()[0])]
        for who in (Contestant.SERIAL, Contestant.FSDP2_TP)
    )
    assert both == pytest.approx(serial, rel=1e-5)
