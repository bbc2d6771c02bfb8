"""What a published figure says in seconds or bytes: tokens, samples, FLOP/s and shares of a peak turned into time."""

from __future__ import annotations

from paceline.bench.predictions.configurations import Configuration
from paceline.bench.predictions.readings import Quantity
from paceline.bench.predictions.samples import Sample
from paceline.cluster.cluster import Cluster
from paceline.simulator.workload import Recompute


def measured(sample: Sample, cluster: Cluster) -> float:
    """Return seconds of a step, bytes, or a share of activations: what predictions are compared with.

    A share of the peak refers to products in half precision, as publications count it even where products are in
    8 bits.
    """
    configuration, reading = sample.configuration, sample.reading
    split, tokens = configuration.split, configuration.model.sequence
    if reading.quantity.is_memory or reading.quantity is Quantity.STEP:
        return reading.value
    if reading.quantity is Quantity.DAYS:
        return reading.value * split.batch * tokens
    hardware = configuration.practice.hardware_flops or reading.quantity is Quantity.HARDWARE_SHARE
    work = {
        Quantity.TOKENS: split.batch * tokens,
        Quantity.TOKENS_EACH: split.batch * tokens / split.gpus,
        Quantity.SAMPLES: split.batch,
        Quantity.SAMPLES_EACH: split.batch / split.gpus,
    }.get(reading.quantity)
    if work is None:
        work = flops(configuration, hardware="hardware" in sample.row.text("metric").lower() or hardware)
        if reading.quantity is not Quantity.FLOPS:
            work /= split.gpus
    if reading.quantity in (Quantity.MODEL_SHARE, Quantity.HARDWARE_SHARE):
        peaks = cluster.slowest.device.peak
        work /= peaks.get("bfloat16", max(peaks.values()))
    return work / reading.value


def flops(configuration: Configuration, *, hardware: bool = False) -> float:
    """Return the operations of a step as publications count them: attention in full, backward passes twice forward.

    Narayanan et al. 2021, appendix: 96 B s l h^2 (1 + s / 6h + V / 16 l h) with all layers computed again.
    """
    model = configuration.model
    head = model.hidden // model.heads
    projections = 2 * model.hidden * (2 * model.hidden + 2 * model.kv_heads * head)
    network = 2 * (3 if model.gated else 2) * model.hidden * model.ffn
    attention = 4 * model.sequence * model.hidden
    again = 0
    if hardware:
        again = {
            Recompute.NONE: 0,
            Recompute.SELECTIVE: attention,
            Recompute.FULL: projections + network + attention,
        }[configuration.recompute]
    layers = model.layers * (3 * (projections + network + attention) + again)
    vocabulary = 3 * 2 * model.hidden * model.vocabulary
    return float(configuration.split.batch * model.sequence * (layers + vocabulary))
