"""Modules of a user's own, cut: what each found."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.program.capture import capture
from paceline.program.program import OutputRole
from paceline.program.random import is_random
from paceline.program.stages import cut
from tests.program.stages.pieces import D, data, hold, in_double, tower
from tests.program.stages.serially import check


class Cube(torch.autograd.Function):
    """Its gradient is not that of its forward pass: differentiated again it would be another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * 5.0 * x.sign() * x


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Cube.apply(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_custom_functions_keep_their_gradients(count: int) -> None:
    hold(WithFunction(), data(), count)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(D, D)
        self.layers = tower()

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x)).exp().sin() + x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(functools.partial(self.block, layer), x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_recomputed_by_the_stage_that_reads_them(reentrant: bool) -> None:
    pipeline = hold(Checkpointed(reentrant), data(), 2, boundaries=["layers.2"])
    for stage in pipeline.stages:
        assert stage.backward is not None
        assert len(stage.saved) <= 3  # what enters each of two blocks, and the loss reads
        targets = [str(node.target) for node in stage.backward.graph.nodes]
        assert targets.count("aten.tanh.default") == targets.count("aten.exp.default") == 2
        assert not any(n.meta["rematerialize"] for n in stage.backward.graph.nodes if n.op == "call_function")


def test_a_checkpoint_that_is_cut_inside() -> None:
    pipeline = hold(Checkpointed(False), data(), 3)
    assert len(pipeline.stages) == 3


class CheckpointedDropout(nn.Module):
    """Draws of all kinds: masks alone, and operators that give a mask beside their result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower(2)

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        y = F.dropout(layer(x).exp(), 0.5) + F.rrelu(x, training=True)
        return y * torch.native_dropout(x, 0.5, True)[0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(functools.partial(self.block, layer), x, use_reentrant=False)
        return x.square().mean()


def test_random_draws_are_made_once() -> None:
    module, (x,) = in_double(CheckpointedDropout(), data())
    pipeline = cut(capture(module, (x,)), 2, split_backward=True)
    check(pipeline)
    for stage in pipeline.stages:
        assert any(map(is_random, stage.forward.graph.nodes))
        for part in (stage.backward, stage.backward_input, stage.backward_weight):
            assert part is not None and not any(map(is_random, part.graph.nodes))


class Kinds(nn.Module):
    """Whole numbers and booleans cross the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()
        self.bins = nn.Embedding(3, D)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.layers[0](x)
        positive, number = x > 0, torch.argsort(x, 1)
        x = self.layers[1](x)
        x = self.layers[2](torch.where(positive, x, -x))
        x = self.layers[3](x.gather(1, number)) + self.bins(number[:, 0] % 3)
        return F.mse_loss(torch.where(positive, x, 0.5 * x), target)


def test_whole_numbers_and_booleans_cross_cuts() -> None:
    pipeline = hold(Kinds(), data((D,), (D,)), 4, boundaries=["layers.1", "layers.2", "layers.3"])
    sent = {pipeline.values[name].dtype for names in pipeline.forward_edges.values() for name in names}
    assert sent == {torch.float64, torch.int64, torch.bool}


class Dictionary(nn.Module):
    """Parts of the batch are read by several stages, one of them only by the backward pass of a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower(3)

    def forward(self, first: Tensor, scale: Tensor, target: Tensor) -> Tensor:
        x = first
        for layer in self.layers:
            x = layer(x) * scale.abs().sqrt()
        return F.mse_loss(x, target)


def test_leaves_of_a_batch_are_read_where_they_are_needed() -> None:
    first, scale, target = data((D,), (D,), (D,))
    batch = {"first": first, "scale": scale, "target": target}
    pipeline = hold(Dictionary(), batch, 3, boundaries=["layers.1", "layers.2"])
    assert all(len(names) == 1 for names in pipeline.forward_edges.values())
    leaves = {name for name, item in pipeline.inputs.items() if item.name == "scale"}
    assert all(leaves <= set(stage.forward.inputs) for stage in pipeline.stages)


class Shared(nn.Module):
    """One weight in three places, in one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.second.weight = self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x)) + torch.tanh(self.second(x.flip(1)))
        return torch.tanh(self.third(x)).square().mean()


@pytest.mark.parametrize("count", [2, 3])
def test_parameters_of_several_stages_have_a_part_on_each(count: int) -> None:
    pipeline = hold(Shared(), data(), count, boundaries=["second", "third"][: count - 1])
    weight = "first.weight"
    assert all(weight in stage.gradients for stage in pipeline.stages)
    for names in pipeline.backward_edges.values():
        assert all(pipeline.values[name].shape != (D, D) for name in names)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.LayerNorm([6, 6]),
            nn.SiLU(),
            nn.ConvTranspose2d(4, 4, 3),
            nn.SiLU(),
            nn.Conv2d(4, 2, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_gradients_of_convolutions_are_two_calls() -> None:
    pipeline = hold(Convolutions(), data((2, 8, 8)), 2)
    for stage in pipeline.stages:
        assert stage.backward_input is not None and stage.backward_weight is not None
        for part, wanted in (
            (stage.backward_input, [True, False, False]),
            (stage.backward_weight, [False, True, True]),
        ):
            calls = [n for n in part.graph.nodes if n.target is torch.ops.aten.convolution_backward.default]
            assert all(list(call.args[-1]) == wanted for call in calls)
        assert calls
    # the first stage sends nothing, and still has a half that the second waits for
    assert pipeline.stages[0].kept


def test_halves_split_the_products_evenly() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tower(6)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

    pipeline = hold(Chain(), data(), 2, boundaries=["layers.3"])
    products = [
        [sum(n.target is torch.ops.aten.mm.default for n in part.graph.nodes) for part in halves]
        for halves in ((stage.backward_input, stage.backward_weight) for stage in pipeline.stages)
    ]
    assert products == [[2, 3], [3, 3]]


class Frozen(nn.Module):
    """A frozen first part, of which autograd numbers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(20))).requires_grad_(
            False
        )
        self.layers = tower(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.frozen(x)).square().mean()


@pytest.mark.parametrize("boundaries", [["frozen.10", "layers.1"], ["layers.0", "layers.1"]])
def test_what_is_frozen_is_cut(boundaries: list[str]) -> None:
    pipeline = hold(Frozen(), data(), 3, boundaries=boundaries)
    assert not pipeline.stages[0].gradients
    assert (1, 0) not in pipeline.backward_edges


class Penalised(nn.Module):
    """A gradient taken inside the forward pass, and trained through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower(3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y.square().sum(1) + inner.square().sum(1)).mean()


def test_gradients_taken_inside_the_forward_pass() -> None:
    hold(Penalised(), data(), 1)
    hold(Penalised(), data(), 2)


def test_loss_and_weight_come_from_the_last_stage() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tower(2)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.layers(x), target)

    (x,) = data()
    pipeline = hold(Counted(), (x, torch.tensor([0, 1, 2, 3, 4, 5])), 2)
    assert {output.role for output in pipeline.stages[-1].outputs} == {OutputRole.LOSS, OutputRole.WEIGHT}


def test_a_loss_that_is_no_more_than_a_parameter() -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.float().view(())

    pipeline = hold(Only(), data(), 1, tolerance=1e-6)  # the loss is in float32
    assert set(pipeline.stages[0].gradients) == {"weight"}


class Positions(nn.Module):
    """A parameter that is added to what flows on: its gradient is that of all that reads the sum, in all stages."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.linspace(0, 1, 2 * D).view(2, D))
        self.layers = tower(4)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x + self.positions if self.tied else x).square().mean()


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_come_together_from_later_stages(tied: bool) -> None:
    pipeline = hold(Positions(tied), data((2, D)), 3, boundaries=["layers.1", "layers.3"])
    assert ["positions" in stage.gradients for stage in pipeline.stages] == [True, False, tied]


class Cut(nn.Module):
    """A curve whose result, which its gradient needs, is sent to the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


@pytest.mark.parametrize("split", [False, True])
def test_a_gradient_is_made_where_its_forward_call_is(split: bool) -> None:
    pipeline = hold(Cut(), data(), 2, boundaries=["second"])
    first, second = pipeline.stages
    of_curve = torch.ops.aten.tanh_backward.default
    parts = (first.backward_input, second.backward_input) if split else (first.backward, second.backward)
    assert [any(n.target is of_curve for n in part.graph.nodes) for part in parts if part] == [True, False]


def test_what_two_stages_read_is_passed_on_by_the_nearer() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tower(4)

        def forward(self, x: Tensor) -> Tensor:
            before, one, other, after = self.layers
            x = before(x)
            x = x + other(torch.tanh(one(x)))
            return after(x).square().mean()

    pipeline = hold(Branch(), data(), 3, boundaries=["layers.2", "layers.3"])
    assert set(pipeline.forward_edges) == {(0, 1), (1, 2)}
    assert set(pipeline.backward_edges) == {(2, 1), (1, 0)}
    assert set(pipeline.backward_edges[2, 1]) < set(pipeline.backward_edges[1, 0])
