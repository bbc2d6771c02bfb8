"""A byte-level GPT: the model of the demo, and an example of a factory. Plain PyTorch; nothing here knows Paceline."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256
EARLIER = 3  # bytes before each one that are embedded with it: words begin to form before the first block


def rotary_tables(context: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding (RoFormer), [T, D/2] each, for heads of `width` D."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(context)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, H, T, D], turned by the angle of its position in D/2 planes."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, D]; position t sees the positions up to t."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)  # [B, H, T, D/H]
            for part in self.qkv(x).split(width, dim=2)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, D]."""
        x = x + self.drop(self.attention(self.norm1(x), cos, sin))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT(nn.Module):
    """`gpt(tokens, targets)` is the mean cross-entropy in nats per byte; targets of -100 count for nothing."""

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(BYTES, width)
        self.earlier = nn.ModuleList(nn.Embedding(BYTES, width) for _ in range(EARLIER))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        cos, sin = rotary_tables(context, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()
        if tied:
            self.token.weight = self.head.weight

    def _initialise(self) -> None:
        """Blocks begin near the identity and the embedding at the scale of the norms: quick where training is short."""
        for table in (self.token, *self.earlier):
            nn.init.normal_(table.weight, std=(1 + EARLIER) ** -0.5)
        nn.init.normal_(self.head.weight, std=0.02)
        for block in self.blocks:
            for first in (block.attention.qkv, block.up):
                nn.init.normal_(first.weight, std=first.in_features**-0.5)
            for last in (block.attention.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * len(self.blocks)) ** 0.5)
            nn.init.zeros_(block.up.bias)
            nn.init.zeros_(block.down.bias)

    def logits(self, tokens: Tensor) -> Tensor:
        """Of the byte that follows each: [B, T] -> [B, T, 256]."""
        time = tokens.shape[1]
        x = self.token(tokens)
        for back, table in enumerate(self.earlier, start=1):
            x = x + table(F.pad(tokens, (back, 0))[:, :time])
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, self.cos[:time], self.sin[:time])
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
) -> tuple[GPT, dict[str, Tensor]]:
    """The factory: a fresh module, and a batch as it is called with, `module(**batch)`."""
    tokens = torch.randint(BYTES, (batch, context + 1), generator=torch.Generator().manual_seed(0))
    module = GPT(width, layers, heads, context, dropout, tied)
    return module, {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


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
