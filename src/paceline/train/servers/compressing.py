"""What gradients go through on their way to servers, by the recipe's word."""

from __future__ import annotations

from paceline.exchange.client.outgoing import Compressor
from paceline.exchange.compress.feedback import Compression
from paceline.exchange.job import Job


def compressor_of(text: str, job: Job) -> Compressor | None:
    """Return what compresses the gradients of a worker; None where they go as they are.

    Raises:
        ExchangeError: there is no such codec.
    """
    if text == "none":
        return None
    return Compression.of(job, text)
