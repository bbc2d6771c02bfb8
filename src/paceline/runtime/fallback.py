"""DDP and FSDP2 around a whole module: for what cannot be captured, and only when asked for.

It promises less than a placed program. Every rank calls the user's module on its part of the batch, and loss and
gradients are averages over ranks. That is the serial result where the loss is a mean over samples that all weigh the
same. It is not where ranks hold unequal numbers of valid tokens, where batch norm should see the global batch, or where
dropout should draw the masks of the serial module. The user's own module is wrapped, not a copy of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.placement.boxes import Patch
from paceline.placement.placements import REPLICATE, Placement
from paceline.placement.placements import Shard as ShardPlacement
from paceline.plan import Axis, Plan
from paceline.program.capture import LossOf
from paceline.runtime.fallback_kind import Fallback
from paceline.runtime.interface import ParallelModule, seeded
from paceline.runtime.peers import Peers
from paceline.runtime.planning import Startup
from paceline.runtime.state import Shard, Tree, check_state
from paceline.runtime.wrapping import Wrapped, ddp, fsdp2, unwrapped

_log = logging.getLogger(__name__)
_FSDP = Axis.FSDP.value


class FallbackModule(ParallelModule):
    """A module that runs as it is, under DDP or FSDP2. See the top of this file for what it does not promise.

    Under DDP each rank may take other branches. Under FSDP2 all ranks must call the same children of the module's
    outermost `ModuleList`s in the same order, for their parameters are gathered then; a parameter that no rank used has
    a gradient of zero there, not none. Buffers are those of rank 0.

    Args:
        module: the user's own; it is wrapped itself.
        plan: of its options, `zero_stage` and `bucket_bytes` are used; nothing is compiled.
        peers: the ranks, one in this process.
        fallback: what to wrap it in; it fits the mesh.
        autocast: run the forward pass under autocast to this dtype.
        reason: why the module was not captured, for the warning.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        peers: Peers,
        fallback: Fallback,
        *,
        autocast: torch.dtype | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(plan, peers)
        if peers.leads:
            _log.warning(_WARNING, fallback.value, reason)
        for tensor in (*module.parameters(), *module.buffers()):
            peers.broadcast(tensor.detach())
        first = {id(tensor): name for name, tensor in _named(module, remove_duplicate=True)}
        aliases = {name: first[id(tensor)] for name, tensor in _named(module, remove_duplicate=False)}
        self._state_names = {name: aliases[name] for name in module.state_dict(keep_vars=True) if name in aliases}
        self._buffer_names = {name: aliases[name] for name, _ in module.named_buffers(remove_duplicate=False)}
        self._kept = dict(module.named_buffers())
        self._wrapped = _wrap(_Loss(module, autocast), plan, self.ranks[0], fallback)
        self._sharded = (_FSDP,) if fallback is Fallback.FSDP2 and self.mesh.size > 1 else ()
        self._weight = 0.0
        tree = Tree()
        for name, original in aliases.items():
            held = self._wrapped.parameters.get(original)
            tree.hold(name, self._kept[original] if held is None else held.tensor)
        self._register([tree])
        module.train()

    @property
    def last_weight(self) -> float:
        """The number of samples of the last call, whatever the loss is a mean over."""
        return self._weight

    @property
    def startups(self) -> list[Startup]:
        """Nothing was planned."""
        return []

    def train(self, mode: bool = True) -> FallbackModule:
        """Set training or evaluation mode, of the user's module too."""
        super().train(mode)
        self._wrapped.user.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the average of the ranks' losses of a global batch, which every process is given whole."""
        index, count = self.input_shard
        return self._run(*_part((args, kwargs), index, count), split=True)

    def local(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the average of the ranks' losses of a global batch of which this process is given its part only."""
        return self._run(args, kwargs, split=True)

    def whole(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch that is too small to divide: every rank computes all of it."""
        return self._run(args, kwargs, split=False)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, split: bool) -> Tensor:
        index, count = self.input_shard if split else (0, 1)
        self._weight = float(_samples((args, kwargs)) * count)
        device = self._peers.devices[0]
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        self._share_buffers()
        with seeded(self._next_seed() + index):  # other samples, other dropout masks
            loss = self._wrapped.call(*args, **kwargs)
        self._keep_buffers()
        if self._peers.alone:
            return loss
        average: Tensor = _Average.apply(loss, self.mesh.size)  # type: ignore[no-untyped-call]  # untyped in torch
        return average

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Give every rank the buffers of rank 0, as DDP does: those that change saw other samples on each."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._kept.values() if not self._peers.alone else ():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_type.values():
            joined = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self._peers.broadcast(joined.view(torch.uint8))
            values = torch.split(joined, [buffer.numel() for buffer in buffers])
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value.view_as(buffer))

    @torch.no_grad()
    def _keep_buffers(self) -> None:
        """Take over buffers that the forward pass assigned anew: a buffer stays one tensor, which checkpoints hold.

        Raises:
            PlanError: the new one has another shape.
        """
        for name, original in self._buffer_names.items():
            kept, path = self._kept[original], name.rpartition(".")
            owner = self._wrapped.user.get_submodule(path[0])
            current = getattr(owner, path[2])
            if current is kept:
                continue
            if current.shape != kept.shape:
                raise PlanError(
                    f"the forward pass gave buffer '{name}' the shape {list(current.shape)} instead of "
                    f"{list(kept.shape)}; a buffer of a parallel module keeps its shape. Use a plain attribute instead."
                )
            kept.copy_(current)
            setattr(owner, path[2], kept)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before. A collective."""
        gradients = [p.grad for held in self._wrapped.parameters.values() if (p := held.tensor).grad is not None]
        norms = [norm.double() for norm in torch._foreach_norm(gradients)] if gradients else []
        square = torch.stack([torch.zeros((), dtype=torch.float64, device=self._peers.devices[0]), *norms]).square()
        (total,) = self._peers.executor.sum([square.sum()], self._sharded)
        norm = total.sqrt()
        if gradients:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].dtype))
        return norm.float()

    def placements(self, name: str) -> tuple[Placement, ...]:
        """Placement of a parameter or buffer along each mesh axis; FSDP2's pieces may be of unequal sizes."""
        split = name in self._wrapped.parameters and self._sharded
        return tuple(ShardPlacement(0) if split and axis == _FSDP else REPLICATE for axis in self.mesh.names)

    def shards(self) -> Iterator[Shard]:
        """Yield every piece of every parameter and buffer in this process."""
        (rank,) = self.ranks
        for name, held in self._wrapped.parameters.items():
            yield Shard(name, rank, held.tensor, True, held.shape, held.patches, held.owner)
        for name, buffer in self._kept.items():
            shape = tuple(buffer.shape)
            yield Shard(name, rank, buffer, False, shape, (Patch.all_of(shape),), rank == 0)

    @property
    def state_names(self) -> Mapping[str, str]:
        """Every name of the user's `state_dict()`, and the name of the shards that hold it."""
        return self._state_names

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the user's `state_dict()` of whole tensors, on the CPU of every rank. A collective."""
        self._share_buffers()
        whole = {}
        for name in dict.fromkeys(self._state_names.values()):
            held = self._wrapped.parameters.get(name)
            whole[name] = (self._kept[name] if held is None else held.whole()).detach().cpu().clone()
        return {name: whole[original] for name, original in self._state_names.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load whole tensors under the user's names, given on every rank.

        Raises:
            CheckpointError: names or shapes differ; nothing was changed.
        """
        shards = {shard.name: shard for shard in self.shards()}
        check_state(state, {name: shards[original].shape for name, original in self._state_names.items()})
        for name, original in self._state_names.items():
            shard = shards[original]
            for patch in shard.patches:
                shard.tensor[patch.local.index].copy_(state[name][patch.whole.index])


_WARNING = (
    "taking fallback='%s', as was asked for. It does not promise to equal the serial run: loss and gradients are "
    "averages over ranks whatever number of tokens each holds (a loss weighs its number of samples), batch norm sees a "
    "rank's own samples, dropout draws other masks, and nothing is compiled. The reason: %s"
)


def _wrap(root: LossOf, plan: Plan, rank: int, fallback: Fallback) -> Wrapped:
    if plan.mesh.size == 1:
        return unwrapped(root, rank)
    return (ddp if fallback is Fallback.DDP else fsdp2)(root, plan, rank)


class _Loss(LossOf):
    """Returns a tensor of its own, for FSDP2 hangs a hook on it that a view could lose."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs).clone()


class _Average(torch.autograd.Function):
    """Shows the average of the ranks' losses; the gradient stays that of this rank's, for the wrapper averages it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, ranks: int) -> Tensor:
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / ranks

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        return *tangents, None


def _named(module: nn.Module, *, remove_duplicate: bool) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from module.named_buffers(remove_duplicate=remove_duplicate)


def _samples(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of all its tensors.

    Raises:
        PlanError: they differ.
    """
    lengths = {leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim}
    if len(lengths) > 1:
        raise PlanError(
            f"the tensors of the batch have first dimensions of {', '.join(map(str, sorted(lengths)))}; under a "
            "fallback all of them begin with the batch dimension, for that is where they are split."
        )
    return lengths.pop() if lengths else 1


def _part(batch: Any, index: int, count: int) -> Any:
    """Return part `index` of `count` equal ones of a global batch.

    Raises:
        PlanError: it does not divide.
    """
    samples = _samples(batch)
    if samples % count:
        raise PlanError(
            f"a batch of {samples} samples cannot be split over {count} ranks; give a multiple of {count}, or compute "
            "it on all ranks with `whole`."
        )
    size = samples // count
    return pytree.tree_map_only(
        Tensor, lambda tensor: tensor.narrow(0, index * size, size) if tensor.ndim else tensor, batch
    )
