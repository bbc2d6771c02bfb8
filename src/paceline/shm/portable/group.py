"""A process group in pure Python over shared memory: slower than the native one, with the same meaning.

It needs Linux, and looks for what it needs when a group is constructed, not when this file is imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from paceline.shm.portable.calls import Flat, Place, Step
from paceline.shm.portable.messages import Messages
from paceline.shm.portable.peers import Peers
from paceline.shm.portable.rounds import Call, Rounds
from paceline.shm.portable.work import Lane, PortableWork

_Options = (
    c10d.BroadcastOptions
    | c10d.AllreduceOptions
    | c10d.ReduceOptions
    | c10d.AllgatherOptions
    | c10d.GatherOptions
    | c10d.ScatterOptions
    | c10d.ReduceScatterOptions
    | c10d.BarrierOptions
    | c10d.AllToAllOptions
)

# torch's stub gives most methods several signatures; only the one with lists and options ever reaches a subclass.
_ProcessGroup: Any = dist.ProcessGroup


class PortableGroup(_ProcessGroup):  # type: ignore[misc]  # see above
    """A process group of ranks on this host.

    Args:
        store: Where the ranks meet; of this group only.
        rank: Ours in the group.
        size: How many ranks there are.
        timeout: After it, a rank that has not arrived is an error that names it.
        global_ranks: For each rank of the group its global number, which errors name; empty if they are the same.

    Raises:
        dist.DistBackendError: The ranks did not find each other, or may not share memory.
    """

    def __init__(
        self, store: c10d.Store, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self._timeout = timeout
        self._place = Place(rank, size)
        self._group_name = self._description = ""
        self._peers = Peers.connect(store, rank, size, timeout, global_ranks or range(size))
        self._rounds = Rounds(self._peers)
        self._lane = Lane(self._peers.failed)
        self._messages = Messages(self._peers)
        self._leave = weakref.finalize(self, _leave, self._peers, self._lane, self._messages)

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "shm"

    def getGroupName(self) -> str:
        """Return the name by which c10d knows the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Take the name by which c10d knows the group."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """Return c10d's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Take c10d's description of the group."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def get_group_store(self) -> c10d.Store:
        """Return the store that the group was made with."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of what is called from now on."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """Finish what is under way, except for messages that nobody has sent, and leave."""
        if self._leave.alive:
            self._lane.drain(self._timeout.total_seconds())
            self._messages.drain(self._timeout.total_seconds())
        self._leave()

    def abort(self) -> None:
        """Leave at once: what is under way fails, on the other ranks too."""
        if self._leave.alive:
            self._peers.fail(f"{self._peers.name(self._place.rank)} was told to abort")
        self._leave()

    # --- collectives

    def broadcast(self, tensors: list[Tensor], opts: c10d.BroadcastOptions | None = None) -> PortableWork:
        """Copy the root's tensors to all ranks."""
        opts = opts or c10d.BroadcastOptions()
        return self._collect(opts, [self._place.broadcast(tensor, opts.rootRank) for tensor in tensors])

    def allreduce(self, tensors: list[Tensor], opts: c10d.AllreduceOptions | None = None) -> PortableWork:
        """Reduce each tensor over all ranks."""
        opts = opts or c10d.AllreduceOptions()
        return self._collect(opts, [self._place.reduce(tensor, opts.reduceOp, None) for tensor in tensors])

    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: c10d.AllreduceCoalescedOptions | None = None
    ) -> PortableWork:
        """Reduce each tensor over all ranks."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: c10d.ReduceOptions | None = None) -> PortableWork:
        """Reduce each tensor over all ranks; only the root's changes."""
        opts = opts or c10d.ReduceOptions()
        return self._collect(opts, [self._place.reduce(tensor, opts.reduceOp, opts.rootRank) for tensor in tensors])

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: c10d.AllgatherOptions | None = None
    ) -> PortableWork:
        """Collect the input of each rank in a list, on all ranks."""
        pairs = zip(outputs, inputs, strict=True)
        return self._collect(opts or c10d.AllgatherOptions(), [self._place.gather(*pair, None) for pair in pairs])

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: c10d.AllgatherOptions | None = None
    ) -> PortableWork:
        """Collect the inputs of each rank in that rank's list, on all ranks."""
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(
        self, output: Tensor, given: Tensor, opts: c10d.AllgatherOptions | None = None
    ) -> PortableWork:
        """Collect the input of each rank in a tensor, one after the other, on all ranks."""
        return self.allgather([[output]], [given], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: c10d.AllgatherOptions | None = None
    ) -> PortableWork:
        """Do so for each of several tensors."""
        return self.allgather([[output] for output in outputs], inputs, opts)

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: c10d.GatherOptions | None = None
    ) -> PortableWork:
        """Collect the input of each rank in a list, on the root."""
        opts = opts or c10d.GatherOptions()
        lists = outputs or [[] for _ in inputs]
        pairs = zip(lists, inputs, strict=True)
        return self._collect(opts, [self._place.gather(*pair, opts.rootRank) for pair in pairs])

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: c10d.ScatterOptions | None = None
    ) -> PortableWork:
        """Give each rank its part of the root's list."""
        opts = opts or c10d.ScatterOptions()
        pairs = zip(outputs, inputs or [[] for _ in outputs], strict=True)
        return self._collect(opts, [self._place.scatter(*pair, opts.rootRank) for pair in pairs])

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: c10d.ReduceScatterOptions | None = None
    ) -> PortableWork:
        """Reduce each tensor of a list over all ranks; each rank gets its own."""
        opts = opts or c10d.ReduceScatterOptions()
        pairs = zip(outputs, inputs, strict=True)
        return self._collect(opts, [self._place.reduce_scatter(*pair, opts.reduceOp) for pair in pairs])

    def reduce_scatter_single(
        self, output: Tensor, given: Tensor, opts: c10d.ReduceScatterOptions | None = None
    ) -> PortableWork:
        """Reduce a tensor over all ranks; each rank gets its part."""
        return self.reduce_scatter([output], [[given]], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: c10d.ReduceScatterOptions | None = None
    ) -> PortableWork:
        """Do so for each of several tensors."""
        return self.reduce_scatter(outputs, [[given] for given in inputs], opts)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: c10d.AllToAllOptions | None = None,
    ) -> PortableWork:
        """Give each rank its rows of our tensor; the same number to each if there are no splits."""
        step = self._place.exchange_rows(output, given, output_splits, input_splits)
        return self._collect(opts or c10d.AllToAllOptions(), [step])

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: c10d.AllToAllOptions | None = None
    ) -> PortableWork:
        """Give each rank its tensor of our list."""
        return self._collect(opts or c10d.AllToAllOptions(), [self._place.exchange(outputs, inputs)])

    def barrier(self, opts: c10d.BarrierOptions | None = None) -> PortableWork:
        """Return when all ranks have called it."""
        return self._collect(opts or c10d.BarrierOptions(), [Step(Call("barrier"))])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called it; the error names all that have not, whatever `wait_all_ranks` says."""
        opts = c10d.BarrierOptions()
        opts.asyncOp = False
        opts.timeout = timeout or self._timeout
        self._collect(opts, [Step(Call("monitored_barrier"))]).wait()

    # --- messages

    def send(self, tensors: list[Tensor], to: int, tag: int) -> PortableWork:
        """Send a tensor to a rank."""
        flat = self._only(tensors)
        return self._messages.send(flat.tensor, flat.bytes, self._other(to), tag, self._timeout.total_seconds())

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> PortableWork:
        """Receive a tensor from a rank."""
        return self._receive(self._only(tensors), self._other(source), tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> PortableWork:
        """Receive a tensor from whoever sends one with this tag."""
        return self._receive(self._only(tensors), None, tag)

    # c10d's old names
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _collect(self, opts: _Options, steps: Sequence[Step]) -> PortableWork:
        seconds = (opts.timeout if opts.timeout > timedelta(0) else self._timeout).total_seconds()
        rounds = self._rounds

        def run() -> None:
            for step in steps:
                rounds.run(step.call, seconds)
                for flat in step.outputs:
                    flat.give_back()

        result = [flat.tensor for step in steps for flat in step.outputs]
        return self._lane.submit(result, run, at_once=not opts.asyncOp)

    def _receive(self, flat: Flat, source: int | None, tag: int) -> PortableWork:
        seconds = self._timeout.total_seconds()
        return self._messages.receive(flat.tensor, flat.bytes, flat.give_back, source, tag, seconds)

    def _only(self, tensors: list[Tensor]) -> Flat:
        if len(tensors) != 1:
            raise ValueError(f"shm: a message is one tensor; given are {len(tensors)}")
        return Flat(tensors[0])

    def _other(self, rank: int) -> int:
        if not 0 <= rank < self._place.size or rank == self._place.rank:
            raise ValueError(f"shm: rank {self._place.rank} of {self._place.size} has no messages with rank {rank}")
        return rank


def _leave(peers: Peers, lane: Lane, messages: Messages) -> None:
    peers.stop()
    lane.close()
    messages.close()
    peers.close()
