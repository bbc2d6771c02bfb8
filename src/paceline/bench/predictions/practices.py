"""What a publication does not repeat in each row: how its software runs a step, by its source.

Each practice says in which sources it applies and what is known of that software at that time. What a row says itself,
in its columns or in the flags of its notes, goes before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.bench.predictions.rows import Row


@dataclass(frozen=True)
class Practice:
    """How one kind of software runs a step.

    Attributes:
        name: under which its rows are shown.
        sources: of which one occurs in a row's source or system, in lower case.
        fused: attention never writes its scores.
        dropout: masks are drawn and kept; None: as the family has it.
        gated: the feed-forward network is gated; None: as the family of the model has it.
        biases: projections add vectors; None: as the family has it.
        tied: the head reads the embedding's table; None: as the family has it.
        positions: learned ones; None: as the family has it.
        regions: norms between split layers are split along the sequence wherever features are.
        zero: what replicas split where a row does not say.
        overlap: sums of gradients run beside the backward pass.
        hardware_flops: FLOP/s count recomputation.
        pads: the vocabulary is padded to a multiple of 128 for each part of features.
        pads_alone: it is so where features are not split, too.
        vocabulary: words, where a row does not say.
        interleaves: pipelines that do not say have a stage for each layer.
        scattered: as in `simulator.closed_form.transformer`.
        last_rank: memory is the last rank's, not the highest.
        workspaces: the libraries' own buffers are part of memory (cuBLAS, Transformer Engine).
        layers_alone: memory is that of the layers, without embedding and head.
        precision: of products, where a row does not say.
        gradient: bytes for each element of a gradient.
        local_batch: without a global batch, a step is one micro-batch on each replica.
    """

    name: str
    sources: tuple[str, ...]
    fused: bool = True
    dropout: bool | None = False
    gated: bool | None = None
    biases: bool | None = None
    tied: bool | None = None
    positions: bool | None = None
    regions: bool = True
    zero: int = 1
    overlap: bool = True
    hardware_flops: bool = False
    pads: bool = True
    pads_alone: bool = True
    vocabulary: int = 51200
    interleaves: bool = False
    scattered: bool = False
    last_rank: bool = False
    workspaces: bool = False
    layers_alone: bool = False
    precision: str = "bf16"
    gradient: float = 4.0
    local_batch: bool = False


# Megatron-LM before 2022: scores are written, dropout is on, replicas hold everything, norms are not split.
_EARLY = Practice("", (), fused=False, dropout=True, regions=False, zero=0, overlap=False)
# Gradients are summed in half precision. vTrain names no vocabulary: its runs without split features take as long as
# products with the 50257 columns of GPT-2 would, which fill no vector of 8 elements, and the others do not.
PRACTICES = (
    replace(
        _EARLY,
        name="Megatron-LM 2021",
        sources=("2104.04473", "cases_april2021"),
        hardware_flops=True,
        scattered=True,
        gradient=2.0,
    ),
    replace(_EARLY, name="Korthikanti 2022", sources=("2205.05198", "korthikanti"), scattered=True, layers_alone=True),
    replace(
        _EARLY,
        name="vTrain",
        sources=("vtrain",),
        vocabulary=50257,
        pads_alone=False,
        scattered=True,
        gradient=2.0,
    ),
    replace(_EARLY, name="Zero Bubble", sources=("zero bubble",)),
    Practice(
        "Megatron-LM CI",
        ("tests/functional_tests",),
        fused=True,
        dropout=True,
        gated=False,
        biases=True,
        tied=True,
        positions=True,
        regions=False,
        zero=0,
        overlap=False,
        vocabulary=50257,
        last_rank=True,
        workspaces=True,
    ),
    Practice("Megatron-Core README", ("megatron-core r0", "model_table"), vocabulary=131072),
    Practice("DGXC", ("dgxc",), dropout=None, interleaves=True, gradient=2.0),
    Practice(
        "NeMo",
        ("nemo", "megatron-bridge", "megatron bridge"),
        dropout=None,
        interleaves=True,
        precision="fp8",
        gradient=2.0,
    ),
    Practice("MosaicML", ("mosaicml", "llm-foundry"), biases=False, tied=True, positions=False, zero=3, pads=False),
    Practice("torchtitan", ("torchtitan",), zero=3, pads=False, local_batch=True),
    Practice("MegaScale", ("megascale",), overlap=False),
)
OTHERS = Practice("other sources", ())
"""Of sources that nothing is known of: software as it is now."""


def practice_of(row: Row) -> Practice:
    """Return how the software of a row's source runs a step."""
    about = f"{row.text('source')} {row.text('system')}".lower()
    return next((one for one in PRACTICES if any(name in about for name in one.sources)), OTHERS)
