"""Published dimensions of models that rows name without describing them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a Transformer, as its authors published them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int


# Touvron et al. 2023 (Llama 2); Grattafiori et al. 2024 (Llama 3), table 3; Brown et al. 2020 (GPT-3), table 2.1.
ARCHITECTURES = {
    "llama27b": Architecture(32, 4096, 32, 32, 11008, 32000),
    "llama213b": Architecture(40, 5120, 40, 40, 13824, 32000),
    "llama270b": Architecture(80, 8192, 64, 8, 28672, 32000),
    "llama38b": Architecture(32, 4096, 32, 8, 14336, 128256),
    "llama370b": Architecture(80, 8192, 64, 8, 28672, 128256),
    "llama3405b": Architecture(126, 16384, 128, 8, 53248, 128256),
    "gpt3175b": Architecture(96, 12288, 96, 96, 49152, 51200),
}


def architecture(model: str) -> Architecture | None:
    """Return the dimensions of the model of that name, None where it is not among those known.

    `Llama-3.1-8B`, `LLAMA3_8B` and `Llama 3.1 8b BF16` are the same.
    """
    name = re.sub(r"(?<=\d)\.1(?=\D)", "", model.lower())
    name = re.sub(r"[^a-z0-9]", "", name)
    for known, dimensions in ARCHITECTURES.items():
        if re.search(rf"{known}(?![0-9])", name):
            return dimensions
    return None
