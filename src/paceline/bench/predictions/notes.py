"""What the free text of a row says about how it ran: flags of a command line, the schedule, what was split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.bench.predictions.rows import Row

# Rows whose notes have one of these words are shown apart and never fitted.
_DOUBTFUL = ("anomaly", "proxy", "secondary")
_VARIANTS = (r"\beager\b", r"torch\.compile", r"async ?tp", r"vanilla tp", "parenthesised", r"deterministic-mode=true")


@dataclass(frozen=True)
class Notes:
    """What notes say; each question is asked with the answer that holds where they say nothing.

    Attributes:
        text: all of it, in lower case, with the system's name before it.
        flags: of a command line, as in `sequence-parallel=true`.
        schedule: of a pipeline, in lower case; nothing where none is named.
        doubtful: why the row is not for fitting; nothing where it is.
    """

    text: str
    flags: Mapping[str, str]
    schedule: str
    doubtful: str

    @property
    def experts(self) -> int:
        """How many experts flags ask for."""
        given = self.flags.get("num-experts", "1")
        return int(given) if given.isdecimal() else 1

    @property
    def has_flags(self) -> bool:
        """Whether a command line is told, so that what it leaves out is as its program's defaults are."""
        return "flags:" in self.text

    @property
    def variant(self) -> tuple[str, ...]:
        """Words that tell runs apart whose columns are the same."""
        return tuple(word for word in _VARIANTS if re.search(word, self.text))

    @property
    def deterministic(self) -> bool:
        """Whether libraries are asked for results that repeat."""
        return self._flag("deterministic-mode")

    def fused(self, default: bool) -> bool:
        """Whether attention never writes its scores."""
        backend = self.flags.get("attention-backend", "")
        if backend in ("unfused", "local") or self.flags.get("transformer-impl") == "local":
            return False
        return True if backend in ("flash", "fused") else default

    def gated(self, default: bool) -> bool:
        """Whether the feed-forward network is gated."""
        return self._flag("swiglu") or default

    def biases(self, default: bool) -> bool:
        """Whether projections add vectors."""
        return default and not self._flag("disable-bias-linear")

    def tied(self, default: bool) -> bool:
        """Whether the head reads the embedding's table."""
        return default and not self._flag("untie-embeddings-and-output-weights")

    def learned_positions(self, default: bool) -> bool:
        """Whether positions have parameters."""
        return default and self.flags.get("position-embedding-type", "learned_absolute") == "learned_absolute"

    def regions(self, default: bool) -> bool:
        """Whether norms between split layers are split along the sequence."""
        return self._flag("sequence-parallel") or default

    def zero(self, default: int) -> int:
        """What replicas split: 1 the optimizer's state, 2 gradients, 3 parameters too."""
        found = re.search(r"zero-([123])|fsdp=(\d+)", self.text)
        if found and found.group(1):
            return int(found.group(1))
        if found:
            return 3 if int(found.group(2)) > 1 else default
        if "full_shard" in self.text:
            return 3
        if "shard_grad_op" in self.text:
            return 2
        return 1 if self._flag("use-distributed-optimizer") else default

    def overlap(self, default: bool) -> bool:
        """Whether sums of gradients run beside the backward pass."""
        found = re.search(r"overlap=(yes|no)", self.text)
        if found:
            return found.group(1) == "yes"
        return self._flag("overlap-grad-reduce") or default

    def _flag(self, name: str) -> bool:
        return self.flags.get(name, "false") == "true"


def notes_of(row: Row) -> Notes:
    """Return what a row's notes and the name of its system say."""
    text = f"{row.text('system')}; {row.text('notes')}".lower()
    flags = dict(re.findall(r"(?<![\w-])([a-z][a-z0-9]*(?:-[a-z0-9]+)*)=([^;]+?)\s*(?:;|$)", text))
    named = re.search(r"schedule ([\w-]+)|((?:interleaved )?1f1b)", text)
    schedule = (named.group(1) or named.group(2)) if named and row.text("pp") not in ("", "1") else ""
    doubtful = next((word for word in _DOUBTFUL if re.search(rf"\b{word}\b", text)), "")
    return Notes(text, flags, schedule, doubtful)
