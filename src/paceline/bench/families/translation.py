"""Encoders with decoders of Hugging Face, unmodified: of text, and of sound."""

from __future__ import annotations

from typing import Any

import torch

from paceline.bench.families.family import BATCH, TIME, WORDS, Built, Family, tokens

_SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 2}
_SIZES: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


def t5() -> Built:
    """Relative positions as a bias of attention; padding; tied embeddings; dropout on."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=4, **_SPECIAL
    )
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    return T5ForConditionalGeneration(config), {"input_ids": ids, "attention_mask": mask, "labels": tokens()}


def bart() -> Built:
    """Learned positions; a bias of logits that is a buffer; tied embeddings; dropout on."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(vocab_size=WORDS, max_position_embeddings=TIME, **_SIZES, **_SPECIAL)
    return BartForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens()}


def whisper() -> Built:
    """Convolutions over time, one of stride 2, then an encoder and a decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=WORDS, num_mel_bins=8, max_source_positions=TIME, max_target_positions=TIME, **_SIZES, **_SPECIAL
    )
    sound = torch.randn(BATCH, 8, 2 * TIME)
    return WhisperForConditionalGeneration(config), {"input_features": sound, "labels": tokens()}


TRANSLATION = (
    Family("t5", "T5ForConditionalGeneration", t5, has_time=True),
    Family("bart", "BartForConditionalGeneration", bart, has_time=True),
    Family("whisper", "WhisperForConditionalGeneration", whisper, has_time=True),
)
