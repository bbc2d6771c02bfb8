"""Models of many families, cut and run piece by piece, are the models themselves on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.program.capture import capture
from paceline.program.precision import lift
from paceline.program.program import InputRole, OutputRole, Program
from paceline.program.stages import cut
from recipes import gpt as recipe
from tests import models
from tests.program.stages.pieces import (
    EXACT,
    Ran,
    accumulated,
    assert_equal,
    in_double,
    pieces,
    run,
    serial,
    without_dropout,
)
from tests.program.stages.serially import Stages
from tests.program.stepping import run_program

Built = tuple[nn.Module, Any]


def small_gpt() -> Built:
    return recipe.build(width=16, layers=2, heads=2, context=6, dropout=0.0, tied=True, batch=6)


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=2, pad_token_id=0
    )
    tokens = torch.randint(1, 32, (6, 7), generator=torch.Generator().manual_seed(1))
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens[:, :5].contiguous()}


class Net(nn.Module):
    """A U-Net: what is made on the way down is read on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)])
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.GroupNorm(2, 6)])
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = []
        for convolution, norm in zip(self.down, self.norms, strict=True):
            x = F.silu(norm(convolution(x)))
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = F.silu(self.middle(x))
        for convolution in self.up:
            x = convolution(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return F.mse_loss(x, y)


def unet() -> Built:
    generator = torch.Generator().manual_seed(1)
    return Net(), tuple(torch.randn(6, 3, 8, 8, generator=generator) for _ in range(2))


FAMILIES: dict[str, Callable[[], Built]] = {
    "gpt": small_gpt,
    "gpt2": models.gpt2,
    "llama": models.llama,
    "bert": models.bert,
    "t5": t5,
    "unet": unet,
}


class Case:
    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        module, batch = FAMILIES[name]()
        self.module, batch = in_double(without_dropout(module), batch)
        size = next(iter(torch.utils._pytree.tree_leaves(batch))).shape[0]
        self.batches = pieces(batch, [size // 2] * 2)
        # Parts of Hugging Face's models compute in float32 whatever their type: only lifted, programs can be exact.
        self.program: Program = lift(capture(self.module, self.batches[0]))
        one, other = (run_program(self.program, self.module, half) for half in self.batches)
        gradients = {key: (value + other.gradients[key]) / 2 for key, value in one.gradients.items()}
        self.serial = Ran((one.loss + other.loss) / 2, gradients, other.buffers)
        assert_equal(self.serial, serial(self.module, batch), tolerance=EXACT if name in ("gpt", "unet") else 1e-6)


@cache
def case(name: str) -> Case:
    return Case(name)


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_model_is_the_model(name: str, count: int, split: bool) -> None:
    model = case(name)
    pipeline = cut(model.program, count, split_backward=split)
    assert len(pipeline.stages) == count
    assert_equal(run(model.program, pipeline, model.module, model.batches, split=split), model.serial)


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_in_float32_too(name: str) -> None:
    torch.manual_seed(0)
    module, batch = FAMILIES[name]()
    module = without_dropout(module).train()
    batches = pieces(batch, [3, 3])
    program = capture(module, batches[0])
    pipeline = cut(program, 3)
    assert_equal(run(program, pipeline, module, batches), serial(module, batch), tolerance=1e-5)


@pytest.mark.parametrize("count", [2, 3])
def test_batch_norm_is_that_of_gradient_accumulation(count: int) -> None:
    torch.manual_seed(0)
    module, batch = in_double(*models.resnet())
    batches = pieces(batch, [4, 4, 4])
    program = capture(module, batches[0])
    for split in (False, True):
        pipeline = cut(program, count, split_backward=split)
        found = run(program, pipeline, module, batches, split=split)
        assert found.buffers
        assert_equal(found, accumulated(module, batches, [1 / 3] * 3), EXACT)


def test_micro_batches_with_unequal_numbers_of_labels() -> None:
    torch.manual_seed(0)
    module, batch = in_double(*small_gpt())
    batch["targets"][:3, 1:] = -100
    batches = pieces(batch, [2, 2, 2])
    program = capture(module, batches[0])
    pipeline = cut(program, 3)
    valid = [int((piece["targets"] != -100).sum()) for piece in batches]
    shares = [count / sum(valid) for count in valid]
    found = Stages(pipeline, program, module).run(batches, shares)
    assert found.weights == valid and len(set(valid)) > 1
    assert_equal(found, serial(module, batch))


def test_evaluation_is_cut_too() -> None:
    model = case("gpt2")
    model.module.eval()
    try:
        program = capture(model.module, model.batches[0])
        pipeline = cut(program, 3, split_backward=True)
        assert all(stage.backward is None and stage.backward_input is None for stage in pipeline.stages)
        found = run(program, pipeline, model.module, model.batches)
    finally:
        model.module.train()
    assert not found.gradients
    assert abs(float(found.loss) - float(model.serial.loss)) < 1e-6


def test_a_tied_parameter_has_a_partial_gradient_on_each_stage() -> None:
    pipeline = cut(case("gpt2").program, 3)
    tied = "transformer.wte.weight"
    assert [tied in stage.gradients for stage in pipeline.stages] == [True, False, True]
    weights = pipeline.values[pipeline.stages[0].gradients[tied]].shape
    sent = [pipeline.values[name].shape for names in pipeline.backward_edges.values() for name in names]
    assert weights not in sent


def test_a_chain_of_blocks_sends_one_value_each_way_to_the_neighbour() -> None:
    pipeline = cut(case("llama").program, 2, boundaries=["model.layers.1"])
    assert {edge: len(names) for edge, names in pipeline.forward_edges.items()} == {(0, 1): 1}
    assert {edge: len(names) for edge, names in pipeline.backward_edges.items()} == {(1, 0): 1}


def test_skips_pass_stages_that_do_not_read_them() -> None:
    pipeline = cut(case("unet").program, 3, boundaries=["down.1", "up.0"])
    assert (0, 2) in pipeline.forward_edges and (2, 0) in pipeline.backward_edges


def test_every_stage_reads_labels_and_masks_itself() -> None:
    pipeline = cut(case("bert").program, 3)
    by_name = {item.name: name for name, item in pipeline.inputs.items() if item.role is InputRole.BATCH}
    read = [set(stage.forward.inputs) for stage in pipeline.stages]
    assert [by_name["labels"] in names for names in read] == [False, False, True]
    assert [by_name["input_ids"] in names for names in read] == [True, False, False]
    assert OutputRole.WEIGHT in {output.role for output in pipeline.stages[-1].outputs}


def test_nodes_of_the_program_stay_as_they_are() -> None:
    program = case("gpt").program
    before = str(program.graph)
    cut(program, 3, split_backward=True)
    assert str(program.graph) == before
