"""What a launcher such as torchrun left in the environment, and whether it fits the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from paceline.errors import LaunchError, PlanError
from paceline.plan import Mesh


@dataclass(frozen=True)
class World:
    """This process among those that a launcher started."""

    rank: int
    size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """Return what RANK and WORLD_SIZE say, or None where no launcher is at work.

        Raises:
            LaunchError: only one of the two is set, or they are not a rank and a size.
        """
        rank, size = environment.get("RANK"), environment.get("WORLD_SIZE")
        if rank is None and size is None:
            return None
        if rank is None or size is None:
            missing = "RANK" if rank is None else "WORLD_SIZE"
            raise LaunchError(
                f"the environment has no {missing}, but its partner is set; a launcher sets both, you neither."
            )
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise LaunchError(
                f"the environment has RANK={rank} and WORLD_SIZE={size}; a rank is from 0 to the size less 1."
            )
        return cls(int(rank), int(size))

    def check(self, mesh: Mesh, launch: str) -> None:
        """Refuse a world that `mesh` does not fit.

        Raises:
            PlanError: the sizes differ.
            LaunchError: all ranks are asked to live in one process, while a launcher started several.
        """
        if launch == "inprocess":
            raise LaunchError(
                f"a launcher started {self.size} processes, but --launch inprocess runs all ranks in one; start it "
                "with plain `paceline train`, or leave out inprocess."
            )
        if self.size != mesh.size:
            raise PlanError(
                f"the launcher started {self.size} ranks, but mesh '{mesh}' has {mesh.size}. Start {mesh.size} "
                f"(torchrun --nproc-per-node times --nnodes), or give a mesh of {self.size} ranks such as "
                f"--mesh dp={self.size}."
            )
