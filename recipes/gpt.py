"""A byte-level GPT: the model of the demo, and an example of a factory. Plain PyTorch; nothing here knows Paceline."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]; position t sees the positions up to t."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)  # [B, H, T, D/H]
            for part in self.qkv(x).split(width, dim=2)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and around it a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]."""
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT(nn.Module):
    """`gpt(tokens, targets)` is the mean cross-entropy in nats per byte; targets of -100 count for nothing."""

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        if tied:
            self.head.weight = self.token.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's: normal with deviation 0.02, smaller where 2 * layers residuals add up."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def logits(self, tokens: Tensor) -> Tensor:
        """Of the byte that follows each: [B, T] -> [B, T, 256]."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss; tokens, targets: [B, T]."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


def build(
    width: int = 256,
    layers: int = 6,
    heads: int = 4,
    context: int = 128,
    dropout: float = 0.0,
    tied: bool = False,
    batch: int = 8,
) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """The factory: a fresh module, and a batch of the shape it is called with."""
    tokens = torch.randint(BYTES, (batch, context + 1), generator=torch.Generator().manual_seed(0))
    return GPT(width, layers, heads, context, dropout, tied), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@torch.no_grad()
def sample(
    module: GPT,
    prompt: str = "def ",
    length: int = 400,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """The prompt and the `length` bytes that the model writes after it; temperature 0 takes the likeliest byte."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt.encode()) or [ord("\n")]
    was_training = module.training
    module.eval()
    for _ in range(length):
        logits = module.logits(torch.tensor([text[-module.context :]]))[0, -1].float()
        if temperature == 0:
            text.append(int(logits.argmax()))
            continue
        best, bytes_ = logits.topk(min(top_k, BYTES))
        chosen = torch.multinomial(torch.softmax(best / temperature, 0), 1, generator=generator)
        text.append(int(bytes_[chosen]))
    module.train(was_training)
    return bytes(text).decode("utf-8", errors="replace")
