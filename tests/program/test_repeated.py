from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.errors import CaptureError
from paceline.program.capture import capture
from paceline.program.fake import fake_mode
from paceline.program.program import Program
from paceline.program.repeated import RepeatedProgram, capture_repeated
from paceline.program.work import work_of
from recipes import gpt as recipe
from tests import models

Built = tuple[nn.Module, Any]


def _gpt() -> Built:
    return recipe.build(width=24, layers=4, heads=2, context=8, dropout=0.1, tied=True, batch=4)


def _llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    _, batch = models.llama()
    config = LlamaConfig(
        vocab_size=models.WORDS,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config), batch


def _bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    _, batch = models.bert()
    config = BertConfig(
        vocab_size=models.WORDS,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return BertForMaskedLM(config), batch


def _resnet() -> Built:
    """A stage whose first block is no repeat of the others, and one of a single block."""
    from transformers import ResNetConfig, ResNetForImageClassification

    _, batch = models.resnet()
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[5, 1], layer_type="basic", num_labels=3)
    return ResNetForImageClassification(config), batch


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class _Block(nn.Module):
    def __init__(self, number: int, every: int) -> None:
        super().__init__()
        self.number = number
        self.every = every
        self.first = nn.Linear(8, 8)
        self.experts = nn.ModuleList(_Expert() for _ in range(4))

    def forward(self, x: Tensor, scale: float) -> Tensor:
        if self.number % self.every == 0:
            x = x + torch.tanh(self.first(x)) * scale
        for expert in self.experts:
            x = expert(x)
        return x


class _Nested(nn.Module):
    """Blocks in which there are blocks, and of which every third one may do more than the others."""

    def __init__(self, layers: int, every: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(number, every) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self.blocks)):  # an index, not an iteration: the loop is the user's own
            x = self.blocks[number](x, scale=0.5)
        return x.square().mean()


def _nested() -> Built:
    return _Nested(9, every=3), (torch.zeros(4, 8),)


def _calls(program: Program) -> list[Node]:
    return [node for node in program.graph.nodes if not work_of(node).view]


def _count(program: Program | RepeatedProgram) -> dict[str, float]:
    """Return how many calls there are that are no views, what they compute, read and write."""
    amounts = {
        "calls": lambda node: not work_of(node).view,
        "flops": lambda node: work_of(node).flops,
        "read": lambda node: work_of(node).read_bytes,
        "written": lambda node: work_of(node).written_bytes,
    }
    if isinstance(program, RepeatedProgram):
        return {name: program.total(amount) for name, amount in amounts.items()}
    return {name: sum(map(amount, program.graph.nodes)) for name, amount in amounts.items()}


@pytest.mark.parametrize("build", [_gpt, _llama, _bert, _resnet, _nested])
def test_equal_blocks_are_captured_once_and_count_as_often_as_they_are_there(build: Any) -> None:
    module, batch = build()
    before = {name: id(parameter) for name, parameter in module.named_parameters()}
    found = capture_repeated(module, batch)
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == before
    assert not any("forward" in child.__dict__ for child in module.modules())
    whole = capture(module, batch)
    assert _count(found) == _count(whole)
    assert len(_calls(found.program)) < 0.9 * len(_calls(whole))


def test_a_block_that_does_something_else_is_no_repeat_of_its_neighbours() -> None:
    module, batch = _Nested(12, every=3), (torch.zeros(4, 8),)
    found = capture_repeated(module, batch)
    outer = [repeat for repeat in found.repeats if repeat.paths[0].count(".") == 1]
    assert sorted(repeat.paths for repeat in outer) == [
        tuple(f"blocks.{number}" for number in range(0, 12, 3)),
        tuple(f"blocks.{number}" for number in range(12) if number % 3),
    ]


def test_blocks_of_one_that_share_parameters_or_change_shape_are_all_captured() -> None:
    class Grows(nn.Module):
        """Each block reads all that came before it (DenseNet): none looks like its neighbour."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4 * (i + 1), 4), nn.ReLU()) for i in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.cat([x, block(x)], dim=1)
            return x.mean()

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6))
            for block in self.blocks:
                block[0].weight = self.blocks[0][0].weight

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.mean()

    for module in (Grows(), Shares()):
        found = capture_repeated(module, (torch.zeros(2, 4),))
        assert found.repeats == ()
        assert _count(found) == _count(capture(module, (torch.zeros(2, 4),)))


def test_what_cannot_be_captured_is_told_in_the_words_of_capture() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) if x.sum() > 0 else x
            return x.mean()

    told: list[str] = []
    with pytest.raises(CaptureError, match="control flow does not depend on tensor values"):
        capture_repeated(Decides(), (torch.zeros(2, 4),), tell=told.append)
    assert "blocks could not be rehearsed: all of them are captured" in told


def test_equal_projections_beside_each_other_are_no_blocks() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("query", "key", "value", "out"):
                setattr(self, name, nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x)).mean()

    assert capture_repeated(Attends(), (torch.zeros(2, 3, 4),)).repeats == ()


def test_blocks_that_return_something_else_than_they_are_given_are_all_captured() -> None:
    class Widens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU()) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([head(x) for head in self.heads]).square().mean()

    module, batch = Widens(), (torch.zeros(2, 4),)
    assert _count(capture_repeated(module, batch)) == _count(capture(module, batch))


def test_a_model_of_405_billion_parameters_is_a_small_program() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    with fake_mode():
        module = LlamaForCausalLM(config)
        tokens = torch.zeros(1, 8192, dtype=torch.long)
    found = capture_repeated(module, {"input_ids": tokens, "labels": tokens})
    (repeat,) = found.repeats
    assert repeat.weights == {
        "model.layers.0": 1,
        "model.layers.1": 124,
        "model.layers.125": 1,
    }
    # As large whatever the number of layers, of which three are in it.
    kinds = Counter(str(node.target) for node in _calls(found.program))
    assert kinds["aten.mm.default"] == 3 * (3 * 7) + 3
    attention = 126 * 128 * 8192**2 * 128
    matrices = sum(p.numel() for name, p in module.named_parameters() if p.ndim == 2 and "embed" not in name)
    assert found.total(lambda node: work_of(node).flops) == 6 * 8192 * matrices + (4 + 10) * attention
    assert sum(p.numel() for p in module.parameters()) == 405_853_388_800
