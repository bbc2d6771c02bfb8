"""All codecs, by the names that recipes have and the numbers that messages have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from paceline.errors import ExchangeError, nearest
from paceline.exchange.compress.blocks import Int8, OneBit
from paceline.exchange.compress.casts import BFloat16, Float16
from paceline.exchange.compress.codec import Codec, Identity
from paceline.exchange.compress.power import PowerSgd
from paceline.exchange.compress.top import SampledTopK, TopK

KINDS: Final[tuple[type[Codec], ...]] = (Identity, Float16, BFloat16, Int8, OneBit, TopK, SampledTopK, PowerSgd)
CODECS: Final[Mapping[str, type[Codec]]] = {kind.name: kind for kind in KINDS}
_BY_NUMBER: Final[Mapping[int, type[Codec]]] = {kind.number: kind for kind in KINDS}
_WITH_NUMBER: Final[Mapping[str, Callable[[str], Codec]]] = {
    TopK.name: lambda text: TopK(float(text)),
    SampledTopK.name: lambda text: SampledTopK(float(text)),
    PowerSgd.name: lambda text: PowerSgd(int(text)),
}


def parse(text: str) -> Codec:
    """Read `bfloat16`, `top_k(0.01)`, `power_sgd(4)`, ...

    Raises:
        ExchangeError: it is none of them.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*([^()]*?)\s*\))?\s*", text)
    name, number = (match[1], match[2]) if match else (text.strip(), None)
    kind = CODECS.get(name)
    if kind is None:
        raise ExchangeError(f"unknown compression '{text}'; known: {', '.join(CODECS)}.{nearest(name, CODECS)}")
    if number is None:
        return kind()
    if name not in _WITH_NUMBER:
        raise ExchangeError(f"{name} takes no number, and '{text}' gives it one; write {name}.")
    try:
        return _WITH_NUMBER[name](number)
    except ValueError:
        raise ExchangeError(f"cannot read the number of '{text}'; write it such as {kind()}.") from None


def decode(number: int, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return values of this shape and type, of what a codec of this number made.

    Raises:
        ExchangeError: there is no such codec, or what came does not fit.
    """
    kind = _BY_NUMBER.get(number)
    if kind is None:
        raise ExchangeError(f"there is no codec {number}; known: {', '.join(f'{k.number} {k.name}' for k in KINDS)}.")
    if len(tensors) != kind.tensors:
        raise ExchangeError(f"{len(tensors)} tensors came as {kind.name}; it makes {kind.tensors}.")
    return kind.decode(tensors, shape, dtype)
