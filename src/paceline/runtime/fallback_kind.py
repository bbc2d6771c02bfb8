"""The fallbacks there are, and the meshes that each fits. Imports no PyTorch: recipes are checked with it."""

from __future__ import annotations

from enum import Enum

from paceline.errors import PlanError, nearest
from paceline.plan import Axis, Mesh


class Fallback(Enum):
    """What wraps a module that cannot be captured."""

    DDP = "ddp"
    FSDP2 = "fsdp2"

    @classmethod
    def parse(cls, text: str) -> Fallback:
        """Read a name.

        Raises:
            PlanError: there is no such fallback.
        """
        known = [fallback.value for fallback in cls]
        if text not in known:
            raise PlanError(f"there is no fallback '{text}'; known: {', '.join(known)}.{nearest(text, known)}")
        return cls(text)

    def check(self, mesh: Mesh, *, in_process: bool) -> None:
        """Refuse a mesh that this cannot run on. One rank is a plain module under either name.

        Raises:
            PlanError: DDP splits no parameters, FSDP2 splits them along `fsdp`; neither splits operators, nor has ranks
                in one process.
        """
        if mesh.size == 1:
            return
        if in_process:
            raise PlanError(
                f"fallback '{self.value}' needs a process per rank, but all ranks of '{mesh}' are to run in this "
                "one. Leave out devices=[...] (launch: processes), or the fallback."
            )
        others = [axis for axis, size in mesh.axes if size > 1 and not Axis(axis).splits_batch]
        if others:
            whole = (Axis.DP if self is Fallback.DDP else Axis.FSDP).value
            raise PlanError(
                f"fallback '{self.value}' splits the batch and no operators, but mesh '{mesh}' has the axis "
                f"'{others[0]}'. Use the mesh '{whole}={mesh.size}'."
            )
        sharded = _size(mesh, Axis.FSDP.value) > 1
        if self is Fallback.DDP and sharded:
            raise PlanError(
                f"fallback 'ddp' keeps all parameters on every rank, but mesh '{mesh}' splits them. "
                f"Use the mesh 'dp={mesh.size}', or fallback 'fsdp2'."
            )
        if self is Fallback.FSDP2 and not sharded:
            raise PlanError(
                f"fallback 'fsdp2' splits parameters along an axis 'fsdp', which mesh '{mesh}' does not have. "
                f"Use the mesh 'fsdp={mesh.size}', or fallback 'ddp'."
            )


def _size(mesh: Mesh, axis: str) -> int:
    return mesh[axis] if axis in mesh.names else 1
