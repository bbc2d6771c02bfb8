"""Where a worker's ranks hold parameters: what was read goes from whole tensors to them, and gradients come back whole.

The ranks are in this process (`Here`), or each in one of its own (`Spread`): then the first one has the whole tensors,
and sends every other one just the boxes that it holds. No more than plain tensors goes between them.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.exchange.job import Job
from paceline.placement.boxes import Box
from paceline.placement.placements import Shape
from paceline.runtime.interface import ParallelModule
from paceline.runtime.state import Shard

Of: TypeAlias = Callable[[Shard], Tensor | None]
"""What is wanted of a piece: its values, or its gradient, which it may lack."""


class Pieces(ABC):
    """The parameters of a job on the ranks of a worker.

    Attributes:
        rooms: by table, the whole tensors that are read into; on other ranks than the first one only some.
        shards: by table, the pieces in this process.

    Args:
        module: from `paceline.parallelize`.
        user_module: which it was made from; its own parameters are rooms where they can be.
        job: what is kept.
        rooms: by name, what is read into in place of the parameters of `user_module`.
    """

    def __init__(
        self, module: ParallelModule, user_module: nn.Module, job: Job, rooms: Mapping[str, Tensor] | None = None
    ) -> None:
        numbers = {table.name: index for index, table in enumerate(job.tables)}
        given = {**dict(user_module.named_parameters()), **(rooms or {})}
        self.shards: dict[int, list[Shard]] = {index: [] for index in numbers.values()}
        for shard in module.shards():
            if shard.is_parameter and shard.name in numbers:
                self.shards[numbers[shard.name]].append(shard)
        self._given = {index: given[name].detach() for name, index in numbers.items()}
        self.rooms: dict[int, Tensor] = {}

    def is_parameter(self, table: int) -> bool:
        """Whether what is read arrives in the parameter itself, on the only rank that has it."""
        shards = self.shards[table]
        return len(shards) == 1 and shards[0].tensor.data_ptr() == self.rooms[table].data_ptr()

    @abstractmethod
    def hand_out(self, tables: Iterable[int]) -> None:
        """Hand what is in rooms on to the ranks; a collective."""

    @abstractmethod
    def gather(self, tables: Iterable[int], of: Of) -> dict[int, Tensor]:
        """Return whole tensors of what the ranks have now, zeros where they have nothing; a collective.

        They are not copies where they are whole in one place, and there are none on other ranks than the first one.
        """

    def _room(self, table: int) -> Tensor:
        given = self._given[table]
        if type(given) is not Tensor:  # one that FSDP2 has cut, under a fallback
            return torch.empty(given.shape, dtype=given.dtype)
        return given if given.device.type == "cpu" and given.is_contiguous() else given.cpu().contiguous()

    @torch.no_grad()
    def _cut(self, table: int) -> None:
        """Copy a room into the pieces that are here."""
        if not self.is_parameter(table):
            for shard in self.shards[table]:
                for patch in shard.patches:
                    shard.tensor[patch.local.index].copy_(self.rooms[table].view(shard.shape)[patch.whole.index])

    @torch.no_grad()
    def _joined(self, table: int, of: Of) -> Tensor:
        """Put together what is here."""
        every = self.shards[table]
        shards = [shard for shard in every if shard.owner] or every  # none on a rank that has copies only
        pieces = [of(shard) for shard in shards]
        if len(pieces) == 1 and pieces[0] is not None and _is_whole(shards[0]):
            return pieces[0].cpu().contiguous()
        whole = torch.zeros(self._given[table].shape, dtype=self._given[table].dtype)
        for shard, piece in zip(shards, pieces, strict=True):
            if piece is not None:
                for patch in shard.patches:
                    whole[patch.whole.index].copy_(piece[patch.local.index])
        return whole


class Here(Pieces):
    """All ranks are in this process."""

    def __init__(
        self, module: ParallelModule, user_module: nn.Module, job: Job, rooms: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(module, user_module, job, rooms)
        self.rooms = {table: self._room(table) for table in self.shards}

    def hand_out(self, tables: Iterable[int]) -> None:
        """See `Pieces`."""
        for table in tables:
            self._cut(table)

    def gather(self, tables: Iterable[int], of: Of) -> dict[int, Tensor]:
        """See `Pieces`."""
        return {table: self._joined(table, of) for table in tables}


class _Held(NamedTuple):
    """What a rank holds of a table: boxes of the whole, in its own order, and whether it is the one to tell of them."""

    owner: bool
    boxes: tuple[Box, ...]


class _Part(NamedTuple):
    """A box of a table in a message: its shape and type, and the tensor that it comes from or goes to, if any."""

    shape: Shape
    dtype: torch.dtype
    tensor: Tensor | None


class Spread(Pieces):
    """One rank is here, and the others are in processes of their own; all of them make one of these, together."""

    def __init__(
        self, module: ParallelModule, user_module: nn.Module, job: Job, rooms: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(module, user_module, job, rooms)
        self._rank = dist.get_rank()
        self._held = [_read(text) for text in _told(_written(self.shards))]
        self._common = {table for table in self.shards if all(self._is_whole_on(held, table) for held in self._held)}
        self.rooms = {table: self._room(table) for table in (self._common if self._rank else self.shards)}
        self._buffers: dict[torch.dtype, Tensor] = {}

    def _is_whole_on(self, held: Mapping[int, _Held], table: int) -> bool:
        return table in held and held[table].boxes == (Box.whole(self._given[table].shape),)

    def hand_out(self, tables: Iterable[int]) -> None:
        """See `Pieces`. What all ranks have whole is broadcast; of the rest each gets its boxes, in one message."""
        split = []
        for table in tables:
            if table in self._common:
                dist.broadcast(self.rooms[table], 0)
            else:
                split.append(table)
            if table in self.rooms:
                self._cut(table)
        if self._rank:
            self._receive(0, self._parts_here(split, lambda shard: shard.tensor))
            return
        for rank in range(1, len(self._held)):
            self._send(rank, self._parts_of(self.rooms, rank, split))

    def gather(self, tables: Iterable[int], of: Of) -> dict[int, Tensor]:
        """See `Pieces`. Of copies, those of the first rank that has them are sent."""
        tables = list(tables)
        split = [table for table in tables if table not in self._common]
        if self._rank:
            self._send(0, self._parts_here(self._owned(self._rank, split), of))
            return {}
        found = {table: self._joined(table, of) for table in tables}
        for rank in range(1, len(self._held)):
            self._receive(rank, self._parts_of(found, rank, self._owned(rank, split)))
        return found

    def _owned(self, rank: int, tables: Iterable[int]) -> list[int]:
        held = self._held[rank]
        return [table for table in tables if table in held and held[table].owner]

    def _parts_of(self, wholes: Mapping[int, Tensor], rank: int, tables: Iterable[int]) -> list[_Part]:
        """Return the parts of whole tensors that a rank holds."""
        return [
            _Part(box.shape, self._given[table].dtype, wholes[table].view(self._given[table].shape)[box.index])
            for table in tables
            if table in self._held[rank]
            for box in self._held[rank][table].boxes
        ]

    def _parts_here(self, tables: Iterable[int], of: Of) -> list[_Part]:
        """Return the same parts where they lie on this rank."""
        found = []
        for table in tables:
            for shard in self.shards[table]:
                piece = of(shard)
                for patch in shard.patches:
                    part = None if piece is None else piece.detach()[patch.local.index]
                    found.append(_Part(patch.whole.shape, self._given[table].dtype, part))
        return found

    @torch.no_grad()
    def _send(self, rank: int, parts: Sequence[_Part]) -> None:
        for buffer, views in self._messages(parts):
            for part, view in views:
                if part.tensor is None:
                    view.zero_()
                else:
                    view.copy_(part.tensor)
            dist.send(buffer, rank)

    @torch.no_grad()
    def _receive(self, rank: int, parts: Sequence[_Part]) -> None:
        for buffer, views in self._messages(parts):
            dist.recv(buffer, rank)
            for part, view in views:
                if part.tensor is not None:
                    part.tensor.copy_(view)

    def _messages(self, parts: Sequence[_Part]) -> Iterator[tuple[Tensor, list[tuple[_Part, Tensor]]]]:
        """Yield a message for each type: its memory, and the place of each part in it."""
        for dtype in dict.fromkeys(part.dtype for part in parts):
            own = [part for part in parts if part.dtype == dtype]
            sizes = [math.prod(part.shape) for part in own]
            if dtype not in self._buffers or self._buffers[dtype].numel() < sum(sizes):
                self._buffers[dtype] = torch.empty(sum(sizes), dtype=dtype)
            buffer = self._buffers[dtype][: sum(sizes)]
            places = [place.view(part.shape) for part, place in zip(own, torch.split(buffer, sizes), strict=True)]
            yield buffer, list(zip(own, places, strict=True))


def pieces_of(
    module: ParallelModule, user_module: nn.Module, job: Job, rooms: Mapping[str, Tensor] | None = None
) -> Pieces:
    """Return the parameters of a job on the ranks of a module; a collective where these are several processes."""
    return (Here if module.peers.alone else Spread)(module, user_module, job, rooms)


def _is_whole(shard: Shard) -> bool:
    return len(shard.patches) == 1 and shard.patches[0].whole == Box.whole(shard.shape)


def _written(shards: Mapping[int, Sequence[Shard]]) -> str:
    """Write down what this rank holds, for the others."""
    return json.dumps(
        {
            table: [shard.owner, [[patch.whole.offset, patch.whole.shape] for patch in shard.patches]]
            for table, held in shards.items()
            for shard in held
        }
    )


def _read(text: str) -> dict[int, _Held]:
    """Read what `_written` wrote."""
    return {
        int(table): _Held(owner, tuple(Box(tuple(offset), tuple(shape)) for offset, shape in boxes))
        for table, (owner, boxes) in json.loads(text).items()
    }


def _told(text: str) -> list[str]:
    """Return what every rank has to say, in the order of ranks; a collective."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()]))
    longest = max(int(size) for size in sizes)
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(padded, torch.cat([mine, mine.new_zeros(longest - mine.numel())]))
    return [held[: int(size)].numpy().tobytes().decode() for held, size in zip(padded, sizes, strict=True)]
