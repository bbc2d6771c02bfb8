from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.cluster.files import load
from paceline.errors import CaptureError
from paceline.planner.machine_costs import costs_on
from paceline.planner.saved import saved
from paceline.planner.workload import workload_of, workload_of_program
from paceline.program.capture import capture
from paceline.program.repeated import RepeatedProgram
from paceline.program.without_data import build_without_data
from paceline.simulator.closed_form.estimate import model_flops
from paceline.simulator.closed_form.transformer import transformer
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Along, Amount, Block, Collective, Kind, Recompute, Workload
from recipes import gpt as recipe

LAYERS, WIDTH, HEADS, TIME, WORDS = 5, 64, 4, 64, 256


def _gpt() -> tuple[nn.Module, Any]:
    module, batch = recipe.build(width=WIDTH, layers=LAYERS, heads=HEADS, context=TIME, batch=4)
    return module.to(torch.bfloat16), batch


def _llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )
    tokens = torch.zeros(4, TIME, dtype=torch.long)
    return LlamaForCausalLM._from_config(config), {"input_ids": tokens, "labels": tokens}


def _resnet() -> tuple[nn.Module, Any]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[5], layer_type="basic", num_labels=3)
    return ResNetForImageClassification(config), {
        "pixel_values": torch.zeros(4, 3, 64, 64),
        "labels": torch.zeros(4, dtype=torch.long),
    }


@pytest.fixture(scope="module")
def gpt() -> Workload:
    return workload_of(*build_without_data(_gpt, {}, 0))


@pytest.fixture(scope="module")
def llama() -> Workload:
    return workload_of(*build_without_data(_llama, {}, 0))


@pytest.fixture(scope="module")
def resnet() -> Workload:
    return workload_of(*build_without_data(_resnet, {}, 0))


def _blocks(workload: Workload) -> Block:
    (block,) = (block for block in workload.blocks if block.repeats)
    return block


def _products(block: Block) -> Counter[tuple[Any, ...]]:
    """Return the products of a block, by when they are made and what each dimension is and divides along."""
    found = [
        (work.when, work.factor * float(work.times.value), tuple(sorted(map(_sized, work.dims))))
        for work in block.work
        if work.kind is not Kind.TOUCH
    ]
    return Counter(found)


def _sized(amount: Amount) -> tuple[float, tuple[str, ...]]:
    return float(amount.value), tuple(sorted(along.value for along in amount.along))


def _sent(block: Block, along: Along) -> Counter[tuple[Any, ...]]:
    return Counter((m.kind, m.when, _sized(m.nbytes)) for m in block.messages if m.along is along)


def _total(workload: Workload, batch: int) -> float:
    """Return the bytes that one rank keeps of a batch."""
    one = Layouts.of(micro_batch=batch)
    return sum(
        float(block.count) * float(np.sum(amount.on(one)))
        for block in workload.blocks
        for amount in block.kept[Recompute.NONE]
    )


def test_a_gpt_is_the_transformer_that_is_described(gpt: Workload) -> None:
    described = transformer(
        layers=LAYERS, hidden=WIDTH, heads=HEADS, sequence=TIME, vocabulary=WORDS, tied=False, biases=False
    )
    ours, theirs = _blocks(gpt), _blocks(described)
    assert (gpt.tokens, gpt.divisors[Along.TP], gpt.divisors[Along.SP]) == (TIME, HEADS, TIME)
    assert (ours.name, ours.count) == ("blocks.*", LAYERS)
    assert _products(ours) == _products(theirs)
    assert _sent(ours, Along.TP) == _sent(theirs, Along.TP)
    assert ours.kept[Recompute.FULL] == theirs.kept[Recompute.FULL]
    layouts = Layouts.of(micro_batch=[1, 2, 3], tp=[1, 2, 4], dp=[1, 4, 2])
    np.testing.assert_array_equal(model_flops(gpt, layouts), model_flops(described, layouts))


def test_a_gpt_keeps_what_its_formula_says_and_copies_of_turned_queries_and_keys(gpt: Workload) -> None:
    ours, theirs = _blocks(gpt), _blocks(transformer(
        layers=LAYERS, hidden=WIDTH, heads=HEADS, sequence=TIME, vocabulary=WORDS, tied=False
    ))  # fmt: skip
    alike = Layouts.of(tp=[1, 4, 4], regions=[False, False, True])
    here, there = (sum(a.on(alike) for a in block.kept[Recompute.NONE]) for block in (ours, theirs))
    turned = 3 * 2 * TIME * WIDTH / np.array([1, 4, 4])
    np.testing.assert_allclose(here - turned, there, rtol=0.02)


def test_a_llama_has_the_parameters_and_operations_of_the_described_one(llama: Workload) -> None:
    described = transformer(
        layers=LAYERS,
        hidden=WIDTH,
        heads=HEADS,
        kv_heads=2,
        ffn=160,
        gated=True,
        biases=False,
        tied=False,
        sequence=TIME,
        vocabulary=WORDS,
    )
    one = Layouts.of(micro_batch=3)
    assert model_flops(llama, one) == model_flops(described, one)
    ours, theirs = (sum(float(a.value) for a in _blocks(w).parameters) for w in (llama, described))
    assert ours == theirs
    assert llama.divisors[Along.TP] == 2


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet"])
def test_what_is_kept_of_all_blocks_is_what_a_full_capture_keeps(name: str, request: pytest.FixtureRequest) -> None:
    workload: Workload = request.getfixturevalue(name)
    module, batch = build_without_data({"gpt": _gpt, "llama": _llama, "resnet": _resnet}[name], {}, 0)
    whole = sum(item.nbytes for item in saved(capture(module, batch)))
    assert _total(workload, 4) == whole


def test_convolutions_divide_by_height_with_a_halo_and_have_no_heads(resnet: Workload) -> None:
    block = _blocks(resnet)
    products = [work for work in block.work if work.kind is Kind.PRODUCT]
    assert all(any({Along.BATCH, Along.HW} <= dim.along for dim in work.dims) for work in products)
    halos = [message.nbytes for message in block.messages if message.kind is Collective.SEND]
    row = 8 * 16 * 4  # one row of 8 channels, after two halvings of 64 places
    assert {float(halo.value) for halo in halos} == {row}
    assert all(Along.BATCH in halo.along and not {Along.HW, Along.SP} & halo.along for halo in halos)
    assert resnet.divisors[Along.HW] == 64
    assert resnet.tokens == 1


def test_blocks_are_told_in_order_with_tied_parameters_where_they_are_read_first() -> None:
    module, batch = recipe.build(width=16, layers=4, heads=2, context=8, tied=True, batch=3)
    workload = workload_of(module, batch)
    first, blocks, last = workload.blocks
    assert [blocks.name, blocks.count] == ["blocks.*", 4]
    table = 256 * 16
    assert sum(float(a.value) for a in last.shared) == table
    total = sum(float(b.count) * float(a.value) for b in workload.blocks for a in b.parameters)
    assert total == sum(p.numel() for p in module.parameters())
    assert (workload.precision.dtype, workload.precision.parameter, workload.precision.optimizer) == ("float32", 4, 8)
    assert first.output.value == 16 * 8 * 4  # of one sample, though three were given


def test_a_program_without_a_backward_pass_is_no_training_step() -> None:
    module = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)).eval()

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).mean()

    program = capture(Mean().eval(), (torch.zeros(2, 2),))
    with pytest.raises(CaptureError, match="no backward pass"):
        workload_of_program(RepeatedProgram(program, ()))


def test_what_comes_and_goes_is_the_block_s_own_worst_moment(gpt: Workload) -> None:
    """In the head, the gradient of the logits comes while they themselves are kept; in a block, that of its inside."""
    head = gpt.blocks[-1]
    logits = TIME * WORDS * 2
    assert float(head.workspace.value) >= logits
    assert {Along.BATCH, Along.SP} <= head.workspace.along
    inner = 2 * TIME * 4 * WIDTH  # the widest tensor of a block
    assert inner <= float(_blocks(gpt).workspace.value) <= 4 * inner


def test_random_draws_divide_as_what_reads_them_does() -> None:
    module, batch = recipe.build(width=16, layers=4, heads=2, context=8, dropout=0.1, batch=4)
    workload = workload_of(module, batch)
    for policy in Recompute:
        amounts = _blocks(workload).kept[policy]
        whole = sum(float(amount.value) for amount in amounts if Along.BATCH not in amount.along)
        assert whole <= 8 * 8 * 4  # a mask of what comes later, the same for all samples


def test_costs_on_a_cluster_are_those_of_its_slowest_devices_and_fastest_links() -> None:
    fast, slow = costs_on(load("dgx-h100")), costs_on(load("v100-25gbe"))
    assert fast.machine.half_products.rate(1e12) > 3 * slow.machine.half_products.rate(1e12)
    assert fast.machine.touching.rate(1e9) > slow.machine.touching.rate(1e9)
    assert fast.per_byte_sent < slow.per_byte_sent
    level = load("dgx-h100").levels[0]
    assert fast.per_byte_sent == pytest.approx(1 / (level.bandwidth * level.efficiency))
