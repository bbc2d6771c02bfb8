"""What gradients go through on their way to servers, by the recipe's word.

Under `auto` the first worker of a run chooses, by the measured speed of its link, and writes down what: all workers and
a replay go by that.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from typing import Final

import torch

from paceline.exchange.client.outgoing import Compressor
from paceline.exchange.compress.choose import chosen, weigh
from paceline.exchange.compress.feedback import Compression
from paceline.exchange.directory import Directory
from paceline.exchange.interface import Exchange
from paceline.exchange.job import DenseTable, Job
from paceline.train.servers.recipe.section import AUTO

NONE: Final = "none"
_PULLS: Final = 4
_LEAST_BYTES: Final = 1 << 20
"""Below this a message takes its time however small it is."""

log = logging.getLogger("paceline")


def compressor_of(text: str, job: Job) -> Compressor | None:
    """Return what compresses the gradients of a worker; None where they go as they are.

    Raises:
        ExchangeError: there is no such codec.
    """
    return None if text == NONE else Compression.of(job, text)


def settled(text: str, directory: Directory, choose: Callable[[], str] = lambda: NONE) -> str:
    """Return the codec of a run: the recipe's, or what its first worker chose.

    Args:
        text: the recipe's word.
        directory: of the exchange.
        choose: is asked where the recipe leaves it open and nobody has chosen yet.
    """
    if text != AUTO:
        return text
    if not directory.codec.exists():
        draft = directory.codec.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"codec": choose()}), encoding="utf-8")
        try:
            os.link(draft, directory.codec)  # fails where another worker was first
        except FileExistsError:
            log.info("another worker chose how gradients are compressed")
        finally:
            draft.unlink()
    return str(json.loads(directory.codec.read_text(encoding="utf-8"))["codec"])


def choice(exchange: Exchange) -> str:
    """Return the codec by which a push of all dense tables takes least, on the link as reads show it.

    Args:
        exchange: nothing was pushed over it yet; it logs nothing.
    """
    tables = {n: table for n, table in enumerate(exchange.job.tables) if isinstance(table, DenseTable)}
    out = [torch.empty(table.shape, dtype=getattr(torch, table.dtype)) for table in tables.values()]
    if sum(values.nbytes for values in out) < _LEAST_BYTES:
        return NONE
    seconds = []
    for _ in range(_PULLS):
        began = time.perf_counter()
        exchange.pull(list(tables), out, clock=0)
        seconds.append(time.perf_counter() - began)
    rate = sum(values.nbytes for values in out) / min(seconds)
    best = chosen(weigh(rate, [table.shape for table in tables.values()]))
    log.info("servers are read at %.0f MB/s: gradients go as %s", rate / 1e6, best)
    return str(best.codec)
