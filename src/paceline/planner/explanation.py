"""What a plan amounts to, as data: where tensors live, what moves, what a rank holds, how it was found.

Names are those of the user's modules and parameters; "" is the module itself. Bytes are those of one rank in one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.placement.place import AxisReport
from paceline.placement.placements import Placement, Shape
from paceline.plan import Plan


class What(Enum):
    """What a tensor is to the user."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    """Of a parameter."""
    BUFFER = "buffer"
    BATCH = "batch"
    LOSS = "loss"
    """And the number of samples or tokens that it is a mean over."""
    ACTIVATION = "activation"
    ACTIVATION_GRADIENT = "activation gradient"


@dataclass(frozen=True)
class Held:
    """A parameter or buffer, and what a rank holds of it.

    Attributes:
        placements: along each axis of the mesh, outermost first.
        local: shape of the piece.
        bytes: of the piece.
        whole_bytes: of the whole.
        trained: whether it has a gradient.
        aliases: further names, where it is tied.
    """

    name: str
    dtype: str
    shape: Shape
    placements: tuple[Placement, ...]
    local: Shape
    bytes: int
    whole_bytes: int
    trained: bool
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class Activation:
    """A result of the forward pass.

    Attributes:
        what: an activation, or a parameter that was gathered.
        name: of the module that calls the operator, or of the parameter.
        operator: that made it.
        shape: of the whole.
        placements: along each axis of the mesh; empty where the tensor is no piece of one of the captured program.
        local: shape of the piece.
        kept: whether its memory is kept for the backward pass.
        main: whether it is a result of a product, convolution, attention, norm, embedding or loss.
    """

    what: What
    name: str
    operator: str
    dtype: str
    shape: Shape
    placements: tuple[Placement, ...]
    local: Shape
    bytes: int
    kept: bool
    main: bool


@dataclass(frozen=True)
class Transfer:
    """A tensor that ranks exchange.

    Attributes:
        axis: along which.
        kind: `all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all`, or `halo`: rows of neighbours.
        backward: whether in the backward pass.
        name: of the parameter, buffer or batch tensor, or of the module that the activation comes from.
        operator: that made an activation, where it is known; or the view or cast of a parameter that is moved.
        source: placement along the axis before.
        target: and after.
        bytes: of the tensor that a rank hands over.
    """

    axis: str
    kind: str
    backward: bool
    what: What
    name: str
    operator: str
    source: Placement
    target: Placement
    bytes: int


@dataclass(frozen=True)
class Total:
    """All transfers of one kind, axis and pass.

    Attributes:
        tensors: how many are exchanged.
        collectives: in how many collectives, since small tensors share one.
    """

    axis: str
    kind: str
    backward: bool
    tensors: int
    collectives: int
    bytes: int


@dataclass(frozen=True)
class PerBlock:
    """What each of some repeated blocks exchanges along an axis: all of them the same.

    Attributes:
        name: of the blocks, `blocks.{0..11}`; "" for everything outside of repeated blocks.
        blocks: how many.
        tensors: of each block, by pass (True: backward) and kind.
    """

    axis: str
    name: str
    blocks: int
    tensors: tuple[tuple[bool, str, int], ...]


@dataclass(frozen=True)
class Uneven:
    """A parameter of which an axis splits less than it could, because a dimension does not divide.

    Attributes:
        placement: along the axis: whole, or split along another dimension.
        dim: the one that does not divide.
        divisor: what it would have to divide by: the ranks of the axis, and those of earlier ones that split it.
        sizes: the next ones that do.
    """

    name: str
    shape: Shape
    axis: str
    placement: Placement
    dim: int
    divisor: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Unknown:
    """An operator without a rule, which every rank computes whole.

    Attributes:
        modules: the module that makes each call.
    """

    operator: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds. What is in flight, gathered or computed for a moment, comes on top.

    Attributes:
        optimizer: state of the optimizer.
        kept: results of the forward pass that are kept for the backward pass.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    kept: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.buffers + self.gradients + self.optimizer + self.kept


@dataclass(frozen=True)
class Seconds:
    """How long it took to find."""

    capture: float
    place: float
    schedule: float


@dataclass(frozen=True)
class Explanation:
    """What a plan amounts to.

    Attributes:
        optimizer: whose state is counted, by name.
        solver: the solver's account, an entry per axis of several ranks.
        uneven: parameters with a dimension that does not divide.
        unknown: operators without a rule.
    """

    plan: Plan
    optimizer: str
    memory: Memory
    parameters: tuple[Held, ...]
    buffers: tuple[Held, ...]
    activations: tuple[Activation, ...]
    transfers: tuple[Transfer, ...]
    totals: tuple[Total, ...]
    per_block: tuple[PerBlock, ...]
    solver: tuple[AxisReport, ...]
    uneven: tuple[Uneven, ...]
    unknown: tuple[Unknown, ...]
    seconds: Seconds
