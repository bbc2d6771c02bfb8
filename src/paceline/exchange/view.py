"""Views: who is there and who holds which shard, from one epoch to the next. Made by the coordinator only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    Attributes:
        host, port: for TCP; port 0 is none.
        unix: path of a Unix socket, for processes of the same host; empty where there is none.
        machine: identity of the host, as `wire.address.machine()` tells: who has the same one may use `unix` and shared
            memory.
    """

    host: str = ""
    port: int = 0
    unix: str = ""
    machine: str = ""


class Move(NamedTuple):
    """A server becomes a replica: `source`, the tail of the chain, copies the shard to `target` and forwards to it.

    begun: the epoch of the first view that has it; what is said of an earlier move between the same is not of this one.
    """

    shard: int
    source: int
    target: int
    begun: int = 0


class Turn(NamedTuple):
    """The head of a chain becomes its tail, once all that it has is on the others; until then it takes no updates.

    begun: the epoch of the first view that has it.
    """

    shard: int
    head: int
    begun: int = 0


@dataclass(frozen=True)
class View:
    """Who holds what in an epoch.

    Attributes:
        epoch: rises by one with every view.
        servers: by id, the servers of the job.
        chains: of each shard the servers that hold it, head first: the head is its one master, to which updates go; the
            tail answers reads. Empty only before the job began, or where all copies of a shard were lost.
        moves: replicas in the making; a source waits for its target as for a successor.
        first: the epoch of the first view that had chains: whoever is in a chain of it loads from the snapshot.
        turns: heads that are about to change.
    """

    epoch: int = 0
    servers: Mapping[int, Address] = field(default_factory=dict)
    chains: tuple[tuple[int, ...], ...] = ()
    moves: tuple[Move, ...] = ()
    first: int = 0
    turns: tuple[Turn, ...] = ()

    def head(self, shard: int) -> int:
        """The master of a shard."""
        return self.chains[shard][0]

    def tail(self, shard: int) -> int:
        """Who answers reads of a shard."""
        return self.chains[shard][-1]

    def successor(self, shard: int, server: int) -> int | None:
        """To whom a server hands the updates of a shard: the next of the chain, or a replica in the making."""
        chain = self.chains[shard]
        if server in chain[:-1]:
            return chain[chain.index(server) + 1]
        return next((move.target for move in self.moves if (move.shard, move.source) == (shard, server)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        servers = {str(server): asdict(address) for server, address in self.servers.items()}
        return {
            "epoch": self.epoch,
            "servers": servers,
            "chains": [list(chain) for chain in self.chains],
            "moves": [list(move) for move in self.moves],
            "first": self.first,
            "turns": [list(turn) for turn in self.turns],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        return cls(
            values["epoch"],
            {int(server): Address(**address) for server, address in values["servers"].items()},
            tuple(tuple(chain) for chain in values["chains"]),
            tuple(Move(*move) for move in values["moves"]),
            values["first"],
            tuple(Turn(*turn) for turn in values.get("turns", ())),
        )
