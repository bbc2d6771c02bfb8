"""Attention in parts: some rows of queries against some keys, and the results of several sets of keys merged.

Softmax over the union of sets of keys follows from that over each: the results are averaged with weights that come from
their logsumexp (Dao et al., FlashAttention, 2022; Liu et al., Ring Attention, 2023). So each part is one call of the
fused kernel, and no work is spent on keys that a row must not see. Given the logsumexp over all keys, the kernel's
backward pass is right for each part by itself.

`torch.ops.paceline.*`, queries: [B, H, Tq/n, D], keys and values: [B, G, Tk, D], H a multiple of G, row i of the whole
seeing keys 0 to i:
    causal_rows(query, key, value, where, parts, blocks, scale?) -> rows of the result, and of its logsumexp. The rank
        at `where`, of `parts`, has its part of each of the `blocks` (their sizes) of the rows.
    causal_rows_backward(grad_out, query, key, value, out, logsumexp, where, parts, blocks, scale?) -> the gradients; of
        keys and values what these rows add to them.

Where keys and values are split as queries are and go round a ring of ranks, a rank has, at each turn, those of one
other rank, keys beside values in `pair`: [B, G, Tk/n, 2 D]:
    ring_rows(query, pair, out?, logsumexp?, where, turn, parts, blocks, is_causal, scale?) -> rows of the result and of
        its logsumexp for the keys that were there so far. At a turn, the pair is that of the rank `turn` places before.
    ring_rows_backward(grad_out, query, pair, out, logsumexp, where, turn, parts, blocks, is_causal, scale?) -> what
        this turn adds to the gradients of queries and of the pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_LIBRARY: Any = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped in torch
_LIBRARY.define(
    "causal_rows(Tensor query, Tensor key, Tensor value, Tensor where, int parts, int[] blocks, float? scale)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "causal_rows_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " Tensor where, int parts, int[] blocks, float? scale) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "ring_rows(Tensor query, Tensor pair, Tensor? out, Tensor? logsumexp, Tensor where, int turn, int parts,"
    " int[] blocks, bool is_causal, float? scale) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "ring_rows_backward(Tensor grad_out, Tensor query, Tensor pair, Tensor out, Tensor logsumexp, Tensor where,"
    " int turn, int parts, int[] blocks, bool is_causal, float? scale) -> (Tensor, Tensor)"
)


@dataclass(frozen=True)
class Span:
    """Rows of queries, and the keys that they see.

    Attributes:
        first: the first of the rows.
        rows: how many they are.
        whole: how many keys, from the first on, all of them see.
        square: how many keys after those are seen by one row after the other: row i sees i + 1 of them.
    """

    first: int
    rows: int
    whole: int
    square: int = 0

    def parts(self) -> Iterator[tuple[int, int, bool]]:
        """Yield first key, number of keys, and whether they are seen one row after the other."""
        if self.whole:
            yield 0, self.whole, False
        if self.square:
            yield self.whole, self.square, True

    @property
    def pairs(self) -> int:
        """How often a row sees a key."""
        return self.rows * (self.whole + self.square) - self.square * (self.square - 1) // 2


Rows = tuple[Tensor, Tensor]
"""Results for some rows, [B, H, rows, D], and the logsumexp of their scores, [B, H, rows]."""


def attend(query: Tensor, key: Tensor, value: Tensor, span: Span, scale: float | None) -> Rows | None:
    """Return the attention of a span's rows to the keys that they see; None where those are none."""
    rows, found = query.narrow(2, span.first, span.rows), None
    for start, count, causal in span.parts():
        keys, values = key.narrow(2, start, count), value.narrow(2, start, count)
        found = merge(
            found, aten._scaled_dot_product_flash_attention_for_cpu(rows, keys, values, 0.0, causal, scale=scale)
        )
    return found


def merge(a: Rows | None, b: Rows | None) -> Rows | None:
    """Return the attention to two sets of keys together from that to each."""
    if a is None or b is None:
        return b if a is None else a
    total = torch.logaddexp(a[1], b[1])
    out = a[0] * (a[1] - total).exp_().unsqueeze(-1)
    out = out.addcmul_(b[0], (b[1] - total).exp_().unsqueeze(-1))
    return out.to(a[0].dtype), total


def join(found: Sequence[Rows | None]) -> Rows:
    """Return the results of consecutive spans as one, with time outside of heads in memory, as the kernel does."""
    parts = [rows for rows in found if rows is not None]
    if len(parts) == 1:
        return parts[0]
    out, logsumexp = (torch.cat([rows[i].transpose(1, 2) for rows in parts], 1).transpose(1, 2) for i in (0, 1))
    return out, logsumexp


class Gradients:
    """The gradients of queries, keys and values, to which spans add theirs.

    They are added up in the type of the logsumexp, which is wider than that of queries where those are narrow.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, logsumexp: Tensor) -> None:
        self.query, self.key, self.value = (_by_time(t, logsumexp.dtype).zero_() for t in (query, key, value))

    def add(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Rows,
        span: Span,
        scale: float | None,
    ) -> None:
        """Add those of a span of rows; `rows` are the results of all rows, over all the keys that they see."""
        grad_out, query, out, logsumexp = (t.narrow(2, span.first, span.rows) for t in (grad_out, query, *rows))
        for start, count, causal in span.parts():
            keys, values = key.narrow(2, start, count), value.narrow(2, start, count)
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, query, keys, values, out, logsumexp, 0.0, causal, scale=scale
            )
            self.query.narrow(2, span.first, span.rows).add_(grads[0])
            self.key.narrow(2, start, count).add_(grads[1])
            self.value.narrow(2, start, count).add_(grads[2])

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return them in the type of what they are gradients of."""
        return self.query.to(dtype), self.key.to(dtype), self.value.to(dtype)


def _by_time(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty [B, H, T, D] or [B, H, T] with time outside of heads in memory."""
    return torch.empty_like(like.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format).transpose(1, 2)


def spans(index: int, parts: int, blocks: Sequence[int], columns: int) -> list[Span]:
    """Return what a rank's part of each block of the rows sees of `columns` keys."""
    found, begin, first = [], 0, 0
    for size in blocks:
        rows = size // parts
        row = begin + rows * index
        whole = min(row, columns)
        found.append(Span(first, rows, whole, min(rows, columns - whole)))
        begin, first = begin + size, first + rows
    return found


def _causal_rows(
    query: Tensor, key: Tensor, value: Tensor, where: Tensor, parts: int, blocks: Sequence[int], scale: float | None
) -> Rows:
    mine = spans(int(where), parts, blocks, key.shape[2])
    return join([attend(query, key, value, span, scale) for span in mine])


def _causal_rows_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    where: Tensor,
    parts: int,
    blocks: Sequence[int],
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = Gradients(query, key, value, logsumexp)
    for span in spans(int(where), parts, blocks, key.shape[2]):
        gradients.add(grad_out, query, key, value, (out, logsumexp), span, scale)
    return gradients.result(query.dtype)


def turn_spans(
    index: int, turn: int, parts: int, blocks: Sequence[int], columns: int, *, is_causal: bool
) -> list[Span]:
    """Return what a rank's rows see of the keys that it has at a turn: `columns` of them, in blocks as the rows are."""
    if not is_causal:
        return [Span(0, sum(blocks) // parts, columns)]
    owner, found, first = (index - turn) % parts, [], 0
    for size in blocks:
        rows = size // parts  # of each block, those of lower ranks come first
        found.append(Span(first, rows, first + (rows if owner < index else 0), rows if owner == index else 0))
        first += rows
    return found


def _apart(query: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    width = query.shape[3]
    return pair[..., :width], pair[..., width:]


def _ring_rows(
    query: Tensor,
    pair: Tensor,
    out: Tensor | None,
    logsumexp: Tensor | None,
    where: Tensor,
    turn: int,
    parts: int,
    blocks: Sequence[int],
    is_causal: bool,
    scale: float | None,
) -> Rows:
    key, value = _apart(query, pair)
    found, is_more = [], False
    for span in turn_spans(int(where), turn, parts, blocks, key.shape[2], is_causal=is_causal):
        more = attend(query, key, value, span, scale)
        is_more |= more is not None
        have = None
        if out is not None and logsumexp is not None:
            have = out.narrow(2, span.first, span.rows), logsumexp.narrow(2, span.first, span.rows)
        found.append(merge(have, more))
    out, logsumexp = join(found)
    return (out, logsumexp) if is_more else (out.clone(), logsumexp.clone())  # nothing is returned that came in


def _ring_rows_backward(
    grad_out: Tensor,
    query: Tensor,
    pair: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    where: Tensor,
    turn: int,
    parts: int,
    blocks: Sequence[int],
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    key, value = _apart(query, pair)
    gradients = Gradients(query, key, value, logsumexp)
    for span in turn_spans(int(where), turn, parts, blocks, key.shape[2], is_causal=is_causal):
        gradients.add(grad_out, query, key, value, (out, logsumexp), span, scale)
    of_query, of_key, of_value = gradients.result(query.dtype)
    return of_query, torch.cat([of_key, of_value], 3)


def _fake_rows(query: Tensor, *_: object) -> Rows:
    wide = torch.promote_types(query.dtype, torch.float32)
    return _by_time(query, query.dtype), _by_time(query[..., 0], wide)


def _fake_causal_rows_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _by_time(query, query.dtype), _by_time(key, key.dtype), _by_time(value, value.dtype)


def _fake_ring_rows_backward(grad_out: Tensor, query: Tensor, pair: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _by_time(query, query.dtype), torch.empty_like(pair, memory_format=torch.contiguous_format)


for _name, _kernel, _fake in (
    ("causal_rows", _causal_rows, _fake_rows),
    ("causal_rows_backward", _causal_rows_backward, _fake_causal_rows_backward),
    ("ring_rows", _ring_rows, _fake_rows),
    ("ring_rows_backward", _ring_rows_backward, _fake_ring_rows_backward),
):
    _LIBRARY.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"paceline::{_name}", _fake, lib=_LIBRARY)
