"""Models of images of Hugging Face, unmodified."""

from __future__ import annotations

from typing import Any

import torch

from paceline.bench.families.family import BATCH, LABELS, SIDE, TIME, WORDS, Built, Family, classes, images, tokens

_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_LABELS: dict[str, Any] = {"num_labels": LABELS}


def vit() -> Built:
    """Patches as tokens, and one more for the class: their number is odd."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=SIDE, patch_size=8, **_LABELS, **_SIZES)
    return ViTForImageClassification(config), {"pixel_values": images(), "labels": classes()}


def swin() -> Built:
    """Attention in windows that shift; patches merged in fours; whole samples dropped from branches."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=SIDE, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[4, 4], window_size=2, **_LABELS
    )
    return SwinForImageClassification(config), {"pixel_values": images(), "labels": classes()}


def convnext() -> Built:
    """Wide depthwise convolutions; layer norm over channels."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(num_stages=2, hidden_sizes=[16, 32], depths=[1, 1], **_LABELS)
    return ConvNextForImageClassification(config), {"pixel_values": images(), "labels": classes()}


def resnet() -> Built:
    """Batch norm; a max pool with padding; convolutions of stride 2."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", **_LABELS)
    return ResNetForImageClassification(config), {"pixel_values": images(), "labels": classes()}


def segformer() -> Built:
    """Overlapping patches; keys and values of a smaller image; bilinear upsampling; a label per pixel."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[4, 4],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        **_LABELS,
    )
    labels = torch.randint(LABELS, (BATCH, SIDE, SIDE))
    return SegformerForSemanticSegmentation(config), {"pixel_values": images(), "labels": labels}


def clip() -> Built:
    """A text and an image encoder; the loss compares every text of the batch with every image."""
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config={
            "vocab_size": WORDS,
            "max_position_embeddings": TIME,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **_SIZES,
        },
        vision_config={"image_size": SIDE, "patch_size": 8, **_SIZES},
        projection_dim=16,
    )
    return CLIPModel(config), {"input_ids": tokens(), "pixel_values": images(), "return_loss": True}


VISION = (
    Family("vit", "ViTForImageClassification", vit, has_images=True),
    Family("swin", "SwinForImageClassification", swin, has_images=True),
    Family("convnext", "ConvNextForImageClassification", convnext, has_images=True),
    Family("resnet", "ResNetForImageClassification", resnet, has_images=True),
    Family("segformer", "SegformerForSemanticSegmentation", segformer, has_images=True),
    Family("clip", "CLIPModel", clip, has_time=True, has_images=True),
)
