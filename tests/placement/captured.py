"""Small models whose captured programs are run in float64, to see every operator call with true values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.placement.calls import call_of
from paceline.program.capture import capture
from paceline.program.program import InputRole, Program, holder
from tests.placement.oracle import Instance, instance

T, V = 8, 24


class Block(nn.Module):
    """A transformer block with fused queries, keys and values."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.view(*y.shape[:2], self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(x.shape[-1], 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, 16), nn.Embedding(T, 16)
        self.block, self.norm = Block(16, 4), nn.LayerNorm(16)
        self.head = nn.Linear(16, V, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.block(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, groups=4, padding=1),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.ConvTranspose2d(16, 8, 2, stride=2, groups=2),
            nn.InstanceNorm2d(8),
            nn.AvgPool2d(2),
            nn.Dropout2d(0.2),
            nn.Upsample(scale_factor=2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 4),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y, label_smoothing=0.1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.1, batch_first=True)
        self.gru = nn.GRU(8, 4, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0].square().mean()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.Softplus(), nn.Linear(16, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), x) + F.smooth_l1_loss(self.layers(x).softmax(-1), x.abs())


def _ids() -> Tensor:
    return torch.randint(0, V, (4, T))


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4,))}


def _language(name: str, **sizes: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        import transformers

        config = getattr(transformers, f"{name}Config")(
            vocab_size=V, bos_token_id=0, eos_token_id=1, pad_token_id=2, **sizes
        )
        kind = {"Bert": "AutoModelForMaskedLM", "T5": "AutoModelForSeq2SeqLM"}.get(name, "AutoModelForCausalLM")
        ids = _ids()
        return getattr(transformers, kind).from_config(config), {"input_ids": ids, "labels": ids}

    return build


def _vision(name: str, **sizes: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        import transformers

        config = getattr(transformers, f"{name}Config")(**sizes)
        return transformers.AutoModelForImageClassification.from_config(config), _images()

    return build


HUGGING_FACE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": _language("GPT2", n_embd=16, n_layer=1, n_head=4, n_positions=T),
    "llama": _language(
        "Llama",
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
    ),
    "bert": _language("Bert", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4),
    "t5": _language("T5", d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, decoder_start_token_id=2),
    "vit": _vision(
        "ViT",
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    ),
    "resnet": _vision("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    "convnext": _vision("ConvNext", num_stages=2, hidden_sizes=[8, 16], depths=[1, 1]),
}
PLAIN: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt": lambda: (Gpt(), (_ids(),)),
    "cnn": lambda: (Cnn(), (torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4,)))),
    "recurrent": lambda: (Recurrent(), (torch.randn(4, 4, 8),)),
    "mlp": lambda: (Mlp(), (torch.randn(4, 8),)),
}
MODELS = PLAIN | HUGGING_FACE


def calls_of(name: str) -> Iterator[Instance]:
    """Capture a model and run its program; yield each operator call that differs from the ones before."""
    torch.manual_seed(0)
    module, batch = MODELS[name]()
    module.double().train()
    batch = {k: _double(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(map(_double, batch))
    program = capture(module, batch)
    recorder = _Recorder(program)
    recorder.run(*_values(program, module, batch), enable_io_processing=False)
    yield from recorder.seen.values()


def _values(program: Program, module: nn.Module, batch: Any) -> Iterator[Tensor]:
    """Inputs of a program; parameters are random, so that no bias is 0 and no scale 1."""
    given = {str(k): v for k, v in (batch.items() if isinstance(batch, dict) else enumerate(batch))}
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    for item in program.inputs:
        match item.role:
            case InputRole.PARAMETER:
                yield torch.randn_like(state[item.name]) * 0.5
            case InputRole.BUFFER:
                yield state[item.name].detach()
            case InputRole.BATCH:
                yield given[item.name]
            case InputRole.TANGENT:
                yield torch.full((), 3.0, dtype=torch.float64)


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


class _Recorder(torch.fx.Interpreter):
    """Runs a program in float64 throughout, and keeps each distinct call."""

    def __init__(self, program: Program) -> None:
        super().__init__(holder(program.constants), graph=program.graph)
        self.seen: dict[str, Instance] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op != "call_function" or n.target is operator.getitem or n.meta.get("val") is None:
            return super().run_node(n)
        args, kwargs = torch.utils._pytree.tree_map(_widen, self.fetch_args_kwargs_from_env(n))
        made = instance(n.target, *args, **kwargs)
        described = call_of(n)
        assert described.inputs == made.call.inputs and described.outputs == made.call.outputs, n.format_node()
        assert described.arguments.keys() == made.call.arguments.keys()
        self.seen.setdefault(f"{n.target} {made.call.inputs} {made.call.dtypes} {made.call.arguments}", made)
        return made.results if isinstance(n.meta["val"], (list, tuple)) else made.results[0]


def _widen(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return value.double() if isinstance(value, Tensor) and value.dtype is torch.float32 else value
