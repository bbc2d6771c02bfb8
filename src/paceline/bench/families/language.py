"""Language models of Hugging Face, unmodified: decoders, encoders with padding and masked labels, and a state space."""

from __future__ import annotations

from typing import Any

import torch

from paceline.bench.families.family import TIME, WORDS, Built, Family, tokens

_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED: dict[str, Any] = {**_SIZES, "num_attention_heads": 8, "num_key_value_heads": 4}
_SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def gpt2() -> Built:
    """Fused queries, keys and values; tied embeddings; dropout on."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=TIME, **_SPECIAL)
    return GPT2LMHeadModel(config), _next_tokens()


def gpt_neox() -> Built:
    """Queries, keys and values interleaved by head; rotary; attention beside the perceptron."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(vocab_size=WORDS, max_position_embeddings=TIME, **_SIZES, **_SPECIAL)
    return GPTNeoXForCausalLM(config), _next_tokens()


def llama() -> Built:
    """Grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **_GROUPED, **_SPECIAL)), _next_tokens()


def qwen3() -> Built:
    """Grouped queries; queries and keys normalised by head; heads wider than the model has features for."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(vocab_size=WORDS, head_dim=8, **_GROUPED, **_SPECIAL)), _next_tokens()


def mistral() -> Built:
    """Grouped queries; attention in a sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(vocab_size=WORDS, sliding_window=8, **_GROUPED, **_SPECIAL)
    return MistralForCausalLM(config), _next_tokens()


def gemma() -> Built:
    """One key and value head in four; tied embeddings, scaled."""
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(vocab_size=WORDS, head_dim=8, **_GROUPED, **_SPECIAL)), _next_tokens()


def phi() -> Built:
    """Biases everywhere; rotary on half of each head; attention beside the perceptron."""
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(PhiConfig(vocab_size=WORDS, **_SIZES, **_SPECIAL)), _next_tokens()


def phi3() -> Built:
    """Queries, keys and values fused though of unequal sizes; gate and up fused too."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(vocab_size=WORDS, **_GROUPED, **_SPECIAL)), _next_tokens()


def mixtral() -> Built:
    """Four experts of which each token takes two.

    The experts as one batched product, which Transformers offers by name. Of its other ways, one has shapes that depend
    on the data, and the default's grouped product is not there in float64.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    experts: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "experts_implementation": "batched_mm",
    }
    config = MixtralConfig(vocab_size=WORDS, **experts, **_GROUPED, **_SPECIAL)
    return MixtralForCausalLM(config), _next_tokens()


def mamba() -> Built:
    """A state space; without its kernels for GPUs the scan is a loop over time."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        time_step_rank=4,
        use_cache=False,
        **_SPECIAL,
    )
    return MambaForCausalLM(config), _next_tokens()


def bert() -> Built:
    """Padding, unequal numbers of labels per sample, dropout on."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=TIME, **_SIZES)), _masked_tokens()


def roberta() -> Built:
    """Positions counted from the tokens that are no padding; dropout on."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(vocab_size=WORDS, max_position_embeddings=TIME + 8, **_SIZES, **_SPECIAL)
    return RobertaForMaskedLM(config), _masked_tokens()


def deberta() -> Built:
    """DeBERTa-v2: attention by content and by relative position, which are gathered; dropout on."""
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    relative: dict[str, Any] = {
        "relative_attention": True,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    }
    config = DebertaV2Config(vocab_size=WORDS, max_position_embeddings=TIME, **relative, **_SIZES)
    return DebertaV2ForMaskedLM(config), _masked_tokens()


def _next_tokens() -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def _masked_tokens() -> dict[str, Any]:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    labels = ids.clone()
    labels[1::2, ::2] = -100
    return {
        "input_ids": torch.where(mask == 1, ids, _SPECIAL["pad_token_id"]),
        "attention_mask": mask,
        "labels": labels,
    }


LANGUAGE = (
    Family("gpt2", "GPT2LMHeadModel", gpt2, has_time=True),
    Family("gpt-neox", "GPTNeoXForCausalLM", gpt_neox, has_time=True),
    Family("llama", "LlamaForCausalLM", llama, has_time=True),
    Family("qwen3", "Qwen3ForCausalLM", qwen3, has_time=True),
    Family("mistral", "MistralForCausalLM", mistral, has_time=True),
    Family("gemma", "GemmaForCausalLM", gemma, has_time=True),
    Family("phi", "PhiForCausalLM", phi, has_time=True),
    Family("phi3", "Phi3ForCausalLM", phi3, has_time=True),
    Family("mixtral", "MixtralForCausalLM", mixtral, has_time=True),
    Family("mamba", "MambaForCausalLM", mamba, has_time=True),
    Family("bert", "BertForMaskedLM", bert, has_time=True),
    Family("roberta", "RobertaForMaskedLM", roberta, has_time=True),
    Family("deberta", "DebertaV2ForMaskedLM", deberta, has_time=True),
)
