"""Memory in virtual time: which storages are alive while a rank runs its graphs, and when they take most.

A storage lives from the call that makes it until the last call that reads a tensor in it, as the executor frees what it
runs; views share one. What a rank holds beside (parameters, gradients, the optimizer's state, values that micro-batches
wait with) is held by name, so the peak says what it consists of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.simulator.placed.lifetimes import Lifetimes


class Held(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    BATCH = "batch"
    ACTIVATIONS = "activations"
    """Results of calls: what is kept for the backward pass, what is passed on, and what lives for a moment."""
    EXCHANGED = "exchanged"
    """Buckets, and what collectives and messages bring: gathered parameters too."""


@dataclass(frozen=True)
class Peak:
    """The most memory that a rank needs at once.

    Attributes:
        bytes: all of it.
        phase: of the step: `forward`, `backward`, `update`, or the action of a pipeline.
        module: the user's module that computes then; "" between modules.
        operator: which call allocates the last of it.
        parts: what it consists of.
        most: of each part, the most that there was at any time.
    """

    bytes: int = 0
    phase: str = ""
    module: str = ""
    operator: str = ""
    parts: dict[Held, int] = field(default_factory=dict)
    most: Mapping[Held, int] = field(default_factory=dict, compare=False)

    @property
    def resident(self) -> int:
        """Bytes that stay with ranks that share memory: what was once room for gradients and exchanges stays so."""
        kept = (Held.GRADIENTS, Held.EXCHANGED)
        return self.bytes + sum(self.most.get(part, 0) - self.parts.get(part, 0) for part in kept)


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory that is given back as one."""

    bytes: int
    held: Held


class Memory:
    """The memory of one rank.

    Attributes:
        live: bytes that are alive now.
        peak: the most there were.
    """

    def __init__(self) -> None:
        self.live = 0
        self._most: Counter[Held] = Counter()
        self.peak = Peak(most=self._most)
        self._holders: Counter[Storage] = Counter()
        self._parts: Counter[Held] = Counter()

    def hold(self, storage: Storage, *, phase: str = "", module: str = "", operator: str = "") -> Storage:
        """Hold a storage once more; memory is taken for it when nobody held it. Return it."""
        self._holders[storage] += 1
        if self._holders[storage] == 1:
            self.live += storage.bytes
            self._parts[storage.held] += storage.bytes
            self._most[storage.held] = max(self._most[storage.held], self._parts[storage.held])
            if self.live > self.peak.bytes:
                parts = {k: v for k, v in self._parts.items() if v}
                self.peak = Peak(self.live, phase, module, operator, parts, self._most)
        return storage

    def drop(self, storage: Storage) -> None:
        """Hold a storage once less; it is freed when nobody holds it."""
        self._holders[storage] -= 1
        if not self._holders[storage]:
            del self._holders[storage]
            self.live -= storage.bytes
            self._parts[storage.held] -= storage.bytes

    def drop_all(self, storages: Iterable[Storage]) -> None:
        """Hold each of them once less."""
        for storage in storages:
            self.drop(storage)

    def run(
        self, lifetimes: Lifetimes, inputs: Sequence[Storage], phase: str, *, outputs: Sequence[Held] = ()
    ) -> list[Storage]:
        """Run a graph; return the storages of its outputs, each of which is held once.

        Args:
            lifetimes: of what the graph makes.
            inputs: of its placeholders, in order; each was held once for this run, and is let go of after its last use.
            phase: what the run is to the user.
            outputs: what the first outputs are for, where they are made here; activations otherwise.
        """
        storages: dict[int, Storage] = dict(zip(lifetimes.given, inputs, strict=True))
        for birth in lifetimes.births:
            purpose = Held.EXCHANGED if birth.exchanged else Held.ACTIVATIONS
            if birth.output is not None and birth.output < len(outputs):
                purpose = outputs[birth.output]
            storages[birth.number] = Storage(birth.bytes, purpose)
        held = set(lifetimes.given)
        for moment in lifetimes.moments:
            for number in moment.made:
                held.add(number)
                self.hold(storages[number], phase=phase, module=moment.module, operator=moment.operator)
            for number in moment.freed:
                if number in held:
                    held.remove(number)
                    self.drop(storages[number])
        found = [storages[number] for number in lifetimes.outputs if number in storages]
        for storage in found:
            self.hold(storage, phase=phase)
        self.drop_all(storages[number] for number in held)
        return found
