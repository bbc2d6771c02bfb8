"""Working sets: of tables with more rows than fit, a replica holds the rows that its batch asks for.

A sparse table of the user's module is a parameter [rows, width] (or [rows]) that a tensor of the batch points into.
Here it becomes one of [capacity, width], and the batch's keys become positions in it, in the order in which they first
come. So keys may be any 64-bit numbers, and what the module sees has the shapes that it was captured with: the capacity
is fixed, and no batch of the captured size asks for more.

The module need not be built with room for all rows; one row will do. Knows the module and batches, no servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import ExchangeError, nearest
from paceline.exchange.interface import Rows
from paceline.exchange.table.route import unique_keys
from paceline.program.capture import Batch


class Taken(NamedTuple):
    """A batch, ready for the module.

    Attributes:
        batch: with positions in place of keys.
        keys: what each table is asked for, by its name: [n] int64, each once, padding left out.
    """

    batch: Batch
    keys: dict[str, Tensor]


class WorkingSet:
    """Some parameters of a module as working sets.

    The owner of a parameter may have a `padding_idx`, as `nn.Embedding` does. It must be 0: the key 0 then stands for
    nothing, its row is zeros, and it is neither read from servers nor updated.

    Args:
        module: the user's; the parameters named here are replaced in it.
        tables: the tensor of the batch that points into each parameter: its name, or for tuples its index.
        example: a batch of the largest size that will be taken.
        capacity: rows of each working set; as many as `example` has keys when left out, which always suffices.

    Raises:
        ExchangeError: a name is unknown, or what it names cannot be a sparse table.
    """

    def __init__(
        self,
        module: nn.Module,
        tables: Mapping[str, str | int],
        example: Batch,
        capacity: int | None = None,
    ) -> None:
        self.module = module
        self.tables = dict(tables)
        self._first: dict[str | int, int] = {}
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, key in self.tables.items():
            if name not in parameters:
                raise ExchangeError(
                    f"the module has no parameter '{name}' to be a sparse table.{nearest(name, parameters)}"
                )
            first = _first_position(module, name)
            if self._first.setdefault(key, first) != first:
                raise ExchangeError(
                    f"sparse tables that '{key}' points into must treat the key 0 alike: give all of them "
                    "padding_idx=0, or none."
                )
        self._rooms = {
            name: _replaced(module, name, (capacity or _of(example, key).numel()) + self._first[key])
            for name, key in self.tables.items()
        }

    @property
    def capacities(self) -> dict[str, int]:
        """Rows of each working set, that of padding included."""
        return {name: len(room) for name, room in self._rooms.items()}

    @property
    def widths(self) -> dict[str, int]:
        """Elements of a row of each table."""
        return {name: room.shape[1] for name, room in self._rooms.items()}

    def take(self, batch: Batch) -> Taken:
        """Return a batch for the module, and the keys whose rows it needs.

        Raises:
            ExchangeError: there are more different keys than room, or keys are no integers.
        """
        changed: dict[str | int, Tensor] = {}
        needed: dict[str | int, Tensor] = {}
        for key, first in self._first.items():
            needed[key], changed[key] = _positions(_of(batch, key), first, key)
        for name, key in self.tables.items():
            room = len(self._rooms[name]) - self._first[key]
            if len(needed[key]) > room:
                raise ExchangeError(
                    f"a batch has {len(needed[key])} different '{key}', and the working set of '{name}' has room for "
                    f"{room}; give it a larger capacity, or take smaller batches."
                )
        return Taken(_with(batch, changed), {name: needed[key] for name, key in self.tables.items()})

    @property
    def rooms(self) -> dict[str, Tensor]:
        """Whole working sets, as the module's parameters are until it is made parallel: [capacity, width]."""
        return dict(self._rooms)

    def room(self, taken: Taken, name: str) -> Tensor:
        """Return where the rows of a table belong that `taken` needs: [n, width], part of the module's parameter."""
        first = self._first[self.tables[name]]
        return self._rooms[name][first : first + len(taken.keys[name])]

    def fill(self, taken: Taken, rows: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None) -> None:
        """Put rows where the module finds them. Rows that were read straight into `room` need no filling.

        Args:
            taken: says which rows they are.
            rows: by table, in the order of `taken.keys`: [n, width].
            into: parameters by name, where these are not those of `module` any more.
        """
        for name, values in rows.items():
            parameter = self._rooms[name] if into is None else _as_rows(into[name].detach())
            first = self._first[self.tables[name]]
            parameter[first : first + len(values)].copy_(values)

    def gradients(self, taken: Taken, gradients: Mapping[str, Tensor] | None = None) -> dict[str, Rows]:
        """Return the gradients of the rows that `taken` asked for, by table; they share memory with those given.

        Args:
            taken: the batch they are of.
            gradients: of whole working sets, by parameter; by default `.grad` of the module's parameters.

        Raises:
            ExchangeError: a parameter has no gradient.
        """
        found = {}
        for name, keys in taken.keys.items():
            gradient = self.module.get_parameter(name).grad if gradients is None else gradients.get(name)
            if gradient is None:
                raise ExchangeError(
                    f"the sparse table '{name}' has no gradient: nothing of the batch led from it to the loss."
                )
            first = self._first[self.tables[name]]
            found[name] = Rows(keys, _as_rows(gradient)[first : first + len(keys)])
        return found


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _first_position(module: nn.Module, name: str) -> int:
    """Return the position of the least key: 1 where the first row is padding."""
    padding = getattr(_owner(module, name)[0], "padding_idx", None)
    if padding is None:
        return 0
    if padding != 0:
        raise ExchangeError(f"'{name}' has padding_idx={padding}; of a sparse table it is 0, or there is none.")
    return 1


def _replaced(module: nn.Module, name: str, rows: int) -> Tensor:
    """Give the module a parameter of `rows` rows in place of the one named; return its values as [rows, width]."""
    owner, leaf = _owner(module, name)
    old = getattr(owner, leaf)
    if old.dim() not in (1, 2):
        raise ExchangeError(f"'{name}' has the shape {list(old.shape)}; a sparse table is [rows, width] or [rows].")
    new = nn.Parameter(torch.zeros(rows, *old.shape[1:], dtype=old.dtype, device=old.device))
    setattr(owner, leaf, new)
    return _as_rows(new.detach())


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor[:, None]


def _positions(keys: Tensor, first: int, name: str | int) -> tuple[Tensor, Tensor]:
    """Return the different keys, and the position of each given one. keys: any shape -> [n], that shape."""
    if keys.is_floating_point() or keys.dtype == torch.bool:
        raise ExchangeError(f"'{name}' of the batch points into a sparse table and is {keys.dtype}; keys are int64.")
    different, positions = unique_keys(keys.reshape(-1).long().cpu())
    if first and not (real := different != 0).all():
        positions = torch.where(real, torch.cumsum(real, 0), 0)[positions]
        different = different[real]
    elif first:
        positions += first
    return different, positions.view(keys.shape).to(keys.device)


def _of(batch: Batch, key: str | int) -> Tensor:
    try:
        found = batch[key]  # type: ignore[index]  # a key that does not fit is what the next line is for
    except (KeyError, IndexError, TypeError):
        known = list(batch) if isinstance(batch, Mapping) else list(range(len(batch)))
        hint = nearest(str(key), map(str, known))
        raise ExchangeError(
            f"the batch has no '{key}' to point into a sparse table; it has: {', '.join(map(str, known))}.{hint}"
        ) from None
    assert isinstance(found, Tensor)
    return found


def _with(batch: Batch, changed: Mapping[str | int, Tensor]) -> Batch:
    if isinstance(batch, Mapping):
        return {key: changed.get(key, value) for key, value in batch.items()}
    return tuple(changed.get(index, value) for index, value in enumerate(batch))
