"""The section `server` of a recipe: how parameters are shared, checked without touching module or data."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from paceline.documents.complaints import complaint
from paceline.errors import ExchangeError, RecipeError, nearest
from paceline.exchange.compress.names import parse
from paceline.exchange.job import Consistency, Initializer, Mode
from paceline.train.sections import Count, Flag, OpenSection, Section
from paceline.train.servers.recipe.rules import rule_of

HOGWILD: Final = "hogwild"
"""The consistency that is none: workers of one host write to the same memory, without locks and without servers."""

AUTO: Final = "auto"
"""The compression that workers choose themselves."""

_INITIALIZERS: Final = ("zeros", "normal", "uniform")


def read_initializer(text: str) -> Initializer:
    """Read `zeros`, `normal(0.01)` or `uniform(0.05)`.

    Raises:
        ExchangeError: it is none of these.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*([\d.eE+-]+)\s*\))?\s*", text)
    name, scale = (match[1], match[2]) if match else (text, None)
    try:
        if name in _INITIALIZERS and (name == "zeros") == (scale is None):
            return Initializer(name, float(scale or 0))
    except ValueError:
        pass
    hint = nearest(name, _INITIALIZERS) if name not in _INITIALIZERS else ""
    raise ExchangeError(f"cannot read the initializer '{text}'; write zeros, normal(0.01) or uniform(0.05).{hint}")


def _initializer(text: str) -> str:
    try:
        read_initializer(text)
    except ExchangeError as error:
        raise complaint(str(error)) from error
    return text


def _compression(text: str) -> str:
    if text.strip() == AUTO:
        return AUTO
    try:
        return str(parse(text))
    except ExchangeError as error:
        raise complaint(f"{error} It may also be {AUTO}: by the speed of the link.") from error


def _consistency(text: str) -> str:
    if text.strip() == HOGWILD:
        return HOGWILD
    try:
        return str(Consistency.parse(text))
    except ExchangeError as error:
        raise complaint(f"{error} Within one host it may also be {HOGWILD}.") from error


def _tables(value: Any) -> Any:
    """Let `name: key` stand for `name: {keys: key}`, and name unknown keys."""
    if not isinstance(value, dict):
        raise complaint(f"tables are {value!r}; write the batch key for each parameter, as in {{emb.weight: ids}}.")
    known = list(TableSection.model_fields)
    found = {}
    for name, given in value.items():
        given = {"keys": given} if isinstance(given, str | int) else given
        if not isinstance(given, dict):
            raise complaint(f"the table is {given!r}; write the batch key that points into it.", (str(name),))
        for key in given:
            if key not in known:
                raise complaint(
                    f"unknown key '{key}' of a table; known: {', '.join(known)}.{nearest(str(key), known)}",
                    (str(name), str(key)),
                )
        found[name] = given
    return found


ConsistencyText = Annotated[str, AfterValidator(_consistency)]
InitializerText = Annotated[str, AfterValidator(_initializer)]
CompressionText = Annotated[str, AfterValidator(_compression)]


class RuleSection(OpenSection):
    """What gradients do to the rows of a table, when that differs from `optimizer`."""

    name: str = "Adagrad"
    lr: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            rule_of(self.name, {"lr": self.lr, **self.options})
        except RecipeError as error:
            raise complaint(str(error)) from error
        return self


class TableSection(Section):
    """A parameter that is a sparse table.

    Attributes:
        keys: the tensor of the batch that points into it; for tuples its index.
        initializer: of new rows: `zeros`, `normal(0.01)` (standard deviation) or `uniform(0.05)` (half of the range).
        optimizer: its own rule, in place of that of the recipe.
    """

    keys: str | int
    initializer: InitializerText = "zeros"
    optimizer: RuleSection | None = None


class ServerSection(Section):
    """Parameters on servers.

    Attributes:
        deployment: `separate`: servers are processes of their own; `colocated`: one beside every worker, which comes
            and leaves with it; `groups`: servers for each group of workers, under global ones.
        servers: servers that the job begins with, of each group; `colocated` has as many as workers.
        workers: workers that it begins with, over all groups.
        minimum: below how many workers it waits, and says so.
        replication: servers that hold each shard.
        shards: parts in which keys are divided, for all of the job.
        pieces: tasks of a step; as many as workers when absent.
        consistency: of dense parameters, and of sparse tables unless `sparse` says otherwise.
        sparse: of sparse tables.
        tables: parameters that are sparse tables.
        average_every: local steps by each worker's own optimizer, after which servers average what they led to.
        damp_stale: a gradient that is n updates old counts 1 / (1 + n).
        ahead: what of the next task is read while one is computed: its samples, also rows of tables that may be a clock
            old, or also dense parameters that may be.
        compression: what gradients are sent as: `none`, `auto`, or a codec.
        transport, streams, bind, store: see `exchange.terms.Charter`.
        log: whether what was applied is logged, for a replay.
        durable: whether what is acknowledged is in the logs also after a loss of power.
        lease_s: after how many seconds without a word a member is out.
        replace: whether servers and workers that die are started anew.
        groups: how many, for `groups`.
        rows: with hogwild, how many each sparse table may have.
        sync_every: steps after which a group meets the global servers.
    """

    deployment: Literal["separate", "colocated", "groups"] = "separate"
    servers: Count = 1
    workers: Count = 2
    minimum: Count = 1
    replication: Count = 1
    shards: Count = 16
    pieces: Count | None = None
    consistency: ConsistencyText = "bsp"
    sparse: ConsistencyText | None = None
    tables: Annotated[dict[str, TableSection], BeforeValidator(_tables)] = Field(default_factory=dict)
    average_every: Count | None = None
    damp_stale: Flag = False
    ahead: Literal["samples", "rows", "parameters"] = "rows"
    compression: CompressionText = "none"
    transport: Literal["auto", "shared", "unix", "tcp"] = "auto"
    streams: Count = 1
    bind: str = "127.0.0.1"
    store: str = "embedded"
    log: Flag = True
    durable: Flag = False
    lease_s: Annotated[float, Field(ge=0.1, allow_inf_nan=False)] = 2.0
    replace: Flag = True
    groups: Count = 2
    rows: Count = 1 << 22
    sync_every: Count = 10

    @field_validator("compression")
    @classmethod
    def _check_compression(cls, text: str) -> str:
        if text != "auto":
            try:
                parse(text)
            except ExchangeError as error:
                raise complaint(f"{error} Or auto: by the measured speed of the link.") from error
        return text

    @property
    def tasks_of_a_step(self) -> int:
        """Into how many tasks a step is cut."""
        return self.pieces or self.workers

    @property
    def is_hogwild(self) -> bool:
        """Whether there are no servers."""
        return self.consistency == HOGWILD

    @property
    def dense_consistency(self) -> Consistency:
        """Of dense parameters."""
        return Consistency(Mode.ASP, None) if self.is_hogwild else Consistency.parse(self.consistency)

    @property
    def sparse_consistency(self) -> Consistency:
        """Of sparse tables."""
        return self.dense_consistency if self.sparse is None else Consistency.parse(self.sparse)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.minimum > self.workers:
            raise complaint(
                f"server.minimum is {self.minimum} workers, and the job begins with {self.workers}: it would wait.",
                "minimum",
            )
        servers = self.workers if self.deployment == "colocated" else self.servers
        if self.replication > servers:
            raise complaint(
                f"replication {self.replication} needs as many servers, and there are {servers}.", "replication"
            )
        if self.sparse == HOGWILD and not self.is_hogwild:
            raise complaint("hogwild is for all tables or for none: set server.consistency to it.", "sparse")
        if self.is_hogwild:
            self._check_hogwild()
        if self.durable and not self.log:
            raise complaint("server.durable is about logs, and server.log is false: leave one of them out.", "durable")
        self._check_modes()
        if self.deployment == "groups":
            self._check_groups()
        return self

    def _check_hogwild(self) -> None:
        for key in ("deployment", "servers", "replication", "average_every", "damp_stale", "compression", "durable"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise complaint(f"server.{key} is for servers, and with hogwild there are none; leave it out.", key)

    def _check_modes(self) -> None:
        dense, sparse = self.dense_consistency, self.sparse_consistency
        rhythms = {(found.fetch_every, found.push_every) for found in (dense, sparse)}
        if self.tables and len(rhythms) > 1:
            raise complaint(
                f"a push holds both dense gradients and rows, so downpour is for both: '{dense}' and '{sparse}' do not "
                "go together.",
                "sparse",
            )
        if self.damp_stale and Mode.BSP in (dense.mode, sparse.mode if self.tables else dense.mode):
            raise complaint("server.damp_stale has no meaning under bsp, where no gradient is stale.", "damp_stale")
        if self.average_every is not None and (self.tables or rhythms != {(1, 1)}):
            raise complaint(
                "server.average_every is for dense parameters under bsp, ssp or asp; leave out "
                f"{'server.tables' if self.tables else 'downpour'}.",
                "average_every",
            )

    def _check_groups(self) -> None:
        if self.is_hogwild or self.average_every is not None:
            raise complaint(
                "groups of servers are for bsp, ssp, asp or downpour, without average_every: sync_every says how often "
                "they are averaged.",
                "deployment",
            )
        for name, table in self.tables.items():
            if table.optimizer is not None and table.optimizer.name == "FTRL":
                raise complaint(
                    f"groups of servers add differences to each other's parameters, and those of '{name}' follow from "
                    "the state of FTRL: choose another optimizer for it, or deployment: separate.",
                    "deployment",
                )
        for key, count in (("workers", self.workers), ("pieces", self.tasks_of_a_step)):
            if count % self.groups:
                raise complaint(f"server.{key} is {count}, which {self.groups} groups do not divide.", key)
