"""The models of the operators benchmark: what PyTorch's tensor parallelism can express, and what it cannot.

Plain PyTorch and Hugging Face; nothing here knows Paceline.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.bench import workloads
from paceline.bench.operators.unet import UNet
from paceline.bench.workloads import VOCABULARY, Batch, Scale, Workload, adamw, sgd


class Model(StrEnum):
    """What is trained."""

    GPT = "gpt"
    GPT_FUSED = "gpt-fused"
    LLAMA = "llama"
    RESNET = "resnet"
    UNET = "unet"

    @property
    def has_tensor_parallel(self) -> bool:
        """Whether `parallelize_module` can express it: it splits linear layers and embeddings, each in one piece."""
        return self in (Model.GPT, Model.LLAMA)

    @property
    def needs_transformers(self) -> bool:
        """Whether it is one of Hugging Face's."""
        return self in (Model.LLAMA, Model.RESNET)


def workload(model: Model, scale: Scale) -> Workload:
    """Return a model at a scale."""
    tiny = scale is Scale.TINY
    match model:
        case Model.GPT:
            return _gpt(tiny)
        case Model.GPT_FUSED:
            return workloads.workload(workloads.Model.GPT, scale)
        case Model.LLAMA:
            return workloads.llama(tiny, queries=2)  # with four ranks, PyTorch's tensor parallelism needs as many keys
        case Model.RESNET:
            return workloads.workload(workloads.Model.RESNET, scale)
        case Model.UNET:
            return _unet(tiny)


def _gpt(tiny: bool) -> Workload:
    width, layers, heads, time, batch = (32, 2, 4, 16, 4) if tiny else (256, 6, 8, 128, 8)

    def build() -> tuple[nn.Module, Batch]:
        torch.manual_seed(0)
        tokens = torch.randint(VOCABULARY, (batch, time + 1))
        module = GPT(width, layers, heads, time)
        return module, {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    title = f"GPT (q, k, v apart), width {width}, {layers} layers, {time} tokens, batch {batch}, AdamW"
    return Workload(title, build, _children("blocks"), adamw)


def _unet(tiny: bool) -> Workload:
    side, width, levels, batch, classes = (32, 4, 3, 4, 3) if tiny else (512, 16, 4, 2, 3)

    def build() -> tuple[nn.Module, Batch]:
        torch.manual_seed(0)
        pixels = torch.randn(batch, 3, side, side)
        labels = torch.randint(classes, (batch, side, side))
        return UNet(width, levels, classes), {"pixels": pixels, "labels": labels}

    def blocks(module: nn.Module) -> list[nn.Module]:
        return [module.get_submodule("first"), *_children("down")(module), *_children("up")(module)]

    title = f"U-Net, {side}x{side} pixels, {width} channels, {levels} levels, batch {batch}, SGD with momentum"
    return Workload(title, build, blocks, sgd, has_batch_norm=True)


def _children(path: str) -> Callable[[nn.Module], list[nn.Module]]:
    return lambda module: list(module.get_submodule(path).children())


class Attention(nn.Module):
    """Causal attention of as many heads as its projections have features for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]; position t sees the positions up to t."""
        batch, time, _ = x.shape
        q, k, v = (
            part(x).view(batch, time, -1, self.head_width).transpose(1, 2)  # [B, H, T, D/H]
            for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, -1))
        return mixed


class Perceptron(nn.Module):
    """Two linear layers about a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]."""
        mixed: Tensor = self.down(F.gelu(self.up(x)))
        return mixed


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.perceptron = Attention(width, heads), Perceptron(width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]."""
        x = x + self.attention(self.norm1(x))
        mixed: Tensor = x + self.perceptron(self.norm2(x))
        return mixed


class GPT(nn.Module):
    """`gpt(tokens, targets)` is the mean cross-entropy in nats per token; written as PyTorch's tutorial asks for.

    Queries, keys and values have a layer each, and every part that is split or fed by a collective is a module.
    """

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
