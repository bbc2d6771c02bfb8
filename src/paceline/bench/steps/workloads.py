"""The models whose steps are predicted and measured: those of other benchmarks, and two more of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import nn

from paceline.bench.workloads import VOCABULARY, Batch, Scale, Workload, adamw, workload
from paceline.bench.workloads import Model as Trained


class Model(StrEnum):
    """What is trained."""

    GPT = "gpt"
    GPT2 = "gpt2"
    LLAMA = "llama"
    RESNET = "resnet"
    BERT = "bert"


def workload_of(model: Model, scale: Scale) -> Workload:
    """Return a model at a scale."""
    own: dict[Model, Callable[[bool], Workload]] = {Model.GPT2: _gpt2, Model.BERT: _bert}
    return own[model](scale is Scale.TINY) if model in own else workload(Trained(model.value), scale)


def _gpt2(tiny: bool) -> Workload:
    width, layers, heads, time, batch = (32, 2, 2, 16, 4) if tiny else (256, 6, 8, 128, 8)

    def build() -> tuple[nn.Module, Batch]:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            n_positions=time,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        tokens = torch.randint(VOCABULARY, (batch, time))
        return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}

    title = f"Hugging Face GPT-2, width {width}, {layers} layers, {time} tokens, batch {batch}, AdamW"
    return Workload(title, build, lambda module: list(module.get_submodule("transformer.h").children()), adamw)


def _bert(tiny: bool) -> Workload:
    width, layers, heads, time, batch = (32, 2, 2, 16, 4) if tiny else (256, 4, 4, 128, 8)
    words = VOCABULARY if tiny else 8192

    def build() -> tuple[nn.Module, Batch]:
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=time,
        )
        tokens = torch.randint(words, (batch, time))
        return BertForMaskedLM(config).train(), {"input_ids": tokens, "labels": tokens}

    title = f"Hugging Face BERT, width {width}, {layers} layers, {words} words, {time} tokens, batch {batch}, AdamW"
    return Workload(title, build, lambda module: list(module.get_submodule("bert.encoder.layer").children()), adamw)
