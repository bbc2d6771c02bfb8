"""The local state of a module's ranks: shards of its parameters and buffers under the user's own names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError, nearest
from paceline.placement.boxes import Patch, patches
from paceline.placement.pieces import join
from paceline.placement.placements import REPLICATE, Placement, Shape
from paceline.placement.placements import Shard as Split
from paceline.plan import Mesh
from paceline.program.program import InputRole
from paceline.runtime.executor import local_piece
from paceline.runtime.hollow import Hollow
from paceline.runtime.peers import Peers
from paceline.runtime.step import PlacedInput


@dataclass(frozen=True)
class Shard:
    """A piece of a parameter or buffer that lives in this process.

    Attributes:
        name: the user's own name; tied tensors appear once, under their first name.
        rank: mesh rank that holds the piece.
        tensor: the piece itself, not a copy.
        is_parameter: parameter or buffer.
        shape: global shape.
        patches: the boxes of the global tensor that the piece consists of, and where it has them.
        owner: True on exactly one rank per distinct piece: the one to save it.
    """

    name: str
    rank: int
    tensor: Tensor
    is_parameter: bool
    shape: Shape
    patches: tuple[Patch, ...]
    owner: bool


class LocalState:
    """Parameters and buffers of the ranks in this process, cut from a module on rank 0.

    `modules` holds, for each rank here, a tree of plain modules shaped like the user's, with the local pieces. The only
    rank of a process takes the tensors of the module over: it shares what it has whole, and `hollow` gives back the
    memory of parameters of which it keeps a shard.

    Args:
        module: where the values come from.
        inputs: of a step, with the placements of parameters and buffers on `mesh`.
        aliases: further names of tied ones.
        mesh: which the ranks of `peers` are arranged on.
        peers: these ranks.
        hollow: gives memory back.
        keep: names of the parameters and buffers that are wanted here; None for all.
        takes_over: whether the tensors of the module may be kept; by default where there is one rank here.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[PlacedInput],
        aliases: Mapping[str, str],
        mesh: Mesh,
        peers: Peers,
        hollow: Hollow,
        *,
        keep: Collection[str] | None = None,
        takes_over: bool | None = None,
    ) -> None:
        self._mesh = mesh
        self._peers = peers
        self._placed = {
            placed.item.name: placed for placed in inputs if placed.item.role in (InputRole.PARAMETER, InputRole.BUFFER)
        }
        self._keep = self._placed.keys() if keep is None else keep
        self._aliases = aliases
        self.state_names = {name: aliases.get(name, name) for name in module.state_dict(keep_vars=True)}
        self.pieces: list[dict[str, Tensor]] = [{} for _ in peers.executor.ranks]
        self.modules = [Tree() for _ in peers.executor.ranks]
        self._cut(module, hollow, takes_over=len(self.pieces) == 1 if takes_over is None else takes_over)

    def _cut(self, module: nn.Module, hollow: Hollow, *, takes_over: bool) -> None:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in tensors.items():
            whole = tensor.detach()
            self._peers.broadcast(whole)
            if name not in self._keep:
                if takes_over and isinstance(tensor, nn.Parameter):
                    hollow.release(tensor)
                continue
            for position, rank in enumerate(self._peers.executor.ranks):
                piece = local_piece(whole, self._placed[name].placements, self.where(rank))
                piece = piece.to(self._peers.devices[position])
                is_whole = piece.shape == tensor.shape
                if takes_over and not is_whole and isinstance(tensor, nn.Parameter):
                    piece = self._peers.executor.lay_out(piece, self.sharded_axes(name))
                shares = piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                if shares and not (takes_over and is_whole):
                    piece = piece.clone()
                if isinstance(tensor, nn.Parameter):
                    piece = nn.Parameter(piece, requires_grad=tensor.requires_grad)
                    if takes_over and not is_whole:
                        hollow.release(tensor)
                self.pieces[position][name] = piece
        every = [*self.pieces[0], *(name for name, first in self._aliases.items() if first in self.pieces[0])]
        for tree, pieces in zip(self.modules, self.pieces, strict=True):
            for name in every:
                tree.hold(name, pieces[self._aliases.get(name, name)])

    def where(self, rank: int) -> list[tuple[int, int]]:
        """Return (index, ranks) of a rank along each axis, outermost first."""
        return [(index, self._mesh[axis]) for axis, index in self._mesh.coordinate(rank).items()]

    def placements(self, name: str) -> tuple[Placement, ...]:
        """Placement of a parameter or buffer along each axis, outermost first."""
        return self._placed[name].placements

    def shape(self, name: str) -> Shape:
        """Shape of a whole parameter or buffer."""
        return self._placed[name].shape

    def sharded_axes(self, name: str) -> tuple[str, ...]:
        """The axes along which a parameter is split."""
        pairs = zip(self._mesh.names, self._placed[name].placements, strict=True)
        return tuple(axis for axis, placement in pairs if placement != REPLICATE)

    def shards(self) -> Iterator[Shard]:
        """Yield every piece of every rank here."""
        for rank, pieces in zip(self._peers.executor.ranks, self.pieces, strict=True):
            for name, tensor in pieces.items():
                placed, where = self._placed[name], self.where(rank)
                found = patches(placed.shape, placed.placements, where)
                # Ranks along an axis that does not split the tensor hold copies, of which the first one counts.
                axes = zip(placed.placements, where, strict=True)
                owner = all(isinstance(placement, Split) or index == 0 for placement, (index, _) in axes)
                yield Shard(name, rank, tensor, isinstance(tensor, nn.Parameter), placed.shape, found, owner)

    def gathered(self) -> dict[str, Tensor]:
        """Return whole tensors on the CPU under all names of the user's `state_dict()`; a collective."""
        whole = {name: self.gather(name).cpu() for name in dict.fromkeys(self.state_names.values())}
        return {name: whole[original] for name, original in self.state_names.items()}

    def gather(self, name: str) -> Tensor:
        """Return a whole tensor that is kept here; a collective over the ranks of the mesh."""
        values = [pieces[name].detach() for pieces in self.pieces]
        placements = list(zip(self._mesh.names, self._placed[name].placements, strict=True))
        for axis, placement in reversed(placements):
            if placement != REPLICATE:
                values = [join(found, placement) for found in self._peers.executor.gather(values, axis)]
        return values[0].clone() if values[0].data_ptr() == self.pieces[0][name].data_ptr() else values[0]

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy whole tensors, given on every rank, into the pieces.

        Raises:
            CheckpointError: names or shapes differ; nothing was changed.
        """
        check_state(state, {name: self._placed[original].shape for name, original in self.state_names.items()})
        with torch.no_grad():
            for name, original in self.state_names.items():
                if original not in self.pieces[0]:
                    continue
                for rank, pieces in zip(self._peers.executor.ranks, self.pieces, strict=True):
                    placements = self._placed[original].placements
                    pieces[original].copy_(local_piece(state[name], placements, self.where(rank)))


def check_state(state: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> None:
    """Compare whole tensors with the names and shapes that a module has.

    Raises:
        CheckpointError: they differ.
    """
    wrong = [f"missing: {name}" for name in shapes if name not in state]
    wrong += [f"unexpected: {name}.{nearest(name, shapes)}" for name in state if name not in shapes]
    for name in shapes.keys() & state.keys():
        if tuple(state[name].shape) != shapes[name]:
            wrong.append(f"{name} has shape {tuple(state[name].shape)}, the module has {shapes[name]}")
    if wrong:
        raise CheckpointError("the state does not fit the module:\n  " + "\n  ".join(sorted(wrong)[:20]))


class Tree(nn.Module):
    """A module without a forward pass that only holds tensors under dotted names."""

    def hold(self, name: str, tensor: Tensor) -> None:
        """Register a parameter or buffer, and the modules on the way to it."""
        *path, leaf = name.split(".")
        here: nn.Module = self
        for part in path:
            if part not in here._modules:
                here.add_module(part, Tree())
            here = here.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            here.register_parameter(leaf, tensor)
        else:
            here.register_buffer(leaf, tensor)
