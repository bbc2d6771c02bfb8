"""Small models of many families, as factories: `tests.models:gpt2`.

Each has a batch of 12, which 2, 3 and 4 divide. Blocks are repeated in GPT and Llama only: capture and placement take
time for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes import gpt as recipe

BATCH = 12
TIME = 8
WORDS = 96

Built = tuple[nn.Module, Any]


def _tokens() -> Tensor:
    return torch.randint(WORDS, (BATCH, TIME), generator=torch.Generator().manual_seed(1))


def gpt(dropout: float = 0.1) -> Built:
    """The demo's GPT, with tied embeddings."""
    return recipe.build(width=24, layers=2, heads=2, context=TIME, dropout=dropout, tied=True, batch=BATCH)


def gpt2() -> Built:
    """Hugging Face GPT-2: tied embeddings, and dropout on."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_embd=24, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    tokens = _tokens()
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def llama() -> Built:
    """Hugging Face Llama: grouped queries, rotary tables and norms in float32 whatever its type."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = _tokens()
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def bert() -> Built:
    """Hugging Face BERT: dropout on, padding, and unequal numbers of labels per sample."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    tokens = _tokens()
    mask = torch.ones_like(tokens)
    mask[::2, -3:] = 0
    labels = tokens.clone()
    labels[1::2, ::2] = -100
    return BertForMaskedLM(config), {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def resnet() -> Built:
    """Hugging Face ResNet: batch norm, whose statistics are those of the global batch."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=3)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    labels = torch.randint(3, (BATCH,), generator=generator)
    return ResNetForImageClassification(config), {"pixel_values": pixels, "labels": labels}


class Own(nn.Module):
    """What somebody may write on a first evening: batch norm behind a bias, dropout, a frozen layer, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 24)
        self.norm = nn.BatchNorm1d(24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.last = nn.Linear(24, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        hidden = F.dropout(torch.relu(self.norm(self.first(x))), 0.1, self.training)
        return F.mse_loss(self.last(hidden + self.frozen(hidden)), y)


def own() -> Built:
    """A module of a user's own; its batch is a tuple."""
    generator = torch.Generator().manual_seed(1)
    return Own(), (torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 1, generator=generator))


FAMILIES = (gpt, gpt2, llama, bert, resnet, own)
