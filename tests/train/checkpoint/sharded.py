"""A small real sharded module: tensors cut along mesh axes as any placement may cut them, with a real optimizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.placement.boxes import Box, Patch, patches
from paceline.placement.placements import REPLICATE, Placement, Shard, divides, local_shape
from paceline.plan import Mesh

SHAPES: dict[str, tuple[int, ...]] = {
    "emb.weight": (7, 6),
    "lin.weight": (5, 4, 3),
    "qkv.weight": (24, 4),
    "lin.bias": (5,),
    "scale": (),
    "half": (4, 3),
    "norm.mean": (5,),
    "norm.count": (),
    "cache": (3,),
}
DTYPES = {"half": torch.bfloat16, "norm.count": torch.int64}
BUFFERS = ("norm.mean", "norm.count", "cache")
STATE_NAMES = {name: name for name in SHAPES if name != "cache"} | {"head.weight": "emb.weight"}

SCALARS = {"step", "mu_product", "eta", "mu"}  # optimizer state of one element, the same on all ranks

Where = list[tuple[int, int]]  # (index, ranks) along each mesh axis
Layout = Callable[[str, tuple[int, ...], Where], tuple[tuple[Patch, ...], bool]]  # what a rank has, and whether it owns


def split(*dims: int | None) -> Layout:
    """Split along `dims`, one for each mesh axis, where the tensor has that dimension, into pieces of unequal sizes."""

    def layout(name: str, shape: tuple[int, ...], where: Where) -> tuple[tuple[Patch, ...], bool]:
        box, owner = Box.whole(shape), True
        for (place, size), dim in zip(where, dims[: len(where)], strict=True):
            if dim is None or dim >= len(shape) or name in BUFFERS:
                owner = owner and place == 0
                continue
            chunk = -(-box.shape[dim] // size)
            begin = min(place * chunk, box.shape[dim])
            length = min(chunk, box.shape[dim] - begin)
            offset, extent = list(box.offset), list(box.shape)
            offset[dim] += begin
            extent[dim] = length
            box = Box(tuple(offset), tuple(extent))
        return (Patch.single(box.offset, box.shape),), owner

    return layout


def placed(*rows: dict[str, Placement]) -> Layout:
    """Split by placements, by name for each mesh axis; "" is for every other tensor that can be split so."""

    def layout(name: str, shape: tuple[int, ...], where: Where) -> tuple[tuple[Patch, ...], bool]:
        local, found, owner = shape, [], True
        for (place, size), row in zip(where, rows, strict=True):
            placement = row.get(name, row.get("", REPLICATE))
            if not divides(local, placement, size):
                placement = REPLICATE
            local = local_shape(local, placement, size)
            found.append(placement)
            owner = owner and (isinstance(placement, Shard) or place == 0)
        return patches(shape, found, where), owner

    return layout


replicated = split(None, None)
ROWS = split(0, 0)


@dataclass(frozen=True)
class Piece:
    name: str
    rank: int
    tensor: Tensor
    is_parameter: bool
    shape: tuple[int, ...]
    patches: tuple[Patch, ...]
    owner: bool


class Sharded:
    def __init__(self, mesh: str, layout: Layout = ROWS, rank: int | None = None, seed: int = 0) -> None:
        self.mesh = Mesh.parse(mesh)
        self.ranks = tuple(range(self.mesh.size)) if rank is None else (rank,)
        self.state_names: Mapping[str, str] = STATE_NAMES
        self.layout = layout
        generator = torch.Generator().manual_seed(seed)
        whole = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
        whole["norm.count"] = torch.tensor(seed)
        self.pieces = [self._piece(name, rank, whole[name]) for rank in self.ranks for name in SHAPES]

    def shards(self) -> Iterator[Piece]:
        yield from self.pieces

    def parameters(self) -> list[nn.Parameter]:
        return [piece.tensor for piece in self.pieces if isinstance(piece.tensor, nn.Parameter)]

    def full(self, of: Callable[[Piece], Tensor] = lambda piece: piece.tensor) -> dict[str, Tensor]:
        """Put together what all ranks hold."""
        mine = [(piece.name, piece.patches, of(piece).detach().clone()) for piece in self.pieces if piece.owner]
        if len(self.ranks) < self.mesh.size:
            gathered: list[list] = [[] for _ in range(self.mesh.size)]
            dist.all_gather_object(gathered, mine)
            mine = [item for items in gathered for item in items]
        result: dict[str, Tensor] = {}
        for name, found, part in mine:
            whole = result.setdefault(name, torch.full(SHAPES[name], 77, dtype=part.dtype))
            for patch in found:
                whole[patch.whole.index] = part[patch.local.index]
        return result

    def full_state_dict(self) -> dict[str, Tensor]:
        whole = self.full()
        return {name: whole[source] for name, source in self.state_names.items()}

    def set_gradients(self, step: int) -> None:
        """Give every parameter a gradient that depends on step, name and place, not on the layout."""
        for piece in self.pieces:
            if isinstance(piece.tensor, nn.Parameter):
                generator = torch.Generator().manual_seed(1000 * step + len(piece.name))
                whole = torch.randn(piece.shape, generator=generator, dtype=torch.float64)
                piece.tensor.grad = cut(whole, piece.patches).to(piece.tensor.dtype)
            elif piece.name == "norm.count":
                piece.tensor.add_(1)

    def _piece(self, name: str, rank: int, whole: Tensor) -> Piece:
        where = [(index, self.mesh[axis]) for axis, index in self.mesh.coordinate(rank).items()]
        found, owner = self.layout(name, tuple(whole.shape), where)
        part = cut(whole, found)
        if name != "norm.count":
            part = part.to(DTYPES.get(name, torch.float32))
        tensor = part if name in BUFFERS else nn.Parameter(part)
        return Piece(name, rank, tensor, name not in BUFFERS, tuple(whole.shape), found, owner)


def cut(whole: Tensor, found: tuple[Patch, ...]) -> Tensor:
    """Put a piece together from the patches that it consists of."""
    last = found[-1].local
    piece = whole.new_empty([start + length for start, length in zip(last.offset, last.shape, strict=True)])
    for patch in found:
        piece[patch.local.index] = whole[patch.whole.index]
    return piece


def adamw(module: Sharded) -> torch.optim.AdamW:
    """Two groups, the second with the names first to last, the first with the rest."""
    named = [piece for piece in module.shards() if piece.is_parameter]
    decayed = [piece.tensor for piece in named if len(piece.shape) > 1]
    others = [piece.tensor for piece in named if len(piece.shape) <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def train(module: Sharded, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        module.set_gradients(step)
        optimizer.step()


def everything(module: Sharded, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All state that a checkpoint must bring back, whole."""
    whole = {name: value for name, value in module.full().items() if name != "cache"}
    keys = {key for state in optimizer.state.values() for key, value in state.items() if isinstance(value, Tensor)}
    for key in sorted(keys - SCALARS):
        parts = module.full(lambda piece, key=key: optimizer.state.get(piece.tensor, {}).get(key, piece.tensor))
        whole |= {f"{key} of {name}": value for name, value in parts.items() if name not in BUFFERS}
    for piece in module.shards():
        state = optimizer.state.get(piece.tensor, {})
        whole |= {f"{key} of {piece.name} on {piece.rank}": state[key].clone() for key in SCALARS & state.keys()}
    return whole


def assert_same(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Bit for bit; `step` may be on ranks that the other does not have, but must be equal on all."""
    merged = [{name.partition(" on ")[0]: value for name, value in some.items()} for some in (given, wanted)]
    assert merged[0].keys() == merged[1].keys()
    for name, value in given.items():
        other = merged[1][name.partition(" on ")[0]]
        assert value.dtype == other.dtype and torch.equal(value, other), name


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draws() -> list[float]:
    """Numbers from every generator; odd counts, so that the spare normal number is in play."""
    torch_draw = torch.rand(3).tolist()
    return [*torch_draw, random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
