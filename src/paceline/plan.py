"""Plan and Mesh: the nouns that say where a program runs and how it is split.

A mesh is a list of named axes, outermost (slowest link) first. This module knows nothing of PyTorch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, Self

from paceline.errors import PlanError, nearest

WIRES = ("exact", "bfloat16", "int8")
"""What tensors may be sent as between stages."""


class Axis(Enum):
    """What an axis of the mesh means for the solver."""

    DP = "dp"
    FSDP = "fsdp"
    TP = "tp"
    SP = "sp"
    HW = "hw"
    AUTO = "auto"
    PP = "pp"

    @property
    def summary(self) -> str:
        """One line for `--help` and error messages."""
        return {
            Axis.DP: "the batch is split, parameters are replicated",
            Axis.FSDP: "the batch is split, and so are parameters, gradients and optimizer state",
            Axis.TP: "features, heads, vocabulary and experts are split, and so are parameters; the batch stays whole",
            Axis.SP: "the time axis of sequences is split, parameters are replicated",
            Axis.HW: "the height or the width of images is split, parameters are replicated",
            Axis.AUTO: "whatever the solver finds cheapest",
            Axis.PP: "stages: each rank has some of the layers, and micro-batches flow from rank to rank",
        }[self]

    @property
    def splits_batch(self) -> bool:
        """Whether its ranks compute different samples. Those of the other axes compute the same ones."""
        return self in (Axis.DP, Axis.FSDP)


class Recompute(Enum):
    """What the backward pass computes again instead of keeping it."""

    NONE = "none"
    ATTENTION = "attention"
    BLOCKS = "blocks"

    @property
    def summary(self) -> str:
        """One line for `--help` and error messages."""
        return {
            Recompute.NONE: "all that the backward pass reads is kept, but for what the module checkpoints itself",
            Recompute.ATTENTION: "scores and weights of attention that the module writes out are computed again",
            Recompute.BLOCKS: "repeated blocks are computed again from what comes in and goes out of them",
        }[self]

    @classmethod
    def of(cls, name: str) -> Recompute:
        """Return the policy of this name.

        Raises:
            PlanError: there is none.
        """
        names = [policy.value for policy in cls]
        if name not in names:
            raise PlanError(f"recompute is '{name}'; it is one of {', '.join(names)}.{nearest(str(name), names)}")
        return cls(name)


@dataclass(frozen=True)
class Mesh:
    """Ranks arranged along named axes, outermost first; rank numbers run fastest along the last axis.

    Raises:
        PlanError: an axis is unknown, named twice, or has a size below one.
    """

    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        known = [axis.value for axis in Axis]
        for name, size in self.axes:
            if name not in known:
                raise PlanError(f"unknown mesh axis '{name}'; known axes: {', '.join(known)}.{nearest(name, known)}")
            if size < 1:
                raise PlanError(f"mesh axis '{name}' has size {size}; a size is a whole number from 1.")
        if len({name for name, _ in self.axes}) != len(self.axes):
            raise PlanError(f"mesh '{self}' names an axis twice.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `dp=2,fsdp=4`; an empty text or `serial` is the mesh of one rank."""
        axes = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            if part == "serial":
                continue
            name, equals, size = part.partition("=")
            if not equals or not size.strip().isdecimal():
                raise PlanError(f"cannot read '{part}' in mesh '{text}'; write axis=size pairs such as 'dp=2,fsdp=4'.")
            axes.append((name.strip(), int(size)))
        return cls(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes) or "serial"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def batch_parts(self) -> int:
        """Into how many parts the batch is split."""
        return math.prod(size for name, size in self.axes if Axis(name).splits_batch)

    def batch_part(self, rank: int) -> int:
        """Return which part of the batch `rank` computes; ranks that differ only along other axes share one."""
        part = 0
        for name, index in self.coordinate(rank).items():
            if Axis(name).splits_batch:
                part = part * self[name] + index
        return part

    @property
    def stage_ranks(self) -> int:
        """Among how many ranks stages are divided; 1 without a pipeline."""
        return dict(self.axes).get(Axis.PP.value, 1)

    @property
    def inner(self) -> Mesh:
        """The mesh that every stage is placed on: all axes but the pipeline."""
        return Mesh(tuple(axis for axis in self.axes if axis[0] != Axis.PP.value))

    def split_rank(self, rank: int) -> tuple[int, int]:
        """Return where `rank` stands in the pipeline, and its rank on the inner mesh."""
        where = self.coordinate(rank)
        stage_rank, inner = where.pop(Axis.PP.value, 0), 0
        for name, index in where.items():
            inner = inner * self[name] + index
        return stage_rank, inner

    def __getitem__(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return where `rank` stands along each axis."""
        where = {}
        for name, size in reversed(self.axes):
            rank, where[name] = divmod(rank, size)
        return {name: where[name] for name in self.names}

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Yield the ranks that differ along `axis` only, in the order of that axis."""
        rank_at = {tuple(self.coordinate(rank).values()): rank for rank in range(self.size)}
        position = self.names.index(axis)
        others = [range(size) for name, size in self.axes if name != axis]
        for fixed in itertools.product(*others):
            yield tuple(rank_at[(*fixed[:position], i, *fixed[position:])] for i in range(self[axis]))


class Pin(NamedTuple):
    """Where parameters must live, by the user's word; the solver takes it as given, and the rest follows.

    Attributes:
        pattern: names of parameters, with `*`, `?` and `[...]` as in names of files.
        placements: along axes, as text that `placement` reads.
    """

    pattern: str
    placements: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `blocks.*.qkv.weight:tp=S0/3`; several axes are `tp=S0/3,fsdp=S1`."""
        pattern, _, listed = (part.strip() for part in text.rpartition(":"))
        pairs = [
            (axis.strip(), where.strip()) for axis, _, where in (part.partition("=") for part in listed.split(","))
        ]
        if not pattern or not all(axis and where for axis, where in pairs):
            raise PlanError(
                f"cannot read the pin '{text}'; write a pattern of parameter names and a placement for each axis, such "
                "as 'blocks.*.qkv.weight:tp=S0/3'."
            )
        if len(dict(pairs)) != len(pairs):
            raise PlanError(f"the pin '{text}' names an axis twice.")
        return cls(pattern, dict(pairs))

    def __str__(self) -> str:
        return f"{self.pattern}:{self.where}"

    @property
    def where(self) -> str:
        """The placements as text, `tp=S0/3`."""
        return ",".join(f"{axis}={placement}" for axis, placement in self.placements.items())


@dataclass(frozen=True)
class PipelinePlan:
    """How micro-batches flow through the stages of a pipeline.

    Attributes:
        schedule: the name of one (see `paceline schedule --help`), or a file that holds one (`.json`).
        micro_batches: pieces in which a batch flows that is given in one; None: twice the ranks of the pipeline, or as
            many as it has samples.
        chunks: stages per rank, for schedules that interleave them.
        boundaries: modules at which stages begin, by name, all but the first; without them cuts are chosen by cost.
        wire: what activations and gradients are sent as: `exact`, or rounded to `bfloat16` or `int8`.
        recompute: stages that compute their forward pass again instead of keeping what it saved.
        replicas: how many ranks each stage has, where not all have one: `(2, 1)` are two stages on three ranks, the
            first two of which take micro-batches in turns.
        vertical_sync: all stages of `pipedream` read the version of the weights that the first one reads.
    """

    schedule: str = "1f1b"
    micro_batches: int | None = None
    chunks: int = 1
    boundaries: tuple[str, ...] = ()
    wire: str = "exact"
    recompute: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    vertical_sync: bool = False

    def __post_init__(self) -> None:
        if self.wire not in WIRES:
            raise PlanError(f"wire is '{self.wire}'; choose one of {', '.join(WIRES)}.{nearest(self.wire, WIRES)}")
        for name, value in (("micro_batches", self.micro_batches), ("chunks", self.chunks)):
            if value is not None and value < 1:
                raise PlanError(f"{name} is {value}; it is a whole number from 1.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read plain values.

        Raises:
            PlanError: a key is unknown.
        """
        _check_keys(values, list(cls.__dataclass_fields__), "pipeline")
        lists = {name: tuple(values[name]) for name in ("boundaries", "recompute", "replicas") if name in values}
        return cls(**{**values, **lists})


@dataclass(frozen=True)
class Plan:
    """How a program is split and run. The plan in a run directory (`plan.yaml`) is the one that executes.

    Attributes:
        mesh: the named axes.
        zero_stage: what becomes of parameters that `fsdp` shards after the forward pass: 3 frees them and gathers
            again in the backward pass (less memory), 2 keeps them (less traffic).
        bucket_bytes: small collectives are merged until a bucket holds this many bytes; 0 merges nothing.
        compile: compile the placed programs with Inductor.
        pins: placements of parameters that the user chose; where several match a parameter, the last one counts.
        memory_bytes: what a rank may hold of parameters, gradients, optimizer state (two values each) and what the
            backward pass reads of the forward pass; None sets no limit. Asked for less, the solver splits more.
        recompute: what the backward pass computes again instead of keeping it, beside what the module checkpoints.
        pipeline: how micro-batches flow through stages, where the mesh has the axis `pp`.
    """

    mesh: Mesh = field(default_factory=Mesh)
    zero_stage: int = 3
    bucket_bytes: int = 4 << 20
    compile: bool = False
    pins: tuple[Pin, ...] = ()
    memory_bytes: int | None = None
    recompute: Recompute = Recompute.NONE
    pipeline: PipelinePlan = PipelinePlan()

    def __post_init__(self) -> None:
        if self.zero_stage not in (2, 3):
            raise PlanError(
                f"zero_stage is {self.zero_stage}; it is 2 (keep gathered parameters until the backward pass) or 3 "
                "(gather them again). For ZeRO-0, replicated parameters, use the axis 'dp'."
            )
        if self.bucket_bytes < 0:
            raise PlanError(f"bucket_bytes is {self.bucket_bytes}; it is a number of bytes from 0.")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise PlanError(f"memory_bytes is {self.memory_bytes}; it is a number of bytes from 1, or none.")
        for pin in self.pins:
            for axis in pin.placements:
                if axis not in self.mesh.names:
                    raise PlanError(
                        f"the pin '{pin}' is about the axis '{axis}', which the mesh '{self.mesh}' does not have; its "
                        f"axes: {', '.join(self.mesh.names) or 'none'}.{nearest(axis, self.mesh.names)}"
                    )

    def with_(self, **changes: Any) -> Plan:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML or JSON."""
        plain = {"mesh": str(self.mesh), "pins": [str(pin) for pin in self.pins], "recompute": self.recompute.value}
        return {**asdict(self), **plain}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` wrote.

        Raises:
            PlanError: a key is unknown.
        """
        _check_keys(values, list(cls.__dataclass_fields__), "plan")
        mesh, pins = Mesh.parse(str(values.get("mesh", ""))), tuple(map(Pin.parse, values.get("pins", ())))
        pipeline = PipelinePlan.from_dict(values.get("pipeline", {}))
        recompute = Recompute.of(values.get("recompute", Recompute.NONE.value))
        return cls(**{**values, "mesh": mesh, "pins": pins, "pipeline": pipeline, "recompute": recompute})


def _check_keys(values: Mapping[str, Any], known: list[str], what: str) -> None:
    for key in values:
        if key not in known:
            raise PlanError(f"unknown {what} key '{key}'; known keys: {', '.join(known)}.{nearest(key, known)}")
