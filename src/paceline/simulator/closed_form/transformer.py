"""The workload of a described Transformer: no module, no capture, one formula for each amount.

Numbers or arrays describe it: arrays, with one entry for each model, give a workload of many models at once, as
published measurements need. What backward passes keep follows Korthikanti et al. 2022 (arXiv 2205.05198): a layer of
GPT in half precision keeps s b h (34 + 5 a s / h) bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paceline.simulator.workload import (
    Along,
    Amount,
    Block,
    Collective,
    Kind,
    Message,
    Numbers,
    Pass,
    Precision,
    Recompute,
    Scalar,
    Work,
    Workload,
)

HALF = 2.0
"""Bytes of an element of an activation."""

SAMPLE = frozenset({Along.BATCH, Along.SP})
SPLIT = SAMPLE | {Along.TP}
REGION = SAMPLE | {Along.REGION}
WHOLE: frozenset[Along] = frozenset()
FEATURES = frozenset({Along.TP})


@dataclass(frozen=True)
class Shape:
    """A described Transformer; each size is a number, or an array with one entry for each model.

    Attributes:
        layers, hidden, heads, sequence, vocabulary: as usual.
        kv_heads: of keys and values.
        ffn: inner features of the feed-forward network.
        gated: its activation is a product of two projections (SwiGLU).
        biases: projections add vectors.
        fused: attention never writes its scores (flash attention).
        causal: positions see those before them alone, and fused attention leaves the others out.
        tied: the head reads the embedding's table.
        dropout: there is some, so masks are kept.
        positions: learned ones.
        scattered: ranks of `tp` send a part each of what goes to the next stage, which gathers it.
    """

    layers: Numbers
    hidden: Numbers
    heads: Numbers
    sequence: Numbers
    vocabulary: Numbers
    kv_heads: Numbers
    ffn: Numbers
    gated: bool
    biases: bool
    fused: bool
    causal: bool
    tied: bool
    dropout: bool
    positions: Numbers
    scattered: bool

    @property
    def head(self) -> Numbers:
        """Elements of one head."""
        return self.hidden / self.heads

    @property
    def kv(self) -> Numbers:
        """Features of keys, and of values."""
        return self.kv_heads * self.head

    @property
    def tokens(self) -> Numbers:
        """Elements of a sample's activations, for one feature."""
        return self.sequence

    @property
    def scores(self) -> Numbers:
        """Elements of a sample's attention scores."""
        return self.heads * self.sequence**2


def transformer(
    *,
    layers: Scalar,
    hidden: Scalar,
    heads: Scalar,
    sequence: Scalar,
    vocabulary: Scalar,
    kv_heads: Scalar | None = None,
    ffn: Scalar | None = None,
    gated: bool = False,
    biases: bool = True,
    fused: bool = True,
    causal: bool = True,
    tied: bool = True,
    dropout: bool = False,
    positions: Scalar = 0,
    scattered: bool = False,
    precision: Precision | None = None,
    name: str = "transformer",
) -> Workload:
    """Return the workload of a Transformer that reads and predicts tokens.

    GPT-2 and GPT-3 are the defaults with `dropout=True`; Megatron before flash attention also has `fused=False`; Llama
    has `kv_heads`, `ffn`, `gated=True`, `biases=False`, `tied=False`. An encoder has `causal=False`.
    """

    def number(value: Scalar) -> Numbers:
        return np.asarray(value, dtype=np.float64)

    hidden, heads = number(hidden), number(heads)
    shape = Shape(
        layers=number(layers),
        hidden=hidden,
        heads=heads,
        sequence=number(sequence),
        vocabulary=number(vocabulary),
        kv_heads=heads if kv_heads is None else number(kv_heads),
        ffn=4 * hidden if ffn is None else number(ffn),
        gated=gated,
        biases=biases,
        fused=fused,
        causal=causal,
        tied=tied,
        dropout=dropout,
        positions=number(positions),
        scattered=scattered,
    )
    return Workload(
        name=name,
        blocks=(_embedding(shape), _layer(shape), _head(shape)),
        tokens=shape.sequence,
        precision=precision or Precision(),
        divisors=_divisors(shape),
    )


def _divisors(shape: Shape) -> dict[Along, int]:
    """Return what heads and the sequence divide by, where all models agree; nothing where they do not."""
    sizes = {Along.TP: shape.kv_heads, Along.SP: shape.sequence}
    return {along: int(size) for along, size in sizes.items() if size.ndim == 0}


def _products(rows: Amount, columns: Amount, inner: Amount, bytes_: float = HALF) -> list[Work]:
    """Return a product with weights, and the two of its backward pass."""
    return [
        Work(Kind.PRODUCT, Pass.FORWARD, (rows, columns, inner)),
        Work(Kind.PRODUCT, Pass.BACKWARD, (rows, inner, columns)),
        Work(Kind.PRODUCT, Pass.BACKWARD, (columns, inner, rows)),
    ]


def _touch(when: Pass, nbytes: Scalar, along: frozenset[Along], launches: float, *, selective: bool = False) -> Work:
    return Work(Kind.TOUCH, when, nbytes=Amount(nbytes, along), selective=selective, launches=launches)


def _pointwise(elements: Scalar, along: frozenset[Along], forward: float, backward: float, calls: float) -> list[Work]:
    """Return elementwise work that reads and writes so many half-precision values for each element."""
    return [
        _touch(Pass.FORWARD, HALF * forward * np.asarray(elements), along, calls),
        _touch(Pass.BACKWARD, HALF * backward * np.asarray(elements), along, calls + 1),
    ]


def _attention(shape: Shape) -> list[Work]:
    """Return softmax(Q K') V and its backward pass."""
    heads = Amount(shape.heads, frozenset({Along.BATCH, Along.TP}))
    queries = Amount(shape.sequence, frozenset({Along.SP}))
    keys, size = Amount(shape.sequence), Amount(shape.head)
    if shape.fused:
        share = 0.5 if shape.causal else 1.0
        dims = (queries, keys, size)
        return [
            Work(Kind.ATTENTION, Pass.FORWARD, dims, heads, 4 * share, selective=True),
            Work(Kind.ATTENTION, Pass.BACKWARD, dims, heads, 10 * share, launches=3),
        ]
    # scores, mask and softmax in one call, dropout in another; each is written once and read once
    passes = 4.5 if shape.dropout else 2.0
    scores = HALF * shape.scores
    forward = [
        Work(Kind.PRODUCT, Pass.FORWARD, (queries, keys, size), heads, selective=True),
        Work(Kind.PRODUCT, Pass.FORWARD, (queries, size, keys), heads, selective=True),
        _touch(Pass.FORWARD, passes * scores, SPLIT, 2 + shape.dropout, selective=True),
    ]
    backward = [
        Work(Kind.PRODUCT, Pass.BACKWARD, dims, heads)
        for dims in ((queries, keys, size), (keys, size, queries), (queries, size, keys), (keys, size, queries))
    ]
    return [*forward, *backward, _touch(Pass.BACKWARD, (passes + 1) * scores, SPLIT, 3)]


def _layer(shape: Shape) -> Block:
    s, h, ffn = shape.tokens, shape.hidden, shape.ffn
    rows, features = Amount(s, SAMPLE), Amount(h)
    qkv, inner = Amount(h + 2 * shape.kv, FEATURES), Amount(ffn, FEATURES)
    work = [
        *_pointwise(s * h, REGION, 2, 4, 1),  # norm
        *_products(rows, qkv, features),
        *_attention(shape),
        *_products(rows, features, Amount(h, FEATURES)),
        *_pointwise(s * h, REGION, 3 + shape.dropout * 0.5, 2, 1 + shape.dropout),  # bias, dropout, residual
        *_pointwise(s * h, REGION, 2, 4, 1),
        *_products(rows, inner, features),
        *(_products(rows, inner, features) if shape.gated else ()),
        *_pointwise(s * ffn, SPLIT, 3 if shape.gated else 2, 5 if shape.gated else 3, 1),
        *_products(rows, features, inner),
        *_pointwise(s * h, REGION, 3 + shape.dropout * 0.5, 2, 1 + shape.dropout),
    ]
    summed = Amount(HALF * s * h, SAMPLE)
    messages = [
        *(Message(Collective.ALL_REDUCE, Along.TP, summed, when) for when in (Pass.FORWARD, Pass.BACKWARD) * 2),
        *_gathered_keys(shape),
    ]
    return Block(
        name="layers.*",
        count=shape.layers,
        work=tuple(work),
        messages=tuple(messages),
        parameters=tuple(_layer_parameters(shape)),
        kept=_layer_kept(shape),
        output=Amount(HALF * s * h, SPLIT if shape.scattered else REGION),
    )


def _gathered_keys(shape: Shape) -> Iterable[Message]:
    """Return what ranks that split time exchange: keys and values of all, and gradients of them."""
    both = Amount(HALF * 2 * shape.sequence * shape.kv, frozenset({Along.BATCH, Along.TP}))
    yield Message(Collective.ALL_GATHER, Along.SP, both, Pass.FORWARD)
    yield Message(Collective.ALL_GATHER, Along.SP, both, Pass.BACKWARD)
    yield Message(Collective.REDUCE_SCATTER, Along.SP, both, Pass.BACKWARD)


def _layer_parameters(shape: Shape) -> Iterable[Amount]:
    h, ffn, kv = shape.hidden, shape.ffn, shape.kv
    yield Amount(h * (h + 2 * kv) + h * h + (3 if shape.gated else 2) * h * ffn, FEATURES)
    if shape.biases:
        yield Amount(h + 2 * kv + ffn, FEATURES)
        yield Amount(6 * h)  # of two projections, and two norms with a shift
    else:
        yield Amount(2 * h)


def _layer_kept(shape: Shape) -> dict[Recompute, tuple[Amount, ...]]:
    s, h, ffn = shape.tokens, shape.hidden, shape.ffn
    masks = 2.0 if shape.dropout else 0.0
    # inputs of both norms and of the first projection after each; masks of both dropouts
    region = Amount((HALF * 4 + masks) * s * h, REGION)
    attention = HALF * s * (2 * h + 2 * shape.kv)  # queries, keys, values, and what attention returns
    features = Amount(attention + HALF * s * ffn * (3 if shape.gated else 2), SPLIT)
    if shape.fused:
        scores = Amount(4.0 * shape.heads * s, SPLIT)  # a sum for each row
    else:
        scores = Amount((2 * HALF + 1 if shape.dropout else HALF) * shape.scores, SPLIT)
    return {
        Recompute.NONE: (region, features, scores),
        Recompute.SELECTIVE: (region, features),
        Recompute.FULL: (Amount(HALF * s * h, REGION),),
    }


def _embedding(shape: Shape) -> Block:
    s, h = shape.tokens, shape.hidden
    work = [
        *_pointwise(s * h, SAMPLE, 2, 3, 2),
        *(_pointwise(s * h, REGION, 2.5, 2.5, 1) if shape.dropout else ()),
    ]
    kept = (Amount(8.0 * s, SAMPLE), *((Amount(s * h, REGION),) if shape.dropout else ()))
    return Block(
        name="embedding",
        count=1,
        work=tuple(work),
        messages=(Message(Collective.ALL_REDUCE, Along.TP, Amount(HALF * s * h, SAMPLE), Pass.FORWARD),),
        parameters=(Amount(shape.vocabulary * h, FEATURES), Amount(shape.positions * h)),
        kept=dict.fromkeys(Recompute, kept),
        output=Amount(HALF * s * h, SPLIT if shape.scattered else REGION),
    )


def _head(shape: Shape) -> Block:
    """Return the last norm, the logits and the loss, in single precision."""
    s, h, vocabulary = shape.tokens, shape.hidden, shape.vocabulary
    work = [
        *_pointwise(s * h, REGION, 2, 4, 1),
        *_products(Amount(s, SAMPLE), Amount(vocabulary, FEATURES), Amount(h)),
        *_pointwise(s * vocabulary, SPLIT, 11, 5, 6),
    ]
    sums = Amount(4.0 * s, SAMPLE)
    messages = [
        *(Message(Collective.ALL_REDUCE, Along.TP, sums, Pass.FORWARD) for _ in range(3)),
        Message(Collective.ALL_REDUCE, Along.TP, Amount(HALF * s * h, SAMPLE), Pass.BACKWARD),
    ]
    kept = (
        Amount(HALF * 2 * s * h, REGION),
        Amount(4.0 * s * vocabulary, SPLIT),
    )
    norm = Amount((2.0 if shape.biases else 1.0) * h)
    table = (Amount(vocabulary * h, FEATURES),)
    return Block(
        name="head",
        count=1,
        work=tuple(work),
        messages=tuple(messages),
        parameters=(norm,) if shape.tied else (norm, *table),
        kept=dict.fromkeys(Recompute, kept),
        output=Amount(4.0),
        workspace=Amount(HALF * s * vocabulary, SPLIT),  # logits, before they are cast
        shared=table if shape.tied else (),
    )
