"""The model of a row: a dense Transformer's dimensions, from its columns, its published architecture or its source."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from paceline.bench.predictions.architectures import architecture
from paceline.bench.predictions.notes import Notes
from paceline.bench.predictions.practices import Practice
from paceline.bench.predictions.rows import Row, Unusable

_GATED = re.compile(r"llama|mistral|qwen|gemma")
# Words in the name of a model, or of the system, that tell what no dense Transformer in training is.
_UNLIKE = {
    "only a part of the parameters is trained": r"lora",
    "mixture of experts": r"moe|mixtral|deepseek|kimi|gpt.?oss|\d+b_a\d+b|a\d+b\b|nemotron.3|qwen3.next|expert",
    "encoder and decoder": r"\bm?t5\b",
    "several modalities": r"llava|mimo|vlm|clip",
    "state space": r"mamba|hybrid",
    "latent attention": r"_mla",
    "no Transformer": r"resnet|unet|u-net|amoebanet",
}
_BERT_WORDS = 30522


@dataclass(frozen=True)
class Model:
    """A Transformer, as `simulator.closed_form.transformer` describes it.

    Attributes:
        name: as the row has it.
        layers, hidden, heads, kv_heads, ffn, sequence, vocabulary, positions: sizes.
        gated, biases, causal, tied: see there.
        assumed: columns that nothing in the row or its model's publication fixes.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    sequence: int
    vocabulary: int
    positions: int
    gated: bool
    biases: bool
    causal: bool
    tied: bool
    assumed: tuple[str, ...]


def model_of(row: Row, practice: Practice, notes: Notes) -> Model:
    """Return the model of a row.

    Raises:
        Unusable: it is no dense Transformer, or too little of it is told.
    """
    _check_kind(row, notes)
    name = row.text("model").lower()
    published = architecture(name)

    def given(column: str, attribute: str, what: str = "") -> int:
        size = row.whole(column) or (getattr(published, attribute) if published else None)
        if size is None and what:
            raise Unusable(f"no {what}")
        return size or 0

    layers = given("n_layers", "layers", "layers")
    hidden = given("hidden", "hidden", "hidden size")
    heads = given("heads", "heads", "heads")
    sequence = row.whole("seq_len")
    if sequence is None:
        raise Unusable("no sequence length")
    if hidden % heads:
        raise Unusable("heads do not divide the hidden size")
    family = bool(_GATED.search(name))
    gated = notes.gated(family if practice.gated is None else practice.gated)
    ffn, vocabulary = given("ffn", "ffn"), given("vocab", "vocabulary")
    learned = notes.learned_positions(not family if practice.positions is None else practice.positions)
    parts = row.whole("tp") or 1
    pads = practice.pads and (parts > 1 or practice.pads_alone)
    words = vocabulary or (_BERT_WORDS if "bert" in name else practice.vocabulary)
    return Model(
        name=row.text("model"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=given("kv_heads", "kv_heads") or heads,
        ffn=ffn or (int(8 * hidden / 3 / 64) * 64 if gated else 4 * hidden),
        sequence=sequence,
        vocabulary=_padded(words, 128 * parts) if pads else words,
        positions=sequence if learned else 0,
        gated=gated,
        biases=notes.biases(not family if practice.biases is None else practice.biases),
        causal="bert" not in name,
        tied=notes.tied(not family if practice.tied is None else practice.tied),
        assumed=tuple(column for column, size in (("ffn", ffn), ("vocab", vocabulary)) if not size),
    )


def _check_kind(row: Row, notes: Notes) -> None:
    if (row.whole("ep") or 1) > 1 or notes.experts > 1:
        raise Unusable("mixture of experts")
    about = f"{row.text('model')} {row.text('system')}".lower()
    for reason, pattern in _UNLIKE.items():
        if re.search(pattern, about):
            raise Unusable(reason)


def _padded(words: int, multiple: int) -> int:
    return math.ceil(words / multiple) * multiple
