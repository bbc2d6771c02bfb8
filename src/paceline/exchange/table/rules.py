"""Update rules by name: what a gradient does to a parameter, their options, and what they keep beside a parameter.

A rule works on rows: values [n, width], with *element state* of the same shape and *row state* [n, 1]. A dense range is
one row. The formulas here are the portable implementation; `native/rules.hpp` has them in the same order of operations,
so that both give the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ExchangeError, nearest
from paceline.exchange.job import Rule

Array: TypeAlias = NDArray[np.floating[Any]]

LANES: Final = 8
"""A sum over a row adds columns that are equal modulo this, and then halves the sums until one is left."""


@dataclass(frozen=True)
class UpdateRule(ABC):
    """A rule with its options; the fields are the options, named as in PyTorch where it has the rule.

    Attributes:
        name: as recipes say it.
        summary: one line for `--help` and docs.
        elements: names of the state kept for each element.
        rows: names of the state kept for each row.
        dense: whether it is for dense tables too.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    elements: ClassVar[tuple[str, ...]] = ()
    rows: ClassVar[tuple[str, ...]] = ()
    dense: ClassVar[bool] = True

    lr: float = 0.01

    def check(self) -> None:
        """Check the options.

        Raises:
            ExchangeError: one is out of its range.
        """
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0:
                raise ExchangeError(f"{name} of the rule {self.name} is {value}; it is a finite number from 0.")

    def check_can_add(self) -> None:
        """Check that values may change by themselves.

        Raises:
            ExchangeError: they follow from the state.
        """
        return

    def at(self, factor: float) -> Self:
        """Return the rule at a learning rate of `factor` times its own; what it keeps is the same."""
        return replace(self, lr=self.lr * factor)

    @abstractmethod
    def constants(self) -> tuple[float, ...]:
        """Return the numbers of the formula, as native code wants them; rounded to the table's type there."""

    def tables(self, steps: int) -> tuple[NDArray[np.float64], ...]:
        """Return numbers that depend on a row's step, for steps 0 to `steps` or until they stay the same.

        They do not depend on the learning rate.
        """
        del steps
        return ()

    def start(self, values: Array, elements: Sequence[Array], rows: Sequence[Array]) -> None:
        """Fill the state of rows that have these values."""
        del values
        for state in (*elements, *rows):
            state[...] = 0

    def advance(self, gradient: Array, rows: Sequence[Array]) -> None:
        """Update the state of rows; comes before `move`."""
        del gradient, rows

    @abstractmethod
    def move(
        self, values: Array, gradient: Array, elements: Sequence[Array], rows: Sequence[Array], tables: Sequence[Array]
    ) -> None:
        """Update values and element state in place; whole rows, or some columns of them."""


@dataclass(frozen=True)
class Sgd(UpdateRule):
    """torch.optim.SGD without momentum."""

    name: ClassVar[str] = "sgd"
    summary: ClassVar[str] = "stochastic gradient descent"

    weight_decay: float = 0.0

    def constants(self) -> tuple[float, ...]:
        """See `UpdateRule`."""
        return self.lr, self.weight_decay

    def move(
        self, values: Array, gradient: Array, elements: Sequence[Array], rows: Sequence[Array], tables: Sequence[Array]
    ) -> None:
        """See `UpdateRule`."""
        lr, decay = _typed(values, self.constants())
        values -= lr * _decayed(gradient, values, decay)


@dataclass(frozen=True)
class Momentum(UpdateRule):
    """torch.optim.SGD with momentum; nesterov: 0 or 1."""

    name: ClassVar[str] = "momentum"
    summary: ClassVar[str] = "gradient descent along a decaying sum of gradients"
    elements: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.9
    nesterov: float = 0.0
    weight_decay: float = 0.0

    def check(self) -> None:
        """See `UpdateRule`."""
        super().check()
        _is_switch(self, "nesterov", self.nesterov)

    def constants(self) -> tuple[float, ...]:
        """See `UpdateRule`."""
        return self.lr, self.weight_decay, self.momentum, self.nesterov

    def move(
        self, values: Array, gradient: Array, elements: Sequence[Array], rows: Sequence[Array], tables: Sequence[Array]
    ) -> None:
        """See `UpdateRule`."""
        lr, decay, momentum, _ = _typed(values, self.constants())
        (total,) = elements
        gradient = _decayed(gradient, values, decay)
        total[...] = momentum * total + gradient
        values -= lr * (gradient + momentum * total) if self.nesterov else lr * total


@dataclass(frozen=True)
class Adagrad(UpdateRule):
    """torch.optim.Adagrad without lr_decay (Duchi, Hazan and Singer, 2011)."""

    name: ClassVar[str] = "adagrad"
    summary: ClassVar[str] = "each element at a rate that falls with its squared gradients so far"
    elements: ClassVar[tuple[str, ...]] = ("sum",)

    eps: float = 1e-10
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0

    def constants(self) -> tuple[float, ...]:
        """See `UpdateRule`."""
        return self.lr, self.weight_decay, self.eps, self.initial_accumulator_value

    def start(self, values: Array, elements: Sequence[Array], rows: Sequence[Array]) -> None:
        """See `UpdateRule`."""
        elements[0][...] = self.initial_accumulator_value

    def move(
        self, values: Array, gradient: Array, elements: Sequence[Array], rows: Sequence[Array], tables: Sequence[Array]
    ) -> None:
        """See `UpdateRule`."""
        lr, decay, eps, _ = _typed(values, self.constants())
        (total,) = elements
        gradient = _decayed(gradient, values, decay)
        total += gradient * gradient
        values -= lr * (gradient / (np.sqrt(total) + eps))


@dataclass(frozen=True)
class RowwiseAdagrad(UpdateRule):
    """Adagrad with one sum for a row, of the mean of its squared gradients (as in DLRM; Naumov et al., 2019)."""

    name: ClassVar[str] = "rowwise_adagrad"
    summary: ClassVar[str] = "Adagrad that keeps one number for a row"
    rows: ClassVar[tuple[str, ...]] = ("sum",)
    dense: ClassVar[bool] = False

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def constants(self) -> tuple[float, ...]:
        """See `UpdateRule`."""
        return self.lr, self.eps, self.initial_accumulator_value

    def start(self, values: Array, elements: Sequence[Array], rows: Sequence[Array]) -> None:
        """See `UpdateRule`."""
        rows[0][...] = self.initial_accumulator_value

    def advance(self, gradient: Array, rows: Sequence[Array]) -> None:
        """See `UpdateRule`."""
        (width,) = _typed(gradient, (gradient.shape[1],))
        rows[0][...] += _sums(gradient * gradient) / width

    def move(
        self, values: Array, gradient: Array, elements: Sequence[Array], rows: Sequence[Array], tables: Sequence[Array]
    ) -> None:
        """See `UpdateRule`."""
        lr, eps, _ = _typed(values, self.constants())
        values -= (lr / (np.sqrt(rows[0]) + eps)) * gradient


@dataclass(frozen=True)
class Adam(UpdateRule):
    """torch.optim.Adam (Kingma and Ba, 2015); a row has its own steps. decoupled_weight_decay: 0, or 1 as in AdamW."""

    name: ClassVar[str] = "adam"
    summary: ClassVar[str] = "moving means of gradients and of their squares; a row counts its own steps"
    elements: ClassVar[tuple[str, ...]] = ("mean", "square")
    rows: ClassVar[tuple[str, ...]] = ("step",)

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: float = 0.0

    def check(self) -> None:
        """See `UpdateRule`."""
        super().check()
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if value >= 1:
                raise ExchangeError(f"{name} of the rule adam is {value}; it is below 1.")
        _is_switch(self, "decoupled_weight_decay", self.decoupled_weight_decay)

    def constants(self) -> tuple[float, ...]:
        """See `UpdateRule`."""
        decoupled = bool(self.decoupled_weight_decay)
        decay, shrink = (0.0, 1 - self.lr * self.weight_decay) if decoupled else (self.weight_decay, 1.0)
        return self.lr, decay, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, self.eps, shrink

    def tables(self, steps: int) -> tuple[NDArray[np.float64], ...]:
        """Return the correction of the mean and the root of that of squares, by step.

        Powers by one multiplication after the other: `pow` is not the same in every C library.
        """
        first = np.cumprod(np.full(steps + 1, self.beta1))
        second = np.cumprod(np.full(steps + 1, self.beta2))
        ones = np.ones(1)
        corrections = [1 - np.concatenate([ones, powers[:-1]]) for powers in (first, second)]
        same = np.flatnonzero((corrections[0] == 1) & (corrections[1] == 1))
        end = int(same[0]) + 1 if same.size else steps + 1
        corrections = [correction[:end] for correction in corrections]
        corrections[0][0] = corrections[1][0] = 1  # step 0 is never asked for
        return corrections[0], np.sqrt(corrections[1])

    def advance(self, gradient: Array, rows: Sequence[Array]) -> None:
        """See `UpdateRule`. In float32 a step stays at 2^24, far beyond where corrections matter."""
        rows[0][...] += 1

    def move(
        self, values: Array, gradient: Array, elements: Sequence[Array], rows: Sequence[Array], tables: Sequence[Array]
    ) -> None:
        """See `UpdateRule`. What is of a step is computed in float64, and then rounded."""
        decay, keep1, take1, keep2, take2, eps, shrink = _typed(values, self.constants()[1:])
        mean, square = elements
        step = np.minimum(rows[0], len(tables[0]) - 1).astype(np.int64)
        rate, root = (self.lr / tables[0][step]).astype(values.dtype), tables[1][step].astype(values.dtype)
        gradient = _decayed(gradient, values, decay)
        if shrink != 1:
            values *= shrink
        mean[...] = keep1 * mean + take1 * gradient
        square[...] = keep2 * square + take2 * (gradient * gradient)
        values -= rate * (mean / (np.sqrt(square) / root + eps))


@dataclass(frozen=True)
class Ftrl(UpdateRule):
    """FTRL-Proximal (McMahan et al., 2013, algorithm 1), per coordinate; `lr` is its alpha.

    It begins where a parameter is, which need not be 0: `z` starts such that the formula gives that value.
    """

    name: ClassVar[str] = "ftrl"
    summary: ClassVar[str] = "follow the regularised leader: sparse weights by l1"
    elements: ClassVar[tuple[str, ...]] = ("z", "square")

    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def check(self) -> None:
        """See `UpdateRule`."""
        super().check()
        if not self.lr:
            raise ExchangeError("lr of the rule ftrl is 0; the formula divides by it: give a number above 0.")

    def check_can_add(self) -> None:
        """See `UpdateRule`."""
        raise ExchangeError(
            "values under the rule ftrl follow from its state, and nothing can be added to them; use another rule "
            "where differences are pushed, such as sgd."
        )

    def constants(self) -> tuple[float, ...]:
        """See `UpdateRule`."""
        return self.lr, self.beta, self.l1, self.l2

    def start(self, values: Array, elements: Sequence[Array], rows: Sequence[Array]) -> None:
        """See `UpdateRule`."""
        lr, beta, l1, l2 = _typed(values, self.constants())
        z, square = elements
        z[...] = np.where(values == 0, l1 * 0, -(values * (beta / lr + l2) + np.copysign(l1, values)))
        square[...] = 0

    def move(
        self, values: Array, gradient: Array, elements: Sequence[Array], rows: Sequence[Array], tables: Sequence[Array]
    ) -> None:
        """See `UpdateRule`."""
        lr, beta, l1, l2 = _typed(values, self.constants())
        z, square = elements
        before = np.sqrt(square)
        square += gradient * gradient
        root = np.sqrt(square)
        z += gradient - ((root - before) / lr) * values
        moved = (np.copysign(l1, z) - z) / ((beta + root) / lr + l2)
        values[...] = np.where(np.abs(z) <= l1, l1 * 0, moved)


RULES: Final[Mapping[str, type[UpdateRule]]] = {
    kind.name: kind for kind in (Sgd, Momentum, Adagrad, RowwiseAdagrad, Adam, Ftrl)
}


def rule_of(rule: Rule) -> UpdateRule:
    """Return the rule that a job names, with its options.

    Raises:
        ExchangeError: the rule or an option is unknown, or a number is out of its range.
    """
    kind = RULES.get(rule.name)
    if kind is None:
        raise ExchangeError(f"unknown update rule '{rule.name}'; known: {', '.join(RULES)}.{nearest(rule.name, RULES)}")
    known = [field.name for field in fields(kind)]
    for option in rule.options:
        if option not in known:
            raise ExchangeError(
                f"the update rule {rule.name} has no option '{option}'; it has {', '.join(known)}."
                f"{nearest(option, known)}"
            )
    made = kind(**{name: float(value) for name, value in rule.options.items()})
    made.check()
    return made


def _is_switch(rule: UpdateRule, name: str, value: float) -> None:
    if value not in (0, 1):
        raise ExchangeError(f"{name} of the rule {rule.name} is {value}; it is 0 (no) or 1 (yes).")


def _typed(like: Array, numbers: Sequence[float]) -> list[Any]:
    return [like.dtype.type(number) for number in numbers]


def _decayed(gradient: Array, values: Array, decay: Any) -> Array:
    return gradient + decay * values if decay else gradient


def _sums(terms: Array) -> Array:
    """Return the sum of each row, in the order that `LANES` says. terms: [n, width] -> [n, 1]."""
    lanes = np.zeros((len(terms), LANES), dtype=terms.dtype)
    for start in range(0, terms.shape[1], LANES):
        part = terms[:, start : start + LANES]
        lanes[:, : part.shape[1]] += part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes
