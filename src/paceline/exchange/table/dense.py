"""A range of elements of a dense table, with what its rule keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from weakref import ref

import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.job import Rule
from paceline.exchange.table.choice import chosen
from paceline.exchange.table.implementation import Implementation
from paceline.exchange.table.rates import AtRate
from paceline.exchange.table.rules import RULES, rule_of
from paceline.exchange.table.steps import Steps

_COMPUTED: Final = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
"""In what type a table of a type is updated, and its state kept."""
VALUES, MASTER = "values", "master"


class Dense:
    """Elements in one flat tensor, updated all at once.

    Elements of 16 bits have a *master* copy of 32 bits that is updated, so that small updates are not lost.
    """

    def __init__(self, count: int, dtype: torch.dtype, rule: Rule, implementation: Implementation | None = None):
        """Begin with zeros; `fill` gives other values.

        Raises:
            ExchangeError: the rule is unknown, or not for dense tables; or the type is no floating-point number.
        """
        self._rule = rule_of(rule)
        if not self._rule.dense:
            known = ", ".join(name for name, kind in RULES.items() if kind.dense)
            raise ExchangeError(f"the update rule {rule.name} is for sparse tables; dense ones have {known}.")
        if dtype not in _COMPUTED:
            raise ExchangeError(f"a dense table is of {dtype}; it is one of {', '.join(map(str, _COMPUTED))}.")
        self.values = torch.zeros(count, dtype=dtype)
        """What there is, [count]; changed by the methods only, and another tensor after some of them."""
        self._lent: list[ref[Tensor]] = []
        computed = _COMPUTED[dtype]
        self._master = self.values if dtype == computed else torch.zeros(count, dtype=computed)
        self._elements = {name: torch.zeros(count, dtype=computed) for name in self._rule.elements}
        self._rows = {name: torch.zeros(1, dtype=computed) for name in self._rule.rows}
        self._steps = Steps(self._rule)
        computing, kind = implementation or chosen(), self._master.numpy().dtype
        self._update = AtRate(self._rule, lambda rule: computing.dense(rule, kind))
        self.fill(self.values)

    @property
    def memory_bytes(self) -> int:
        """What it takes."""
        tensors = [self.values, *self._elements.values(), *self._rows.values()]
        return sum(x.nbytes for x in tensors) + (self._master.nbytes if self._has_master else 0)

    def lend(self) -> Tensor:
        """Return the values as they are now, [count]: they stay so for as long as the caller keeps this very tensor.

        It is no copy; the next change makes one if the tensor is still there then.
        """
        lent = self.values.view(-1)
        self._lent = [*(other for other in self._lent if other() is not None), ref(lent)]
        return lent

    def fill(self, values: Tensor) -> None:
        """Begin with these values, of any type, [count], and with the state that the rule begins with."""
        self._leave_lent()
        self._master.copy_(self._checked(values))
        self._round()
        shape = (1, -1)
        self._rule.start(
            self._master.numpy().reshape(shape),
            [state.numpy().reshape(shape) for state in self._elements.values()],
            [state.numpy().reshape(shape) for state in self._rows.values()],
        )
        self._steps.forget()

    def update(self, gradient: Tensor, factor: float = 1.0) -> None:
        """Apply a gradient, [count], at `factor` times the rule's learning rate."""
        self._leave_lent()
        given = self._checked(gradient).to(self._master.dtype).contiguous()
        self._steps.advance()
        self._update(factor)(
            self._master.numpy(),
            given.numpy(),
            [state.numpy() for state in self._elements.values()],
            [state.numpy() for state in self._rows.values()],
            self._steps.tables,
        )
        self._round()

    def add(self, difference: Tensor) -> None:
        """Add to the values as they are, [count]; the state stays.

        Raises:
            ExchangeError: under FTRL, where values follow from the state.
        """
        self._rule.check_can_add()
        self._leave_lent()
        self._master.add_(self._checked(difference).to(self._master.dtype))
        self._round()

    def state(self) -> dict[str, Tensor]:
        """Return all that there is, by name; the tensors themselves. `values` is in the table's type."""
        own = {VALUES: self.values, **self._elements, **self._rows}
        return {**own, MASTER: self._master} if self._has_master else own

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state, which `state` of a table of the same kind returned.

        Raises:
            ExchangeError: it is not of this kind.
        """
        self._leave_lent()
        for name, mine in self.state().items():
            given = state.get(name)
            if given is None or given.shape != mine.shape or given.dtype != mine.dtype:
                is_there = "nothing" if given is None else f"{given.dtype} of {tuple(given.shape)}"
                raise ExchangeError(
                    f"the state of a dense table has {is_there} for '{name}', and {mine.dtype} of {tuple(mine.shape)} "
                    "is needed; it is of another job."
                )
            mine.copy_(given)
        self._steps.most_is(*self._rows.values())

    @property
    def _has_master(self) -> bool:
        return self._master is not self.values

    def _leave_lent(self) -> None:
        """Go on in a copy where somebody keeps the values."""
        if self._lent and any(lent() is not None for lent in self._lent):
            copy = self.values.clone()
            if not self._has_master:
                self._master = copy
            self.values = copy
        self._lent.clear()

    def _round(self) -> None:
        if self._has_master:
            self.values.copy_(self._master)

    def _checked(self, given: Tensor) -> Tensor:
        if given.shape != self.values.shape:
            raise ExchangeError(
                f"a dense table of {tuple(self.values.shape)} elements was given {tuple(given.shape)}; send it flat."
            )
        return given.detach()
