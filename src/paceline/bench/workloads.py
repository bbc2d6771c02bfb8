"""The models that benchmarks train: small enough for a laptop, and of the kinds people train.

Plain PyTorch and Hugging Face; nothing here knows Paceline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

Batch = dict[str, Tensor]
VOCABULARY = 256


class Model(StrEnum):
    """What is trained."""

    GPT = "gpt"
    LLAMA = "llama"
    RESNET = "resnet"


class Scale(StrEnum):
    """Full for measurements; tiny to see that everything runs."""

    FULL = "full"
    TINY = "tiny"


@dataclass(frozen=True)
class Workload:
    """A model with its batch and optimizer.

    Attributes:
        title: what is trained, for a table.
        build: returns a module and a global batch, `module(**batch)`; equal on every call and every rank.
        blocks: the repeated parts of that module, which FSDP2 is told to shard one by one.
        optimizer: makes the optimizer, the same for all who train it.
        has_batch_norm: whether its loss depends on which samples are normalised together.
    """

    title: str
    build: Callable[[], tuple[nn.Module, Batch]]
    blocks: Callable[[nn.Module], list[nn.Module]]
    optimizer: Callable[[ParamsT], Optimizer]
    has_batch_norm: bool = False


def workload(model: Model, scale: Scale) -> Workload:
    """Return a model at a scale."""
    return {Model.GPT: _gpt, Model.LLAMA: llama, Model.RESNET: _resnet}[model](scale is Scale.TINY)


def _gpt(tiny: bool) -> Workload:
    width, layers, heads, time, batch = (32, 2, 2, 16, 4) if tiny else (256, 6, 8, 128, 8)

    def build() -> tuple[nn.Module, Batch]:
        torch.manual_seed(0)
        tokens = torch.randint(VOCABULARY, (batch, time + 1))
        module = GPT(width, layers, heads, time)
        return module, {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    title = f"GPT, width {width}, {layers} layers, {time} tokens, batch {batch}, AdamW"
    return Workload(title, build, lambda module: list(module.get_submodule("blocks").children()), adamw)


def llama(tiny: bool, queries: int = 4) -> Workload:
    """Return Hugging Face's Llama, in which as many heads of queries share keys and values."""
    width, layers, heads, time, batch = (32, 2, 4, 16, 4) if tiny else (256, 6, 8, 128, 8)

    def build() -> tuple[nn.Module, Batch]:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // queries,
            max_position_embeddings=time,
        )
        tokens = torch.randint(VOCABULARY, (batch, time))
        return LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}

    title = f"Hugging Face Llama, width {width}, {layers} layers, {time} tokens, batch {batch}, AdamW"
    return Workload(title, build, lambda module: list(module.get_submodule("model.layers").children()), adamw)


def _resnet(tiny: bool) -> Workload:
    side, batch = (32, 4) if tiny else (64, 16)
    widths, depths, labels = ([8, 16], [1, 1], 10) if tiny else ([64, 128, 256, 512], [2, 2, 2, 2], 1000)

    def build() -> tuple[nn.Module, Batch]:
        from transformers import ResNetConfig, ResNetForImageClassification

        torch.manual_seed(0)
        config = ResNetConfig(embedding_size=widths[0], hidden_sizes=widths, depths=depths, layer_type="basic")
        config.num_labels = labels
        pixels, classes = torch.randn(batch, 3, side, side), torch.randint(labels, (batch,))
        return ResNetForImageClassification(config).train(), {"pixel_values": pixels, "labels": classes}

    def blocks(module: nn.Module) -> list[nn.Module]:
        stages = module.get_submodule("resnet.encoder.stages").children()
        return [block for stage in stages for block in stage.get_submodule("layers").children()]

    name = "Hugging Face ResNet" + ("" if tiny else "-18")
    title = f"{name}, {side}x{side} pixels, batch {batch}, SGD with momentum"
    return Workload(title, build, blocks, sgd, has_batch_norm=True)


def adamw(parameters: ParamsT) -> Optimizer:
    """Return the optimizer of Transformers."""
    return AdamW(parameters, lr=1e-4, fused=True)


def sgd(parameters: ParamsT) -> Optimizer:
    """Return the optimizer of convolutional networks."""
    return SGD(parameters, lr=1e-3, momentum=0.9)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]; position t sees the positions up to t."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)  # [B, H, T, D/H]
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        mixed: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return mixed


class GPT(nn.Module):
    """`gpt(tokens, targets)` is the mean cross-entropy in nats per token."""

    def __init__(self, width: int, layers: int, heads: int, time: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss; tokens, targets: [B, T]."""
        x: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
