"""Families of models that people train, small and with random weights, to verify plans on.

Hugging Face's own classes, unmodified, and plain PyTorch; nothing here knows Paceline.
"""

from __future__ import annotations

from paceline.bench.families.family import Family
from paceline.bench.families.language import LANGUAGE
from paceline.bench.families.plain import PLAIN
from paceline.bench.families.translation import TRANSLATION
from paceline.bench.families.vision import VISION

FAMILIES: tuple[Family, ...] = (*LANGUAGE, *TRANSLATION, *VISION, *PLAIN)


def family_of(name: str) -> Family:
    """Return the family of that name."""
    return next(family for family in FAMILIES if family.name == name)
