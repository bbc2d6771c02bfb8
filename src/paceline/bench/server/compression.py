"""Codecs of gradients: how much smaller, how fast on one core, and on which links that is worth it.

Settings: `codecs` (by name, with their numbers, separated by semicolons), `codec_rows` and `codec_columns` of the
gradient, `codec_rounds`. Encoding includes error feedback. A codec is worth it on links slower than the bytes
that it saves divided by the seconds that it takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench import options as given
from paceline.bench.machine import one_thread
from paceline.bench.statistics import spread
from paceline.bench.table import quartiles
from paceline.exchange.compress.codec import Codec, Slot
from paceline.exchange.compress.names import parse

_DEFAULT: Final = (
    "float16",
    "bfloat16",
    "int8",
    "one_bit",
    "top_k(0.01)",
    "sampled_top_k(0.01)",
    "power_sgd(4)",
)


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    codecs: tuple[Codec, ...] = tuple(map(parse, _DEFAULT))
    codec_rows: int = 2048
    codec_columns: int = 2048
    codec_rounds: int = 10


def _codecs(_key: str, text: str) -> tuple[Codec, ...]:
    return tuple(parse(part) for part in text.split(";"))


READERS: Final[dict[str, given.Reader]] = {
    "codecs": _codecs,
    "codec_rows": partial(given.whole_number, least=1),
    "codec_columns": partial(given.whole_number, least=1),
    "codec_rounds": partial(given.whole_number, least=2),
}
KEYS: Final = tuple(READERS)


def run(options: dict[str, str]) -> dict[str, Any]:
    """Measure; return `compression`: by codec its ratio, its rates, and below what speed of the link it is worth it."""
    settings = given.settings_with(Settings(), options, READERS)
    with one_thread():
        times = _turns(settings)
    size = settings.codec_rows * settings.codec_columns * torch.float32.itemsize
    codecs = {name: _figures(size, *found) for name, found in times.items()}
    return {"compression": codecs, "settings": {"bytes": size, "rounds": settings.codec_rounds}}


def _turns(settings: Settings) -> dict[str, tuple[int, list[float], list[float]]]:
    """Return by codec the bytes made, and seconds of encoding with feedback and of decoding, round by round."""
    gradients = torch.randn(
        2, settings.codec_rows, settings.codec_columns, generator=torch.Generator().manual_seed(0)
    ).unbind()
    states = [(codec, Slot.of(gradients[0]), torch.zeros_like(gradients[0])) for codec in settings.codecs]
    found: dict[str, tuple[int, list[float], list[float]]] = {}
    for turn in range(settings.codec_rounds + 1):
        for codec, slot, left in states:
            began = time.thread_time()
            left.add_(gradients[turn % 2])
            made = codec.encode(left, slot)
            codec.take_off(left, made)
            encoded = time.thread_time()
            codec.decode(made, left.shape, left.dtype)
            decoded = time.thread_time()
            if turn == 0:  # a first call loads code and fills caches
                found[str(codec)] = (sum(x.nbytes for x in made), [], [])
                continue
            found[str(codec)][1].append(encoded - began)
            found[str(codec)][2].append(decoded - encoded)
    return found


def _figures(size: int, made: int, encode_s: Sequence[float], decode_s: Sequence[float]) -> dict[str, Any]:
    of_rounds = {
        "encode_mb_s": spread([size / 1e6 / one for one in encode_s]),
        "decode_mb_s": spread([size / 1e6 / one for one in decode_s]),
        "worth_below_mb_s": spread([(size - made) / 1e6 / (a + b) for a, b in zip(encode_s, decode_s, strict=True)]),
    }
    medians: dict[str, Any] = {key: one.median for key, one in of_rounds.items()}
    return {"ratio": size / made} | medians | {"spread": {key: one.to_json() for key, one in of_rounds.items()}}


def show(console: Console, result: dict[str, Any]) -> None:
    """Print what `run` returned."""
    found, settings = result["compression"], result["settings"]
    console.print(
        f"A gradient of {settings['bytes'] / 1e6:.1f} MB (float32), one core; {settings['rounds']} rounds. Rates are "
        "in bytes of the gradient; encoding with error feedback. Medians, quartiles in brackets.",
        highlight=False,
    )
    table = Table(title="compression", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for head in ("times\nsmaller", "encode, MB/s", "decode, MB/s", "worth it on links\nbelow, MB/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, one in found.items():
        rates = [quartiles(one["spread"][key], 1, 0) for key in ("encode_mb_s", "decode_mb_s", "worth_below_mb_s")]
        table.add_row(name, f"{one['ratio']:.1f}", *rates)
    console.print(table)
