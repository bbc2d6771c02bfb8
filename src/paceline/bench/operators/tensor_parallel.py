"""PyTorch's own tensor parallelism, set up as its tutorial does: a style for each layer, by its name.

https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html: column-wise and row-wise pairs, then sequence-parallel
norms, then a loss that is computed on split logits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from paceline.bench.operators.workloads import GPT

Styles = dict[str, ParallelStyle]


class Variant(Enum):
    """How far the tutorial is followed."""

    PAIRS = "column-wise and row-wise layers"
    LOSS = "the same, with loss_parallel"
    SEQUENCE = "the same, with SequenceParallel norms and loss_parallel"


def tensor_parallel(module: nn.Module, mesh: DeviceMesh, variant: Variant) -> nn.Module:
    """Split a GPT or a Llama over the ranks of a mesh of one dimension."""
    styles = _of_gpt(variant) if isinstance(module, GPT) else _of_llama(variant)
    return parallelize_module(module, mesh, styles)


def loss_and_backward(
    forward: Callable[[], Tensor], variant: Variant
) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """Return both passes, on split logits where the variant has them."""
    if variant is Variant.PAIRS:
        return forward, torch.Tensor.backward

    def loss() -> Tensor:
        with loss_parallel():
            return forward()

    def backward(value: Tensor) -> None:
        with loss_parallel():
            value.backward()  # type: ignore[no-untyped-call]  # untyped in torch

    return loss, backward


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters by the mesh they are on, because fused optimizers take no mixture of them."""
    groups = defaultdict(list)
    for parameter in module.parameters():
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def _of_gpt(variant: Variant) -> Styles:
    styles: Styles = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        **{f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"},
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.perceptron.up": ColwiseParallel(),
        "blocks.*.perceptron.down": RowwiseParallel(),
        "head": _head(variant),
    }
    if variant is Variant.SEQUENCE:
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        styles |= {
            "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "position": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
            "blocks.*.norm?": SequenceParallel(),
            "blocks.*.attention": whole,
            "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.perceptron": whole,
            "blocks.*.perceptron.down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
        }
    return styles


def _of_llama(variant: Variant) -> Styles:
    attention, perceptron = "model.layers.*.self_attn", "model.layers.*.mlp"
    styles: Styles = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"{attention}.{name}_proj": ColwiseParallel() for name in "qkv"},
        f"{attention}.o_proj": RowwiseParallel(),
        **{f"{perceptron}.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        f"{perceptron}.down_proj": RowwiseParallel(),
        "lm_head": _head(variant),
    }
    if variant is Variant.SEQUENCE:
        # Hugging Face's model reads lengths off the embeddings and names what it gives to attention, so that tensors
        # between layers have to be distributed ones, with the length of the whole sequence.
        split = partial(RowwiseParallel, output_layouts=Shard(1), use_local_output=False)
        styles |= {
            "model.embed_tokens": split(input_layouts=Replicate()),
            "model.layers.*.*_layernorm": SequenceParallel(),
            attention: PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
                use_local_output=True,
            ),
            f"{attention}.o_proj": split(),
            perceptron: PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            ),
            f"{perceptron}.down_proj": split(),
            "model.norm": SequenceParallel(),
        }
    return styles


def _head(variant: Variant) -> ParallelStyle:
    given = Shard(1) if variant is Variant.SEQUENCE else Replicate()
    if variant is Variant.PAIRS:
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel(input_layouts=given, output_layouts=Shard(-1), use_local_output=False)
