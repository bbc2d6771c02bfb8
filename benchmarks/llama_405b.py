"""What it takes to know a Llama of 405 billion parameters: seconds of the processor, and peak memory.

python benchmarks/llama_405b.py
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.cluster.files import load
from paceline.planner.machine_costs import costs_on
from paceline.planner.workload import workload_of_program
from paceline.program.repeated import capture_repeated
from paceline.program.without_data import build_without_data


def build() -> tuple[nn.Module, dict[str, Any]]:
    """The factory: for `paceline plan --model benchmarks/llama_405b.py:build`."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    tokens = torch.zeros(1, 8192, dtype=torch.long)
    return LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Print a line for each step."""
    costs = costs_on(load("dgx-h100"))
    began = time.process_time()
    module, batch = build_without_data(build, {}, 0)
    print(f"built without data: {time.process_time() - began:.1f} s")
    began = time.process_time()
    repeated = capture_repeated(module, batch)
    print(f"captured: {time.process_time() - began:.1f} s, {len(repeated.program.graph.nodes)} nodes")
    workload = workload_of_program(repeated, costs=costs)
    print(f"read as a workload: {time.process_time() - began:.1f} s")
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    for block in workload.blocks:
        print(f"{block.name} x {block.count}: {sum(float(piece.value) for piece in block.parameters) / 1e9:.2f}e9")


if __name__ == "__main__":
    main()
