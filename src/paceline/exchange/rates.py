"""Learning rates of a job, clock by clock, in few bytes: all of its processes have the same numbers, to the bit.

What is kept are third differences of the numbers' bit patterns, compressed. Schedules are smooth or have few stairs, so
that a million rates are less than a megabyte. Plain values; numpy is loaded where rates are asked for.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

from paceline.errors import ExchangeError

_ORDER: Final = 3


@dataclass(frozen=True)
class Rates:
    """How many times its `lr` a rule's learning rate is, by clock; the last number stays. Without any it is 1.

    Attributes:
        packed: the numbers, as `of` writes them.
    """

    packed: str = ""

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """Keep some numbers."""
        if not numbers:
            return cls()
        import numpy as np

        bits = np.array(numbers, dtype="<f8").view("<i8")
        for _ in range(_ORDER):
            bits = np.diff(bits, prepend=np.zeros(1, dtype="<i8"))
        return cls(base64.b64encode(zlib.compress(bits.tobytes())).decode("ascii"))

    @cached_property
    def numbers(self) -> Sequence[float]:
        """All of them.

        Raises:
            ExchangeError: it is not what `of` writes.
        """
        if not self.packed:
            return ()
        import numpy as np

        try:
            bits = np.frombuffer(zlib.decompress(base64.b64decode(self.packed, validate=True)), dtype="<i8")
        except (binascii.Error, zlib.error, ValueError) as error:
            raise ExchangeError(f"the learning rates of the job cannot be read: {error}.") from error
        for _ in range(_ORDER):
            bits = np.cumsum(bits, dtype="<i8")
        return array("d", bits.view("<f8").astype("=f8").tobytes())

    def at(self, clock: int) -> float:
        """Return the number of a clock."""
        numbers = self.numbers
        return numbers[min(clock, len(numbers) - 1)] if numbers else 1.0
