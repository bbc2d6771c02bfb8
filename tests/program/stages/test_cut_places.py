"""Where programs are cut: by cost, by name, like another, and never through a buffer that changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.program.capture import capture
from paceline.program.program import InputRole
from paceline.program.stages import Pipeline, cut
from tests.program.stages.pieces import D, accumulated, assert_equal, data, in_double, pieces, run, tower
from tests.program.stages.test_cut_modules import Checkpointed, WithFunction


class Counting(nn.Module):
    """Buffers: one changed in the first stage and read in all, one changed and read by every layer."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.layers = tower(3)
        self.everywhere = everywhere
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            if self.everywhere:
                x = x * self.scale.clone()
                self.scale += x.detach().abs().mean()
            x = torch.tanh(layer(x)) * (1 + 0.1 * self.calls)
        return x.square().mean()


def test_a_buffer_changed_in_one_stage_is_read_in_all() -> None:
    module, batch = in_double(Counting(False), data())
    batches = pieces(batch, [2, 2, 2])
    program = capture(module, batches[0])
    pipeline = cut(program, 3, split_backward=True, boundaries=["layers.1", "layers.2"])
    for split in (False, True):
        found = run(program, pipeline, module, batches, split=split)
        assert float(found.buffers["calls"]) == 3
        assert_equal(found, accumulated(module, batches, [1 / 3] * 3))


def test_a_buffer_changed_on_two_stages_is_refused() -> None:
    program = capture(*in_double(Counting(True), data()))
    with pytest.raises(PlanError, match=r"'layers\.1': the buffer 'scale' is read and changed on both sides"):
        cut(program, 3, boundaries=["layers.1", "layers.2"])
    together = cut(program, 2)
    changing = [s.index for s in together.stages if any(o.name == "scale" for o in s.outputs)]
    assert len(changing) == 1


def test_boundaries_are_names_of_modules() -> None:
    module, batch = in_double(WithFunction(), data())
    program = capture(module, batch)
    with pytest.raises(PlanError, match=r"'layers\.9'\. Did you mean 'layers\.\d'"):
        cut(program, 2, boundaries=["layers.9"])
    with pytest.raises(PlanError, match="3 stages have 2 boundaries, and 1 were given"):
        cut(program, 3, boundaries=["layers.1"])
    with pytest.raises(PlanError, match="before the module that the stage before begins with"):
        cut(program, 3, boundaries=["layers.2", "layers.1"])
    with pytest.raises(PlanError, match=r"'layers\.0': nothing"):
        cut(program, 2, boundaries=["layers.0"])


def test_more_stages_than_there_are_places() -> None:
    program = capture(*in_double(WithFunction(), data()))
    with pytest.raises(PlanError, match=r"cannot be cut into 99 stages.*Use at most \d+ stages"):
        cut(program, 99)
    with pytest.raises(PlanError, match="0 stages"):
        cut(program, 0)


def test_stages_fit_into_memory() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tower(8)
            self.wide = nn.Linear(D, 60 * D)

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(self.layers(x)).square().mean()

    program = capture(*in_double(Uneven(), data()))
    free = cut(program, 2)
    limit = 5 * max(free.parameter_bytes)
    held = cut(program, 2, memory_bytes=limit, seconds_of=lambda node: 1.0)
    assert all(4 * size <= limit for size in held.parameter_bytes)
    with pytest.raises(PlanError, match="no cut into 2 stages holds at most"):
        cut(program, 2, memory_bytes=limit / 3)


class Reversed(WithFunction):
    """The same parameters, read in the other order."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_other_micro_batches_are_cut_at_the_same_calls() -> None:
    module, (x,) = in_double(WithFunction(), data(rows=7))
    large, small = capture(module, (x[:4],)), capture(module, (x[4:],))
    model = cut(large, 3)
    same = cut(small, 3, same_as=model)
    assert (same.cuts, same.forward_edges, same.backward_edges) == (
        model.cuts,
        model.forward_edges,
        model.backward_edges,
    )
    with pytest.raises(PlanError, match="2 stages were asked for, like those of a pipeline that has 3"):
        cut(small, 2, same_as=model)
    with pytest.raises(PlanError, match="reads parameters in another order"):
        cut(capture(Reversed().double(), (x[:4],)), 3, same_as=model)


def test_the_slowest_stage_is_as_quick_as_can_be() -> None:
    program = capture(*in_double(WithFunction(), data()))
    heavy = torch.ops.aten.addmm.default

    def seconds_of(node: torch.fx.Node) -> float:
        return 1.0 if node.target is heavy else 0.0

    pipeline = cut(program, 4, seconds_of=seconds_of)
    assert pipeline.seconds == (1.0, 1.0, 1.0, 1.0)


def test_evaluation_gives_every_stage_the_parameters_that_it_has() -> None:
    module, batch = in_double(Checkpointed(False), data())
    training = cut(capture(module, batch), 3, boundaries=["layers.1", "layers.2"])
    evaluation = cut(capture(module.eval(), batch), 3, same_as=training)

    def parameters(pipeline: Pipeline) -> list[set[str]]:
        named = {name: item.name for name, item in pipeline.inputs.items() if item.role is InputRole.PARAMETER}
        return [{named[name] for name in stage.forward.inputs if name in named} for stage in pipeline.stages]

    assert parameters(evaluation) == parameters(training)
